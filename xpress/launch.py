"""How a run is started and stopped: one accelerate object for one process, DDP, or FSDP2, as the launcher says; and
Ctrl-C and SIGTERM, which wait for the end of a step."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy


def make_accelerator(precision: str, cpu: bool) -> Accelerator:
    """Sharding is asked for as `accelerate launch --use_fsdp` does, by ACCELERATE_USE_FSDP=true; version 2 is taken.

    The trainee is sharded as a whole: its parts read each other's weights (the loss the readout, attention the keys of
    the context), so they are gathered once a step. Gradients, moments and fp32 weights are what sharding saves.
    """
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if wanted else None
    if plugin is not None:
        plugin.cpu_ram_efficient_loading = False
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, fsdp_plugin=plugin)
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate shards on GPUs only; torch's FSDP2 runs on gloo as well, which is how it is tested without one
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if plugin is not None:
        # accelerate's policy would round outputs, and with them the losses, to bf16; autocast does without that
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
    return accelerator


@contextmanager
def interrupts():
    """Yields a list that fills when Ctrl-C or SIGTERM arrives, so that a step is never cut in two. The second Ctrl-C
    acts at once."""
    asked: list[int] = []

    def note(number, frame):
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    main = threading.current_thread() is threading.main_thread()  # elsewhere Python takes no handlers
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

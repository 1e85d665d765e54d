"""Peak memory: what a GPU's allocator handed out at most, or on a Linux CPU the most that the process held."""

from __future__ import annotations

from pathlib import Path

import torch

PROCESS = Path("/proc/self")


def reset_peak(device):
    """The peak is counted anew from here."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        try:
            (PROCESS / "clear_refs").write_text("5")
        except OSError:  # not Linux, or not allowed
            pass


def peak(device) -> int | None:
    """Bytes at the peak since `reset_peak`; None where the system does not tell."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = (PROCESS / "status").read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None

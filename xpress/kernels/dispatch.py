"""The one dispatch: Triton for CUDA tensors, the reference elsewhere.

XPRESS_KERNELS=triton or =reference in the environment forces one of the two, `with use("triton"):` does so for a part
of the code. Signatures and meaning are those of the references, which stand beside the kernels' launchers; Triton
itself is imported on the first launch.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from xpress.kernels import readout_argmax as _argmax
from xpress.kernels import readout_sample as _sample
from xpress.kernels import refiner_latent as _latent
from xpress.kernels import screening as _screening
from xpress.kernels.readout_sample import Drawn
from xpress.kernels.refiner_latent import Folded
from xpress.kernels.screen import Screen

_NAMES = ("auto", "triton", "reference")
_forced: ContextVar[str | None] = ContextVar("kernels", default=None)


def _known(name: str, where: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"{where}={name!r}: kernels are {', '.join(_NAMES)}")
    return name


@contextmanager
def use(name: str):
    """Kernels of the code inside: 'triton', 'reference' or 'auto'. Raises ValueError for another name."""
    before = _forced.set(_known(name, "use"))
    try:
        yield
    finally:
        _forced.reset(before)


def backend(tensor: Tensor, weight: Tensor | None = None) -> str:
    """'triton' or 'reference' for work on this tensor, with a readout or table [V,R] if one is given: ranks and number
    types that the kernels do not take go to the reference, unless Triton is forced."""
    name = _forced.get() or _known(os.environ.get("XPRESS_KERNELS", "auto"), "XPRESS_KERNELS")
    if name != "auto":
        return name
    return "triton" if tensor.is_cuda and (weight is None or _argmax.fits(tensor, weight)) else "reference"


def fewest_columns(tensor: Tensor) -> int:
    """The least R that the readouts take: with that many columns of zeros they give the base logits' own answer."""
    return 16 if backend(tensor) == "triton" else 0


def _pick(tensor: Tensor, weight: Tensor, kernel, reference):
    return kernel if backend(tensor, weight) == "triton" else reference


def readout_argmax(base: Tensor, latent: Tensor, weight: Tensor, ids: Tensor | None = None, **rows) -> Tensor:
    """Token ids [N,G] of argmax over v of float32(base) + latent·weight[v]: see readout_argmax_ref."""
    return _pick(base, weight, _argmax.readout_argmax, _argmax.readout_argmax_ref)(base, latent, weight, ids, **rows)


def readout_sample(base: Tensor, latent: Tensor, weight: Tensor, ids: Tensor | None = None, **rows) -> Drawn:
    """One draw a row from softmax(ℓ/T), its ℓ/T and the row's log-sum: see readout_sample_ref."""
    return _pick(base, weight, _sample.readout_sample, _sample.readout_sample_ref)(base, latent, weight, ids, **rows)


def screened_argmax(base: Tensor, latent: Tensor, weight: Tensor, screen: Screen, ids=None, **rows) -> Tensor:
    """readout_argmax's ids (with address= readout_sample's) from a copy of the readout: see screened_argmax_ref."""
    pick = _pick(base, weight, _screening.screened_argmax, _screening.screened_argmax_ref)
    return pick(base, latent, weight, screen, ids, **rows)


def q_row(base: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    """ℓ in fp32 of single rows: see q_row_ref."""
    return _pick(base, weight, _sample.q_row, _sample.q_row_ref)(base, latent, weight)


def refiner_latent(constant: Tensor, folded: Folded, draft: Tensor, num_known: int, **rows) -> Tensor:
    """z [N,G,R] of the folded refiner for draft tokens [N,G]: see refiner_latent_ref."""
    pick = _pick(draft, folded.table, _latent.refiner_latent, _latent.refiner_latent_ref)
    return pick(constant, folded, draft, num_known, **rows)

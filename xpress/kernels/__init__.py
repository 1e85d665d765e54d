"""The kernels, the refine step made of them, and its capture. Which implementation runs: dispatch.py."""

from xpress.kernels.dispatch import (
    backend,
    fewest_columns,
    q_row,
    readout_argmax,
    readout_sample,
    refiner_latent,
    screened_argmax,
    use,
)
from xpress.kernels.graphs import Graphs
from xpress.kernels.readout_sample import Drawn
from xpress.kernels.refiner_latent import Folded
from xpress.kernels.rows import UNSET, pack, unpack, values
from xpress.kernels.screen import Screen, Screened
from xpress.kernels.step import Refined, RefineStep
from xpress.kernels.top_c import TopC, top_c

__all__ = ["UNSET", "Drawn", "Folded", "backend", "fewest_columns", "pack", "q_row", "readout_argmax", "readout_sample"]
__all__ += ["Screen", "Screened", "TopC", "refiner_latent", "screened_argmax", "top_c", "unpack", "use", "values"]
__all__ += ["Graphs", "RefineStep", "Refined"]

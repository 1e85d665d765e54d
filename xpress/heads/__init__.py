"""Correction heads. The import path is the registry: `_target_: xpress.heads.refiner.Refiner`."""

from xpress.heads.base import CorrectionHead
from xpress.heads.confidence import ConfidenceHead
from xpress.heads.domino import DominoHead
from xpress.heads.markov import GatedMarkovHead, MarkovHead, RNNMarkovHead
from xpress.heads.refiner import FoldedRefiner, Refiner

__all__ = [
    "ConfidenceHead",
    "CorrectionHead",
    "DominoHead",
    "FoldedRefiner",
    "GatedMarkovHead",
    "MarkovHead",
    "RNNMarkovHead",
    "Refiner",
]

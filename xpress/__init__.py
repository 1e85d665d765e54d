"""xpress: correction heads for block-diffusion speculative decoding, trained and measured.

target = xpress.Target.from_pretrained("…")
found = xpress.load("pretrained/smollm2_xpress_b8", target)
response = xpress.generate(target, prompt_ids, found.drafter, found.head, passes=4, max_new_tokens=64)
"""

from xpress.block import INFILL, NEXT, Block, target_index
from xpress.checkpoint import Checkpoint, save
from xpress.decode import Response, Round, decode, generate
from xpress.draft import Draft
from xpress.drafter import Context, DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.heads import ConfidenceHead, CorrectionHead, DominoHead, GatedMarkovHead, MarkovHead, Refiner, RNNMarkovHead
from xpress.hub import push_to_hub
from xpress.interop import convert, load
from xpress.lengths import ByConfidence
from xpress.refine import refine
from xpress.sampling import GREEDY, Noise, Sampling
from xpress.target import Target
from xpress.verify import Verdict, verify

__version__ = "0.1.0"
__all__ = [
    "Block",
    "ByConfidence",
    "Checkpoint",
    "ConfidenceHead",
    "Context",
    "CorrectionHead",
    "DFlashDrafter",
    "DominoHead",
    "Draft",
    "DrafterConfig",
    "GREEDY",
    "GatedMarkovHead",
    "INFILL",
    "MarkovHead",
    "NEXT",
    "Noise",
    "RNNMarkovHead",
    "Refiner",
    "Response",
    "Round",
    "Sampling",
    "Target",
    "Verdict",
    "convert",
    "decode",
    "generate",
    "load",
    "push_to_hub",
    "refine",
    "save",
    "target_index",
    "verify",
]

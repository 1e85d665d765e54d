"""The same laws on a CUDA device: python -m pytest -m gpu. Left out of the default run."""

import pytest
import torch
from toys import HEADS, ToyTokenizer, make_drafter, make_head, make_model, plain

from xpress.anchors import Batch, draw, lay_out
from xpress.decode import generate
from xpress.evaluate import Method, respond
from xpress.features import OnlineFeatures
from xpress.loss import Term
from xpress.sampling import Sampling
from xpress.target import Target
from xpress.trainee import Trainee

pytestmark = pytest.mark.gpu
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def cuda_target():
    return Target(make_model("llama").to("cuda"), ToyTokenizer(), name="toy-cuda")


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("passes", [0, 2, "auto", "sequential"])
def test_output_is_the_targets_own(cuda_target, name, passes):
    drafter = make_drafter(cuda_target).to("cuda")
    head = make_head(name, drafter).to("cuda")
    response = generate(cuda_target, PROMPT, drafter, head, passes, max_new_tokens=24)
    assert response.ids == plain(cuda_target, PROMPT, 24)


def test_rows_of_a_batch_are_what_they_are_alone(cuda_target):
    """Different prompts, each row with its own times, probes and peak memory."""
    drafter = make_drafter(cuda_target).to("cuda")
    head, prompts = make_head("refiner", drafter).to("cuda"), [PROMPT, [8], [4, 4, 9, 2, 7]]
    method = Method("refiner", "head", drafter, head, "auto")
    for (response, counts), prompt in zip(respond(cuda_target, prompts, method, max_new_tokens=16), prompts):
        assert response.ids == plain(cuda_target, prompt, 16)
        assert counts.memory > 0 and set(counts.time) == {"draft", "readout", "refine", "verify", "harness"}
        assert all(spent >= 0 for spent in counts.time.values()) and sum(counts.probe["rounds"]) > 0


def test_noise_is_the_cpus(cuda_target):
    """Counter-based noise and inversion in fp64: the same sample on every device, up to rounding of the logits."""
    drafter = make_drafter(cuda_target).to("cuda")
    head = make_head("refiner", drafter).to("cuda")
    settings = dict(passes=2, max_new_tokens=16, sampling=Sampling(1.0), seed=3)
    first = generate(cuda_target, PROMPT, drafter, head, **settings)
    assert first.ids == generate(cuda_target, PROMPT, drafter, head, **settings).ids


def test_a_training_step_is_finite(cuda_target):
    drafter = make_drafter(cuda_target, scale=1.0).to("cuda")
    trainee = Trainee(drafter, make_head("refiner", drafter).to("cuda"), [Term("gold", "gold"), Term("base", "none")])
    ids = torch.randint(3, 90, (2, 24))
    places, names = torch.arange(24).repeat(2, 1), [("a",), ("b",)]
    one_document, all_ours = torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, places, one_document, all_ours, names).to("cuda")
    anchors = lay_out(batch, *draw(batch, 4, 0, 0), drafter.config.num_draft)
    features, log_norm = OnlineFeatures(cuda_target, drafter.layer_ids, False)(batch)
    scale = (1 / trainee.weight_sums(anchors)).tolist()
    trainee(batch, anchors, features, log_norm, scale).total.backward()
    assert all(torch.isfinite(p.grad).all() for p in trainee.parameters() if p.grad is not None)

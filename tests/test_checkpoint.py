"""Checkpoints: everything comes back, nothing is written or read in part, and every refusal names its cause."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from disk import published_drafter
from safetensors.torch import load_file, save_file
from toys import HEADS, D, V, make_drafter, make_head, make_target, plain

from xpress import checkpoint, generate, load, parts, save
from xpress.checkpoint import CONFIG, PROVENANCE, WEIGHTS
from xpress.data import Row
from xpress.features import OnlineFeatures
from xpress.heads import Refiner
from xpress.loss import Term
from xpress.train import Run, TrainSettings
from xpress.trainee import Trainee

PROMPT = [5, 17, 44, 3, 61, 80, 9]
NAMES = [None, *HEADS]


def toy_head(name, drafter):
    return None if name is None else make_head(name, drafter)


def tokens(target, found, prompt=PROMPT):
    return generate(target, prompt, found.drafter, found.head, "auto", max_new_tokens=16)


@pytest.fixture
def saved(target, tmp_path):
    """A small checkpoint with a Markov head, on disk."""
    drafter = make_drafter(target)
    save(tmp_path / "c", drafter, make_head("markov", drafter), {"target": {"fingerprint": target.fingerprint()}})
    return tmp_path / "c"


def rewrite(folder, change):
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def rewrite_config(folder, change):
    """Apply `change` to the head's section of a checkpoint's config."""
    config = json.loads((folder / CONFIG).read_text())
    change(config["head"])
    (folder / CONFIG).write_text(json.dumps(config))


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["infill", "next"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_gives_the_same_tensors_and_tokens(tmp_path, name, layout, dtype):
    target = make_target(dtype=dtype, tie_word_embeddings=layout == "next")
    drafter = make_drafter(target, layout=layout, feature_scale=(2.0, 0.125))
    head = toy_head(name, drafter)
    save(tmp_path / "run" / "checkpoint", drafter, head, {"recipe": {"lr": 0.1}})
    found = load(tmp_path / "run", target, dtype)  # a run's folder is as good as the checkpoint in it
    assert found.provenance == {"recipe": {"lr": 0.1}} and found.path == tmp_path / "run" / "checkpoint"
    assert found.drafter.config == drafter.config
    for ours, theirs in ((drafter, found.drafter), (head, found.head)):
        if ours is not None:
            assert type(ours) is type(theirs) and not theirs.training
            for key, weight in ours.state_dict().items():
                assert torch.equal(weight, theirs.state_dict()[key]), key
    assert (head is None) == (found.head is None) and (head is None or head.config == found.head.config)
    assert tokens(target, found) == tokens(target, checkpoint.Checkpoint(drafter, head, {}, None))


@pytest.mark.parametrize("off", ["use_h", "use_g", "use_mixer", "use_mlp"])
def test_a_refiner_without_a_part_comes_back_without_it(target, tmp_path, off):
    drafter = make_drafter(target)
    sizes = checkpoint.head_sizes(drafter.config)
    head = Refiner(**sizes, rank=8, **{off: False})
    save(tmp_path / "c", drafter, head)
    found = load(tmp_path / "c", target).head
    assert getattr(found, off) is False and found.config == head.config
    assert list(found.state_dict()) == list(head.state_dict()) and set(head.state_dict()) < set(
        Refiner(**sizes).state_dict()
    )
    assert all(torch.equal(weight, found.state_dict()[key]) for key, weight in head.state_dict().items())
    rewrite_config(tmp_path / "c", lambda section: section.pop(off))  # as if the part were on: its weights are missing
    with pytest.raises(ValueError, match="missing|shape|size"):
        load(tmp_path / "c", target)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_holds_three_files_and_no_weight_of_the_target(target, tmp_path, name):
    drafter = make_drafter(target)
    head = toy_head(name, drafter)
    save(tmp_path / "c", drafter, head)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {CONFIG, WEIGHTS, PROVENANCE}
    stored = load_file(tmp_path / "c" / WEIGHTS)
    own = set(drafter.state_dict()) | {f"head.{key}" for key in (head.state_dict() if head else {})}
    assert set(stored) == own
    frozen = [weight for weight in target.model.state_dict().values() if weight.dim() == 2]
    assert not any(t.shape == w.shape and torch.equal(t, w) for t in stored.values() for w in frozen)
    assert json.loads((tmp_path / "c" / CONFIG).read_text())["dtype"] == "float32"
    assert (tmp_path / "c" / WEIGHTS).read_bytes()[8:9] == b"{"  # safetensors: a JSON header, no pickle


@pytest.mark.parametrize("part", ["save_file", "write_json"])
def test_an_error_in_the_middle_of_saving_leaves_the_old_folder(saved, target, monkeypatch, part):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, part, fail)
    for folder in (saved, saved.parent / "new"):
        with pytest.raises(OSError, match="no space"):
            save(folder, make_drafter(target, seed=9))
    assert [path.name for path in saved.parent.iterdir()] == ["c"]  # no half folder beside it either
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_saving_again_replaces_the_whole_folder(saved, target):
    save(saved, make_drafter(target, seed=9))
    assert load(saved, target).head is None and [path.name for path in saved.parent.iterdir()] == ["c"]


# --- partial and damaged folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"checkpoint=.*{name}"):
        load(saved)


def test_a_missing_folder_names_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint=.*nowhere: no config.json there. Give the folder that"):
        load(tmp_path / "nowhere")


def test_a_hub_id_without_network_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="checkpoint=z-lab/none: no such folder, and the hub cannot be read"):
        load("z-lab/none")
    from xpress import Target

    with pytest.raises(OSError, match="target=z-lab/none: no such folder, and no hub access. Give a local folder"):
        Target.from_pretrained("z-lab/none")


@pytest.mark.parametrize("keep", [0, 7, 60, -100])
def test_a_truncated_file_is_refused(saved, keep):
    (saved / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{WEIGHTS}: damaged or truncated"):
        load(saved)


@pytest.mark.parametrize("name", [CONFIG, PROVENANCE])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_json_file_is_named(saved, name, text):
    (saved / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}: not"):
        load(saved)


def fill(name, value):
    return lambda t: t[name].view(-1)[3:4].fill_(value)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"missing layers.1.mlp.up_proj.weight \[48, 32\]"),
        (lambda t: t.pop("fc.weight"), r"missing fc.weight \[32, 64\]"),
        (lambda t: t.pop("head.readout.weight"), "missing head.readout.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(2)}), "unexpected lm_head.weight"),
        (lambda t: t.update({"head.bias": torch.zeros(2)}), "unexpected head.bias"),
        (lambda t: t.update({"norm.weight": torch.zeros(31)}), r"norm.weight has shape \[31\], expected \[32\]"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(32, 96)}),
            r"fc.weight has shape \[32, 96\], expected \[32, 64\]",
        ),
        (fill("norm.weight", torch.nan), "norm.weight holds NaN"),
        (fill("head.token_embed.weight", torch.inf), "head.token_embed.weight holds NaN or infinity"),
    ],
)
def test_every_tensor_is_accounted_for(saved, target, change, named):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=f"not loaded, nothing partial: .*{named}"):
        load(saved, target)


def test_all_problems_are_told_at_once(saved):
    rewrite(saved, lambda t: (t.pop("norm.weight"), t.update(extra=torch.zeros(1)), fill("fc.weight", torch.nan)(t)))
    with pytest.raises(ValueError, match="fc.weight holds NaN or infinity; missing norm.weight .32.; unexpected extra"):
        load(saved)


def test_a_reduced_vocabulary_needs_its_map(target, tmp_path):
    save(tmp_path / "c", make_drafter(target, draft_ids=(1, 5, 9)))
    rewrite(tmp_path / "c", lambda t: t.pop("d2t"))
    with pytest.raises(ValueError, match="draft_vocab_size is reduced, but model.safetensors has no map 'd2t'"):
        load(tmp_path / "c")
    published_drafter(tmp_path / "whole", target, draft_vocab_size=None)
    assert load(tmp_path / "whole").drafter.config.draft_vocab_size == V


# --- parts that do not belong together ------------------------------------------------------------------------------


def test_a_checkpoint_of_another_target_is_refused_with_both_hashes(saved):
    other = make_target(seed=5)
    own = json.loads((saved / PROVENANCE).read_text())["target"]["fingerprint"]
    with pytest.raises(ValueError, match=f"trained for target .*{own[:16]}.*toy-llama has {other.fingerprint()[:16]}"):
        load(saved, other)


@pytest.mark.parametrize(
    "key, value", [("hidden_size", D + 1), ("block_size", 5), ("vocab_size", V + 1), ("draft_vocab_size", 10)]
)
def test_a_head_of_other_sizes_than_the_drafter_is_refused(target, tmp_path, key, value):
    drafter = make_drafter(target)
    head = HEADS["refiner"](**{"vocab_size": V, "hidden_size": D, "block_size": 4, "rank": 8, key: value})
    save(tmp_path / "c", drafter, head)
    with pytest.raises(ValueError, match=rf"head.{key}={value}, but the drafter has"):
        load(tmp_path / "c", target)


@pytest.mark.parametrize(
    "path", ["torch.nn.Linear", "builtins.print", "no.such.Head", "xpress.heads.Missing", "Refiner", ""]
)
def test_a_head_that_is_no_correction_head_is_refused(saved, path):
    raw = json.loads((saved / CONFIG).read_text())
    raw["head"]["_target_"] = path
    (saved / CONFIG).write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"head _target_={path}: (not a CorrectionHead|cannot be imported)"):
        load(saved)


def test_arguments_that_a_head_does_not_take_are_named(saved):
    raw = json.loads((saved / CONFIG).read_text())
    raw["head"]["ranks"] = 3
    (saved / CONFIG).write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="MarkovHead: .*ranks"):
        load(saved)


# --- a head of one's own --------------------------------------------------------------------------------------------

OWN_HEAD = '''
from torch import nn
from xpress import CorrectionHead


class TwoBack(CorrectionHead):
    """The bias from the two tokens before a slot."""

    def __init__(self, vocab_size, hidden_size, block_size, rank=6, draft_vocab_size=None):
        super().__init__()
        self.one, self.two = nn.Embedding(vocab_size, rank), nn.Embedding(vocab_size, rank)
        self.readout = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)

    def latent(self, prepared, prev_ids):
        return self.one(prev_ids) + self.two(prev_ids.roll(1, 1).index_fill(1, prev_ids.new_zeros(1), 0))
'''


def test_a_head_in_a_file_of_ones_own_trains_saves_and_loads(target, tmp_path, monkeypatch):
    (tmp_path / "two_back.py").write_text(OWN_HEAD)
    monkeypatch.syspath_prepend(tmp_path)
    drafter = make_drafter(target)
    sizes = dict(vocab_size=V, hidden_size=D, block_size=4, rank=5)
    head = checkpoint.build_head({"_target_": "two_back.TwoBack", **sizes}).bind(target)
    before = {key: weight.clone() for key, weight in head.state_dict().items()}
    rows = [Row(f"r{i}", PROMPT, plain(target, [*PROMPT, i], 12)) for i in (3, 4)]
    trainee = Trainee(drafter, head, [Term("refined", "gold"), Term("own", "self", rounds=2)])
    settings = TrainSettings(steps=1, batch_size=2, max_anchors=4, log_every=1)
    run = Run(tmp_path / "run", trainee, rows, OnlineFeatures(target, drafter.layer_ids, False), settings)
    run.out.mkdir()
    run.fit({"target": {"fingerprint": target.fingerprint()}})
    found = load(tmp_path / "run", target)
    assert found.head.config == {"_target_": "two_back.TwoBack", **sizes, "draft_vocab_size": None}
    for key, weight in found.head.state_dict().items():
        assert torch.equal(weight, head.state_dict()[key]) and not torch.equal(weight, before[key]), key
    assert tokens(target, found).ids == plain(target, PROMPT, 16)
    assert tokens(target, found) == tokens(target, replace(found, drafter=drafter.eval(), head=head.eval()))
    sys.modules.pop("two_back")


def test_what_comes_with_the_library_is_found_by_name(target, saved, tmp_path, monkeypatch):
    """From anywhere, before the hub is asked; what stands in the working folder under that name comes first."""
    monkeypatch.setattr(checkpoint, "PACKAGE", tmp_path / "package")
    (tmp_path / "package" / "pretrained").mkdir(parents=True)
    saved.rename(tmp_path / "package" / "pretrained" / "toy")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load("pretrained/toy", target)
    assert found.path == tmp_path / "package" / "pretrained" / "toy"
    assert parts.find("pretrained/toy") == str(found.path) and parts.from_anywhere("pretrained/toy") == "pretrained/toy"
    save("pretrained/toy", found.drafter, found.head)
    assert load("pretrained/toy", target).path == Path("pretrained/toy")
    with pytest.raises(FileNotFoundError, match="what comes with the library, pretrained"):
        load(tmp_path / "elsewhere", target)

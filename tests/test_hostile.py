"""Damaged and hostile checkpoints: a clear error that names the tensor or file and the remedy; nothing runs, nothing is
allocated, nothing loads in part."""

import argparse
import json
import os
import pathlib
import pickle
import resource
import struct

import pytest
import torch
from published import B, R, domino, dspark, edit, nested, ours, research, serving, speculators, zlab
from toys import D, V

from xpress import load
from xpress.interop import convert, read


def config(**changes):
    return lambda folder: edit(folder, lambda raw: raw.update(changes))


def inner(**changes):
    return lambda folder: edit(folder, lambda raw: raw["dflash_config"].update(changes))


def layer(**changes):
    return lambda folder: edit(folder, lambda raw: raw["transformer_layer_config"].update(changes))


def tensors(change):
    return lambda folder: edit(folder, None, change)


def put(name, value):
    return tensors(lambda t: t.update({name: value}))


def fill(name, value):
    return tensors(lambda t: t[name].view(-1)[3:4].fill_(value))


def cut(name, keep):
    """The file's first `keep` bytes."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def header(entries, size=None):
    """A safetensors file that declares what it does not hold."""

    def write(folder):
        text = json.dumps(entries).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", size or len(text)) + text + b"\0" * 16)

    return write


def index(change):
    def write(folder):
        raw = json.loads((folder / "model.safetensors.index.json").read_text())
        change(raw, folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(raw))

    return write


def leave(raw, folder):
    """A real safetensors file, outside the folder."""
    first = next(folder.glob("model-*.safetensors"))
    first.rename(folder.parent / "outside.safetensors")
    raw["weight_map"] = {
        key: "../outside.safetensors" if n == first.name else n for key, n in raw["weight_map"].items()
    }


def absolute(raw, folder):
    raw["weight_map"] = {key: str(folder / name) for key, name in raw["weight_map"].items()}


def move(old, new):
    return tensors(lambda t: t.update({new: t.pop(old)}))


HUGE, MANY = 10**12, 10**6
DAMAGED = {  # name -> what makes the checkpoint, what is done to it, what the error says
    "a file cut short": (serving, cut("model.safetensors", 5000), "model.safetensors: damaged or truncated.*copy"),
    "an empty file": (serving, cut("model.safetensors", 0), "model.safetensors: damaged or truncated"),
    "a huge declared shape": (
        zlab,
        header({"fc.weight": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 16]}}),
        "damaged or truncated.*overflow",
    ),
    "a shape larger than its bytes": (
        zlab,
        header({"fc.weight": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 16]}}),
        "damaged or truncated",
    ),
    "bytes beyond the file": (
        zlab,
        header({"fc.weight": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}),
        "damaged or truncated",
    ),
    "a header of an exabyte": (zlab, header({}, size=2**60), "damaged or truncated"),
    "a config cut short": (zlab, cut("config.json", 40), "config.json: not valid JSON"),
    "a config nested without end": (
        zlab,
        lambda folder: (folder / "config.json").write_text('{"a":' * 100_000),
        "config.json: not valid JSON",
    ),
    "a billion layers": (
        zlab,
        config(num_hidden_layers=10**9),
        "num_hidden_layers=1000000000, but the file holds.*2 l",
    ),
    "a billion layers of speculators": (speculators, layer(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "one layer too few": (dspark, config(num_hidden_layers=1), "num_hidden_layers=1, but the file holds tensors of 2"),
    "sizes beyond counting": (zlab, config(hidden_size=HUGE), "its config declares sizes that no file holds.*restore"),
    "a huge hidden size": (zlab, config(hidden_size=MANY), "fc.weight has shape .32, 64., expected .*copy it again"),
    "a huge head dimension": (
        zlab,
        config(head_dim=HUGE, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "q_norm.weight has shape .8., expected .1000000000000.",
    ),
    "a huge vocabulary": (serving, config(vocab_size=HUGE), "xpress_head.w1.weight has shape .97, 8., expected"),
    "a huge rank": (serving, config(xpress_rank=MANY, xpress_mlp_hidden=2 * MANY), "xpress_head.*expected .*1000000"),
    "a rank that is none": (serving, config(xpress_rank="8"), "rank='8' is no positive whole number; restore"),
    "a huge block": (
        dspark,
        config(block_size=HUGE, markov_rank=4),
        "markov_w1.weight has shape .97, 8., expected .97, 4.",
    ),
    "a huge mixer": (serving, config(block_size=MANY, xpress_block_size=MANY), "mix.L has shape .8, 4, 4., expected"),
    "a huge GRU": (domino, inner(gru_hidden_dim=MANY), "prefix_gru.weight_hh_l0 has shape .36, 12., expected"),
    "a head of ours of another size": (
        ours,
        lambda folder: edit(folder, lambda raw: raw["head"].update(rank=MANY)),
        "head.token_embed.weight has shape",
    ),
    "a negative rank of ours": (ours, lambda f: edit(f, lambda raw: raw["head"].update(rank=-1)), "GatedMarkovHead: "),
    "text for a number": (zlab, config(hidden_size="32"), "hidden_size='32' is no positive whole number"),
    "a list for a section": (zlab, config(dflash_config=[1]), r"dflash_config=\[1\] is no section; restore"),
    "a section of another kind": (speculators, config(speculators_config=[1]), "config.json is not as speculators"),
    "ids that are no numbers": (zlab, inner(target_layer_ids=["0", "2"]), "target_layer_ids=.'0', '2'.*whole numbers"),
    "a mask beyond the vocabulary": (zlab, inner(mask_token_id=V), "mask_token_id=97: outside the target's embedding"),
    "a path that leaves the folder": (
        nested,
        index(leave),
        "'../outside.safetensors', which is no safetensors file of",
    ),
    "an absolute path": (nested, index(absolute), "which is no safetensors file of this folder; nothing outside it"),
    "an index without a map": (nested, index(lambda raw, _: raw.pop("weight_map")), "no weight_map of tensor names"),
    "an index that names another tensor": (
        nested,
        index(lambda raw, _: raw["weight_map"].update({"lm_head.weight": raw["weight_map"]["fc.weight"]})),
        "lm_head.weight is not in both this file and model.safetensors.index.json",
    ),
    "keys from another model": (
        zlab,
        tensors(lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)]),
        "num_hidden_layers=2, but the file holds tensors of 0 layers",
    ),
    "another model altogether": (
        zlab,
        lambda folder: (
            edit(folder, lambda raw: raw.update(architectures=["BertModel"])),
            move("fc.weight", "pooler.weight")(folder),
        ),
        "no known layout: architectures=.'BertModel'.*known are .*our own folder",
    ),
    "a missing tensor": (
        domino,
        tensors(lambda t: t.pop("embed_proj.0.weight")),
        "missing embed_proj.0.weight .8, 44.",
    ),
    "an unexpected tensor": (dspark, put("markov_head.extra", torch.ones(2)), "unexpected markov_head.extra"),
    "a tensor of another shape": (serving, put("norm.weight", torch.ones(D + 1)), r"norm.weight has shape \[33\]"),
    "NaN": (speculators, fill("refiner_head.mix_l", torch.nan), "refiner_head.mix_l holds NaN or infinity"),
    "infinity": (domino, fill("prefix_gru.weight_ih_l0", torch.inf), "prefix_gru.weight_ih_l0 holds NaN or infinity"),
    "quantised weights": (zlab, put("norm.weight", torch.ones(D, dtype=torch.int8)), "norm.weight is I8.*quantised"),
    "a mixer that was folded": (
        serving,
        config(mixer_folded=True),
        "mixer_folded=True: its mixer is folded.*raw mixer",
    ),
    "a mask that is not causal": (
        serving,
        put("xpress_head.mix.tril", torch.ones(B, B)),
        "mix.tril is no lower triangle",
    ),
    "a mask of another size": (
        serving,
        put("xpress_head.mix.tril", torch.ones(5, 5)),
        "mix.tril has shape .5, 5., exp",
    ),
    "an embedding of its own": (
        dspark,
        fill("embed_tokens.weight", 3.0),
        "embed_tokens.weight is not target toy-llama's",
    ),
    "an embedding of another size": (
        dspark,
        put("lm_head.weight", torch.ones(5, D)),
        "lm_head.weight has shape .5, 32.",
    ),
    "a map that is not integers": (speculators, put("d2t", torch.zeros(V)), "d2t is F32 .97., expected integers"),
    "a map out of order": (
        speculators,
        lambda folder: (
            config(draft_vocab_size=3)(folder),
            put("d2t", torch.tensor([4, 1, -1]))(folder),
        ),
        "draft_ids: a reduced vocabulary is a non-empty, ascending list of distinct target ids",
    ),
    "maps that disagree": (speculators, put("t2d", torch.zeros(V, dtype=torch.bool)), "t2d and d2t name other ids"),
    "a reduced vocabulary without a map": (speculators, config(draft_vocab_size=40), "reduced, but.*has no map 'd2t'"),
    "the embedding output": (dspark, config(target_layer_ids=[-1, 2]), "-1 is the embedding output"),
    "the last layer": (speculators, config(aux_hidden_state_layer_ids=[1, 4]), "4 is the last layer"),
    "another head type": (
        dspark,
        config(markov_head_type="attention"),
        "markov_head_type='attention': known are vanilla",
    ),
    "a layout that is not said": (domino, inner(shift_label=None), "shift_label=None: give true"),
    "a mask embedding of its own": (
        zlab,
        lambda f: torch.save(torch.ones(D), f / "mask_embedding.pt"),
        "mask_embedding",
    ),
    "another drafter": (zlab, inner(causal=True), "dflash_config.causal=True belongs to another drafter"),
    "another MLP": (speculators, config(xpress_mlp_ratio=4), "xpress_mlp_ratio=4: only 2 is supported"),
    "broken rotary scaling": (
        zlab,
        config(rope_scaling={"rope_type": "llama3"}),
        "rope_parameters cannot be used .*factor.*restore",
    ),
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_a_damaged_checkpoint_is_refused_by_name(name, target, tmp_path):
    make, damage, said = DAMAGED[name]
    folder = make(tmp_path / "c", target)
    load(folder, target)  # whole before
    damage(folder)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, OSError), match=f"(?s){said}") as error:
        load(folder, target)
    assert str(folder) in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 64 * 1024  # KiB
    with pytest.raises((ValueError, OSError)):
        convert(folder, tmp_path / "out", "ours", target)
    assert not (tmp_path / "out").exists()


def test_a_missing_part_of_the_weights_is_named(target, tmp_path):
    folder = nested(tmp_path / "c", target)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match="model-00002-of-00002.safetensors is missing; the folder is incomplete"
    ):
        load(folder, target)


def test_a_mixer_that_looks_folded_is_a_warning(target, tmp_path):
    folder = serving(tmp_path / "c", target)
    put("xpress_head.mix.L", torch.eye(B).expand(R, B, B).clone())(folder)
    with pytest.warns(UserWarning, match="diagonal is near 1"):
        assert any("diagonal is near 1" in note for note in load(folder, target).notes)


# --- research files -------------------------------------------------------------------------------------------------


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def rewrite(file, change):
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(file, weights_only=True)
    change(found)
    torch.save(found, file)


@pytest.mark.parametrize("plain", [False, True], ids=["torch", "pickle"])
@pytest.mark.parametrize("where", ["args", "refiner_state_dict", "extra"])
def test_a_pickle_that_would_run_code_is_refused_without_running(target, tmp_path, where, plain):
    file, mark = research(tmp_path / "c", target), tmp_path / "ran"
    if plain:
        file.write_bytes(pickle.dumps({where: Evil(mark)}, protocol=2))
    else:
        rewrite(file, lambda found: found.update({where: Evil(mark)}))
    with pytest.raises(ValueError, match=f"{file.name}: refused, nothing in it was run.*system"):
        load(file, target)
    assert not mark.exists()
    torch.load(file, weights_only=False) if not plain else pickle.loads(file.read_bytes())
    assert mark.exists()  # it would have


def test_no_other_class_than_a_namespace_is_let_in(target, tmp_path):
    file = research(tmp_path / "c", target)
    rewrite(file, lambda found: vars(found["args"]).update(out=pathlib.PurePosixPath("/x")))
    with pytest.raises(
        ValueError, match="refused, nothing in it was run.*pathlib.PurePosixPath.*give a file saved without"
    ):
        load(file, target)


def wide(found):
    """A view of one number that declares a terabyte."""
    found["refiner_state_dict"]["w1.weight"] = torch.ones(1).expand(HUGE, R)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda found: found.pop("draft_state_dict"), "no draft_state_dict; give the file that holds drafter and head"),
        (lambda found: found.update(refiner_state_dict=[1]), "no refiner_state_dict"),
        (lambda found: found["refiner_state_dict"].update(x=3), r"refiner_state_dict\['x'\] is no tensor"),
        (lambda found: found.pop("args"), "no args: which head this is cannot be told"),
        (lambda found: vars(found["args"]).update(no_mixer=True), "args.no_mixer=True: another head"),
        (lambda found: vars(found["args"]).update(input_mode="add"), "args.input_mode='add': another head"),
        (lambda found: vars(found["args"]).update(markov_rank=MANY), "refiner.w1.weight has shape .97, 8., expected"),
        (lambda found: found["refiner_state_dict"].pop("mix.L"), "missing refiner.mix.L .8, 4, 4."),
        (lambda found: found["draft_state_dict"].pop("norm.weight"), "missing draft.norm.weight .32."),
        (lambda found: found["draft_state_dict"]["norm.weight"].fill_(torch.nan), "draft.norm.weight holds NaN"),
        (lambda found: found["refiner_state_dict"]["mix.tril"].fill_(1), "refiner.mix.tril is no lower triangle"),
        (wide, "refiner.w1.weight declares .1000000000000, 8., more than it stores"),
    ],
)
def test_a_damaged_research_file_is_refused_by_name(target, tmp_path, change, said):
    file = research(tmp_path / "c", target)
    rewrite(file, change)
    with pytest.raises(ValueError, match=f"(?s){file.name}.*{said}"):
        read(file, target)


@pytest.mark.parametrize("keep", [0, 3, 300, -200])
def test_a_research_file_cut_short_is_refused(target, tmp_path, keep):
    file = research(tmp_path / "c", target)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{file.name}: (damaged or truncated|refused)"):
        load(file, target)

"""Weights move both ways: every published layout loads, decodes without loss, and comes back from every format."""

import json
import runpy
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from disk import save_model
from published import MAKERS, REDUCED, B, R, dspark, edit, markov, refiner, research, serving, speculators, zlab
from safetensors.torch import load_file
from toys import D, V, make_drafter, make_head, make_rows, make_target, plain

from xpress import Context, generate, load, refine, save
from xpress.features import OnlineFeatures
from xpress.interop import FORMATS, convert, formats_for, layer_ids, matrix, plan, read, write
from xpress.loss import Term
from xpress.recipe import TrainSettings
from xpress.train import Run
from xpress.trainee import Trainee

PROMPT = [5, 17, 44, 3, 61, 80, 9]
ROOT = Path(__file__).resolve().parents[1]
HOLD = {  # the formats that can hold what each published checkpoint is
    "zlab": "ours speculators zlab",
    "zlab-nested-sharded": "ours speculators zlab",
    "research-xpress": "ours serving speculators",
    "research-markov": "ours speculators",
    "serving": "ours serving speculators",
    "serving-mask": "ours serving speculators",
    "dspark-vanilla": "dspark ours speculators",
    "dspark-gated": "dspark ours speculators",
    "dspark-rnn": "dspark ours speculators",
    "dspark-none": "dspark ours speculators",
    "dspark-specforge": "dspark ours speculators",
    "domino": "domino ours",
    "domino-author": "domino ours",
    "domino-infill": "domino ours",
    "speculators-dflash": "ours speculators zlab",
    "speculators-dspark": "dspark ours speculators",
    "speculators-xpress": "ours serving speculators",
    "speculators-xpress-next": "ours speculators",
    "speculators-reduced": "ours speculators",
    "ours": "ours speculators",
}
HEADED = [name for name in MAKERS if not name.startswith("zlab") and name not in ("dspark-none", "speculators-dflash")]


def tokens(target, found):
    return generate(target, PROMPT, found.drafter, found.head, "auto", max_new_tokens=16)


@torch.no_grad()
def drafts(target, found):
    """What it drafts after each of several prefixes, right or wrong."""
    ids = []
    for anchor in range(3, 60, 8):
        found.drafter.reset()
        _, features = target.prefill([PROMPT], found.drafter.layer_ids)
        block = found.drafter.draft(Context([[*PROMPT, anchor]], features))
        ids.append(refine(found.head, block, "auto" if found.head else 0).ids.tolist())
    return ids


def same_sizes(a, b):
    """Two drafter configs, but for the scale of the features, which is a matter of storing them."""
    assert replace(a, feature_scale=()) == replace(b, feature_scale=())


def same_tensors(a: dict, b: dict):
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.fixture
def made(request, target, tmp_path):
    """A published checkpoint of the name given -> where it is."""
    return MAKERS[request.param][1](tmp_path / "published", target)


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made, name", [(name, name) for name in MAKERS], indirect=["made"], ids=list(MAKERS))
def test_every_layout_decodes_without_loss_and_comes_back_from_every_format(made, name, target, tmp_path):
    found, first = load(made, target), read(made, target)
    assert found.format == first.format == MAKERS[name][0]
    answer = tokens(target, found)
    assert answer.ids == plain(target, PROMPT, 16)
    assert sorted(formats_for(first)) == HOLD[name].split()
    for format in FORMATS:
        where = tmp_path / format
        if format not in HOLD[name].split():
            with pytest.raises(ValueError, match=f"format={format}: "):
                write(where, first, format, target)
            assert not where.exists()
            continue
        write(where, first, format, target)
        again = read(where, target)
        assert again.format == format and again.head == first.head and again.confidence == first.confidence
        same_tensors(first.tensors, again.tensors)
        same_sizes(first.config, again.config)
        other = load(where, target)
        assert tokens(target, other) == answer and drafts(target, other) == drafts(target, found)
        with pytest.raises(FileExistsError, match="exists; give another name"):
            write(where, first, format, target)
        for other in HOLD[name].split():  # and from there into each of the others
            write(tmp_path / f"{format}-{other}", again, other, target)
            last = read(tmp_path / f"{format}-{other}", target)
            same_tensors(first.tensors, last.tensors)
            same_sizes(first.config, last.config)


@pytest.mark.parametrize("head", [None, "refiner", "markov", "domino"])
@pytest.mark.parametrize("layout", ["infill", "next"])
def test_what_training_wrote_goes_out_and_comes_back(target, tmp_path, layout, head):
    """With scaled features and fewer drafts than the block allows, in bf16."""
    drafter = make_drafter(target, layout=layout, feature_scale=(2.0, 0.125), num_draft=2)
    made = head and make_head(head, drafter)
    for part in (drafter, made):
        if part is not None:
            part.to(torch.bfloat16)
    save(tmp_path / "c", drafter, made, {"target": {"name": "toy", "fingerprint": target.fingerprint()}})
    answer = tokens(target, load(tmp_path / "c", target))
    for format in formats_for(read(tmp_path / "c")):
        record = convert(tmp_path / "c", tmp_path / format, format, target)
        assert any("feature_scale" in left for left in record["left_out"]) == (format != "ours")
        again = read(tmp_path / format, target)
        assert {t.dtype for t in again.tensors.values()} == {torch.bfloat16}
        same_tensors(read(tmp_path / "c").tensors, again.tensors)
        found = load(tmp_path / format, target)
        assert tokens(target, found) == answer and found.drafter.config.num_draft == 2
        assert found.provenance["target"]["name"] == "toy"  # it travels in the conversion record
        with pytest.raises(ValueError, match="was trained for target toy"):
            load(tmp_path / format, make_target(seed=5))


def test_weights_are_rounded_as_asked(target, tmp_path):
    drafter = make_drafter(target)
    save(tmp_path / "c", drafter, make_head("refiner", drafter))
    before = read(tmp_path / "c").tensors
    record = convert(tmp_path / "c", tmp_path / "narrow", "ours", weights="bfloat16")
    after = read(tmp_path / "narrow", target).tensors
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    assert record["notes"] == ["weights: rounded to bfloat16 as asked"]
    assert all(torch.equal(after[name], t.to(torch.bfloat16)) for name, t in before.items())
    assert tokens(target, load(tmp_path / "narrow", target))
    for wrong in ("int8", "bf16", "nn"):
        with pytest.raises(ValueError, match=f"weights={wrong}: give bfloat16"):
            convert(tmp_path / "c", tmp_path / "wrong", "ours", weights=wrong)
    assert not (tmp_path / "wrong").exists()


# --- the names mean what they meant ---------------------------------------------------------------------------------


def bias_of_refiner(t, hidden, prev):
    """The published head, written from its description."""
    g = hidden.mean(1, keepdim=True).expand_as(hidden)
    x = torch.cat([hidden @ t["down_h.weight"].T, g @ t["down_g.weight"].T, t["w1.weight"][prev]], -1)
    x = x @ t["in_proj.weight"].T
    u = torch.stack([x[:, k] + sum(t["mix.L"][:, k, j] * x[:, j] for j in range(k + 1)) for k in range(B)], 1)
    inner = F.silu(u @ t["mlp.gate_proj.weight"].T) * (u @ t["mlp.up_proj.weight"].T)
    return (u + inner @ t["mlp.down_proj.weight"].T) @ t["w2.weight"].T


def bias_of_markov(t, hidden, prev, kind):
    row = t["markov_w1.weight"][prev]
    if kind == "gated":
        row = row * torch.sigmoid(torch.cat([hidden, row], -1) @ t["gate_proj.weight"].T + t["gate_proj.bias"])
    if kind == "rnn":
        state, out = torch.zeros_like(row[:, 0]), []
        for k in range(B):
            inputs = torch.cat([state, row[:, k], hidden[:, k]], -1)
            gate, new, read_out = (inputs @ t["joint_proj.weight"].T + t["joint_proj.bias"]).split(R, -1)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            out.append(torch.tanh(read_out))
        row = torch.stack(out, 1)
    return row @ t["markov_w2.weight"].T


def bias_of_domino(t, target, hidden, prev, prefix_len, shift):
    """One GRU cell a slot, gates in the order r, z, n."""
    rows, state, out = (
        target.embedding(prev).double(),
        hidden.new_zeros(len(hidden), t["prefix_gru.weight_hh_l0"].shape[1]),
        [],
    )
    for k in range(B):
        xr, xz, xn = (rows[:, k] @ t["prefix_gru.weight_ih_l0"].T).chunk(3, -1)
        hr, hz, hn = (state @ t["prefix_gru.weight_hh_l0"].T).chunk(3, -1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        state = (1 - z) * torch.tanh(xn + r * hn) + z * state
        latent = F.silu(torch.cat([hidden[:, k], state], -1) @ t["embed_proj.0.weight"].T)
        start = prefix_len if shift else 1 + prefix_len
        out.append((latent @ t["embed_proj.2.weight"].T) * (k >= start))
    return torch.stack(out, 1)


@pytest.mark.parametrize("made, name", [(n, n) for n in HEADED], indirect=["made"])
@torch.no_grad()
def test_a_loaded_head_is_the_published_function(made, name, target):
    found = load(made, target, torch.float64)
    torch.manual_seed(3)
    hidden, prev = torch.randn(3, B, D).double(), torch.randint(V, (3, B))
    wide = lambda tensors: {name: t.double() for name, t in tensors.items()}  # noqa: E731
    if "domino" in name:
        tensors = {n.removeprefix("logit_head."): t for n, t in load_file(made / "model.safetensors").items()}
        wanted = bias_of_domino(wide(tensors), target, hidden, prev, 1, "infill" not in name)
    elif "xpress" in name or "serving" in name or "reduced" in name:
        wanted = bias_of_refiner(wide(refiner(V, D, len(REDUCED) if "reduced" in name else V)), hidden, prev)
    else:
        kind = next((kind for kind in ("rnn", "gated") if kind in name), "vanilla")
        kind = "gated" if name in ("ours", "speculators-dspark") else kind
        wanted = bias_of_markov(wide(markov(V, D, kind)), hidden, prev, kind)
    torch.testing.assert_close(found.head(hidden, prev), wanted, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_confidence_head_reads_hidden_state_and_row(target, tmp_path):
    found = load(dspark(tmp_path / "c", target), target)
    stored = load_file(tmp_path / "c" / "model.safetensors")
    hidden, prev = torch.randn(3, B, D), torch.randint(V, (3, B))
    inputs = torch.cat([hidden, stored["markov_head.markov_w1.weight"][prev]], -1)
    wanted = torch.sigmoid(inputs @ stored["confidence_head.proj.weight"][0] + stored["confidence_head.proj.bias"])
    torch.testing.assert_close(found.confidence(hidden, found.head.token_embed(prev)), wanted)
    save(tmp_path / "ours", found.drafter, found.head, confidence=found.confidence)
    kept = load(tmp_path / "ours", target).confidence
    assert kept.rank == R and torch.equal(kept.proj.weight, found.confidence.proj.weight)
    alone = load(speculators(tmp_path / "s", target, "dspark"), target).confidence
    assert alone.rank == 0 and alone(hidden).shape == (3, B)


def test_layer_ids_name_the_same_state_in_every_format(target, tmp_path):
    """Against transformers' own tuple: z-lab's id l is hidden_states[l + 1], speculators' id l is hidden_states[l]."""
    made = {"zlab": zlab(tmp_path / "z", target), "speculators": speculators(tmp_path / "s", target)}
    states = target.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    for folder in made.values():
        raw = json.loads((folder / "config.json").read_text())
        ids = raw.get("aux_hidden_state_layer_ids") or [i + 1 for i in raw["dflash_config"]["target_layer_ids"]]
        _, features = target.prefill([PROMPT], load(folder, target).drafter.layer_ids)
        torch.testing.assert_close(features, torch.cat([states[i] for i in ids], -1))


@pytest.mark.parametrize(
    "ids, given, wanted, found",
    [
        ((1, 9, 33), "published", "input", (2, 10, 34)),
        ((2, 10, 34), "input", "output", (1, 9, 33)),
        ((0, 35), "output", "output", (0, 35)),
        ((35,), "output", "published", "the last layer"),
        ((35,), "published", "output", "the last layer"),
        ((36,), "input", "output", "the last layer"),
        ((-1,), "published", "output", "the embedding output"),
        ((0,), "input", "output", "the embedding output"),
        ((36,), "output", "output", "no decoder layer of a target with 36"),
        ((-2,), "published", "output", "no decoder layer of a target with 36"),
    ],
)
def test_layer_ids(ids, given, wanted, found):
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            layer_ids(ids, given, wanted, 36)
    else:
        assert layer_ids(ids, given, wanted, 36) == found


def test_domino_drafts_what_its_publication_drafts(target, tmp_path):
    """The next-token kind reads B − 1 slots, DSpark all B."""
    drafts = {name: plan(make(tmp_path / name, target), target).config.num_draft for name, (_, make) in MAKERS.items()}
    assert {name: n for name, n in drafts.items() if name.startswith("domino")} == dict.fromkeys(
        ["domino", "domino-author", "domino-infill"], B - 1
    )
    assert drafts["dspark-vanilla"] == B and drafts["zlab"] == B - 1 and drafts["speculators-dspark"] == B


@pytest.mark.parametrize("name", ["dspark-vanilla", "domino"])
def test_a_next_token_checkpoint_trains_here(target, tmp_path, name):
    found = load(MAKERS[name][1](tmp_path / "c", target), target)
    assert found.drafter.config.layout == "next"
    before = {key: t.clone() for key, t in found.head.state_dict().items()}
    trainee = Trainee(
        found.drafter.train(), found.head.train(), [Term("refined", "gold"), Term("own", "self", rounds=2)]
    )
    settings = TrainSettings(steps=2, batch_size=2, max_anchors=4, log_every=1)
    run = Run(
        tmp_path / "run", trainee, make_rows(9, 12), OnlineFeatures(target, found.drafter.layer_ids, False), settings
    )
    run.out.mkdir()
    run.fit({"target": {"fingerprint": target.fingerprint()}})
    trained = load(tmp_path / "run", target)
    assert any(not torch.equal(t, before[key]) for key, t in trained.head.state_dict().items())
    assert tokens(target, trained).ids == plain(target, PROMPT, 16)


# --- the target's own tensors, and what is not in a file ------------------------------------------------------------


def test_saved_frozen_tensors_are_compared_with_the_target(target, tmp_path):
    folder = dspark(tmp_path / "c", target)
    assert "no target was given to compare with" in " ".join(load(folder).notes) and not load(folder, target).notes
    edit(folder, None, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].bfloat16()}))
    assert load(folder, target).notes == ()  # rounded, and so the same
    edit(folder, None, lambda t: t["embed_tokens.weight"][7].mul_(1.01))
    with pytest.raises(ValueError, match="embed_tokens.weight is not target toy-llama's own"):
        load(folder, target)
    assert load(folder).head is not None


def test_a_reduced_vocabulary_travels_with_its_map_and_rows(target, tmp_path):
    drafter = make_drafter(target, draft_ids=REDUCED)
    save(tmp_path / "c", drafter)
    for format in ("zlab", "speculators"):
        with pytest.raises(ValueError, match="written with rows of the target's lm_head; give target="):
            convert(tmp_path / "c", tmp_path / format, format)
        convert(tmp_path / "c", tmp_path / format, format, target)
        stored = load_file(tmp_path / format / "model.safetensors")
        assert torch.equal(stored["lm_head.weight"], target.lm_head.weight[list(REDUCED)])
        assert torch.equal(stored["d2t"] + torch.arange(len(REDUCED)), torch.tensor(REDUCED))
        assert tokens(target, load(tmp_path / format, target)) == tokens(target, load(tmp_path / "c", target))
        convert(tmp_path / format, tmp_path / f"{format}-2", "zlab")  # the rows go on without a target
        assert torch.equal(
            load_file(tmp_path / f"{format}-2" / "model.safetensors")["lm_head.weight"], stored["lm_head.weight"]
        )


def test_speculators_gets_the_targets_layers_from_where_they_are_known(target, tmp_path):
    folder = speculators(tmp_path / "c", target)
    with pytest.raises(
        ValueError, match="how many layers the target has.*'someone/target' is no local folder; give target"
    ):
        read(folder)
    at = str(save_model(tmp_path / "target"))
    edit(folder, lambda raw: raw["speculators_config"]["verifier"].update(name_or_path=at))
    assert read(folder).config.num_target_layers == target.num_layers
    edit(folder, lambda raw: raw["speculators_config"].update(verifier=None))
    assert read(folder, target).config.num_target_layers == target.num_layers


def test_a_research_file_takes_its_sizes_from_where_they_are(target, tmp_path):
    file = research(tmp_path / "c", target)
    assert load(tmp_path / "c", target).path == file  # the folder is as good
    (tmp_path / "c" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="the sizes of its drafter are not in it.*give drafter="):
        load(file, target)
    found = load(file, target, drafter=zlab(tmp_path / "z", target))
    assert tokens(target, found).ids == plain(target, PROMPT, 16)


# --- converting -----------------------------------------------------------------------------------------------------


def test_a_conversion_says_where_it_came_from(target, tmp_path):
    folder = serving(tmp_path / "c", target)
    record = convert(folder, tmp_path / "out", "speculators", target)
    assert record == json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["source"]["format"] == "serving" and len(record["source"]["sha256"]) == 64
    assert record["written"] == "speculators" and record["versions"]["torch"] == torch.__version__
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["num_jacobi_passes"] == 5 and raw["speculators_config"]["verifier"]["name_or_path"] == "toy-llama"
    with pytest.raises(FileExistsError, match="exists; give another name, nothing is written over it"):
        convert(folder, tmp_path / "out", "ours", target)


def test_parts_are_left_out_only_when_asked(target, tmp_path):
    folder = dspark(tmp_path / "c", target)
    with pytest.raises(ValueError, match="drop=head: its confidence head reads the rows"):
        convert(folder, tmp_path / "d", "dspark", target, drop=["head"])
    record = convert(folder, tmp_path / "d", "dspark", target, drop=["head", "confidence"])
    assert record["notes"] == ["head: left out as asked", "confidence: left out as asked"]
    bare = load(tmp_path / "d", target)
    assert bare.head is bare.confidence is None and tokens(target, bare).ids == plain(target, PROMPT, 16)
    with pytest.raises(ValueError, match="drop=drafter: give head or confidence"):
        convert(folder, tmp_path / "e", "dspark", target, drop=["drafter"])


@pytest.mark.parametrize("format, said", [("research", "read, not written; give one of ours"), ("gguf", "give one of")])
def test_a_format_that_is_not_written_is_refused_before_anything_is_read(tmp_path, format, said):
    with pytest.raises(ValueError, match=f"format={format}: .*{said}"):
        convert(tmp_path / "nowhere", tmp_path / "out", format)


def test_a_failing_conversion_leaves_nothing(target, tmp_path, monkeypatch):
    folder = serving(tmp_path / "c", target)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("xpress.interop.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        convert(folder, tmp_path / "out", "serving", target)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("make, asked", [(zlab, 1), (research, 2)])
def test_a_hub_id_is_downloaded_without_what_is_not_needed(target, tmp_path, monkeypatch, capsys, make, asked):
    """Weights and configs alone; a research file where there are no others, since it would double the download."""
    repository, copies = tmp_path / "there", []
    make(repository, target)
    if make is zlab:
        (repository / "refiner_cotrain.pt").write_bytes(b"large")
    (repository / "README.md").write_text("a card")

    def snapshot_download(repo_id, allow_patterns):
        copies.append(tmp_path / f"copy-{len(copies)}")
        copies[-1].mkdir()
        for file in repository.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                (copies[-1] / file.name).write_bytes(file.read_bytes())
        assert repo_id == "someone/drafter"
        return str(copies[-1])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = load("someone/drafter", target)
    assert f"someone/drafter: {FORMATS[found.format].ABOUT}" in capsys.readouterr().err
    assert tokens(target, found).ids == plain(target, PROMPT, 16) and len(copies) == asked
    kept = {file.name for file in copies[-1].iterdir()}
    assert kept == {"config.json", "model.safetensors" if make is zlab else "refiner_cotrain.pt"}


def test_a_hub_that_cannot_be_read_is_named(target, monkeypatch):
    def snapshot_download(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match="checkpoint=someone/drafter: .*hub cannot be read .ConnectionError"):
        load("someone/drafter", target)


@pytest.fixture
def script(capsys):
    """scripts/convert.py in this process -> its exit status or message, what it printed."""
    main = runpy.run_path(str(ROOT / "scripts" / "convert.py"))["main"]

    def call(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().out

    return call


def test_the_script_converts(script, target, tmp_path):
    folder = serving(tmp_path / "c", target)
    status, out = script(folder, tmp_path / "out", "format=ours")
    assert status is None and f"{folder}: XPress serving folder" in out and f"{tmp_path / 'out'}: our own folder" in out
    same_tensors(read(folder).tensors, read(tmp_path / "out").tensors)
    for words, said in (
        ([folder, tmp_path / "out", "format=ours"], "exists; give another name"),
        ([folder, tmp_path / "new", "format=zlab"], "drop=head leaves the head out"),
        ([folder, tmp_path / "new", "format=zlab", "drop="], "once at most, with a value"),
        ([folder, tmp_path / "new", "format=zlab", "fromat=ours"], "no setting is named fromat"),
        ([folder, "format=zlab"], "give SRC DST format="),
        ([folder, tmp_path / "new", "format=zlab", "target=nowhere"], "target=nowhere: no such folder"),
    ):
        status, out = script(*words)
        assert status.startswith("error: ") and said in status and not (tmp_path / "new").exists() and out == ""
    status, out = script(folder, tmp_path / "new", "format=zlab", "drop=head")
    assert status is None and "head: left out as asked" in out and read(tmp_path / "new").head is None


def test_the_matrix_has_every_format_and_tells_a_failure(script, monkeypatch):
    first = {case[0]: case for case in reversed(matrix.CASES)}
    assert set(first) == set(FORMATS)
    monkeypatch.setattr(matrix, "CASES", list(first.values()))
    status, out = script("matrix")
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert status is None and set(rows) == set(FORMATS) and "FAILED" not in out
    assert all("yes, tau" in row for row in rows.values())

    def forgetful(weights, target, whole=FORMATS["serving"].files):
        files = whole(weights, target)
        files.tensors.pop("xpress_head.mix.L")
        return files

    monkeypatch.setattr(FORMATS["serving"], "files", forgetful)
    monkeypatch.setattr(matrix, "CASES", [first["serving"]])
    status, out = script("--matrix")
    assert status == "error: a format FAILED" and "missing xpress_head.mix.L" in out

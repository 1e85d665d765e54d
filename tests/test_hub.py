"""What is published is the checkpoint, whole and readable, and its card says what its records say and nothing else."""

import json
import re
import runpy
import shlex
from pathlib import Path

import huggingface_hub
import pytest
import torch
from published import MAKERS, REDUCED
from results_toy import make_cell, make_result, make_row
from test_readme import README
from toys import make_drafter, make_head, make_target

from xpress import checkpoint, interop, push_to_hub, save
from xpress.card import LACKING
from xpress.interop import FORMATS, matrix, serve_lines

ROOT = Path(__file__).resolve().parents[1]
ID = "some-lab/toy-b4"
RECIPE = {"steps": 321, "lr": 0.00045, "drafter_lr_scale": 0.7, "seed": 77, "batch_size": 3, "max_length": 1234}
PROVENANCE = {
    "target": {"name": "/home/somebody/models/toy", "fingerprint": "f1" * 32},
    "data": {"path": "/home/somebody/rows", "rows": 720, "response_tokens": 66318, "sha256": "da" * 32},
    "recipe": RECIPE | {"objective": {"terms": [{"name": "refined", "loss": {"ce": 0.1, "l1": 0.9}}]}},
    "init": {"path": "/home/somebody/drafter", "sha256": "ab" * 32},
    "versions": {"torch": "2.13.0", "transformers": "5.24.0", "commit": "abc1234"},
}


@pytest.fixture(scope="module")
def target():
    return make_target()


def made(folder, target, head="refiner", provenance=PROVENANCE, layout="infill", **settings):
    drafter = make_drafter(target, layout=layout, **settings)
    owned = {**provenance}
    if "target" in owned:
        owned["target"] = owned["target"] | {"fingerprint": target.fingerprint()}
    save(folder, drafter, head and make_head(head, drafter), owned)
    return folder


def evaluated(folder, *checkpoints, **protocol):
    """A result of eval_tau.py in a folder, whose rows are those of checkpoints by their folders' names."""
    hashes = [checkpoint.weights_hash(path) for path in checkpoints]
    rows = [make_row("ar", "ar")]
    for i, path in enumerate(checkpoints):
        name = path.name
        rows += [
            make_row(f"{name}: drafter", "drafter", checkpoint=name, tau=2.25 + i, tau_interval=[2.125 + i, 2.375 + i]),
            make_row(f"{name}: refiner K=4", "head", "refiner", 4, checkpoint=name, tau=3.5 + i, lossless=True),
        ]
    result = make_result()
    names = [str(path) for path in checkpoints]
    result["protocol"] |= {"checkpoint": names, "checkpoint_sha256": hashes, "bench": ["gsm8k"], **protocol}
    result["cells"] = [make_cell() | {"methods": rows, "paired": [], "best": None}]
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def text_of(folder) -> str:
    return (folder / "README.md").read_text()


def rows_of(card: str) -> dict:
    return dict(re.findall(r"^\| ([^|]+) \| (.*) \|$", card, re.M))


class FakeApi:
    """Records what is asked of the hub, and what lies in the folder when it is uploaded."""

    calls: list = []
    private, fault = True, None

    def __init__(self, token=None):
        FakeApi.calls.append(("token", token))

    def create_repo(self, repo_id, **how):
        if FakeApi.fault:
            raise FakeApi.fault
        FakeApi.calls.append(("create_repo", repo_id, how))
        return f"https://hub/{repo_id}"

    def model_info(self, repo_id):
        return type("Info", (), {"private": FakeApi.private})

    def upload_folder(self, *, repo_id, folder_path, **how):
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        FakeApi.calls.append(("upload_folder", repo_id, files, how))


@pytest.fixture
def api(monkeypatch):
    FakeApi.calls, FakeApi.private, FakeApi.fault = [], True, None
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_a_token")
    return FakeApi


@pytest.mark.parametrize("name", [name for name in MAKERS if not name.startswith("research")])
def test_every_published_layout_is_published_as_it_is(name, target, tmp_path):
    MAKERS[name][1](tmp_path / "theirs", target)
    folder = push_to_hub(tmp_path / "theirs", ID, folder=tmp_path / "out", target=target, base_model="lab/target")
    a, b = interop.read(tmp_path / "theirs", target), interop.read(folder, target)
    assert a.format == b.format and set(a.tensors) == set(b.tensors)
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    weights = checkpoint.weight_files(tmp_path / "theirs")
    assert [file.read_bytes() for file in weights] == [(folder / file.name).read_bytes() for file in weights]
    assert "base_model: lab/target" in text_of(folder)


@pytest.mark.parametrize("format", ["ours", "serving", "speculators"])
def test_another_format_holds_the_same_tensors(format, target, tmp_path):
    source = made(tmp_path / "run", target)
    folder = push_to_hub(source, ID, folder=tmp_path / "out", format=format, target=target, base_model="lab/target")
    a, b = interop.read(source, target), interop.read(folder, target)
    assert b.format == format and all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    assert rows_of(text_of(folder))["made from"].endswith(checkpoint.weights_hash(source))


def test_the_card_says_what_is_recorded_and_no_more(target, tmp_path):
    full = rows_of(text_of(push_to_hub(made(tmp_path / "a", target), ID, folder=tmp_path / "A")))
    assert full["data"] == f"720 rows, 66318 response tokens, sha256 {'da' * 32}"
    assert (full["steps"], full["learning rate"], full["seed"]) == ("321", "0.00045", "77")
    assert json.loads(full["objective"]) == PROVENANCE["recipe"]["objective"]
    assert full["started from"] == f"sha256 {'ab' * 32}" and full["other settings"] == "batch_size=3, max_length=1234"
    assert full["versions"] == "torch 2.13.0, transformers 5.24.0, commit abc1234"
    assert full["target weights"] == f"sha256 {target.fingerprint()}"
    card = text_of(push_to_hub(made(tmp_path / "b", target, provenance={}), ID, folder=tmp_path / "B"))
    bare = rows_of(card)
    for row in ("data", "objective", "steps", "learning rate", "seed", "started from", "versions", "target weights"):
        assert bare[row] == LACKING, row
    assert f"losslessness: {LACKING}" in card and "license:" not in card and "base_model:" not in card
    assert full["block"] == bare["block"] == "4 slots, 3 draft tokens, layout infill"


def test_parameters_are_counted(target, tmp_path):
    drafter = make_drafter(target)
    head = make_head("refiner", drafter)
    save(tmp_path / "a", drafter, head)
    found = rows_of(text_of(push_to_hub(tmp_path / "a", ID, folder=tmp_path / "A")))
    for row, part in (("drafter", drafter), ("head", head)):
        count = sum(tensor.numel() for tensor in part.state_dict().values())
        assert f"{count / 1e6:.2f} M parameters" in found[row]


def test_no_folder_of_this_machine_is_published(target, tmp_path):
    for i, format in enumerate((None, "serving")):
        folder = push_to_hub(made(tmp_path / f"run{i}", target), ID, folder=tmp_path / f"out{i}", format=format)
        for file in folder.glob("*.*"):
            if file.suffix != ".safetensors":
                assert "somebody" not in file.read_text() and str(tmp_path) not in file.read_text(), file
        assert checkpoint.provenance_of(folder)["data"]["path"] == "rows"
    named = push_to_hub(made(tmp_path / "c", target), ID, folder=tmp_path / "C", base_model="lab/target")
    assert checkpoint.provenance_of(named)["target"]["name"] == "lab/target"


def test_a_hub_id_in_the_provenance_is_the_base_model(target, tmp_path):
    own = PROVENANCE | {"target": {"name": "lab/target-1B"}}
    card = text_of(push_to_hub(made(tmp_path / "a", target, provenance=own), ID, folder=tmp_path / "A"))
    assert "base_model: lab/target-1B" in card and 'from_pretrained("lab/target-1B"' in card


def test_results_of_these_weights_stand_in_the_card(target, tmp_path):
    one, two = made(tmp_path / "one", target), made(tmp_path / "two", target, seed=9)
    result = evaluated(tmp_path / "eval", one, two, max_new_tokens=96, dtype="bfloat16", target="/home/somebody/toy")
    card = text_of(push_to_hub(two, ID, folder=tmp_path / "out", results=result))
    assert "| two: drafter | 3.25 [3.12, 3.38] |" in card and "| two: refiner K=4 | 4.50 [" in card
    assert "one: " not in card and "| ar |" not in card
    protocol = rows_of(card)
    assert (protocol["max_new_tokens"], protocol["dtype"], protocol["bench"]) == ("96", "bfloat16", "gsm8k")
    assert "all 24 outputs equal plain autoregression: two: drafter" in card and "somebody" not in card
    served = push_to_hub(two, ID, folder=tmp_path / "zlab", results=result, format="zlab", drop=("head",))
    assert "two: drafter" in text_of(served) and "refiner K=4" not in text_of(served)


def test_results_of_other_weights_are_refused(target, tmp_path):
    one, two = made(tmp_path / "one", target), made(tmp_path / "two", target, seed=9)
    result = evaluated(tmp_path / "eval", one)
    with pytest.raises(ValueError, match="results: it measured .*one.* this checkpoint's weights have hash"):
        push_to_hub(two, ID, folder=tmp_path / "out", results=result)
    with pytest.raises(FileNotFoundError, match="result.json"):
        push_to_hub(one, ID, folder=tmp_path / "out", results=tmp_path / "nowhere")
    raw = json.loads((result / "result.json").read_text())
    raw["cells"][0]["methods"] = [row for row in raw["cells"][0]["methods"] if row["kind"] != "drafter"]
    (result / "result.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="no row of the drafter without its head"):
        push_to_hub(one, ID, folder=tmp_path / "out", results=result, format="zlab", drop=("head",))
    raw["protocol"]["checkpoint_sha256"] = "a: x; b: y"  # as merged results have it
    (result / "result.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="does not say which weights"):
        push_to_hub(one, ID, folder=tmp_path / "out", results=result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval", "one", "two"]


def test_one_commit_holds_the_checkpoint_and_its_card(api, target, tmp_path):
    source = made(tmp_path / "run", target)
    assert push_to_hub(source, ID, private=True, token="hf_mine", license="mit") == f"https://hub/{ID}"
    (_, token), create, upload = api.calls
    assert token == "hf_mine" and create == ("create_repo", ID, {"private": True, "exist_ok": True})
    assert upload[1] == ID and set(upload[2]) == {"config.json", "model.safetensors", "provenance.json", "README.md"}
    assert upload[2]["model.safetensors"] == (source / "model.safetensors").read_bytes()
    assert b"license: mit" in upload[2]["README.md"]
    patterns = upload[3]["delete_patterns"]  # what an older checkpoint left goes in the same commit, other files stay
    assert "*.safetensors" in patterns and not {"*", "*.json", "README.md"} & set(patterns)


def test_a_private_checkpoint_never_goes_to_a_public_repository(api, target, tmp_path):
    api.private = False
    with pytest.raises(ValueError, match="exists and is public; nothing was uploaded"):
        push_to_hub(made(tmp_path / "run", target), ID, private=True)
    assert [call[0] for call in api.calls] == ["token", "create_repo"]


@pytest.mark.parametrize("fault", [ConnectionError("no route"), huggingface_hub.errors.OfflineModeIsEnabled("offline")])
def test_a_hub_that_cannot_be_reached_is_named_with_the_remedy(api, fault, target, tmp_path):
    api.fault = fault
    with pytest.raises(OSError, match="not published .*same command again, or folder="):
        push_to_hub(made(tmp_path / "run", target), ID)


def test_without_a_token_nothing_is_done(api, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="no token .*hf auth login.*folder="):
        push_to_hub(tmp_path / "nowhere", ID)  # said before the checkpoint is looked for
    assert not api.calls


BAD = [
    (dict(repo_id="toy"), "repo_id='toy': not owner/name"),
    (dict(repo_id="a/b/c"), "repo_id='a/b/c'"),
    (dict(repo_id="a--b/c"), "repo_id='a--b/c'"),
    (dict(base_model="../target"), "base_model='../target'"),
    (dict(license="MIT\nbase_model: x"), "license="),
    (dict(format="gguf"), "format=gguf"),
    (dict(format="zlab"), "drop=head"),
    (dict(format="speculators"), "base_model: this format names its target"),
    (dict(drop=("tail",)), "drop=tail"),
]


@pytest.mark.parametrize("wrong, said", BAD, ids=[said for _, said in BAD])
def test_bad_settings_are_named_and_leave_nothing(wrong, said, target, tmp_path):
    source = made(tmp_path / "run", target)
    with pytest.raises(ValueError, match=re.escape(said)):
        push_to_hub(source, **{"repo_id": ID, "folder": tmp_path / "out", **wrong})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_nothing_is_written_over_a_folder(target, tmp_path):
    source = made(tmp_path / "run", target)
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="folder="):
        push_to_hub(source, ID, folder=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_research_file_needs_a_format(target, tmp_path):
    MAKERS["research-xpress"][1](tmp_path / "theirs", target)
    with pytest.raises(ValueError, match="read, not written; give format="):
        push_to_hub(tmp_path / "theirs", ID, folder=tmp_path / "out", target=target)


def test_every_folder_that_is_written_has_its_launch_lines():
    """The matrix lists what every format can hold; each has one case, and its lines are what a shell understands."""
    for format, _, layout, head, _ in matrix.CASES:
        if not FORMATS[format].WRITES:
            continue
        path = head and f"{head.__module__}.{head.__name__}"
        case = serve_lines.case_of(format, path, layout)
        for way in case.ways.values():
            assert way.notes and (way.line is None or way.status != serve_lines.NO_READ)
            assert (way.status in (serve_lines.RUN, serve_lines.READ)) <= (way.line is not None)
            if way.line is None:
                continue
            words = shlex.split(serve_lines.launch(way.line, "lab/target", "me/draft", 7))
            assert "me/draft" in " ".join(words) and not re.search(
                "TARGET|CHECKPOINT|NUM_DRAFT|WINDOW", " ".join(words)
            )
            if "--speculative-config" in words:
                asked = json.loads(words[words.index("--speculative-config") + 1])
                assert asked["model"] == "me/draft" and asked["num_speculative_tokens"] == 7 and "lab/target" in words
            elif "DFLASH" in words:  # SGLang counts the anchor
                assert words[-1] == "8"
    assert {case.format for case in serve_lines.CASES} == {name for name, kind in FORMATS.items() if kind.WRITES}


def test_card_and_readme_draw_from_one_table(target, tmp_path):
    assert serve_lines.section() in README, "README's Serve it is serve_lines.section(); paste it anew"
    used = {name for case in serve_lines.CASES for way in case.ways.values() for name in way.notes}
    assert used == set(serve_lines.NOTES)
    source = made(tmp_path / "run", target, "markov", layout="next")
    card = text_of(push_to_hub(source, ID, folder=tmp_path / "out", format="dspark", base_model="lab/target"))
    case = serve_lines.case_of("dspark", "xpress.heads.markov.MarkovHead", "next")
    for way in case.ways.values():
        assert serve_lines.launch(way.line, "lab/target", ID, 4) in card and serve_lines.SAYS[way.status] in card
    assert serve_lines.NOTES["gpu"][0] in card and serve_lines.NOTES["confidence"][0] not in card


def test_the_script_takes_the_same_settings(target, tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "scripts" / "push_to_hub.py"))["main"]
    source = made(tmp_path / "run", target)
    main([str(source), ID, f"folder={tmp_path / 'out'}", "license=apache-2.0", "format=null", "private=false"])
    assert "written to" in capsys.readouterr().out and "license: apache-2.0" in text_of(tmp_path / "out")
    for words, said in (
        ([str(source), ID, "lisence=mit"], "no setting is named lisence"),
        ([str(source), "format=zlab"], "give CHECKPOINT owner/name"),
        ([str(source), ID, "private=yes"], "private=yes"),
        ([str(source), "name", f"folder={tmp_path / 'b'}"], "repo_id='name'"),
        ([str(tmp_path / "none"), ID, f"folder={tmp_path / 'b'}"], "no config.json there"),
    ):
        with pytest.raises(SystemExit, match=re.escape(said)):
            main(words)


def test_a_reduced_vocabulary_is_counted(target, tmp_path):
    source = made(tmp_path / "run", target, draft_ids=REDUCED)
    card = text_of(push_to_hub(source, ID, folder=tmp_path / "out"))
    assert rows_of(card)["draft vocabulary"] == f"{len(REDUCED)} of {target.vocab_size} ids"

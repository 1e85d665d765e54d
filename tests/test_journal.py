"""A measurement's folder: nothing is lost or measured twice, and the numbers are those of its lines."""

import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from disk import saved_target
from hydra import compose, initialize_config_dir
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toys import make_drafter, make_head

from xpress import build, evaluate, markdown, save
from xpress.checkpoint import WEIGHTS
from xpress.evaluate import conversation, render
from xpress.files import file_hash
from xpress.journal import LINES, SETTINGS, Journal
from xpress.measuring import EVAL_KEYS, Measurement, settle, short_names
from xpress.sampling import GREEDY, argmax
from xpress.verify import Verdict

ROOT = Path(__file__).resolve().parents[1]
CLOCKED = ("seconds", "time", "memory")
TALKS = [["How many are there?", "And now?"], ["Who asks?"], ["What is it?", "Why?"]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, two drafters to start from, checkpoints with and without head, prompts; some folders share a name."""
    at = tmp_path_factory.mktemp("world")
    target, about = saved_target(at / "llama", num_hidden_layers=3)
    for seed, name in enumerate(("start", "other/start"), 5):
        save(at / name, make_drafter(target, layers=1, seed=seed), None, about)
    init = {"path": str(at / "start"), "sha256": file_hash(at / "start" / WEIGHTS)}
    for seed, name in enumerate(("a/run", "b/run"), 7):
        drafter = make_drafter(target, layers=1, seed=seed)
        save(at / name, drafter, make_head("refiner", drafter, std=0.3), about | {"init": init})
    save(at / "plain", make_drafter(target, layers=1, seed=9), None, about)
    records = {"mt_bench": [{"prompt": turns} for turns in TALKS]}
    records["alpaca"] = [{"instruction": f"Ask {i} of them"} for i in range(5)]
    (at / "sets").mkdir()
    for name, rows in records.items():
        (at / "sets" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SimpleNamespace(at=at, target=target)


def settings_of(world, out, **changes) -> dict:
    """The shipped defaults, on the toys."""
    raw = yaml.safe_load((ROOT / "configs" / "eval_tau.yaml").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("defaults", "hydra")}
    raw |= {"checkpoint": str(world.at / "a/run"), "data_dir": str(world.at / "sets"), "device": "cpu", "out": str(out)}
    return (
        raw | {"bench": "mt_bench", "max_new_tokens": 4, "passes": [1], "methods": ["ar", "drafter", "head"]} | changes
    )


def measuring(world, out, **changes) -> Measurement:
    return Measurement(settings_of(world, out, **changes))


def lines_of(folder) -> list[dict]:
    return [json.loads(text) for text in (Path(folder) / LINES).read_text().splitlines()]


def timeless(lines) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in lines]


TALKING = dict(turns="all", rounds=2, batch_size=2)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """A measurement that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    result = measuring(world, folder, **TALKING).run()
    return SimpleNamespace(folder=folder, result=result, text=(folder / LINES).read_text(), lines=lines_of(folder))


# --- killed and resumed -----------------------------------------------------------------------------------------------


def cut(whole, folder, size: int) -> Path:
    """What a kill after `size` bytes of the lines leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(whole.folder / SETTINGS, folder)
    (folder / LINES).write_text(whole.text[:size])
    return folder


def groups_of(lines) -> list[list[dict]]:
    found = [[]]
    for line in lines:
        found[-1].append(line)
        if line["last"]:
            found.append([])
    assert not found.pop()
    return found


def test_the_journal_survives_a_kill_at_any_byte(whole, tmp_path):
    """Whole groups are kept, the rest of one is gone, and what is added then makes the same file to the byte: at the
    places around every line's end, and anywhere."""
    groups, made_of = groups_of(whole.lines), json.loads((whole.folder / SETTINGS).read_text())
    ends = [i + 1 for i, letter in enumerate(whole.text) if letter == "\n"]
    assert len(groups) == 4 and len(ends) == len(whole.lines) > 12

    def check(size):
        folder = cut(whole, tmp_path / "out", size)
        journal = Journal(folder, made_of, resume=True)
        kept = journal.lines
        assert kept == [x for group in groups for x in group][: len(kept)] and (not kept or kept[-1]["last"])
        there = [sum(map(len, groups[: n + 1])) for n in range(4)]  # a last line may lack its end, but nothing else
        whole_groups = sum(size >= ends[n - 1] - 1 for n in there)
        assert len(kept) == sum(map(len, groups[:whole_groups]))
        for group in groups[whole_groups:]:
            journal.add(group)
        journal.close()
        assert (folder / LINES).read_text() == whole.text

    for end in ends:
        for size in (end - 2, end - 1, end, end + 1):
            check(size)
    settings(max_examples=60, deadline=None)(example(0)(given(st.integers(0, len(whole.text)))(check)))()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.55, 0.99])
def test_a_resumed_measurement_ends_as_the_uninterrupted_one(world, whole, tmp_path, share, monkeypatch):
    """The same lines, times aside; what was measured keeps its very times, for it is not measured again."""
    folder, asked, real = cut(whole, tmp_path / "out", int(share * len(whole.text))), [], evaluate.converse
    count = lambda *args, **how: asked.append(1) or real(*args, **how)  # noqa: E731
    monkeypatch.setattr(evaluate, "converse", count)
    measurement = measuring(world, folder, **TALKING, resume=True)
    kept = list(measurement.journal.lines)
    result = measurement.run()
    lines = lines_of(folder)
    assert timeless(lines) == timeless(whole.lines) and lines[: len(kept)] == whole.lines[: len(kept)]
    assert len(asked) == 2 + 4 - (
        len(groups_of(kept)) if kept else 0
    )  # the round that is thrown away, and what is left
    for ours, theirs in zip(result["cells"], whole.result["cells"]):
        for row, other in zip(ours["methods"], theirs["methods"]):
            assert [row[key] for key in ("tau", "tau_interval", "histogram", "differences")] == [
                other[key] for key in ("tau", "tau_interval", "histogram", "differences")
            ]


@pytest.mark.parametrize("at", [1, 9, 23, 28, 29, 40])
def test_ctrl_c_keeps_whole_groups(world, whole, tmp_path, at):
    """Raised from the bar at any of its steps; in the same process the measurement goes on."""
    seen = []

    def interrupting(*step):
        seen.append(step)
        if len(seen) == at:
            raise KeyboardInterrupt

    measurement = measuring(world, tmp_path / "out", **TALKING)
    with pytest.raises(KeyboardInterrupt):
        measurement.run(interrupting)
    left = lines_of(tmp_path / "out") if (tmp_path / "out" / LINES).exists() else []
    assert timeless(left) == timeless(whole.lines)[: len(left)] and (not left or left[-1]["last"])
    assert not (tmp_path / "out" / "result.json").exists()
    if at == 40:
        assert left
        measuring(world, tmp_path / "out", **TALKING, resume=True).run()
        assert timeless(lines_of(tmp_path / "out")) == timeless(whole.lines)


# --- whose folder it is -----------------------------------------------------------------------------------------------

OTHER = [
    ({"seed": 1}, "seed: was 0, now 1"),
    ({"max_new_tokens": 5}, "max_new_tokens: was 4, now 5"),
    ({"passes": [2]}, "methods: was .*K=1.*, now .*K=2"),
    ({"temperature": 1.0}, "accept: was exact, now rejection; temperature: was 0.0, now 1.0"),
    ({"batch_size": [2, 1]}, "batch_size: was .2., now .2, 1."),
    ({"turns": "first", "rounds": 1}, "rounds: was 2, now 1; turns: was all, now first"),
    ({"stop_strings": "ab"}, r"stop_strings: was \[\], now \['ab'\]"),
    ({"checkpoint": "{at}/b/run"}, "checkpoint: was .*a/run.*checkpoint_sha256: was"),
    ({"bench": "alpaca"}, "bench: was .*mt_bench.*, now .*alpaca.*prompts_sha256: was"),
    ({"dtype": "bfloat16"}, "dtype: was float32, now bfloat16"),
    ({"target": {"name": None, "loop": "plain"}}, "loop: was lean, now plain"),
    ({"samples": 2}, "samples: was None, now 2"),
]


@pytest.mark.parametrize("changes, named", OTHER, ids=[" ".join(changes) for changes, _ in OTHER])
def test_another_measurement_is_not_resumed(world, whole, tmp_path, changes, named):
    folder = cut(whole, tmp_path / "out", 10_000)
    before = (folder / LINES).read_text()
    changes = {k: v.format(at=world.at) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=f"out=.*was begun with other settings: .*{named}.*give another out="):
        measuring(world, folder, **{**TALKING, **changes}, resume=True)
    assert (folder / LINES).read_text() == before


def test_recorded_answers_give_the_same_tau_and_promise_nothing_else(world, tmp_path):
    how = dict(batch_size=2, passes=[1, "auto"], turns="all")
    results = [measuring(world, tmp_path / kind, answers=kind, **how).run() for kind in ("live", "recorded")]
    live, recorded = (result["cells"][0] for result in results)
    for row, own in zip(live["methods"], recorded["methods"]):
        same = ("label", "tau", "tau_interval", "accept_at", "settled", "passes_used", "tokens", "loops")
        assert [own[key] for key in same] == [row[key] for key in same]
        assert row["lossless"] is True and row["tokens_per_second"] > 0
        assert own["lossless"] is own["tokens_per_second"] is own["speedup"] is own["peak_memory"] is None
        assert own["time"] == {} and own["differences"] == []
    taus = lambda cell: [pair for pair in cell["paired"] if pair["metric"] == "tau"]  # noqa: E731
    assert taus(recorded) == taus(live)
    text = markdown.write_report(results[1], tmp_path / "recorded")[-1].read_text()
    assert "not checked" in text and "recorded" in text
    for wrong in ({"temperature": 1.0}, {"rounds": 2}, {"passes": ["best"]}):
        with pytest.raises(ValueError, match="answers=recorded: one round at temperature 0"):
            measuring(world, tmp_path / "wrong", answers="recorded", **wrong)


@pytest.mark.parametrize(("given", "asked"), [
    ((), {None: [0, 2, "auto"]}),
    (("passes=[1,auto]",), {None: [1, "auto"]}),
    (("passes={ours:[1,2],theirs:sequential}",), {"ours": [1, 2], "theirs": ["sequential"]}),
])  # fmt: skip
def test_passes_on_the_command_line(given, asked):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("eval_tau", overrides=list(given))
    assert settle(build.plain(cfg, EVAL_KEYS))["passes"] == asked


def test_each_checkpoint_may_have_passes_of_its_own(world, tmp_path):
    checkpoints = [str(world.at / name) for name in ("a/run", "b/run", "plain")]
    own = {"a/run": [1, "sequential"], "b/run": "auto"}
    made = measuring(world, tmp_path / "out", checkpoint=checkpoints, passes=own, methods=["ar", "head"])
    made.journal.close()
    heads = [(method.checkpoint, method.passes) for method in made.methods() if method.kind == "head"]
    assert heads == [("a/run", 1), ("a/run", "sequential"), ("b/run", "auto")]
    for wrong in ({"a/run": [1]}, own | {"plain": [1]}, own | {"c": [1]}):
        with pytest.raises(ValueError, match="passes for .*: give a list, or a list for each of a/run, b/run"):
            measuring(world, tmp_path / "wrong", checkpoint=checkpoints, passes=wrong)
    with pytest.raises(ValueError, match="passes=-1"):
        measuring(world, tmp_path / "wrong", checkpoint=checkpoints, passes=own | {"b/run": -1})


def test_candidates_and_bare_drafters_are_part_of_a_measurement(world, tmp_path):
    """Other candidates would be missing in the groups that are measured; another drafter under the same label would be
    mixed with the first."""
    chosen = dict(bench="alpaca", passes=["best"], candidates=[1, 2])
    measuring(world, tmp_path / "best", **chosen).journal.close()
    with pytest.raises(ValueError, match=r"candidates: was \[1, 2\], now \[1, 3\]"):
        measuring(world, tmp_path / "best", **(chosen | {"candidates": [1, 3]}), resume=True)
    names = [f"bare:{world.at}/start", f"bare:{world.at}/other/start"]
    measuring(world, tmp_path / "bare", methods=names[:1]).journal.close()
    with pytest.raises(ValueError, match="bare_sha256: was"):
        measuring(world, tmp_path / "bare", methods=names[1:], resume=True)


def test_every_drafter_is_compared_with_the_bare_ones_before_it(world, tmp_path):
    starts = [f"bare:{world.at}/start", f"bare:{world.at}/other/start"]
    made = measuring(world, tmp_path / "out", methods=["ar", *starts, "drafter", "head"], passes=[1])
    pairs = [(pair["a"], pair["b"]) for pair in made.run()["cells"][0]["paired"] if pair["metric"] == "tau"]
    first, second, drafter, head = [method.label for method in made.methods()[1:]]
    assert pairs == [
        (second, first),
        *((row, bare) for row in (drafter, head) for bare in (first, second)),
        (head, drafter),
    ]


def test_a_folder_belongs_to_one_measurement(world, whole, tmp_path):
    """Finished, used by something else, in use right now, or not there at all."""
    for resume in (False, True):
        with pytest.raises(ValueError, match="this measurement is finished; give another out="):
            measuring(world, whole.folder, **TALKING, resume=resume)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="the folder is not empty; give another out=, or resume=true"):
        Journal(tmp_path / "used", {})
    with pytest.raises(ValueError, match="nothing to resume, there is no settings.json"):
        Journal(tmp_path / "used", {}, resume=True)
    with pytest.raises(ValueError, match="nothing to resume, there is no such folder"):
        Journal(tmp_path / "none", {}, resume=True)
    assert not (tmp_path / "none").exists()
    first = Journal(tmp_path / "out", {"a": 1})
    for resume in (False, True):
        with pytest.raises(ValueError, match="another measurement is writing to this folder; give another out="):
            Journal(tmp_path / "out", {"a": 1}, resume=resume)
    first.close()
    Journal(tmp_path / "out", {"a": 1}, resume=True).close()
    with pytest.raises(ValueError, match="not empty"):
        Journal(tmp_path / "out", {"a": 1})


def test_two_that_start_in_the_same_second_have_folders_of_their_own(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [Measurement(settings_of(world, "") | {"out": None}).journal.folder for _ in range(3)]
    assert len(set(folders)) == 3 and all((folder / SETTINGS).exists() for folder in folders)


# --- the numbers are those of the lines -------------------------------------------------------------------------------


def tau_by_hand(file: Path, bench: str, batch_size: int, method: str):
    accepted = rounds = 0
    for text in file.open():
        line = json.loads(text)
        here = line["bench"], line["batch_size"], line["phase"], line["method"]
        if here == (bench, batch_size, "report", method):
            accepted += sum(line["accepted"])
            rounds += len(line["accepted"])
    return 1 + accepted / rounds


MEASURED = [
    dict(bench=["mt_bench", "alpaca"], batch_size=[1, 2], rounds=2),
    dict(bench="alpaca", passes=["best", 3], candidates=[1, 2], batch_size=[2, 3]),
    dict(bench="mt_bench", turns="all", temperature=1.0, methods=["ar", "bare", "head"], passes=[0, "auto"]),
]


@pytest.mark.parametrize("changes", MEASURED, ids=["lists", "best", "sampled"])
def test_tau_is_what_plain_json_makes_of_the_lines(world, tmp_path, changes):
    """Exactly; and tau's interval does not depend on the batch size."""
    measuring(world, tmp_path / "out", **changes).run()
    result, intervals = json.loads((tmp_path / "out" / "result.json").read_text()), {}
    for cell in result["cells"]:
        for row in cell["methods"]:
            where = cell["bench"], cell["batch_size"], row["label"]
            assert row["tau"] == tau_by_hand(tmp_path / "out" / LINES, *where)
            assert row["tau"] == pytest.approx(1 + sum(row["accept_at"].values()))
            assert intervals.setdefault((cell["bench"], row["label"]), row["tau_interval"]) == row["tau_interval"]
            assert row["lossless"] is (None if "temperature" in changes else True)
    assert len(result["cells"]) == len(changes["bench"] if isinstance(changes["bench"], list) else [1]) * len(
        changes.get("batch_size", [1])
    )


def test_a_screened_readout_measures_the_same(world, tmp_path):
    """Same tokens, same acceptances; top1 is the drafter's own choice, whatever the head says."""
    found = {}
    for readout in ("full", "int8", "int4", "bf16", "top1"):
        measuring(world, tmp_path / readout, readout=readout, passes=[1, "auto"]).run()
        result = json.loads((tmp_path / readout / "result.json").read_text())
        assert result["protocol"]["readout"] == readout
        found[readout] = [timeless([line])[0] for line in lines_of(tmp_path / readout)]
    assert found["full"] == found["int8"] == found["int4"] == found["bf16"] != found["top1"]
    drafter, *heads = [
        [line["accepted"] for line in found["top1"] if name in line["method"]] for name in ("drafter", "K=1", "auto")
    ]
    assert heads == [drafter, drafter]


# --- K that is chosen on other prompts --------------------------------------------------------------------------------


def test_best_is_chosen_on_prompts_that_are_not_reported(world, tmp_path, monkeypatch):
    """The clock says that K = 2 is best on the prompts that choose and K = 1 on those that are reported; for the other
    set the other way round. Each set takes what its own choosing prompts say."""
    raw = settings_of(world, tmp_path / "out", bench=["alpaca", "mt_bench"], passes=["best"], candidates=[2, 1, 2, 9])
    with open(world.at / "sets" / "mt_bench.jsonl", "a") as file:
        file.write(json.dumps({"prompt": ["One more"]}) + "\n")
    try:
        measurement = Measurement(raw)
    finally:
        text = "".join(json.dumps({"prompt": turns}) + "\n" for turns in TALKS)
        (world.at / "sets" / "mt_bench.jsonl").write_text(text)
    halves = {bench: (chosen[::2], chosen[1::2]) for bench, chosen in measurement.sets.items()}
    show = lambda prompt: str(render(measurement.target.tokenizer, conversation(prompt, [])))  # noqa: E731
    fast = {}
    for bench, (choosing, reported) in halves.items():
        first = 2 if bench == "alpaca" else 1
        fast |= {show(prompt): first for prompt in choosing} | {show(prompt): 3 - first for prompt in reported}
    real = evaluate.respond

    def clocked(target, ids, method, **how):
        found = real(target, ids, method, **how)
        for own, (_, counts) in zip(ids, found):
            object.__setattr__(counts, "seconds", 1.0 if method.passes == fast[str(own)] else 50.0)
        return found

    monkeypatch.setattr(evaluate, "respond", clocked)
    cells = {cell["bench"]: cell for cell in measurement.run()["cells"]}
    for bench, K in (("alpaca", 2), ("mt_bench", 1)):
        cell, (choosing, reported) = cells[bench], halves[bench]
        assert cell["best"]["passes"] == K and cell["best"]["validation_prompts"] == len(choosing)
        assert [row["passes"] for row in cell["best"]["validation"]] == [2, 1]  # more than G passes change nothing
        assert [row["label"] for row in cell["methods"]] == ["ar", "drafter", f"refiner K={K}"]
        lines = [x for x in lines_of(tmp_path / "out") if x["bench"] == bench]
        used = {phase: {x["prompt"] for x in lines if x["phase"] == phase} for phase in ("validation", "report")}
        assert used == {"validation": {p.id for p in choosing}, "report": {p.id for p in reported}}
        assert not used["validation"] & used["report"] and cell["prompts"] == len(reported)


REFUSED = [
    ({"checkpoint": "{at}/plain"}, "passes=best: K is a head's, and no checkpoint has one"),
    ({"methods": ["ar", "drafter"]}, "passes=best: K is a head's, and methods leaves heads out"),
    ({"candidates": [4, 9]}, "candidates=4, 9: after 3 passes nothing changes; give smaller ones"),
    ({"candidates": ["auto"]}, "candidates=auto: give whole numbers"),
    ({"candidates": [0, 1]}, "candidates=0: give whole numbers"),
    ({"candidates": 7}, "candidates=7: after 3 passes"),
]


@pytest.mark.parametrize("changes, named", REFUSED, ids=[str(list(c.values())) for c, _ in REFUSED])
def test_what_best_cannot_choose_from_is_refused_at_the_start(world, tmp_path, changes, named):
    changes = {k: v.format(at=world.at) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=named):
        measuring(world, tmp_path / "out", **({"bench": "alpaca", "passes": ["best", 1]} | changes))
    assert not (tmp_path / "out").exists()


# --- methods ----------------------------------------------------------------------------------------------------------

RUN, RUN_B = "{at}/a/run", "{at}/b/run"
START, OTHER_START = "bare:{at}/start", "bare:{at}/other/start"
ROWS = [
    (dict(methods=["ar"]), ["ar"]),
    (dict(methods="ar"), ["ar"]),
    (dict(methods=["head"], passes=2), ["ar", "refiner K=2"]),
    (
        dict(passes=[0, 2, 2, "auto", "sequential"]),
        ["ar", "drafter", "refiner K=2", "refiner K=auto", "refiner sequential"],
    ),
    (dict(methods=["head"], passes=[0, 1]), ["ar", "drafter", "refiner K=1"]),
    (dict(methods=["drafter"]), ["ar", "drafter"]),
    (dict(methods=["ar", "bare"]), ["ar", "bare"]),
    (dict(methods=["bare"], checkpoint="{at}/plain"), ["ar", "bare (not given)"]),
    (dict(checkpoint="{at}/plain", methods=["ar", "bare", "drafter", "head"]), ["ar", "bare (not given)", "drafter"]),
    (dict(checkpoint="{at}/plain", methods=["head"]), ["ar", "drafter"]),
    (dict(methods=[OTHER_START]), ["ar", "bare"]),
    (dict(methods=[START, OTHER_START]), ["ar", "bare:world0/start", "bare:other/start"]),
    (dict(methods=[OTHER_START, "bare"]), ["ar", "bare:other/start", "bare:world0/start"]),
    (
        dict(checkpoint=[RUN, RUN_B], methods=["ar", "bare", "drafter", "head"]),
        ["ar", "bare", "a/run: drafter", "a/run: refiner K=1", "b/run: drafter", "b/run: refiner K=1"],
    ),
    (dict(checkpoint=[RUN, RUN], methods=["head"]), ["ar", "run (1): refiner K=1", "run (2): refiner K=1"]),
    (dict(checkpoint=[RUN, "{at}/plain"]), ["ar", "run: drafter", "run: refiner K=1", "plain: drafter"]),
]


@pytest.mark.parametrize("changes, wanted", ROWS, ids=[str(i) for i in range(len(ROWS))])
def test_rows_are_told_apart(world, tmp_path, changes, wanted):
    full = lambda v: [x.format(at=world.at) if isinstance(x, str) else x for x in v] if isinstance(v, list) else v  # noqa: E731
    changes = {k: v.format(at=world.at) if isinstance(v, str) else full(v) for k, v in changes.items()}
    measurement = measuring(world, tmp_path / "out", **changes)
    methods = measurement.methods()
    assert [m.label + (f" ({m.note})" if m.note else "") for m in methods] == wanted
    assert len({m.label for m in methods}) == len(methods) and methods[0].kind == "ar"
    for method in methods:
        assert (method.drafter is None) == (method.kind == "ar" or method.note is not None)
        assert (method.head is not None) == (method.kind == "head")
    if len(methods) < 4 and changes.get("checkpoint") is None:
        cell = measurement.run()["cells"][0]
        assert [row["label"] for row in cell["methods"]] == [m.label for m in methods]
        assert all(row["lossless"] for row in cell["methods"]) and cell["methods"][0]["tau"] == 1


def test_short_names():
    assert short_names([]) == [] and short_names(["."]) == [". (1)"]
    assert short_names(["x"]) == ["x"] and short_names(["x/run/", "y/run", "run"]) == ["x/run", "y/run", "run"]
    assert short_names(["a/run", "./a/run"]) == ["run (1)", "run (2)"] and short_names([None]) == ["None"]


# --- the program ------------------------------------------------------------------------------------------------------


def believe_everything(draft, scores, sampling=GREEDY, noise=None):
    n = draft.ids.shape[1]
    return Verdict(torch.full((len(scores),), n), argmax(scores[:, n]))


@pytest.mark.parametrize("broken", [False, True])
def test_a_wrong_output_ends_the_program_with_1(world, tmp_path, monkeypatch, capsys, broken):
    """After everything is written and printed."""
    spec = importlib.util.spec_from_file_location("eval_tau_script", ROOT / "scripts" / "eval_tau.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(build, "evaluation", lambda cfg, say: measuring(world, tmp_path / "out"))
    if broken:
        monkeypatch.setattr(importlib.import_module("xpress.decode"), "verify", believe_everything)
        with pytest.raises(SystemExit) as ended:
            script.main.__wrapped__(SimpleNamespace(metrics=None, check=None))
        assert "differs from plain autoregression by more than a tie" in str(ended.value.code)
    else:
        script.main.__wrapped__(SimpleNamespace(metrics=None, check=None))
    printed = capsys.readouterr().out
    assert ("FAILURE" in printed) == broken and "result: " in printed and (tmp_path / "out" / "report.md").exists()
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["cells"][0]["methods"]
    assert [row["lossless"] for row in rows] == [True, not broken, not broken]
    assert all(found["prompt"] and found["turn"] == 1 and found["gap"] >= 0 for found in rows[1]["differences"])


def test_ctrl_c_says_how_to_go_on(world, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("eval_tau_script", ROOT / "scripts" / "eval_tau.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(build, "evaluation", lambda cfg, say: measuring(world, tmp_path / "out"))

    class Interrupting(script.Bars):
        def __call__(self, *step):
            raise KeyboardInterrupt

    monkeypatch.setattr(script, "Bars", Interrupting)
    with pytest.raises(SystemExit, match=f"go on with the same command and out={tmp_path / 'out'} resume=true"):
        script.main.__wrapped__(SimpleNamespace(metrics=None, check=None))

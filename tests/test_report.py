"""What people see of a result is what its JSON says; nothing that is missing in it is in the way."""

import contextlib
import copy
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from results_toy import RECALL, G, make_cell, make_result, make_row
from rich.console import Console

from xpress import figures, markdown, panels, report, results, tables

ROOT = Path(__file__).resolve().parents[1]


def printed(result, metrics=None) -> str:
    console = Console(file=io.StringIO(), width=240)
    report.print_report(result, metrics, console)
    return console.file.getvalue()


def rows_of(text: str, title: str, after: str = "") -> dict[str, list[str]]:
    """The table of a report.md below the line that has `title`, the first one after the line with `after`."""
    lines = text[text.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if title in line)
    start = next(i for i in range(start, len(lines)) if lines[i].startswith("|"))
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[label] = cells
    return found


def percents(values):
    return [f"{100 * value:.1f}%" for value in values]


def test_every_number_of_a_method_is_in_the_markdown():
    result = make_result(("gsm8k", "math500"), (1, 2))
    text = markdown.markdown(result)
    for cell in result["cells"]:
        here = f"## {cell['bench']} · batch size {cell['batch_size']} · 24 prompts · 2 truncated"
        find = lambda title, here=here: rows_of(text, title, here)  # noqa: E731
        main, times, counts = find(here), find("Time of a round"), find("<summary>Counts")
        rank = "Rank of the refined token in the drafter's logits by draft token, "
        for row in cell["methods"]:
            name, pair = (
                row["label"],
                lambda key, row=row: "{:.2f} [{:.2f}, {:.2f}]".format(row[key], *row[f"{key}_interval"]),
            )
            assert main[name] == [
                pair("tau"),
                f"{row['tau_macro']:.2f}",
                f"{row['tokens_per_round']:.2f}",
                f"{row['passes_used']:.2f}" if row["kind"] == "head" else "–",
                f"{row['tokens_per_second']:.1f}",
                pair("speedup"),
                f"{row['peak_memory'] / 1e9:.2f}",
                "yes (1 tie)" if row["differences"] else "yes",
            ]
            assert counts[name] == [
                pair("tau_macro"),
                f"{row['tau_without_loops']:.2f}",
                *percents([row["loops"]]),
                str(row["longest"]),
                *percents([row["harness_share"]]),
                *(str(row[key]) for key in ("rounds", "tokens", "responses")),
            ]
            total = sum(row["time"].values())
            parts = [row["time"][key] for key in ("draft", "readout", "refine", "verify", "harness")]
            assert times[name] == [f"{1e3 * s:.2f} ({100 * s / total:.1f}%)" for s in parts] + [f"{1e3 * total:.2f}"]
            if row["kind"] == "ar":
                continue
            slots = {
                "accept_at[k]": percents(row["accept_at"].values()),
                "Conditional": percents(row["conditional"]),
                "Expected": percents(row["expected"]),
                "Observed": percents(row["observed"]),
                f"{rank}mean": [f"{value:.2f}" for value in row["refined_rank"]["mean"]],
                f"{rank}share of rank 1": percents(row["refined_rank"]["first"]),
                "Rounds by accepted": [str(count) for count in row["histogram"]],
                **{f"recall@{k} ": percents(row["recall"][k]) for k in RECALL},
            }
            for title, shown in slots.items():
                assert find(title)[name] == shown, title
            assert find("Conditional")[f"{name}, rounds"] == [str(count) for count in row["conditional_count"]]
            if row["settled"]:
                assert find("Blocks settled")[name] == percents(row["settled"])
                assert find("Blocks settled")["method"] == [f"K = {K}" for K in range(G + 1)]


def test_protocol_warnings_choice_of_passes_and_pairs_are_in_both_reports():
    result = make_result(warnings=["prompts are rendered otherwise | than in <training>"])
    result["protocol"]["checkpoints"] = ["outputs/my_run", "outputs/other"]
    text, shown = markdown.markdown(result), printed(result)
    protocol = rows_of(text, "## Protocol")
    shown_values = {key: [str(value)] for key, value in result["protocol"].items()}
    shown_values["checkpoints"] = ["outputs/my_run, outputs/other"]
    assert shown_values.items() <= protocol.items()
    assert "**WARNING:** prompts are rendered otherwise \\| than in &lt;training>" in text
    assert shown.startswith("WARNING: prompts are rendered otherwise | than in <training>")
    for said in (text, shown):
        assert "best K = 4, chosen on 12 other prompts (K = 1: 26.3 tokens/s, K = 2: 27.3 tokens/s" in said
    pair = ["refiner K=auto", "bare", "0.312 [0.204, 0.417]", "1.287 [1.119, 1.445]"]
    assert "| " + " | ".join(pair) + " |" in text and "### Compared, paired over prompts" in text
    assert pair in [[part.strip() for part in line.strip("│").split("│")] for line in shown.splitlines()]
    console = Console(file=io.StringIO(), width=40)
    report.print_protocol({"bench": "gsm8k", "list": ["[a]", 2], "top_k": None}, console)
    assert console.file.getvalue().split() == ["bench=gsm8k", "list=[a],", "2", "top_k=None"]


def test_columns_are_chosen_by_name_and_an_unknown_one_lists_the_known():
    result = make_result()
    table = tables.main_table(tables.whole(result)["cells"][0], ["longest", "K"])
    assert [name for name, _ in table.columns] == ["method", "longest run", "K"]
    assert table.rows[-1] == ["refiner K=auto", "7", "auto"] and table.rows[0] == ["ar", "0", "–"]
    for names in (["tau", "speed"], []):
        with pytest.raises(ValueError) as error:
            printed(result, names)
        assert all(name in str(error.value) for name in report.METRICS) and "speed" in str(error.value)
    for name, metric in report.METRICS.items():
        assert metric.meaning and metric.title in printed(result, [name])


def test_k_has_a_column_only_where_a_label_does_not_tell_it():
    cell = {"methods": [make_row("mine", head="Own", passes=2), make_row("drafter", "drafter")]}
    table = tables.main_table(tables.whole({"cells": [cell]})["cells"][0])
    assert table.columns[1][0] == "K" and [row[1] for row in table.rows] == ["2", "–"]
    assert "K" not in [name for name, _ in tables.main_table(tables.whole(make_result())["cells"][0]).columns]


def test_a_row_without_numbers_shows_its_note():
    result = make_result()
    result["cells"][0]["methods"][1] = {"label": "bare", "kind": "bare", "note": "not given"}
    assert rows_of(markdown.markdown(result), "## gsm8k")["bare"] == ["not given", *[""] * 7]
    assert re.search(r"│ bare +│ +not given │ +│", printed(result))


def test_what_differs_from_autoregression_is_listed_place_by_place():
    ties = make_row(
        "a", differences=[{"prompt": "p", "at": 3, "gap": 1e-4, "behind": 2e-4, "limit": 1e-3, "tie": True}]
    )
    bad = {"at": 9, "gap": 0.5, "limit": 1e-3, "tie": False}
    wrong = make_row("b", lossless=False, differences=[{"prompt": "q", "turn": 1, **bad}, {"prompt": "r", **bad}])
    sampled, lost = make_row("c", lossless=None), make_row("e", lossless=False)
    clean = [make_row("d"), make_row("f"), make_row("ar", "ar")]
    result = {"format": 1, "cells": [{"bench": "x", "prompts": 24, "methods": [ties, wrong, sampled, lost, *clean]}]}
    lines = [
        "not checked: c",
        "FAILURE, at a place that was not recorded: e",
        "all 24 outputs equal plain autoregression: d, f",
        "a: the outputs of 1 of 24 prompts differ",
        "  tie: p, token 3: gap 1.00e-04, its token 2.00e-04 behind, limit 1.00e-03",
        "b: the outputs of 2 of 24 prompts differ",
        "  FAILURE: q, turn 1, token 9: gap 5.00e-01, limit 1.00e-03",
        "  FAILURE: r, token 9: gap 5.00e-01, limit 1.00e-03",
    ]
    assert "\n".join(lines) in printed(result)
    section = markdown.markdown(result).partition("### Against plain autoregression\n\n")[2].splitlines()
    assert [line.strip().removeprefix("- ") for line in section[: len(lines)]] == [line.strip() for line in lines]
    verdicts = {row["label"]: tables.verdict(row) for row in result["cells"][0]["methods"]}
    assert verdicts | {"d": "", "f": "", "ar": ""} == {
        **{"a": "yes (1 tie)", "b": "NO", "c": "–", "e": "NO"},
        **{"d": "", "f": "", "ar": ""},
    }


def test_throughput_has_a_row_a_method_and_a_column_a_batch_size():
    result = make_result(("gsm8k", "alpaca"), (4, 1, 2))
    result["cells"] = [cell for cell in result["cells"] if cell["bench"] == "gsm8k" or cell["batch_size"] == 1]
    result["cells"][1]["methods"][-1]["tokens_per_second"] = None
    found = rows_of(markdown.markdown(result), "### gsm8k: tokens/s")
    assert found["method"] == ["batch size 1", "batch size 2", "batch size 4"]
    at = {cell["batch_size"]: cell["methods"] for cell in result["cells"] if cell["bench"] == "gsm8k"}
    for place, row in enumerate(result["cells"][0]["methods"][:-1]):
        rows = [at[size][place] for size in (1, 2, 4)]
        assert found[row["label"]] == [f"{r['tokens_per_second']:.1f} ({r['speedup']:.2f})" for r in rows]
    assert found["refiner K=auto"][0] == "–" and "–" not in found["refiner K=auto"][1:]
    assert "### alpaca: tokens/s" not in markdown.markdown(result)
    assert "gsm8k: tokens/s" in printed(result) and "alpaca: tokens/s" not in printed(result)


def paths(node, at=()):
    """The place of every field and every list element."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from paths(value, (*at, key))


def small_result(**how) -> dict:
    result = make_result(**how)
    for cell in result["cells"]:
        cell["methods"] = [row for row in cell["methods"] if row["passes"] not in (3, 4, 5, 6, 7, 8)]
    return result


SMALL = small_result(sizes=(1, 2), warnings=["careful"])
FIELDS = {path[-1] for path in paths(SMALL) if isinstance(path[-1], str)} - {"format"}


def without(result, dropped) -> dict:
    """Fields of the JSON gone or null, elements of lists null."""
    result = copy.deepcopy(result)
    for path, gone in dropped:
        node = result
        for key in path[:-1]:
            inside = isinstance(node, dict) and key in node or isinstance(node, list)
            node = node[key] if inside else None
        if isinstance(node, dict) and gone:
            node.pop(path[-1], None)
        elif isinstance(node, dict) and path[-1] in node or isinstance(node, list):
            node[path[-1]] = None
    return result


def show_all(result):
    printed(result)
    printed(result, list(report.METRICS))
    merged = results.merge({"a": result, "b": SMALL})
    for each in (result, merged):
        assert "## What the numbers mean" in markdown.markdown(each)
    printed(merged)


def draw_nothing_to_disk(result):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda figure, png: figure.canvas)
        figures.draw_all(result, ROOT / "tests")


@given(st.lists(st.tuples(st.sampled_from([p for p in paths(SMALL) if p != ("format",)]), st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_whatever_is_missing_is_shown_as_missing(dropped):
    show_all(without(SMALL, dropped))


@given(st.lists(st.tuples(st.sampled_from([p for p in paths(SMALL) if len(p) > 1]), st.booleans()), max_size=80))
@settings(max_examples=8, deadline=None)
def test_whatever_is_missing_is_not_drawn(dropped):
    draw_nothing_to_disk(without(SMALL, dropped))


def test_a_field_that_is_missing_everywhere_is_no_obstacle():
    result = {**SMALL, "cells": SMALL["cells"][:1]}
    for place, field in enumerate(sorted(FIELDS)):
        show_all(without(result, [(path, place % 2 == 0) for path in paths(result) if path[-1] == field]))
    empty = {"format": 1, "cells": [{"methods": [{}, {"label": "a", "kind": "head"}]}, {}]}
    show_all(empty)
    show_all({"format": 1})
    draw_nothing_to_disk(empty)


def test_plots_show_the_numbers():
    result = tables.whole(make_result(("gsm8k", "math500")))
    colours = panels.colours_of(result)
    figure = figures.tau(result["cells"], colours)
    for axis, cell in zip(figure.axes, result["cells"]):
        by_label = {row["label"]: row for row in cell["methods"]}
        drawn = {line.get_label(): line for line in axis.get_lines()}
        refiner = [by_label["drafter"], *(by_label[f"refiner K={K}"] for K in range(1, 9))]
        assert [*drawn["refiner"].get_ydata()] == [row["tau"] for row in refiner]
        assert [*drawn["refiner"].get_xdata()] == [*range(9)] and [*axis.get_xticks()] == [*range(9)]
        auto, star = by_label["refiner K=auto"], drawn["refiner K=auto at its mean passes"]
        assert ([*star.get_xdata()], [*star.get_ydata()]) == ([auto["passes_used"]], [auto["tau"]])
        assert set(drawn["markov sequential"].get_ydata()) == {by_label["markov sequential"]["tau"]}
        assert drawn["bare"].get_linestyle() == ":" and set(drawn["bare"].get_ydata()) == {by_label["bare"]["tau"]}
        assert axis.get_title() == cell["bench"] and "passes K" in axis.get_xlabel() and "tau" in axis.get_ylabel()
    times = figures.refiner_time(result["cells"], colours).axes[0]
    assert [*times.get_lines()[1].get_ydata()] == pytest.approx([1.1 * K for K in range(1, 9)])
    bars = figures.speedup(result["cells"], colours).axes[0]
    heights = {bar.get_label(): [patch.get_height() for patch in bar] for bar in bars.containers}
    for row in result["cells"][1]["methods"][1:]:
        assert heights[row["label"]][1] == row["speedup"]
    assert "ar" not in heights
    draft, verification = figures.draft_time(result["cells"], colours).axes[:2]
    parts = {bar.get_label(): [patch.get_width() for patch in bar] for bar in draft.containers}
    rows = result["cells"][0]["methods"][1:]
    assert parts["refiner"] == pytest.approx([1e3 * row["time"]["refine"] for row in rows])
    assert [text.get_text() for text in draft.get_yticklabels()] == [row["label"] for row in rows]
    assert verification.containers[0][0].get_width() == pytest.approx(31.7)
    shares = figures.acceptance(result["cells"], colours).axes[0].get_lines()
    chosen = ["bare", "drafter", "markov sequential", "refiner K=auto"]
    assert [line.get_label() for line in shares[::2]] == chosen
    assert [*shares[-1].get_ydata()] == result["cells"][0]["methods"][-1]["conditional"]
    settled = figures.settled(result["cells"], colours).axes[1].get_lines()[0]
    assert [*settled.get_ydata()] == result["cells"][1]["methods"][-1]["settled"]


def test_throughput_is_drawn_over_the_batch_sizes():
    result = tables.whole(make_result(sizes=(4, 1, 2)))
    axis = figures.throughput(result["cells"], panels.colours_of(result)).axes[0]
    ar = axis.get_lines()[0]
    assert ar.get_label() == "ar" and [*ar.get_xdata()] == [1, 2, 4] and axis.get_xscale() == "log"
    assert [*ar.get_ydata()] == [result["cells"][i]["methods"][0]["tokens_per_second"] for i in (1, 2, 0)]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2", "4"]


def test_a_method_has_one_colour_of_its_own():
    one, two = (make_result(checkpoint=name) for name in ("one", "two"))
    result = tables.whole(results.merge({"a": one, "b": two}))
    colours = panels.colours_of(result)
    assert len(set(colours.values())) == len(colours) == 26
    for figure in (figures.acceptance(result["cells"], colours), figures.tau(result["cells"], colours)):
        for line in figure.axes[0].get_lines():
            if line.get_label() in colours:
                assert line.get_color() == colours[line.get_label()]


def test_plots_are_whole_pngs_of_one_width_and_legends_fit(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    result = make_result(sizes=(1, 2), checkpoint="$_a checkpoint with a rather long name, of 600 steps")
    written = figures.draw_all(result, tmp_path / "new")
    names = ["tau", "speedup", "throughput", "acceptance", "draft_time", "refiner_time", "settled"]
    assert [path.name for path in written] == [f"{name}.png" for name in names]
    for path in written:
        picture = imread(path)
        assert picture.shape[1] == 1500 and picture[..., :3].std() > 0.03
        # Nothing is cut at the sides: the outermost columns of pixels are white.
        assert picture[:, :2, :3].min() == 1 and picture[:, -2:, :3].min() == 1
    before = written[0].read_bytes()

    def half(self, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="no space"):
        figures.draw_all(result, tmp_path / "new")
    assert written[0].read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(f"{name}.png" for name in names)


def test_nine_sets_have_a_panel_each():
    names = [f"set_{i}" for i in range(9)]
    for count in (1, 2, 4, 5, 9):
        result = tables.whole(make_result(names[:count]))
        for draw in (figures.tau, figures.acceptance, figures.settled):
            axes = draw(result["cells"], panels.colours_of(result)).axes
            assert [axis.get_title() for axis in axes] == names[:count]
        shown = [text.get_text() for axis in figures.speedup(result["cells"], panels.colours_of(result)).axes
                 for text in axis.get_xticklabels()]  # fmt: skip
        assert shown == names[:count]


def test_what_was_not_measured_has_no_plot(tmp_path):
    result = make_result()
    for row in result["cells"][0]["methods"]:
        row["time"] = row["settled"] = row["speedup"] = None
    assert [path.stem for path in figures.draw_all(result, tmp_path)] == ["tau", "acceptance"]
    assert figures.draw_all({"format": 1}, tmp_path / "none") == []


def test_merging_prefixes_labels_that_clash_and_leaves_the_rest():
    one, two = make_result(("gsm8k", "alpaca")), make_result(checkpoint="new", warnings=["careful"])
    before = copy.deepcopy((one, two))
    merged = results.merge({"a": one, "b": two})
    assert (one, two) == before and merged["format"] == 1
    assert [(cell["bench"], len(cell["methods"])) for cell in merged["cells"]] == [("gsm8k", 26), ("alpaca", 13)]
    labels = [row["label"] for row in merged["cells"][0]["methods"]]
    assert len(set(labels)) == 26
    assert {"a: ar", "b: ar", "a: bare", "b: bare", "drafter", "new: drafter", "refiner K=1"} <= set(labels)
    assert merged["cells"][1]["methods"][0]["label"] == "a: ar"  # a name means one method in all cells
    assert [pair["b"] for pair in merged["cells"][0]["paired"][:4]] == ["a: bare", "a: bare", "b: bare", "b: bare"]
    assert merged["warnings"] == ["b: careful"] and merged["protocol"]["samples"] == 24
    assert [best["run"] for best in merged["cells"][0]["best"]] == ["a", "b"]
    plain = lambda row: {key: row[key] for key in ("tau", "accept_at", "rounds", "time", "histogram")}  # noqa: E731
    assert [*map(plain, merged["cells"][0]["methods"])] == [
        *map(plain, one["cells"][0]["methods"] + two["cells"][0]["methods"])
    ]


def test_speed_across_runs_is_marked_as_not_paired():
    one, two = make_result(), make_result()
    for row in two["cells"][0]["methods"]:
        row["tokens_per_second"] *= 1.25
        row["tau"] += 0.5
    merged = results.merge({"a": one, "b": two})
    found = {(p["metric"], p["a"], p["b"]): p for p in merged["cells"][0]["paired"] if p.get("across_runs")}
    assert len(found) == 2 * 13 - 1 and ("tau", "b: ar", "a: ar") not in found
    assert found["speed", "b: ar", "a: ar"]["value"] == pytest.approx(1.25)
    assert found["tau", "b: bare", "a: bare"]["value"] == pytest.approx(0.5)
    assert all(pair["interval"] is None for pair in found.values())
    for said in (printed(merged), markdown.markdown(merged)):
        assert re.search(r"b: bare\W+a: bare \(across runs, not paired\)\W+0\.500\W+1\.250\b", said)


def test_a_run_without_autoregression_is_set_against_that_of_another():
    one, two = make_result(), make_result(checkpoint="new", sizes=(1,))
    for cell in two["cells"]:
        cell["methods"] = [row | {"speedup": None, "speedup_interval": None} for row in cell["methods"][1:]]
    merged = results.merge({"a": one, "b": two})
    row = merged["cells"][0]["methods"][-1]
    assert row["speedup"] == pytest.approx(28.3 / 20) and row["speedup_across_runs"]
    assert not any(r.get("speedup_across_runs") for r in merged["cells"][0]["methods"][:13])
    assert "1.42 (across runs)" in printed(merged) and "1.42 (across runs)" in markdown.markdown(merged)
    figure = figures.speedup(tables.whole(merged)["cells"], panels.colours_of(tables.whole(merged)))
    assert "another run" in figure.get_suptitle()


@pytest.mark.parametrize("key", results.SAME)
def test_a_setting_that_makes_numbers_incomparable_is_a_warning_with_its_values(key):
    one, two = make_result(**{key: "this"}), make_result(**{key: "that"})
    merged = results.merge({"a": one, "b": two})
    said = f"numbers are not comparable, {key}: this in a, that in b"
    assert merged["warnings"] == [said] and merged["protocol"][key] == "a: this; b: that"
    assert printed(merged).startswith(f"WARNING: {said}") and f"**WARNING:** {said}" in markdown.markdown(merged)
    assert not any(pair.get("across_runs") for pair in merged["cells"][0]["paired"])


def test_other_prompts_and_an_unknown_target_are_noticed():
    one, two = make_result(("gsm8k", "alpaca")), make_result(("gsm8k", "alpaca"))
    two["cells"][0]["prompts"] = 12
    merged = results.merge({"a": one, "b": two})
    assert merged["warnings"] == ["numbers are not comparable, gsm8k, batch size 1: prompts: 24 in a, 12 in b"]
    across = [any(pair.get("across_runs") for pair in cell["paired"]) for cell in merged["cells"]]
    assert across == [False, True] and merged["cells"][0]["prompts"] is None
    one, two = (make_result(target=name, target_sha256=None) for name in ("x", "y"))
    assert "target: x in a, y in b" in results.merge({"a": one, "b": two})["warnings"][0]
    two = make_result(target="/elsewhere", commit="other", protocol="published")  # of the same weights
    assert results.merge({"a": make_result(), "b": two})["warnings"] == []


def write(folder: Path, result) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
    return folder


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "not JSON .* measure again"),
        ("[]", "format None, this version reads format 1"),
        ('{"format": 2, "cells": []}', "format 2, this version reads format 1"),
        ('{"protocol": {}, "methods": []}', "format None"),
        ('{"format": 1}', "cells must be a list"),
        ('{"format": 1, "cells": [{"methods": [1]}]}', "cells must be a list of objects with methods"),
    ],
)
def test_what_is_no_result_is_refused_with_its_name(tmp_path, content, said):
    with pytest.raises(ValueError, match=f"bad/result.json: {said}"):
        results.read(write(tmp_path / "bad", content))


def test_results_are_named_by_their_folders(tmp_path):
    for name in ("x/eval", "y/eval"):
        write(tmp_path / name, make_result())
    (tmp_path / "other.json").write_text(json.dumps(make_result()))
    given_paths = [tmp_path / "x/eval", tmp_path / "y/eval/result.json", tmp_path / "other.json"]
    assert [*results.read_all(given_paths[:1])] == ["eval"]
    assert [*results.read_all(given_paths[:2])] == ["x/eval", "y/eval"]
    assert [*results.read_all(given_paths[1:])] == ["eval", "other"]
    with pytest.raises(ValueError, match="given twice"):
        results.read_all([tmp_path / "x/eval", tmp_path / "x/eval/result.json"])
    with pytest.raises(FileNotFoundError, match="z/result.json: no such file|z: no such file"):
        results.read_all([tmp_path / "z"])


def run(*words) -> tuple[str, str | None]:
    """scripts/report.py in this process -> what it printed, its error or None."""
    spec = importlib.util.spec_from_file_location("report_script", ROOT / "scripts" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", ["report.py", *map(str, words)])
        try:
            module.main()
        except SystemExit as stop:
            return out.getvalue(), str(stop.code)
    return out.getvalue(), None


def test_the_command_writes_the_report_beside_the_result_again_and_again(tmp_path):
    folder = write(tmp_path / "eval", small_result())
    before = (folder / "result.json").read_bytes()
    for _ in range(2):
        out, error = run(folder, "--metrics", "tau,rounds")
        assert error is None and "tau [95 %]" in out and "tokens/s " not in out.partition("best K")[0]
        text = (folder / "report.md").read_text()
        pictures = re.findall(r"!\[[\w ]+\]\((.+)\)", text)
        assert "tau.png" in pictures and "throughput.png" not in pictures
        assert {path.name for path in folder.iterdir()} == {"result.json", "report.md", *pictures}
        (folder / "report.md").write_text("old")
    assert (folder / "result.json").read_bytes() == before
    assert run(folder / "result.json", "--out", tmp_path / "there")[1] is None
    assert (tmp_path / "there" / "report.md").read_text() == text and not (tmp_path / "there" / "result.json").exists()


def test_the_command_merges_into_a_new_folder_only(tmp_path):
    one, two = write(tmp_path / "one", small_result(threads=1)), write(tmp_path / "two", small_result())
    assert "--out: several results" in run(one, two)[1]
    used = write(tmp_path / "used", "mine")
    assert "is there and not an empty folder" in run(one, two, "--out", used)[1]
    assert "is there" in run(one, two, "--out", used / "result.json")[1]
    assert [path.name for path in used.iterdir()] == ["result.json"] and (used / "result.json").read_text() == "mine"
    (tmp_path / "both").mkdir()
    out, error = run(one, two, "--out", tmp_path / "both")
    assert error is None and "WARNING: numbers are not comparable, threads: 1 in one, 2 in two" in out
    merged = results.read(tmp_path / "both")
    assert merged == results.merge(results.read_all([one, two])) and (tmp_path / "both" / "tau.png").exists()
    assert [path.name for path in one.iterdir()] == ["result.json"]
    assert run(tmp_path / "both")[1] is None  # a merged result is a result


def test_the_command_names_what_is_wrong_before_it_writes(tmp_path):
    folder = write(tmp_path / "eval", make_result())
    assert "known are K, tau," in run(folder, "--metrics", "tau,sped")[1]
    assert run(tmp_path / "none")[1].startswith(f"error: {tmp_path / 'none'}: no such file")
    assert "not JSON" in run(write(tmp_path / "bad", "{"))[1]
    assert "not JSON" in run(folder, tmp_path / "bad", "--out", tmp_path / "new")[1]
    assert not (tmp_path / "new").exists() and [path.name for path in folder.iterdir()] == ["result.json"]


def test_reading_results_loads_no_matplotlib():
    code = "import sys, xpress.markdown, xpress.report; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_a_cell_of_the_toy_has_every_field_that_is_read():
    """Else a law above would hold of nothing."""
    assert {*tables.ROW, *tables.LISTS, *tables.DICTS} <= set(make_cell()["methods"][-1])

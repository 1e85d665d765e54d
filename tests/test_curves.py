"""The picture of a run shows what metrics.jsonl says."""

import json

import pytest

from xpress import curves
from xpress.curves import DRAFTER, HEAD, curve, draw, figure, read

LINES = [
    {"step": 1, "lr": 1e-4, "loss/refined": 3.0, "loss/consistency": 3.2, "loss/consistency/1": 3.3, "tau/head": 1.5}
    | {"tau/drafter": 1.4, "tokens_per_s": 90.0},
    {"step": 2, "lr": 2e-4, "loss/refined": 2.0, "tau/head": 1.7, "eval/tau/head": 1.6, "eval/tau/drafter": 1.45}
    | {"eval/loss/refined": 2.5, "eval/accept/head": [0.5, 0.2, 0.1], "eval/accept/drafter": [0.4, 0.1, 0.0]},
    {"step": 3, "lr": 1e-4, "loss/refined": 1.0, "eval/tau/head": 1.9, "eval/tau/drafter": 1.4}
    | {"eval/accept/head": [0.6, 0.3, 0.2], "eval/accept/drafter": [0.4, 0.1, 0.05]},
    {"step": 4, "lr": 0.0, "loss/refined": 0.9},
]


@pytest.fixture
def metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path / "metrics.jsonl"


def drawn(axes) -> list[tuple]:
    """(colour, marker, x, y) of every line."""
    return [(a.get_color(), a.get_marker(), [*a.get_xdata()], [*a.get_ydata()]) for a in axes.get_lines()]


def panels(lines):
    losses, tau, slots, rates, *right = figure(lines).axes
    return losses, tau, slots, rates, *right


def test_losses_of_training_and_held_out():
    losses = panels(LINES)[0]
    found = drawn(losses)
    assert (HEAD, "None", [1, 2, 3, 4], [3.0, 2.0, 1.0, 0.9]) in found and (HEAD, "o", [2], [2.5]) in found
    assert [entry[2:] for entry in found if entry[0] != HEAD] == [([1], [3.2]), ([1], [3.3])]
    labels = losses.get_legend_handles_labels()[1]
    assert labels == ["refined", "consistency", "consistency, round 1"]
    assert losses.get_xlabel() == "step" and "loss" in losses.get_ylabel()


def test_tau_has_training_points_held_out_lines_and_the_drafter_s_start():
    tau = panels(LINES)[1]
    found = drawn(tau)
    assert (HEAD, ".", [1, 2], [1.5, 1.7]) in found and (DRAFTER, ".", [1], [1.4]) in found
    assert (HEAD, "o", [2, 3], [1.6, 1.9]) in found and (DRAFTER, "o", [2, 3], [1.45, 1.4]) in found
    dotted = [line for line in tau.get_lines() if line.get_linestyle() == ":"]
    assert len(dotted) == 1 and set(dotted[0].get_ydata()) == {1.45} and dotted[0].get_color() == DRAFTER
    assert tau.get_legend_handles_labels()[1] == ["head", "bare drafter", "bare drafter at first, 1.45"]
    faint = [line.get_alpha() for line in tau.get_lines() if line.get_marker() == "."]
    assert faint and max(faint) < 0.5


def test_accept_rates_are_those_of_the_last_evaluation():
    slots = panels(LINES)[2]
    assert drawn(slots) == [(HEAD, "o", [1, 2, 3], [0.6, 0.3, 0.2]), (DRAFTER, "o", [1, 2, 3], [0.4, 0.1, 0.05])]
    assert "step 3" in slots.get_title() and slots.get_ylim() == (0, 1)


def test_learning_rate_and_throughput_have_an_axis_each():
    *_, rates, right = panels(LINES)
    assert [entry[2:] for entry in drawn(rates)] == [([1, 2, 3, 4], [1e-4, 2e-4, 1e-4, 0.0])]
    assert [entry[2:] for entry in drawn(right)] == [([1], [90.0])]
    assert (rates.get_ylabel(), right.get_ylabel()) == ("learning rate", "tokens per second")


def test_without_evaluations_the_training_numbers_stand_alone():
    lines = [{key: value for key, value in line.items() if not key.startswith("eval/")} for line in LINES]
    losses, tau, slots, *_ = panels(lines)
    assert tau.get_legend_handles_labels()[1] == ["head", "bare drafter"]
    assert not slots.get_lines() and "nothing measured" in slots.texts[0].get_text()
    assert panels([{"step": 1, "lr": 0.1}])[3].get_lines()  # a run of any kind can be drawn


def test_a_half_written_line_is_skipped_and_a_later_line_wins(metrics):
    with open(metrics, "a") as file:
        file.write(json.dumps({"step": 3, "loss/refined": 1.1}) + "\n" + '{"step": 5, "loss/ref')
    lines = read(metrics)
    assert curve(lines, "loss/refined") == ([1, 2, 3, 4], [3.0, 2.0, 1.1, 0.9])
    assert curve(lines, "eval/tau/head") == ([2, 3], [1.6, 1.9])


def test_the_picture_is_whole_or_not_there(metrics, tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    png = tmp_path / "curves.png"
    draw(metrics, png)
    before = png.read_bytes()
    height, width, _ = imread(png).shape
    assert width >= 1200 and imread(png)[..., :3].std() > 0.05  # not blank

    def half(self, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="no space"):
        draw(metrics, png)
    assert png.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_a_file_that_has_nothing_to_draw_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        draw(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    with pytest.raises(ValueError, match="metrics=.*metrics.jsonl: no whole line with a step yet"):
        draw(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_cannot_be_drawn_is_said_not_raised(tmp_path):
    """At the end of a run: no file, no whole line, no room."""
    metrics = tmp_path / "metrics.jsonl"
    assert "not drawn" in curves.ending(metrics, tmp_path / "a.png")
    metrics.write_text('{"step": 1, "loss/ref')
    assert "no whole line" in curves.ending(metrics, tmp_path / "a.png")
    metrics.write_text('{"step": 1, "loss/refined": 2.0}\n')
    assert "not drawn" in curves.ending(metrics, tmp_path / "nowhere" / "a.png")
    assert curves.ending(metrics, tmp_path / "a.png") == f"curves: {tmp_path / 'a.png'}"


def test_what_the_losses_did_is_said(tmp_path):
    """Means over tenths of what was logged; shades of a term and what is held out are no losses of training."""
    lines = [{"step": i, "loss/refined": 3.0 - i / 10, "loss/self/1": 1.0, "eval/loss/base": 1.0} for i in range(1, 21)]
    lines[4]["loss/base"] = 1.0  # logged once: it went nowhere
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(facts) + "\n" for facts in lines))
    said, where = curves.ending(metrics, tmp_path / "a.png").splitlines()
    assert said == "loss, first → last tenth of the steps: refined 2.850 → 1.050" and where.startswith("curves: ")

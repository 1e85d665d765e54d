"""What all plots share: colours, axes, and how a picture gets to disk.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; the head and the bare drafter keep theirs
in every panel. matplotlib is loaded by what draws, never by importing this file.
"""

from __future__ import annotations

from pathlib import Path

from xpress.files import new_file

HEAD, DRAFTER = "#D55E00", "#0072B2"
GREEN, PURPLE, ORANGE, SKY, BLACK, GREY = OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
WIDTH, DPI = 12.5, 120  # 1500 px: text of 10 points is legible at 100 %


def new_figure(height: float):
    """An empty matplotlib Figure, 1500 px wide and `height` inches (120 px each) tall; no display is needed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def tidy(axes, grid: str = "y") -> None:
    """No frame, a faint grid below what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def blend(colour: str, other: str, share: float) -> str:
    """`share` of `other` in `colour`, both #rrggbb."""
    mixed = [
        round((1 - share) * int(colour[i : i + 2], 16) + share * int(other[i : i + 2], 16)) for i in range(1, 7, 2)
    ]
    return "#" + "".join(f"{part:02X}" for part in mixed)


def save(figure, png: Path) -> None:
    """The picture, whole or not at all: an older one stays where writing fails."""
    with new_file(Path(png)) as temporary:
        figure.savefig(temporary, format="png")

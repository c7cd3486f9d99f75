"""Plots as SVG inside a page: text, axes and series have the page's own colours, light or dark.

matplotlib is imported where it is used, since importing it takes a second.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from vantage.schemas.safe_text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
ONE, TWO, GOOD, BAD, OTHER = "#010204", "#010205", "#010206", "#010207", "#010208"
"""Placeholders for colours that only the page knows (``vantage.ledger.pages.style``)."""
_COLOURS = {
    INK: "currentColor",
    **dict(
        zip(
            (ONE, TWO, GOOD, BAD, OTHER),
            (f"var(--{name})" for name in ("one", "two", "good", "bad", "other")),
            strict=True,
        )
    ),
}
SIZE = (4.4, 3.0)
"""Width and height in inches; the width is the largest that a phone shows without shrinking."""
LOW = (4.4, 2.4)
"""Width and a smaller height in inches, for one of many plots."""
_MARGINS = {"left": 0.15, "right": 0.97, "top": 0.93, "bottom": 0.2}


@dataclass(frozen=True)
class Plot:
    """A plot with its title; the title names what to look for."""

    title: str
    svg: str
    note: str = ""


def svg(
    draw: "Callable[[Axes], None]", *, label: str, size: tuple[float, float] = SIZE, fitted: bool = True
) -> str:
    """Return the plot as an SVG element; the same plot gives the same text.

    Args:
        draw: draws into the axes.
        label: description for readers who do not see the plot; each plot of a page needs its own, since the names of
        the drawing's parts are made of it.
        fitted: find margins in which all text fits, which doubles the time (0.1 s).
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # These settings hold for the whole process; another thread's plot would at worst get this text colour.
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": label,
        "font.size": 9,
        "font.family": "sans-serif",
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
        ),
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained" if fitted else None)
        if not fitted:
            figure.subplots_adjust(**_MARGINS)
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _element(text.getvalue(), label)


def _element(drawn: str, label: str) -> str:
    """Return only the element, with the page's colours and a label, and without references to anything outside it."""
    for stands, colour in _COLOURS.items():
        drawn = drawn.replace(stands, colour)
    element = drawn[drawn.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'<style type="text/css">.*?</style>', "", element, flags=re.DOTALL)
    element = re.sub(r"<!--.*?-->\s*", "", element, flags=re.DOTALL)
    element = re.sub(r' (width|height)="[^"]*pt"', "", element, count=2)
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(safe_text(label))}"', 1)

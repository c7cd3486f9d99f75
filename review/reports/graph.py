"""Draw the lineage of a run: a box for each step, and lines that show what it was made of.

Which lines are drawn is in ``vantage.review.reports.reduced``, and where everything is in ``vantage.review.reports.layers``.
"""

from collections.abc import Mapping, Sequence
from unicodedata import east_asian_width

from vantage.ledger.pages.elements import safe
from vantage.review.reports.gathered import Step
from vantage.review.reports.layers import Layers, Place, layers_of
from vantage.review.reports.reduced import is_junction, reduced
from vantage.review.reports.words import duration, mark_of, words

WIDTH, HEIGHT = 184, 74
"""Width and height of a box, in pixels."""
_GAP, _LANE, _RISE, _EDGE = 18, 22, 46, 6
"""Pixels between places of a row; width of a place that a line passes; pixels between rows; pixels around everything."""
_LOW = 12
"""Height of a row without boxes, in which lines join."""
_NAME_CHARACTERS = 22
_FITTING = 16
"""Number of letters that fit into a box in every font."""
_WIDEST = 1100
"""Most pixels of a drawing's width. A wider one would not fit, and ``vantage.review.reports.column`` draws instead."""


def lineage(steps: Sequence[Step]) -> str | None:
    """Return the drawing as an SVG element; None: it would be too wide for a screen."""
    by_name = {step.name: step for step in steps}
    laid = layers_of(reduced(steps))
    middles, width = _middles(laid)
    if width > _WIDEST:
        return None
    heights = [HEIGHT if any(map(_is_box, row)) else _LOW for row in laid.rows] if steps else [HEIGHT]
    tops = [sum(heights[:row]) + row * _RISE for row in range(len(heights))]
    drawn = [
        _line([(laid.rows[row][at], middles[row, at], tops[row], heights[row]) for row, at in line])
        for line in laid.lines
    ]
    drawn += [
        box(by_name[place.node], middles[row, at], tops[row])
        for row, of_row in enumerate(laid.rows)
        for at, place in enumerate(of_row)
        if place.node is not None and _is_box(place)
    ]
    outer, height = 2 * _EDGE, tops[-1] + heights[-1]
    return (
        f'<svg class="lineage wide" role="img" aria-label="{safe(label_of(steps))}" style="width:{width + outer:.0f}px;height:{height + outer}px" '
        f'viewBox="{-_EDGE} {-_EDGE} {width + outer:.0f} {height + outer}">' + "".join(drawn) + "</svg>"
    )


def label_of(steps: Sequence[Step]) -> str:
    """Return the drawing in words."""
    return "Lineage: " + "; ".join(
        f"{step.name} ({words(step.status)})"
        + (f" reads {', '.join(dict.fromkeys(read for _, read in step.reads))}" if step.reads else "")
        for step in steps
    )


def _is_box(place: Place) -> bool:
    return place.node is not None and not is_junction(place.node)


def _middles(laid: Layers) -> tuple[Mapping[tuple[int, int], float], float]:
    """Return (row, place) → pixels of its middle, each row in the middle of the drawing, and the drawing's width."""
    widths = [[WIDTH if _is_box(place) else _LANE for place in row] for row in laid.rows]
    wide = [float(sum(of) + _GAP * (len(of) - 1)) for of in widths]
    whole = max([*wide, float(WIDTH)])
    found = {}
    for number, (row, of) in enumerate(zip(laid.rows, widths, strict=True)):
        left = (whole - wide[number]) / 2
        for index in sorted(range(len(row)), key=lambda each: row[each].rank):
            found[number, index] = left + of[index] / 2
            left += of[index] + _GAP
    return found, whole


# -- drawing


def _line(points: Sequence[tuple[Place, float, int, int]]) -> str:
    """Draw a line from below one place to above another, straight down through all that are no boxes.

    ``points``: places with the middle of each, and the top and height of its row.
    """
    _, at, top, height = points[0]
    y = top + height
    path = [f"M{at:.0f} {y}"]
    for place, middle, top_of_row, of_row in points[1:]:
        half = (y + top_of_row) / 2
        path.append(f"C{at:.0f} {half:.0f} {middle:.0f} {half:.0f} {middle:.0f} {top_of_row}")
        at, y = middle, top_of_row
        if not _is_box(place):
            y = top_of_row + of_row
            path.append(f"V{y}")
    return f'<path class="edge" d="{"".join(path)}"/>'


def box(step: Step, middle: float, top: int) -> str:
    """Return name; status and kind; digest and time."""
    mark, level = mark_of(step.status)
    name = _cut(step.name)
    facts = [step.digest[:12] if step.digest else "no artifact"]
    facts += [duration(step.seconds)] if step.seconds and step.status != "reused" else []
    left = middle - WIDTH / 2
    lines = ((name, "name", 20), (f"{mark} {words(step.status)}", f"{level}-fill", 38))
    texts = "".join(
        f'<text x="{left + 10:.0f}" y="{top + y}" class="{style}"{_fitted(text, style)}>{safe(text)}</text>'
        for text, style, y in (*lines, (words(step.kind), "", 53), (" · ".join(facts), "soft-fill", 67))
    )
    return (
        f'<g><title>{safe(step.name)}</title><rect x="{left:.0f}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
        f'class="box {level}-line"/>{texts}</g>'
    )


def _cut(name: str) -> str:
    """Return as much of a name as fits into a box."""
    if _halves(name) <= _NAME_CHARACTERS:
        return name
    while _halves(name) > _NAME_CHARACTERS - 1:
        name = name[:-1]
    return f"{name}…"


def _fitted(text: str, style: str) -> str:
    """Narrow the letters of a long name, so that it ends within its box in every font."""
    return (
        f' textLength="{WIDTH - 20}" lengthAdjust="spacingAndGlyphs"'
        if style == "name" and _halves(text) > _FITTING
        else ""
    )


def _halves(text: str) -> int:
    """Return the width in Latin letters: East Asian letters count as two."""
    return sum(2 if east_asian_width(each) in "WF" else 1 for each in text)

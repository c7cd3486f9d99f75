"""Draw the lineage of a run: a box for each step, and a line from each step to its readers.

Each step is in a row below all steps that it reads. A line that passes a row goes through a free place of its own, so that
it is not hidden behind a box.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width

from vantage.ledger.pages.elements import safe
from vantage.review.reports.gathered import Step
from vantage.review.reports.words import duration, mark_of, words

WIDTH, HEIGHT = 184, 74
"""Width and height of a box, in pixels."""
_GAP, _LANE, _RISE, _EDGE = 18, 22, 46, 6
"""Pixels between places of a row; width of a place that a line passes; pixels between rows; pixels around everything."""
_SWEEPS = 4
"""Number of sweeps of the ordering, down and up in turn."""
_NAME_CHARACTERS = 22
_FITTING = 16
"""Number of letters that fit into a box in every font."""
_WIDEST = 1100
"""Most pixels of a drawing's width. A wider one would not fit, and ``vantage.review.reports.column`` draws instead."""


@dataclass
class Place:
    """A box, or a place in a row that a line passes."""

    step: str | None
    width: int
    x: float = 0.0
    """Position of its middle, in pixels."""
    above: tuple[int, ...] = ()
    """Places in the row above that are joined to it."""


def lineage(steps: Sequence[Step]) -> str | None:
    """Return the drawing as an SVG element; None: it would be too wide for a screen."""
    by_name = {step.name: step for step in steps}
    rows, lines = _rows(by_name)
    _order(rows)
    width = _set_x(rows)
    if width > _WIDEST:
        return None
    height = len(rows) * HEIGHT + (len(rows) - 1) * _RISE
    tops = [row * (HEIGHT + _RISE) for row in range(len(rows))]
    drawn = [_line([(rows[row][place], tops[row]) for row, place in line]) for line in lines]
    drawn += [
        box(by_name[place.step], place.x, tops[row])
        for row, of_row in enumerate(rows)
        for place in of_row
        if place.step is not None
    ]
    outer = 2 * _EDGE
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


# -- rows

Node = tuple[int, int]
"""Number of a row, and of a place in it."""


def _rows(steps: Mapping[str, Step]) -> tuple[list[list[Place]], list[list[Node]]]:
    """Return the places of each row, and the places through which each line goes, from its upper to its lower end."""
    depth = _depths(steps)
    rows: list[list[Place]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    at: dict[str, int] = {}
    for name, row in depth.items():
        at[name] = len(rows[row])
        rows[row].append(Place(name, WIDTH))
    lines = []
    for name, step in steps.items():
        for read in dict.fromkeys(read for _, read in step.reads if read in steps):
            line = [(depth[read], at[read])]
            for row in range(depth[read] + 1, depth[name]):
                rows[row].append(Place(None, _LANE, above=(line[-1][1],)))
                line.append((row, len(rows[row]) - 1))
            end = rows[depth[name]][at[name]]
            end.above = (*end.above, line[-1][1])
            lines.append([*line, (depth[name], at[name])])
    return rows, lines


def _depths(steps: Mapping[str, Step]) -> dict[str, int]:
    """Return step → number of its row: one more than the lowest row that it reads."""
    depth: dict[str, int] = {}

    def of(name: str, seen: frozenset[str]) -> int:
        if name not in depth:
            read = [each for _, each in steps[name].reads if each in steps and each not in seen]
            depth[name] = 1 + max((of(each, seen | {name}) for each in read), default=-1)
        return depth[name]

    for name in steps:
        of(name, frozenset())
    return depth


def _order(rows: list[list[Place]]) -> None:
    """Set the middles so that fewer lines cross: each place moves near the mean of its neighbours, in turns."""
    for row in rows:
        for number, place in enumerate(row):
            place.x = float(number)
    for sweep in range(_SWEEPS):
        below = _below(rows)
        if sweep % 2 == 0:
            for number, row in enumerate(rows[1:], start=1):
                _rank(row, [[rows[number - 1][each].x for each in place.above] for place in row])
        else:
            for number in range(len(rows) - 2, -1, -1):
                joined = below[number]
                _rank(rows[number], [[rows[number + 1][each].x for each in of] for of in joined])


def _below(rows: list[list[Place]]) -> list[list[list[int]]]:
    """Return row → place → places of the next row that are joined to it."""
    found: list[list[list[int]]] = [[[] for _ in row] for row in rows]
    for number, row in enumerate(rows[1:], start=1):
        for index, place in enumerate(row):
            for each in place.above:
                found[number - 1][each].append(index)
    return found


def _rank(row: list[Place], joined: list[list[float]]) -> None:
    """Order the places of a row by the mean of their neighbours; places without neighbours stay."""
    wanted = [sum(of) / len(of) if of else place.x for place, of in zip(row, joined, strict=True)]
    middle = (len(row) - 1) / 2
    for rank, index in enumerate(sorted(range(len(row)), key=lambda each: (wanted[each], each))):
        row[index].x = rank - middle


def _set_x(rows: list[list[Place]]) -> float:
    """Turn ranks into pixels, each row in the middle of the drawing; return the drawing's width."""
    widths = [sum(place.width for place in row) + _GAP * (len(row) - 1) for row in rows]
    whole = max(widths, default=WIDTH)
    for row, width in zip(rows, widths, strict=True):
        left = (whole - width) / 2
        for place in sorted(row, key=lambda each: each.x):
            place.x = left + place.width / 2
            left += place.width + _GAP
    return float(whole)


# -- drawing


def _line(points: Sequence[tuple[Place, int]]) -> str:
    """Draw a line from below a box, straight through free places, to above another."""
    start, top = points[0]
    path = [f"M{start.x:.0f} {top + HEIGHT}"]
    at, y = start.x, top + HEIGHT
    for place, top_of_row in points[1:]:
        half = (y + top_of_row) / 2
        path.append(f"C{at:.0f} {half:.0f} {place.x:.0f} {half:.0f} {place.x:.0f} {top_of_row}")
        at, y = place.x, top_of_row
        if place.step is None:
            y = top_of_row + HEIGHT
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

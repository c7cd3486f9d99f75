"""Draw the lineage of a run for a narrow screen: boxes below one another, and lines beside them.

Each step that others read has a line of its own, down to the last reader. A dot on the line marks each reader.
"""

from collections.abc import Mapping, Sequence

from vantage.ledger.pages.elements import safe
from vantage.review.reports.gathered import Step
from vantage.review.reports.graph import HEIGHT, WIDTH, box, label_of

_SPACE = 16
"""Space between two boxes, in pixels."""
_LINES = 120
"""Most pixels for all lines together."""
_LANE = 14
"""Most pixels between two lines."""
_EDGE = 4
_IN, _OUT = 20, HEIGHT - 12
"""Pixels below the top of a box at which lines from its inputs enter, and lines to its readers leave."""


def column(steps: Sequence[Step]) -> str:
    """Return the drawing as an SVG element; each step must come after the steps that it reads."""
    rows = {step.name: row for row, step in enumerate(steps)}
    readers = _readers(steps, rows)
    lanes = _lanes(readers, rows)
    gap = min(_LANE, _LINES / (max(lanes.values(), default=0) + 1))
    lines = "".join(
        _line(rows[name], [rows[each] for each in of], WIDTH + gap * (lanes[name] + 1))
        for name, of in readers.items()
    )
    boxes = "".join(box(step, WIDTH / 2, rows[step.name] * (HEIGHT + _SPACE)) for step in steps)
    width = WIDTH + gap * (max(lanes.values(), default=-1) + 1) + 2 * _EDGE + 3
    height = len(steps) * (HEIGHT + _SPACE) + 2 * _EDGE
    return (
        f'<svg class="lineage narrow" role="img" aria-label="{safe(label_of(steps))}" '
        f'style="width:{width:.0f}px;height:{height}px" viewBox="{-_EDGE} {-_EDGE} {width:.0f} {height}">{lines}{boxes}</svg>'
    )


def _readers(steps: Sequence[Step], rows: Mapping[str, int]) -> dict[str, list[str]]:
    """Return step → its readers, in order; only for steps that a step further down reads."""
    found: dict[str, list[str]] = {}
    for step in steps:
        for read in dict.fromkeys(read for _, read in step.reads):
            if read in rows and rows[read] < rows[step.name]:
                found.setdefault(read, []).append(step.name)
    return dict(sorted(found.items(), key=lambda each: rows[each[0]]))


def _lanes(readers: Mapping[str, Sequence[str]], rows: Mapping[str, int]) -> dict[str, int]:
    """Return step → number of its line, from the boxes outwards: short lines are near, and none overlaps another."""
    spans = {name: (rows[name], max(rows[each] for each in of)) for name, of in readers.items()}
    found: dict[str, int] = {}
    for name in sorted(spans, key=lambda each: (spans[each][1] - spans[each][0], spans[each][0])):
        first, last = spans[name]
        taken = {found[other] for other in found if spans[other][0] <= last and first <= spans[other][1]}
        found[name] = next(lane for lane in range(len(spans)) if lane not in taken)
    return found


def _line(row: int, readers: Sequence[int], x: float) -> str:
    """Draw a line from a box out, down, and in to each reader."""
    tops = [reader * (HEIGHT + _SPACE) + _IN for reader in readers]
    path = f"M{WIDTH} {row * (HEIGHT + _SPACE) + _OUT}H{x:.1f}V{max(tops)}"
    path += "".join(f"M{x:.1f} {top}H{WIDTH}" for top in tops)
    dots = "".join(f'<circle class="dot" cx="{x:.1f}" cy="{top}" r="2.5"/>' for top in tops)
    return f'<path class="edge" d="{path}"/>{dots}'

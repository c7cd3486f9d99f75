"""Draw the lineage of a run for a narrow screen: boxes below one another, and lines between and beside them.

A line to the next box is straight. Every other line goes beside the boxes: on the right, or on the left where it would
cross another on the right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vantage.ledger.pages.elements import safe
from vantage.review.reports.gathered import Step
from vantage.review.reports.graph import HEIGHT, WIDTH, box, label_of
from vantage.review.reports.reduced import Reduced, is_junction, reduced

_SPACE = 16
"""Space between two boxes, in pixels."""
_LINES = 60
"""Most pixels for all lines on one side."""
_LANE = 14
"""Most pixels between two lines."""
_EDGE = 4
_LOW = 12
"""Height of a row in which lines join."""

Arc = tuple[int, int]
"""Rows of the upper and the lower end of a line."""


@dataclass(frozen=True)
class _Row:
    """The place of a node in the column."""

    top: int
    height: int
    is_box: bool

    @property
    def into(self) -> int:
        """Return the height at which lines from above enter."""
        return self.top + (20 if self.is_box else _LOW // 2)

    @property
    def out(self) -> int:
        """Return the height at which lines to the rows below leave."""
        return self.top + (HEIGHT - 12 if self.is_box else _LOW // 2)


def column(steps: Sequence[Step]) -> str:
    """Return the drawing as an SVG element."""
    by_name, graph = {step.name: step for step in steps}, reduced(steps)
    order = down(graph)
    rows = _rows(order)
    at = {name: number for number, name in enumerate(order)}
    arcs = [(at[each], at[name]) for name in order for each in graph.above[name]]
    right, left = sides([arc for arc in arcs if arc[1] - arc[0] > 1])
    lanes = {1: _lanes(right), -1: _lanes(left)}
    gaps = {side: min(_LANE, _LINES / (max(of.values(), default=0) + 1)) for side, of in lanes.items()}
    beside = {side: gaps[side] * (max(of.values(), default=-1) + 1) for side, of in lanes.items()}
    middle = beside[-1] + WIDTH / 2
    lines = [_straight(rows, arc, middle) for arc in arcs if arc[1] - arc[0] == 1]
    lines += [
        _beside(rows, arc, middle, side * (WIDTH / 2 + gaps[side] * (lane + 1)))
        for side, of in lanes.items()
        for arc, lane in of.items()
    ]
    lines += [
        f'<circle class="dot" cx="{middle:.1f}" cy="{row.top + _LOW // 2}" r="3"/>'
        for row in rows
        if not row.is_box
    ]
    boxes = [box(by_name[name], middle, row.top) for name, row in zip(order, rows, strict=True) if row.is_box]
    width = WIDTH + beside[1] + beside[-1] + 2 * _EDGE + 3
    height = (rows[-1].top + rows[-1].height if rows else 0) + 2 * _EDGE
    return (
        f'<svg class="lineage narrow" role="img" aria-label="{safe(label_of(steps))}" '
        f'style="width:{width:.0f}px;height:{height}px" viewBox="{-_EDGE} {-_EDGE} {width:.0f} {height}">'
        f"{''.join(lines)}{''.join(boxes)}</svg>"
    )


def down(graph: Reduced) -> list[str]:
    """Return the nodes from top to bottom: a node's readers come soon after it, and its inputs just before it."""
    below, found = graph.below, dict[str, None]()

    def place(name: str) -> None:
        if name in found:
            return
        for each in graph.above[name]:
            place(each)
        found[name] = None
        for each in below[name]:
            if all(upper in found for upper in graph.above[each]):
                place(each)

    for name in graph.above:
        place(name)
    return list(found)


def sides(arcs: Sequence[Arc]) -> tuple[list[Arc], list[Arc]]:
    """Return the lines on the right and those on the left; two that would cross are on different sides if possible."""
    on_right: dict[Arc, bool] = {}
    for start in sorted(arcs, key=lambda each: (each[1] - each[0], each)):
        waiting = [(start, True)]
        while waiting:
            arc, right = waiting.pop()
            if arc in on_right:
                continue
            on_right[arc] = right
            waiting += [(other, not right) for other in arcs if _cross(arc, other)]
    return [arc for arc in arcs if on_right[arc]], [arc for arc in arcs if not on_right[arc]]


def _cross(one: Arc, other: Arc) -> bool:
    first, second = sorted((one, other))
    return first[0] < second[0] < first[1] < second[1]


def _rows(order: Sequence[str]) -> list[_Row]:
    rows, top = [], 0
    for name in order:
        is_box = not is_junction(name)
        rows.append(_Row(top, HEIGHT if is_box else _LOW, is_box))
        top += rows[-1].height + _SPACE
    return rows


def _lanes(arcs: Sequence[Arc]) -> Mapping[Arc, int]:
    """Return line → number of its lane, from the boxes outwards: short lines are near, and none overlaps another."""
    found: dict[Arc, int] = {}
    for first, last in sorted(arcs, key=lambda each: (each[1] - each[0], each)):
        taken = {lane for other, lane in found.items() if other[0] <= last and first <= other[1]}
        found[first, last] = next(lane for lane in range(len(arcs)) if lane not in taken)
    return found


def _straight(rows: Sequence[_Row], arc: Arc, middle: float) -> str:
    upper, lower = rows[arc[0]], rows[arc[1]]
    start = upper.top + upper.height if upper.is_box else upper.out
    end = lower.top if lower.is_box else lower.into
    return f'<path class="edge" d="M{middle:.1f} {start}V{end}"/>'


def _beside(rows: Sequence[_Row], arc: Arc, middle: float, away: float) -> str:
    """Draw a line from a box or a junction out, down, and in to another; a dot marks where it arrives."""
    upper, lower = rows[arc[0]], rows[arc[1]]
    edge = WIDTH / 2 if away > 0 else -WIDTH / 2
    start, end = (middle + (edge if row.is_box else 0) for row in (upper, lower))
    x = middle + away
    path = f"M{start:.1f} {upper.out}H{x:.1f}V{lower.into}H{end:.1f}"
    return f'<path class="edge" d="{path}"/><circle class="dot" cx="{end:.1f}" cy="{lower.into}" r="2.5"/>'

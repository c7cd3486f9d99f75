"""Lay out the lineage in rows: each node below everything that it is made of, and as few crossing lines as possible.

A line that passes a row goes through a free place of its own, so that it is not hidden behind a box. Lines between two
rows cross only where the order of their upper ends differs from that of their lower ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vantage.review.reports.reduced import Reduced

_SWEEPS = 8
"""Number of sweeps of the ordering, down and up in turn."""
_TRIES = 50
"""Most rounds in which neighbours are exchanged."""


@dataclass
class Place:
    """A node, or a place in a row that a line passes."""

    node: str | None
    above: tuple[int, ...] = ()
    """Places in the row above that are joined to it."""
    rank: int = 0
    """Position in the row, from the left."""
    weight: float = 0.0


Row = list[Place]
Point = tuple[int, int]
"""Number of a row, and of a place in it."""


@dataclass
class Layers:
    """Rows of places, and the places through which each line goes, from its upper to its lower end."""

    rows: list[Row]
    lines: list[list[Point]] = field(default_factory=list)

    @property
    def crossings(self) -> int:
        """Return the number of pairs of lines that cross."""
        return sum(_crossings(upper, lower) for upper, lower in pairwise(self.rows))


def layers_of(graph: Reduced) -> Layers:
    """Return the rows of a graph, ordered so that few lines cross; none in a tree."""
    depth = depths(graph)
    rows: list[Row] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    at: dict[str, int] = {}
    for node in _along_the_lines(graph):
        at[node] = len(rows[depth[node]])
        rows[depth[node]].append(Place(node))
    laid = Layers(rows)
    for node, upper in graph.above.items():
        for each in upper:
            line = [(depth[each], at[each])]
            for row in range(depth[each] + 1, depth[node]):
                rows[row].append(Place(None, above=(line[-1][1],)))
                line.append((row, len(rows[row]) - 1))
            end = rows[depth[node]][at[node]]
            end.above = (*end.above, line[-1][1])
            laid.lines.append([*line, (depth[node], at[node])])
    _order(laid)
    return laid


def depths(graph: Reduced) -> dict[str, int]:
    """Return node → number of its row. What reads nothing is just above its first reader, so that its line is short."""
    depth: dict[str, int] = {}
    for node, upper in graph.above.items():
        depth[node] = 1 + max((depth[each] for each in upper), default=-1)
    for node, readers in graph.below.items():
        if readers and not graph.above[node]:
            depth[node] = min(depth[each] for each in readers) - 1
    return depth


def _along_the_lines(graph: Reduced) -> list[str]:
    """Return the nodes so that those which a line joins are near each other: a first order for each row."""
    below = graph.below
    found: dict[str, None] = {}
    waiting = list(reversed(list(graph.above)))
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = None
        waiting += reversed([*graph.above[node], *below[node]])
    return list(found)


def _order(laid: Layers) -> None:
    """Set the ranks: each place moves near the mean of its neighbours, in turns, and neighbours change places."""
    for row in laid.rows:
        _rank(row, list(range(len(row))))
    best, fewest = _ranks(laid), laid.crossings
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        (_sweep_down if sweep % 2 == 0 else _sweep_up)(laid.rows)
        _exchange(laid)
        if laid.crossings < fewest:
            best, fewest = _ranks(laid), laid.crossings
    for row, ranks in zip(laid.rows, best, strict=True):
        for place, rank in zip(row, ranks, strict=True):
            place.rank = rank


def _sweep_down(rows: Sequence[Row]) -> None:
    for upper, row in pairwise(rows):
        _by_means(row, [[upper[each].rank for each in place.above] for place in row])


def _sweep_up(rows: Sequence[Row]) -> None:
    for number in range(len(rows) - 2, -1, -1):
        joined: list[list[int]] = [[] for _ in rows[number]]
        for place in rows[number + 1]:
            for each in place.above:
                joined[each].append(place.rank)
        _by_means(rows[number], joined)


def _by_means(row: Row, neighbours: Sequence[Sequence[int]]) -> None:
    """Order a row by the mean of its neighbours; places without neighbours stay."""
    for place, of in zip(row, neighbours, strict=True):
        place.weight = sum(of) / len(of) if of else float(place.rank)
    _rank(row, sorted(range(len(row)), key=lambda each: (row[each].weight, row[each].rank)))


def _rank(row: Row, order: Sequence[int]) -> None:
    for rank, index in enumerate(order):
        row[index].rank = rank


def _exchange(laid: Layers) -> None:
    """Exchange neighbours in a row as long as fewer lines cross."""
    for _ in range(_TRIES):
        before = laid.crossings
        for row in laid.rows:
            for left, right in pairwise(sorted(row, key=_by_rank)):
                crossed = laid.crossings
                left.rank, right.rank = right.rank, left.rank
                if laid.crossings >= crossed:
                    left.rank, right.rank = right.rank, left.rank
        if laid.crossings == before:
            return


def _by_rank(place: Place) -> int:
    return place.rank


def _ranks(laid: Layers) -> list[list[int]]:
    return [[place.rank for place in row] for row in laid.rows]


def _crossings(upper: Row, lower: Row) -> int:
    ends = [(upper[each].rank, place.rank) for place in lower for each in place.above]
    return sum(
        (one[0] - other[0]) * (one[1] - other[1]) < 0
        for number, one in enumerate(ends)
        for other in ends[:number]
    )

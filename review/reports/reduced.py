"""Reduce the lineage to the lines that are drawn, so that they need not cross.

A line from *a* to *b* is left out where another way leads from *a* to *b*: *b* is made of *a* all the same, and its box
names everything that it reads. Steps that read the same two or more steps share a junction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from vantage.review.reports.gathered import Step

JUNCTION = "\0"
"""First character of a junction's name; no step's name has it."""
Above = Mapping[str, tuple[str, ...]]
"""Node → the nodes from which lines lead to it."""


@dataclass(frozen=True)
class Reduced:
    """The nodes of a drawing, and the lines between them."""

    above: Above

    @property
    def below(self) -> dict[str, list[str]]:
        """Return node → the nodes to which lines lead from it."""
        found: dict[str, list[str]] = {name: [] for name in self.above}
        for name, upper in self.above.items():
            for each in upper:
                found[each].append(name)
        return found


def is_junction(name: str) -> bool:
    """Return whether a node is a junction of lines, and not a step."""
    return name.startswith(JUNCTION)


def reduced(steps: Sequence[Step]) -> Reduced:
    """Return the drawn lines of a run's steps. Steps that read each other, in an edited record, lose a line."""
    return Reduced(_with_junctions(_without_detours(_reads(steps))))


def _reads(steps: Sequence[Step]) -> dict[str, tuple[str, ...]]:
    """Return step → the steps that it reads, without circles; each step comes after those that it reads."""
    known = {step.name: step for step in steps}
    found: dict[str, tuple[str, ...]] = {}

    def place(name: str, under: frozenset[str]) -> None:
        if name in found:
            return
        read = [each for each in dict.fromkeys(read for _, read in known[name].reads) if each in known]
        open_ = under | {name}
        for each in read:
            if each not in open_:
                place(each, open_)
        found[name] = tuple(each for each in read if each in found)

    for step in steps:
        place(step.name, frozenset())
    return found


def _without_detours(reads: Above) -> dict[str, tuple[str, ...]]:
    """Leave out each line that repeats a longer way."""
    ancestors: dict[str, set[str]] = {}
    for name, upper in reads.items():
        ancestors[name] = set(upper).union(*(ancestors[each] for each in upper))
    return {
        name: tuple(
            each for each in upper if not any(each in ancestors[other] for other in upper if other != each)
        )
        for name, upper in reads.items()
    }


def _with_junctions(above: Above) -> dict[str, tuple[str, ...]]:
    """Join lines where two or more steps have the same two or more steps above them, until there are none left."""
    found = dict(above)
    while shared := _most_shared(found):
        joint = JUNCTION + "\0".join(sorted(shared))
        joined = {}
        for name, upper in found.items():
            if not shared <= set(upper):
                joined[name] = upper
                continue
            joined.setdefault(joint, tuple(each for each in upper if each in shared))
            joined[name] = (joint, *(each for each in upper if each not in shared))
        found = joined
    return found


def _most_shared(above: Above) -> frozenset[str]:
    """Return the steps above several nodes whose junction saves most lines; empty if none saves any."""
    nodes = [frozenset(upper) for upper in above.values() if len(upper) > 1]
    candidates = {one & other for one, other in combinations(nodes, 2) if len(one & other) > 1}

    def saved(shared: frozenset[str]) -> int:
        return (len(shared) - 1) * (sum(shared <= upper for upper in nodes) - 1)

    return max(candidates, key=lambda each: (saved(each), sorted(each)), default=frozenset())

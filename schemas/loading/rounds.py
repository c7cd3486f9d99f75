"""Write out a ``dpo`` stage with ``rounds``: for each, a stage that collects pairs from the policy of the round before,
and one that trains.

This works on the plain recipe, as ``vantage.schemas.loading.members`` does. The last round has the names that the
recipe writes, so readers of the stage read the last round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vantage.schemas.loading.members import seed_of
from vantage.schemas.loading.written_out import WrittenOut
from vantage.schemas.problems import Path, Problem
from vantage.schemas.recipe.rounds import MOST_ROUNDS, round_name, round_seed

COLLECTING = {"data": "preference_collection", "rollouts": "rollout_collection"}
"""Field of a ``dpo`` stage → kind of stage whose policy changes with the rounds."""


@dataclass(frozen=True)
class _Loop:
    """A stage with ``rounds``, and the stage that collects for it."""

    trains: str
    collects: str
    field: str
    """Field of ``trains`` that names ``collects``."""
    count: int

    @property
    def added(self) -> list[str]:
        """Names of the stages of all rounds but the last."""
        return [
            round_name(stage, number, self.count)
            for number in range(1, self.count)
            for stage in (self.collects, self.trains)
        ]


def with_rounds(plain: Any) -> WrittenOut:
    """Return the plain recipe with the rounds of its loops as stages."""
    stages = plain.get("stages") if isinstance(plain, Mapping) else None
    if not isinstance(stages, Mapping):
        return WrittenOut(plain)
    found_loops: list[_Loop] = []
    problems: list[Problem] = []
    for name, stage in stages.items():
        if not isinstance(name, str) or not isinstance(stage, Mapping) or not _has_rounds(stage):
            continue
        found = _loop(name, stage, stages)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            found_loops.append(found)
    problems += _taken_names(stages, found_loops)
    loops = {loop.collects: loop for loop in found_loops}
    if problems or not loops:
        return WrittenOut(plain, tuple(problems))
    expanded: dict[Any, Any] = {}
    placed: list[tuple[Path, Path]] = []
    trained = {loop.trains for loop in loops.values()}
    for name, stage in stages.items():
        if name in loops:
            for each, written, place in _rounds(plain, stages, loops[name]):
                expanded[each] = written
                placed.append((("stages", each), ("stages", place)))
        elif name not in trained:
            expanded[name] = stage
    return WrittenOut({**plain, "stages": expanded}, (), tuple(placed))


def _has_rounds(stage: Mapping[Any, Any]) -> bool:
    """Return whether a stage has valid ``rounds``; an invalid field is left to its own check."""
    count = stage.get("rounds")
    is_count = isinstance(count, int) and not isinstance(count, bool) and 2 <= count <= MOST_ROUNDS
    return is_count and stage.get("kind") == "dpo" and stage.get("round") is None


def _loop(name: str, stage: Mapping[Any, Any], stages: Mapping[Any, Any]) -> _Loop | Problem:
    path = ("stages", name, "rounds")
    for field, kind in COLLECTING.items():
        collects = stage.get(field)
        collecting = stages.get(collects) if isinstance(collects, str) else None
        if not isinstance(collecting, Mapping) or collecting.get("kind") != kind:
            continue
        if collecting.get("policy") != stage.get("init"):
            message = (
                f"the first round collects from the policy that it trains, and '{collects}' has policy: "
                f"{collecting.get('policy')} where this stage has init: {stage.get('init')}"
            )
            return Problem(path, message, "name one policy in both")
        return _Loop(name, str(collects), field, stage["rounds"])
    kinds = " or ".join(f"a {kind} stage in {field}" for field, kind in COLLECTING.items())
    return Problem(
        path,
        "each round collects anew from the policy of the round before",
        f"name {kinds}, or leave rounds out",
    )


def _taken_names(stages: Mapping[Any, Any], loops: Sequence[_Loop]) -> Iterator[Problem]:
    """Yield loops of which a round would have the name of another stage, and a second loop on one collecting stage."""
    collecting = [loop.collects for loop in loops]
    for loop in loops:
        path = ("stages", loop.trains, "rounds")
        if collecting.count(loop.collects) > 1:
            yield Problem(
                path,
                f"another loop collects with '{loop.collects}', too",
                "give each loop a stage that collects",
            )
        if taken := next((each for each in loop.added if each in stages), None):
            message = f"a round would be called '{taken}', and there is such a stage"
            yield Problem(path, message, f"give '{taken}' another name")


def _rounds(
    plain: Mapping[Any, Any], stages: Mapping[Any, Any], loop: _Loop
) -> Iterator[tuple[str, dict[Any, Any], str]]:
    """Yield (name, stage, the recipe's name of it) for the stages of all rounds, in their order."""
    collects, trains = stages[loop.collects], stages[loop.trains]
    for number in range(1, loop.count + 1):
        names = {each: round_name(each, number, loop.count) for each in (loop.collects, loop.trains)}
        for written, stage in ((loop.collects, collects), (loop.trains, trains)):
            own = {field: value for field, value in stage.items() if field != "rounds"}
            own["round"] = {"of": written, "number": number}
            if number > 1:
                before = round_name(loop.trains, number - 1, loop.count)
                own["policy" if written == loop.collects else "init"] = before
                if (seed := seed_of(plain, stage)) is not None:
                    own["seed"] = round_seed(seed, number)
            if written == loop.trains:
                own[loop.field] = names[loop.collects]
            yield names[written], own, written

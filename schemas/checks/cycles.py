"""Stages that wait for one another."""

from collections.abc import Iterator
from typing import Any

from vantage.schemas.checks.plain_recipe import (
    Plain,
    datasets_of,
    fields_that_name,
    is_in,
    kinds_of,
    mapping_of,
    rewards_read,
    stages_of,
    terms_of,
)
from vantage.schemas.checks.stage_names import judging_models, other_models_read
from vantage.schemas.kinds import STAGES, kinds_collecting
from vantage.schemas.problems import Path, Problem

_CYCLE_REMEDY = "name a stage before them in one of these fields"


def cycles(plain: Plain) -> Iterator[Problem]:
    """Find one problem for each cycle of stages, which lists the whole cycle."""
    waiting = _dependencies(plain)
    while waiting:
        free = [name for name, waits in waiting.items() if not any(to in waiting for _, to in waits)]
        for name in free:
            del waiting[name]
        if free or not waiting:
            continue
        ring = _find_cycle(waiting)
        listed = ", ".join(f"{name} reads {to} ({'.'.join(map(str, path))})" for name, path, to in ring)
        yield Problem(ring[0][1], f"stages wait for one another: {listed}", _CYCLE_REMEDY)
        for name, _, _ in ring:
            del waiting[name]


def _dependencies(plain: Plain) -> dict[str, list[tuple[Path, str]]]:
    """Stage → (path of a field, stage that it names). A stage that names itself is refused elsewhere."""
    stages, data, models = stages_of(plain), datasets_of(plain), mapping_of(plain.get("models"))
    waits: dict[str, list[tuple[Path, str]]] = {name: [] for name in stages}
    for name, kind in kinds_of(plain).items():
        collectable = [field for field, content in STAGES[kind].data.items() if kinds_collecting(content)]
        collected = [field for field in collectable if not is_in(data, stages[name].get(field))]
        fields: list[tuple[Path, Any]] = [
            (("stages", name, field), stages[name].get(field)) for field in (*STAGES[kind].reads, *collected)
        ]
        fields += judging_models(name, stages[name], kind)
        others = other_models_read(stages[name], kind)
        fields += [  # a stage that stands in for it would have to end first
            (("models", other, "otherwise"), mapping_of(models[other]).get("otherwise"))
            for other in others
            if isinstance(other, str) and other in models
        ]
        waits[name] += [
            (path, to) for path, to in fields if isinstance(to, str) and to in stages and to != name
        ]
        for _, reward in rewards_read(name, stages[name]):
            terms = [
                ((*path, field), term.get(field))
                for field in fields_that_name("reward_model")
                for r, path, term in terms_of(plain)
                if r == reward
            ]
            waits[name] += [(path, to) for path, to in terms if isinstance(to, str) and to in stages]
    return waits


def _find_cycle(waiting: dict[str, list[tuple[Path, str]]]) -> list[tuple[str, Path, str]]:
    """Return a cycle among stages that all wait for another of them: (stage, field, stage it waits for)."""
    trail: list[tuple[str, Path, str]] = []
    name = next(iter(waiting))
    while name not in (names := [passed for passed, _, _ in trail]):
        path, to = next((path, to) for path, to in waiting[name] if to in waiting)
        trail.append((name, path, to))
        name = to
    return trail[names.index(name) :]

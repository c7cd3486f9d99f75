"""Write out a dataset that is selected from collected responses: ``data.NAME: {from: STAGE, ...}`` becomes a stage.

This works on the plain recipe, before its fields and names are checked, so that keys, plans, resumes and audits see an
ordinary
stage.
"""

from collections.abc import Mapping
from typing import Any

from vantage.schemas.loading.written_out import WrittenOut
from vantage.schemas.problems import Path, Problem, quote

KIND = "prompt_selection"
_FROM = "from"


def with_selections(plain: Any) -> WrittenOut:
    """Return the plain recipe with these datasets as stages."""
    data, stages = (plain.get(part) if isinstance(plain, Mapping) else None for part in ("data", "stages"))
    if not isinstance(data, Mapping) or not isinstance(stages, Mapping):
        return WrittenOut(plain)
    selected = {name: each for name, each in data.items() if isinstance(each, Mapping) and _FROM in each}
    if not selected:
        return WrittenOut(plain)
    problems: list[Problem] = []
    placed: list[tuple[Path, Path]] = []
    made: dict[Any, Any] = {}
    for name, entry in selected.items():
        source = entry[_FROM]
        collection = stages.get(source) if isinstance(source, str) else None
        if not isinstance(collection, Mapping) or collection.get("kind") != "rollout_collection":
            problems.append(_no_collection(name, source, stages))
        elif name in stages:
            message = f"a stage is called {quote(str(name))} too, and both are read as data"
            problems.append(Problem(("data", name), message, "give the dataset another name"))
        else:
            fields = {field: value for field, value in entry.items() if field != _FROM}
            made[name] = {"kind": KIND, "rollouts": source, "prompts": collection.get("prompts"), **fields}
            placed.append((("stages", name, "rollouts"), ("data", name, _FROM)))
            placed.append((("stages", name), ("data", name)))
    rest = {name: each for name, each in data.items() if name not in selected}
    return WrittenOut({**plain, "data": rest, "stages": {**stages, **made}}, tuple(problems), tuple(placed))


def _no_collection(name: Any, source: Any, stages: Mapping[Any, Any]) -> Problem:
    collections = [
        str(each)
        for each, stage in stages.items()
        if isinstance(stage, Mapping) and stage.get("kind") == "rollout_collection"
    ]
    remedy = f"use one of: {', '.join(collections)}" if collections else "add a rollout_collection stage"
    return Problem(("data", name, _FROM), f"{quote(str(source))} is no rollout_collection stage", remedy)

"""Fill in the recipe's ``rollout`` for stages that sample and set nothing else.

This works on the plain recipe, as ``vantage.schemas.loading.members`` does, so that the rules of each stage see what it
inherits.
"""

from collections.abc import Mapping
from typing import Any

from vantage.schemas.kinds import STAGES
from vantage.schemas.loading.written_out import WrittenOut
from vantage.schemas.problems import Path
from vantage.schemas.recipe.rollout import Sampling

FIELD = "rollout"
PLACES = ("url", "servers", "api_key_variable", "weights_folder")
"""Fields that name the place of sampling: a stage that sets one of the first two inherits none of them."""
OF_OWN_SERVERS = ("tensor_parallel",)
"""Fields about the servers that a stage starts: a stage that sets ``url`` inherits none of them either."""


def with_shared_rollout(plain: Any) -> WrittenOut:
    """Return the plain recipe in which each stage that samples has the fields of ``rollout`` that it does not set.

    A stage that sets ``engine`` inherits nothing.
    """
    shared = plain.get(FIELD) if isinstance(plain, Mapping) else None
    stages = plain.get("stages") if isinstance(plain, Mapping) else None
    if not isinstance(shared, Mapping) or not isinstance(stages, Mapping):
        return WrittenOut(plain)
    filled: dict[Any, Any] = {}
    placed: list[tuple[Path, Path]] = []
    for name, stage in stages.items():
        filled[name] = stage
        if not _samples(stage):
            continue
        own = stage.get(FIELD, {})
        if not isinstance(own, Mapping) or "engine" in own:
            continue
        inherited = _inherited(shared, own)
        filled[name] = {**stage, FIELD: {**inherited, **own}}
        placed += ((("stages", name, FIELD, each), (FIELD, each)) for each in inherited if each not in own)
        if not own:
            placed.append((("stages", name, FIELD), (FIELD,)))
    return WrittenOut({**plain, "stages": filled}, (), tuple(placed))


def _samples(stage: Any) -> bool:
    name = stage.get("kind") if isinstance(stage, Mapping) else None
    return isinstance(name, str) and name in STAGES and FIELD in STAGES[name].work.model_fields


def _inherited(shared: Mapping[Any, Any], own: Mapping[Any, Any]) -> dict[Any, Any]:
    left_out: tuple[str, ...] = PLACES if any(place in own for place in PLACES[:2]) else ()
    if left_out and own.get("servers") is None:
        left_out += OF_OWN_SERVERS
    known = {name: each for name, each in shared.items() if name in Sampling.model_fields}
    return {name: each for name, each in known.items() if name not in left_out}

"""Write out a stage with ``members``: one stage for each, and one term for each in the rewards that combine them.

This works on the plain recipe, before its fields and names are checked, so that later code does not know such stages.
Mistakes in them are left for those checks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vantage.schemas.loading.written_out import WrittenOut
from vantage.schemas.problems import Path, Problem
from vantage.schemas.recipe.members import Members, MembersOrCount, member_name, member_seed
from vantage.schemas.recipe.recipe import Recipe

_MEMBERS: TypeAdapter[Members] = TypeAdapter(MembersOrCount)
_MAX_SEED = 2**32


def with_members(plain: Any) -> WrittenOut:
    """Return the plain recipe with the members of its reward models as stages, and as terms of the rewards that combine them."""
    stages = plain.get("stages") if isinstance(plain, Mapping) else None
    if not isinstance(stages, Mapping):
        return WrittenOut(plain)
    ensembles = {name: found for name, stage in stages.items() if (found := _members_of(name, stage))}
    problems = tuple(_taken_names(stages, ensembles))
    ensembles = {
        name: found for name, found in ensembles.items() if not any(name in p.path for p in problems)
    }
    if not ensembles:
        return WrittenOut(plain, problems)
    placed: list[tuple[Path, Path]] = []
    expanded: dict[Any, Any] = {}
    for name, stage in stages.items():
        if name not in ensembles:
            expanded[name] = stage
            continue
        for number in range(1, ensembles[name].count + 1):
            each = member_name(name, number)
            expanded[each] = _member(stage, ensembles[name], number, name, seed=seed_of(plain, stage))
            placed.append((("stages", each), ("stages", name)))
    changed = {**plain, "stages": expanded}
    if isinstance(plain.get("rewards"), Mapping):
        changed["rewards"] = {
            name: _with_terms(name, reward, ensembles, placed) for name, reward in plain["rewards"].items()
        }
    return WrittenOut(changed, problems, tuple(placed))


def _members_of(name: Any, stage: Any) -> Members | None:
    """Return the members of a stage; None: it has none, or they are written wrongly."""
    if not isinstance(name, str) or not isinstance(stage, Mapping) or stage.get("kind") != "reward_model":
        return None
    if stage.get("members") is None or stage.get("half") is not None or stage.get("member") is not None:
        return None
    try:
        return _MEMBERS.validate_python(stage["members"])
    except ValidationError:
        return None


def _taken_names(stages: Mapping[Any, Any], ensembles: Mapping[str, Members]) -> Iterator[Problem]:
    """Yield ensembles of which a member would have the name of another stage."""
    for name, members in ensembles.items():
        names = [member_name(name, number) for number in range(1, members.count + 1)]
        if taken := next((each for each in names if each in stages), None):
            message = f"member {names.index(taken) + 1} would be called '{taken}', and there is such a stage"
            yield Problem(("stages", name, "members"), message, f"give '{taken}' another name")


def _member(
    stage: Mapping[Any, Any], members: Members, number: int, name: str, *, seed: int | None
) -> dict[Any, Any]:
    own: dict[Any, Any] = {field: value for field, value in stage.items() if field != "members"}
    own["member"] = {"of": name, "number": number}
    if members.by == "halves":
        own["half"] = number
    elif seed is not None and number > 1:
        own["seed"] = member_seed(seed, number)
    return own


def seed_of(plain: Mapping[Any, Any], stage: Mapping[Any, Any]) -> int | None:
    """Return the seed of a stage; None: it is no seed, which is reported at its own place."""
    given = next((each["seed"] for each in (stage, plain) if each.get("seed") is not None), None)
    seed = Recipe.model_fields["seed"].default if given is None else given
    is_seed = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < _MAX_SEED
    return seed if is_seed else None


def _with_terms(
    name: Any, reward: Any, ensembles: Mapping[str, Members], placed: list[tuple[Path, Path]]
) -> Any:
    """Return a reward that combines models with a term for each member; ``placed`` gets the terms' original places."""
    terms = reward.get("terms") if isinstance(reward, Mapping) else None
    if not isinstance(terms, list | tuple) or reward.get("ensemble") is None:
        return reward
    expanded: list[Any] = []
    for number, term in enumerate(terms):
        stage = term.get("model") if isinstance(term, Mapping) else None
        written = [term]
        if isinstance(stage, str) and stage in ensembles:
            names = (member_name(stage, each) for each in range(1, ensembles[stage].count + 1))
            written = [{**term, "model": each} for each in names]
        for each in written:
            placed.append((("rewards", name, "terms", len(expanded)), ("rewards", name, "terms", number)))
            expanded.append(each)
    return {**reward, "terms": expanded}

"""Check a sweep's file, as far as it needs no recipe.

The checks read the plain mapping, not a ``Sweep``, so that all problems are reported even if a field is invalid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vantage.schemas.problems import (
    Path,
    Problem,
    quote,
    suggest,
)
from vantage.schemas.recipe.fields import MAX_NAMED

MAX_SEEDS = 1000
"""Most seeds in one sweep."""


@dataclass(frozen=True)
class Draft:
    """The parts of a sweep's file that have the right shape."""

    recipe: str | None
    set: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    baseline: str | None
    seeds: list[Any]
    reseeds: list[Any]
    measures: list[tuple[Path, Any]]
    """(Path, value) of each measure."""
    published: list[str]
    """Arms with published numbers."""


def draft_of(plain: dict[str, Any]) -> Draft:
    """Return the draft of a sweep's plain mapping."""
    arms, measure = plain.get("arms"), plain.get("measure")
    published = plain.get("published")
    values = published.get("values") if isinstance(published, dict) else None
    return Draft(
        recipe=plain["recipe"] if isinstance(plain.get("recipe"), str) else None,
        set=mapping_of(plain.get("set")),
        arms={arm: own for arm, own in list(mapping_of(arms).items())[:MAX_NAMED] if isinstance(own, dict)},
        baseline=plain["baseline"] if isinstance(plain.get("baseline"), str) else None,
        seeds=_list(plain.get("seeds"))[:MAX_SEEDS],
        reseeds=_list(plain.get("reseeds"))[:MAX_NAMED],
        measures=[(("measure", i), each) for i, each in enumerate(measure[:MAX_NAMED])]
        if isinstance(measure, list)
        else [(("measure",), measure)],
        published=list(mapping_of(values)),
    )


def mapping_of(value: Any) -> dict[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def draft_problems(sweep: Draft, overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield problems between the fields of a sweep, whatever its recipe is."""
    for field, values in (("seeds", sweep.seeds), ("reseeds", sweep.reseeds)):
        for i, value in enumerate(values):
            if value in values[:i]:
                yield Problem((field, i), f"{value} occurs twice", "keep one of the two")
    if sweep.baseline is not None and sweep.baseline not in sweep.arms:
        message = f"{quote(sweep.baseline)} is not an arm"
        yield Problem(("baseline",), message, suggest(sweep.baseline, sweep.arms))
    for arm in sweep.published:
        if arm not in sweep.arms:
            message = f"{quote(arm)} is not an arm"
            yield Problem(("published", "values", arm), message, suggest(arm, sweep.arms))
    common = [*((key, f"set.{key}") for key in sweep.set)]
    common += [(text.partition("=")[0].strip(), f"--set {text}") for text in overrides]
    for arm, own in sweep.arms.items():
        for key, value in own.items():
            for over, said in common:
                if _sets(key, value, over):
                    message = f"is laid over by {said}, so this arm would be without it"
                    yield Problem(("arms", arm, key), message, "remove one of the two")
    yield from _seed_overrides(sweep)


def _seed_overrides(sweep: Draft) -> Iterator[Problem]:
    """Yield problems of overrides of seeds that the sweep sets itself."""
    written: list[tuple[Path, str, Any]] = [(("set", key), key, value) for key, value in sweep.set.items()]
    written += [
        (("arms", arm, key), key, each) for arm, own in sweep.arms.items() for key, each in own.items()
    ]
    for path, key, value in written:
        for stage in sweep.reseeds:
            if _sets(key, value, f"stages.{stage}.seed"):
                remedy = f"remove it, or take {stage} out of reseeds"
                yield Problem(path, f"the sweep itself sets the seed of '{stage}'", remedy)


def _sets(key: str, value: Any, field: str) -> bool:
    """Return whether an override sets a field, or something inside it."""
    own, parts = key.split("."), field.split(".")
    if own[: len(parts)] == parts:
        return True
    if parts[: len(own)] != own:
        return False
    for part in parts[len(own) :]:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def selection_problems(
    sweep: Draft, arms: Sequence[str] | None, seeds: Sequence[str] | None
) -> Iterator[Problem]:
    """Return the problems of ``--arms`` and ``--seeds``."""
    for option, chosen, known in (
        ("--arms", arms, list(sweep.arms)),
        ("--seeds", seeds, [str(seed) for seed in sweep.seeds]),
    ):
        for word in chosen or ():
            if word not in known:
                message = f"'{word}' is not among the sweep's"
                yield Problem((), message, f"use some of: {', '.join(known)}", source=option)
    if arms is not None and sweep.baseline in sweep.arms and sweep.baseline not in arms:
        message = f"the baseline '{sweep.baseline}' is missing, and there is nothing to compare with"
        yield Problem((), message, f"add {sweep.baseline}", source="--arms")

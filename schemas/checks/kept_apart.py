"""Checks of what is kept apart: test sets, and datasets whose held-out prompts others leave out."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from vantage.schemas.checks.plain_recipe import Plain, datasets_of, items_of, kinds_of, mapping_of, stages_of
from vantage.schemas.kinds import STAGES
from vantage.schemas.problems import Path, Problem, quote, suggest


def kept_apart_problems(plain: Plain) -> Iterator[Problem]:
    """Test sets that something is to be trained on, and datasets that are kept apart from none or from themselves."""
    yield from _trained_on(plain)
    yield from _mixed(plain)
    yield from _kept_apart(plain)


def held_out_of(plain: Plain) -> Iterator[tuple[Path, str, str]]:
    """Yield (Path, dataset, other dataset) for each name in ``near_duplicates.held_out_of``."""
    for name, data in mapping_of(plain.get("data")).items():
        named = mapping_of(mapping_of(data).get("near_duplicates")).get("held_out_of")
        for i, other in enumerate(items_of(named)):
            if isinstance(other, str):
                yield ("data", name, "near_duplicates", "held_out_of", i), name, other


def is_test_set(plain: Plain, name: str) -> bool:
    data = mapping_of(mapping_of(plain.get("data")).get(name))
    return mapping_of(data.get("split")).get("test") == "all"


def _trained_on(plain: Plain) -> Iterator[Problem]:
    for name, kind in kinds_of(plain).items():
        for field in STAGES[kind].data:
            target = stages_of(plain)[name].get(field)
            if isinstance(target, str) and STAGES[kind].makes != "evaluation" and is_test_set(plain, target):
                message = f"reads rows for training, and data.{target} has test rows alone (split.test: all)"
                yield Problem(
                    ("stages", name, field), message, "name another dataset; evaluations read test sets"
                )


def _mixed(plain: Plain) -> Iterator[Problem]:
    for name, parts in datasets_of(plain).items():
        for part in parts:
            if name in mapping_of(plain.get("mixtures")) and is_test_set(plain, part):
                message = f"data.{part} has test rows alone (split.test: all)"
                remedy = "leave it out of the mixture, and let an evaluation read it"
                yield Problem(("mixtures", name, "parts", part), message, remedy)


def _kept_apart(plain: Plain) -> Iterator[Problem]:
    data = mapping_of(plain.get("data"))
    waiting: dict[str, list[str]] = {}
    for path, name, other in held_out_of(plain):
        if other == name:
            yield Problem(
                path,
                f"{quote(name)} is the dataset itself",
                "its own held-out prompts count anyway; leave it out",
            )
        elif other in mapping_of(plain.get("mixtures")):
            yield Problem(path, f"{quote(other)} is a mixture", "name its parts")
        elif other not in data:
            remedy = suggest(other, data) or "define it under data"
            yield Problem(path, f"no dataset is called {quote(other)}", remedy)
        else:
            waiting.setdefault(name, []).append(other)
    try:
        TopologicalSorter(waiting).prepare()
    except CycleError as error:
        ring = error.args[1][::-1]  # each before the one that it waits for
        listed = ", ".join(f"data.{name} is kept apart from data.{other}" for name, other in pairwise(ring))
        path = ("data", ring[0], "near_duplicates", "held_out_of")
        yield Problem(path, f"datasets wait for one another: {listed}", "leave one of them out")

"""Check datasets that are kept apart: test sets, and datasets whose held-out prompts others leave out."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from vantage.schemas.checks.partial_recipe import PartialRecipe
from vantage.schemas.checks.references import RecipeReferences, Reference
from vantage.schemas.problems import Problem
from vantage.schemas.steps import WATCHED_AT


def trained_on_test_sets(recipe: PartialRecipe, references: RecipeReferences) -> Iterator[Problem]:
    """Yield problems of test sets that a stage would train on."""
    test_sets = {name for name, data in recipe.data.items() if data.is_test_set}
    for name, named in references.data.items():
        kind = recipe.stages[name].kind
        for reference in named:
            if reference.name in test_sets and reference.path[2:] == WATCHED_AT:
                yield _watched_test_set(recipe, reference)
            elif reference.name in test_sets and kind is not None and kind.makes != "evaluation":
                message = f"reads rows for training, and data.{reference.name} has test rows alone (split.test: all)"
                yield Problem(reference.path, message, "name another dataset; evaluations read test sets")
    for name, parts in recipe.datasets.items():
        for part in parts:
            if name in recipe.mixtures and part in test_sets:
                message = f"data.{part} has test rows alone (split.test: all)"
                remedy = "leave it out of the mixture, and let an evaluation read it"
                yield Problem(("mixtures", name, "parts", part), message, remedy)


def _watched_test_set(recipe: PartialRecipe, reference: Reference) -> Problem:
    """Return the problem of a watch that would look at a test set, with the evaluations that are measured on it."""
    readers = [
        name
        for name, stage in recipe.stages.items()
        if stage.kind is not None
        and stage.kind.makes == "evaluation"
        and reference.name in (stage.texts.get(field) for field in stage.kind.data)
    ]
    read_by = f", which {' and '.join(readers)} read{'s' if len(readers) == 1 else ''}" if readers else ""
    message = f"data.{reference.name} is a test set (split.test: all){read_by}, and a watch chooses the policy that is kept"
    remedy = "name prompts that no evaluation is measured on"
    return Problem(reference.path, message, remedy)


def kept_apart_cycles(references: RecipeReferences) -> Iterator[Problem]:
    """Yield problems of datasets that are kept apart from one another, so that none can be first."""
    waiting = {
        name: [each.name for each in named if each.wrong is None]
        for name, named in references.held_out.items()
    }
    try:
        TopologicalSorter({name: others for name, others in waiting.items() if others}).prepare()
    except CycleError as error:
        ring = error.args[1][::-1]  # each name is followed by the one that it waits for
        listed = ", ".join(f"data.{name} is kept apart from data.{other}" for name, other in pairwise(ring))
        path = ("data", ring[0], "near_duplicates", "held_out_of")
        yield Problem(path, f"datasets wait for one another: {listed}", "leave one of them out")

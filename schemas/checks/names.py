"""Check the names in a recipe: each must refer to something of the right kind, without cycles.

The checks read a ``PartialRecipe``, so that a wrong name is found even if other fields are invalid.
"""

import itertools
from collections.abc import Iterable, Iterator

from vantage.schemas.checks.cycles import cycles
from vantage.schemas.checks.data_contents import content_problems
from vantage.schemas.checks.gates import gate_problems
from vantage.schemas.checks.kept_apart import kept_apart_cycles, trained_on_test_sets
from vantage.schemas.checks.partial_recipe import PartialRecipe
from vantage.schemas.checks.publications import publication_problems
from vantage.schemas.checks.references import RecipeReferences, References, UnknownName, Wrong
from vantage.schemas.checks.verifiers import verifier_problems
from vantage.schemas.problems import MAX_PROBLEMS, Problem
from vantage.schemas.recipe.inputs import MODEL


def name_problems(recipe: PartialRecipe, references: RecipeReferences) -> list[Problem]:
    """Return all problems of the names in a recipe; other parts of it may be invalid."""
    found: Iterator[Wrong] = itertools.chain(
        _reserved_names(recipe),
        _wrong(references.models.values()),
        _unread_models(recipe, references),
        _wrong(references.stand_ins.values()),
        _wrong(references.judging_models.values()),
        _wrong(references.rewards.values()),
        _wrong(references.reward_models.values()),
        _wrong(references.scoring_judges.values()),
        _wrong(references.parts.values()),
        _wrong(references.data.values()),
        content_problems(recipe, references),
        trained_on_test_sets(recipe, references),
        _wrong(references.held_out.values()),
        kept_apart_cycles(references),
        _wrong(references.scoring_verifiers.values()),
        _wrong(references.stage_verifiers.values()),
        verifier_problems(recipe, references),
        _wrong(references.benchmarks.values()),
        gate_problems(recipe),
        publication_problems(recipe, references),
        _wrong([references.licenses]),
        cycles(recipe, references),
    )
    reported = itertools.islice(found, MAX_PROBLEMS)
    return [wrong.problem() if isinstance(wrong, UnknownName) else wrong for wrong in reported]


def _wrong(named: Iterable[References]) -> Iterator[Wrong]:
    return (each.wrong for references in named for each in references if each.wrong is not None)


def _reserved_names(recipe: PartialRecipe) -> Iterator[Problem]:
    for name in recipe.models:
        if name == MODEL or name in recipe.stages:
            whose = "the recipe's model" if name == MODEL else "a stage"
            yield Problem(("models", name), f"'{name}' is {whose} already", "give the model another name")
    if MODEL in recipe.stages:
        message = f"'{MODEL}' always means the recipe's model"
        yield Problem(("stages", MODEL), message, "give the stage another name")
    for name, stage in recipe.stages.items():
        if stage.kind is not None and stage.kind.makes == "dataset" and name in recipe.datasets:
            message = f"a dataset is called '{name}' too, and both are read as data"
            yield Problem(("stages", name), message, "give the stage another name")
    for name in recipe.mixtures:
        if name in recipe.data:
            message = f"a dataset is called '{name}' too, and both are read as data"
            yield Problem(("mixtures", name), message, "give the mixture another name")


def _unread_models(recipe: PartialRecipe, references: RecipeReferences) -> Iterator[Problem]:
    """Yield problems of other models that no stage reads."""
    read: set[str] = set()
    for name, named in references.models.items():
        kind = recipe.stages[name].kind
        read |= {each.name for each in named if kind is not None and each.field in kind.other_models}
        read |= {each.name for each in references.judging_models[name]}
    of_rewards = (*references.reward_models.values(), *references.scoring_judges.values())
    read |= {each.name for named in of_rewards for each in named}
    for name in recipe.models:
        if name not in read and name != MODEL and name not in recipe.stages:
            yield Problem(("models", name), "no stage reads it", "name it in one, or remove it")

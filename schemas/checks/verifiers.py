"""Check the verifiers that a recipe names, against the prompts that they judge."""

from collections.abc import Iterator

from vantage.schemas.checks.partial_recipe import PartialData, PartialRecipe
from vantage.schemas.checks.references import RecipeReferences, Reference
from vantage.schemas.problems import Problem
from vantage.schemas.recipe.builtin_verifiers import COMPARING
from vantage.schemas.recipe.sources import Builtin
from vantage.schemas.steps import BUILTIN_VERIFIERS, WATCH_PROMPTS


def verifier_problems(recipe: PartialRecipe, references: RecipeReferences) -> Iterator[Problem]:
    """Yield problems of verifiers with the name of a built-in one, and of those that cannot judge the prompts of a stage."""
    for name in recipe.verifiers:
        if name in BUILTIN_VERIFIERS:
            message = f"'{name}' is a built-in verifier, and would mean two rules"
            yield Problem(("verifiers", name), message, "give yours another name")
    judged = list(_judged(recipe, references))
    yield from _of_another_task(judged)
    yield from _without_answers(recipe, judged)


Judged = tuple[str, str, PartialData, list[Reference]]
"""A stage, a dataset of its prompts by name and value, and the verifiers that the stage and its rewards name."""


def _judged(recipe: PartialRecipe, references: RecipeReferences) -> Iterator[Judged]:
    for name, stage in recipe.stages.items():
        own, watched = stage.texts.get("prompts", ""), stage.texts.get(WATCH_PROMPTS)
        rewards = references.rewards.get(name, ())
        named = [(each, _is_of_watch(each)) for each in references.stage_verifiers[name]]
        named += [
            (each, any(_is_of_watch(reward) for reward in rewards if reward.name == scored))
            for scored in recipe.rewards
            if any(reward.name == scored for reward in rewards)
            for each in references.scoring_verifiers[scored]
        ]
        by_data = {own: [each for each, of_watch in named if watched is None or not of_watch]}
        if watched is not None:
            by_data[watched] = [each for each, _ in named]
        for data, verifiers in by_data.items():
            for part in recipe.datasets.get(data, ()):
                if part in recipe.data:
                    yield name, part, recipe.data[part], verifiers


def _is_of_watch(reference: Reference) -> bool:
    return reference.path[2:3] == ("watch",)


def _of_another_task(judged: list[Judged]) -> Iterator[Problem]:
    """Yield problems of built-in prompts with the verifier of another built-in task, which cannot read them."""
    for name, prompts, data, verifiers in judged:
        if not isinstance(data.origin, Builtin):
            continue
        task = data.origin.name
        for verifier in verifiers:
            if verifier.name in BUILTIN_VERIFIERS and task in BUILTIN_VERIFIERS and verifier.name != task:
                message = f"'{verifier.name}' does not understand the prompts that {name} reads (data.{prompts}: {data.origin})"
                yield Problem(verifier.path, message, f"use {task}")


def _without_answers(recipe: PartialRecipe, judged: list[Judged]) -> Iterator[Problem]:
    """Yield problems of verifiers that compare with answers on prompts that are known to have no answers; the stage checks other files when
    it starts."""
    for name, prompts, data, verifiers in judged:
        is_builtin = data.builtin_content is not None
        if "answer" in data.columns or not (data.columns or is_builtin):
            continue
        for verifier in verifiers:
            if recipe.verifiers.get(verifier.name) in COMPARING:
                message = f"'{verifier.name}' compares with answers, and data.{prompts}, which {name} reads, has none"
                remedy = "name another verifier" if is_builtin else f"add data.{prompts}.columns.answer"
                yield Problem(verifier.path, message, remedy)

"""Find where a recipe uses a verifier, so that its dry run can refuse uses that do not fit its verdicts."""

from collections.abc import Iterator

from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.recipe.work import VerifierUse
from vantage.schemas.steps import JUDGES, rewards_read, verifiers_of


def uses_of(recipe: Recipe, verifier: str) -> tuple[VerifierUse, ...]:
    """Return every use of the verifier by a stage, each once."""
    return tuple({use.path: use for use in _uses(recipe, verifier)}.values())


def _uses(recipe: Recipe, verifier: str) -> Iterator[VerifierUse]:
    for name, stage in recipe.stages.items():
        for reward in rewards_read(stage):
            for index, term in enumerate(recipe.rewards[reward].terms):
                if isinstance(term, VerifierTerm) and term.verifier == verifier:
                    yield VerifierUse(path=f"rewards.{reward}.terms.{index}", term=term)
        for field, score, reward in _passes(recipe, stage):
            terms = recipe.rewards[reward].terms
            if any(each.verifier_name == verifier and each.may_have_score(score) for each in terms):
                yield VerifierUse(path=f"stages.{name}.{field}", score=score)
        for role, named in verifiers_of(recipe, stage).items():
            if named == verifier and not role.startswith("reward."):
                path = (*JUDGES[role], "verifier") if role in JUDGES else ("algorithm", role)
                yield VerifierUse(path=".".join(("stages", name, *path)))


def _passes(recipe: Recipe, stage: Stage) -> Iterator[tuple[str, str, str]]:
    """Yield where a stage names a score that decides which responses pass: the field, the score, and its reward."""
    if (
        isinstance(stage, PolicyOptimization)
        and stage.difficulty is not None
        and stage.difficulty.term is not None
    ):
        yield "difficulty.term", stage.difficulty.term, stage.reward
    if isinstance(stage, PromptSelection) and stage.term is not None:
        collected = recipe.stages[stage.rollouts]
        if isinstance(collected, RolloutCollection):
            yield "term", stage.term, collected.reward

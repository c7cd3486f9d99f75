"""Check that a stage's switches can read the scores of its reward."""

from collections.abc import Iterator, Mapping

from vantage.schemas.problems import Problem
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization


def score_problems(rewards: Mapping[str, Reward], name: str, stage: Stage) -> Iterator[Problem]:
    """Yield what a reward adds beside its scores where each of them is normalised by itself."""
    if not isinstance(stage, PolicyOptimization) or not stage.algorithm.normalise_each_score:
        return
    reward = rewards[stage.reward]
    for field, remedy in (
        (
            "missing_eos",
            "leave it out and set overlong_filter: true, or give responses without an end a named score",
        ),
        ("ensemble", "name its models as terms, or use normalise_each_score: false"),
    ):
        if getattr(reward, field) is not None:
            message = (
                f"'{stage.reward}' has {field}, which is no score that could be normalised within a group"
            )
            yield Problem(("stages", name, "algorithm", "normalise_each_score"), message, remedy)

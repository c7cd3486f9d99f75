"""Check that the switches of a stage fit the terms of its reward."""

from collections.abc import Iterator, Mapping

from vantage.schemas.problems import Path, Problem
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.terms import LengthPenalty


def score_problems(rewards: Mapping[str, Reward], name: str, stage: Stage) -> Iterator[Problem]:
    """Yield the disagreements between a stage that learns from a reward and that reward."""
    if not isinstance(stage, PolicyOptimization | ValuePretraining):
        return
    reward = rewards[stage.reward]
    yield from _length_problems(reward, name, stage)
    if isinstance(stage, PolicyOptimization) and stage.algorithm.normalise_each_score:
        yield from _additions(reward, name, stage.reward)


def _additions(reward: Reward, name: str, reward_name: str) -> Iterator[Problem]:
    """Yield what a reward adds beside its scores, where each of them is normalised by itself."""
    for field, remedy in (
        (
            "missing_eos",
            "leave it out and set overlong_filter: true, or give responses without an end a named score",
        ),
        ("ensemble", "name its models as terms, or use normalise_each_score: false"),
    ):
        if getattr(reward, field) is not None:
            message = (
                f"'{reward_name}' has {field}, which is no score that could be normalised within a group"
            )
            yield Problem(("stages", name, "algorithm", "normalise_each_score"), message, remedy)


def _length_problems(
    reward: Reward, name: str, stage: PolicyOptimization | ValuePretraining
) -> Iterator[Problem]:
    path: Path = ("stages", name, "reward")
    kinds = [term.length for term in reward.terms if isinstance(term, LengthPenalty)]
    if "relative" in kinds and isinstance(stage, ValuePretraining):
        message = f"'{stage.reward}' compares lengths within a group, which a critic of single responses cannot predict"
        yield Problem(path, message, "use length: linear or overlong")
    if not isinstance(stage, PolicyOptimization):
        return
    if "relative" in kinds and stage.algorithm.samples_per_prompt == 1:
        message = (
            f"'{stage.reward}' compares the lengths of responses to one prompt, and samples_per_prompt is 1"
        )
        yield Problem(path, message, "raise algorithm.samples_per_prompt, or use length: linear or overlong")
    if "overlong" in kinds and stage.algorithm.overlong_buffer is not None:
        message = (
            f"'{stage.reward}' has a term length: overlong, and algorithm.overlong_buffer is the same penalty"
        )
        yield Problem(path, message, "leave one of them out")

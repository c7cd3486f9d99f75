"""Check that the switches of a stage fit the terms of its reward."""

from collections.abc import Iterator, Mapping

from vantage.schemas.problems import Path, Problem
from vantage.schemas.recipe.algorithm import COLLECTED
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
    yield from _whitening_problems(reward, name, stage)
    yield from _step_problems(reward, name, stage)
    if isinstance(stage, PolicyOptimization) and stage.algorithm.normalise_each_score:
        yield from _additions(reward, name, stage.reward)


def _additions(reward: Reward, name: str, reward_name: str) -> Iterator[Problem]:
    """Yield problems of a reward that adds anything beside its scores, if each score is normalised by itself."""
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


def _whitening_problems(
    reward: Reward, name: str, stage: PolicyOptimization | ValuePretraining
) -> Iterator[Problem]:
    """Yield problems of settings that need scores of one unit in all rollouts, if each rollout is whitened alone."""
    if not reward.whitens:
        return
    returns = stage.algorithm if isinstance(stage, PolicyOptimization) else stage.returns
    field: Path = ("algorithm",) if isinstance(stage, PolicyOptimization) else ("returns",)
    found: list[tuple[str, str]] = []
    if returns is not None and returns.reward_scaling != "none":
        found.append(("reward_scaling", "has moments of scores that are not whitened"))
    if isinstance(stage, PolicyOptimization):
        switches = stage.algorithm
        if switches.normalise_each_score:
            found.append(("normalise_each_score", "normalises each score already"))
        if switches.advantage in ("greedy_baseline", *COLLECTED):
            found.append(("advantage", f"{switches.advantage} compares with responses of another rollout"))
    if isinstance(stage, ValuePretraining) and stage.rollouts is not None:
        message = (
            f"'{stage.reward}' has a score with whiten, and collected responses have no parts of their scores"
        )
        yield Problem(("stages", name, "rollouts"), message, "sample responses, or leave whiten out")
    for switch, why in found:
        message = f"{why}, and '{stage.reward}' has a score with whiten"
        yield Problem(("stages", name, *field, switch), message, "leave one of them out")


def _step_problems(
    reward: Reward, name: str, stage: PolicyOptimization | ValuePretraining
) -> Iterator[Problem]:
    """Yield problems of settings that read one score of a whole response, if steps have their own scores."""
    if not reward.scores_steps:
        return
    remedy = f"leave it out, or step_ends of rewards.{stage.reward}"
    returns = stage.algorithm if isinstance(stage, PolicyOptimization) else stage.returns
    field: Path = ("algorithm",) if isinstance(stage, PolicyOptimization) else ("returns",)
    switches = {} if returns is None else {"reward_scaling": returns.reward_scaling != "none"}
    if returns is not None:
        switches["reward_clip"] = returns.reward_clip is not None
    if isinstance(stage, PolicyOptimization):
        switches["normalise_each_score"] = stage.algorithm.normalise_each_score
        switches["advantage"] = stage.algorithm.advantage == "greedy_baseline"
    for switch, is_on in switches.items():
        if is_on:
            message = (
                f"reads one score of a whole response, and '{stage.reward}' scores the steps of a response"
            )
            yield Problem(("stages", name, *field, switch), message, remedy)
    if isinstance(stage, ValuePretraining) and stage.rollouts is not None:
        message = f"'{stage.reward}' scores the steps of a response, and collected responses have one score"
        yield Problem(("stages", name, "rollouts"), message, "sample responses, or leave step_ends out")

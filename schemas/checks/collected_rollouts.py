"""Check that a stage and the ``rollout_collection`` stage whose responses it reads agree on prompts, reward and policy."""

from collections.abc import Iterator

from vantage.schemas.problems import Path, Problem
from vantage.schemas.recipe.fields import MAX_COUNT
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.steps import stage_reference

_POLICY_OF = {"reference_mean": "mean score", "optimal_value": "optimal value"}
"""Advantage → the value that it takes from the collected responses of the reference."""


def rollout_problems(recipe: Recipe, name: str, stage: Stage) -> Iterator[Problem]:
    """Yield the problems of a stage's ``rollouts`` field.

    Collected scores are compared with scores of the stage's own reward, and prompts that the stage holds out must not be among
    those that were collected for training. A critic's returns must come from a single policy.
    """
    collected = recipe.stages.get(getattr(stage, "rollouts", None) or "")
    if not isinstance(collected, RolloutCollection):
        return
    if isinstance(stage, ValuePretraining | BestOfN | PolicyOptimization):
        yield from _same_prompts_and_reward(recipe, ("stages", name), stage, collected)
    if isinstance(stage, ValuePretraining) and collected.policy != stage.policy:
        message = f"'{stage.rollouts}' holds responses of '{collected.policy}', and this critic learns the returns of '{stage.policy}'"
        yield Problem(("stages", name, "rollouts"), message, f"set policy: {collected.policy}")
    if isinstance(stage, BestOfN) and stage.samples_per_prompt > collected.samples_per_prompt:
        message = f"{stage.samples_per_prompt} is more than the {collected.samples_per_prompt} responses that '{stage.rollouts}' has of each prompt"
        remedy = f"use {collected.samples_per_prompt} or less, or raise it there"
        yield Problem(("stages", name, "samples_per_prompt"), message, remedy)
    fewest = min(collected.samples_per_prompt, collected.held_out_samples_per_prompt or MAX_COUNT)
    if isinstance(stage, DirectPreferenceOptimization) and fewest == 1:
        message = f"a pair takes two responses to a prompt, and '{stage.rollouts}' has one"
        remedy = (
            f"raise samples_per_prompt of '{stage.rollouts}' (and held_out_samples_per_prompt, if it is set)"
        )
        yield Problem(("stages", name, "rollouts"), message, remedy)
    if isinstance(stage, PolicyOptimization):
        yield from _of_the_reference(name, stage, collected)


def _same_prompts_and_reward(
    recipe: Recipe,
    path: Path,
    stage: ValuePretraining | BestOfN | PolicyOptimization,
    collected: RolloutCollection,
) -> Iterator[Problem]:
    if recipe.rewards[stage.reward] != recipe.rewards[collected.reward]:
        message = f"'{stage.reward}' is not the reward by which '{stage.rollouts}' was scored ('{collected.reward}')"
        yield Problem((*path, "reward"), message, "use one reward in both")
    if stage.prompts != collected.prompts:
        message = f"'{stage.prompts}' is not the dataset whose prompts '{stage.rollouts}' has responses to ('{collected.prompts}')"
        yield Problem((*path, "prompts"), message, f"set prompts: {collected.prompts}")


def _of_the_reference(
    name: str, stage: PolicyOptimization, collected: RolloutCollection
) -> Iterator[Problem]:
    what, reference = _POLICY_OF.get(stage.algorithm.advantage), stage_reference(stage)
    if what is not None and collected.policy != reference:
        message = (
            f"'{stage.rollouts}' holds responses of '{collected.policy}', and advantage={stage.algorithm.advantage} needs the "
            f"{what} of the reference ('{reference}')"
        )
        yield Problem(
            ("stages", name, "rollouts"), message, f"collect those of '{reference}', or set reference"
        )

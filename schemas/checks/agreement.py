"""Agreement of what a critic is pretrained on with what the policy will see."""

from collections.abc import Iterator, Mapping

from schemas.problems import Problem
from schemas.recipe.algorithm import Returns
from schemas.recipe.recipe import Recipe
from schemas.recipe.stages import (
    PolicyOptimization,
    PreferenceCollection,
    Stage,
    ValuePretraining,
)
from schemas.splits import share_problems, with_shares
from schemas.steps import stage_reference

PolicyStages = Mapping[str, PolicyOptimization]


def resolve(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """The recipe with everything that stages inherit from each other written out, and their disagreements.

    A critic must have been pretrained on the returns that the policy will see: the same reward, the switches of
    ``Returns`` and, where KL is counted, reference. What its stage leaves open is taken from the policy stages that
    start from it. A critic or demonstrations that an algorithm does not read are left out.
    """
    problems = share_problems(recipe)
    stages: dict[str, Stage] = {}
    for name, stage in recipe.stages.items():
        if isinstance(stage, ValuePretraining):
            heirs = _policy_stages_of(recipe, name)
            problems += _disagreements(recipe, name, stage, heirs)
            stage, found = _inherit(name, stage, heirs)
            problems += found
        if isinstance(stage, PolicyOptimization):
            stage = stage.model_copy(update=_unread(stage))
        if isinstance(stage, PreferenceCollection) and stage.samples_per_prompt is None:
            stage = stage.model_copy(update={"samples_per_prompt": 1 if stage.judge is None else 2})
        if (reference := stage_reference(stage)) is not None:
            stage = stage.model_copy(update={"reference": reference})
        stages[name] = stage
    recipe = recipe.model_copy(update={"stages": stages})
    return recipe if problems else with_shares(recipe), problems


def _unread(stage: PolicyOptimization) -> dict[str, None]:
    """What the stage names and its switches do not read."""
    critics = () if stage.algorithm.reads_critic else ("critic", "fresh_critic")
    return dict.fromkeys((*critics, *(() if stage.algorithm.ptx_coef else ("ptx",))))


def _policy_stages_of(recipe: Recipe, critic: str) -> PolicyStages:
    return {
        name: stage
        for name, stage in recipe.stages.items()
        if isinstance(stage, PolicyOptimization) and stage.critic == critic and stage.algorithm.reads_critic
    }


def _inherit(
    name: str, stage: ValuePretraining, heirs: PolicyStages
) -> tuple[ValuePretraining, list[Problem]]:
    """The stage with the returns of the policy stages that start from its critic; without any, plain ones."""
    if stage.returns is not None:
        return stage, []
    returns = {heir: policy_stage.algorithm.returns for heir, policy_stage in heirs.items()}
    problems = []
    for switch in Returns.model_fields:
        values = {heir: getattr(each, switch) for heir, each in returns.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{heir} has {_said(value)}" for heir, value in values.items())
            message = f"are to be those of the policy stages that start from this critic, but {switch} differs: {told}"
            remedy = f"use one {switch} in all, or pretrain a critic for each"
            problems.append(Problem(("stages", name, "returns"), message, remedy))
    return stage.model_copy(update={"returns": next(iter(returns.values()), Returns())}), problems


def _disagreements(
    recipe: Recipe, name: str, stage: ValuePretraining, heirs: PolicyStages
) -> Iterator[Problem]:
    """Where what the stage itself says is not what a policy stage that starts from its critic will see."""
    given = {} if stage.returns is None else dict(stage.returns)
    for heir, policy_stage in heirs.items():
        path = ("stages", name)
        if recipe.rewards[stage.reward] != recipe.rewards[policy_stage.reward]:
            message = f"'{stage.reward}' is not the reward of '{heir}' ('{policy_stage.reward}'), which starts from it"
            yield Problem((*path, "reward"), message, "use one reward in both")
        for switch, ours in given.items():
            theirs = getattr(policy_stage.algorithm, switch)
            if ours != theirs:
                message = f"{_said(ours)} is not the {switch} of '{heir}' ({_said(theirs)}), which starts from this critic"
                yield Problem((*path, "returns", switch), message, "leave returns out here, to inherit them")
        reference, others = stage_reference(stage), stage_reference(policy_stage)
        if policy_stage.algorithm.kl_coef and reference != others:
            message = f"'{reference}' is not the reference of '{heir}' ('{others}'), whose reward counts KL"
            yield Problem((*path, "reference"), message, f"set reference: {others}")


def _said(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)

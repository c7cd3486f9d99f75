"""Agreement of what a critic is pretrained on with what the policy will see."""

from collections.abc import Iterator, Mapping

from schemas.problems import Problem
from schemas.recipe import AnyStage, PolicyOptimization, Recipe, ValuePretraining
from schemas.references import stage_reference

PolicyStages = Mapping[str, PolicyOptimization]


def resolve(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """The recipe with everything that stages inherit from each other written out, and their disagreements.

    A critic must have been pretrained on the return that the policy will see: the same reward, ``kl_coef``,
    ``gamma`` and, where KL is counted, reference. What its stage leaves open is taken from the policy stages
    that start from it.
    """
    problems: list[Problem] = []
    stages: dict[str, AnyStage] = {}
    for name, stage in recipe.stages.items():
        if isinstance(stage, ValuePretraining):
            heirs = _policy_stages_of(recipe, name)
            stage, found = _inherit(name, stage, heirs)
            problems += found
            problems += _disagreements(recipe, name, stage, heirs)
        if isinstance(stage, ValuePretraining | PolicyOptimization):
            stage = stage.model_copy(update={"reference": stage_reference(stage)})
        stages[name] = stage
    return recipe.model_copy(update={"stages": stages}), problems


def _policy_stages_of(recipe: Recipe, critic: str) -> PolicyStages:
    return {
        name: stage
        for name, stage in recipe.stages.items()
        if isinstance(stage, PolicyOptimization) and stage.critic == critic
    }


def _inherit(
    name: str, stage: ValuePretraining, heirs: PolicyStages
) -> tuple[ValuePretraining, list[Problem]]:
    """The stage with ``kl_coef`` and ``gamma`` of the policy stages that start from its critic."""
    problems: list[Problem] = []
    inherited: dict[str, float] = {}
    for field in ("kl_coef", "gamma"):
        if getattr(stage, field) is not None:
            continue
        path = ("stages", name, field)
        values = {heir: getattr(policy_stage.algorithm, field) for heir, policy_stage in heirs.items()}
        if len(set(values.values())) == 1:
            inherited[field] = next(iter(values.values()))
        elif values:
            told = ", ".join(f"{heir} has {value:g}" for heir, value in values.items())
            message = (
                f"is to be that of the policy stages that start from this critic, but they differ: {told}"
            )
            problems.append(Problem(path, message, f"use one {field} in all, or pretrain a critic for each"))
        else:
            message = (
                "is left out, and no policy_optimization stage starts from this critic that could give it"
            )
            problems.append(Problem(path, message, f"set {field} here"))
    return stage.model_copy(update=inherited), problems


def _disagreements(
    recipe: Recipe, name: str, stage: ValuePretraining, heirs: PolicyStages
) -> Iterator[Problem]:
    for heir, policy_stage in heirs.items():
        path = ("stages", name)
        if recipe.rewards[stage.reward] != recipe.rewards[policy_stage.reward]:
            message = f"'{stage.reward}' is not the reward of '{heir}' ('{policy_stage.reward}'), which starts from it"
            yield Problem((*path, "reward"), message, "use one reward in both")
        for field in ("kl_coef", "gamma"):
            ours, theirs = getattr(stage, field), getattr(policy_stage.algorithm, field)
            if ours is not None and ours != theirs:
                message = (
                    f"{ours:g} is not the {field} of '{heir}' ({theirs:g}), which starts from this critic"
                )
                yield Problem((*path, field), message, f"leave {field} out here, to inherit it")
        reference, theirs = stage_reference(stage), stage_reference(policy_stage)
        if policy_stage.algorithm.kl_coef and reference != theirs:
            message = f"'{reference}' is not the reference of '{heir}' ('{theirs}'), whose reward counts KL"
            yield Problem((*path, "reference"), message, f"set reference: {theirs}")

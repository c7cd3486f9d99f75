"""Fill in what stages inherit from each other, and check that critic and policy stages agree."""

from collections.abc import Iterator, Mapping

from vantage.schemas.checks.adapters import adapter_problems, with_lora
from vantage.schemas.checks.collected_rollouts import rollout_problems
from vantage.schemas.checks.critic_gates import critic_gate_problems
from vantage.schemas.checks.engines import engine_problems
from vantage.schemas.checks.guards import guard_problems
from vantage.schemas.checks.monitors import monitor_problems
from vantage.schemas.checks.offloading import offload_problems
from vantage.schemas.checks.prompt_selections import selection_problems
from vantage.schemas.checks.reward_imports import reward_import_problems
from vantage.schemas.checks.same_questions import same_question_problems
from vantage.schemas.checks.score_switches import score_problems
from vantage.schemas.checks.teachers import teacher_problems
from vantage.schemas.problems import Problem
from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.recipe.critic_head import ONE_VALUE, CriticHead
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.splits import share_problems, with_shares
from vantage.schemas.steps import stage_reference

PolicyStages = Mapping[str, PolicyOptimization]


def resolve(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with all inherited values written out, and the disagreements between its stages.

    A critic must be pretrained on the returns that the policy stage uses: the same reward, the same switches of
    ``Returns`` and, where KL is in the reward, the same reference. Values that its stage does not set come from the
    policy stages that start from it. A critic, demonstrations or collected responses that the algorithm does not read are removed.
    Stages without ``lora`` get the model's.
    """
    problems = share_problems(recipe)
    stages: dict[str, Stage] = {}
    for name, stage in recipe.stages.items():
        if isinstance(stage, ValuePretraining):
            policy_stages = _policy_stages_of(recipe.stages, name)
            problems += _disagreements(recipe.rewards, name, stage, policy_stages)
            stage, found = _inherit(name, stage, policy_stages)
            problems += found
            stage, found = _with_head(name, stage, policy_stages)
            problems += found
            problems += _cut_reference(name, stage)
            if any(each.critic_optimizer == "carry" for each in policy_stages.values()):
                stage = stage.model_copy(update={"keep_optimizer": True})
                problems += _cut_optimizer(name, stage)
                problems += _rounded_optimizer(name, stage)
            problems += critic_gate_problems(recipe, name, stage)
        if isinstance(stage, PolicyOptimization):
            problems += _optimizer_of_a_reward_model(recipe.stages, name, stage)
            stage = stage.model_copy(update=_unread(stage))
        if isinstance(stage, PreferenceCollection) and stage.samples_per_prompt is None:
            stage = stage.model_copy(update={"samples_per_prompt": 1 if stage.judge is None else 2})
        if isinstance(stage, RolloutCollection) and stage.held_out_samples_per_prompt is None:
            stage = stage.model_copy(update={"held_out_samples_per_prompt": stage.samples_per_prompt})
        problems += guard_problems(name, stage, recipe.rewards)
        problems += monitor_problems(recipe, name, stage)
        problems += rollout_problems(recipe, name, stage)
        problems += score_problems(recipe.rewards, name, stage)
        problems += selection_problems(recipe, name, stage)
        problems += teacher_problems(recipe, name, stage)
        if (reference := stage_reference(stage)) is not None:
            stage = stage.model_copy(update={"reference": reference})
        stages[name] = with_lora(recipe.model.lora, stage)
    recipe = recipe.model_copy(update={"stages": stages})
    problems += adapter_problems(recipe)
    problems += engine_problems(recipe)
    problems += offload_problems(recipe)
    problems += reward_import_problems(recipe)
    problems += same_question_problems(recipe)
    return recipe if problems else with_shares(recipe), problems


def _optimizer_of_a_reward_model(
    stages: Mapping[str, Stage], name: str, stage: PolicyOptimization
) -> Iterator[Problem]:
    critic = stages.get(stage.critic or "")
    if stage.critic_optimizer == "carry" and not isinstance(critic, ValuePretraining):
        message = (
            f"carry goes on with the optimiser of the critic's pretraining, and '{stage.critic}' had none"
        )
        remedy = "put a value_pretraining stage between them, or set critic_optimizer: fresh"
        yield Problem(("stages", name, "critic_optimizer"), message, remedy)


def _cut_optimizer(name: str, stage: ValuePretraining) -> Iterator[Problem]:
    if stage.resources.cuts_weights:
        message = "the optimiser's state is carried on from here, and fsdp2 cuts it"
        remedy = "use strategy: ddp here, or critic_optimizer: fresh in the policy stage"
        yield Problem(("stages", name, "resources", "distributed", "strategy"), message, remedy)


def _rounded_optimizer(name: str, stage: ValuePretraining) -> Iterator[Problem]:
    if stage.optimizer_states != "float32":
        message = f"the optimiser's state is carried on from here in float32, not in {stage.optimizer_states}"
        remedy = "leave optimizer_states out here, or set critic_optimizer: fresh in the policy stage"
        yield Problem(("stages", name, "optimizer_states"), message, remedy)


def _cut_reference(name: str, stage: ValuePretraining) -> Iterator[Problem]:
    """Yield a problem if the inherited returns read a sharded reference; returns that the stage sets itself are checked
    with its fields."""
    returns = stage.returns
    if returns and returns.kl_coef and returns.kl_kind == "full" and stage.resources.cuts_weights:
        message = (
            "the policy stage's kl_kind=full reads all weights of the reference at once, and fsdp2 cuts them"
        )
        remedy = "use strategy: ddp here, or another kl_kind in the policy stage"
        yield Problem(("stages", name, "resources", "distributed", "strategy"), message, remedy)


def _unread(stage: PolicyOptimization) -> dict[str, None]:
    """Return the stage's fields that its switches do not read, each → None."""
    critics = () if stage.algorithm.reads_critic else ("critic", "fresh_critic")
    ptx = () if stage.algorithm.ptx_coef else ("ptx",)
    rollouts = () if stage.algorithm.reads_rollouts else ("rollouts",)
    return dict.fromkeys((*critics, *ptx, *rollouts))


def _policy_stages_of(stages: Mapping[str, Stage], critic: str) -> PolicyStages:
    return {
        name: stage
        for name, stage in stages.items()
        if isinstance(stage, PolicyOptimization) and stage.critic == critic and stage.algorithm.reads_critic
    }


def _inherit(
    name: str, stage: ValuePretraining, policy_stages: PolicyStages
) -> tuple[ValuePretraining, list[Problem]]:
    """Return the stage with the returns of the policy stages that start from its critic; the defaults if there are none."""
    if stage.returns is not None:
        return stage, []
    returns = {
        policy_name: policy_stage.algorithm.returns for policy_name, policy_stage in policy_stages.items()
    }
    problems = []
    for switch in Returns.model_fields:
        values = {policy_name: getattr(each, switch) for policy_name, each in returns.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{policy_name} has {_shown(value)}" for policy_name, value in values.items())
            message = f"are to be those of the policy stages that start from this critic, but {switch} differs: {listed}"
            remedy = f"use one {switch} in all, or pretrain a critic for each"
            problems.append(Problem(("stages", name, "returns"), message, remedy))
    return stage.model_copy(update={"returns": next(iter(returns.values()), Returns())}), problems


def _with_head(
    name: str, stage: ValuePretraining, policy_stages: PolicyStages
) -> tuple[ValuePretraining, list[Problem]]:
    """Return the stage with the head of the policy stages that start from its critic; one value if there are none."""
    heads = {each: policy_stage.algorithm.critic_head for each, policy_stage in policy_stages.items()}
    wanted = next(iter(heads.values()), ONE_VALUE) if stage.head is None else stage.head
    problems = []
    for policy_name, head in heads.items():
        if head != wanted:
            message = f"{_described(wanted)} is not critic_head of '{policy_name}' ({_described(head)}), which starts from this critic"
            remedy = "use one head in all, or pretrain a critic for each"
            problems.append(Problem(("stages", name, "head"), message, remedy))
    return stage.model_copy(update={"head": None if wanted.is_scalar else wanted}), problems


def _described(head: CriticHead) -> str:
    """Return the head as a recipe writes it."""
    return head.model_dump_json().replace('"', "").replace(":", ": ").replace(",", ", ")


def _disagreements(
    rewards: Mapping[str, Reward], name: str, stage: ValuePretraining, policy_stages: PolicyStages
) -> Iterator[Problem]:
    """Yield values of the stage that differ from those of a policy stage that starts from its critic."""
    given = {} if stage.returns is None else dict(stage.returns)
    for policy_name, policy_stage in policy_stages.items():
        path = ("stages", name)
        if rewards[stage.reward] != rewards[policy_stage.reward]:
            message = f"'{stage.reward}' is not the reward of '{policy_name}' ('{policy_stage.reward}'), which starts from it"
            yield Problem((*path, "reward"), message, "use one reward in both")
        for switch, ours in given.items():
            theirs = getattr(policy_stage.algorithm, switch)
            if ours != theirs:
                message = f"{_shown(ours)} is not the {switch} of '{policy_name}' ({_shown(theirs)}), which starts from this critic"
                yield Problem((*path, "returns", switch), message, "leave returns out here, to inherit them")
        reference, others = stage_reference(stage), stage_reference(policy_stage)
        if policy_stage.algorithm.kl_coef and reference != others:
            message = (
                f"'{reference}' is not the reference of '{policy_name}' ('{others}'), whose reward counts KL"
            )
            yield Problem((*path, "reference"), message, f"set reference: {others}")


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)

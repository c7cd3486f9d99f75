"""What a recipe may do although a source warns against it, or although it is likely a slip."""

from collections.abc import Iterator

from schemas.algorithm import PRESETS
from schemas.recipe import PolicyOptimization, Recipe, RewardModelling, ValuePretraining
from schemas.references import dependencies, order, reward_of


def warnings(recipe: Recipe) -> list[str]:
    """Sentences for the author of the recipe; nothing in them stops a run."""
    found = [*_unread(recipe), *_unrelated_gates(recipe)]
    for name, stage in recipe.stages.items():
        if stage.kind == "evaluation" and stage.candidate == stage.baseline:
            found.append(f"stages.{name}.baseline: '{stage.baseline}' is compared with itself")
        if isinstance(stage, ValuePretraining):
            found += _ungated_reward(recipe, name, stage)
        if isinstance(stage, PolicyOptimization):
            found += _critic(recipe, name, stage)
            found += _zero_lambda(recipe, name, stage)
            found += _unread_lambda(name, stage)
            found += _uncentred_threshold(recipe, name, stage)
            found += _unclipped(name, stage)
    return found


def _unread(recipe: Recipe) -> Iterator[str]:
    read = {step for inputs in dependencies(recipe).values() for step in inputs.values()}
    scored = {reward_of(stage) for stage in recipe.stages.values()}
    yield from (f"data.{name}: no stage reads it" for name in recipe.data if f"data.{name}" not in read)
    yield from (f"rewards.{name}: no stage reads it" for name in recipe.rewards if name not in scored)


def _unrelated_gates(recipe: Recipe) -> Iterator[str]:
    upstream = _upstream(recipe)
    for i, publication in enumerate(recipe.publish):
        after, stage = publication.after, publication.stage
        if after is not None and after != stage and stage not in upstream[after]:
            yield f"publish.{i}.after: '{after}' does not read '{stage}', so its gate says nothing about it"


def _upstream(recipe: Recipe) -> dict[str, set[str]]:
    """Step → every step that it depends on, however far up."""
    inputs = dependencies(recipe)
    upstream: dict[str, set[str]] = {}
    for step in order(recipe):
        direct = set(inputs[step].values())
        upstream[step] = direct.union(*(upstream[each] for each in direct))
    return upstream


def _ungated_reward(recipe: Recipe, name: str, stage: ValuePretraining) -> Iterator[str]:
    if not any(gate.metric == "explained_variance" for gate in stage.gate):
        return
    for term in recipe.rewards[stage.reward].terms:
        if term.model is not None and not recipe.stages[term.model].gate:
            yield (
                f"stages.{name}.gate: scores of a reward model at chance level can be predicted well too; "
                f"give stages.{term.model} a gate on pair_accuracy"
            )


def _critic(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    critic = recipe.stages[stage.critic]
    if isinstance(critic, RewardModelling):
        yield (
            f"stages.{name}.critic: a reward model scores unfinished text low, so that as a critic it favours "
            "early tokens and responses collapse in length (VC-PPO, arXiv 2503.01491); "
            "put a value_pretraining stage between them"
        )
    if isinstance(critic, ValuePretraining) and critic.policy != stage.init:
        yield (
            f"stages.{name}.init: '{stage.init}' is not the policy whose responses the critic "
            f"'{stage.critic}' was pretrained on ('{critic.policy}')"
        )


def _zero_lambda(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    """λ = 1 − 1/(α·l), clamped to [0, 1], is 0 for every l ≤ 1/α."""
    alpha, longest = stage.algorithm.length_adaptive_alpha, recipe.generation.max_response_tokens
    if alpha is not None and 2 / alpha >= longest:
        extent = "every response" if alpha * longest <= 1 else f"responses of up to {1 / alpha:.0f} tokens"
        yield (
            f"stages.{name}.algorithm.length_adaptive_alpha: {alpha:g} makes λ = 1 − 1/(α·l) zero for {extent} "
            f"(VAPO, arXiv 2504.05118 eq. 4-5), and the longest have {longest}; short tasks need a larger α"
        )


def _unread_lambda(name: str, stage: PolicyOptimization) -> Iterator[str]:
    switches = stage.algorithm
    changed = switches.lambda_policy != PRESETS[switches.preset]["lambda_policy"]
    if changed and switches.length_adaptive_alpha is not None:
        yield (
            f"stages.{name}.algorithm.lambda_policy: {switches.lambda_policy:g} is not read while "
            "length_adaptive_alpha is set; set length_adaptive_alpha: null"
        )


def _uncentred_threshold(recipe: Recipe, name: str, stage: PolicyOptimization) -> Iterator[str]:
    if not stage.algorithm.positive_nll_coef or stage.algorithm.positive_verifier is not None:
        return
    for term in recipe.rewards[stage.reward].terms:
        model = recipe.stages[term.model] if term.model is not None else None
        if isinstance(model, RewardModelling) and model.centre_on is None:
            yield (
                f"stages.{name}.algorithm.positive_threshold: {stage.algorithm.positive_threshold:g} is compared "
                f"with scores of '{term.model}', whose zero means nothing (Bradley-Terry fixes differences only); "
                f"set stages.{term.model}.centre_on"
            )


def _unclipped(name: str, stage: PolicyOptimization) -> Iterator[str]:
    switches = stage.algorithm
    updates = stage.epochs * stage.batch_size // stage.minibatch_size
    if switches.clip_range_low is None and switches.clip_range_high is None and updates > 1:
        yield (
            f"stages.{name}.algorithm: the ratio is not clipped, but {updates} optimiser steps are taken on each "
            "rollout; only the first of them is a policy gradient (PPO, arXiv 1707.06347 §2-3)"
        )

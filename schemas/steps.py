"""Which field of a stage names what, and the order of work that follows from it."""

from typing import Literal

from schemas.recipe.inputs import MODEL
from schemas.recipe.recipe import Recipe
from schemas.recipe.stages import (
    AnyStage,
    DirectPreferenceOptimization,
    PolicyEvaluation,
    PolicyOptimization,
    PreferenceCollection,
    Rollouts,
    ValuePretraining,
)

Content = Literal["demonstrations", "preferences", "rankings", "prompts"]

CONTENT_COLUMNS: dict[str, tuple[str, ...]] = {
    "demonstrations": ("prompt", "response"),
    "preferences": ("prompt", "chosen", "rejected"),
    "rankings": ("prompt", "responses", "ranks"),
    "prompts": ("prompt",),
}
"""Content → the columns that each of its rows has. ``responses`` and ``ranks`` are lists of one length; the best
response has the lowest rank, and equal ranks are a tie."""

OPTIONAL_COLUMNS: dict[str, tuple[str, ...]] = {"preferences": ("margin",), "prompts": ("answer",)}
"""Content → columns that its rows may have: the least gap in score that a pair should have (Llama 2), and the reference
answer that a verifier is given."""

VERIFIERS = ("arithmetic", "arithmetic_long")
"""Built-in rules that say whether a response is right; a recipe's own stand in its ``verifiers``."""

_POLICY = (MODEL, "sft", "policy_optimization", "dpo", "best_of_n")

STAGE_FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "sft": {"init": _POLICY},
    "reward_model": {"init": _POLICY},
    "dpo": {"init": _POLICY, "reference": _POLICY},
    "value_pretraining": {"policy": _POLICY, "init": ("reward_model", *_POLICY), "reference": _POLICY},
    "policy_optimization": {
        "init": _POLICY,
        "reference": _POLICY,
        "critic": ("value_pretraining", "reward_model"),
        "fresh_critic": _POLICY,
    },
    "best_of_n": {"init": _POLICY},
    "preference_collection": {"policy": _POLICY},
    "evaluation": {"candidate": _POLICY, "baseline": _POLICY},
}
"""Kind of stage → field → kinds of stage that it may name (``model``: the recipe's model)."""

DATA_FIELDS: dict[str, dict[str, Content]] = {
    "sft": {"data": "demonstrations"},
    "reward_model": {"data": "preferences", "rankings": "rankings", "centre_on": "demonstrations"},
    "dpo": {"data": "preferences"},
    "value_pretraining": {"prompts": "prompts"},
    "policy_optimization": {"prompts": "prompts", "ptx": "demonstrations"},
    "best_of_n": {"prompts": "prompts"},
    "preference_collection": {"prompts": "prompts", "demonstrations": "demonstrations"},
    "evaluation": {"prompts": "prompts"},
}
"""Kind of stage → field that names a dataset → what it reads there."""

COLLECTING = "preference_collection"
"""The kind of stage whose artifact is a dataset of preferences: a field that reads preferences may name it."""

REFERRING = {"dpo": "init", "value_pretraining": "policy", "policy_optimization": "init"}
"""Kind of stage → the field that stands in for ``reference`` where the recipe gives none."""

PUBLISHED = ("policy_optimization", "sft", "dpo", "best_of_n", "reward_model")
"""Kinds of stage whose model can become a registered model."""


def stage_reference(stage: DirectPreferenceOptimization | ValuePretraining | PolicyOptimization) -> str:
    """What the stage measures its policy against: its ``reference``, or what its policy is or starts from."""
    if stage.reference is not None:
        return stage.reference
    name: str = getattr(stage, REFERRING[stage.kind])
    return name


def dependencies(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Step → role → step whose artifact it reads; what is published is no dependency.

    Steps are the recipe's stages and the implicit ``model``, ``data.NAME`` and ``verifiers.NAME`` that they read. Roles
    are the fields' names; term i of reward r that is a model, or one of the recipe's verifiers, has the role
    ``reward.r.i``. A verifier is tried on each dataset that it judges (roles ``prompts.0``, ``prompts.1`` …), a
    built-in one too where the dataset is not its own.
    """
    stages = {name: _inputs(recipe, stage) for name, stage in recipe.stages.items()}
    read = {step for inputs in stages.values() for step in inputs.values()}
    implicit = (MODEL, *(f"data.{name}" for name in recipe.data))
    return {**{step: {} for step in implicit if step in read}, **_tried(recipe), **stages}


def _tried(recipe: Recipe) -> dict[str, dict[str, str]]:
    """The steps that try a verifier, each with the datasets that it is tried on."""
    judged: dict[str, dict[str, None]] = {}
    for stage in recipe.stages.values():
        for name in verifiers_of(recipe, stage).values():
            data = getattr(stage, "prompts", None)
            its_own = data in recipe.data and recipe.data[data].source.startswith(f"builtin:{name}/")
            if name in recipe.verifiers or (name in VERIFIERS and not its_own):
                judged.setdefault(name, {}).update({data: None} if data in recipe.data else {})
    return {
        f"verifiers.{name}": {f"prompts.{i}": f"data.{data}" for i, data in enumerate(judged[name])}
        for name in (*recipe.verifiers, *VERIFIERS)
        if name in judged
    }


def _inputs(recipe: Recipe, stage: AnyStage) -> dict[str, str]:
    named = {field: getattr(stage, field) for field in STAGE_FIELDS[stage.kind]}
    if stage.kind in REFERRING:
        named["reference"] = stage_reference(stage)  # type: ignore[arg-type]
    for field in DATA_FIELDS[stage.kind]:
        target = getattr(stage, field)
        named[field] = f"data.{target}" if target in recipe.data else target
    inputs: dict[str, str] = {role: step for role, step in named.items() if step is not None}
    reward = reward_of(stage)
    if reward is not None:
        for i, term in enumerate(recipe.rewards[reward].terms):
            if term.model is not None:
                inputs[f"reward.{reward}.{i}"] = term.model
    own = {role: name for role, name in verifiers_of(recipe, stage).items() if name in recipe.verifiers}
    return inputs | {role: f"verifiers.{name}" for role, name in own.items()}


def verifiers_of(recipe: Recipe, stage: AnyStage) -> dict[str, str]:
    """Role → name of every verifier that a stage reads, built-in ones included."""
    named: dict[str, str | None] = {}
    reward = reward_of(stage)
    if reward is not None:
        terms = enumerate(recipe.rewards[reward].terms)
        named |= {f"reward.{reward}.{i}": term.verifier for i, term in terms}
    if isinstance(stage, PolicyEvaluation | PreferenceCollection) and stage.judge is not None:
        named["judge"] = stage.judge.verifier
    if isinstance(stage, PolicyOptimization):
        named["positive_verifier"] = stage.algorithm.positive_verifier
    return {role: name for role, name in named.items() if name is not None}


def reward_of(stage: AnyStage) -> str | None:
    """The name of the reward that a stage scores responses with, if it does."""
    if isinstance(stage, Rollouts):
        return stage.reward
    if isinstance(stage, PolicyEvaluation | PreferenceCollection):
        return stage.judge.reward if stage.judge is not None else None
    return None


def order(recipe: Recipe) -> list[str]:
    """Every step after all that it reads; otherwise as the recipe lists them, ``model`` and data first.

    Raises:
        ValueError: stages wait for one another (a recipe that was loaded has no such ring).
    """
    waiting = {step: set(inputs.values()) for step, inputs in dependencies(recipe).items()}
    ordered: list[str] = []
    while waiting:
        ready = next((step for step, inputs in waiting.items() if not inputs), None)
        if ready is None:
            raise ValueError(f"stages wait for one another: {', '.join(waiting)}")
        ordered.append(ready)
        del waiting[ready]
        for inputs in waiting.values():
            inputs.discard(ready)
    return ordered


def content_of(recipe: Recipe, data_name: str) -> Content:
    """What a dataset holds: what its readers read it as. Demonstrations may be read for their prompts too.

    Raises:
        ValueError: no stage reads it, so nothing says what it holds.
    """
    readings = [
        content
        for stage in recipe.stages.values()
        for field, content in DATA_FIELDS[stage.kind].items()
        if getattr(stage, field) == data_name
    ]
    if not readings:
        raise ValueError(f"data.{data_name} is read by no stage; remove it, or name it in one")
    return next((content for content in readings if content != "prompts"), "prompts")

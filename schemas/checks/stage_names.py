"""Checks of the stages and other models that a recipe names."""

from collections.abc import Iterator
from typing import Any

from vantage.schemas.checks.plain_recipe import Plain, is_in, kinds_of, mapping_of, stages_of
from vantage.schemas.kinds import STAGES, kinds_making
from vantage.schemas.problems import Path, Problem, quote, suggest
from vantage.schemas.recipe.inputs import MODEL
from vantage.schemas.steps import JUDGES


def stage_references(plain: Plain) -> Iterator[Problem]:
    """Find fields of stages that name a stage of the wrong kind, or none."""
    stages = stages_of(plain)
    for name, kind in kinds_of(plain).items():
        for field, artifacts in STAGES[kind].reads.items():
            allowed, path, target = kinds_making(artifacts), ("stages", name, field), stages[name].get(field)
            takes_others = field in STAGES[kind].other_models
            if not (takes_others and is_in(mapping_of(plain.get("models")), target)):
                yield from stage_named(plain, path, target, allowed)


def unread_models(plain: Plain) -> Iterator[Problem]:
    """Other models that no stage reads."""
    read = [
        target
        for name, kind in kinds_of(plain).items()
        for target in other_models_read(stages_of(plain)[name], kind)
    ]
    for name in mapping_of(plain.get("models")):
        if name not in read and name not in (MODEL, *stages_of(plain)):
            yield Problem(("models", name), "no stage reads it", "name it in one, or remove it")


def other_models_read(stage: Plain, kind: str) -> list[Any]:
    """Return what a stage names where another model may stand."""
    judges = [model for _, model in judging_models("", stage, kind)]
    return [*(stage.get(field) for field in STAGES[kind].other_models), *judges]


def judging_models(name: str, stage: Plain, kind: str) -> Iterator[tuple[Path, Any]]:
    """Yield (Path, model) for each judge of a stage that is a model."""
    for field in JUDGES:
        if field in STAGES[kind].work.model_fields and mapping_of(stage.get(field)).get("model") is not None:
            yield ("stages", name, field, "model"), mapping_of(stage[field])["model"]


def judge_references(plain: Plain) -> Iterator[Problem]:
    """Find models that judge responses: policies, or other models."""
    for name, kind in kinds_of(plain).items():
        for path, target in judging_models(name, stages_of(plain)[name], kind):
            if not is_in(mapping_of(plain.get("models")), target):
                yield from stage_named(plain, path, target, kinds_making(("policy",)))


def stand_in_references(plain: Plain) -> Iterator[Problem]:
    """Find stages that stand in for registered models: each makes a policy."""
    for name, model in mapping_of(plain.get("models")).items():
        target = mapping_of(model).get("otherwise")
        yield from stage_named(plain, ("models", name, "otherwise"), target, kinds_making(("policy",)))


def stage_named(plain: Plain, path: Path, target: Any, allowed: tuple[str, ...]) -> Iterator[Problem]:
    """Find what is wrong where a field names a stage (or the model) that must be of an allowed kind."""
    kinds, itself = kinds_of(plain), path[1] if path[0] == "stages" else None
    fitting = [name for name, kind in kinds.items() if kind in allowed and name != itself]
    fitting += [MODEL] if MODEL in allowed else []
    remedy = f"use one of: {', '.join(fitting)}" if fitting else f"add a {_kinds_text(allowed)}"
    field = str(path[-1])
    rule = f"{field} names a" if field.endswith("s") else f"{_article(field)} {field} is a"
    rule = f"{rule} {_kinds_text(allowed)}"
    if not isinstance(target, str):
        return
    if target == MODEL:
        if MODEL not in allowed:
            yield Problem(path, f"'{MODEL}' is the recipe's model; {rule}", remedy)
    elif target == itself:
        yield Problem(path, f"'{target}' is this stage itself", remedy)
    elif target in mapping_of(plain.get("models")) and target not in stages_of(plain):
        message = f"'{target}' is another model, which stages sample from and compare with; {rule}"
        yield Problem(path, message, remedy)
    elif target not in stages_of(plain):
        yield Problem(path, f"no stage is called {quote(target)}", suggest(target, fitting) or remedy)
    elif target in kinds and kinds[target] not in allowed:
        yield Problem(path, f"'{target}' is {with_article(kinds[target])}; {rule}", remedy)


def with_article(kind: str) -> str:
    """Return the kind with its article: ``an sft stage``, ``a reward_model stage`` …"""
    return f"{_article(kind)} {kind} stage"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" or word == "sft" else "a"


def _kinds_text(kinds: tuple[str, ...]) -> str:
    stages = f"{' or '.join(kind for kind in kinds if kind != MODEL)} stage"
    return f"{stages}, or the recipe's model" if MODEL in kinds else stages

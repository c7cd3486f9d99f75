"""What a recipe's fields accept, refuse and default to."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from schemas.algorithm import Algorithm
from schemas.recipe import (
    Data,
    Gate,
    Judge,
    MissingEos,
    PolicyOptimization,
    Publication,
    Recipe,
    RewardTerm,
    Split,
    SupervisedFineTuning,
    ValuePretraining,
)
from schemas.references import DATA_FIELDS, STAGE_FIELDS

ROOT = Path(__file__).parents[2]


def policy_stage(**fields: Any) -> PolicyOptimization:
    names = {"init": "sft", "critic": "value", "reward": "main", "prompts": "tasks", "algorithm": "vapo"}
    return PolicyOptimization.model_validate({"kind": "policy_optimization", **names, **fields})


def value_stage(**fields: Any) -> ValuePretraining:
    names = {"policy": "sft", "init": "reward", "reward": "main", "prompts": "tasks"}
    return ValuePretraining.model_validate({"kind": "value_pretraining", **names, **fields})


def test_a_recipe_survives_json(plain: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(plain)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_a_recipe_cannot_be_changed(plain: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(plain)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 3


def test_one_gate_is_a_list_of_one() -> None:
    gate = {"metric": "test_nll", "at_most": 1.0}
    one = SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", "gate": gate})
    several = SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", "gate": [gate, gate]})
    assert one.gate == (Gate(metric="test_nll", at_most=1.0),)
    assert len(several.gate) == 2


def test_a_gates_bound_is_on_the_side_that_was_given() -> None:
    least, most = Gate(metric="m", at_least=0.0), Gate(metric="m", at_most=2.0)
    assert (least.bound, least.relation, most.bound, most.relation) == (0.0, ">=", 2.0, "<=")


def test_splits_are_numbers_or_shares() -> None:
    split = Split(validation=256, test=0.1)
    assert (type(split.validation), type(split.test)) == (int, float)


@pytest.mark.parametrize("size", [0, 1.0, 1.5, 0.0, -3, True, "256"])
def test_splits_of_another_size_are_refused(size: Any) -> None:
    with pytest.raises(ValidationError):
        Split(test=size)


@pytest.mark.parametrize(
    "fields",
    [{"seed": True}, {"seed": "3"}, {"seed": 3.0}, {"seed": -1}, {"seed": 2**32}, {"learning_rate": True},
     {"learning_rate": "1e-5"}, {"learning_rate": 0}, {"learning_rate": float("inf")}, {"epochs": 0},
     {"gate": {"metric": "m", "at_least": "0.3"}}, {"resources": {"gpus": -1}}, {"resources": {"cpus": 0}}],
)  # fmt: skip
def test_numbers_are_numbers_of_the_right_kind_and_range(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", **fields})


def test_whole_numbers_are_numbers() -> None:
    stage = SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", "epochs": 2})
    assert stage.epochs == 2.0
    assert type(stage.epochs) is float


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Gate(metric="m"), "a gate has either at_least or at_most; give exactly one of them"),
        (lambda: Gate(metric="m", at_least=0, at_most=1), "a gate has either at_least or at_most"),
        (lambda: RewardTerm(), "a reward term names either a model or a verifier; give exactly one of them"),
        (lambda: RewardTerm(model="a", verifier="b"), "a reward term names either a model or a verifier"),
        (lambda: MissingEos(), "missing_eos takes either subtract or replace; give exactly one of them"),
        (lambda: MissingEos(subtract=1, replace=0), "missing_eos takes either subtract or replace"),
        (lambda: Judge(), "a judge is either a verifier or a reward; give exactly one of them"),
        (lambda: Judge(verifier="a", reward="b"), "a judge is either a verifier or a reward"),
        (lambda: Publication(stage="a", registered_model="m", after="b"), "after=b holds back an alias, and there is none"),
        (lambda: policy_stage(batch_size=100, minibatch_size=50),
         "batch_size=100 is not a multiple of algorithm.samples_per_prompt=16; use 96 or 112"),
        (lambda: policy_stage(batch_size=96, minibatch_size=64),
         "batch_size=96 is not a multiple of minibatch_size=64; use minibatch_size: 96 or a divisor of it"),
        (lambda: value_stage(samples_per_prompt=3), "batch_size=256 is not a multiple of samples_per_prompt=3; use 255 or 258"),
        (lambda: value_stage(minibatch_size=100), "batch_size=256 is not a multiple of minibatch_size=100"),
    ],
)  # fmt: skip
def test_rules_over_several_fields(made: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        made()
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["Bad", "9lives", "a-b", "a.b", "", "a" * 64, "a\n", "модель"])
def test_names_are_plain(plain: dict[str, Any], name: str) -> None:
    plain["data"][name] = plain["data"]["demos"]
    with pytest.raises(ValidationError, match="pattern"):
        Recipe.model_validate(plain)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a b", "-x", "a" * 129])
def test_registered_models_have_names_that_are_no_paths(name: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        Publication(stage="policy", registered_model=name)


def test_columns_are_ours() -> None:
    with pytest.raises(ValidationError, match=r"columns.answer"):
        Data.model_validate({"source": "x.csv", "columns": {"answer": "b"}})


def test_a_recipe_needs_a_stage(plain: dict[str, Any]) -> None:
    plain["stages"] = {}
    with pytest.raises(ValidationError, match="at least 1"):
        Recipe.model_validate(plain)


# -- every field is read


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models(field.annotation)
    elif get_origin(annotation) is not None:
        for argument in get_args(annotation):
            yield from _models(argument)


FIELDS = sorted({(model.__name__, name) for model in _models(Recipe) for name in model.model_fields})


@functools.cache
def _names_read() -> frozenset[str]:
    """Attributes that are read anywhere above schemas, and by what the schemas themselves say of a recipe."""
    files = [file for folder in ("models", "tasks", "flows") for file in (ROOT / folder).rglob("*.py")]
    own = ("references.py", "cautions.py", "verdicts.py", "stage_key.py")
    read = {name for fields in [*STAGE_FIELDS.values(), *DATA_FIELDS.values()] for name in fields}
    for file in [*files, *(ROOT / "schemas" / name for name in own)]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    read.add(name)
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    read.add(name)
    return frozenset(read)


def test_every_field_is_found() -> None:
    assert ("Algorithm", "clip_range_high") in FIELDS
    assert ("Recipe", "publish") in FIELDS
    assert ("MissingEos", "subtract") in FIELDS


@pytest.mark.parametrize("name", sorted({name for _, name in FIELDS}))
def test_every_field_is_read_by_something(name: str) -> None:
    """A setting that nothing reads would be a promise that nobody keeps."""
    assert name in _names_read(), [model for model, field in FIELDS if field == name]


def test_algorithm_is_what_a_policy_stage_holds() -> None:
    assert isinstance(policy_stage().algorithm, Algorithm)

"""The JSON schema of recipes accepts what loads, refuses what a field alone makes wrong, and describes every field.

Beside what stands here, ``by_schema.watch`` compares schema and loader for every recipe that any test of this folder loads.
"""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from tests.schemas.by_schema import (
    RULES,
    SAID,
    compare,
    validator,
)
from tests.support.every import every
from vantage.schemas.frozen import Frozen
from vantage.schemas.loading import plain_yaml
from vantage.schemas.loading.json_schema import (
    EXACTLY_ONE,
    REQUIRES,
    recipe_schema,
    sweep_schema,
)
from vantage.schemas.loading.recipe_file import builtin_recipes, find_recipe
from vantage.schemas.recipe.presets import PRESETS, PresetName
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.sweep import Sweep

SCHEMAS = {"recipe": recipe_schema, "sweep": sweep_schema}
MODELS: dict[str, type[BaseModel]] = {"recipe": Recipe, "sweep": Sweep}
REMEDY = "write it anew: vantage schema > recipes/recipe.schema.json; vantage schema --sweep > recipes/sweep.schema.json"


def read(name: str) -> Any:
    return plain_yaml.read(find_recipe(name).read_text(encoding="utf-8")).value


def kind_of(name: str) -> str:
    return "sweep" if "sweep" in read(name) else "recipe"


# -- what comes with Vantage


@pytest.mark.slow
def test_every_built_in_recipe_and_sweep_is_accepted() -> None:
    """Sources that a recipe leaves open are accepted too, since an editor shows the file without ``--set``."""
    errors = [
        f"{name}: {error.message}"
        for name in builtin_recipes()
        for error in validator(Sweep if kind_of(name) == "sweep" else Recipe).iter_errors(read(name))
    ]
    assert errors == []


def test_the_first_line_names_the_schema_which_lies_beside() -> None:
    first_lines = {
        name: find_recipe(name).read_text(encoding="utf-8").splitlines()[0] for name in builtin_recipes()
    }
    assert first_lines == {
        name: f"# yaml-language-server: $schema={kind_of(name)}.schema.json" for name in builtin_recipes()
    }


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_schema_that_lies_beside_the_recipes_is_the_printed_one(kind: str) -> None:
    written = find_recipe("quickstart").with_name(f"{kind}.schema.json").read_text(encoding="utf-8")
    assert json.loads(written) == SCHEMAS[kind](), REMEDY


@every("preset", get_args(PresetName))
def test_every_preset_by_name_alone_with_a_switch_and_written_out(preset: str) -> None:
    recipe = read("quickstart")
    for algorithm in (preset, {"preset": preset, "gamma": 0.5}, {"preset": preset, **PRESETS[preset]}):
        recipe["stages"]["policy"]["algorithm"] = algorithm
        assert validator(Recipe).is_valid(recipe)
    recipe["stages"]["policy"]["algorithm"] = {"preset": preset, "gama": 0.5}
    assert not validator(Recipe).is_valid(recipe)


# -- descriptions


def objects(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each class, and each part of the schema that lists its fields."""
    for name, definition in {"": schema, **schema["definitions"]}.items():
        for inner in (definition, *definition.get("anyOf", ())):
            if "properties" in inner:
                yield name, inner


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_field_and_every_class_is_described(kind: str) -> None:
    listed = list(objects(validator(MODELS[kind]).schema))
    fields = {f"{name}.{field}": each for name, node in listed for field, each in node["properties"].items()}
    assert len(fields) > (14 if kind == "sweep" else 235)
    assert [name for name, field in fields.items() if len(field.get("description", "")) < 10] == []
    assert [name for name, node in listed if not node.get("description")] == []


# -- rules over several fields


def classes(base: type[Frozen] = Frozen) -> Iterator[type[Frozen]]:
    for each in base.__subclasses__():
        if (
            each.__module__.startswith("vantage.schemas.recipe.")
            or each.__module__ == "vantage.schemas.sweep"
        ):
            yield each
        yield from classes(each)


def test_every_rule_is_said_by_the_schema_or_named_as_one_that_cannot_be() -> None:
    rules = {
        f"{each.__name__}.{name}"
        for each in classes()
        for name, member in vars(each).items()
        if getattr(member, "is_rule", False) or name == "_one_group"
    }
    assert rules == SAID | RULES.keys()
    assert not SAID & RULES.keys()
    said = {each.__name__ for each in (*EXACTLY_ONE, *(model for model, _, _ in REQUIRES))}
    others = {"RewardTerm", "RolloutCorrection"}  # a union of its kinds, and one that has names too
    assert said | others == {rule.partition(".")[0] for rule in SAID}


PLACES: dict[str, tuple[str | int, ...]] = {
    "MissingEos": ("rewards", "main", "missing_eos"),
    "Gate": ("stages", "reward", "gate"),
    "RewardModelling": ("stages", "reward"),
    "DirectPreferenceOptimization": ("stages", "dpo"),
    "Judge": ("stages", "evaluation", "judge"),
    "PreferenceCollection": ("stages", "pairs"),
    "Publication": ("publish", 0),
    "Signing": ("sign",),
    "Guard": ("stages", "sft", "guards"),
    "RolloutCorrection": ("stages", "policy", "algorithm", "rollout_correction"),
}
VALUES: dict[str, Any] = {"subtract": 1.0, "replace": 1.0, "at_least": 1.0, "at_most": 1.0,
                          "above": 1.0, "below": 1.0, "rises_by": "50%", "falls_by": 2.0,
                          "low": 0.5, "high": 2.0, "judge": {"verifier": "arithmetic"}}  # fmt: skip


@every(
    "model, fields",
    [
        *((model.__name__, fields) for model, fields in EXACTLY_ONE.items()),
        ("Publication", ("after", "alias")),
        ("PreferenceCollection", ("prompts", "demonstrations", "judge")),
        ("RolloutCorrection", ("low", "high")),
    ],
)
def test_fields_that_exclude_or_need_each_other(model: str, fields: tuple[str, ...]) -> None:
    """Each of the fields is left out, null, or given; in every combination the class and the schema agree."""
    recipe = read("quickstart")
    recipe["stages"]["pairs"] = {"kind": "preference_collection", "policy": "sft"}
    recipe["stages"]["dpo"] = {"kind": "dpo", "init": "sft"}
    recipe["sign"] = {"key": "key.pem"} if model != "Signing" else {}
    recipe["stages"]["reward"].pop("centre_coef")
    recipe["stages"]["reward"].pop("lm_coef")
    recipe["stages"]["evaluation"].pop("also")
    if model == "RolloutCorrection":
        recipe["stages"]["policy"]["algorithm"]["rollout_correction"] = {"action": "mask"}
    recipe["stages"]["sft"]["guards"] = {"metric": "loss"} if model == "Guard" else "off"
    outcomes = set()
    for chosen in itertools.product(("left out", "null", "given"), repeat=len(fields)):
        plain = copy.deepcopy(recipe)
        plain["stages"]["pairs"] |= {} if model == "PreferenceCollection" else {"demonstrations": "x"}
        plain["stages"]["dpo"] |= {} if model == "DirectPreferenceOptimization" else {"data": "x"}
        place = plain
        for part in PLACES[model]:
            place = place[part]
        for field, how in zip(fields, chosen, strict=True):
            place.pop(field, None)
            if how != "left out":
                place[field] = None if how == "null" else VALUES.get(field, "name")
        try:
            Recipe.model_validate(plain)
            accepted = True
        except ValueError:
            accepted = False
        assert validator(Recipe).is_valid(plain) is accepted, chosen
        outcomes.add(accepted)
    assert outcomes == {True, False}


# -- every field by itself


WRONG: tuple[Any, ...] = (
    None, True, "off", "Yes", "y", "t", 1, 0, -1, 3, 2**40, 0.5, -0.5, 1.5, 1e300, "", "word", "Word!", "1", "yes", "builtin:x", "hub:x", "package:",
    "?", [], ["word"], [[]], [{}], {}, {"word": 1}, {"Word!": {}}, {"kind": "sft"}, {"preset": "vapo"}, {"metric": "x"},
)  # fmt: skip


def paths(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    for key, inner in (
        node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ())
    ):
        yield (*path, key)
        yield from paths(inner, (*path, key))


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    """Return a recipe with a stage of every kind and every field of it written out."""
    recipe = read("quickstart")
    recipe["stages"] |= {
        "dpo": {"kind": "dpo", "init": "sft", "data": "preferences"},
        "best": {"kind": "best_of_n", "init": "sft", "reward": "main", "prompts": "prompts"},
        "pairs": {"kind": "preference_collection", "policy": "sft", "demonstrations": "demonstrations"},
        "collected": {"kind": "rollout_collection", "policy": "sft", "reward": "main", "prompts": "prompts"},
    }
    recipe["verifiers"] = {
        "mine": {"source": "builtin:exact_match", "extract": "(a)"},
        "number": {"source": "builtin:number", "extract": "(a)", "relative": 0.5},
        "brief": {"source": "builtin:length", "at_most": 5},
        "shaped": {"source": "builtin:json_schema", "matches": {"type": "object"}},
        "sections": {"source": "builtin:format", "tags": ["think", "answer"]},
        "coded": {"source": "builtin:code"},
    }
    written = Recipe.model_validate(recipe).model_dump(mode="json")
    plain: dict[str, Any] = json.loads(json.dumps(written))
    assert validator(Recipe).is_valid(plain)
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("section", ["recipe", "seed", "model", "generation", "data", "verifiers", "rewards", "publish",
                                     "sft", "reward", "value", "policy", "evaluation", "dpo", "best", "pairs"])  # fmt: skip
def test_whatever_one_field_is_replaced_by_loader_and_schema_say_the_same(
    full: dict[str, Any], section: str
) -> None:
    stages = full["stages"]
    is_stage = section in stages
    part = stages if is_stage else full
    least = {name: full[name] for name in validator(Recipe).schema["required"]} | {
        "stages": {"sft": stages["sft"]}
    }
    assert validator(Recipe).is_valid(least)
    differing = 0
    for path in [(section,), *((section, *inner) for inner in paths(part[section]))]:
        for value in (*WRONG, _GONE):
            replaced = copy.deepcopy({section: part[section]})
            _replace(replaced, path, value)
            plain = least | ({"stages": replaced} if is_stage else replaced)
            differing += bool(compare(Recipe, plain, loads=False))
    assert differing > 10


_GONE = object()


def _replace(plain: Any, path: tuple[str | int, ...], value: Any) -> None:
    for part in path[:-1]:
        plain = plain[part]
    if value is not _GONE:
        plain[path[-1]] = value
    elif isinstance(plain, dict):
        plain[f"{path[-1]}x"] = plain.pop(path[-1])  # an unknown key, and perhaps a missing one


def test_the_schemas_are_package_data() -> None:
    patterns = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"vantage.recipes" = ["*.yaml", "*.json", "**/*.jsonl"]' in patterns

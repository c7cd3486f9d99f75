"""The JSON schema of recipes and of sweeps, for editors: it accepts what the loader accepts, as far as a schema can.

pydantic prints the classes. This module adds what their validators also accept (one gate for a list of gates, a
preset's name) and what pydantic does not print (patterns of names, "exactly one of", forms of sources).
``tests/schemas/loading/test_json_schema.py`` compares schema and loader, and lists what no schema can express.
"""

import ast
import inspect
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from vantage.schemas.frozen import Frozen
from vantage.schemas.loading.source_paths import (
    BUILTIN_DATA,
    BUILTIN_MODELS,
)
from vantage.schemas.recipe.guards import RELATIONS, Guard
from vantage.schemas.recipe.inputs import Data, Model
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.recipe.recipe import Publication, Recipe
from vantage.schemas.recipe.rewards import Judge, MissingEos
from vantage.schemas.recipe.rollout_correction import NAMED
from vantage.schemas.recipe.signing import Signing
from vantage.schemas.recipe.sources import Hub, HubDataset, HubFiles, Package
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization, RewardModelling
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection
from vantage.schemas.recipe.verifiers import EXACT_MATCH, Verifier
from vantage.schemas.sweep import Sweep

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The draft of JSON schema that most editors support for YAML."""

EXACTLY_ONE: dict[type[Frozen], tuple[str, ...]] = {
    MissingEos: ("subtract", "replace"),
    Gate: ("at_least", "at_most"),
    Guard: RELATIONS,
    RewardModelling: ("data", "rankings"),
    DirectPreferenceOptimization: ("data", "rollouts"),
    Judge: ("verifier", "reward", "model"),
    PreferenceCollection: ("prompts", "demonstrations"),
    Signing: ("key", "key_variable"),
}
"""Class → fields, exactly one of which is given; ``null`` counts as not given."""
REQUIRES: tuple[tuple[type[Frozen], str, str], ...] = (
    (Publication, "after", "alias"),
    (PreferenceCollection, "prompts", "judge"),
    (PreferenceCollection, "judge", "prompts"),
)
"""Class, a field, and another field that it requires."""
BY_ONE_FIELD = {
    "WatchPrompts": ("data", "A dataset as it is."),
    "Members": ("count", "The number of members alone."),
}
"""Class that may be written as one of its fields alone → the field, and its description then."""
ONE_OR_LIST = ("gate", "measure", "guards", "url")
"""Lists that may be written without brackets when they have one item."""


def recipe_schema() -> Schema:
    """Return the schema of a recipe's file."""
    schema = _schema(Recipe)
    definitions: Schema = schema["definitions"]
    algorithm = definitions["Algorithm"]
    names = {**algorithm["properties"]["preset"], "description": "A preset as it is."}
    definitions["Algorithm"] = {"description": algorithm["description"], "anyOf": [names, algorithm]}
    correction: Schema = definitions["RolloutCorrection"]
    _add_constraint(correction, {"anyOf": [_is_given("low"), _is_given("high")]})
    names = {"enum": list(NAMED), "description": "Bounds that have a name."}
    definitions["RolloutCorrection"] = {
        "description": correction["description"],
        "anyOf": [names, correction],
    }
    for name, (field, described) in BY_ONE_FIELD.items():
        short = {**definitions[name]["properties"][field], "description": described}
        definitions[name] = {
            "description": definitions[name]["description"],
            "anyOf": [short, definitions[name]],
        }
    for model, fields in EXACTLY_ONE.items():
        _add_constraint(definitions[model.__name__], {"oneOf": [_is_given(field) for field in fields]})
    for model, one, other in REQUIRES:
        _add_constraint(definitions[model.__name__], {"anyOf": [{"not": _is_given(one)}, _is_given(other)]})
    for model, builtin, patterns in (
        (Model, BUILTIN_MODELS, {"hub": Hub.PATTERN, "package": Package.PATTERN}),
        (Data, BUILTIN_DATA, {"hub": f"({HubDataset.PATTERN}|{HubFiles.PATTERN})"}),
        (Verifier, (EXACT_MATCH,), {}),
    ):
        _add_constraint(
            definitions[model.__name__]["properties"]["source"], _source_constraint(builtin, patterns)
        )
    named: Schema = schema["properties"]["data"]["patternProperties"]
    selected = _selected_data(definitions[PromptSelection.__name__])
    named |= {pattern: {"anyOf": [data, selected]} for pattern, data in named.items()}
    return schema


def _selected_data(stage: Schema) -> Schema:
    """Return the schema of a selected dataset: that of its stage, with ``from`` in place of the stage's inputs."""
    properties = {name: each for name, each in stage["properties"].items() if name not in ("kind", "prompts")}
    collection = properties.pop("rollouts")
    required = ["from", *(name for name in stage["required"] if name in properties)]
    return {**stage, "properties": {"from": collection, **properties}, "required": required}


def sweep_schema() -> Schema:
    """Return the schema of a sweep's file."""
    return _schema(Sweep)


def _schema(model: type[Frozen]) -> Schema:
    printed = model.model_json_schema(ref_template="#/definitions/{model}")
    definitions = printed.pop("$defs", {})
    classes = {each.__name__: each for each in _subclasses(Frozen)}
    for name, definition in [(model.__name__, printed), *definitions.items()]:
        _describe(definition, classes[name])
        for field, described in definition.get("properties", {}).items():
            if field in ONE_OR_LIST:
                for described_list in _lists_in(described):
                    _allow_one_item(described_list)
    _to_draft_07(printed)
    _to_draft_07(definitions)
    return {
        "$schema": DRAFT,
        "title": f"Vantage {model.__name__.lower()}",
        **printed,
        "definitions": definitions,
    }


def _subclasses(model: type[Frozen]) -> list[type[Frozen]]:
    return [model, *(found for each in model.__subclasses__() for found in _subclasses(each))]


def _describe(definition: Schema, model: type[BaseModel]) -> None:
    """Add every field's description (``kind`` gets that of its class) and remove titles, which repeat names."""
    definition.pop("title", None)
    for field, described in definition.get("properties", {}).items():
        described.pop("title", None)
        if field == "kind":
            described["description"] = inspect.cleandoc(model.__doc__ or "").splitlines()[0]
        else:
            described["description"] = _docstrings(model)[field]


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return field → the text under it, a class's own before its base's.

    pydantic can do this while a class is made, but then every command parses every class: a sixth of a second.
    """
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if issubclass(each, Frozen):
            [written] = ast.parse(inspect.getsource(each)).body
            assert isinstance(written, ast.ClassDef)
            for field, below in pairwise(written.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        found[name] = inspect.cleandoc(text)
    return found


def _lists_in(described: Schema) -> list[Schema]:
    """Return the schema, or those of its alternatives, that accept a list."""
    alternatives = [inner for key in ("anyOf", "oneOf") for inner in described.get(key, ())]
    found = [described] if described.get("type") == "array" else []
    return [*found, *(each for inner in alternatives for each in _lists_in(inner))]


def _allow_one_item(described: Schema) -> None:
    limits = {key: described.pop(key) for key in list(described) if key not in ("description", "default")}
    described["anyOf"] = [limits["items"], limits]


def _to_draft_07(node: Any) -> None:
    """Replace pydantic's ``discriminator`` by JSON schema rules, and forbid names that match no pattern."""
    if isinstance(node, dict):
        if isinstance(node.get("discriminator"), dict) and "propertyName" in node["discriminator"]:
            _select_by_kind(node)
        if "patternProperties" in node:
            node["additionalProperties"] = False
        for inner in node.values():
            _to_draft_07(inner)
    elif isinstance(node, list):
        for inner in node:
            _to_draft_07(inner)


def _select_by_kind(union: Schema) -> None:
    """Select the class by ``kind`` instead of ``oneOf``, for which editors can only report that none matches."""
    del union["oneOf"]
    discriminator = union.pop("discriminator")
    field, mapping = discriminator["propertyName"], discriminator["mapping"]
    union |= {
        "type": "object",
        "required": [field],
        "properties": {field: {"description": "The kind of stage.", "enum": list(mapping)}},
        "allOf": [
            {"if": {"required": [field], "properties": {field: {"const": kind}}}, "then": {"$ref": reference}}
            for kind, reference in mapping.items()
        ],
    }


def _add_constraint(schema: Schema, rule: Schema) -> None:
    schema.setdefault("allOf", []).append(rule)


def _is_given(field: str) -> Schema:
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def _source_constraint(builtin: tuple[str, ...], patterns: dict[str, str]) -> Schema:
    """Return a built-in source, one of a known form, or a path."""
    return {
        "anyOf": [
            {"enum": list(builtin)},
            *({"pattern": f"^{pattern}$"} for pattern in patterns.values()),
            {"not": {"pattern": f"^({'|'.join(['builtin', *patterns])}):"}},
        ]
    }

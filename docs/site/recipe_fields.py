"""Write the reference of all recipe fields from the classes of a recipe: type, range, default, meaning and stage key."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from docs.site.units import unit_of
from vantage.schemas.kinds import KINDS, STAGES
from vantage.schemas.loading.json_schema import recipe_schema, sweep_schema
from vantage.schemas.recipe.presets import PRESETS
from vantage.schemas.recipe.served_scores import JudgeServer, RewardServer
from vantage.schemas.recipe.stage import Stage, Training
from vantage.schemas.records.stage_key import NOT_IN_KEY

Schema = dict[str, Any]

RECIPE_PAGE = "reference/recipe.md"
STAGES_PAGE = "reference/stages.md"
ALGORITHM_PAGE = "reference/algorithm.md"
SWEEP_PAGE = "reference/sweep.md"

BY_CONTENT = "stage, by content"
"""The key holds the digest of what the field names, and not the name."""
AS_HOLDER = "that of what holds it"
"""The field is a part of a larger value, whose key it enters."""
KEYS_OF_RECIPE = {
    "recipe": "none",
    "seed": "every stage without a seed of its own",
    "model": "`model`, and by content all that read it",
    "models": "`models.NAME`, and by content all that read it",
    "generation": "every stage; of `model` and `data.NAME` the two limits alone",
    "data": "`data.NAME`, and by content all that read it",
    "mixtures": "`mixtures.NAME`, and by content all that read it",
    "verifiers": "`verifiers.NAME`, and by content all that read it",
    "benchmarks": "`benchmarks.NAME`, and by content all that read it",
    "rewards": "every stage that reads the reward; the name is in no key",
    "stages": "the stage's own, and by content all that read it; the name is in no key",
    "licenses": "none",
    "workers": "none",
    "publish": "none",
    "sign": "none",
    "notify": "none",
}
"""Field of a recipe → the keys that it enters."""
IN_NO_KEY = frozenset(
    {
        "Publication",
        "Signing",
        "Notify",
        "Gate",
        "Extend",
        "Resources",
        "Distributed",
        "NodeRange",
        "Budget",
        "Price",
        "Member",
        "Round",
    }
)
"""Classes whose fields are in no stage key: they decide what happens around a stage, and not what it computes."""
NOT_IN_KEY_OF: Mapping[str, frozenset[str] | set[str]] = {
    **{server.__name__: server.not_in_key for server in (JudgeServer, RewardServer)},
    "Algorithm": {"preset"},
    "Load": {"streaming"},
}
"""Class → its fields that are in no key, where the class itself decides that."""


@cache
def _schema() -> Schema:
    return recipe_schema()


def _definition(name: str) -> Schema:
    """Return the schema of a class that has fields; a class with a short form has it as an alternative."""
    found: Schema = _schema()["definitions"][name]
    while "properties" not in found:
        found = found["anyOf"][-1]
    return found


STAGE_CLASSES = {KINDS[kind].work.__name__: kind for kind in STAGES}
"""Class → kind of stage."""


def page_of(name: str) -> str:
    """Return the page that describes a class."""
    if name in STAGE_CLASSES:
        return STAGES_PAGE
    return ALGORITHM_PAGE if name == "Algorithm" else RECIPE_PAGE


def pages() -> dict[str, str]:
    """Return path in the site → text of the four pages."""
    return {
        RECIPE_PAGE: "\n".join(_recipe_page()) + "\n",
        STAGES_PAGE: "\n".join(_stages_page()) + "\n",
        ALGORITHM_PAGE: "\n".join(_algorithm_page()) + "\n",
        SWEEP_PAGE: "\n".join(_sweep_page()) + "\n",
    }


def _recipe_page() -> Iterator[str]:
    yield from (
        "# Recipe fields",
        "",
        "All fields of a recipe except those of [stages](stages.md) and of [`algorithm`](algorithm.md). The loader refuses fields",
        "that are not listed. The column *key* names the stage keys that a field enters: a change there makes the stage, and all that read",
        "it, run again ([how keys work](../explanation/stage_keys.md)). *none*: a change reuses every artifact.",
        "`vantage schema` prints the same as a JSON schema, which editors use.",
        "",
        "## The recipe",
        "",
    )
    yield from _table(_schema(), KEYS_OF_RECIPE)
    places = _places()
    for name in sorted(_schema()["definitions"]):
        if page_of(name) == RECIPE_PAGE:
            definition = _definition(name)
            yield from ("", f"## {name}", "", _sentence(definition.get("description", "")))
            if places.get(name):
                shown = ", ".join(f"`{place}`" for place in places[name][:4])
                yield from ("", f"In a recipe: {shown}{', …' if len(places[name]) > 4 else ''}.")
            yield ""
            yield from _table(definition, _keys_of_part(name))


def _stages_page() -> Iterator[str]:
    yield from (
        "# Stages",
        "",
        "The kinds of stages with their fields. The column *key* names the stage key that a field enters:",
        f"*stage* is the key of this stage, *{BY_CONTENT}* is the digest of what the field names, *none* is no key.",
        "",
    )
    stage, training = set(Stage.model_fields), set(Training.model_fields)
    sample = _definition("SupervisedFineTuning")
    yield from ("## Fields of every stage", "")
    yield from _table(_only(sample, stage), _keys_of_stage("sft"))
    yield from ("", "## Fields of every stage that trains", "", "In addition to those of every stage.", "")
    yield from _table(_only(sample, training - stage), _keys_of_stage("sft"))
    for name, kind in STAGE_CLASSES.items():
        definition, work = _definition(name), KINDS[kind].work
        base: type[Stage] = Training if issubclass(work, Training) else Stage
        own = {
            field
            for field in definition["properties"]
            if field == "kind"
            or field not in base.model_fields
            or work.model_fields[field].default != base.model_fields[field].default
        }
        also = "every stage that trains" if base is Training else "every stage"
        yield from ("", f"## {kind}", "", _sentence(definition["description"]), "")
        yield from (
            f"In addition to the fields of {also}. It makes: {KINDS[kind].makes.replace('_', ' ')}.",
            "",
        )
        yield from _table(_only(definition, own), _keys_of_stage(kind))


def _algorithm_page() -> Iterator[str]:
    yield from (
        "# Algorithm switches",
        "",
        "The field `algorithm` of a `policy_optimization` stage: a preset's name, or a mapping of `preset` and the switches that differ.",
        "Each switch is in the key of the stage; the preset's name is not, since it only stands for its switches.",
        "[Choose a method](../how_to/choose_a_method.md) helps to choose; [Algorithms](../algorithms.md) explains the formulas.",
        "",
        "## Algorithm",
        "",
    )
    yield from _table(_definition("Algorithm"), {"preset": "none"})
    yield from (
        "",
        "## Presets",
        "",
        "Each preset with the switches in which it differs from the defaults above.",
        "",
    )
    yield from ("| preset | switches |", "|---|---|")
    for preset, values in PRESETS.items():
        shown = (f"`{name}: {json.dumps(value)}`" for name, value in values.items())
        yield f"| `{preset}` | {', '.join(shown) or 'the defaults'} |"


def _sweep_page() -> Iterator[str]:
    schema = sweep_schema()
    yield from (
        "# Sweep fields",
        "",
        "All fields of a sweep's file ([Sweeps](../sweeps.md)). A sweep has no key of its own: its arms are recipes, with the keys of their stages.",
        "",
        "## Sweep",
        "",
    )
    yield from _table(schema, dict.fromkeys(schema["properties"], "none"))
    for name, definition in schema["definitions"].items():
        yield from ("", f"## {name}", "", _sentence(definition.get("description", "")), "")
        yield from _table(definition, dict.fromkeys(definition["properties"], "none"))


def _only(definition: Schema, fields: set[str]) -> Schema:
    """Return the schema with these of its fields alone, in its order."""
    kept = {name: each for name, each in definition["properties"].items() if name in fields}
    return {**definition, "properties": kept}


def _keys_of_stage(kind: str) -> Mapping[str, str]:
    """Return field → the key that it enters, for a stage of this kind."""
    row = KINDS[kind]
    named = {*row.roles, *row.data, *row.benchmarks, "reward", "verifier"}
    found = {}
    for field in row.work.model_fields:
        if field in named:
            found[field] = BY_CONTENT
        elif field in NOT_IN_KEY and field not in ("kind", "seed"):
            found[field] = "none"
        else:
            found[field] = "stage"
    return found


def _keys_of_part(name: str) -> Mapping[str, str]:
    """Return field → the key that it enters, for a class within a recipe."""
    fields = _definition(name)["properties"]
    if name in IN_NO_KEY:
        return dict.fromkeys(fields, "none")
    inside = "rollout" if name in ("Sampling", "SampledAhead", "Ahead") else name.lower()
    unread = {field for field in fields if f"{inside}.{field}" in NOT_IN_KEY} | NOT_IN_KEY_OF.get(name, set())
    return dict.fromkeys(unread, "none")


def _table(definition: Schema, keys: Mapping[str, str]) -> Iterator[str]:
    yield from ("| field | type and range | unit | default | effect | key |", "|---|---|---|---|---|---|")
    required = definition.get("required", ())
    for name, field in definition["properties"].items():
        default = "required" if name in required else _default(field)
        cells = (
            f"`{name}`",
            _type(field),
            unit_of(name, field),
            default,
            _cell(field.get("description", "")),
            keys.get(name, AS_HOLDER),
        )
        yield f"| {' | '.join(cells)} |"


def _default(field: Schema) -> str:
    if "default" not in field:
        return "empty"
    value = field["default"]
    if value is None:
        return "none"
    if value in ({}, [], ()):
        return "empty"
    if isinstance(value, dict | list):
        return "see its fields"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(field: Schema) -> str:
    """Return the type with its range, as a cell."""
    if "$ref" in field:
        return _link(field["$ref"])
    if any(key in field for key in ("anyOf", "oneOf")) and "type" not in field:
        options = [_type(each) for each in (*field.get("anyOf", ()), *field.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(options))
    if "allOf" in field and "type" not in field:
        return " and ".join(dict.fromkeys(_type(each) for each in field["allOf"] if "$ref" in each)) or "text"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return _choices(field["enum"])
    return _plain_type(field)


def _choices(values: list[Any]) -> str:
    if values and all(isinstance(value, str) for value in values):
        if {"yes", "off"} <= set(values):
            return "a word of YAML for it (`yes`, `off`, …)"
        if set(values) == set(PRESETS):
            return "[a preset](algorithm.md#presets)"
    return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in values)


def _plain_type(field: Schema) -> str:
    match field.get("type"):
        case "null":
            return "none"
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            return f"{'integer' if kind == 'integer' else 'number'}{_range(field)}"
        case "array":
            items: Schema | list[Schema] = field.get("items") or field.get("prefixItems") or [{}]
            parts = items if isinstance(items, list) else [items]
            return f"list of {' and '.join(dict.fromkeys(_type(each) for each in parts))}"
        case "object":
            inner = [*field.get("patternProperties", {}).values()]
            extra = field.get("additionalProperties")
            inner += [extra] if isinstance(extra, dict) else []
            if field.get("allOf"):
                return "[a stage](stages.md)"
            return f"mapping of names to {_type(inner[0])}" if inner else "mapping"
        case "string":
            return "date" if field.get("format") == "date" else "text"
    return "any value"


def _range(field: Schema) -> str:
    """Return the bounds as text. A bound that only databases need (``MAX_NUMBER``, ``MAX_COUNT``) is left out."""
    low = (("≥", field.get("minimum")), (">", field.get("exclusiveMinimum")))
    high = (("≤", field.get("maximum")), ("<", field.get("exclusiveMaximum")))
    shown = [
        f"{sign} {bound:g}" for sign, bound in (*low, *high) if bound is not None and abs(bound) < 2**31 - 1
    ]
    return f" {' and '.join(shown)}" if shown else ""


def _link(reference: str) -> str:
    name = reference.rpartition("/")[2]
    if name not in _schema()["definitions"]:
        return f"[{name}](#{name.lower()})"
    if name in STAGE_CLASSES:
        return f"[{STAGE_CLASSES[name]}](stages.md#{STAGE_CLASSES[name]})"
    page = page_of(name).rpartition("/")[2]
    return f"[{name}]({page}#{name.lower()})"


def _places() -> dict[str, list[str]]:
    """Return class → the places of a recipe that hold one, shortest first."""
    found: dict[str, list[str]] = {}
    waiting = [("", _schema())]
    seen: set[str] = set()
    while waiting:
        place, definition = waiting.pop(0)
        for field, described in definition.get("properties", {}).items():
            inner = f"{place}.{field}" if place else field
            for name, many in _references(described):
                where = f"{inner}.NAME" if many else inner
                found.setdefault(name, [])
                if where not in found[name]:
                    found[name].append(where)
                if name not in seen:
                    seen.add(name)
                    waiting.append((where, _definition(name)))
    return found


def _references(node: Any, many: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each class that a field holds, and whether the field maps names to it."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2], many
        for key, inner in node.items():
            if key != "properties":
                yield from _references(inner, many or key == "patternProperties")
    elif isinstance(node, list):
        for inner in node:
            yield from _references(inner, many)


def _sentence(text: str) -> str:
    return _code(" ".join(text.split()))


def _code(text: str) -> str:
    """Return reStructuredText's literals as Markdown's, and names of pages as links."""
    return re.sub(r"(?<![`/])docs/([\w/]+\.md)", r"[\1](../\1)", text.replace("``", "`"))


def _cell(text: str) -> str:
    return _sentence(text).replace("|", "\\|")

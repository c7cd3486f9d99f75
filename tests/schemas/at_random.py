"""Make recipes at random, each the same for the same number: bytes, overrides and values that follow the schema."""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vantage.schemas.loading.json_schema import recipe_schema, sweep_schema
from vantage.schemas.loading.recipe_file import builtin_recipes, find_recipe, load_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.sweep import load_sweep

PIECES = (
    b"\0", b"\r", b"\t", b"\n", b"\x85", "\u2028".encode(), "\u2029".encode(), b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"---\n",
    b"...", b"%YAML 9.0\n", b"%TAG ! x\n", b"&a ", b"*a", b"!!python/name:os ", b"<<: ", b"? ", b"- ", b": ", b"[", b"]", b"{", b"}",
    b"'", b'"', b'"\\UFFFFFFFF"', b'"\\uD800"', b'"\\0"', b"|", b">", b"#", b"@", b"`", b"null", b"true", b"yes", b".nan", b".inf",
    b"1e999", b"9" * 30, b"9" * 5000, b"-1", b"0", b"0.5", b"~", b"a/" * 200, b"a" * 300, b"../" * 50, b"[" * 50, b"x: " * 30,
)  # fmt: skip
"""What is put into a text."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 256, 10**6, 2**31, 2**63, 0.0, 0.5, 1.0, 1e300, -1e-300, "", "?", "~", "yes", "model",
    "sft", "policy", "a\nb", "\x1b[31m", "builtin:tiny", "builtin:x", "hub:a/b@c", "gguf:x", "package:x", "a" * 300 + ".json",
    "~x/y.py", [], {}, [None], [[]], {"a": 1}, {"kind": "sft"}, {"preset": "grpo"}, [1, 2], ["sft"], {"": ""},
)  # fmt: skip


@cache
def _texts() -> list[bytes]:
    return [find_recipe(name).read_bytes() for name in builtin_recipes()]


@cache
def _schema(of_sweep: bool) -> dict[str, Any]:
    return sweep_schema() if of_sweep else recipe_schema()


@cache
def _keys() -> list[str]:
    """Return the dotted keys of the built-in recipes, all of them."""

    def below(node: Any, key: str) -> list[str]:
        items = node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ())
        return [key, *(found for part, inner in items for found in below(inner, f"{key}.{part}"))]

    plain = [yaml.safe_load(text) for text in _texts()]
    return sorted({found for recipe in plain for name in recipe for found in below(recipe[name], name)})


def damaged_text(chance: random.Random) -> bytes:
    """Return a built-in recipe with one to five pieces cut, put in, doubled or changed."""
    data = bytearray(chance.choice(_texts()))
    for _ in range(chance.randint(1, 5)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                data[place:place] = chance.choice(PIECES)
            case 1:
                del data[place : place + chance.choice((1, 2, 10, 100))]
            case 2 if place < len(data):
                data[place] = chance.randrange(256)
            case 3:
                data[place:place] = data[place : place + chance.choice((10, 100))]
            case 4:
                other = chance.choice(_texts())
                data[place:] = other[chance.randrange(len(other)) :]
            case _:
                lines = data.splitlines(keepends=True)
                chance.shuffle(lines)
                data = bytearray(b"".join(lines)) if chance.random() < 0.1 else data.replace(b"\n", b"\r")
    return bytes(data)


def overrides(chance: random.Random) -> list[str]:
    """Return one to four overrides, most of them of fields that there are."""
    return [_override(chance) for _ in range(chance.randint(1, 4))]


HARMLESS = ("seed=7", "generation.temperature=0.7", "stages.sft.epochs=2",
            "stages.sft.warmup_steps=0", "publish=[]")  # fmt: skip


def _override(chance: random.Random) -> str:
    if chance.random() < 0.4:
        return chance.choice(HARMLESS)
    key = chance.choice(_keys())
    if chance.random() < 0.3:
        parts = key.split(".")
        parts[chance.randrange(len(parts))] = chance.choice(
            ("0", "9" * 5000, "x", "", "stages", "²", "gate", "algorithm", "a b")
        )
        key = ".".join(parts)
    if chance.random() < 0.3:
        return (
            key
            + chance.choice(("=", "", " = "))
            + chance.choice(PIECES).decode("utf-8", errors="surrogateescape")
        )
    return f"{key}={yaml.safe_dump(chance.choice(VALUES), default_flow_style=True).removesuffix('...' + chr(10)).strip()}"


def by_schema(chance: random.Random, *, sweep: bool = False) -> bytes:
    """Return a recipe (or sweep) that its schema describes, with a wrong value here and there."""
    schema = _schema(sweep)
    value = _value(schema, schema["definitions"], chance, depth=0)
    return yaml.safe_dump(value, allow_unicode=chance.random() < 0.5).encode("utf-8", errors="surrogatepass")


def _value(schema: dict[str, Any], definitions: dict[str, Any], chance: random.Random, *, depth: int) -> Any:
    if chance.random() < 0.01 and depth:
        return chance.choice(VALUES)
    if "$ref" in schema:
        return _value(definitions[schema["$ref"].rpartition("/")[2]], definitions, chance, depth=depth)
    if "const" in schema:
        return schema["const"]
    for choices in ("enum", "anyOf", "oneOf"):
        if choices in schema and "properties" not in schema and "type" not in schema:
            chosen = chance.choice(schema[choices])
            return chosen if choices == "enum" else _value(chosen, definitions, chance, depth=depth)
    kinds = [rule["then"] for rule in schema.get("allOf", ()) if "then" in rule]
    if kinds:
        return _value(chance.choice(kinds), definitions, chance, depth=depth)
    return _of_type(schema, definitions, chance, depth)


def _of_type(schema: dict[str, Any], definitions: dict[str, Any], chance: random.Random, depth: int) -> Any:
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            chosen = [name for name in fields if name in schema.get("required", ()) or chance.random() < 0.3]
            made = {name: _value(fields[name], definitions, chance, depth=depth + 1) for name in chosen}
            for inner in schema.get("patternProperties", {}).values():
                names = chance.sample(
                    ("sft", "reward", "value", "policy", "main", "x", "y"), chance.randint(1, 5)
                )
                made |= {name: _value(inner, definitions, chance, depth=depth + 1) for name in names}
            return made
        case "array":
            return [
                _value(schema["items"], definitions, chance, depth=depth + 1)
                for _ in range(chance.randint(0, 3))
            ]
        case "integer":
            least = schema.get("minimum", 0)
            return chance.choice((least, least + 1, 64, 128, schema.get("maximum", 256)))
        case "number":
            return chance.choice(
                (
                    schema.get("minimum", 0.5),
                    schema.get("maximum", 0.5),
                    0.3,
                    1,
                    1e-5,
                    schema.get("maximum", 1e300),
                )
            )
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
    if "enum" in schema:
        return chance.choice(schema["enum"])
    known = (
        "sft",
        "reward",
        "value",
        "policy",
        "main",
        "x",
        "model",
        "builtin:tiny",
        "builtin:arithmetic/prompts",
    )
    return chance.choice(known if schema.get("pattern") or chance.random() < 0.9 else ("", "?", "a b"))


def sweep_of(recipe: str, chance: random.Random) -> bytes:
    """Return a sweep over a recipe, whose arms are overrides at random."""
    arms = {name: dict(_pair(chance) for _ in range(chance.randint(0, 2))) for name in ("a", "b", "c")}
    made = {
        "sweep": "x", "recipe": recipe, "seeds": [1, 2], "reseeds": ["policy", "evaluation"], "baseline": "a",
        "measure": {"stage": "evaluation", "metric": "accuracy"}, "arms": arms,
    }  # fmt: skip
    for name in [name for name in made if chance.random() < 0.1]:
        made[name] = chance.choice(VALUES)
    return yaml.safe_dump(made).encode()


def _pair(chance: random.Random) -> tuple[str, Any]:
    return chance.choice(_keys()), chance.choice(VALUES)


def try_one(number: int, folder: Path) -> str:
    """Load the recipe or sweep of a number from a file in the folder, and return ``loaded`` or ``refused``.

    Any other error than a ``RecipeError`` is raised, and AssertionError where a RecipeError is not as it should be.
    """
    chance = random.Random(number)
    given = overrides(chance) if chance.random() < 0.4 else []
    file = folder / "x.yaml"
    load: Callable[[Path, Sequence[str]], object] = load_recipe
    match number % 5:
        case 0 | 1:
            file.write_bytes(damaged_text(chance))
            load = load_sweep if chance.random() < 0.2 else load_recipe
        case 2:
            file.write_bytes(by_schema(chance))
        case 3:
            # recipes that leave a source open load with no override but that one
            file.write_bytes(chance.choice([text for text in _texts() if b'"?"' not in text]))
            given = overrides(chance)
        case _:
            recipe = chance.choice(("quickstart", "long_dial", "none", "x.yaml"))
            file.write_bytes(
                sweep_of(recipe, chance) if chance.random() < 0.7 else by_schema(chance, sweep=True)
            )
            load = load_sweep
    try:
        load(file, given)
    except RecipeError as error:
        _check(error)
        return "refused"
    return "loaded"


def _check(error: RecipeError) -> None:
    said = str(error)
    said.encode()
    assert error.problems
    assert len(said.splitlines()) == len(error.problems)
    for problem in error.problems:
        assert problem.message
        assert problem.line is None or problem.line >= 1
        assert not re.search(r"[\x00-\x1f\x7f]", str(problem))

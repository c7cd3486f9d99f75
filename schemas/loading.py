"""From a file (and overrides) to a ``Recipe``, or to a list of everything that is wrong with it.

Paths in a recipe are relative to the folder of its file, so that a recipe can travel with its data; paths in an
override are relative to the current folder, as everywhere on a command line. A loaded recipe holds absolute ones.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path as File
from typing import Any

from pydantic import ValidationError

from schemas import plain_yaml
from schemas.agreement import resolve
from schemas.field_errors import field_problems
from schemas.names import name_problems
from schemas.overrides import Override, apply_overrides, parse_override
from schemas.problems import Path, Problem, RecipeError, quote, suggest
from schemas.recipe import EXACT_MATCH, Recipe

DATA_FORMATS = (".json", ".jsonl", ".parquet", ".csv")
OPEN = "?"
"""A source that a recipe leaves for its user to give."""
BUILTIN_MODELS = ("builtin:tiny",)
BUILTIN_DATA = (
    "builtin:arithmetic/demonstrations",
    "builtin:arithmetic/preferences",
    "builtin:arithmetic/prompts",
    "builtin:arithmetic_long/demonstrations",
    "builtin:arithmetic_long/preferences",
    "builtin:arithmetic_long/prompts",
)

_HUB = re.compile(r"hub:[A-Za-z0-9._-]+/[A-Za-z0-9._-]+@[A-Za-z0-9._/-]+")
_PACKAGE = re.compile(r"package:[A-Za-z0-9][A-Za-z0-9._-]*")


def load_recipe(source: str | File, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe file, or a built-in recipe by its bare name, with ``KEY=VALUE`` overrides laid over it.

    Raises:
        RecipeError: with every problem that was found, each with its line or override.
    """
    file = find_recipe(source)
    return parse_recipe(_read_file(file), name=str(source), folder=file.parent, overrides=overrides)


def parse_recipe(
    text: str, *, name: str = "recipe", folder: File | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """The recipe in a text; ``folder`` is where its relative paths start (None: the current folder).

    Raises:
        RecipeError: as ``load_recipe``.
    """
    try:
        reading = plain_yaml.read(text)
    except RecipeError as error:
        raise RecipeError(replace(problem, source=name) for problem in error.problems) from None
    problems = [replace(problem, source=name) for problem in reading.problems]
    parsed: list[Override] = []
    for override in overrides:
        try:
            parsed.append(parse_override(override))
        except RecipeError as error:
            problems += error.problems
    plain, placed, misplaced = apply_overrides(reading.value, parsed)
    problems += misplaced

    here = File.cwd()
    plain, missing = _resolve_sources(plain, folder or here, here, placed)
    recipe, found = _validate(plain)
    problems += (_locate(problem, name, reading.lines, placed) for problem in [*found, *missing])
    if recipe is None or problems:
        raise RecipeError(sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0)))
    return recipe


def builtin_recipes() -> list[str]:
    """Names of the recipes and sweeps that come with Vantage."""
    return sorted(
        File(entry.name).stem
        for entry in resources.files("recipes").iterdir()
        if entry.name.endswith(".yaml")
    )


def find_recipe(source: str | File) -> File:
    """The file of a recipe that is named by a path, or of a built-in one by its bare name.

    Raises:
        RecipeError: there is no such file and no such built-in recipe.
    """
    file, name = File(source), str(source)
    if file.exists():
        return file
    if "/" in name or "\\" in name or file.suffix in (".yaml", ".yml"):
        raise RecipeError(
            [Problem((), "there is no such file", f"built-in: {', '.join(builtin_recipes())}", None, name)]
        )
    if name in builtin_recipes():
        return File(str(resources.files("recipes") / f"{name}.yaml"))
    remedy = suggest(name, builtin_recipes())
    raise RecipeError([Problem((), "is neither a file nor a built-in recipe", remedy, None, name)])


def _read_file(file: File) -> str:
    def refuse(message: str, remedy: str) -> RecipeError:
        return RecipeError([Problem((), message, remedy, None, str(file))])

    if not file.is_file():
        raise refuse("is not a file", "name a .yaml file")
    try:
        with file.open("rb") as stream:
            data = stream.read(plain_yaml.MAX_BYTES + 1)  # no more: the file may be of any size
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}", "check its permissions") from None
    try:
        return plain_yaml.decode(data)
    except RecipeError as error:
        raise RecipeError(replace(problem, source=str(file)) for problem in error.problems) from None


def _validate(plain: Any) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, unless a problem was found in its fields, its names or the agreement of its stages."""
    if not isinstance(plain, dict):
        return None, [Problem((), "is not a mapping", "a recipe starts with `recipe: NAME`")]
    if "sweep" in plain:
        return None, [Problem(("sweep",), "is a sweep, not a recipe", "use `vantage sweep`")]
    named = name_problems(plain)
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        return None, [*field_problems(error.errors(include_url=False), plain), *named]
    if named:
        return None, named
    recipe, disagreements = resolve(recipe)
    return (None if disagreements else recipe), disagreements


def _locate(problem: Problem, name: str, lines: dict[Path, int], placed: dict[Path, Override]) -> Problem:
    """The problem with the override, or the line, that it comes from."""
    path = problem.path
    prefixes = [path[:length] for length in range(len(path), -1, -1)]
    for prefix in prefixes:
        if prefix in placed:
            return replace(problem, source=placed[prefix].source)
    for below, override in placed.items():  # a rule over several fields names them in its message
        if below[: len(path)] == path and re.search(rf"\b{below[-1]}\b", problem.message):
            return replace(problem, source=override.source)
    return replace(
        problem, source=name, line=next((lines[prefix] for prefix in prefixes if prefix in lines), 1)
    )


# -- files that a recipe names


def _resolve_sources(
    plain: Any, folder: File, here: File, placed: dict[Path, Override]
) -> tuple[Any, list[Problem]]:
    """The plain recipe with absolute paths, and what is wrong with the sources that it names."""
    if not isinstance(plain, dict):
        return plain, []
    problems: list[Problem] = []
    model = plain.get("model")
    if isinstance(model, dict) and isinstance(model.get("source"), str):
        start = here if _is_overridden(("model", "source"), placed) else folder
        model["source"], found = _model_source(model["source"], start)
        problems += found
    for section, resolve_source in (("data", _data_source), ("verifiers", _verifier_source)):
        named = plain.get(section)
        for name, value in named.items() if isinstance(named, dict) else ():
            if isinstance(value, dict) and isinstance(value.get("source"), str):
                path: Path = (section, name, "source")
                start = here if _is_overridden(path, placed) else folder
                value["source"], found = resolve_source(path, value["source"], start)
                problems += found
    return plain, problems


def _is_overridden(path: Path, placed: dict[Path, Override]) -> bool:
    return any(path[:length] in placed for length in range(1, len(path) + 1))


def _left_open(path: Path) -> Problem:
    return Problem(path, "is left open by this recipe", f"give it with --set {'.'.join(map(str, path))}=…")


def _absolute(path: str, start: File) -> File:
    return (start / File(path).expanduser()).resolve()


def _model_source(source: str, start: File) -> tuple[str, list[Problem]]:
    path: Path = ("model", "source")
    if source == OPEN:
        return source, [_left_open(path)]
    scheme, _, rest = source.partition(":")
    if scheme == "builtin":
        known = source in BUILTIN_MODELS
        problem = Problem(
            path, f"there is no built-in model {quote(source)}", suggest(source, BUILTIN_MODELS)
        )
        return source, [] if known else [problem]
    if scheme == "hub":
        problem = Problem(path, f"{quote(source)} names no revision", "write hub:ORGANISATION/NAME@REVISION")
        return source, [] if _HUB.fullmatch(source) else [problem]
    if scheme == "package":
        problem = Problem(path, f"{quote(source)} is not the name of a package", "write package:NAME")
        return source, [] if _PACKAGE.fullmatch(source) else [problem]
    if scheme == "gguf":
        file = _absolute(rest, start)
        problem = Problem(path, f"there is no file {file}", "name a .gguf file")
        return f"gguf:{file}", [] if file.is_file() else [problem]
    folder = _absolute(source, start)
    if not folder.is_dir():
        remedy = "name a Hugging Face folder, builtin:tiny, gguf:FILE, package:NAME or hub:ORGANISATION/NAME@REVISION"
        return str(folder), [Problem(path, f"there is no folder {folder}", remedy)]
    if not (folder / "config.json").is_file():
        problem = Problem(path, f"{folder} has no config.json", "name a Hugging Face model folder")
        return str(folder), [problem]
    return str(folder), []


def _data_source(path: Path, source: str, start: File) -> tuple[str, list[Problem]]:
    if source == OPEN:
        return source, [_left_open(path)]
    if source.startswith("builtin:"):
        problem = Problem(path, f"there is no built-in data {quote(source)}", suggest(source, BUILTIN_DATA))
        return source, [] if source in BUILTIN_DATA else [problem]
    file = _absolute(source, start)
    if file.suffix.lower() not in DATA_FORMATS:
        message = f"{quote(source)} is not in a known format"
        return str(file), [
            Problem(path, message, f"name a {', '.join(DATA_FORMATS)} file, or builtin:NAME/KIND")
        ]
    if not file.is_file():
        return str(file), [Problem(path, f"there is no file {file}", "correct the path")]
    return str(file), []


def _verifier_source(path: Path, source: str, start: File) -> tuple[str, list[Problem]]:
    if source == OPEN:
        return source, [_left_open(path)]
    if source.startswith("builtin:"):
        problem = Problem(
            path, f"there is no built-in verifier {quote(source)}", suggest(source, [EXACT_MATCH])
        )
        return source, [] if source == EXACT_MATCH else [problem]
    file = _absolute(source, start)
    if file.suffix != ".py":
        return str(file), [
            Problem(path, f"{quote(source)} is no Python file", f"name a .py file, or {EXACT_MATCH}")
        ]
    if not file.is_file():
        return str(file), [Problem(path, f"there is no file {file}", "correct the path")]
    return str(file), []

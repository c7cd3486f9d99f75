"""Load a recipe from a file and overrides; one error contains all of its problems.

Paths in a recipe are relative to the folder of its file, so that a recipe and its data can be moved together. Paths in
an override are relative to the current folder. A loaded recipe holds absolute paths.
"""

import difflib
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path as File

from vantage.schemas.loading import plain_yaml
from vantage.schemas.loading.members import with_members
from vantage.schemas.loading.overrides import Override, apply_overrides, parse_override
from vantage.schemas.loading.rounds import with_rounds
from vantage.schemas.loading.selections import with_selections
from vantage.schemas.loading.shared_rollout import with_shared_rollout
from vantage.schemas.loading.source_paths import UnresolvablePath, mode_of, resolve_sources
from vantage.schemas.loading.validation import validated_recipe
from vantage.schemas.problems import (
    Path,
    Problem,
    RecipeError,
    names_field,
    suggest,
)
from vantage.schemas.recipe.recipe import Recipe


def load_recipe(source: str | File, overrides: Sequence[str] = (), *, needs_files: bool = True) -> Recipe:
    """Load a recipe file, or a built-in recipe by its name, and apply ``KEY=VALUE`` overrides.

    Args:
        needs_files: whether to refuse a recipe whose files of data or verifiers are missing.

    Raises:
        RecipeError: all problems that were found, each with its line or override.
    """
    file = find_recipe(source)
    document = read_document(file, str(source))
    return _parse(
        document, name=str(source), folder=file.parent, overrides=overrides, needs_files=needs_files
    )


def parse_recipe(
    text: str,
    *,
    name: str = "recipe",
    folder: File | None = None,
    overrides: Sequence[str] = (),
    needs_files: bool = True,
) -> Recipe:
    """Load a recipe from a text; its relative paths start at ``folder`` (None: the current folder).

    Raises:
        RecipeError: as ``load_recipe``.
    """
    document = _read(text, name)
    return _parse(document, name=name, folder=folder, overrides=overrides, needs_files=needs_files)


def _parse(
    document: plain_yaml.Document,
    *,
    name: str,
    folder: File | None,
    overrides: Sequence[str],
    needs_files: bool,
) -> Recipe:
    problems = [replace(problem, source=name) for problem in document.problems]
    parsed: list[Override] = []
    for override in overrides:
        try:
            parsed.append(parse_override(override))
        except RecipeError as error:
            problems += error.problems
    plain, placed, misplaced = apply_overrides(document.value, parsed)
    problems += misplaced

    here = File.cwd()
    plain, missing = resolve_sources(plain, folder or here, here, placed, needs_files=needs_files)
    selected = with_selections(plain)
    whole = with_members(selected.plain)
    looped = with_rounds(whole.plain)
    filled = with_shared_rollout(looped.plain)
    recipe, found = validated_recipe(filled.plain)
    found = [
        *selected.problems,
        *selected.located(
            [*whole.problems, *looped.problems, *whole.located(looped.located(filled.located(found)))]
        ),
        *missing,
    ]
    problems += (_locate(problem, name, document.lines, placed) for problem in found)
    if recipe is None or problems:
        raise RecipeError(sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0)))
    return recipe


def builtin_recipes() -> list[str]:
    """Return names of the recipes and sweeps that come with Vantage."""
    return sorted(
        File(entry.name).stem
        for entry in resources.files("vantage.recipes").iterdir()
        if entry.name.endswith(".yaml")
    )


def find_recipe(source: str | File) -> File:
    """Return the file of a recipe, given its path or the name of a built-in one.

    Raises:
        RecipeError: there is no such file and no such built-in recipe.
    """
    file, name = File(source), str(source)
    try:
        if mode_of(file):
            return file
    except UnresolvablePath as error:
        message = f"cannot be looked up ({error})"
        raise RecipeError([Problem((), message, "name a .yaml file", None, name)]) from None
    if "/" in name or "\\" in name or file.suffix in (".yaml", ".yml"):
        remedy = _near_file(file) or f"built-in: {', '.join(builtin_recipes())}"
        raise RecipeError([Problem((), "there is no such file", remedy, None, name)])
    if name in builtin_recipes():
        return File(str(resources.files("vantage.recipes") / f"{name}.yaml"))
    remedy = _near_file(file.with_suffix(".yaml")) or suggest(name, builtin_recipes())
    raise RecipeError([Problem((), "is neither a file nor a built-in recipe", remedy, None, name)])


def _near_file(file: File) -> str:
    """Return ``did you mean 'quickstart.yaml'?`` if the folder has a recipe's file of nearly this name, else nothing."""
    try:
        named = {each.stem: each.name for each in file.parent.iterdir() if each.suffix in (".yaml", ".yml")}
    except OSError:
        return ""
    near = difflib.get_close_matches(file.stem, named, n=1, cutoff=0.75)
    return f"did you mean '{file.with_name(named[near[0]])}'?" if near else ""


def read_document(file: File, name: str) -> plain_yaml.Document:
    """Parse the file of a recipe or sweep; ``name`` is its name in problems.

    Raises:
        RecipeError: the file is no regular file, is too large, cannot be read, or is no YAML.
    """
    try:
        with open(file, "rb", opener=_open_nonblocking) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise RecipeError([Problem((), "is not a file", "name a .yaml file", None, name)])
            data = stream.read(plain_yaml.MAX_BYTES + 1) or b""  # the file may be of any size
    except IsADirectoryError:
        raise RecipeError([Problem((), "is not a file", "name a .yaml file", None, name)]) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise RecipeError([Problem((), message, "check its permissions", None, name)]) from None
    try:
        text = plain_yaml.decode(data)
    except RecipeError as error:
        raise RecipeError(replace(problem, source=name) for problem in error.problems) from None
    return _read(text, name)


def _open_nonblocking(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)  # a pipe without a writer would block


def _read(text: str, name: str) -> plain_yaml.Document:
    try:
        return plain_yaml.read(text)
    except RecipeError as error:
        raise RecipeError(replace(problem, source=name) for problem in error.problems) from None


def _locate(problem: Problem, name: str, lines: dict[Path, int], placed: dict[Path, Override]) -> Problem:
    """Return the problem with the override or line that caused it."""
    path = problem.path
    prefixes = [path[:length] for length in range(len(path), -1, -1)]
    for prefix in prefixes:
        if prefix in placed:
            return replace(problem, source=placed[prefix].source)
    for below, override in placed.items():  # a rule over several fields names them in its message
        if below[: len(path)] == path and names_field(problem.message, below[-1]):
            return replace(problem, source=override.source)
    return replace(
        problem, source=name, line=next((lines[prefix] for prefix in prefixes if prefix in lines), 1)
    )

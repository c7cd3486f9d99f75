"""Checks of the verifiers that a recipe names."""

from collections.abc import Iterator
from typing import Any

from vantage.schemas.checks.plain_recipe import (
    Plain,
    builtin_content,
    datasets_of,
    fields_that_name,
    is_in,
    mapping_of,
    origin_of,
    rewards_read,
    stages_of,
    terms_of,
)
from vantage.schemas.problems import Path, Problem, quote, suggest
from vantage.schemas.recipe.inputs import EXACT_MATCH
from vantage.schemas.recipe.sources import Builtin
from vantage.schemas.steps import BUILTIN_VERIFIERS, JUDGES

_VERIFIER_FIELDS = (*((field, "verifier") for field in JUDGES), ("algorithm", "positive_verifier"))
"""Fields of stages under which a verifier is named, and where."""


def verifier_references(plain: Plain) -> Iterator[Problem]:
    """Verifiers that are not there, and own ones that are called like a built-in one."""
    named: list[tuple[Path, Any]] = [
        ((*path, field), term.get(field))
        for field in fields_that_name("verifier")
        for _, path, term in terms_of(plain)
    ]
    for name, stage in stages_of(plain).items():
        for field, key in _VERIFIER_FIELDS:
            named.append((("stages", name, field, key), mapping_of(stage.get(field)).get(key)))
    own = mapping_of(plain.get("verifiers"))
    for path, verifier in named:
        if isinstance(verifier, str) and verifier not in BUILTIN_VERIFIERS and verifier not in own:
            message, known = f"no verifier is called {quote(verifier)}", (*own, *BUILTIN_VERIFIERS)
            yield Problem(path, message, suggest(verifier, known))
    for name in own:
        if name in BUILTIN_VERIFIERS:
            message = f"'{name}' is a built-in verifier, and would mean two rules"
            yield Problem(("verifiers", name), message, "give yours another name")


def verifiers_of_another_task(plain: Plain) -> Iterator[Problem]:
    """Built-in prompts with the verifier of another built-in task, which cannot read them."""
    for name, stage in stages_of(plain).items():
        for prompts, data in _prompts_of(plain, stage):
            origin = origin_of(data)
            if not isinstance(origin, Builtin):
                continue
            task = origin.name
            for path, verifier in _reads_verifiers(plain, name, stage):
                if verifier in BUILTIN_VERIFIERS and task in BUILTIN_VERIFIERS and verifier != task:
                    message = f"'{verifier}' does not understand the prompts that {name} reads (data.{prompts}: {origin})"
                    yield Problem(path, message, f"use {task}")


def _prompts_of(plain: Plain, stage: Plain) -> Iterator[tuple[str, Plain]]:
    """Yield the dataset that a stage reads as prompts, by name; of a mixture its parts."""
    data, prompts = mapping_of(plain.get("data")), stage.get("prompts")
    parts = datasets_of(plain).get(prompts, ()) if isinstance(prompts, str) else ()
    yield from ((part, mapping_of(data[part])) for part in parts if part in data)


def comparisons_without_answers(plain: Plain) -> Iterator[Problem]:
    """Yield a problem for each ``exact_match`` on prompts that are known to have no answers; the stage checks other files when it starts."""
    own = mapping_of(plain.get("verifiers"))
    for name, stage in stages_of(plain).items():
        for prompts, data in _prompts_of(plain, stage):
            columns = mapping_of(data.get("columns"))
            is_builtin = builtin_content(data) is not None
            if "answer" in columns or not (columns or is_builtin):
                continue
            for path, verifier in _reads_verifiers(plain, name, stage):
                if is_in(own, verifier) and mapping_of(own[verifier]).get("source") == EXACT_MATCH:
                    message = f"'{verifier}' compares with answers, and data.{prompts}, which {name} reads, has none"
                    remedy = "name another verifier" if is_builtin else f"add data.{prompts}.columns.answer"
                    yield Problem(path, message, remedy)


def _reads_verifiers(plain: Plain, name: str, stage: Plain) -> list[tuple[Path, Any]]:
    """Return (Path, verifier) for each verifier that a stage or its reward names."""
    read: list[tuple[Path, Any]] = [
        (("stages", name, field, key), mapping_of(stage.get(field)).get(key))
        for field, key in _VERIFIER_FIELDS
    ]
    rewards = [reward for _, reward in rewards_read(name, stage)]
    return read + [
        ((*path, field), term.get(field))
        for field in fields_that_name("verifier")
        for r, path, term in terms_of(plain)
        if r in rewards
    ]

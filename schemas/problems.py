"""Problems of a recipe, with field, rule and remedy."""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
"""Path of a value in a recipe: names of fields, indices of lists."""

MAX_PROBLEMS = 200
"""Largest number of problems of each kind that is reported."""
_MAX_QUOTE_CHARACTERS = 60
_MAX_SOURCE_CHARACTERS = 400


@dataclass(frozen=True)
class Problem:
    """One mistake: its path, the rule it breaks, and what to do."""

    path: Path
    message: str
    remedy: str = ""
    line: int | None = None
    source: str = ""
    """The recipe's file, or ``--set KEY=VALUE`` if an override caused it."""

    @property
    def field(self) -> str:
        """The path as an override writes it: ``stages.policy.critic``."""
        return ".".join(str(part) for part in self.path)

    def __str__(self) -> str:
        line = "" if self.line is None else str(self.line)
        place = ":".join(part for part in (self.source, line) if part)
        said = "" if self.source.startswith(f"--set {self.field}=") else self.field
        text = "; ".join(part for part in (self.message, self.remedy) if part)
        return printable(": ".join(part for part in (_shortened(place), _shortened(said), text) if part))


def names_field(message: str, field: str | int) -> bool:
    """Return whether a message contains the field's name as a word of its own, whatever characters the name has."""
    return re.search(rf"(?<!\w){re.escape(str(field))}(?!\w)", message) is not None


class RecipeError(ValueError):
    """An invalid recipe, with all its problems."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def printable(text: str) -> str:
    """Return the text in one line: characters that cannot be printed become escapes (``\\n``, ``\\x1b``, ``\\ud800``)."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def quote(value: Any) -> str:
    """Return a value as one short piece of YAML."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_QUOTE_CHARACTERS else f"{text[:_MAX_QUOTE_CHARACTERS]}…"


def _shortened(place: str) -> str:
    return place if len(place) <= _MAX_SOURCE_CHARACTERS else f"{place[:_MAX_SOURCE_CHARACTERS]}…"


def suggest(word: str, known: Iterable[str], *, listed: Iterable[str] | None = None) -> str:
    """Return ``did you mean 'policy'?`` if a known word is similar, otherwise ``use one of: …``; ``listed``: words to list."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    near += [name for name in known if len(word) >= 3 and name.startswith(word)]
    if near:
        return f"did you mean '{near[0]}'?"
    return f"use one of: {', '.join(known if listed is None else listed)}" if known else ""

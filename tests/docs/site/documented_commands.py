"""Find the commands of Vantage in the pages, and parse them with the command line's own parser."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.core import TyperGroup

from docs.site.commands import parser

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(vantage [a-z][^`\n]*)`")
PROMPT = re.compile(r"^(?:[a-z ]*machine )?(?:\$ )?(?:\.venv/bin/)?vantage (?=[a-z-])")
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The parser's error; typer 0.29 has its own copy of click, and exports its subclass alone."""
LANGUAGES = ("", "bash", "sh", "console", "shell")
HISTORY = ("log", "decisions")
"""Folders whose pages have commands of their time."""


def pages() -> list[Path]:
    """Return all pages whose commands must work today."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    current = [page for page in docs if page.relative_to(ROOT / "docs").parts[0] not in HISTORY]
    return [ROOT / "README.md", *current, *sorted((ROOT / "deploy").rglob("*.md"))]


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each command of a page, and whether it is whole: lines of blocks with their continuations are, mentions in sentences may
    leave out arguments."""
    for language, block in FENCE.findall(text):
        if language in LANGUAGES:
            for line in block.replace("\\\n", " ").splitlines():
                if PROMPT.match(line):
                    for part in re.sub(r"\s#.*$", "", line).split("; "):
                        yield PROMPT.sub("", part).strip(), True
    for command in INLINE.findall(FENCE.sub("", text)):
        for part in command.split(";"):
            yield part.strip().removeprefix("vantage ").strip(), False


def words_of(command: str) -> list[str]:
    """Return the arguments of a command, without comments, redirections and the ellipsis of an example."""
    words = shlex.split(
        re.sub(r"\s(?:>|2>|\||&).*$", "", re.sub(r"(?<!\S)…(?!\S)", "", command)), comments=True
    )
    plain = [re.sub(r"^\[|\]$", "", word) for word in words]
    return [word for word in plain if word]


def refusal(command: str, *, is_whole: bool) -> str | None:
    """Return why the parser refuses the command, or None. A mention may lack arguments, but each option and command must exist."""
    words = words_of(command)
    group = parser()
    context = group.make_context("vantage", [words[0]], resilient_parsing=True)
    found = group.commands.get(words[0])
    if found is None:
        return f"there is no command {words[0]}"
    rest = words[1:]
    if isinstance(found, TyperGroup) and rest:
        if rest[0] not in found.commands:
            return f"there is no command {words[0]} {rest[0]}"
        found, rest = found.commands[rest[0]], rest[1:]
    if not rest:
        return None
    try:
        found.make_context(words[0], rest, parent=context)
    except UsageError as error:
        is_incomplete = type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)
        return None if is_incomplete and not is_whole else str(error) or type(error).__name__
    return None

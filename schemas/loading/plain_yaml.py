"""A strict YAML parser: plain values only, each with its line.

PyYAML splits the text into events. The values are built here, because recipes need other rules than YAML 1.1:

- no tags, anchors or aliases (an alias lets a short file stand for a huge one, a tag may name any Python object);
- ``1e-5`` is a number (YAML 1.1 asks for a point before the exponent); infinities and NaN are refused;
- keys are the text as written, so ``on:`` and ``no:`` are not turned into booleans, and none comes twice;
- no NUL and no single surrogate: an escape can write them, but no file name or UTF-8 text can hold them;
- ``yes``, ``no``, ``on``, ``off``, dates and ``1:30`` stay text.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from vantage.schemas.problems import (
    MAX_PROBLEMS,
    Path,
    Problem,
    RecipeError,
    quote,
)

MAX_BYTES = 2**18
"""Length of the longest text that is read."""
MAX_DEPTH = 20
"""Depth of the deepest nesting that is read."""

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INVALID_CHARACTERS = re.compile("[\0\ud800-\udfff]")
_GLUED = re.compile(r"\s*[A-Za-z_][\w.]*:[^\s/].*")
"""A field and its value without a space between them."""
_UNQUOTED = re.compile(
    r"expected ',' or '[]}]', but got '(\?)'|found character '([%@`|>])' that cannot start any token"
)
"""PyYAML's messages if a text needs quotes. PyYAML refuses a question mark inside [ ] and { }, which YAML 1.2
allows."""
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Line breaks of YAML 1.1, which the line numbers of its events count."""
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CONSTANTS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass
class Document:
    """A parsed text: plain values, the line of each, and problems."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    """Path → line (from 1) of the key, or of the list's item."""
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, event: yaml.Event, path: Path, message: str, remedy: str) -> None:
        """Add a problem; parsing goes on.

        Raises:
            RecipeError: there are ``MAX_PROBLEMS``.
        """
        self.problems.append(Problem(path, message, remedy, line=_line(event)))
        if len(self.problems) >= MAX_PROBLEMS:
            raise RecipeError(self.problems)


def decode(data: bytes, *, begins: str = "a recipe starts with `recipe: NAME`") -> str:
    """Return the text of a document's bytes, by default of a recipe's.

    ``begins``: the remedy in the message about an empty document.

    Raises:
        RecipeError: the document is too long, empty, not UTF-8, or holds NUL bytes.
    """
    if len(data) > MAX_BYTES:
        raise _error(f"is longer than {MAX_BYTES} bytes", "a recipe is a short text; is this another file?")
    if not data.strip():
        raise _error("is empty", begins)
    if b"\0" in data:
        raise _error(
            "holds a NUL byte",
            "save it as UTF-8 text (it may be UTF-16, or no text at all)",
            _line_after(data[: data.index(b"\0")]),
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = _line_after(data[: error.start])
        raise _error(f"byte {data[error.start]:#04x} is not UTF-8", "save it as UTF-8 text", line) from None


def _line_after(data: bytes) -> int:
    """Return the number of the line in which the text of these bytes ends."""
    return len(_LINE_BREAK.split(data.decode("utf-8-sig", errors="replace")))


def read(text: str) -> Document:
    """Read one document.

    Raises:
        RecipeError: the text is no YAML at all, is nested too deeply, or holds no or several documents.
    """
    document = Document()
    try:
        events = _events(text)
        _skip_to_content(events)
        document.value = _value(next(events), events, (), document)
        next(events)  # the document's end
        after = next(events)
    except yaml.YAMLError as error:
        raise RecipeError([_syntax_problem(error, text)]) from None
    if isinstance(after, yaml.DocumentStartEvent):
        raise _error("holds several documents", "remove the `---` line", _line(after))
    return document


def _events(text: str) -> Iterator[yaml.Event]:
    """Yield the events of a text.

    Raises:
        yaml.YAMLError: the text is no YAML; the error is PyYAML's.
        RecipeError: the text is no YAML, and PyYAML fails on it with another error.
    """
    loader = yaml.SafeLoader(text)
    while True:
        try:
            event: yaml.Event | None = loader.get_event() if loader.check_event() else None  # type: ignore[no-untyped-call]
        except yaml.YAMLError:
            raise
        # PyYAML converts some numbers unchecked ("\UFFFFFFFF", `%YAML 99…9`): OverflowError, ValueError. Only its
        # scanner and parser run here, so any other error is about the text too.
        except Exception as error:
            message = f"is not YAML: {type(error).__name__}: {error}"
            raise _error(
                message, "remove the directive or the escape in this line", loader.line + 1
            ) from None
        if event is None:
            return
        yield event


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None  # events of a parsed text have a mark
    return event.start_mark.line + 1


def _skip_to_content(events: Iterator[yaml.Event]) -> None:
    next(events)  # the stream's start
    if isinstance(next(events), yaml.StreamEndEvent):
        raise _error("holds comments only", "a recipe starts with `recipe: NAME`")


def _value(event: yaml.Event, events: Iterator[yaml.Event], path: Path, document: Document) -> Any:
    if len(path) > MAX_DEPTH:
        raise _error(f"is nested deeper than {MAX_DEPTH}", "write it flat", _line(event))
    if isinstance(event, yaml.AliasEvent):
        document.add_problem(event, path, f"*{event.anchor} is an alias", "write the value out")
        return None
    assert isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent | yaml.ScalarEvent)
    if event.anchor is not None:
        document.add_problem(
            event, path, f"&{event.anchor} is an anchor", "write the value where it is needed"
        )
    if event.tag is not None:
        document.add_problem(
            event, path, f"{event.tag} is a tag", "a recipe holds plain values; remove the tag"
        )
    if isinstance(event, yaml.MappingStartEvent):
        return _mapping(events, path, document)
    if isinstance(event, yaml.SequenceStartEvent):
        return _sequence(events, path, document)
    return _scalar(event, path, document)


def _mapping(events: Iterator[yaml.Event], path: Path, document: Document) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if isinstance(event, yaml.ScalarEvent):
            key = _text(event, path, document)
        else:
            key = ""
            document.add_problem(
                event, path, "a key is not a single word", "quote text that starts with [, { or *"
            )
            _value(event, events, (*path, key), document)
        inner = (*path, key)
        if key in mapping:
            first = document.lines[inner]
            document.add_problem(event, inner, f"occurs twice, first in line {first}", "keep one of the two")
        document.lines[inner] = _line(event)
        mapping[key] = _value(next(events), events, inner, document)
    return mapping


def _sequence(events: Iterator[yaml.Event], path: Path, document: Document) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        inner = (*path, len(items))
        document.lines[inner] = _line(event)
        items.append(_value(event, events, inner, document))
    return items


def _scalar(event: yaml.ScalarEvent, path: Path, document: Document) -> Any:
    text = _text(event, path, document)
    if event.style is not None:  # quoted, or a block of text
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _NOT_FINITE.fullmatch(text):
        document.add_problem(
            event, path, f"{text} is not a finite number", "write a number, or leave the field out"
        )
        return None
    if _INTEGER.fullmatch(text) and len(text) <= 20:
        return int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number) or len(text) > 40:
            document.add_problem(
                event, path, f"{quote(text)} is out of range", "write a number of usual size"
            )
            return None
        return number
    return text


def is_text(text: str) -> bool:
    """Return whether a text contains no NUL and no single surrogate (bytes that are not UTF-8 become surrogates)."""
    return not _INVALID_CHARACTERS.search(text)


def _text(event: yaml.ScalarEvent, path: Path, document: Document) -> str:
    """Return the text as written, without invalid characters; these are a problem."""
    text: str = event.value
    found = _INVALID_CHARACTERS.search(text)
    if found:
        message = f"holds U+{ord(found[0]):04X}, which no text has"
        document.add_problem(event, path, message, "write the character itself, not its escape")
    return _INVALID_CHARACTERS.sub("", text)


def _syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        line = len(_LINE_BREAK.split(text[: error.position]))
        return Problem((), f"holds the control character {error.character:#04x}", "remove it", line)
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return Problem((), f"is not YAML: {error}", "check brackets, colons, quotes and indentation")
    written = _LINE_BREAK.split(text)[mark.line]
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return Problem((), "the line is indented with a tab", "YAML allows spaces only", mark.line + 1)
    said = getattr(error, "problem", None) or "unreadable"
    if known := _known_mistake(said, mark.line, text):
        return known
    return Problem(
        (), f"is not YAML: {said}", "check brackets, colons, quotes and indentation", mark.line + 1
    )


def _known_mistake(said: str, line: int, text: str) -> Problem | None:
    """Return the problem in words for mistakes whose message by PyYAML names its parser's states."""
    lines = _LINE_BREAK.split(text)
    glued = next((number for number in (line, line - 1) if number >= 0 and _GLUED.match(lines[number])), None)
    if "could not find expected ':'" in said and glued is not None:
        word = lines[glued].strip().partition(":")[0]  # its value may be a secret
        return Problem((), f"{word}: has no space after its colon", f"write `{word}: …`", glued + 1)
    if unquoted := _UNQUOTED.fullmatch(said):
        has = "holds ?" if unquoted[1] else f"begins with {unquoted[2]}"
        return Problem((), f"is not YAML: a text without quotes {has}", "put the text in quotes", line + 1)
    if not said.startswith("expected <block end>"):
        return None
    if said.endswith(("'?'", "'-'")):
        message = "items of a list and `field: value` are mixed under one field"
        return Problem((), message, "write all entries in one of the two forms", line + 1)
    if said.endswith("start>'"):
        remedy = "begin it below the line that it belongs to, with the same spaces as its neighbours"
        return Problem((), "the indentation of the line is that of no line above", remedy, line + 1)
    return None


def _error(message: str, remedy: str, line: int | None = None) -> RecipeError:
    return RecipeError([Problem((), message, remedy, line)])

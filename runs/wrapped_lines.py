"""Break lines for a terminal between words, so that a path or an address stays whole and can be copied."""

import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_WORD = re.compile(r"\S+")
HANGING = 4
"""Columns by which the continuation of a line is indented."""


def print_line(console: Console, text: Text, *, hanging: int = HANGING) -> None:
    """Print one line; on a terminal, a long line goes on below, indented by ``hanging`` columns.

    A word that is longer than a line, such as a path, gets a line of its own. Only the terminal breaks it: a copy is
    whole.
    """
    lines = wrapped(text, console.width, hanging=hanging) if console.is_terminal else [text]
    for line in lines:
        console.print(line, soft_wrap=True)


def print_whole(console: Console, label: str, value: str) -> None:
    """Print a command, a path or an address, which is never broken; below its label where a terminal is too narrow for both."""
    if console.is_terminal and cell_len(label + value) > console.width:
        console.print(Text(label.rstrip()))
        label = " " * HANGING
    console.print(Text(label + value), soft_wrap=True)


def wrapped(text: Text, width: int, *, hanging: int = HANGING) -> list[Text]:
    """Return the text as lines of at most ``width`` columns, except those of one longer word."""
    return [line for part in text.split("\n", allow_blank=True) for line in _wrapped(part, width, hanging)]


def _wrapped(text: Text, width: int, hanging: int) -> list[Text]:
    lines: list[Text] = []
    begin = end = 0
    for word in _WORD.finditer(text.plain):
        indent = hanging if lines else 0
        if end > 0 and indent + cell_len(text.plain[begin : word.end()]) > width:
            lines.append(_indented(text[begin:end], indent, width))
            begin = word.start()
        end = word.end()
    lines.append(_indented(text[begin:], hanging if lines else 0, width))
    return lines


def _indented(line: Text, indent: int, width: int) -> Text:
    """Indent a line; a word that leaves less room, such as a path, moves to the left so that it fits if it can."""
    room = width - cell_len(line.plain)
    return Text(" " * min(indent, room if room >= 0 else HANGING)) + line

"""Read small files that somebody else may have written: a pipe, a device, a huge file or an expanding text never holds up an audit."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent

MAX_BYTES = 2**20
"""Most bytes of a file that describes a model to MLflow; publishing writes a few kilobytes."""


class NotRead(ValueError):
    """The file is not what publishing writes, so it is not read."""


class _WithoutAliases(yaml.SafeLoader):
    """A loader that refuses aliases: a kilobyte of them can stand for billions of values, or for a value inside itself."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, "found an alias, which publishing never writes", mark)
        return super().compose_node(parent, index)


def small_file(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        NotRead: it is no regular file, or larger than ``MAX_BYTES``.
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    )  # opening a pipe would wait for a writer
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRead("it is no regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise NotRead(f"it is larger than {MAX_BYTES:,} bytes")
    return data


def small_yaml(path: Path) -> Any:
    """Return the value of a small YAML file, read as MLflow reads it: as UTF-8, by PyYAML's loader in Python.

    The loader in C is five times as fast. It accepts texts that the other one refuses (a tab after a colon), and reads others
    differently, so an audit would agree with a copy that MLflow cannot load.

    Raises:
        NotRead, OSError: as ``small_file``.
        ValueError: it is no YAML without aliases, or not UTF-8.
    """
    text = small_file(path).decode()
    try:
        return yaml.load(text, _WithoutAliases)
    except (yaml.YAMLError, RecursionError) as error:
        raise NotRead(_first_sentence(error)) from None


def small_json(path: Path) -> Any:
    """Return the value of a small JSON file. Raises as ``small_yaml``."""
    try:
        return json.loads(small_file(path))
    except RecursionError:
        raise NotRead("it is nested too deeply") from None


def _first_sentence(error: Exception) -> str:
    problem = getattr(error, "problem", None)
    return f"it is no plain YAML: {problem or type(error).__name__}"

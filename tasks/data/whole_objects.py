"""Detect a JSON file that is one object around its rows, instead of one object per row."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vantage.schemas.source_files import SizeLimit

MAX_BYTES = 64 << 20
"""Most bytes of a file that is read whole only to describe its fault."""


def whole_object(path: Path, ending: str, limit: SizeLimit) -> str | None:
    """Return the fault of a file whose rows are inside one object, with the remedy; None: it is not such a file."""
    if ending not in (".json", ".jsonl") or path.stat().st_size > min(MAX_BYTES, limit.num_bytes):
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if ending == ".jsonl" and isinstance(found, list):
        return "it is one JSON list, and .jsonl has an object on each line; rename it to .json"
    if not isinstance(found, Mapping) or not found:
        return None
    if len(found) > 1 and _are_rows(list(found.values())):
        return (
            "it holds one object, with a row under each of its keys; write the rows as a list: "
            f"jq '[.[]]' {shlex.quote(path.name)} > rows.json"
        )
    for name, value in found.items():
        if _are_rows(value):
            return (
                f"it holds one object, whose {name!r} is a list of {len(value)} rows; write the list alone: "
                f"jq {shlex.quote('.' + json.dumps(name))} {shlex.quote(path.name)} > rows.json"
            )
    lengths = {len(value) if _is_column(value) else 0 for value in found.values()}
    if len(found) > 1 and len(lengths) == 1 and lengths.pop() > 1:
        return (
            "it is laid out by columns, a list for each; write it by rows, an object {column: value} for each"
        )
    return None


def _is_column(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and not any(isinstance(each, Mapping) for each in value)
    )


def _are_rows(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, Mapping) and len(row) > 1 for row in value)
        and not _are_messages(value)
    )


def _are_messages(rows: list[Mapping[str, Any]]) -> bool:
    """Return whether the rows are the messages of one conversation, so that the file is one row."""
    return all(set(row) & {"role", "from"} for row in rows)

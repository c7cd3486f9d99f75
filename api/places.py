"""Arguments that all functions of the interface share: a workspace, and fields of a recipe that are set."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vantage.runs.workspace import DEFAULT_WORKSPACE, Workspace

Place = str | Path | None
"""A workspace's folder or bucket; None: ``VANTAGE_WORKSPACE``, else ``.vantage`` in the current folder, as for the commands."""


def workspace_of(place: Place) -> Workspace:
    """Return the workspace."""
    return Workspace.at(
        place if place is not None else os.environ.get("VANTAGE_WORKSPACE") or DEFAULT_WORKSPACE
    )


def overrides_of(fields: Mapping[str, Any] | None) -> list[str]:
    """Return the values of ``--set``: field → value, with a dot between the names of nested fields.

    Raises:
        TypeError: a value is none of JSON's.
    """
    found = []
    for field, value in (fields or {}).items():
        try:
            found.append(f"{field}={json.dumps(value, ensure_ascii=False, allow_nan=False)}")
        except (TypeError, ValueError):
            raise TypeError(
                f"set[{field!r}] is {value!r}, which is no text, number, boolean, None, list or dict of these; convert it"
            ) from None
    return found

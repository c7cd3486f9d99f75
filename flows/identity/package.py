"""Our own packages as they are installed: their version, and one digest over their files."""

import hashlib
import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "vantage-rlhf"

PACKAGES = ("algorithms", "flows", "ledger", "models", "recipes", "schemas", "storage", "tasks")
"""All of ours."""

SUFFIXES = frozenset({".py", ".yaml", ".json", ".jsonl"})
"""Of the files that a wheel has and a run can read: code, built-in recipes and their data."""


@cache
def package_version() -> str:
    """The version of the installed distribution; ``unknown`` if none is installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


@cache
def package_digest() -> str:
    """sha256 over the paths and bytes of all files of our packages; one wheel, and the checkout that it is made of, agree.

    Of the files as this process first saw them: what it has imported does not change with them.
    """
    listing = [
        f"{package}/{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for package in PACKAGES
        if (folder := package_folder(package)) is not None
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts and path.is_file()
    ]
    return hashlib.sha256("\n".join(sorted(listing)).encode()).hexdigest()


def package_folder(package: str) -> Path | None:
    """The folder from which a package of ours is imported; None: there is none."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])

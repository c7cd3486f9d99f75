"""Our own package as it is installed: its version, its folders, and one digest over its files."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import vantage

DISTRIBUTION = "vantage-rlhf"

SUFFIXES = frozenset({".py", ".yaml", ".json", ".jsonl"})
"""Suffixes of the files that a wheel contains and a run can read: code, built-in recipes and their data."""


@cache
def package_version() -> str:
    """Return the version of the installed distribution; ``unknown`` if none is installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


@cache
def package_digest() -> str:
    """Return the sha256 over the paths and bytes of all files of our packages; it is equal for a wheel and the checkout
    that it is built from.

    The digest is that of the files as this process first saw them, since imported modules do not change with their
    files.

    Raises:
        FileNotFoundError: there are no files.
    """
    files = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path
        for package in packages()
        for path in package.rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts and path.is_file()
    }
    if not files:
        raise FileNotFoundError(f"{package_folder()} has no files to digest: install {DISTRIBUTION} again")
    files["__init__.py"] = package_folder() / "__init__.py"
    listing = [f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in files.items()]
    return hashlib.sha256("\n".join(sorted(listing)).encode()).hexdigest()


def packages() -> list[Path]:
    """Return the folders of ``vantage.schemas``, ``vantage.models`` and so on; in a checkout, its links' targets."""
    return sorted(path.parent.resolve() for path in package_folder().glob("*/__init__.py"))


def package_folder() -> Path:
    """Return the folder that ``vantage`` is imported from; in a checkout it holds links to our packages."""
    return Path(vantage.__path__[0])

"""Versions of the libraries that decide what a built-in verifier finds right."""

import platform
from importlib.metadata import PackageNotFoundError, version

from vantage.schemas.recipe.builtin_verifiers import PYTHON, ROW_OF
from vantage.schemas.recipe.verifiers import Verifier


class LibraryMissing(ValueError):
    """A library that a built-in verifier needs is not installed."""


class LibrariesDiffer(ValueError):
    """A verifier would be judged by other versions of libraries than those in its key."""


def versions_of(verifier: Verifier, *, name: str) -> dict[str, str]:
    """Return library → its version on this machine; empty for a verifier without one.

    Args:
        name: the verifier's step, ``verifiers.NAME``, for messages.

    Raises:
        LibraryMissing: one is not installed.
    """
    row = ROW_OF.get(verifier.source)
    return {} if row is None else {library: _version(library, verifier, name) for library in row.libraries}


def _version(library: str, verifier: Verifier, name: str) -> str:
    if library == PYTHON:
        return ".".join(platform.python_version_tuple()[:2])
    try:
        return version(library)
    except PackageNotFoundError:
        raise LibraryMissing(
            f"{name}.source={verifier.source} needs the package {library}, which is not installed; "
            "pip install 'vantage-rlhf[verifiers]'"
        ) from None

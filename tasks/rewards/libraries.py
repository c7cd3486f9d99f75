"""Versions of the libraries that decide what a built-in verifier finds right."""

import platform
from importlib.metadata import PackageNotFoundError, version

from vantage.schemas.recipe.builtin_verifiers import PYTHON, ROW_OF, RULES
from vantage.schemas.recipe.verifiers import Verifier


class LibraryMissing(ValueError):
    """A library that a built-in verifier needs is not installed."""


class LibrariesDiffer(ValueError):
    """A verifier would be judged by other versions of libraries than those in its key."""


def versions_of(verifier: Verifier, *, name: str) -> dict[str, str]:
    """Return library → its version on this machine, and the revision of our own rules unless it is the first.

    Args:
        name: the verifier's step, ``verifiers.NAME``, for messages.

    Raises:
        LibraryMissing: a library is not installed.
    """
    row = ROW_OF.get(verifier.source)
    if row is None:
        return {}
    own = {RULES: str(row.revision)} if row.revision > 1 else {}
    return {library: _version(library, verifier, name) for library in row.libraries} | own


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

"""The artifact of a verifier: the recipe's fields, and the versions of the libraries that decide for a built-in one."""

import json
from pathlib import Path

from pydantic import TypeAdapter

from vantage.schemas.recipe.builtin_verifiers import AnyVerifier
from vantage.schemas.recipe.verifiers import Verifier
from vantage.tasks.rewards.libraries import LibrariesDiffer, versions_of

CONFIGURATION = "verifier.json"
"""The recipe's fields of one of its own verifiers, in the artifact; their ``source`` is a file beside it."""
LIBRARIES = "libraries.json"
"""Versions of the libraries that decide for a built-in verifier, in the artifact; absent if none does."""
_FIRST = "1"
"""The revision of our own rules if none is recorded."""
_VERIFIER: TypeAdapter[Verifier] = TypeAdapter(AnyVerifier)


def write_configuration(verifier: Verifier, folder: Path, *, name: str) -> None:
    """Write the fields of a verifier, and the versions of its libraries on this machine.

    Args:
        name: the verifier's step, ``verifiers.NAME``, for messages.

    Raises:
        LibraryMissing: a library is not installed.
    """
    (folder / CONFIGURATION).write_text(verifier.model_dump_json(indent=2) + "\n")
    if versions := versions_of(verifier, name=name):
        (folder / LIBRARIES).write_text(json.dumps(versions, indent=2) + "\n")


def read_configuration(folder: Path) -> Verifier:
    """Return the fields of a verifier."""
    return _VERIFIER.validate_json((folder / CONFIGURATION).read_bytes())


def refuse_other_libraries(configuration: Verifier, folder: Path, *, name: str) -> None:
    """Raise LibrariesDiffer if this machine would judge by other libraries than those of the verifier's artifact."""
    path = folder / LIBRARIES
    recorded = json.loads(path.read_bytes()) if path.is_file() else {}
    here = versions_of(configuration, name=f"verifiers.{name}")
    for library in {**recorded, **here}:
        version, own = (versions.get(library, _FIRST) for versions in (recorded, here))
        if version != own:
            raise LibrariesDiffer(
                f"verifiers.{name}: {library} is {own} here, and the run's verifier was imported with {version}, "
                "which is in the keys of its stages; install that version, or run the recipe anew"
            )

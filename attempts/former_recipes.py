"""Find files of built-in recipes at their former place: runs from before our packages were one name them there."""

from pathlib import Path
from typing import TypeVar

from vantage.attempts.identity.package import package_folder
from vantage.schemas.recipe.inputs import Benchmark, Data
from vantage.schemas.recipe.verifiers import Verifier

Sourced = TypeVar("Sourced", Data, Verifier, Benchmark)


def folder_now() -> Path:
    """Return the folder of the built-in recipes."""
    return package_folder() / "recipes"


def folder_before() -> Path:
    """Return the folder of the built-in recipes when the packages had no common name. In a checkout it is still there."""
    return package_folder().parent / "recipes"


def found_now(given: Sourced) -> Sourced:
    """Return the path of the same data, verifier or benchmark as it is installed now, if the path is a former one without
    a file."""
    source = Path(given.source)
    if not source.is_relative_to(folder_before()) or source.exists():
        return given
    return given.model_copy(update={"source": str(folder_now() / source.relative_to(folder_before()))})

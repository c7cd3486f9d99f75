"""Files beside built-in recipes, which lay in another folder before our packages were one: runs of then name them there."""

from pathlib import Path
from typing import TypeVar

from vantage.attempts.identity.package import package_folder
from vantage.schemas.recipe.inputs import Benchmark, Data, Verifier

Sourced = TypeVar("Sourced", Data, Verifier, Benchmark)


def folder_now() -> Path:
    """Return the folder of the built-in recipes."""
    return package_folder() / "recipes"


def folder_before() -> Path:
    """Return the folder of the built-in recipes when the packages had no common name. In a checkout it is still there."""
    return package_folder().parent / "recipes"


def found_now(given: Sourced) -> Sourced:
    """Return the same data, verifier or benchmark; if its file was installed with a recipe and is gone, as it is installed now."""
    source = Path(given.source)
    if not source.is_relative_to(folder_before()) or source.exists():
        return given
    return given.model_copy(update={"source": str(folder_now() / source.relative_to(folder_before()))})

"""Find files of built-in recipes that moved: runs from before our packages had a common name have the former paths."""

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
    """Return the folder of the built-in recipes before the packages had a common name. A checkout still has it."""
    return package_folder().parent / "recipes"


def found_now(given: Sourced) -> Sourced:
    """Return the present path of the same data, verifier or benchmark, if the path is a former one without a file; else
    the path unchanged."""
    source = Path(given.source)
    if not source.is_relative_to(folder_before()) or source.exists():
        return given
    return given.model_copy(update={"source": str(folder_now() / source.relative_to(folder_before()))})

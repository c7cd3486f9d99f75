"""Check sources of data and models: whether the inputs of a step are unchanged."""

from pathlib import Path

from vantage.attempts.jobs import source_of, work_of
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.sources import LocalPath
from vantage.schemas.records.audit import Check
from vantage.storage.refs import Ref


def source_check(recipe: ResolvedRecipe, step: str, ref: Ref) -> Check | None:
    """Check the present source by its sha256; None: the step reads none whose digest is recorded."""
    recorded = ref.key_parts.get("inputs", {}).get("source")
    kind = KINDS.get(str(ref.key_parts.get("kind")))
    if recorded is None or kind is None or kind.imports is None:
        return None
    try:
        work = work_of(recipe, step)
        place = getattr(getattr(work, kind.imports), "source", "its source")
        origin = getattr(getattr(work, kind.imports), "origin", None)
        present = source_of(work).get("source")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        gone = isinstance(error, FileNotFoundError)
        said = "is no longer there" if gone else f"cannot be read ({_first_line(error)})"
        return Check(
            subject="source",
            outcome="note",
            detail=f"what it was made of {said}; the artifact holds all of it",
        )
    shown = Path(origin.path).name if isinstance(origin, LocalPath) else place
    if present != recorded:
        said = f"{shown} has changed since: its sha256 was {recorded[:12]}, and is {str(present)[:12]}"
        return Check(subject="source", outcome="note", detail=said)
    return Check(subject="source", detail=f"{shown} is unchanged")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

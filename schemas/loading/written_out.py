"""A plain recipe in which a part that means several stages is written out as these stages."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from vantage.schemas.problems import Path, Problem


@dataclass(frozen=True)
class WrittenOut:
    """A plain recipe after a part was written out as several stages."""

    plain: Any
    problems: tuple[Problem, ...] = ()
    written_at: tuple[tuple[Path, Path], ...] = ()
    """(Place in ``plain``, place in the recipe as its author wrote it), for the parts that were written out."""

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return the problems with their paths in the recipe as its author wrote it; a problem that several parts share is there once."""
        return list(dict.fromkeys(self._located(problem) for problem in problems))

    def _located(self, problem: Problem) -> Problem:
        for place, written in self.written_at:
            if problem.path[: len(place)] == place:
                return replace(problem, path=(*written, *problem.path[len(place) :]))
        return problem

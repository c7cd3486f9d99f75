"""Find a run by its id, a prefix of its id, its number, or ``latest``."""

import difflib
import re

from vantage.runs.own_commands import program
from vantage.runs.workspace import RunError, Workspace

LATEST = "latest"

_MAY_BEGIN_AN_ID = re.compile(r"[0-9a-z_-]+")
_SHOWN = 5
_SHORTEST_PART = 3
"""Fewest letters of an id, such as the recipe's name, by which a run is suggested."""


class NoSuchRun(RunError):
    """No run matches a text."""


class SeveralRuns(RunError):
    """A text is the beginning of the ids of several runs."""


def run_ids(workspace: Workspace) -> list[str]:
    """Return the ids of all runs, readable or not, the oldest first."""
    return sorted(workspace.records.ids(), key=lambda run_id: (number_in(run_id), run_id))


def number_in(run_id: str) -> int:
    """Return the number that a run id begins with."""
    return int(run_id.partition("-")[0])


def find_run(workspace: Workspace, named: str) -> str:
    """Return the id of the only run that matches ``named``.

    Raises:
        NoSuchRun: no run matches, or ``named`` cannot be part of an id.
        SeveralRuns: several runs match.
    """
    listed = f"`{program('vantage')} status` lists the runs"
    if not _MAY_BEGIN_AN_ID.fullmatch(named):
        raise NoSuchRun(f"run {named!r} is not one of Vantage's; {listed}")
    known = run_ids(workspace)
    if named == LATEST:
        if not known:
            raise NoSuchRun(f"there is no run in {workspace.root} yet")
        return known[-1]
    if named in known:
        return named
    fitting = [run_id for run_id in known if run_id.startswith(named)]
    if named.isdecimal():
        # 1 means run 0001, and not also run 1000
        fitting = [run_id for run_id in known if int(run_id.partition("-")[0]) == int(named)] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        near = [run_id for run_id in known if named in run_id] if len(named) >= _SHORTEST_PART else []
        near = near or difflib.get_close_matches(named, known, n=1, cutoff=0.6)
        meant = f"did you mean {near[-1]}? " if near else ""
        raise NoSuchRun(f"there is no run {named} in {workspace.root}; {meant}{listed}")
    more = f" and {len(fitting) - _SHOWN} more" if len(fitting) > _SHOWN else ""
    raise SeveralRuns(f"{named} fits {', '.join(fitting[:_SHOWN])}{more}; give more of the id")

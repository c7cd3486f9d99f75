"""``python -m flows.reports RUN WORKSPACE`` makes the report of a run that has ended (``flows.reports.at_end``)."""

import os
import sys

from flows.reports.files import write_report
from flows.runs.workspace import Workspace

_NICENESS = 5
"""Beside what may still be computed on this machine, the report can wait."""


def main() -> None:
    """Run and workspace are arguments."""
    os.nice(_NICENESS)
    run_id, place = sys.argv[1:]
    write_report(Workspace.at(place), run_id)


if __name__ == "__main__":
    main()

"""``python -m flows.reports RUN WORKSPACE`` makes the report of a run that ends (``flows.reports.at_end``)."""

import sys
from contextlib import suppress

from flows.garbage import collect_rarely
from flows.reports.at_end import WRITE
from flows.reports.files import page_of, write_report
from flows.runs.run import read_run
from flows.runs.workspace import Workspace


def main() -> None:
    """Run and workspace are arguments. Each line on standard input says that more is recorded, ``WRITE`` that this is all.

    What is there already is drawn before, since a plot that has been drawn is kept. If the lines end without ``WRITE``, the
    run's process is dead, and its report is not written.
    """
    collect_rarely()
    run_id, place = sys.argv[1:]
    workspace = Workspace.at(place)
    told = ""
    while told != WRITE:
        with suppress(Exception):  # whatever is wrong is wrong again below, and told there
            page_of(workspace, read_run(workspace, run_id))
        told = sys.stdin.readline().rstrip("\n")
        if not told:
            return
    write_report(workspace, run_id)


if __name__ == "__main__":
    main()

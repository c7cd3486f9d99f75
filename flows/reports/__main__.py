"""``python -m flows.reports RUN WORKSPACE`` makes the report of a run that ends (``flows.reports.at_end``)."""

import sys
from contextlib import suppress

from flows.reports.files import page_of, write_report
from flows.runs.run import read_run
from flows.runs.workspace import Workspace


def main() -> None:
    """Run and workspace are arguments; a line on standard input says that the run's end is recorded.

    What is there already is drawn before, since a plot that has been drawn is kept. Without the line the run's process is
    dead, and its report is not written.
    """
    run_id, place = sys.argv[1:]
    workspace = Workspace.at(place)
    with suppress(Exception):  # whatever is wrong is wrong again below, and told there
        page_of(workspace, read_run(workspace, run_id))
    if sys.stdin.readline():
        write_report(workspace, run_id)


if __name__ == "__main__":
    main()

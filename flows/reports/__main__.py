"""``python -m flows.reports RUN WORKSPACE`` makes the report of a run that has ended (``flows.reports.at_end``)."""

import sys

from flows.reports.files import write_report
from flows.runs.workspace import Workspace


def main() -> None:
    """Run and workspace are arguments."""
    run_id, place = sys.argv[1:]
    write_report(Workspace.at(place), run_id)


if __name__ == "__main__":
    main()

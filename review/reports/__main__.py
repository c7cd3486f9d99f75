"""``python -m vantage.review.reports RUN WORKSPACE`` makes the report of a run that ends (``vantage.review.reports.at_end``)."""

import os
import queue
import sys
import threading
from contextlib import suppress

from vantage.attempts.garbage import collect_rarely
from vantage.review.reports.at_end import WRITE
from vantage.review.reports.files import page_of, write_report
from vantage.runs.run import read_run
from vantage.runs.workspace import Workspace


def main() -> None:
    """Draw the report of a run, and write it after ``WRITE``; the run's id and the workspace are the arguments.

    Each line on standard input means that more is recorded, and ``WRITE`` that nothing will follow. Everything recorded
    is drawn at once, since drawn plots are kept. If the lines end without ``WRITE``, the run's process is dead: this
    process ends at once, even in the middle of a plot, and writes no report.
    """
    collect_rarely()
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(words,), daemon=True).start()
    run_id, place = sys.argv[1:]
    workspace = Workspace.at(place)
    word = ""
    while word != WRITE:
        with suppress(Exception):  # an error here occurs again below, and is reported there
            page_of(workspace, read_run(workspace, run_id))
        word = words.get()
    write_report(workspace, run_id)


def _listen(words: "queue.SimpleQueue[str]") -> None:
    """Pass the lines of standard input on, up to ``WRITE``."""
    for line in sys.stdin:
        words.put(line.rstrip("\n"))
        if line.rstrip("\n") == WRITE:
            return
    os._exit(0)


if __name__ == "__main__":
    main()

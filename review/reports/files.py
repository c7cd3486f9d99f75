"""Write the report of a run as a file."""

from pathlib import Path

from vantage.runs.record import RunRecord
from vantage.runs.run import is_active, read_run
from vantage.runs.workspace import Workspace
from vantage.storage.durable_files import make_folder, replace_file

REPORT = "report.html"
"""Path in the run's folder; for a run in a bucket, in this machine's folder of the run."""


def write_report(workspace: Workspace, run_id: str, file: Path | None = None) -> Path:
    """Make the report of a run and write it as a whole; returns the file.

    Args:
        file: where to; None: ``REPORT`` in the run's folder.

    Raises:
        RunError: there is no such run, or it cannot be read.
        OSError: the file cannot be written (ValueError: it is a folder).
    """
    if file is not None and file.is_dir():  # which would be moved out of the way
        raise ValueError(f"--to {file} is a folder; name a file in it")
    record = read_run(workspace, run_id)
    page = page_of(workspace, record)
    target = file or workspace.folder(run_id) / REPORT
    make_folder(target.parent)
    replace_file(target, page.encode())
    return target


def page_of(workspace: Workspace, record: RunRecord) -> str:
    """Return the page of a run from its present records."""
    from vantage.review.reports.gather import gather_report
    from vantage.review.reports.page import report_page

    active = record.status == "running" and is_active(workspace, record.run_id)
    return report_page(gather_report(workspace, record, is_active=active))

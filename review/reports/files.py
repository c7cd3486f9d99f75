"""Write the report of a run as a file."""

from pathlib import Path

from vantage.runs.record import RunRecord
from vantage.runs.run import is_active, read_run
from vantage.runs.workspace import Workspace
from vantage.storage.durable_files import make_folder, replace_file

ANNEXES = ("ai-act",)
"""Annexes that a report may end with: the questions of Annex XI of the EU AI Act."""
REPORT = "report.html"
"""Path in the run's folder; for a run in a bucket, in this machine's folder of the run."""


def write_report(
    workspace: Workspace, run_id: str, file: Path | None = None, *, annex: str | None = None
) -> Path:
    """Make the report of a run and write it as a whole; returns the file.

    Args:
        annex: one of ``ANNEXES``, which the report ends with; None: it has none.
        file: path of the file; None: ``REPORT`` in the run's folder.

    Raises:
        RunError: there is no such run, or it cannot be read.
        OSError: the file cannot be written (ValueError: it is a folder).
    """
    if file is not None and file.is_dir():  # otherwise the folder would be moved away
        raise ValueError(f"--to {file} is a folder; name a file in it")
    record = read_run(workspace, run_id)
    page = page_of(workspace, record, annex=annex)
    target = file or workspace.folder(run_id) / REPORT
    make_folder(target.parent)
    replace_file(target, page.encode())
    return target


def page_of(workspace: Workspace, record: RunRecord, *, annex: str | None = None) -> str:
    """Return the page of a run from its present records; ``annex`` as in ``write_report``."""
    from vantage.review.reports.gather import gather_report
    from vantage.review.reports.page import report_page

    active = record.status == "running" and is_active(workspace, record.run_id)
    report = gather_report(workspace, record, is_active=active)
    if annex is None:
        return report_page(report)
    from vantage.review.reports.annex_facts import model_facts
    from vantage.review.reports.annex_xi import annex_xi

    return report_page(report, annex=annex_xi(report, model_facts(workspace, record, report)))

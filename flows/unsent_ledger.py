"""A run's last lines if MLflow lacks its records: the reason, the folder in which they wait, and the command to send
them."""

from collections.abc import Iterator
from contextlib import contextmanager

from vantage.ledger.run_ledger import Ledger
from vantage.runs.own_commands import own_command
from vantage.runs.run import Run
from vantage.runs.watching import Watcher


@contextmanager
def unsent_said(run: Run, ledger: Ledger, watcher: Watcher) -> Iterator[None]:
    """Close the ledger after this block, and report if MLflow has not received all of it."""
    try:
        yield
    finally:
        if not ledger.close():
            again = own_command("resume", run.record.run_id, "--workspace", run.workspace.address)
            if ledger.unwritten:
                said = f"  The last records of this run are lost: {ledger.unwritten}.\n  Make room; this records them anew:"
            else:
                said = (
                    f"  MLflow has not got all records of this run ({ledger.why_unsent()}).\n"
                    f"  They wait in {ledger.folder}; this sends them once MLflow answers:"
                )
            watcher.say(f"{said}\n    {again}", "yellow")

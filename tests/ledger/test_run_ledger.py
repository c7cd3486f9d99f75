"""The ledger's own end: what it loads, and an outbox that it can neither read nor write."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger.small_run import (
    ROOT,
    STAGES,
    client_of,
    record_run,
    runs_of,
    tell_run,
)
from vantage.ledger.operations import OpenRun, to_json
from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger


def test_making_a_ledger_loads_neither_mlflow_nor_torch(tmp_path: Path) -> None:
    probe = (
        "import sys; from pathlib import Path; from vantage.ledger.run_ledger import Ledger; "
        f"Ledger(None, Path({str(tmp_path)!r}), 'x'); "
        "print({'mlflow', 'torch', 'transformers', 'pandas'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


@pytest.mark.slow
def test_sending_a_run_loads_no_tensor_library(workspace: Path) -> None:
    Outbox(workspace / "runs" / "0001-tiny-aaaaaa" / "ledger").append(
        to_json(OpenRun(time=1, run_id="0001-tiny-aaaaaa", experiment="tiny", name="tiny", recipe={}))
    )
    probe = (
        "import sys; from pathlib import Path; from vantage.ledger.run_ledger import Ledger; "
        f"assert Ledger(None, Path({str(workspace)!r}), 'tiny').flush(); "
        "assert 'mlflow' in sys.modules; print({'torch', 'transformers'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (said.stdout.strip(), said.stderr) == ("set()", "")
    assert set(runs_of(client_of(workspace), "0001-tiny-aaaaaa")) == {""}


def test_an_outbox_that_cannot_be_read_is_begun_anew(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = workspace / "runs" / "0001-tiny-aaaaaa" / "ledger"
    Outbox(folder).append({"operation": "of a version to come"})
    record_run(workspace, "0001-tiny-aaaaaa")
    assert (folder.parent / "ledger-unreadable-1" / "outbox.jsonl").exists()
    assert "cannot be read and is begun anew" in caplog.text
    assert set(runs_of(client_of(workspace), "0001-tiny-aaaaaa")) == {"", *STAGES}


def test_an_outbox_that_cannot_be_written_costs_a_warning_and_no_run(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (workspace / "runs").write_text("not a folder")
    with Ledger(None, workspace, "tiny") as ledger:
        tell_run(ledger, "0001-tiny-aaaaaa")
    assert "the ledger's outbox" in caplog.text

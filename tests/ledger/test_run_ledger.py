"""The ledger loads little, and copes with an outbox that it can neither read nor write."""

import errno
import os
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
from tests.support.unsent import SENDS_NOTHING
from vantage.ledger import outbox as outboxes
from vantage.ledger.operations import OpenRun, to_json
from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.sender import Sender


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


@pytest.mark.parametrize("has_room_again", [True, False])
def test_the_last_record_of_a_run_is_written_when_the_disk_has_room_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room_again: bool
) -> None:
    """No later record takes it along, and without it the run's outbox never ends."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, method in SENDS_NOTHING.items():
        monkeypatch.setattr(Sender, name, method)
    ledger = Ledger(None, tmp_path, "tiny")
    ledger.open_run("0001-tiny-aaaaaa", "tiny", {})
    with monkeypatch.context() as patched:
        patched.setattr(outboxes, "append_line", full)
        ledger.finish_run("completed")
        if not has_room_again:
            assert not ledger.close()
    if has_room_again:
        assert ledger.close()
    kept = [line["operation"] for _, line in Outbox(ledger.folder).read()]
    if has_room_again:
        assert (kept, ledger.unwritten) == (["open_run", "finish_run"], "")
    else:
        assert kept == ["open_run"]
        assert ledger.unwritten == f"{ledger.folder} cannot be written (No space left on device)"

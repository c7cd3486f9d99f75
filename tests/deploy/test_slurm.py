"""The Slurm scripts work under bash, with a worker in place of Vantage's, and with the signals that Slurm sends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.test_manifests import DEPLOY
from tests.support.real_runs import wait_for

SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))
WORKER = """\
#!/bin/bash
echo "$@" > "$FOLDER/begun"
trap 'touch "$FOLDER/asked"' TERM
while [ ! -e "$FOLDER/asked" ]; do sleep 0.1; done
until=$((SECONDS + 3))
while [ "$SECONDS" -lt "$until" ]; do sleep 0.1; done
touch "$FOLDER/saved"
exit "${STATUS:-0}"
"""


def begin(script: Path, folder: Path, **variables: str) -> "subprocess.Popen[str]":
    program = folder / ".venv" / "bin" / "vantage"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(WORKER)
    program.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "FOLDER": str(folder), **variables}
    return subprocess.Popen(
        ["bash", script], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("status", [0, 7])
def test_a_job_lasts_until_its_worker_has_saved_however_often_slurm_signals(
    script: Path, tmp_path: Path, status: int
) -> None:
    job = begin(
        script,
        tmp_path,
        PREFECT_API_URL="http://server",
        VANTAGE=str(tmp_path),
        POOL="big",
        STATUS=str(status),
    )
    wait_for(lambda: (tmp_path / "begun").exists(), seconds=20)
    os.kill(job.pid, signal.SIGTERM)  # --signal=B:TERM, to the script alone
    wait_for(lambda: (tmp_path / "asked").exists(), seconds=20)
    for _ in range(3):
        os.killpg(job.pid, signal.SIGTERM)  # at the end of the job's time, to all of its processes
        os.killpg(job.pid, signal.SIGCONT)
        time.sleep(0.2)
        assert job.poll() is None
    _, printed = job.communicate(timeout=20)
    assert (tmp_path / "saved").exists()
    assert job.returncode == status, printed
    assert (tmp_path / "begun").read_text().startswith("worker --pool big")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_names_what_it_was_not_given(script: Path, tmp_path: Path) -> None:
    job = begin(script, tmp_path, VANTAGE=str(tmp_path))
    _, printed = job.communicate(timeout=20)
    assert job.returncode == 1
    assert "PREFECT_API_URL: the address of the Prefect server" in printed
    assert not (tmp_path / "begun").exists()

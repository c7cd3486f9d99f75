"""The limit of a start of ranks by Ray, with a trainer that hangs."""

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.attempts.launchers.test_torchrun import TRAIN, job_in, work_of
from vantage.attempts.exit_codes import ExitCode


@pytest.mark.parametrize("begins", [False, True])
def test_a_start_that_never_ends_is_ended_as_a_killed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Ray waits without limit for a process on a node that is lost after it was chosen; another attempt waits for nodes."""
    from vantage.attempts.launchers import ray_train

    job = job_in(tmp_path, ranks=1).model_copy(update={"work": work_of(1, nodes=2)})
    job_file, begun = tmp_path / "job.json", tmp_path / ray_train.BEGUN
    job_file.write_text(job.model_dump_json())
    begun.touch()  # of an earlier attempt
    codes, is_ended = [], threading.Event()

    class Hanging:
        def fit(self) -> None:
            if begins:
                begun.touch()
            is_ended.wait(1.0 if begins else 20.0)

    def end(code: int) -> None:
        codes.append(code)
        is_ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(ray_train, "_SECONDS_TO_BEGIN", 0.2)
    for name in ("_connect", "_leave"):
        monkeypatch.setattr(ray_train, name, lambda *_: None)
    monkeypatch.setattr(ray_train, "wait_for_nodes", lambda *_, **__: 2)
    monkeypatch.setattr(ray_train, "_trainer", lambda *_, **__: Hanging())
    assert ray_train.run_ranks(job_file, TRAIN, nodes=2, num_ranks=2) == ExitCode.OK
    assert codes == ([] if begins else [128 + signal.SIGKILL])
    found = tmp_path / "failure.json"
    assert begins or "no rank has begun after 0 s" in found.read_text()
    assert begins != found.exists()

"""An attempt leaves on its worker's disk what a resume needs, sends its log and journal, and follows what a person asks."""

import threading
import time
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from tests.support.real_runs import wait_for
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.jobs import request_for, steps_of
from vantage.attempts.run_attempt import run_attempt
from vantage.flows.pools import attempt_flow
from vantage.flows.pools.attempt_flow import _make, _Reporter
from vantage.runs.resolving import load_resolved
from vantage.runs.workspace import Workspace
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptRequest
from vantage.schemas.steps import dependencies
from vantage.storage.messages import messages_of
from vantage.storage.storage import Storage
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.watched import asked_to_finish

READ_BY_SFT = ("model", "data.demonstrations")


@pytest.fixture
def storage(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "worker"))
    return Workspace.at(bucket).storage


def request(storage: Storage, recipe_file: Path, step: str, artifacts: dict[str, Artifact]) -> AttemptRequest:
    recipe, _ = load_resolved(str(recipe_file), [])
    return request_for(
        steps_of(recipe)[step],
        {role: artifacts[read] for role, read in dependencies(recipe)[step].items()},
        run_id="r",
        storage=storage.address,
        log=Path("log.txt"),  # the worker replaces it
        function="tests.support.fake_work.run_stage",
    )


@pytest.fixture
def sft(storage: Storage, recipe_file: Path, tmp_path: Path) -> AttemptRequest:
    """Return a request for sft, whose inputs exist."""
    artifacts: dict[str, Artifact] = {}
    for step in READ_BY_SFT:
        asked = request(storage, recipe_file, step, artifacts)
        outcome = run_attempt(asked.model_copy(update={"log": tmp_path / "log.txt"}))
        assert outcome.artifact is not None
        artifacts[step] = outcome.artifact
    return request(storage, recipe_file, "sft", artifacts)


def scratch_here(tmp_path: Path, key: str) -> list[Path]:
    return list((tmp_path / "worker").glob(f"*/scratch/{key}*"))


def test_what_is_committed_leaves_no_checkpoint_here_and_its_journal_in_the_bucket(
    storage: Storage, sft: AttemptRequest, tmp_path: Path
) -> None:
    assert _make(sft, 1, threading.Event()).status == "made"
    assert scratch_here(tmp_path, sft.stage_key) == []
    journal = storage.reports(sft.stage_key, (JOURNAL,)) / JOURNAL
    assert journal.read_bytes().count(b"\n") > 3


def test_a_damaged_input_is_told_with_its_remedy_and_is_missing_from_then_on(
    storage: Storage, sft: AttemptRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = sft.inputs["init"]
    path = f"{damaged.uri}/weights.txt"
    whole = bytes(obstore.get(storage.remote, path).bytes())
    obstore.put(storage.remote, path, bytes([whole[0] ^ 1]) + whole[1:])
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "another worker"))
    failure = _make(sft, 1, threading.Event()).failure
    assert failure is not None
    assert failure.exit_code == ExitCode.STORAGE
    assert f"{damaged.uri} is damaged: weights.txt: sha256 is" in failure.message
    assert failure.remedy == "run the same command again, which makes it anew"
    assert storage.inspect(damaged.stage_key).ref is None


@pytest.mark.slow
def test_a_preempted_attempt_keeps_its_checkpoints_here(
    storage: Storage, sft: AttemptRequest, tmp_path: Path
) -> None:
    [cache] = (tmp_path / "worker").glob("*/scratch")
    (tmp_path / "worker" / "seconds.txt").write_text("0.3")
    stop = threading.Event()
    attempt = threading.Thread(target=_make, args=(sft, 1, stop))
    attempt.start()
    deadline = time.monotonic() + 60.0
    while not list(cache.glob("*/checkpoints/checkpoint*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    attempt.join()
    assert storage.find(sft.stage_key) is None
    [scratch] = scratch_here(tmp_path, sft.stage_key)
    assert list(scratch.glob("checkpoints/checkpoint*"))


def test_a_long_log_is_sent_seldom_and_whole_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a beat every 0.02 s, a log of 10,000 times the usual size is sent at once, and not again for 200 s."""
    monkeypatch.setattr(attempt_flow, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(attempt_flow, "LOG_BYTES", 10)
    messages, log = messages_of(MemoryStore(), "0" * 64, 1), tmp_path / "log.txt"
    log.write_bytes(b"x" * 100_000)
    with _Reporter(messages, log, threading.Event(), scratch=tmp_path, run_id="0001-test"):
        wait_for(lambda: messages.read("log.txt") is not None, seconds=20.0)
        log.write_bytes(b"y" * 100_001)
        beat = int(messages.read("beat") or b"0")
        wait_for(lambda: int(messages.read("beat") or b"0") > beat + 5, seconds=20.0)
        assert messages.read("log.txt") == b"x" * 100_000
    assert messages.read("log.txt") == b"y" * 100_001


def test_a_log_is_sent_again_only_when_it_has_grown(tmp_path: Path) -> None:
    messages, log = messages_of(MemoryStore(), "0" * 64, 1), tmp_path / "log.txt"
    reporter = _Reporter(messages, log, threading.Event(), scratch=tmp_path, run_id="0001-test")
    sent = []
    for size in (10, 25, 25, 0):
        log.write_bytes(b"x" * size)
        messages.write("log.txt", b"not sent")
        reporter._send_log()
        sent.append(messages.read("log.txt") != b"not sent")
    assert sent == [True, True, False, True]


def test_a_worker_hears_that_a_person_asks_the_stage_to_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_flow, "BEAT_SECONDS", 0.02)
    messages = messages_of(MemoryStore(), "0" * 64, 1)
    with _Reporter(messages, tmp_path / "log.txt", threading.Event(), scratch=tmp_path, run_id="0001-test"):
        wait_for(lambda: messages.read("beat") is not None, seconds=20.0)
        assert asked_to_finish(tmp_path, run_id="0001-test") is None
        messages.write("finish", b"good enough")
        wait_for(lambda: asked_to_finish(tmp_path, run_id="0001-test") == "good enough", seconds=20.0)

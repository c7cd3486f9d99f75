"""A run judges its attempt by what Prefect shows of it; Prefect is made up here, and ``test_workers`` has real servers."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from httpx import ConnectError
from obstore.exceptions import GenericError
from obstore.store import MemoryStore
from prefect.client.schemas.objects import StateType, WorkPoolStatus
from prefect.exceptions import ObjectNotFound

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.run_attempt import Unobserved
from vantage.flows.pools import run_on_pool
from vantage.flows.pools.deployments import UnknownPool
from vantage.flows.pools.run_on_pool import PENDING_SECONDS, SILENT_SECONDS, Asked, _Attempt, _patiently
from vantage.flows.prefect_server.outages import outages_of
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.records.attempt import AttemptOutcome, AttemptRequest, Failure
from vantage.storage.messages import Messages, messages_of
from vantage.storage.storage import Storage

KEY = "0" * 64
QUIET = outages_of("memory", lambda line: None)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(run_on_pool.time, "monotonic", found.monotonic)
    return found


class Prefect:
    """A server that knows one flow run."""

    def __init__(self) -> None:
        self.state = StateType.SCHEDULED
        self.message = ""
        self.pool: str | None = "gpu"
        self.ended: list[Any] = []
        self.with_workers = {"gpu", "big"}

    def read_flow_run(self, _: object) -> Any:
        state = SimpleNamespace(
            type=self.state,
            name=self.state.value,
            message=self.message,
            is_final=lambda: self.state in FINAL,
        )
        return SimpleNamespace(id="run", state=state, work_pool_name=self.pool)

    def read_work_pool(self, name: str) -> Any:
        if name == "deleted":
            raise ObjectNotFound(Exception("404"))
        status = WorkPoolStatus.READY if name in self.with_workers else WorkPoolStatus.NOT_READY
        return SimpleNamespace(status=status)

    def set_flow_run_state(self, _: object, state: Any, force: bool) -> None:
        self.ended.append(state.type)


FINAL = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)


@pytest.fixture
def prefect() -> Prefect:
    return Prefect()


@pytest.fixture
def messages() -> Messages:
    return messages_of(cast(Any, MemoryStore()), KEY, 1)


@pytest.fixture
def request_(tmp_path: Path) -> AttemptRequest:
    return AttemptRequest.model_construct(stage_key=KEY, run_id="0001-a", log=tmp_path / "log.txt")


@pytest.fixture
def attempt(
    prefect: Prefect, messages: Messages, request_: AttemptRequest, clock: Clock, tmp_path: Path
) -> Iterator[_Attempt]:
    storage = SimpleNamespace(reports=lambda key, names: tmp_path)
    return _Attempt(
        cast(Any, prefect),
        prefect.read_flow_run("run"),
        request_,
        messages,
        Asked(run_id="0001-a", pool="gpu", token="t"),
        "big",
        cast(Storage, storage),
        Unobserved(),
        threading.Event(),
        QUIET,
    )


def test_a_container_that_took_minutes_to_start_has_its_time_to_beat(
    attempt: _Attempt, prefect: Prefect, messages: Messages, clock: Clock
) -> None:
    clock.now += 3600
    assert attempt._ended() is None, "it waits for a worker"
    prefect.state = StateType.PENDING
    assert attempt._ended() is None
    clock.now += PENDING_SECONDS - 1
    assert attempt._ended() is None
    prefect.state = StateType.RUNNING
    assert attempt._ended() is None, "it has only just begun"
    clock.now += SILENT_SECONDS - 1
    assert attempt._ended() is None
    messages.write("beat", b"1")
    assert attempt._ended() is None
    clock.now += SILENT_SECONDS
    assert attempt._ended() == "its process has sent no heartbeat for 60 s"


def test_a_flow_run_that_is_never_started_is_given_up(
    attempt: _Attempt, prefect: Prefect, clock: Clock
) -> None:
    prefect.state = StateType.PENDING
    assert attempt._ended() is None
    clock.now += PENDING_SECONDS
    assert attempt._ended() == "its process has sent no heartbeat for 900 s"


def test_a_flow_run_without_its_pool_will_never_start(attempt: _Attempt, prefect: Prefect) -> None:
    prefect.pool = None
    assert attempt._ended() == "its work pool was deleted"
    prefect.state = StateType.RUNNING
    assert attempt._ended() is None, "a worker has it already"


def test_one_that_is_given_up_is_told_to_stop(
    attempt: _Attempt, prefect: Prefect, messages: Messages
) -> None:
    """The attempt may only have been cut off from the bucket."""
    outcome = attempt._give_up("its process has sent no heartbeat")
    assert outcome.failure is not None
    assert outcome.failure.exit_code == ExitCode.RESUME
    assert messages.read("stop") is not None
    assert prefect.ended == [StateType.CRASHED]


PREEMPTED = AttemptOutcome(
    status="failed",
    failure=Failure(exit_code=ExitCode.RESUME, cause="preempted", message="stopped", remedy="resume"),
    attempt=2,
    committed_step=7,
)


@pytest.mark.parametrize("outcome", [AttemptOutcome(status="stopped"), PREEMPTED], ids=["waiting", "saved"])
@pytest.mark.parametrize("state", [StateType.CANCELLING, StateType.CANCELLED])
def test_a_flow_run_that_a_person_cancelled_is_not_tried_again(
    state: StateType, outcome: AttemptOutcome, attempt: _Attempt, prefect: Prefect, messages: Messages
) -> None:
    prefect.state = state
    messages.create("outcome.json", outcome.model_dump_json().encode())
    ended = attempt.wait()
    assert ended.status == "failed"
    assert ended.failure is not None
    assert (ended.failure.exit_code, ended.failure.cause) == (ExitCode.RESUME, "cancelled")
    assert (ended.attempt, ended.committed_step) == (outcome.attempt, outcome.committed_step)


def test_a_process_that_was_killed_by_a_cancellation_is_not_tried_again(
    attempt: _Attempt, prefect: Prefect
) -> None:
    prefect.state = StateType.CANCELLED
    ended = attempt.wait()
    assert ended.failure is not None
    assert ended.failure.cause == "cancelled"
    assert prefect.ended == [], "the page still says that it was cancelled"


def test_a_request_that_another_run_withdrew_or_a_worker_gave_back_is_made_anew(
    attempt: _Attempt, prefect: Prefect, messages: Messages
) -> None:
    messages.create("outcome.json", PREEMPTED.model_dump_json().encode())
    prefect.state = StateType.FAILED
    assert attempt.wait() == PREEMPTED
    prefect.state, prefect.message = StateType.CANCELLED, run_on_pool.WITHDRAWN
    assert attempt.wait() == PREEMPTED


def test_an_attempt_that_failed_by_itself_says_so_although_its_flow_run_was_cancelled(
    attempt: _Attempt, prefect: Prefect, messages: Messages
) -> None:
    diverged = Failure(
        exit_code=ExitCode.BAD_INPUT, cause="diverged", message="not finite", remedy="lower it"
    )
    failed = AttemptOutcome(status="failed", failure=diverged)
    prefect.state = StateType.CANCELLED
    messages.create("outcome.json", failed.model_dump_json().encode())
    assert attempt.wait() == failed


def test_the_log_of_the_attempt_before_is_kept(
    attempt: _Attempt, request_: AttemptRequest, messages: Messages
) -> None:
    request_.log.write_bytes(b"== request 0 for a worker\nKilled")
    messages.write("log.txt", b"loading\nste")
    attempt._report()
    messages.write("log.txt", b"loading\nstep 1\n")
    attempt._report()
    assert request_.log.read_text().splitlines() == [
        "== request 0 for a worker",
        "Killed",
        "== request 1 for a worker",
        "loading",
        "step 1",
    ]


def test_only_a_request_that_waits_for_nobody_is_moved_to_a_pool_with_workers(
    attempt: _Attempt, prefect: Prefect, messages: Messages
) -> None:
    assert not attempt.was_moved(), "gpu has workers: its turn will come"
    prefect.with_workers = set()
    assert not attempt.was_moved(), "nor has big any"
    prefect.with_workers = {"big"}
    prefect.state = StateType.RUNNING
    attempt._flow_run = prefect.read_flow_run("run")
    assert not attempt.was_moved(), "a worker has taken it, and has gone since"
    prefect.state = StateType.SCHEDULED
    attempt._flow_run = prefect.read_flow_run("run")
    assert attempt.was_moved()
    assert AttemptOutcome.model_validate_json(messages.read("outcome.json") or b"").status == "stopped"
    assert messages.read("stop") is not None
    assert prefect.ended == [StateType.CANCELLED]


def ask_after_another_run(
    asked: Asked,
    request_: AttemptRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    deleted: str = "",
) -> tuple[_Attempt, list[str], Messages]:
    """Let a run of pool ``big`` ask for an attempt that another run has requested, whose flow run does not exist yet.
    Returns its attempt, the pools in which it started a flow run, and the messages of the first request.

    Args:
        deleted: a pool that Prefect no longer has.
    """
    remote = MemoryStore()
    first = messages_of(cast(Any, remote), KEY, 1)
    first.create("request.json", asked.model_dump_json().encode())
    started: list[str] = []

    async def start(request: AttemptRequest, number: int, token: str, pool: str) -> Any:
        if pool == deleted:
            raise ObjectNotFound(Exception("404"))
        started.append(pool)
        return Prefect().read_flow_run("run")

    monkeypatch.setattr(run_on_pool, "_start_flow_run", start)
    monkeypatch.setattr(run_on_pool, "deploy_attempts", lambda client, pool: None)
    storage = SimpleNamespace(remote=remote, reports=lambda key, names: tmp_path)
    attempt = run_on_pool._ask_prefect(
        cast(Any, Prefect()), request_, "big", cast(Storage, storage), Unobserved(), threading.Event(), QUIET
    )
    return attempt, started, first


def test_a_flow_run_is_on_the_pool_of_the_run_that_asked_whoever_starts_it(
    request_: AttemptRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run has written its request but not started its flow run. Otherwise it would find ours, on our pool."""
    asked = Asked(run_id="0002-b", pool="gpu", token="t")
    attempt, started, _ = ask_after_another_run(asked, request_, tmp_path, monkeypatch)
    assert started == ["gpu"]
    assert attempt._asked == asked


def test_a_request_on_a_pool_that_is_gone_is_closed_and_ours_comes_after_it(
    request_: AttemptRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(run_id="0002-b", pool="gone", token="t")
    attempt, started, first = ask_after_another_run(asked, request_, tmp_path, monkeypatch, deleted="gone")
    assert started == ["big"]
    assert (attempt._asked.run_id, attempt._messages.number) == (request_.run_id, 2)
    assert AttemptOutcome.model_validate_json(first.read("outcome.json") or b"").status == "stopped"


def test_our_own_pool_that_is_gone_is_an_error(
    request_: AttemptRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(run_id="0001-a", pool="big", token="t")
    with pytest.raises(ObjectNotFound):
        ask_after_another_run(asked, request_, tmp_path, monkeypatch, deleted="big")


def test_a_bucket_that_is_away_for_minutes_fails_nothing(
    attempt: _Attempt, messages: Messages, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = AttemptOutcome(status="stopped", attempt=4)
    reads = 0

    def read(self: Messages, what: str) -> bytes | None:
        nonlocal reads
        reads += 1
        clock.now += 60
        if reads < 10:
            raise GenericError("no route to host")
        return made.model_dump_json().encode() if what == "outcome.json" else None

    monkeypatch.setattr(Messages, "read", read)
    monkeypatch.setattr(run_on_pool, "POLL_SECONDS", 0.0)
    assert attempt.wait() == made


def test_a_bucket_that_stays_away_is_an_error(
    attempt: _Attempt, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: Messages, what: str) -> bytes | None:
        clock.now += 60
        raise GenericError("no route to host")

    monkeypatch.setattr(Messages, "read", read)
    monkeypatch.setattr(run_on_pool, "POLL_SECONDS", 0.0)
    with pytest.raises(GenericError):
        attempt.wait()
    assert clock.now >= 1000.0 + run_on_pool.OUTAGE_SECONDS


@pytest.mark.parametrize("minutes_away", [1, 60])
def test_a_prefect_server_that_is_away_is_waited_for(
    minutes_away: int, attempt: _Attempt, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_on_pool, "SECONDS_BETWEEN_REPORTS", 0.0)

    def ask() -> _Attempt:
        if clock.now < 1000.0 + 60 * minutes_away:
            clock.now += 5
            raise ConnectError("connection refused")
        return attempt

    if minutes_away == 1:
        assert _patiently(ask, threading.Event(), QUIET.prefect) is attempt
    else:
        with pytest.raises(ConnectError):
            _patiently(ask, threading.Event(), QUIET.prefect)


def test_a_pool_that_does_not_exist_is_told_at_once() -> None:
    def ask() -> _Attempt:
        raise UnknownPool("resources.pool=gpu is no work pool")

    with pytest.raises(UnknownPool):
        _patiently(ask, threading.Event(), QUIET.prefect)


@pytest.mark.parametrize("grace", [20.0, 500.0])
def test_one_that_is_asked_to_stop_has_its_grace_period_and_the_time_to_report(
    attempt: _Attempt,
    prefect: Prefect,
    messages: Messages,
    clock: Clock,
    grace: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefect.state, began = StateType.RUNNING, clock.now
    resources = Resources(grace_seconds=grace)
    attempt._request = attempt._request.model_copy(update={"resources": resources})

    def passes(seconds: float) -> None:
        clock.now += seconds
        messages.write("beat", str(clock.now).encode())

    monkeypatch.setattr(run_on_pool.time, "sleep", passes)
    failure = attempt._stopped().failure
    assert failure is not None and f"did not stop within {grace + 40:g} s" in failure.message
    assert clock.now - began == pytest.approx(grace + 40, abs=1.5)

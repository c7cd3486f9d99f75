"""A run that no process executes any more asks its attempts on workers to stop."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.store import MemoryStore

from vantage.flows import cancelling
from vantage.flows.cancelling import attempts_under_way, cancel_run
from vantage.storage.messages import Messages, messages_of

KEYS = {"own": "a" * 64, "of_ended": "b" * 64, "of_active": "c" * 64, "done": "d" * 64, "silent": "e" * 64}


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Messages]:
    """Return each step's messages of an attempt, which this run (0001) or another asked for. A process executes run
    0003 alone.
    """
    monkeypatch.setattr(cancelling, "pool_of", lambda recipe, step: None if step == "local" else "pool")
    monkeypatch.setattr(cancelling, "is_active", lambda workspace, run_id: run_id == "0003")
    remote = MemoryStore()
    found = {step: messages_of(remote, key, 1) for step, key in KEYS.items()}
    for step, run_id in (("own", "0001"), ("of_ended", "0002"), ("of_active", "0003"), ("done", "0001")):
        found[step].write("request.json", json.dumps({"run_id": run_id}).encode())
    found["done"].write("outcome.json", b"{}")
    found["own"].write("beat", b"7")
    found["silent"].write("begun.json", b"{}")
    return found


def run_and_place(attempts: dict[str, Messages], run_id: str = "0001") -> tuple[Any, Any]:
    asked: list[str] = []
    remote = attempts["own"].remote
    place = SimpleNamespace(
        storage=SimpleNamespace(remote=remote),
        records=SimpleNamespace(request_cancel=asked.append),
        asked=asked,
    )
    used = {**KEYS, "local": "f" * 64, "not_begun": "9" * 64}
    return place, SimpleNamespace(run_id=run_id, recipe=None, used_keys=used)


def test_attempts_that_another_active_run_waits_for_go_on(attempts: dict[str, Messages]) -> None:
    place, record = run_and_place(attempts)
    assert list(attempts_under_way(place, record)) == ["own", "of_ended", "silent"]


@pytest.mark.parametrize(
    "request_", [b"[]", b"3", b"{", b"\xff", b"{}", b"[" * 100_000], ids=lambda given: repr(given)[:9]
)
def test_an_attempt_whose_request_cannot_be_read_counts_as_the_runs_own(
    attempts: dict[str, Messages], request_: bytes
) -> None:
    attempts["of_active"].write("request.json", request_)
    place, record = run_and_place(attempts)
    assert list(attempts_under_way(place, record)) == ["own", "of_ended", "of_active", "silent"]


def test_what_waits_for_a_worker_ends_at_once_and_what_computes_is_asked(
    attempts: dict[str, Messages],
) -> None:
    place, record = run_and_place(attempts)
    said = cancel_run(place, record)
    assert [line.partition(",")[0] for line in said] == ["own", "of_ended", "silent"]
    stopped = {step for step, each in attempts.items() if each.read("stop") is not None}
    assert stopped == {"own", "of_ended", "silent"}
    assert attempts["own"].read("outcome.json") is None, "it saves its state first"
    outcome = json.loads(attempts["of_ended"].read("outcome.json") or b"{}")
    assert outcome["status"] == "stopped"
    assert cancel_run(place, record) == [], "own was asked already, and the others have ended"
    assert not place.asked


def test_a_run_that_a_process_executes_stops_by_itself(attempts: dict[str, Messages]) -> None:
    place, record = run_and_place(attempts, "0003")
    assert cancel_run(place, record) == ["run 0003 is asked to stop: running stages save their state"]
    assert place.asked == ["0003"] and attempts["own"].read("stop") is None

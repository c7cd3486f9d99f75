"""A server receives OpenLineage events that are valid, complete, the same however often they are sent, and without secrets."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from tests.support.lineage_server import Lineage, lineage_server
from vantage.ledger.destinations.delivery import Delivery, send_earlier_runs
from vantage.ledger.destinations.openlineage import LineageServer
from vantage.ledger.operations import Input
from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.tracking import check_configured
from vantage.schemas.records.artifacts import Dataset, PolicyCheckpoint

RUN = "0001-small-abcdef"
KEY = {name: letter * 64 for name, letter in (("data", "a"), ("sft", "b"))}
SOURCE = "5" * 64

FACET = {
    "type": "object",
    "required": ["_producer", "_schemaURL"],
    "properties": {
        "_producer": {"format": "uri"},
        "_schemaURL": {"format": "uri", "pattern": "^https://openlineage.io/spec/"},
    },
}
FACETS = {"type": "object", "additionalProperties": FACET}
DATASET = {
    "type": "object",
    "required": ["namespace", "name"],
    "properties": {"namespace": {"type": "string"}, "name": {"type": "string"}, "facets": FACETS},
}
SCHEMA = {
    "type": "object",
    "required": ["eventTime", "producer", "schemaURL", "run", "job", "eventType"],
    "properties": {
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "eventTime": {"type": "string", "format": "date-time"},
        "producer": {"type": "string", "format": "uri"},
        "schemaURL": {"type": "string", "pattern": "^https://openlineage.io/spec/.*RunEvent$"},
        "run": {
            "type": "object",
            "required": ["runId"],
            "properties": {"runId": {"type": "string", "format": "uuid"}, "facets": FACETS},
        },
        "job": {
            "type": "object",
            "required": ["namespace", "name"],
            "properties": {"namespace": {"type": "string"}, "name": {"type": "string"}, "facets": FACETS},
        },
        "inputs": {"type": "array", "items": DATASET},
        "outputs": {"type": "array", "items": DATASET},
    },
    "additionalProperties": False,
}
"""The demands of the specification on a run event (version 2-0-2), written from its text."""


@pytest.fixture
def lineage() -> Iterator[Lineage]:
    with lineage_server() as server:
        yield server


@pytest.fixture
def place(lineage: Lineage) -> LineageServer:
    return LineageServer(lineage.url, endpoint="api/v1/lineage", api_key=None, namespace="team")


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "runs" / RUN / "ledger")


DATA = Dataset(
    uri="objects/d", digest="d" * 64, stage_key=KEY["data"], parents={}, metrics={}, content="demonstrations"
)
POLICY = PolicyCheckpoint(
    uri="objects/e", digest="e" * 64, stage_key=KEY["sft"], parents={"data": "d" * 64}, metrics={},
    tokenizer_digest="c" * 64,
)  # fmt: skip
READS = {"data": Input(stage="data.demonstrations", artifact=DATA)}


def open_sft(ledger: Ledger, attempt: int = 1) -> None:
    params = {"learning_rate": 0.1, "note": "params-are-not-sent"}
    ledger.open_stage("sft", kind="sft", stage_key=KEY["sft"], attempt=attempt, params=params, inputs=READS)


def whole_run(ledger: Ledger) -> None:
    """Record a run whose second stage fails."""
    ledger.open_run(RUN, "small", {"model": "recipes-are-not-sent"})
    ledger.open_stage(
        "data.demonstrations", kind="prepare", stage_key=KEY["data"], attempt=1, params={}, inputs={}, source_sha256=SOURCE
    )  # fmt: skip
    ledger.finish_stage("data.demonstrations", "completed", artifact=DATA)
    open_sft(ledger)
    ledger.finish_stage("sft", "failed", reason="lost http://ada:hunter22@host, and \x1b[31m$")
    ledger.finish_run("failed")


def shown(events: list[dict[str, Any]]) -> list[tuple[str, str, list[str], list[str]]]:
    return [
        (
            each["eventType"],
            each["job"]["name"],
            [dataset["name"][0] for dataset in each.get("inputs", ())],
            [dataset["name"][0] for dataset in each.get("outputs", ())],
        )
        for each in events
    ]


def tag(event: dict[str, Any], name: str) -> str | None:
    tags = event["run"]["facets"].get("tags", {"tags": []})["tags"]
    return next((each["value"] for each in tags if each["key"] == name), None)


def test_a_run_and_its_stages_start_and_end_with_what_they_read_and_made(
    ledger: Callable[[], Ledger], lineage: Lineage, place: LineageServer, outbox: Outbox
) -> None:
    whole_run(ledger())
    Delivery(place, outbox).send()
    assert shown(lineage.events) == [
        ("START", "small", [], []),
        ("START", "small.data.demonstrations", ["5"], []),
        ("COMPLETE", "small.data.demonstrations", ["5"], ["d"]),
        ("START", "small.sft", ["d"], []),
        ("FAIL", "small.sft", ["d"], []),
        ("FAIL", "small", [], []),
    ]
    run, *stages, _ = lineage.events
    for each in stages:
        parent = each["run"]["facets"]["parent"]
        assert (parent["run"]["runId"], parent["job"]["name"]) == (run["run"]["runId"], "small")
        assert parent["root"]["run"]["runId"] == run["run"]["runId"]
    assert "parent" not in run["run"]["facets"]
    assert {each["job"]["namespace"] for each in lineage.events} == {"team"}
    assert lineage.asked[0][0] == "/api/v1/lineage"
    [made] = lineage.events[2]["outputs"]
    assert (made["namespace"], made["name"]) == ("vantage", "d" * 64)
    assert made["facets"]["version"]["datasetVersion"] == "d" * 64
    assert made["facets"]["datasetType"] | {"_producer": "", "_schemaURL": ""} == {
        "datasetType": "FILE", "subType": "dataset", "_producer": "", "_schemaURL": "",
    }  # fmt: skip
    assert tag(lineage.events[3], "vantage.stage_key") == KEY["sft"]


def test_every_event_is_valid_and_times_are_the_operations_own(
    ledger: Callable[[], Ledger], lineage: Lineage, place: LineageServer, outbox: Outbox
) -> None:
    whole_run(ledger())
    Delivery(place, outbox).send()
    validator = Draft202012Validator(SCHEMA, format_checker=FormatChecker())
    recorded = {line["time"] for _, line in outbox.read()}
    for event in lineage.events:
        assert list(validator.iter_errors(event)) == []
        UUID(event["run"]["runId"])
        assert round(datetime.fromisoformat(event["eventTime"]).timestamp() * 1000) in recorded


def test_neither_recipes_nor_params_nor_logins_are_sent(
    ledger: Callable[[], Ledger], lineage: Lineage, place: LineageServer, outbox: Outbox
) -> None:
    whole_run(ledger())
    Delivery(place, outbox).send()
    text = json.dumps(lineage.events)
    assert "are-not-sent" not in text
    assert "hunter22" not in text
    [message] = [
        each["run"]["facets"]["errorMessage"]["message"]
        for each in lineage.events
        if "errorMessage" in each["run"]["facets"]
    ]
    assert message.startswith("lost http://") and "\x1b" not in message


def test_nothing_is_lost_while_the_server_is_away_and_an_event_that_comes_twice_is_the_same(
    ledger: Callable[[], Ledger], lineage: Lineage, place: LineageServer, outbox: Outbox, tmp_path: Path
) -> None:
    whole_run(ledger())
    Delivery(place, outbox).send()
    expected, lineage.events[:] = list(lineage.events), []
    (outbox.folder / "sent-openlineage.json").unlink()
    for _ in expected:  # each time the server confirms one event and keeps another whose answer is lost
        lineage.answers, lineage.loses_answers = 1, True
        with pytest.raises(Exception, match="503"):
            Delivery(place, outbox).send()
            raise AssertionError("503: it was done early")
    lineage.answers = None
    send_earlier_runs(place, tmp_path / "runs", skip=None)
    assert len(lineage.events) > len(expected)
    once = {json.dumps(each, sort_keys=True): each for each in lineage.events}
    assert list(once.values()) == expected
    asked = len(lineage.asked)
    send_earlier_runs(place, tmp_path / "runs", skip=None)
    assert len(lineage.asked) == asked, "all is confirmed"


def test_a_run_whose_process_died_is_aborted_and_its_next_attempt_is_another_run(
    ledger: Callable[[], Ledger], lineage: Lineage, place: LineageServer, outbox: Outbox
) -> None:
    first = ledger()
    first.open_run(RUN, "small", {})
    open_sft(first)
    second = ledger()
    second.open_run(RUN, "small", {})
    open_sft(second, attempt=2)
    second.finish_stage("sft", "resumable", reason="SIGTERM")
    open_sft(second, attempt=3)
    second.record_reuse("sft", kind="sft", stage_key=KEY["sft"], params={}, inputs=READS, artifact=POLICY)
    second.record_reuse("again", kind="sft", stage_key=KEY["sft"], params={}, inputs=READS, artifact=POLICY)
    second.finish_run("gate_closed")
    second.finish_run("completed")
    Delivery(place, outbox).send()
    assert shown(lineage.events) == [
        ("START", "small", [], []),
        ("START", "small.sft", ["d"], []),
        ("ABORT", "small.sft", [], []),
        ("ABORT", "small", [], []),
        ("START", "small", [], []),
        ("START", "small.sft", ["d"], []),
        ("ABORT", "small.sft", ["d"], []),
        ("START", "small.sft", ["d"], []),
        ("COMPLETE", "small.sft", ["d"], ["e"]),
        ("START", "small.again", ["d"], []),
        ("COMPLETE", "small.again", ["d"], ["e"]),
        ("COMPLETE", "small", [], []),
    ]
    outcomes = [tag(each, "vantage.outcome") for each in lineage.events if each["eventType"] == "COMPLETE"]
    assert outcomes == ["completed", "reused", "gate_closed"]
    ends: dict[str, list[str]] = {}
    for each in lineage.events:
        ends.setdefault(each["run"]["runId"], []).append(each["eventType"])
    assert all(len(each) == 2 and each[0] == "START" for each in ends.values())
    assert len(ends) == 6


def test_a_run_sends_its_events_with_the_environments_login(
    ledger: Callable[[], Ledger], lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", lineage.url)
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "a-secret-key")
    monkeypatch.setenv("OPENLINEAGE_ENDPOINT", "lineage")
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "rlhf")
    told = ledger()
    whole_run(told)
    told.close(60)
    assert len(lineage.events) == 6
    assert {each["job"]["namespace"] for each in lineage.events} == {"rlhf"}
    assert set(lineage.asked) == {("/lineage", "Bearer a-secret-key")}
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    other = ledger()
    other.open_run("0002-small-abcdef", "small", {})
    other.close(60)
    assert len(lineage.events) == 6


@pytest.mark.parametrize("url", ["localhost:5000", "http://", "http://host:port", "ftp://host", "http://a b"])
def test_an_address_that_is_none_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", url)
    with pytest.raises(ValueError, match="is no address of a server; write http://HOST:PORT, or unset it"):
        check_configured()

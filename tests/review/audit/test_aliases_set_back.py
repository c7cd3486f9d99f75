"""An audit finds an alias that somebody set back to an older version, also where a clock was ahead: two runs published versions 1 and 2."""

import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.flows.publishing.test_moving_aliases import Place
from tests.support.orchestrated import Witness
from vantage.flows.publishing.moving_aliases import publish_again
from vantage.ledger import run_ledger
from vantage.ledger.operations import Publish
from vantage.ledger.outbox import operation_in
from vantage.ledger.steady_clock import SteadyClock
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.audit import Check

HOURS = 3600 * 10**9


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of a place where two runs have published, for reading only."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        place = Place(tmp_path_factory.mktemp("set-back"))
        place.run("seed=1")
        place.run("seed=2")
        assert place.champion == "2"
        yield place.workspace.root.parent


def alias_checks(workspace: Workspace, target: str) -> list[Check]:
    with Evidence(workspace) as evidence:
        report = audit(evidence, target)
    return [check for _, check in report.every_check() if check.subject == "alias small@champion"]


class SetBack:
    """A copy of the place in which the alias and its tag in MLflow are those of the first run's movement."""

    def __init__(self, original: Path, folder: Path) -> None:
        # The same path again: MLflow's database has absolute addresses.
        self.workspace = Workspace(folder / "workspace")
        shutil.copytree(original / "workspace", self.workspace.root, symlinks=True)
        second, first = read_runs(self.workspace)
        self.first, self.second = first, second
        tag = {
            "version": "1",
            "time": self.published(first).time,
            "run_id": first.run_id,
            "by": "",
            "reason": "",
        }
        with closing(sqlite3.connect(self.workspace.root / "mlflow.db")) as database, database:
            database.execute("UPDATE registered_model_aliases SET version = 1 WHERE alias = 'champion'")
            database.execute(
                "UPDATE registered_model_tags SET value = ? WHERE key = 'vantage.alias.champion'",
                (json.dumps(tag),),
            )

    def ledger(self, run: RunRecord) -> Path:
        return self.workspace.folder(run.run_id) / "ledger"

    def published(self, run: RunRecord) -> Publish:
        place = Place.__new__(Place)
        place.workspace = self.workspace
        [operation] = [each for each in place.operations(run.run_id) if isinstance(each, Publish)]
        return operation


def is_publication(line: bytes) -> bool:
    return operation_in(line).get("operation") == "publish"


def nothing(place: SetBack) -> None:
    """Damage nothing, since the second run's records already show what is wrong."""


def not_sent(place: SetBack) -> None:
    """Let the second run's publication seem to wait."""
    file = place.ledger(place.second) / "sent.json"
    outbox = (place.ledger(place.second) / "outbox.jsonl").read_bytes()
    start = next(
        sum(map(len, outbox.splitlines(keepends=True)[:number]))
        for number, line in enumerate(outbox.splitlines())
        if is_publication(line)
    )
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), start)))


def refused(place: SetBack) -> None:
    """Let MLflow seem to have refused the second run's publication."""
    ledger = place.ledger(place.second)
    [destination] = json.loads((ledger / "sent.json").read_text())
    said = {"destination": destination, "operation": place.published(place.second).model_dump(mode="json")}
    (ledger / "refused.jsonl").write_text(json.dumps(said) + "\n")


def outbox_lost(place: SetBack) -> None:
    (place.ledger(place.second) / "outbox.jsonl").unlink()


def outbox_cut(place: SetBack) -> None:
    """Cut the outbox before the publication; the offset of what was sent stays."""
    file = place.ledger(place.second) / "outbox.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: next(n for n, line in enumerate(lines) if is_publication(line))]))


def outbox_cut_and_sent(place: SetBack) -> None:
    """Cut the outbox before the publication, and the offset with it; ``run.json`` still names the copy."""
    outbox_cut(place)
    ledger = place.ledger(place.second)
    size = (ledger / "outbox.jsonl").stat().st_size
    (ledger / "sent.json").write_text(
        json.dumps(dict.fromkeys(json.loads((ledger / "sent.json").read_text()), size))
    )


@pytest.mark.parametrize(
    ("damage", "outcome", "said"),
    [
        (nothing, "wrong", "was the last to move it"),
        (not_sent, "unchecked", "recorded a later movement"),
        (refused, "unchecked", "recorded a later movement"),
        (outbox_lost, "unchecked", "it has no outbox"),
        (outbox_cut, "unchecked", "it was changed since"),
        (outbox_cut_and_sent, "unchecked", "its outbox says nothing of it"),
    ],
)
def test_an_alias_that_was_set_back_never_agrees(
    two: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[SetBack], None],
    outcome: str,
    said: str,
) -> None:
    """It does not agree even where the records of the later run are damaged, which the audit of the older version does
    not walk.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place = SetBack(two, tmp_path)
    damage(place)
    [check] = alias_checks(place.workspace, "small@champion")
    assert check.outcome == outcome, check
    assert place.second.run_id in check.detail and said in check.detail


def test_an_alias_that_nobody_touched_agrees(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    [check] = alias_checks(Workspace(two / "workspace"), "small@champion")
    assert check.outcome == "ok", check


def test_a_clock_that_was_ahead_keeps_no_later_run_from_the_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place = Place(tmp_path)
    with monkeypatch.context() as ahead:
        ahead.setattr(
            run_ledger, "SteadyClock", partial(SteadyClock, wall=lambda: time.time_ns() + 2 * HOURS)
        )
        place.run("seed=1")
    first_run = read_runs(place.workspace)[0].run_id
    place.run("seed=2")
    assert place.champion == "2"
    second_run = next(each.run_id for each in read_runs(place.workspace) if each.run_id != first_run)
    [first] = [each for each in place.operations(first_run) if isinstance(each, Publish)]
    [second] = [each for each in place.operations(second_run) if isinstance(each, Publish)]
    assert first.after is None
    assert first.time - second.time > 1.9 * HOURS / 10**6
    assert (second.after, second.order) == (first.time, first.time + 1)
    [check] = alias_checks(place.workspace, "small@champion")
    assert (check.outcome, second_run in check.detail) == ("ok", True), check

    assert place.back() == "2 → 1"
    assert publish_again(place.workspace, second_run, Witness(), model=None, alias=None) == {
        "small@champion": "published"
    }
    assert place.champion == "2"


@pytest.mark.slow
def test_a_movement_that_a_wrong_tag_keeps_back_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has edited the tag, since no record of the workspace has this time."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place = Place(tmp_path)
    place.run("seed=1")
    tag = "vantage.alias.champion"
    movement = json.loads(place.client.get_registered_model("small").tags[tag])
    late = {**movement, "time": movement["time"] + 10**12}
    place.client.set_registered_model_tag("small", tag, json.dumps(late))
    record = place.run("seed=2")
    assert place.champion == "1"
    [said] = [line for line in place.said if "champion stays where it is" in line]
    assert f"if that time is wrong, delete the tag {tag} of the registered model small in MLflow" in said
    outcomes = publish_again(place.workspace, record.run_id, Witness(), model=None, alias=None)
    assert outcomes == {"small@champion": "alias_stays"}
    place.client.delete_registered_model_tag("small", tag)
    outcomes = publish_again(place.workspace, record.run_id, Witness(), model=None, alias=None)
    assert (outcomes, place.champion) == ({"small@champion": "published"}, "2")

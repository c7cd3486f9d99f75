"""In a run that was resumed twice, an audit also checks operations that later ones have replaced.

The tests edit such operations with all sums, and let MLflow's part be made again.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.review.audit.tampering import Lines, found
from tests.review.audit.test_decisions import Place
from tests.support.made_once import made_once
from vantage.ledger.outbox import BEFORE

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.delenv("MLFLOW_TRACKING_URI", raising=False)
            Place(folder).publish_approved()

    return made_once(tmp_path_factory, "resumed twice", make)


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(original / "workspace", tmp_path / "workspace", symlinks=True)
    return Place(tmp_path)


def rewritten(place: Place, change: Callable[[Lines], None]) -> None:
    """Change lines of the outbox, make all sums again, and let ``sent.json`` end where its lines end."""
    path = place.workspace.folder(place.record.run_id) / "ledger" / "outbox.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(lines)
    data = b""
    for line in lines:
        line[BEFORE] = hashlib.sha256(data).hexdigest()
        data += json.dumps(line).encode() + b"\n"
    path.write_bytes(data)
    sent = path.with_name("sent.json")
    sent.write_text(json.dumps(dict.fromkeys(json.loads(sent.read_bytes()), len(data))))


def put(*path: str, value: object) -> Edit:
    def change(line: dict[str, Any]) -> None:
        for name in path[:-1]:
            line = line[name]
        assert line[path[-1]] != value
        line[path[-1]] = value

    return change


EDITS: dict[str, tuple[str, Edit, str]] = {
    "metrics": ("finish_stage", put("artifact", "metrics", "test_nll", value=0.05), "finish stage describes the artifact otherwise"),
    "files": ("finish_stage", put("artifact", "files_digest", value="0" * 64), "finish stage describes the artifact otherwise"),
    "tokenizer": ("finish_stage", put("artifact", "tokenizer_digest", value="0" * 64), "finish stage describes the artifact otherwise"),
    "its key": ("finish_stage", put("artifact", "stage_key", value="0" * 64), "finish stage has the stage key 000000000000"),
    "the key it was opened with": ("open_stage", put("stage_key", value="0" * 64), "and it was opened with 000000000000"),
    "params": ("open_stage", put("params", "learning_rate", value=0.5), "other params than the recipe's"),
    "kind": ("open_stage", put("kind", value="kto"), "it was recorded as kto and as sft"),
    "a kind of nobody": ("open_stage", put("kind", value="sftz"), "it was recorded as sftz and as sft"),
    "an input": ("open_stage", put("inputs", "init", "artifact", "metrics", value={"a": 1.0}), "input init was recorded in two ways"),
    "an input's step": ("open_stage", put("inputs", "data", "stage", value="data.other"), "input data was recorded in two ways"),
    "a verdict": ("record_verdicts", lambda line: line["verdicts"][0].update(passed=True), "its gates were judged in two ways"),
}  # fmt: skip
"""Name of a change → the operation, the change of its first line about SFT, and a part of the finding."""


@pytest.mark.slow
def test_an_untouched_run_that_was_resumed_twice_agrees(place: Place) -> None:
    rewritten(place, lambda lines: None)
    report = place.audit()
    assert (found(report), found(report, "unchecked")) == ([], [])


@pytest.mark.parametrize("what", EDITS)
def test_a_line_that_a_later_one_replaced_is_compared_too(place: Place, what: str) -> None:
    operation, change, said = EDITS[what]

    def edit(lines: Lines) -> None:
        first = next(each for each in lines if each["operation"] == operation and each.get("stage") == "sft")
        change(first)

    rewritten(place, edit)
    wrong = found(place.audit())
    assert any("outbox: " in each and said in each for each in wrong), wrong


def test_the_source_of_an_earlier_line_is_that_of_the_key(place: Place) -> None:
    def edit(lines: Lines) -> None:
        first = next(each for each in lines if each.get("stage") == "data.demonstrations")
        first["source_sha256"] = "0" * 64

    rewritten(place, edit)
    assert any("its source was recorded as 000000000000" in each for each in found(place.audit()))

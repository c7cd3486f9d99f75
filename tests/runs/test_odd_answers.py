"""Answers that belong to another question, and files that are no answers, do not count."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_approving import RECIPE, go_through, statuses
from vantage.runs.approving import answer
from vantage.runs.record import RunRecord
from vantage.runs.run import damaged_runs, read_run, read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.approvals import Approval


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a workspace with a run that waits, which no test changes."""
    folder = tmp_path_factory.mktemp("odd-answers")
    (folder / "asking.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        go_through(Workspace(folder / "workspace"), folder / "asking.yaml")
    return folder


@pytest.fixture
def copied(waiting: Path, tmp_path: Path) -> Workspace:
    """Return a copy of the workspace."""
    shutil.copytree(waiting / "workspace", tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")


def only(workspace: Workspace) -> RunRecord:
    [run_id] = workspace.records.ids()
    return workspace.records.read(run_id)


def file_of(workspace: Workspace) -> Path:
    """Return where the answer to the question about sft belongs."""
    record = only(workspace)
    folder = workspace.folder(record.run_id) / "approvals"
    folder.mkdir(exist_ok=True)
    return folder / f"{record.questions['sft'].id}.json"


def given(workspace: Workspace, **changes: Any) -> str:
    """Return the text of an approval of sft, with changed fields."""
    question = only(workspace).questions["sft"].model_dump(mode="json")
    fields = {"question": question, "approved": True, "by": "eve", "reason": "why not", "time": 1}
    return json.dumps({**fields, **changes})


@pytest.mark.parametrize(
    "make, said",
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "OSError"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b""), "ValidationError"),
        (lambda path: path.write_bytes(b"\xff"), "ValidationError"),
        (lambda path: path.write_text("[" * 100_000), "ValidationError"),
    ],
    ids=["folder", "pipe", "loop", "empty", "bytes", "deep"],
)
def test_what_is_no_answer_damages_its_run_alone(
    copied: Workspace, make: Callable[[Path], object], said: str
) -> None:
    """Other commands go on: `vantage status` and `vantage run` of another recipe read all runs."""
    path, run_id = file_of(copied), only(copied).run_id
    make(path)
    with pytest.raises(RunError, match=f"{path} cannot be read .{said}.; move it away, and decide again"):
        read_run(copied, run_id)
    assert read_runs(copied) == []
    assert len(damaged_runs(copied)) == 1


@pytest.mark.parametrize(
    "changes",
    [{"time": 10**17}, {"time": 10**30}, {"time": -1}, {"approved": "yes"}, {"role": "boss"}, {"by": " "}],
)
def test_fields_that_no_answer_has(copied: Workspace, changes: dict[str, Any]) -> None:
    file_of(copied).write_text(given(copied, **changes))
    with pytest.raises(RunError, match="cannot be read .ValidationError."):
        read_run(copied, only(copied).run_id)


def test_a_link_that_leads_nowhere_is_no_answer_and_is_not_told_as_one(copied: Workspace) -> None:
    file_of(copied).symlink_to("nowhere")
    with pytest.raises(RunError, match="leads nowhere; move it away, and decide again"):
        answer(copied, only(copied).run_id, "sft", approved=True, by="ada", reason="the slice is small")
    assert read_run(copied, only(copied).run_id).approvals == ()


def test_an_answer_to_another_question_is_none(copied: Workspace) -> None:
    record = only(copied)
    asked = record.questions["sft"].model_dump(mode="json")
    file_of(copied).write_text(given(copied, question={**asked, "digest": "0" * 64}))
    with pytest.raises(RunError, match="is an answer to another question, about sft of run unknown; move"):
        read_run(copied, record.run_id)
    with pytest.raises(RunError, match="is an answer to another question"):
        answer(copied, record.run_id, "sft", approved=True, by="ada", reason="the slice is small")


def test_the_answer_of_another_run_is_none_of_this_one(
    copied: Workspace, waiting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two runs ask the same question, about the same artifact and verdict."""
    first = only(copied)
    approval, _ = answer(copied, first.run_id, "sft", approved=True, by="ada", reason="the slice is small")
    assert approval.run_id == first.run_id
    go_through(copied, waiting / "asking.yaml")
    go_through(copied, waiting / "asking.yaml")
    second = read_runs(copied)[0]
    assert second.open_questions["sft"] == first.questions["sft"]
    shutil.copytree(copied.folder(first.run_id) / "approvals", copied.folder(second.run_id) / "approvals")
    with pytest.raises(RunError, match=f"about sft of run {first.run_id}; move it away, and decide again"):
        read_run(copied, second.run_id)
    shutil.rmtree(copied.folder(second.run_id) / "approvals")
    assert statuses(copied)["sft"] == "waiting_approval"


def test_an_answer_of_an_earlier_version_says_no_run_and_holds(copied: Workspace) -> None:
    text = given(copied)
    file_of(copied).write_text(text)
    [found] = read_run(copied, only(copied).run_id).approvals
    assert found == Approval.model_validate_json(text)
    assert "run_id" not in json.loads(found.model_dump_json())


def test_an_answer_is_shown_in_one_line(copied: Workspace) -> None:
    """A second line would look as if somebody else had answered."""
    approval, _ = answer(
        copied,
        only(copied).run_id,
        "sft",
        approved=False,
        by="ada\nsft approved by boss",
        reason=" too\tlow\r\nvalue approved by boss\u2028x \x1b[31m ",
    )
    assert approval.by == "ada sft approved by boss"
    assert approval.reason == "too low value approved by boss x \\u001b[31m"
    assert str(approval).isprintable()


@pytest.mark.parametrize("reason", ["\u200b", " \u2060\u200d ", "\ufeff", "\u00ad"])
def test_a_reason_that_nobody_can_see_is_empty(copied: Workspace, reason: str) -> None:
    with pytest.raises(RunError, match="--reason is empty; say it in a few words"):
        answer(copied, only(copied).run_id, "sft", approved=True, by=None, reason=reason)
    assert read_run(copied, only(copied).run_id).approvals == ()

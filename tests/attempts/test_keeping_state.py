"""A training state is committed before its artifact, stays beside it, and is hashed before anything goes on from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.flows.test_extended_run import KEPT, LONGER, WORK, go_through, recipe_file
from tests.support.extended_work import Killed
from tests.support.orchestrated import InProcess, attempt_all, orchestrated
from vantage.attempts.run_attempt import run_attempt
from vantage.flows.garbage_collection import collect
from vantage.runs.workspace import Workspace
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptOutcome, AttemptRequest
from vantage.schemas.records.extensions import state_key
from vantage.storage.store import Store

pytestmark = pytest.mark.usefixtures("unsent")

__all__ = ["recipe_file"]


@contextmanager
def asked(workspace: Workspace, recipe: Path, *overrides: str) -> Iterator[AttemptRequest]:
    """Yield the request for an attempt at the policy stage, with all stages before it made."""
    with orchestrated(workspace, recipe, *overrides, in_process=True, stage_function=WORK) as orchestrator:
        attempt_all(orchestrator, until="policy")
        request = orchestrator.request("policy")
        assert request is not None
        yield request


def attempted(workspace: Workspace, request: AttemptRequest) -> AttemptOutcome:
    return run_attempt(request, storage=workspace.storage, launcher=InProcess())


def before_commit_of(key: str, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something happen just before an artifact of this key is committed, once."""
    commit, left = Store.commit, [act]

    def acting(self: Store, folder: Path, *, stage_key: str, **rest: Any) -> Artifact:
        if stage_key == key and left:
            left.pop()()
        return commit(self, folder, stage_key=stage_key, **rest)

    monkeypatch.setattr(Store, "commit", acting)


def test_a_kill_between_both_commits_leaves_a_state_that_the_next_attempt_makes_again(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise Killed

    with asked(workspace, recipe_file, *KEPT) as request:
        key = request.stage_key
        before_commit_of(key, die, monkeypatch)
        with pytest.raises(Killed):
            attempted(workspace, request)
        state = workspace.storage.find(state_key(key))
        assert state is not None and workspace.storage.find(key) is None
        outcome = attempted(workspace, request)
    assert outcome.status == "made"
    again = workspace.storage.find(state_key(key))
    assert again is not None
    assert (again.attempt, again.artifact) == (2, state.artifact)


def test_no_collector_removes_a_state_that_is_being_committed(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector removes neither its files before they are an object, nor the object before its artifact exists."""
    collections: list[bool] = []

    def collect_now() -> None:
        collect(workspace)
        collections.append(workspace.storage.find(state_key(key)) is not None)

    with asked(workspace, recipe_file, *KEPT) as request:
        key = request.stage_key
        before_commit_of(state_key(key), collect_now, monkeypatch)
        before_commit_of(key, collect_now, monkeypatch)
        assert attempted(workspace, request).status == "made"
    assert collections == [False, True]
    state = workspace.storage.find(state_key(key))
    assert state is not None and workspace.storage.verify(state.artifact) == []


def test_a_state_that_is_damaged_after_it_was_looked_up_is_refused(
    workspace: Workspace, recipe_file: Path
) -> None:
    """The attempt fails before anything is computed; the same command finds the damage, and trains from nothing."""
    go_through(workspace, recipe_file, *KEPT)
    with asked(workspace, recipe_file, *LONGER) as request:
        state = request.inputs["previous.state"]
        file = workspace.storage.folder(state) / "tensors.safetensors"
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        outcome = attempted(workspace, request)
        assert outcome.status == "failed" and outcome.failure is not None
        assert outcome.failure.message.startswith(
            f"previous.state {state.digest[:12]} is damaged: tensors.safetensors: sha256 is"
        )
    record, _ = go_through(workspace, recipe_file, *LONGER)
    assert (record.stages["policy"].status, record.stages["policy"].shorter) == ("completed", ())


def test_a_recipe_that_keeps_no_state_leaves_none(workspace: Workspace, recipe_file: Path) -> None:
    with asked(workspace, recipe_file, *KEPT, "stages.policy.keep_state=false") as request:
        assert attempted(workspace, request).status == "made"
    assert workspace.storage.find(state_key(request.stage_key)) is None

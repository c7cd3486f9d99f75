"""The one reader of a run copes with every kind of damage, each made by hand."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.review.diff.small_runs import make_run, write_recipe
from vantage.ledger.entries import RunEntry
from vantage.ledger.replay import Replay
from vantage.runs.critics import DamagedDiagnosis, _curves
from vantage.runs.damage import damage_of
from vantage.runs.history import Attempt, RunHistory
from vantage.runs.named_models import DamagedModel, model_of
from vantage.runs.record import RunRecord
from vantage.runs.view import Broken, Maker, Missing, NotMade, Replaced, RunView
from vantage.runs.workspace import Workspace
from vantage.schemas.records.artifacts import StoredArtifact
from vantage.signing.lineage import NotStored, refs_of
from vantage.storage.refs import Ref

ABSENT = "9999-compared-abcdef"


@dataclass(frozen=True)
class Stored:
    """A finished run in a workspace of its own, which a test may damage."""

    workspace: Workspace
    record: RunRecord

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def folder(self) -> Path:
        return self.workspace.folder(self.run_id)

    @property
    def outbox(self) -> Path:
        return self.folder / "ledger" / "outbox.jsonl"

    @property
    def view(self) -> RunView:
        """A view that has read nothing yet."""
        return RunView(self.workspace, self.run_id)

    def ref_file(self, step: str) -> Path:
        return self.workspace.store / "refs" / f"{self.record.stages[step].stage_key}.json"

    def digest(self, step: str) -> str:
        return str(self.record.stages[step].digest)

    def edit_record(self, edit: Callable[[Any], object]) -> None:
        file = self.folder / "run.json"
        content = json.loads(file.read_bytes())
        edit(content)
        file.write_text(json.dumps(content))

    def write_outbox(self, *operations: dict[str, Any], tail: bytes = b"") -> None:
        self.outbox.parent.mkdir(exist_ok=True)
        self.outbox.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in operations) + tail)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a workspace with a run, and a second run that has found everything."""
    folder = tmp_path_factory.mktemp("view")
    recipe = write_recipe(folder, range(60))
    for _ in range(2):
        make_run(Workspace(folder / "workspace"), recipe)
    return folder / "workspace"


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> tuple[Stored, Stored]:
    """Return the run that made everything, and the one that reused it, in a copy of their workspace."""
    shutil.copytree(made, tmp_path / "workspace")
    workspace = Workspace(tmp_path / "workspace")
    first, second = (workspace.records.read(run_id) for run_id in sorted(workspace.records.ids()))
    return Stored(workspace, first), Stored(workspace, second)


@pytest.fixture
def stored(runs: tuple[Stored, Stored]) -> Stored:
    return runs[0]


def opened(run_id: str) -> dict[str, Any]:
    return {
        "operation": "open_run", "time": 1000, "run_id": run_id, "experiment": "compared", "name": "compared",
        "recipe": {}, "origin": {"mlflow.user": "ada"},
    }  # fmt: skip


def begun(attempt: int, time: int) -> dict[str, Any]:
    return {
        "operation": "open_stage", "time": time, "stage": "sft", "kind": "sft", "stage_key": "a" * 64,
        "attempt": attempt, "params": {}, "inputs": {},
    }  # fmt: skip


def measured(*rows: tuple[str, float, int, int]) -> dict[str, Any]:
    return {"operation": "log_metrics", "stage": "sft", "rows": rows}


def ended(time: int) -> dict[str, Any]:
    return {
        "operation": "finish_stage", "time": time, "stage": "sft", "outcome": "failed", "artifact": None,
        "provenance": {}, "reason": "memory",
    }  # fmt: skip


# An intact run


def test_an_intact_run_has_what_its_record_names(stored: Stored) -> None:
    view = stored.view
    assert view.record == stored.record
    for step, stage in stored.record.stages.items():
        ref, artifact = view.ref(step), view.artifact(step)
        assert isinstance(ref, Ref) and isinstance(artifact, StoredArtifact)
        assert ref.artifact == artifact
        assert (artifact.digest, artifact.stage_key) == (stage.digest, stage.stage_key)
    assert list(view.artifacts()) == list(stored.record.stages)


def test_a_view_of_a_record_that_was_read_already_reads_no_other(stored: Stored) -> None:
    (stored.folder / "run.json").write_text("{")
    assert RunView.of(stored.workspace, stored.record).record is stored.record


def test_everything_is_read_once(stored: Stored) -> None:
    stored.write_outbox(opened(stored.run_id))
    view = stored.view
    first = (view.record, view.ref("sft"), view.replay, view.history)
    assert not any(isinstance(each, Missing | Broken) for each in first)
    stored.outbox.unlink()
    stored.ref_file("sft").unlink()
    (stored.folder / "run.json").unlink()
    assert (view.record, view.ref("sft"), view.replay, view.history) == first


def test_who_made_an_artifact(runs: tuple[Stored, Stored]) -> None:
    first, second = runs
    own, found = first.view.maker("sft"), second.view.maker("sft")
    assert isinstance(own, Maker) and (own.run.run_id, own.step) == (first.run_id, "sft")
    assert isinstance(found, Maker) and (found.run.run_id, found.step) == (first.run_id, "sft")


def test_a_maker_that_is_gone_damaged_or_another_run_is_no_maker(runs: tuple[Stored, Stored]) -> None:
    first, second = runs
    first.edit_record(lambda record: record["stages"].pop("sft"))
    assert type(second.view.maker("sft")) is Missing
    assert isinstance(second.view.maker("model"), Maker)
    (first.folder / "run.json").write_text("{")
    assert isinstance(second.view.maker("model"), Broken)
    shutil.rmtree(first.folder)
    assert type(second.view.maker("model")) is Missing


# Refs


def test_a_missing_ref(stored: Stored) -> None:
    """A ref that is gone makes the artifact Missing, with the reason."""
    stored.ref_file("sft").unlink()
    said = f"the store has no artifact of sft of run {stored.run_id} any longer; run the same recipe again, which makes it anew"
    for found in (stored.view.ref("sft"), stored.view.artifact("sft"), stored.view.maker("sft")):
        assert type(found) is Missing and found == said
    assert "sft" not in stored.view.artifacts() and "model" in stored.view.artifacts()


def cut_short(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def another_keys(file: Path, other: Path) -> None:
    shutil.copy(other, file)


def a_folder(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (cut_short, "cannot be read as a ref"),
        (another_keys, "holds the ref of another stage key"),
        (a_folder, "cannot be read as a ref"),
    ],
)
def test_a_damaged_ref(stored: Stored, damage: Callable[[Path, Path], None], cause: str) -> None:
    """A ref that cannot be read makes the artifact Broken, with the reason."""
    file = stored.ref_file("sft")
    damage(file, stored.ref_file("model"))
    for found in (stored.view.ref("sft"), stored.view.artifact("sft"), stored.view.maker("sft")):
        assert isinstance(found, Broken)
        assert found.cause == f"{file}: {cause}"
        assert found == (
            f"sft of run {stored.run_id} is damaged ({file}: {cause}); run the same recipe again, which makes it anew"
        )


def test_a_stage_key_that_is_none(stored: Stored) -> None:
    stored.edit_record(lambda record: record["stages"]["sft"].update(stage_key="../sft"))
    found = stored.view.ref("sft")
    assert isinstance(found, Broken) and "'../sft' is not a sha256" in found.cause


def test_an_artifact_of_another_digest(stored: Stored) -> None:
    """The ref was rewritten for other bits, as by a run that has computed the step again."""
    other = stored.digest("model")
    file = stored.ref_file("sft")
    file.write_text(file.read_text().replace(stored.digest("sft"), other))
    for found in (stored.view.ref("sft"), stored.view.artifact("sft")):
        assert isinstance(found, Replaced)
        assert found.ref.artifact.digest == other
        assert found == (
            f"sft of run {stored.run_id} was computed again since, with other bits (its artifact was "
            f"{stored.digest('sft')[:12]}, and is {other[:12]} now): name the run that did, {stored.run_id}"
        )
    assert "sft" not in stored.view.artifacts()
    shutil.rmtree(stored.workspace.store / "objects" / other)
    assert type(stored.view.artifact("sft")) is Missing, "the other one is gone too"


def test_an_artifact_whose_files_are_gone(stored: Stored) -> None:
    shutil.rmtree(stored.workspace.store / "objects" / stored.digest("sft"))
    assert isinstance(stored.view.ref("sft"), Ref)
    assert type(stored.view.artifact("sft")) is Missing


def test_a_store_that_is_gone_is_not_made(stored: Stored) -> None:
    shutil.rmtree(stored.workspace.store)
    assert type(stored.view.artifact("sft")) is Missing
    assert stored.view.artifacts() == {}
    assert not stored.workspace.store.exists()


@pytest.mark.parametrize("field", ["digest", "stage_key"])
def test_a_step_that_has_made_nothing(stored: Stored, field: str) -> None:
    stored.edit_record(lambda record: record["stages"]["sft"].update({field: None}))
    said = f"sft of run {stored.run_id} has no artifact yet; `vantage status {stored.run_id}` shows how far it is"
    for found in (stored.view.ref("sft"), stored.view.artifact("sft")):
        assert isinstance(found, NotMade) and found == said
    assert isinstance(stored.view.ref("no-such-step"), NotMade)


# Records


def of_a_later_version(stored: Stored) -> None:
    stored.edit_record(lambda record: record.update(a_later_field=1))


def cut_record(stored: Stored) -> None:
    file = stored.folder / "run.json"
    file.write_bytes(file.read_bytes()[:-3])


def of_another_run(stored: Stored) -> None:
    stored.edit_record(lambda record: record.update(run_id=ABSENT))


def no_record(stored: Stored) -> None:
    (stored.folder / "run.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (of_a_later_version, "cannot be read (ValidationError)"),
        (cut_record, "cannot be read (ValidationError)"),
        (of_another_run, f"is that of run {ABSENT}"),
        (no_record, "is missing"),
    ],
)
def test_a_damaged_record(stored: Stored, damage: Callable[[Stored], None], said: str) -> None:
    """Everything that needs the record is Broken with the same reason, but the outbox is still read."""
    stored.write_outbox(opened(stored.run_id))
    damage(stored)
    view = stored.view
    assert isinstance(view.record, Broken)
    assert view.record.startswith(f"{stored.folder / 'run.json'} {said}; move the folder away: ")
    found = [view.ref("sft"), view.artifact("sft"), view.maker("sft"), view.entry()]
    assert found == [view.record] * 4 and all(isinstance(each, Broken) for each in found)
    assert view.artifacts() == {}
    assert isinstance(view.replay, Replay)


@pytest.mark.parametrize("run_id", [ABSENT, "no run id", "../elsewhere"])
def test_a_run_that_there_is_not(stored: Stored, run_id: str) -> None:
    view = RunView(stored.workspace, run_id)
    assert type(view.record) is Missing and "`vantage status` lists the runs" in view.record
    assert type(view.replay) is Missing and type(view.history) is Missing
    assert type(view.entry()) is Missing


# Outboxes


def test_curves_and_attempts_of_a_step(stored: Stored) -> None:
    """The step has an attempt from 2 s to 5 s, and one from 6 s, whose process died after its measurement at 8.5 s."""
    stored.write_outbox(
        opened(stored.run_id),
        begun(1, 2000),
        measured(("nll", 2.0, 3000, 1), ("nll", 1.5, 4000, 2)),
        ended(5000),
        {**opened(stored.run_id), "origin": {"mlflow.user": "eve"}},
        begun(2, 6000),
        measured(("nll", 1.25, 8500, 3), ("speed", 7.0, 7000, 3)),
        tail=b'{"operation": "finish_run", "ti',
    )
    history = stored.view.history
    assert isinstance(history, RunHistory)
    assert history.curves == {
        "sft": {"nll": [(1, 3000, 2.0), (2, 4000, 1.5), (3, 8500, 1.25)], "speed": [(3, 7000, 7.0)]}
    }
    assert [(each.number, each.seconds) for each in history.attempts["sft"]] == [(1, 3.0), (2, 2.5)]
    assert Attempt(3, started=9000).seconds == 0.0, "it has measured nothing, and its end is not known"
    assert (history.openings, history.origin) == (2, {"mlflow.user": "eve"})
    assert history.published == {}
    replay = stored.view.replay
    assert isinstance(replay, Replay) and len(replay.lines) == 7


@pytest.mark.parametrize(
    ("lines", "said", "cause"),
    [
        (b"{\n", "line 2 of the outbox is no operation", "Expecting property name enclosed in double quotes"),
        (b'{"operation": "nonsense"}\n', "line 2 of the outbox is no operation", "1 validation error"),
        (
            json.dumps(ended(1)).encode() + b"\n",
            "line 2 of the outbox is no operation",
            "stage 'sft' was never opened",
        ),
        (
            json.dumps(measured(("nll", 2.0, 3000, 1))).encode()[:-9] + b"\n",
            "line 2 of the outbox is no operation",
            "Expecting",
        ),
    ],
)
def test_an_outbox_with_a_damaged_line(stored: Stored, lines: bytes, said: str, cause: str) -> None:
    stored.write_outbox(opened(stored.run_id), tail=lines)
    view = stored.view
    assert isinstance(view.replay, Broken) and isinstance(view.history, Broken)
    assert view.replay.startswith(f"run {stored.run_id}: {said} (") and cause in view.replay
    assert view.history.startswith(f"ledger/outbox.jsonl of run {stored.run_id} cannot be read ({cause}")
    assert "\n" not in view.history
    with pytest.raises(DamagedDiagnosis) as raised:
        _curves(view, "policy")
    assert str(raised.value) == f"{view.history}; look for the curves of policy in MLflow"


def test_an_outbox_of_another_run_or_of_nothing(stored: Stored) -> None:
    stored.write_outbox(opened(ABSENT))
    assert isinstance(stored.view.replay, Broken)
    assert stored.view.replay == Broken(f"run {stored.run_id}: the outbox is that of run {ABSENT}")
    stored.write_outbox()
    assert isinstance(stored.view.replay, Broken) and isinstance(stored.view.history, Broken)
    assert stored.view.replay == Broken(f"run {stored.run_id}: the outbox is empty")
    assert stored.view.history == Broken(
        f"ledger/outbox.jsonl of run {stored.run_id} cannot be read (the outbox is empty)"
    )


def test_an_outbox_that_is_no_file(stored: Stored) -> None:
    stored.outbox.mkdir(parents=True)
    assert stored.view.replay == Broken(f"run {stored.run_id}: its outbox cannot be read (Is a directory)")
    assert isinstance(stored.view.replay, Broken) and isinstance(stored.view.history, Broken)


def test_an_outbox_that_is_not_there(stored: Stored) -> None:
    found = stored.view.replay
    assert type(found) is Missing and found == f"run {stored.run_id}: it has no outbox"
    assert stored.view.history == found and type(stored.view.history) is Missing
    stored.edit_record(lambda record: record.update(status="removed"))
    removed = stored.view.replay
    assert type(removed) is Missing
    assert removed == f"run {stored.run_id}: its outbox went with it, when `vantage gc` removed the run"


# The run as its ledger knows it


def test_the_entry_of_a_run_has_the_steps_that_are_stored(stored: Stored) -> None:
    stored.ref_file("data.prompts").unlink()
    entry = stored.view.entry()
    assert isinstance(entry, RunEntry)
    assert {step: each.artifact and each.artifact.digest for step, each in entry.stages.items()} == {
        step: stored.digest(step) for step in ("model", "data.demonstrations", "sft", "evaluation")
    }
    read = {
        step: {role: given.stage for role, given in each.inputs.items()}
        for step, each in entry.stages.items()
    }
    assert read["sft"] == {"init": "model", "data": "data.demonstrations"}
    assert read["evaluation"] == {"candidate": "sft", "baseline": "model"}, "without its prompts"
    assert entry.stages["model"].source == "builtin:tiny"
    assert str(entry.stages["data.demonstrations"].source).endswith("demonstrations.jsonl")
    assert entry.stages["evaluation"].verdicts == stored.record.stages["evaluation"].verdicts != ()


# One damage, and what each caller says of it


def said_by_callers(stored: Stored) -> tuple[str, str, tuple[str, ...]]:
    """Return what the search for models, the search for signed artifacts, and the status say of sft."""
    with pytest.raises(DamagedModel) as model:
        model_of(stored.workspace, stored.record, "sft", ("policy",))
    with pytest.raises(NotStored) as signed:
        refs_of(stored.workspace, stored.record, ["sft"])
    damage = damage_of(stored.workspace, stored.record, verify=False)
    return str(model.value), str(signed.value), damage.get("sft", ())


def test_what_callers_say_of_a_missing_ref(stored: Stored) -> None:
    stored.ref_file("sft").unlink()
    what, key = f"sft of run {stored.run_id}", str(stored.record.stages["sft"].stage_key)
    assert said_by_callers(stored) == (
        f"the store has no artifact of {what} any longer; run the same recipe again, which makes it anew",
        f"the store has no artifact of {what} any longer; run the recipe again, which makes it anew",
        (f"the store has no artifact for its key {key[:12]} any longer",),
    )


def test_what_callers_say_of_a_damaged_ref(stored: Stored) -> None:
    file, what = stored.ref_file("sft"), f"sft of run {stored.run_id}"
    file.write_text("{}")
    assert said_by_callers(stored) == (
        f"{what} is damaged ({file}: cannot be read as a ref); run the same recipe again, which makes it anew",
        f"{what} is damaged ({file}: cannot be read as a ref); run the recipe again",
        (f"{file}: cannot be read as a ref",),
    )


def test_what_callers_say_of_an_artifact_of_another_digest(stored: Stored) -> None:
    file, what = stored.ref_file("sft"), f"sft of run {stored.run_id}"
    own, other = stored.digest("sft"), stored.digest("model")
    file.write_text(file.read_text().replace(own, other))
    assert said_by_callers(stored) == (
        f"{what} was computed again since, with other bits (its artifact was {own[:12]}, and is {other[:12]} now): name "
        f"the run that did, {stored.run_id}",
        f"{what} is {own[:12]} in the run's record and {other[:12]} in the store; it was made again by run "
        f"{stored.run_id}, or one of the two was edited: `vantage audit {stored.run_id}`",
        (),
    )

"""The one reader of a run: its record, the refs of its artifacts, and its outbox. Each is read once.

A part that cannot be read is returned as a value, ``Missing`` or ``Broken``, whose text contains the fault and the remedy.
The caller decides whether that is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from vantage.attempts.jobs import work_of
from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.operations import Input
from vantage.ledger.replay import DamagedOutbox, Replay, read_replay
from vantage.runs.answers import with_answers
from vantage.runs.history import RunHistory, history_of
from vantage.runs.record import REMOVED, RunRecord, StageRecord
from vantage.runs.run_records import OUTBOX
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.work import ModelImport, PrepareData
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.storage.refs import Ref

_AGAIN = "run the same recipe again, which makes it anew"


class Missing(str):
    """Reason why something does not exist, so that it cannot be checked."""


class NotMade(Missing):
    """Reason why an artifact does not exist: the run has not made or found it yet."""


class Replaced(Missing):
    """Reason why an artifact does not exist: its stage key has another one by now."""

    ref: Ref
    """Ref of the other artifact."""

    def __new__(cls, text: str, ref: Ref) -> Self:
        replaced = super().__new__(cls, text)
        replaced.ref = ref
        return replaced


class Broken(str):
    """Reason why something that exists differs from what was written, so that it is wrong."""

    cause: str
    """Message of the error beneath it, without a remedy; the whole text if there is no such error."""

    def __new__(cls, text: object, *, cause: str = "") -> Self:
        broken = super().__new__(cls, text)
        broken.cause = cause or str(broken)
        return broken


@dataclass(frozen=True)
class Maker:
    """The run that made an artifact, and its step."""

    run: "RunView"
    step: str


class RunView:
    """A run as it is stored now; nothing is written, and no file of an artifact is read."""

    def __init__(self, workspace: Workspace, run_id: str) -> None:
        self.run_id = run_id
        self._workspace = workspace
        self._refs: dict[str, Ref | Missing | Broken] = {}
        self._makers: dict[str, RunView] = {run_id: self}

    @classmethod
    def of(cls, workspace: Workspace, record: RunRecord) -> Self:
        """Return the view of a run whose record was read already."""
        view = cls(workspace, record.run_id)
        view.record = record
        return view

    @cached_property
    def record(self) -> RunRecord | Missing | Broken:
        """Content of ``run.json``, with the answers that people have given since it was written."""
        records = self._workspace.records
        try:
            return with_answers(self._workspace, records.read(self.run_id))
        except (RunError, OSError) as error:
            return Broken(error) if self.run_id in records.ids() else Missing(error)

    # Artifacts

    def ref(self, step: str) -> Ref | Missing | Broken:
        """Return the ref of the artifact that the record names; it is not checked that the store has its files."""
        stage = self._stage(step)
        if not isinstance(stage, StageRecord):
            return stage
        if stage.digest is None:
            return self._not_made(step)
        found = self._ref_of_key(step)
        if isinstance(found, Ref) and found.artifact.digest != stage.digest:
            return Replaced(
                f"{self._name(step)} was computed again since, with other bits (its artifact was {stage.digest[:12]}, "
                f"and is {found.artifact.digest[:12]} now): name the run that did, {found.run_id}",
                found,
            )
        return found

    def artifact(self, step: str) -> Artifact | Missing | Broken:
        """Return the artifact that the record names, if the store has its files; their bytes are not checked."""
        found, storage = self.ref(step), self._workspace.existing_storage
        ref = found.ref if isinstance(found, Replaced) else found
        if isinstance(ref, Ref) and (storage is None or not storage.has_object(ref.artifact.digest)):
            return self._gone(step)
        return found.artifact if isinstance(found, Ref) else found

    def artifacts(self) -> dict[str, Artifact]:
        """Return step → artifact, for the steps for which ``ref`` finds one."""
        if not isinstance(record := self.record, RunRecord):
            return {}
        refs = {step: self.ref(step) for step in record.stages}
        return {step: ref.artifact for step, ref in refs.items() if isinstance(ref, Ref)}

    def maker(self, step: str) -> Maker | Missing | Broken:
        """Return the run that made the artifact that the store has under the step's key; it may be this run."""
        ref = self._ref_of_key(step)
        if not isinstance(ref, Ref):
            return ref
        run = self._makers.setdefault(ref.run_id, RunView(self._workspace, ref.run_id))
        if not isinstance(record := run.record, RunRecord):
            return record
        key = ref.artifact.stage_key
        steps = [name for name, stage in record.stages.items() if stage.stage_key == key]
        if not steps:
            return Missing(
                f"run {run.run_id} made {self._name(step)}, and its record has no step of this key"
            )
        return Maker(run, steps[0])

    def entry(self) -> RunEntry | Missing | Broken:
        """Return the run as its ledger knows it, made from ``run.json`` and the store, without asking MLflow.

        The entry has the steps whose artifacts the store still names, each with its inputs among these steps.
        """
        if not isinstance(record := self.record, RunRecord):
            return record
        artifacts, reads = self.artifacts(), dependencies(record.recipe)
        return RunEntry(
            run_id=record.run_id,
            experiment=record.recipe.recipe,
            name=record.recipe.recipe,
            stages={
                step: _stage_entry(record, step, artifacts, reads[step])
                for step in ordered_steps(record.recipe)
                if step in artifacts
            },
            approvals=tuple(record.approvals),
            generation=record.recipe.generation.model_dump(mode="json"),
            licenses=dict(record.recipe.licenses),
        )

    # The outbox

    @cached_property
    def history(self) -> RunHistory | Missing | Broken:
        """Curves, attempts and publications in the outbox."""
        replay = self.replay
        if isinstance(replay, Broken):
            said = f"{OUTBOX} of run {self.run_id} cannot be read ({replay.cause})"
            return Broken(said, cause=replay.cause)
        return replay if isinstance(replay, Missing) else history_of(each.operation for each in replay.lines)

    @cached_property
    def replay(self) -> Replay | Missing | Broken:
        """The outbox, operation by operation; Broken also if the operations cannot have happened in this order."""
        try:
            data = self._workspace.records.read_outbox(self.run_id)
        except RunError as error:
            return Missing(error)
        except OSError as error:
            cause = str(error.strerror or error)
            return Broken(f"run {self.run_id}: its outbox cannot be read ({cause})", cause=cause)
        if data is None:
            removed = isinstance(self.record, RunRecord) and self.record.status == REMOVED
            why = (
                "its outbox went with it, when `vantage gc` removed the run"
                if removed
                else "it has no outbox"
            )
            return Missing(f"run {self.run_id}: {why}")
        try:
            return read_replay(data, run_id=self.run_id)
        except DamagedOutbox as error:
            return Broken(f"run {self.run_id}: {error}", cause=_first_line(error.__cause__ or error))

    # Implementation

    def _stage(self, step: str) -> StageRecord | Missing | Broken:
        """Return the record of a step, or the reason why it has no stage key."""
        if not isinstance(record := self.record, RunRecord):
            return record
        stage = record.stages.get(step)
        return self._not_made(step) if stage is None or stage.stage_key is None else stage

    def _ref_of_key(self, step: str) -> Ref | Missing | Broken:
        """Return the ref under the step's stage key, whatever its digest."""
        if step not in self._refs:
            self._refs[step] = self._read_ref(step)
        return self._refs[step]

    def _read_ref(self, step: str) -> Ref | Missing | Broken:
        stage, storage = self._stage(step), self._workspace.existing_storage
        if not isinstance(stage, StageRecord):
            return stage
        try:
            ref = None if storage is None else storage.find(str(stage.stage_key))
        except ValueError as error:  # the ref is damaged, or the record's text is no stage key
            return Broken(f"{self._name(step)} is damaged ({error}); {_AGAIN}", cause=str(error))
        return self._gone(step) if ref is None else ref

    def _not_made(self, step: str) -> NotMade:
        return NotMade(
            f"{self._name(step)} has no artifact yet; `vantage status {self.run_id}` shows how far it is"
        )

    def _gone(self, step: str) -> Missing:
        return Missing(f"the store has no artifact of {self._name(step)} any longer; {_AGAIN}")

    def _name(self, step: str) -> str:
        return f"{step} of run {self.run_id}"


def _stage_entry(
    record: RunRecord, step: str, artifacts: Mapping[str, Artifact], reads: Mapping[str, str]
) -> StageEntry:
    """Return a step as the ledger knows it. ``reads``: role → the step that it reads."""
    done, work = record.stages[step], work_of(record.recipe, step)
    source = work.data.source if isinstance(work, PrepareData) else None
    return StageEntry(
        name=step,
        kind=work.kind,
        stage_key=artifacts[step].stage_key,
        inputs={
            role: Input(stage=other, artifact=artifacts[other])
            for role, other in reads.items()
            if other in artifacts
        },
        outcome=done.status,
        artifact=artifacts[step],
        source=work.model.source if isinstance(work, ModelImport) else source,
        source_sha256=done.key_parts.get("inputs", {}).get("source"),
        verdicts=done.verdicts,
        loosened=done.loosened,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

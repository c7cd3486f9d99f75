"""Read what an audit compares: the store, the runs' records and outboxes, and MLflow. Each is read once."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from vantage.ledger import tracking
from vantage.ledger.replay import Replay
from vantage.runs.loosened import EarlierVerdicts
from vantage.runs.record import RunRecord
from vantage.runs.run_ids import run_ids
from vantage.runs.view import Broken, Missing, RunView
from vantage.runs.workspace import Workspace
from vantage.schemas.records.audit import Check
from vantage.schemas.steps import dependencies
from vantage.storage.environments import read_environment
from vantage.storage.hashed_files import HashClock
from vantage.storage.measured_file import Sealed
from vantage.storage.read_only import Hashed, ReadOnlyStore, hash_objects, open_read_only, read_refs
from vantage.storage.refs import DamagedRef, Ref
from vantage.storage.removed import Removal, find_removed

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun
    from vantage.ledger.to_mlflow.audited_runs import AuditedServer
    from vantage.signing.key_validity import KeyValidity
    from vantage.signing.keys import PublicKey

_Found = TypeVar("_Found")


def check_of(subject: str, problem: Missing | Broken) -> Check:
    """Return the check that could not be made, with its problem."""
    return Check(
        subject=subject, outcome="wrong" if isinstance(problem, Broken) else "unchecked", detail=problem
    )


class Evidence:
    """Everything that an audit reads; use it in a ``with`` block."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        required_keys: "Sequence[PublicKey]" = (),
        decision_keys: "Sequence[PublicKey]" = (),
        hashed: Callable[[int], None] = lambda count: None,
    ) -> None:
        """
        Args:
            workspace: what is audited; nothing in it is written.
            required_keys: keys by which every artifact must be signed.
            decision_keys: further keys that may have signed decisions. With either, one key must have signed each.
            hashed: called with the number of objects that are about to be hashed.
        """
        self.workspace = workspace
        self.required_keys = tuple(required_keys)
        self.decision_keys = (*self.required_keys, *decision_keys)
        self.clock = HashClock()
        self._report_hashing = hashed
        self._refs: dict[str, Ref | Broken | None] = {}
        self._sealed: dict[str, Sealed | Missing | Broken] = {}
        self._runs: dict[str, RunView] = {}
        self._hashed: dict[str, Hashed] = {}
        self._mlflow_runs: dict[str, dict[str | None, list[MlflowRun]] | Missing] = {}
        self._kept: dict[object, Any] = {}
        self._stack = ExitStack()
        self.unanswered: Missing | None = None
        """Reason why MLflow has stopped answering; None: it has answered every question."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def once(self, name: object, find: Callable[[], _Found]) -> _Found:
        """Return the result of ``find``, which is called once for this name."""
        if name not in self._kept:
            self._kept[name] = find()
        return cast(_Found, self._kept[name])

    # The store

    @cached_property
    def store(self) -> ReadOnlyStore | None:
        """The workspace's artifacts; None: it has none."""
        workspace = self.workspace
        if workspace.uri:
            return open_read_only(f"{workspace.uri}/store")
        return open_read_only(str(workspace.store)) if workspace.store.is_dir() else None

    def ref(self, stage_key: str) -> Ref | Broken | None:
        """Return the ref of a stage key; None: there is none."""
        if stage_key not in self._refs:
            try:
                self._refs[stage_key] = None if self.store is None else self.store.ref(stage_key)
            except (DamagedRef, ValueError) as error:
                self._refs[stage_key] = Broken(error)
        return self._refs[stage_key]

    @cached_property
    def refs_of(self) -> dict[str, list[Ref]]:
        """Content digest → every ref that names it."""
        found: dict[str, list[Ref]] = {}
        for ref in read_refs(self.store).values() if self.store is not None else ():
            found.setdefault(ref.artifact.digest, []).append(ref)
        return found

    def has_object(self, digest: str) -> bool:
        """Return whether the store has an object of this digest."""
        return self.store is not None and self.store.has_object(digest)

    def earlier_verdicts(self, record: RunRecord) -> EarlierVerdicts:
        """Return the closed gates of the runs that began before this one, of those whose records can be read."""

        def records() -> list[RunRecord]:
            found = (self.record(run_id) for run_id in self.run_ids)
            return [each for each in found if isinstance(each, RunRecord)]

        return self.once(("earlier verdicts", record.run_id), lambda: EarlierVerdicts(record, records))

    def environment_problem(self, digest: str) -> Missing | Broken | None:
        """Return the problem of the list of distributions that were installed for a computation; None: it matches its
        digest."""
        return self.once(("environment", digest), lambda: self._read_environment(digest))

    def _read_environment(self, digest: str) -> Missing | Broken | None:
        try:
            found = None if self.store is None else read_environment(self.store, digest)
        except (ValueError, OSError) as error:
            return Broken(error)
        return Missing("the list of what was installed is not in the store") if found is None else None

    def sealed(self, digest: str) -> Sealed | Missing | Broken:
        """Return the measurements of an artifact, from its own files."""
        if digest not in self._sealed:
            self._sealed[digest] = self._read_sealed(digest)
        return self._sealed[digest]

    def hash_objects(self, digests: list[str]) -> None:
        """Read every byte of these objects, side by side, each once."""
        wanted = [each for each in dict.fromkeys(digests) if each not in self._hashed]
        self._report_hashing(len(wanted))
        if self.store is not None:
            self._hashed |= hash_objects(self.store, wanted, self.clock)

    def hashed(self, digest: str) -> Hashed:
        """Return the result of reading every byte of an object; ``hash_objects`` must come first."""
        return self._hashed[digest]

    def removal(self, digest: str) -> Removal | Broken | None:
        """Return the record of a removed artifact; None: there is none."""
        return self.once(("removal", digest), lambda: self._read_removal(digest))

    def _read_removal(self, digest: str) -> Removal | Broken | None:
        try:
            return None if self.store is None else find_removed(self.store, digest)
        except (ValueError, OSError) as error:
            return Broken(error)

    def _read_sealed(self, digest: str) -> Sealed | Missing | Broken:
        if self.store is None or not self.store.has_object(digest):
            return Missing(f"the store has no artifact {digest[:12]}")
        try:
            return self.store.sealed(digest)
        except (ValueError, OSError) as error:
            return Broken(error)

    @cached_property
    def key_validity(self) -> "KeyValidity | str":
        """Return the validity of keys by the workspace's policy; a text: the reason why it cannot be read."""
        from vantage.signing.policy import key_validity

        try:
            return key_validity(self.workspace)
        except (ValueError, OSError) as error:
            return f"when keys are valid is not known: {error}"

    # Runs

    @cached_property
    def run_ids(self) -> list[str]:
        """The ids of all runs of the workspace."""
        return run_ids(self.workspace)

    def view(self, run_id: str) -> RunView:
        """Return a run whose record can be read."""
        run = self._run(run_id)
        assert isinstance(run, RunView), "its record was read"
        return run

    def record(self, run_id: str) -> RunRecord | Missing | Broken:
        """Return ``run.json`` of a run."""
        run = self._run(run_id)
        return run if isinstance(run, Missing) else run.record

    def reads(self, record: RunRecord, step: str) -> dict[str, str]:
        """Return role → step that a step reads, by the recipe in a run's record; empty: it has no such step."""
        return self.once(("reads", record.run_id), lambda: dependencies(record.recipe)).get(step, {})

    def replay(self, run_id: str) -> Replay | Missing | Broken:
        """Return the run's outbox, read again."""
        run = self._run(run_id)
        return run if isinstance(run, Missing) else run.replay

    def _run(self, run_id: str) -> RunView | Missing:
        if run_id not in self.run_ids:
            return Missing(f"{self.workspace.address} has no run {run_id}")
        if run_id not in self._runs:
            self._runs[run_id] = RunView(self.workspace, run_id)
        return self._runs[run_id]

    # MLflow

    @cached_property
    def server(self) -> "AuditedServer":
        """Access to MLflow; the first question connects to it."""
        tracking.set_up_client()
        from vantage.ledger.to_mlflow.audited_runs import AuditedServer  # imports MLflow

        address = tracking.address(None, self.workspace.root)
        return self._stack.enter_context(AuditedServer(address, workspace=self.workspace.root))

    def ask(self, question: Callable[["AuditedServer"], _Found]) -> _Found | Missing:
        """Return MLflow's answer; Missing: it does not answer."""
        if self._no_database:
            return Missing(self._no_database)
        from vantage.ledger.to_mlflow.audited_runs import Unanswered  # imports MLflow

        try:
            return question(self.server)
        except Unanswered as error:
            self.unanswered = Missing(error)
            return self.unanswered

    def mlflow_runs(self, experiment: str, run_id: str) -> "dict[str | None, list[MlflowRun]] | Missing":
        """Return stage → its runs in MLflow; the key None is for the parent run."""
        if run_id not in self._mlflow_runs:
            self._mlflow_runs[run_id] = self.ask(lambda server: server.runs(experiment, run_id))
        return self._mlflow_runs[run_id]

    @cached_property
    def _no_database(self) -> str:
        """Reason why there is no MLflow to ask, found without importing MLflow; empty: there may be one."""
        address = tracking.address(None, self.workspace.root)
        if tracking.is_missing_database(address):
            return f"there is no MLflow database at {tracking.without_password(address)}"
        return ""

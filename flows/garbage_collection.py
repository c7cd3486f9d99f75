"""``vantage gc``: remove what no run, no registered model and no running process needs, while pipelines may run.

A removed run leaves its ``run.json`` with status ``removed``, as the record of its stages and publications. A removed
artifact leaves its manifest, metrics and refs (``vantage.storage.removed``). An attempt writes its stage key into
``run.json`` before it holds the key, and a collection holds a key before it reads the runs
(``vantage.storage.garbage``).
"""

import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from vantage.ledger.outbox import Outbox
from vantage.runs.needed_artifacts import needed_artifacts
from vantage.runs.origin import user
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.run import damaged_runs, inactive_runs, is_active, read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.storage.garbage import HOLDER, Garbage, Leftover, Needed
from vantage.storage.refs import Ref
from vantage.storage.removed import Cause
from vantage.storage.storage import garbage_of

QUARANTINE_SECONDS = 7 * 86400.0
"""Seconds that damaged files are kept for inspection."""

Kind = Literal["run", "ref", "object", "scratch", "messages", "staging", "quarantine", "left over"]


@dataclass(frozen=True)
class Removal:
    """One thing that was removed, or would be removed."""

    kind: Kind
    name: str
    num_bytes: int = 0


@dataclass(frozen=True)
class Collection:
    """The result of a collection."""

    removed: tuple[Removal, ...]
    in_use: tuple[str, ...]
    """Things that no run needs, but that a process works on, or has begun to use during the collection."""
    unsent: tuple[str, ...]
    """Runs that would be removed, but whose records MLflow has not received yet."""
    num_records: int = field(default=0, compare=False)
    """Removed artifacts of which the storage keeps manifest, metrics and refs, including those of earlier collections."""
    record_bytes: int = field(default=0, compare=False)
    """Bytes of the kept manifests, metrics and refs."""

    @property
    def num_bytes(self) -> int:
        return sum(removal.num_bytes for removal in self.removed)

    def as_json(self) -> dict[str, Any]:
        """Return the output of ``gc --json``."""
        removed = [asdict(removal) for removal in self.removed]
        return {
            "bytes": self.num_bytes,
            "removed": removed,
            "in_use": self.in_use,
            "unsent": self.unsent,
            "records": {"artifacts": self.num_records, "bytes": self.record_bytes},
        }


def collect(
    workspace: Workspace,
    *,
    dry_run: bool = False,
    keep_last: int | None = None,
    older_than: float | None = None,
) -> Collection:
    """Remove everything that is not needed.

    Args:
        workspace: the workspace with the runs and the storage.
        dry_run: only find out what would be removed.
        keep_last: remove runs of a recipe beyond this number of its newest runs; None: the number does not matter.
        older_than: remove runs whose record has not changed for this many seconds; None: the age does not matter. With
            neither, no run is removed; with both, only runs to which both apply.

    Raises:
        RunError: a run cannot be read, so its needs are not known.
    """
    runs = _read_all(workspace)
    chosen = list(_outdated(workspace, runs, keep_last=keep_last, older_than=older_than))
    unsent = [run_id for run_id in chosen if _is_unsent(workspace, run_id)]
    if not dry_run:
        chosen, unsent = _remove_runs(workspace, chosen)
    chosen = sorted(set(chosen) - set(unsent))
    removals = [Removal("run", run_id) for run_id in chosen]
    in_use: list[str] = []
    storage = workspace.existing_storage
    records: Mapping[str, int] = {}
    if storage is not None:
        garbage = garbage_of(storage, _cause(keep_last=keep_last, older_than=older_than))
        collector = _Collector(workspace, garbage, set(chosen), dry_run=dry_run)
        removals += collector.collect(QUARANTINE_SECONDS if older_than is None else older_than)
        in_use = collector.in_use
        records = garbage.records()
    return Collection(
        tuple(removals),
        tuple(in_use),
        tuple(unsent),
        num_records=len(records),
        record_bytes=sum(records.values()),
    )


def _cause(*, keep_last: int | None, older_than: float | None) -> Cause:
    """Return the reason of a removal, as it is recorded with the removed artifacts."""
    options = [] if keep_last is None else [f"--keep-last {keep_last}"]
    options += [] if older_than is None else [f"--older-than {older_than:g}s"]
    return Cause(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        why=f"no kept run, no registered model and nobody at work needed it ({' '.join([HOLDER, *options])})",
        by=f"{user()} on {socket.gethostname()}",
    )


class _Collector:
    """One collection of a storage."""

    def __init__(self, workspace: Workspace, garbage: Garbage, chosen: set[str], *, dry_run: bool) -> None:
        """Hold the storage to collect from; ``chosen``: runs that count as removed, even if ``dry_run`` leaves them."""
        self._workspace = workspace
        self._garbage = garbage
        self._chosen = chosen
        self._dry_run = dry_run
        self.in_use: list[str] = []

    def collect(self, quarantine_seconds: float) -> list[Removal]:
        """Remove refs, then the objects that no ref points to any longer, then everything else."""
        removals, busy = self._pass(quarantine_seconds)
        if busy and self._garbage.patience_seconds and not self._dry_run:
            time.sleep(self._garbage.patience_seconds)  # leases of dead holders have ended by now
            more, busy = self._pass(quarantine_seconds)
            removals += more
        self.in_use = busy
        return removals

    def _pass(self, quarantine_seconds: float) -> tuple[list[Removal], list[str]]:
        removals: list[Removal] = []
        busy: list[str] = []
        refs = self._garbage.refs()
        sizes = self._garbage.objects()
        unneeded = set(refs) - self._needed_keys()
        gone = (
            unneeded if self._dry_run else set(self._garbage.remove_refs(unneeded, needed=self._needed_keys))
        )
        removals += (Removal("ref", key) for key in sorted(gone))
        busy += (f"refs/{key}" for key in sorted(unneeded - gone))
        left = {key: ref for key, ref in self._garbage.refs().items() if key not in gone}
        needed = needed_artifacts(self._runs(), left).digests | _digests(left)
        for digest in sorted(set(sizes) - needed):
            if self._dry_run or self._garbage.remove_object(
                digest, needed=lambda: needed | _digests(self._garbage.refs())
            ):
                removals.append(Removal("object", digest, sizes[digest]))
            else:
                busy.append(f"objects/{digest}")
        for leftover in self._leftovers(quarantine_seconds):
            if self._dry_run or self._garbage.remove_leftover(leftover, needed=self._needed_by(leftover)):
                removals.append(Removal(_kind_of(leftover), leftover.name, leftover.num_bytes))
            else:
                busy.append(leftover.name)
        return removals, busy

    def _leftovers(self, quarantine_seconds: float) -> Iterator[Leftover]:
        needed, of_active_runs = self._needed_keys(), self._keys_of_active_runs()
        for leftover in self._garbage.leftovers():
            is_new = leftover.age_seconds is not None and leftover.age_seconds < quarantine_seconds
            keys = of_active_runs if leftover.is_committed else needed
            if not is_new and not (leftover.is_scratch and leftover.stage_key in keys):
                yield leftover

    def _needed_by(self, leftover: Leftover) -> Needed:
        """Return the keys whose leftovers of this kind must stay."""
        return self._keys_of_active_runs if leftover.is_committed else self._needed_keys

    def _needed_keys(self) -> frozenset[str]:
        return needed_artifacts(self._runs(), self._garbage.refs()).stage_keys

    def _keys_of_active_runs(self) -> frozenset[str]:
        """Return the stage keys of the runs that are being executed, which may still read a journal on this machine."""
        kept = (run for run in self._runs() if run.status != REMOVED)
        active = [run for run in kept if is_active(self._workspace, run.run_id)]
        return needed_artifacts(active, {}).stage_keys

    def _runs(self) -> list[RunRecord]:
        records = _read_all(self._workspace)
        if not self._dry_run:
            return records
        as_removed = {"status": REMOVED}
        return [run.model_copy(update=as_removed) if run.run_id in self._chosen else run for run in records]


def _digests(refs: Mapping[str, Ref]) -> frozenset[str]:
    return frozenset(ref.artifact.digest for ref in refs.values())


def _read_all(workspace: Workspace) -> list[RunRecord]:
    if damaged := damaged_runs(workspace):
        raise RunError(
            f"nothing is removed, because what this run needs is not known: {damaged[0]} (then its artifacts are removed, "
            "unless another run needs them)"
        )
    return read_runs(workspace)


def _outdated(
    workspace: Workspace, records: Sequence[RunRecord], *, keep_last: int | None, older_than: float | None
) -> Iterator[str]:
    """Yield ids of runs to remove: for each recipe those beyond the newest ``keep_last``, and older than ``older_than``."""
    if (keep_last is None and older_than is None) or not records:
        return
    of_recipe: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:  # the newest record comes first
        if record.status != REMOVED:
            of_recipe[record.recipe.recipe].append(record)
    ages = workspace.records.ages()
    for same_recipe in of_recipe.values():
        for record in same_recipe[keep_last or 0 :]:
            is_old = older_than is None or ages[record.run_id] >= older_than
            if is_old and not is_active(workspace, record.run_id):
                yield record.run_id


def _is_unsent(workspace: Workspace, run_id: str) -> bool:
    """Return whether MLflow lacks something of the run; the working copy of another machine is not checked."""
    return Outbox(workspace.folder(run_id) / "ledger").is_unsent()


def _remove_runs(workspace: Workspace, chosen: Iterable[str]) -> tuple[list[str], list[str]]:
    """Mark runs as removed, and remove their logs; returns the removed runs, and the runs that MLflow has not received.

    A run that somebody has resumed meanwhile is in neither list.
    """
    wanted = set(chosen)
    removed, unsent = [], []
    for run in inactive_runs(workspace, lambda record: record.run_id in wanted):
        run_id = run.record.run_id
        if _is_unsent(workspace, run_id):
            unsent.append(run_id)
            continue
        run.update(status=REMOVED, used_keys={})
        workspace.records.remove_files(run_id)
        removed.append(run_id)
    return removed, sorted(unsent)


def _kind_of(leftover: Leftover) -> Kind:
    if leftover.name.startswith("messages/"):
        return "messages"
    if leftover.is_scratch:
        return "scratch"
    if leftover.stage_key is not None:
        return "staging"
    return "left over" if leftover.age_seconds is None else "quarantine"

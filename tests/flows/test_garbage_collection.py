"""`vantage gc` keeps what runs and registered models reach, and removes the rest, beside running pipelines."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_work import run_stage
from tests.support.orchestrated import attempt_all, orchestrated
from tests.support.real_runs import wait_for
from vantage.flows import garbage_collection
from vantage.flows.garbage_collection import Removal, collect
from vantage.ledger.outbox import Outbox
from vantage.runs.record import PublishedCopy, RunRecord, StageRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run, read_run, read_runs, recipe_digest
from vantage.runs.status import run_state
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.stage_key import stage_key
from vantage.storage.messages import messages_of, newest_number
from vantage.storage.refs import DamagedRef, Lookup
from vantage.storage.removed import Cause
from vantage.storage.storage import Storage
from vantage.storage.store import Store

pytestmark = pytest.mark.usefixtures("unsent")

RECIPE, _ = load_resolved("quickstart", [])


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def make(store: Storage, number: int, content: int, parents: dict[str, str]) -> Artifact:
    """Return an artifact whose key has this number."""
    parts = {"n": number}
    key = stage_key(parts)
    attempt = store.next_attempt(key)
    folder = store.staging_folder(key, attempt)
    (folder / "weights.bin").write_bytes(b"content %d" % content)
    description = {"kind": "policy", "parents": parents, "metrics": {}, "tokenizer_digest": "b" * 64}
    return store.commit(
        folder,
        stage_key=key,
        attempt=attempt,
        run_id="r",
        description=description,
        key_parts=parts,
        provenance={},
    )


def write_run(
    workspace: Workspace,
    number: int,
    *,
    recipe: str = "quickstart",
    stages: dict[str, StageRecord] | None = None,
    used_keys: dict[str, str] | None = None,
    copies: dict[str, PublishedCopy] | None = None,
) -> str:
    """Return a run that has ended."""
    named = RECIPE.model_copy(update={"recipe": recipe})
    run_id = f"{number:04d}-{recipe}-{number:06x}"
    record = RunRecord(
        run_id=run_id,
        number=number,
        recipe_digest=recipe_digest(named),
        recipe=named,
        source=recipe,
        status="completed",
        stages=stages or {},
        used_keys=used_keys or {},
        copies=copies or {},
        started="",
    )
    folder = workspace.folder(run_id)
    (folder / "logs").mkdir(parents=True)
    (folder / "run.json").write_text(record.model_dump_json())
    return run_id


# Nothing that is reached is removed: artifacts, runs and registered models are drawn at random


@dataclass(frozen=True)
class Made:
    content: int
    parents: frozenset[int]


@dataclass(frozen=True)
class Ran:
    recipe: str
    stages: frozenset[int]
    used: frozenset[int]
    published: frozenset[int]


@st.composite
def workspaces(draw: st.DrawFn) -> tuple[list[Made], list[Ran], int | None]:
    count = draw(st.integers(1, 7))
    made = [
        Made(draw(st.integers(0, 4)), frozenset(draw(st.sets(st.integers(0, number - 1), max_size=2))))
        if number
        else Made(0, frozenset())
        for number in range(count)
    ]
    some = st.frozensets(st.integers(0, count - 1), max_size=3)
    few = st.frozensets(st.integers(0, count - 1), max_size=1)
    ran = [
        Ran(draw(st.sampled_from(["one", "two"])), draw(some), draw(few), draw(few))
        for _ in range(draw(st.integers(0, 4)))
    ]
    return made, ran, draw(st.sampled_from([None, 0, 1, 2]))


def build(root: Path, made: list[Made], ran: list[Ran]) -> tuple[Workspace, list[Artifact]]:
    workspace = Workspace(root)
    workspace.runs.mkdir(parents=True)
    store = Store(workspace.store)
    artifacts: list[Artifact] = []
    for number, each in enumerate(made):
        parents = {f"p{parent}": artifacts[parent].digest for parent in sorted(each.parents)}
        artifacts.append(make(store, number, each.content, parents))
    for number, run in enumerate(ran, 1):
        write_run(
            workspace,
            number,
            recipe=run.recipe,
            stages={
                f"s{each}": StageRecord(
                    status="completed", stage_key=artifacts[each].stage_key, digest=artifacts[each].digest
                )
                for each in run.stages
            },
            used_keys={f"s{each}": artifacts[each].stage_key for each in run.used},
            copies={
                f"m{each}": PublishedCopy(location="/x", digest=artifacts[each].digest)
                for each in run.published
            },
        )
    return workspace, artifacts


@pytest.mark.usefixtures("no_fsync")
@settings(max_examples=40)
@given(drawn=workspaces())
def test_nothing_that_is_reached_goes_and_everything_else_does(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[Made], list[Ran], int | None]
) -> None:
    made, ran, keep_last = drawn
    root = tmp_path_factory.mktemp("workspace")
    workspace, artifacts = build(root, made, ran)
    kept_runs = [
        run
        for number, run in enumerate(ran)
        if keep_last is None or sum(later.recipe == run.recipe for later in ran[number + 1 :]) < keep_last
    ]
    shown = collect(workspace, dry_run=True, keep_last=keep_last)
    assert set(Store(workspace.store).stage_keys()) == {artifact.stage_key for artifact in artifacts}
    done = collect(workspace, keep_last=keep_last)
    assert done == shown, "a dry run says what is removed"

    store = Store(workspace.store)
    left = {artifact.stage_key for artifact in artifacts if store.lookup(artifact.stage_key).ref is not None}
    objects = {path.name for path in (workspace.store / "objects").iterdir()}
    assert {artifact.digest for artifact in artifacts if artifact.stage_key in left} <= objects
    for run in kept_runs:
        for each in run.stages | run.used:
            assert artifacts[each].stage_key in left
            assert {artifacts[parent].digest for parent in made[each].parents} <= objects
    for run in ran:
        for each in run.published:
            assert has_lineage(artifacts[each].digest, made, artifacts, left, objects)
    may_stay = everything_upwards(made, artifacts, ran, kept_runs)
    assert left <= {artifacts[each].stage_key for each in may_stay}
    assert objects <= {artifacts[each].digest for each in may_stay}
    again = collect(workspace, keep_last=keep_last)
    assert again.removed == (), "once is enough"
    shutil.rmtree(root)


def has_lineage(
    digest: str,
    made: list[Made],
    artifacts: list[Artifact],
    left: set[str],
    objects: set[str],
    below: frozenset[str] = frozenset(),
) -> bool:
    """Return whether the object exists with a ref that names its inputs, and likewise for each input, down to the data."""
    makers = [number for number, each in enumerate(artifacts) if each.digest == digest]
    return (
        digest not in below
        and digest in objects
        and any(
            artifacts[maker].stage_key in left
            and all(
                has_lineage(artifacts[parent].digest, made, artifacts, left, objects, below | {digest})
                for parent in made[maker].parents
            )
            for maker in makers
        )
    )


def everything_upwards(
    made: list[Made], artifacts: list[Artifact], ran: list[Ran], kept: list[Ran]
) -> set[int]:
    """Return whatever can be reached at all, going from an object to everything that has ever made an equal one."""
    found = {each for run in kept for each in run.stages | run.used}
    found |= {each for run in ran for each in run.published}
    while True:
        equal = {artifacts[each].digest for each in found}
        more = found | {number for number, each in enumerate(artifacts) if each.digest in equal}
        more |= {parent for each in more for parent in made[each].parents}
        if more == found:
            return found
        found = more


# Runs


@pytest.fixture
def quick(tmp_path: Path, no_fsync: None) -> Workspace:
    workspace = Workspace(tmp_path / "quick")
    workspace.runs.mkdir(parents=True)
    return workspace


def stage_of(artifact: Artifact) -> dict[str, StageRecord]:
    record = StageRecord(status="completed", stage_key=artifact.stage_key, digest=artifact.digest)
    return {"sft": record}


def test_without_options_no_run_goes_and_only_what_none_needs(quick: Workspace) -> None:
    store = Store(quick.store)
    kept, gone = make(store, 1, 1, {}), make(store, 2, 2, {})
    (store.scratch_folder(gone.stage_key) / "journal.jsonl").write_text("12345")
    (store.scratch_folder(kept.stage_key) / "journal.jsonl").write_text("1")
    run_id = write_run(quick, 1, stages=stage_of(kept))
    size = sum(path.stat().st_size for path in store.folder(gone).iterdir())
    found = collect(quick)
    assert found.removed == (
        Removal("ref", gone.stage_key),
        Removal("object", gone.digest, size),
        Removal("scratch", f"scratch/{gone.stage_key}", 5),
    )
    assert found.num_bytes == size + 5
    assert read_run(quick, run_id).status == "completed"
    assert store.lookup(kept.stage_key).ref is not None
    assert store.has_scratch(kept.stage_key)


def test_a_removed_run_leaves_its_record_and_shows_no_damage(quick: Workspace) -> None:
    store = Store(quick.store)
    old, new = make(store, 1, 1, {}), make(store, 2, 2, {})
    first = write_run(quick, 1, stages=stage_of(old))
    second = write_run(quick, 2, stages=stage_of(new))
    other = write_run(quick, 3, recipe="another")
    found = collect(quick, keep_last=1)
    assert [removal for removal in found.removed if removal.kind == "run"] == [Removal("run", first)]
    assert [read_run(quick, each).status for each in (first, second, other)] == [
        "removed",
        "completed",
        "completed",
    ]
    view = run_state(quick, read_run(quick, first))
    assert (view.status, view.damage, view.contradictions) == ("removed", {}, ())
    assert read_run(quick, first).stages["sft"].digest == old.digest, "what it made is still recorded"
    assert not (quick.folder(first) / "logs").exists()
    with acquire_run(quick, RECIPE, source="quickstart") as run:
        assert run.record.number == 4, "it is not gone on with"


def test_age_and_number_both_have_to_apply(quick: Workspace) -> None:
    import os

    ids = [write_run(quick, number) for number in (1, 2, 3)]
    for run_id, days in zip(ids, (40, 20, 0), strict=True):
        then = time.time() - days * 86400
        os.utime(quick.folder(run_id) / "run.json", (then, then))
    day = 86400.0

    def removed(**options: float | None) -> list[str]:
        found = collect(quick, dry_run=True, **options)  # type: ignore[arg-type]
        return [removal.name for removal in found.removed]

    assert removed() == []
    assert removed(keep_last=2) == ids[:1]
    assert removed(older_than=10 * day) == ids[:2]
    assert removed(keep_last=1, older_than=30 * day) == ids[:1]
    assert removed(keep_last=0) == ids


def test_an_active_run_and_one_that_mlflow_has_not_got_stay(quick: Workspace) -> None:
    run_id = write_run(quick, 1)
    Outbox(quick.folder(run_id) / "ledger").append({"operation": "x"})
    with acquire_run(quick, RECIPE.model_copy(update={"seed": 5}), source="x") as active:
        assert collect(quick, dry_run=True, keep_last=0).removed == ()
        found = collect(quick, keep_last=0)
    assert found.unsent == (run_id,)
    assert found.removed == ()
    assert read_run(quick, active.record.run_id).status == "running"
    outbox = Outbox(quick.folder(run_id) / "ledger")
    outbox.mark_sent("a server", (outbox.folder / "outbox.jsonl").stat().st_size)
    assert Removal("run", run_id) in collect(quick, keep_last=0).removed


def test_with_a_run_that_cannot_be_read_nothing_is_removed(quick: Workspace) -> None:
    make(Store(quick.store), 1, 1, {})
    run_id = write_run(quick, 1)
    (quick.folder(run_id) / "run.json").write_text("{")
    with pytest.raises(RunError, match="nothing is removed, because what this run needs is not known"):
        collect(quick)
    assert len(Store(quick.store).stage_keys()) == 1


def test_what_a_resumed_run_names_meanwhile_stays(quick: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is written down between the first look at the runs and the removal."""
    artifact = make(Store(quick.store), 1, 1, {})
    hold = garbage_collection.garbage_of

    def garbage_of(store: Store, cause: Cause) -> object:
        garbage = hold(store, cause)
        remove = garbage.remove_refs

        def begin_and_remove(keys: object, *, needed: object) -> list[str]:
            write_run(quick, 1, used_keys={"sft": artifact.stage_key})
            return remove(keys, needed=needed)  # type: ignore[arg-type]

        monkeypatch.setattr(garbage, "remove_refs", begin_and_remove)
        return garbage

    monkeypatch.setattr(garbage_collection, "garbage_of", garbage_of)
    found = collect(quick)
    assert found.removed == ()
    assert found.in_use == (f"refs/{artifact.stage_key}",)


def test_damaged_things_stay_for_a_week_or_as_long_as_is_said(quick: Workspace) -> None:
    store = Store(quick.store)
    artifact = make(store, 1, 1, {})
    write_run(quick, 1, stages=stage_of(artifact))
    path = store.folder(artifact) / "weights.bin"
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    store.lookup(artifact.stage_key)
    aside = f"quarantine/{artifact.digest}.1"
    assert "quarantine" not in {removal.kind for removal in collect(quick).removed}
    assert collect(quick, older_than=3600.0).removed == ()
    assert [removal.name for removal in collect(quick, older_than=0.0, keep_last=1).removed] == [aside]
    assert not (quick.store / aside).exists()


def test_an_empty_workspace_has_nothing_to_remove(tmp_path: Path) -> None:
    assert collect(Workspace(tmp_path), keep_last=0).removed == ()


# Beside a running pipeline


class InThisProcess:
    """Computes fake stages without a process of their own."""

    def launch(self, job: StageJob, **_: object) -> StageResult:
        return run_stage(job)


@contextmanager
def collecting_all_the_time(workspace: Workspace) -> Iterator[list[int]]:
    """Collect in a thread, as fast as it goes, and keep no run that has ended."""
    done = threading.Event()
    counts: list[int] = []
    errors: list[Exception] = []

    def run() -> None:
        while not done.is_set():
            try:
                counts.append(len(collect(workspace, keep_last=0).removed))
                time.sleep(0.01)
            except Exception as error:  # for the test to see
                errors.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()
    assert errors == []


def let_it_collect(counts: list[int]) -> None:
    """Wait until all that is not needed has been removed four more times."""
    enough = len(counts) + 4
    wait_for(lambda: len(counts) >= enough, pause=0.01)


def test_a_key_is_written_down_before_it_is_looked_up(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that comes between a lookup and the use of its artifact reads the key in the run's record."""
    looked_up: list[tuple[str, bool]] = []
    lookup = Store.lookup

    def seen(store: Store, stage_key: str) -> Lookup:
        [record] = read_runs(workspace)
        looked_up.append((stage_key, stage_key in record.used_keys.values()))
        return lookup(store, stage_key)

    monkeypatch.setattr(Store, "lookup", seen)
    for _ in range(2):
        with orchestrated(workspace, recipe_file) as orchestrator:
            monkeypatch.setattr(orchestrator, "_launcher", InThisProcess())
            stages = attempt_all(orchestrator)
            assert {key for key, _ in looked_up} == {stage.stage_key for stage in stages.values()}
            assert all(is_written for _, is_written in looked_up)
        shutil.rmtree(orchestrator.run.folder)


def test_a_pipeline_keeps_all_that_it_made_or_reused_while_gc_runs(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage_collection, "_is_unsent", lambda workspace, run_id: False)
    workspace.runs.mkdir(parents=True)
    with collecting_all_the_time(workspace) as counts:
        for seed in (1, 1, 2):
            with orchestrated(workspace, recipe_file, f"stages.policy.seed={seed}") as orchestrator:
                monkeypatch.setattr(orchestrator, "_launcher", InThisProcess())
                stages = attempt_all(orchestrator)
                assert [
                    each for each in stages.items() if each[1].status not in ("completed", "reused")
                ] == []
                let_it_collect(counts)
                store = Store(workspace.store)
                for stage in stages.values():
                    assert stage.stage_key is not None
                    found = store.lookup(stage.stage_key)
                    assert found.ref is not None
                    assert found.ref.artifact.digest == stage.digest
                orchestrator.run.update(status="completed")
    assert len(counts) > 10
    collect(workspace, keep_last=0)
    assert {record.status for record in read_runs(workspace)} == {"removed"}
    assert Store(workspace.store).stage_keys() == []
    assert list((workspace.store / "objects").iterdir()) == []


def test_a_damaged_ref_reaches_nothing_and_is_left_to_the_next_lookup(quick: Workspace) -> None:
    store = Store(quick.store)
    artifact = make(store, 1, 1, {})
    (quick.store / "refs" / f"{artifact.stage_key}.json").write_text("{")
    assert [removal.kind for removal in collect(quick).removed] == ["object"]
    with pytest.raises(DamagedRef):
        store.find(artifact.stage_key)


def test_a_workspace_in_a_bucket_is_collected_like_one_in_a_folder(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    workspace = Workspace.at(bucket)
    artifacts = [make(workspace.storage, number, number, {}) for number in range(3)]
    ids = []
    for artifact in artifacts[:2]:
        with acquire_run(workspace, RECIPE, source="quickstart") as run:
            run.update(stages=stage_of(artifact), status="completed")
            log = run.folder / "logs" / "sft.log"
            log.parent.mkdir()
            log.write_text("a line")
            ids.append(run.record.run_id)
    there = Workspace.at(bucket)
    assert collect(there, older_than=3600.0, dry_run=True, keep_last=0).removed == (
        Removal("ref", artifacts[2].stage_key),
        Removal(
            "object",
            artifacts[2].digest,
            sum(file.stat().st_size for file in files_of(workspace, artifacts[2])),
        ),
    )
    assert there.records.read_log(ids[0], "sft") == b"a line"
    found = collect(there, keep_last=1)
    assert [removal.kind for removal in found.removed] == ["run", "ref", "ref", "object", "object"]
    assert (found.in_use, found.unsent) == ((), ())
    assert {read_run(there, run_id).status for run_id in ids} == {"removed", "completed"}
    assert there.records.read_log(ids[0], "sft") is None
    assert there.storage.inspect(artifacts[1].stage_key).ref is not None
    assert there.storage.inspect(artifacts[0].stage_key) == Lookup(None)
    assert collect(Workspace.at(bucket)).removed == ()


def test_local_scratch_of_a_committed_key_goes_when_no_active_run_reads_it(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    workspace = Workspace.at(bucket)
    storage = workspace.storage
    made, made_anew = make(storage, 1, 1, {}), make(storage, 2, 2, {})
    assert (
        storage.next_attempt(made_anew.stage_key) == 2
    )  # its object was damaged, and the new attempt was preempted
    never_made = stage_key({"n": 3})
    folders = {}
    for key in (made.stage_key, made_anew.stage_key, never_made):
        with storage.keep_copy(key, ("journal.jsonl",)):
            folders[key] = storage.scratch_folder(key)
            (folders[key] / "journal.jsonl").write_text("12345")
    with acquire_run(workspace, RECIPE, source="quickstart") as run:
        run.update(stages=stage_of(made), used_keys={"a": made_anew.stage_key, "b": never_made})
        assert collect(workspace).removed == ()
    assert collect(workspace).removed == (Removal("scratch", str(folders[made.stage_key]), 5),)
    assert [folder.exists() for folder in folders.values()] == [False, True, True]
    assert storage.has_scratch(made.stage_key), (
        "the copy in the bucket stays: its run may not have recorded it"
    )


def test_messages_and_reports_go_with_the_last_run_that_needs_their_key(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    workspace = Workspace.at(bucket)
    storage = workspace.storage
    needed, ended, under_way = (stage_key({"n": number}) for number in range(3))
    for key in (needed, ended, under_way):
        (storage.reports(key, ()) / "progress.json").write_text("{}")
        messages_of(storage.remote, key, 1).write("log.txt", b"12345")
        messages_of(storage.remote, key, 1).write("outcome.json", b"{}")
    messages_of(storage.remote, under_way, 2).write("beat", b"1")
    with acquire_run(workspace, RECIPE, source="quickstart") as run:
        run.update(used_keys={"sft": needed}, status="completed")
    reports = {key: str(storage.reports(key, ())) for key in (ended, under_way)}
    gone = [Removal("messages", f"messages/{ended}/", 7)]
    gone += [Removal("scratch", path, 2) for path in sorted(reports.values())]
    assert list(collect(workspace).removed) == gone
    assert messages_of(storage.remote, needed, 1).read("log.txt") == b"12345"
    assert messages_of(storage.remote, under_way, 1).read("log.txt") == b"12345"
    monkeypatch.setattr("vantage.storage.bucket_garbage._SILENT_SECONDS", -1.0)
    assert collect(workspace).removed == (Removal("messages", f"messages/{under_way}/", 8),)
    assert newest_number(storage.remote, under_way) == 0


def files_of(workspace: Workspace, artifact: Artifact) -> list[Path]:
    return [path for path in workspace.storage.folder(artifact).iterdir() if path.is_file()]

"""The store: reuse, damage, fencing and exclusion."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from schemas.records.stage_key import stage_key
from storage import refs
from storage import store as store_module
from storage.durable_files import move_folder
from storage.sealed_folders import (
    MANIFEST,
    UnsafePath,
    find_problems,
    seal,
)
from storage.store import (
    DamagedRef,
    Fenced,
    Locked,
    Store,
)
from tests.storage.stored import KEY, NEW, OLD, OTHER_PARTS, PARTS, child, commit, content_of, produce, stage

pytestmark = pytest.mark.usefixtures("no_fsync")

# Commit, find, reuse


def test_a_committed_artifact_is_found_with_all_that_was_recorded(store: Store) -> None:
    assert store.lookup(KEY) == store_module.Lookup(None)
    artifact = produce(store, OLD)

    ref = Store(store.root).lookup(KEY).ref
    assert ref is not None
    assert ref.artifact == artifact
    assert (ref.run_id, ref.attempt, ref.key_parts, ref.provenance) == (
        "run-1",
        1,
        PARTS,
        {"torch": "2.13.0"},
    )
    assert artifact.uri == f"objects/{artifact.digest}"
    assert store.folder(artifact) == store.root / artifact.uri
    assert sorted(os.listdir(store.folder(artifact))) == [
        MANIFEST,
        "metrics.json",
        "tokenizer",
        "weights.bin",
    ]
    assert hashlib.sha256((store.folder(artifact) / MANIFEST).read_bytes()).hexdigest() == artifact.digest
    assert list(ref.artifact.metrics.items()) == [("loss", 0.1), ("accuracy", None)], "in the stage's order"
    assert store.stage_keys() == [KEY]
    assert os.listdir(store.root / "staging") == []


def test_equal_content_of_two_stages_is_one_object(store: Store) -> None:
    one, other = produce(store, OLD), produce(store, OLD, parts=OTHER_PARTS)
    assert one.digest == other.digest
    assert os.listdir(store.root / "objects") == [one.digest]
    assert content_of(store, stage_key(OTHER_PARTS)) == OLD
    assert os.listdir(store.root / "staging") == []


def test_a_later_attempt_replaces_the_ref(store: Store) -> None:
    produce(store, OLD)
    produce(store, NEW)
    assert content_of(store) == NEW


def test_scratch_outlives_attempts_until_it_is_discarded(store: Store) -> None:
    (store.scratch_folder(KEY) / "journal.jsonl").write_text("x")
    produce(store, OLD)
    assert (store.scratch_folder(KEY) / "journal.jsonl").read_text() == "x"
    (store.root / "scratch" / f"{KEY}.removed-0").mkdir()  # a discard that was killed
    store.discard_scratch(KEY)
    assert os.listdir(store.root / "scratch") == []
    store.discard_scratch(KEY)
    assert list(store.scratch_folder(KEY).iterdir()) == []


def test_staging_is_empty_and_rid_of_earlier_attempts(store: Store) -> None:
    first, _ = stage(store, OLD)
    other, _ = stage(store, OLD, parts=OTHER_PARTS)
    second = store.staging_folder(KEY, store.next_attempt(KEY))
    assert list(second.iterdir()) == []
    assert not first.exists()
    assert other.exists()
    (second / "left").touch()
    assert list(store.staging_folder(KEY, 2).iterdir()) == []


# Refusals


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"key_parts": OTHER_PARTS}, "key_parts do not hash to stage_key="),
        ({"description": {"kind": "policy", "parents": {}}}, "tokenizer_digest"),
        ({"description": {"kind": "poetry", "parents": {}}}, "poetry"),
        (
            {"description": {"kind": "evaluation", "parents": {}, "digest": "c" * 64}},
            "digest, which the store sets",
        ),
        ({"provenance": {"when": {1, 2}}}, r"value\.when is a set, which is not JSON"),
        ({"attempt": 2}, "is not this attempt's; use staging_folder"),
    ],
)
def test_a_wrong_record_is_refused_before_anything_moves(
    store: Store, changed: dict[str, Any], message: str
) -> None:
    folder, attempt = stage(store, OLD)
    with pytest.raises(ValueError, match=message):
        commit(store, folder, **{"attempt": attempt, **changed})
    assert os.listdir(store.root / "objects") == os.listdir(store.root / "refs") == []
    assert not (folder / MANIFEST).exists()
    commit(store, folder, attempt)
    assert content_of(store) == OLD


def test_a_link_in_the_output_is_refused(store: Store) -> None:
    folder, attempt = stage(store, OLD)
    (folder / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(UnsafePath, match=r"config\.json: is a symbolic link"):
        commit(store, folder, attempt)
    assert content_of(store) is None


@pytest.mark.parametrize("key", ["../../etc/passwd", "A" * 64, "", "a" * 63, "a" * 64 + "\n"])
def test_only_a_sha256_names_anything(store: Store, key: str) -> None:
    for use in (store.find, store.next_attempt, store.scratch_folder, store.discard_scratch):
        with pytest.raises(ValueError, match="is not a sha256 in lower-case hexadecimal"):
            use(key)


# Damage


def _flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[3] ^= 4
    (folder / "weights.bin").chmod(0o644)
    (folder / "weights.bin").write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip_a_bit, "weights.bin: sha256 is"),
    "truncated": (lambda folder: os.truncate(folder / "weights.bin", 2), "weights.bin: has 2 bytes"),
    "missing": (lambda folder: (folder / "weights.bin").unlink(), "weights.bin: is missing"),
    "extra": (lambda folder: (folder / "more.bin").touch(), "more.bin: is not in the manifest"),
    "link": (
        lambda folder: (folder / "config.json").symlink_to("weights.bin"),
        "config.json: is a symbolic link",
    ),
    "unlisted": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json"),
    "gone": (shutil.rmtree, "the folder is missing"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_told_quarantined_and_made_again(
    store: Store, damage: Callable[[Path], object], message: str
) -> None:
    artifact = produce(store, OLD)
    folder = store.folder(artifact)
    damage(folder)

    assert message in "\n".join(store.inspect(KEY).damage)
    assert folder.exists() == (message != "the folder is missing"), "inspect changes nothing"
    found = store.lookup(KEY)
    assert found.ref is None
    assert message in "\n".join(found.damage)
    assert all(line.startswith(f"objects/{artifact.digest}: ") for line in found.damage)
    assert not folder.exists()
    quarantined = list((store.root / "quarantine").iterdir())
    assert [path.name for path in quarantined] == (
        [] if message == "the folder is missing" else [f"{artifact.digest}.1"]
    )

    assert produce(store, OLD) == artifact
    assert content_of(store) == OLD


def test_what_was_found_intact_is_read_again_only_after_a_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = produce(store, OLD)
    read: list[str] = []

    def find_and_count(folder: Path, *, digest: str) -> list[str]:
        read.append(digest)
        return find_problems(folder, digest=digest)

    monkeypatch.setattr("storage.verified_folders.find_problems", find_and_count)
    for _ in range(3):
        assert store.verify(artifact) == []
    assert len(read) == 1
    assert Store(store.root).verify(artifact) == []
    assert len(read) == 2, "another object, as another process has, reads for itself"

    path = store.folder(artifact) / "weights.bin"
    times = path.stat()
    time.sleep(0.02)  # more than the grain of a file system's clock
    _flip_a_bit(store.folder(artifact))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for count in (3, 4):
        assert any("sha256 is" in problem for problem in store.verify(artifact)), "damage is never remembered"
        assert len(read) == count


def test_a_manifest_rewritten_to_match_does_not_hide_a_change(store: Store) -> None:
    folder = store.folder(produce(store, OLD))
    _flip_a_bit(folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for record in manifest["files"]:
        record["sha256"] = hashlib.sha256((folder / record["path"]).read_bytes()).hexdigest()
    (folder / MANIFEST).chmod(0o644)
    (folder / MANIFEST).write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))
    assert "manifest.json: sha256 is" in store.lookup(KEY).damage[0]


def test_a_commit_does_not_adopt_a_damaged_equal(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    artifact = produce(store, OLD)
    _flip_a_bit(store.folder(artifact))
    produce(store, OLD, parts=OTHER_PARTS)
    assert content_of(store, stage_key(OTHER_PARTS)) == OLD
    assert content_of(store) == OLD, "the first stage's ref is whole again too"
    assert "is damaged and not used" in caplog.text


def _other_key(text: str) -> str:
    return text.replace(KEY, stage_key(OTHER_PARTS))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda text: text[: len(text) // 2], "cannot be read as a ref"),
        (lambda text: "", "cannot be read as a ref"),
        (lambda text: text.replace('"seed":1', '"seed":NaN'), "cannot be read as a ref"),
        (lambda text: text.replace('"seed":1', '"seed":2'), "holds the ref of another stage key"),
        (_other_key, "holds the ref of another stage key"),
        (lambda text: text.replace('"uri":"objects/', '"uri":"../../'), "artifact.uri="),
    ],
)
def test_a_damaged_ref_is_told_quarantined_and_made_again(
    store: Store, spoil: Callable[[str], str], message: str
) -> None:
    produce(store, OLD)
    path = store.root / "refs" / f"{KEY}.json"
    path.write_text(spoil(path.read_text()))

    with pytest.raises(DamagedRef, match=message):
        store.find(KEY)
    found = store.lookup(KEY)
    assert found.ref is None
    assert message in found.damage[0]
    assert store.lookup(KEY) == store_module.Lookup(None)
    assert [path.name for path in (store.root / "quarantine").iterdir()] == [f"ref-{KEY}.1"]
    produce(store, OLD)
    assert content_of(store) == OLD


# Fencing


def test_a_superseded_attempt_can_neither_stage_nor_commit(store: Store) -> None:
    folder, attempt = stage(store, OLD)
    assert store.next_attempt(KEY) == 2
    message = f"attempt 1 of stage key {KEY[:12]} was superseded by attempt 2; its result is not committed"
    with pytest.raises(Fenced, match=message):
        commit(store, folder, attempt)
    with pytest.raises(Fenced, match=message):
        store.staging_folder(KEY, 1)
    assert content_of(store) is None


def test_an_attempt_that_was_never_begun_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"attempt=1 of stage key .* was never begun; use next_attempt"):
        store.staging_folder(KEY, 1)


def test_the_same_attempt_commits_equal_content_again_and_other_content_never(store: Store) -> None:
    folder, attempt = stage(store, OLD)
    artifact = commit(store, folder, attempt)

    def restage(content: bytes) -> Path:
        again = store.staging_folder(KEY, attempt)
        (again / "tokenizer").mkdir()
        (again / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
        (again / "weights.bin").write_bytes(content)
        return again

    assert commit(store, restage(OLD), attempt) == artifact
    with pytest.raises(Fenced, match=r"attempt 1 of stage key .* has already committed"):
        commit(store, restage(NEW), attempt)
    assert content_of(store) == OLD


def test_attempts_go_on_counting_when_the_counter_is_lost(store: Store) -> None:
    produce(store, OLD)
    produce(store, NEW)
    shutil.rmtree(store.root / "locks")
    assert Store(store.root).next_attempt(KEY) == 3


def test_a_stopped_writer_that_wakes_up_after_its_successor_is_fenced(store: Store) -> None:
    def stop_after_sealing() -> str:
        folder, attempt = stage(store, OLD)

        def seal_and_stop(folder: Path) -> str:
            digest = seal(folder)
            os.kill(os.getpid(), signal.SIGSTOP)
            return digest

        setattr(refs, "seal", seal_and_stop)  # noqa: B010 - in the child alone
        try:
            commit(store, folder, attempt)
        except Fenced as error:
            return str(error)
        return "committed"

    with child(stop_after_sealing) as (process, said):
        os.waitpid(process, os.WUNTRACED)
        produce(store, NEW)
        os.kill(process, signal.SIGCONT)
        assert "was superseded by attempt 2" in said()
    assert content_of(store) == NEW


def test_an_attempt_that_is_superseded_after_its_object_is_in_place_is_fenced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move_and_be_superseded(source: Path, target: Path) -> None:
        move_folder(source, target)
        store.next_attempt(KEY)

    monkeypatch.setattr(store_module, "move_folder", move_and_be_superseded)
    with pytest.raises(Fenced, match="was superseded by attempt 2"):
        produce(store, OLD)
    assert content_of(store) is None


def test_an_attempt_that_is_superseded_while_it_clears_leaves_its_successors_folder(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_newest = store._require_newest

    def pass_and_be_superseded(key: str, attempt: int) -> None:
        require_newest(key, attempt)
        monkeypatch.undo()
        (store.staging_folder(KEY, store.next_attempt(KEY)) / "weights.bin").touch()

    first = store.next_attempt(KEY)
    monkeypatch.setattr(store, "_require_newest", pass_and_be_superseded)
    store.staging_folder(KEY, first)
    assert (store.root / "staging" / f"{KEY}.2" / "weights.bin").exists()


# Exclusion


def test_only_one_holds_a_stage_key_and_the_others_are_told_who(store: Store) -> None:
    told: list[str] = []
    with store.exclusive(KEY, holder="run-7"):
        with (
            pytest.raises(Locked, match=r"is held by run-7 \(process \d+ on .*\) since more than 0\.15 s"),
            store.exclusive(KEY, holder="run-8", on_wait=told.append, timeout=0.15),
        ):
            pass
        with store.exclusive(stage_key(OTHER_PARTS), holder="run-8", timeout=0):
            pass
    assert len(told) == 1
    assert told[0].startswith(f"run-7 (process {os.getpid()} on ")
    with store.exclusive(KEY, holder="run-8", timeout=0):
        pass


def test_the_hold_ends_when_the_work_raises(store: Store) -> None:
    with pytest.raises(RuntimeError, match="stage failed"), store.exclusive(KEY, holder="run-7"):
        raise RuntimeError("stage failed")
    with store.exclusive(KEY, holder="run-8", timeout=0):
        pass


def test_the_hold_ends_when_its_holder_is_killed(store: Store) -> None:
    held, told = multiprocessing.Pipe(duplex=False)

    def hold_for_ever() -> str:
        with store.exclusive(KEY, holder="run-7"):
            told.send(True)
            signal.pause()
        return ""

    with child(hold_for_ever) as (process, _):
        assert held.poll(10)
        with pytest.raises(Locked), store.exclusive(KEY, holder="run-8", timeout=0):
            pass
        os.kill(process, signal.SIGKILL)
        with store.exclusive(KEY, holder="run-8", timeout=10):
            pass


def test_the_second_of_two_waits_and_adopts(store: Store) -> None:
    produced: list[int] = []

    def life_of_a_stage() -> None:
        with store.exclusive(KEY, holder="run", timeout=30):
            if store.lookup(KEY).ref is None:
                produced.append(1)
                produce(store, OLD)

    threads = [threading.Thread(target=life_of_a_stage) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert produced == [1]
    assert content_of(store) == OLD


# Many writers


def test_many_writers_of_one_ref_leave_the_newest_attempts_whole_artifact(store: Store) -> None:
    def write(name: str) -> None:
        for turn in range(2):
            # a newer attempt has begun, and may have cleared what this one was still writing
            with suppress(Fenced, FileNotFoundError):
                produce(store, f"{name}.{turn}".encode())

    def five_threads(name: str) -> str:
        threads = [threading.Thread(target=write, args=(f"{name}.{number}",)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "done"

    with (
        child(lambda: five_threads("a")) as (_, first),
        child(lambda: five_threads("b")) as (_, second),
        child(lambda: five_threads("c")) as (_, third),
        child(lambda: five_threads("d")) as (_, fourth),
    ):
        for _ in range(20):  # a reader beside the writers
            content_of(store)
        assert [first(), second(), third(), fourth()] == ["done"] * 4

    ref = store.lookup(KEY).ref
    assert ref is not None
    assert ref.attempt == 4 * 5 * 2, "every number was handed out once, and the last one won"
    assert store.next_attempt(KEY) == ref.attempt + 1
    for digest in os.listdir(store.root / "objects"):
        assert find_problems(store.root / "objects" / digest, digest=digest) == []


def test_one_of_many_with_the_same_attempt_wins(store: Store) -> None:
    attempt = store.next_attempt(KEY)
    outcomes: list[str] = []
    ready = threading.Barrier(20)

    def race(number: int) -> None:
        artifact = produce(store, b"weights %d" % number, parts={"seed": 100 + number})
        ref = store_module.Ref(
            artifact=artifact.model_copy(update={"stage_key": KEY}),
            attempt=attempt,
            run_id=f"run-{number}",
            key_parts=PARTS,
            provenance={},
        )
        ready.wait()
        try:
            store._swap_ref(ref)
            outcomes.append(artifact.digest)
        except Fenced:
            outcomes.append("fenced")

    threads = [threading.Thread(target=race, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = set(outcomes) - {"fenced"}
    assert outcomes.count("fenced") == 19
    ref = store.lookup(KEY).ref
    assert ref is not None
    assert ref.artifact.digest == winner

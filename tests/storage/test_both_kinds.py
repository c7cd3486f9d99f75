"""Storages in a folder and in a bucket agree on reuse, refusals, damage, fencing, exclusion and many writers."""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.storage.places import Forker, Machine, Place
from tests.storage.stored import KEY, NEW, OLD, OTHER_PARTS, PARTS, commit, content_of, produce, stage
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.stage_key import stage_key
from vantage.storage import refs
from vantage.storage.key_locks import Locked
from vantage.storage.sealed_folders import MANIFEST, NothingToSeal, UnsafePath, find_problems, seal
from vantage.storage.storage import Storage
from vantage.storage.store import Fenced, Lookup

pytestmark = pytest.mark.usefixtures("no_fsync")

# Commit, find, reuse


def test_a_committed_artifact_is_found_on_another_machine_with_all_that_was_recorded(place: Place) -> None:
    assert place.open().lookup(KEY) == Lookup(None)
    artifact = produce(place.open(), OLD)

    reader = place.open()
    ref = reader.lookup(KEY).ref
    assert ref is not None
    assert ref.artifact == artifact
    assert (ref.run_id, ref.attempt, ref.key_parts, ref.provenance) == (
        "run-1",
        1,
        PARTS,
        {"torch": "2.13.0"},
    )
    assert artifact.uri == f"objects/{artifact.digest}"
    files = {
        path.relative_to(reader.folder(artifact)).as_posix() for path in reader.folder(artifact).rglob("*.*")
    }
    assert files == {MANIFEST, "metrics.json", "tokenizer/tokenizer.json", "weights.bin"}
    assert {path.removeprefix(f"{artifact.uri}/") for path in place.paths(artifact.uri)} == files
    assert hashlib.sha256(place.read(f"{artifact.uri}/{MANIFEST}")).hexdigest() == artifact.digest
    assert list(ref.artifact.metrics.items()) == [("loss", 0.1), ("accuracy", None)], "in the stage's order"


def test_equal_content_of_two_stages_is_one_object(place: Place) -> None:
    one, other = produce(place.open(), OLD), produce(place.open(), OLD, parts=OTHER_PARTS)
    assert one.digest == other.digest
    assert {path.split("/")[1] for path in place.paths("objects")} == {one.digest}
    assert content_of(place.open(), stage_key(OTHER_PARTS)) == OLD


def test_a_later_attempt_replaces_the_ref(place: Place) -> None:
    storage = place.open()
    produce(storage, OLD)
    assert content_of(storage) == OLD
    produce(place.open(), NEW)
    assert content_of(storage) == content_of(place.open()) == NEW


def test_scratch_outlives_attempts_until_it_is_discarded(place: Place) -> None:
    storage = place.open()
    (storage.scratch_folder(KEY) / "journal.jsonl").write_text("x")
    produce(storage, OLD)
    assert (storage.scratch_folder(KEY) / "journal.jsonl").read_text() == "x"
    storage.discard_scratch(KEY)
    assert not storage.has_scratch(KEY)
    storage.discard_scratch(KEY)
    assert list(storage.scratch_folder(KEY).iterdir()) == []


def test_staging_is_empty_and_rid_of_earlier_attempts(place: Place) -> None:
    storage = place.open()
    first, _ = stage(storage, OLD)
    other, _ = stage(storage, OLD, parts=OTHER_PARTS)
    second = storage.staging_folder(KEY, storage.next_attempt(KEY))
    assert list(second.iterdir()) == []
    assert not first.exists()
    assert other.exists()
    (second / "left").touch()
    assert list(storage.staging_folder(KEY, 2).iterdir()) == []


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
    place: Place, changed: dict[str, Any], message: str
) -> None:
    storage = place.open()
    folder, attempt = stage(storage, OLD)
    with pytest.raises(ValueError, match=message):
        commit(storage, folder, **{"attempt": attempt, **changed})
    assert place.paths("objects") == set()
    assert content_of(place.open()) is None
    assert not (folder / MANIFEST).exists()
    commit(storage, folder, attempt)
    assert content_of(place.open()) == OLD


def test_a_link_in_the_output_is_refused(place: Place) -> None:
    storage = place.open()
    folder, attempt = stage(storage, OLD)
    (folder / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(UnsafePath, match=r"config\.json: is a symbolic link"):
        commit(storage, folder, attempt)
    assert content_of(place.open()) is None


@pytest.mark.parametrize("key", ["../../etc/passwd", "A" * 64, "", "a" * 63, "a" * 64 + "\n"])
def test_only_a_sha256_names_anything(place: Place, key: str) -> None:
    storage = place.open()
    for use in (storage.lookup, storage.next_attempt, storage.scratch_folder, storage.discard_scratch):
        with pytest.raises(ValueError, match="is not a sha256 in lower-case hexadecimal"):
            use(key)


# Damage


def flip_a_bit(place: Place, artifact: Artifact) -> None:
    data = bytearray(place.read(f"{artifact.uri}/weights.bin"))
    data[3] ^= 4
    place.write(f"{artifact.uri}/weights.bin", bytes(data))


def truncate(place: Place, artifact: Artifact) -> None:
    place.write(f"{artifact.uri}/weights.bin", place.read(f"{artifact.uri}/weights.bin")[:2])


def remove_all(place: Place, artifact: Artifact) -> None:
    for path in place.paths(artifact.uri):
        place.remove(path)


def edit_a_metric(place: Place, artifact: Artifact) -> None:
    data = place.read(f"{artifact.uri}/metrics.json")
    place.write(f"{artifact.uri}/metrics.json", data.replace(b"0.1", b"0.2"))


def rewrite_the_manifest(place: Place, artifact: Artifact) -> None:
    flip_a_bit(place, artifact)
    manifest = json.loads(place.read(f"{artifact.uri}/{MANIFEST}"))
    for record in manifest["files"]:
        record["sha256"] = hashlib.sha256(place.read(f"{artifact.uri}/{record['path']}")).hexdigest()
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    place.write(f"{artifact.uri}/{MANIFEST}", text.encode())


DAMAGE: dict[str, tuple[Callable[[Place, Artifact], None], str]] = {
    "flipped": (flip_a_bit, "weights.bin: sha256 is"),
    "truncated": (truncate, "weights.bin: has 2 bytes"),
    "missing": (
        lambda place, artifact: place.remove(f"{artifact.uri}/weights.bin"),
        "weights.bin: is missing",
    ),
    "unlisted": (lambda place, artifact: place.remove(f"{artifact.uri}/{MANIFEST}"), MANIFEST),
    "gone": (remove_all, MANIFEST),
    "metrics": (edit_a_metric, "metrics.json: sha256 is"),
    "rewritten": (rewrite_the_manifest, "manifest.json: sha256 is"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_told_not_used_and_made_again(
    place: Place, damage: Callable[[Place, Artifact], None], message: str
) -> None:
    artifact = produce(place.open(), OLD)
    damage(place, artifact)
    found = place.open().lookup(KEY)
    assert found.ref is None
    assert message in "\n".join(found.damage)
    assert all(line.startswith(f"objects/{artifact.digest}") for line in found.damage)
    assert not place.open().has_object(artifact.digest), "it counts as incomplete from then on"
    assert produce(place.open(), OLD) == artifact
    assert content_of(place.open()) == OLD


@pytest.mark.parametrize("damage", [damage for damage, _ in DAMAGE.values()], ids=DAMAGE)
def test_a_commit_does_not_adopt_a_damaged_equal(
    place: Place, damage: Callable[[Place, Artifact], None]
) -> None:
    artifact = produce(place.open(), OLD)
    damage(place, artifact)
    produce(place.open(), OLD, parts=OTHER_PARTS)
    assert content_of(place.open(), stage_key(OTHER_PARTS)) == OLD
    assert content_of(place.open()) == OLD, "the first stage's ref is whole again too"


def _other_key(text: str) -> str:
    return text.replace(KEY, stage_key(OTHER_PARTS))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda text: text[: len(text) // 2], "cannot be read as"),
        (lambda text: "", "cannot be read as"),
        (lambda text: text.replace('"seed":1', '"seed":NaN'), "cannot be read as"),
        (lambda text: text.replace('"seed":1', '"seed":2'), "holds the ref of another stage key"),
        (_other_key, "holds the ref of another stage key"),
        (lambda text: text.replace('"uri":"objects/', '"uri":"../../'), "artifact.uri="),
        (lambda text: text.replace('"loss":0.1', '"loss":0.01'), "metrics.loss is 0.01"),
    ],
)
def test_a_damaged_ref_is_told_set_aside_and_made_again(
    place: Place, spoil: Callable[[str], str], message: str
) -> None:
    produce(place.open(), OLD)
    path = place.ref_path(KEY)
    place.write(path, spoil(place.read(path).decode()).encode())
    found = place.open().lookup(KEY)
    assert found.ref is None
    assert message in found.damage[0]
    assert place.open().lookup(KEY) == Lookup(None)
    assert len(place.paths("quarantine")) == 1
    produce(place.open(), OLD)
    assert content_of(place.open()) == OLD


# Fencing


def test_numbers_of_attempts_that_begin_at_once_are_all_different(place: Place) -> None:
    machines = [place.open() for _ in range(12)]
    with ThreadPoolExecutor(12) as threads:
        numbers = list(threads.map(lambda storage: storage.next_attempt(KEY), machines))
    assert sorted(numbers) == list(range(1, 13))


def test_a_superseded_attempt_can_neither_stage_nor_commit(place: Place) -> None:
    storage = place.open()
    folder, attempt = stage(storage, OLD)
    assert place.open().next_attempt(KEY) == 2
    message = f"attempt 1 of stage key {KEY[:12]} was superseded by attempt 2; its result is not committed"
    with pytest.raises(Fenced, match=message):
        commit(storage, folder, attempt)
    with pytest.raises(Fenced, match=message):
        storage.staging_folder(KEY, 1)
    assert content_of(place.open()) is None


def test_an_attempt_that_was_never_begun_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match=r"attempt=1 of stage key .* was never begun; use next_attempt"):
        place.open().staging_folder(KEY, 1)


def test_the_same_attempt_commits_equal_content_again_and_other_content_never(place: Place) -> None:
    storage = place.open()
    folder, attempt = stage(storage, OLD)
    artifact = commit(storage, folder, attempt)

    def restage(content: bytes) -> Path:
        again = storage.staging_folder(KEY, attempt)
        (again / "tokenizer").mkdir()
        (again / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
        (again / "weights.bin").write_bytes(content)
        return again

    assert commit(storage, restage(OLD), attempt) == artifact
    with pytest.raises(Fenced, match=r"attempt 1 of stage key .* has already committed"):
        commit(storage, restage(NEW), attempt)
    assert content_of(place.open()) == OLD


def seal_stop_and_commit(machine: Machine) -> str:
    """Write as a writer that is stopped in the middle of its commit."""
    storage = machine.open()
    folder, attempt = stage(storage, OLD)

    def seal_and_stop(folder: Path) -> str:
        digest = seal(folder)
        os.kill(os.getpid(), signal.SIGSTOP)
        return digest

    setattr(refs, "seal", seal_and_stop)  # noqa: B010 - in this process alone
    try:
        commit(storage, folder, attempt)
    except Fenced as error:
        return str(error)
    return "committed"


@pytest.mark.slow
def test_a_stopped_writer_that_wakes_up_after_its_successor_is_fenced(place: Place, forker: Forker) -> None:
    with forker.process(seal_stop_and_commit, place.machine()) as writer:
        writer.wait_until_stopped()
        produce(place.open(), NEW)
        writer.kill(signal.SIGCONT)
        assert "was superseded by attempt 2" in writer.result()
    assert content_of(place.open()) == NEW


# Exclusion


def hold_for_ever(machine: Machine, held: Path) -> None:
    with machine.open().exclusive(KEY, holder="run-7"):
        held.touch()
        signal.pause()


def test_one_works_on_a_key_the_other_waits_and_is_told_for_whom(place: Place) -> None:
    first, second, seen = place.open(), place.open(), []
    waiting = second.exclusive(KEY, holder="run b", on_wait=seen.append, timeout=0.3)
    with first.exclusive(KEY, holder="run a"), pytest.raises(Locked, match="held by run a"), waiting:
        pass
    assert [holder.split(" (")[0] for holder in seen] == ["run a"]
    began = time.monotonic()
    with second.exclusive(KEY, holder="run b", timeout=60):
        assert time.monotonic() - began < 30, "what was given back is free at once"


@pytest.mark.slow
def test_a_key_is_free_again_when_its_holder_is_killed(place: Place, forker: Forker, tmp_path: Path) -> None:
    held = tmp_path / "held"
    waiter = place.machine(lease_seconds=0.5).open()
    with forker.process(hold_for_ever, place.machine(lease_seconds=0.5), held) as holder:
        while not held.exists():
            time.sleep(0.01)
        with pytest.raises(Locked), waiter.exclusive(KEY, holder="run-8", timeout=0.8):
            pass
        holder.kill()
        with waiter.exclusive(KEY, holder="run-8", timeout=10):
            pass


def test_the_second_of_several_waits_and_adopts(place: Place) -> None:
    produced: list[int] = []

    def life_of_a_stage(storage: Storage) -> None:
        with storage.exclusive(KEY, holder="run", timeout=30):
            if storage.lookup(KEY).ref is None:
                produced.append(1)
                produce(storage, OLD)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(life_of_a_stage, [place.open() for _ in range(4)]))
    assert produced == [1]
    assert content_of(place.open()) == OLD


# Many writers


def write_in_turns(machine: Machine, name: str) -> str:
    """Let five threads produce something else twice each."""
    storages = [machine.open() for _ in range(5)]

    def write(number: int) -> None:
        for turn in range(2):
            # a newer attempt has begun, and may have cleared what this one was still writing, or all of it
            with suppress(Fenced, FileNotFoundError, NothingToSeal):
                produce(storages[number], f"{name}.{number}.{turn}".encode())

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(write, range(5)))
    return "done"


@pytest.mark.slow
def test_many_writers_of_one_ref_leave_the_newest_attempts_whole_artifact(
    place: Place, forker: Forker
) -> None:
    with (
        forker.process(write_in_turns, place.machine(), "a") as first,
        forker.process(write_in_turns, place.machine(), "b") as second,
        forker.process(write_in_turns, place.machine(), "c") as third,
        forker.process(write_in_turns, place.machine(), "d") as fourth,
    ):
        reader = place.open()
        for _ in range(20):  # a reader beside the writers
            content_of(reader)
        assert [each.result() for each in (first, second, third, fourth)] == ["done"] * 4

    reader = place.open()
    ref = reader.lookup(KEY).ref
    assert ref is not None
    assert ref.attempt == 4 * 5 * 2, "every number was handed out once, and the last one won"
    assert find_problems(reader.folder(ref.artifact), digest=ref.artifact.digest) == []
    assert place.open().next_attempt(KEY) == ref.attempt + 1


@pytest.mark.slow
def test_one_of_many_with_the_same_attempt_wins(place: Place) -> None:
    attempt = place.open().next_attempt(KEY)
    ready = threading.Barrier(20)

    def race(number: int) -> str:
        storage: Any = place.open()
        artifact = produce(storage, b"weights %d" % number, parts={"seed": 100 + number})
        ref = refs.Ref(
            artifact=artifact.model_copy(update={"stage_key": KEY}),
            attempt=attempt,
            run_id=f"run-{number}",
            key_parts=PARTS,
            provenance={},
        )
        ready.wait()
        try:
            storage._swap_ref(ref)
        except Fenced:
            return "fenced"
        return artifact.digest

    with ThreadPoolExecutor(20) as threads:
        outcomes = list(threads.map(race, range(20)))
    (winner,) = set(outcomes) - {"fenced"}
    assert outcomes.count("fenced") == 19
    ref = place.open().lookup(KEY).ref
    assert ref is not None
    assert ref.artifact.digest == winner

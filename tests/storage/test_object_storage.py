"""Storage in a bucket works with an S3 server: reuse, damage, fencing, leases, and after a kill."""

from pathlib import Path
from typing import Any

import obstore
import pytest

from tests.storage.stored import KEY, PARTS, commit, content_of, stage
from vantage.schemas.records.artifacts import Artifact
from vantage.storage import scratch_copy
from vantage.storage.bucket import open_bucket
from vantage.storage.key_locks import Locked
from vantage.storage.key_records import KeyRecords
from vantage.storage.object_storage import ObjectStorage
from vantage.storage.refs import DamagedObject
from vantage.storage.scratch_copy import ScratchCopy
from vantage.storage.sealed_folders import MANIFEST, seal
from vantage.storage.storage import open_storage
from vantage.storage.store import Fenced, Store


class Machines:
    """Machines that reach the same bucket, each with a cache of its own."""

    def __init__(self, address: str, folder: Path) -> None:
        self.remote = open_bucket(address)
        self._folder = folder
        self._count = 0

    def new(self, *, lease_seconds: float = 30.0) -> ObjectStorage:
        self._count += 1
        cache = self._folder / f"machine-{self._count}"
        return ObjectStorage(self.remote, cache, lease_seconds=lease_seconds)

    def paths(self, prefix: str = "") -> set[str]:
        return {str(each["path"]) for batch in obstore.list(self.remote, prefix or None) for each in batch}


@pytest.fixture
def machines(bucket: str, tmp_path: Path) -> Machines:
    return Machines(bucket, tmp_path)


def test_another_machine_finds_what_was_committed_and_it_is_the_artifact_of_a_folder(
    machines: Machines, tmp_path: Path
) -> None:
    here = machines.new()
    assert content_of(here) is None
    artifact = commit(here, *stage(here, b"weights"))
    folder = Store(tmp_path / "store")
    assert artifact == commit(folder, *stage(folder, b"weights"))

    there = machines.new()
    ref = there.lookup(KEY).ref
    assert ref is not None
    assert (ref.artifact, ref.attempt, ref.run_id) == (artifact, 1, "run-1")
    assert (ref.key_parts, ref.provenance) == (PARTS, {"torch": "2.13.0"})
    assert content_of(there) == content_of(here) == b"weights"


def test_a_writer_that_is_superseded_while_it_commits_is_fenced(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines.new(), machines.new()
    folder, attempt = stage(first, b"late")
    write = KeyRecords.write

    def slow(keys: KeyRecords, *arguments: Any) -> Any:
        if keys is first._keys:
            second.next_attempt(KEY)  # after the first has read the record
        return write(keys, *arguments)

    monkeypatch.setattr(KeyRecords, "write", slow)
    with pytest.raises(Fenced):
        commit(first, folder, attempt)
    assert content_of(machines.new()) is None


def test_a_damaged_copy_in_the_cache_is_fetched_again(machines: Machines) -> None:
    storage = machines.new()
    artifact = commit(storage, *stage(storage, b"weights"))
    file = storage.folder(artifact) / "weights.bin"
    file.chmod(0o644)
    file.write_bytes(b"wEights")
    assert content_of(storage) == b"weights"


def flip(machines: Machines, artifact: Artifact) -> None:
    """Change a byte in the bucket; the size stays."""
    obstore.put(machines.remote, f"{artifact.uri}/weights.bin", b"wEights")


def test_an_object_that_a_reader_finds_damaged_is_missing_from_then_on_and_made_anew(
    machines: Machines,
) -> None:
    here = machines.new()
    artifact = commit(here, *stage(here, b"weights"))
    flip(machines, artifact)
    reader = machines.new()
    assert reader.inspect(KEY).ref is not None, "sizes are as they were, and nothing was read"
    with pytest.raises(DamagedObject, match="weights.bin: sha256 is"):
        reader.folder(artifact)
    found = reader.inspect(KEY)
    assert found.ref is None
    assert "manifest.json is missing" in found.damage[0]
    assert reader.lookup(KEY).ref is None
    commit(reader, *stage(reader, b"weights"))
    assert content_of(machines.new()) == b"weights"


def test_a_machine_with_an_intact_copy_mends_what_others_found_damaged(machines: Machines) -> None:
    here, reader = machines.new(), machines.new()
    artifact = commit(here, *stage(here, b"weights"))
    flip(machines, artifact)
    with pytest.raises(DamagedObject):
        reader.folder(artifact)
    assert content_of(here) == b"weights"
    assert content_of(machines.new()) == b"weights"
    assert reader.verify(artifact) == []


def test_a_record_that_cannot_be_read_costs_no_attempt_number_twice(machines: Machines) -> None:
    storage = machines.new()
    late = stage(storage, b"late")
    obstore.put(machines.remote, f"keys/{KEY}.json", b"garbage")
    found = machines.new().lookup(KEY)
    assert found.ref is None
    assert "cannot be read" in found.damage[0]
    assert machines.new().next_attempt(KEY) == 1001
    with pytest.raises(Fenced):
        commit(storage, *late)


# Leases


def test_a_lease_outlives_its_seconds_as_long_as_its_holder_does(machines: Machines) -> None:
    first, second = machines.new(lease_seconds=0.4), machines.new(lease_seconds=0.4)
    waiting = second.exclusive(KEY, holder="run b", timeout=2.0)
    with first.exclusive(KEY, holder="run a"), pytest.raises(Locked), waiting:
        pass


def test_a_silent_holder_loses_the_lease_and_its_commit(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines.new(lease_seconds=0.5), machines.new(lease_seconds=0.5)
    monkeypatch.setattr("vantage.storage.leases.HeldLease._run", lambda self: None)  # the machine sleeps
    with first.exclusive(KEY, holder="run a"):
        folder, attempt = stage(first, b"late")
        for _ in range(40):  # an attempt waits in short turns like this
            try:
                with second.exclusive(KEY, holder="run b", timeout=0.1):
                    commit(second, *stage(second, b"new"))
            except Locked:
                continue
            break
        with pytest.raises(Fenced):
            commit(first, folder, attempt)
    with machines.new().exclusive(KEY, holder="run c", timeout=1):
        assert content_of(machines.new()) == b"new"


# Scratch


def test_another_machine_goes_on_from_the_last_whole_checkpoint(machines: Machines) -> None:
    here, there = machines.new(), machines.new()
    scratch = here.scratch_folder(KEY)
    copy = here._copy(KEY)
    names = ("checkpoints", "journal.jsonl")
    (scratch / "journal.jsonl").write_text("1\n")
    checkpoint(scratch, 4)
    copy.send(names)
    checkpoint(scratch, 8)
    (scratch / "journal.jsonl").write_text("1\n2\n")
    (scratch / "checkpoints" / "saving").mkdir()
    (scratch / "checkpoints" / "saving" / "tensors.safetensors").write_bytes(b"half")
    (scratch / "progress.json").write_text("{}")
    copy.send(names)
    obstore.delete(machines.remote, f"scratch/{KEY}/checkpoints/checkpoint-00000004/{MANIFEST}")

    assert there.has_scratch(KEY)
    found = there.scratch_folder(KEY)
    assert sorted(path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()) == [
        f"checkpoints/checkpoint-00000008/{MANIFEST}",
        "checkpoints/checkpoint-00000008/tensors.safetensors",
        "journal.jsonl",
    ]
    assert (found / "journal.jsonl").read_text() == "1\n2\n"
    there.discard_scratch(KEY)
    assert not machines.new().has_scratch(KEY)
    assert machines.paths("scratch/") == set()


def test_a_machine_whose_own_checkpoint_is_older_goes_on_from_the_others(machines: Machines) -> None:
    first, second = machines.new(), machines.new()
    checkpoint(first.scratch_folder(KEY), 4)
    first._copy(KEY).send(["checkpoints"])
    assert steps_in(first) == ["checkpoint-00000004"], "level with the bucket: its own folder stays"
    checkpoint(second.scratch_folder(KEY), 8)
    second._copy(KEY).send(["checkpoints"])
    assert steps_in(first) == ["checkpoint-00000004", "checkpoint-00000008"]
    checkpoint(first.scratch_folder(KEY), 12)
    assert steps_in(first)[-1] == "checkpoint-00000012", "ahead of the bucket"


def test_local_scratch_is_discarded_alone_and_the_bucket_keeps_what_others_read(machines: Machines) -> None:
    storage = machines.new()
    with storage.keep_copy(KEY, ("journal.jsonl",)):
        (storage.scratch_folder(KEY) / "journal.jsonl").write_text("1\n")
    storage.discard_local_scratch(KEY)
    assert not storage._scratch(KEY).exists()
    assert list(storage._scratch(KEY).parent.iterdir()) == []
    assert (storage.reports(KEY, ("journal.jsonl",)) / "journal.jsonl").read_text() == "1\n"


def steps_in(storage: ObjectStorage) -> list[str]:
    return sorted(path.name for path in (storage.scratch_folder(KEY) / "checkpoints").iterdir())


def test_only_what_has_changed_is_sent_and_what_is_gone_is_removed(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = machines.new().scratch_folder(KEY)
    copy = ScratchCopy(machines.remote, f"scratch/{KEY}", scratch)
    sent: list[str] = []
    put = obstore.put

    def counted(remote: Any, path: str, file: Path) -> Any:
        sent.append(path.partition(f"{KEY}/")[2])
        return put(remote, path, file)

    monkeypatch.setattr(scratch_copy.obstore, "put", counted)
    checkpoint(scratch, 4)
    (scratch / "journal.jsonl").write_text("1\n")
    copy.send(("checkpoints", "journal.jsonl"))
    first = "checkpoints/checkpoint-00000004"
    assert sent == ["journal.jsonl", f"{first}/tensors.safetensors", f"{first}/{MANIFEST}"]
    sent.clear()
    copy.send(("checkpoints", "journal.jsonl"))
    assert sent == []
    for file in (scratch / first).iterdir():
        file.unlink()
    (scratch / first).rmdir()
    copy.send(("checkpoints", "journal.jsonl"))
    assert {path.partition(f"{KEY}/")[2] for path in machines.paths("scratch/")} == {"journal.jsonl"}


def checkpoint(scratch: Path, step: int) -> None:
    folder = scratch / "checkpoints" / f"checkpoint-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "tensors.safetensors").write_bytes(b"tensors of %d" % step)
    seal(folder)


# Addresses


def test_a_bucket_is_opened_by_its_address(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    storage = open_storage(bucket)
    assert isinstance(storage, ObjectStorage)
    commit(storage, *stage(storage, b"weights"))
    assert open_storage(bucket).lookup(KEY).ref is not None
    assert open_storage(f"{bucket}-of-another-team").lookup(KEY).ref is None
    assert isinstance(open_storage(str(tmp_path / "store")), Store)


@pytest.mark.parametrize(
    "address", ["ftp://host/x", "s3://", "s3://user:word@bucket/x", "s3://bucket/x?region=y"]
)
def test_what_is_no_buckets_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="write s3://BUCKET/PREFIX"):
        open_storage(address)

"""A storage can be read without changing it, in a folder and in a bucket."""

from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from tests.storage.stored import KEY, commit, stage
from vantage.storage.measured_file import read_sealed
from vantage.storage.storage import Storage, open_storage
from vantage.storage.store import Store

Open = Callable[[], Storage]


@pytest.fixture(params=["folder", "bucket"])
def open_it(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the same storage, each time as another machine would."""
    address = str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("bucket")
    machines = iter(range(9))

    def opened() -> Storage:
        monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / f"cache-{next(machines)}"))
        return open_storage(address)

    return opened


def test_an_artifact_is_found_with_what_was_measured(open_it: Open) -> None:
    here = open_it()
    assert here.inspect(KEY).ref is None
    assert not here.has_object("0" * 64)
    artifact = commit(here, *stage(here, b"weights"))
    there = open_it()
    assert there.address == here.address
    ref = there.inspect(KEY).ref
    assert ref is not None
    assert ref.artifact == artifact
    assert there.has_object(artifact.digest)
    assert (there.verify(artifact), there.check_sizes(artifact)) == ([], [])
    assert there.sealed(artifact.digest) == read_sealed(here.folder(artifact), digest=artifact.digest)
    with pytest.raises((ValueError, OSError)):
        there.sealed("0" * 64)


@pytest.mark.parametrize(
    ("content", "by_size", "by_bytes"),
    [(b"weights", True, True), (b"weightz", True, False), (b"half", False, False), (None, False, False)],
)
def test_damage_shows_in_sizes_or_in_bytes(
    open_it: Open, content: bytes | None, by_size: bool, by_bytes: bool
) -> None:
    here = open_it()
    artifact = commit(here, *stage(here, b"weights"))
    path = f"{artifact.uri}/weights.bin"
    if isinstance(here, Store):
        (here.root / path).chmod(0o644)
    if content is None:
        obstore.delete(here.remote, path)
    else:
        obstore.put(here.remote, path, content)
    there = open_it()
    assert (not there.check_sizes(artifact)) is by_size
    assert (not there.verify(artifact)) is by_bytes
    # A bucket's objects are not fetched for a look; a run fetches them, and finds out.
    finds = by_bytes if isinstance(there, Store) else by_size
    assert (there.inspect(KEY).ref is not None) is finds


def test_reports_are_those_of_the_machine_that_computes(open_it: Open) -> None:
    here = open_it()
    scratch = here.scratch_folder(KEY)
    with here.keep_copy(KEY, ("journal.jsonl", "progress.json")):
        (scratch / "journal.jsonl").write_text("line 1\n")
        (scratch / "progress.json").write_text("{}")
    seen = open_it().reports(KEY, ("journal.jsonl", "progress.json", "committed.json"))
    assert (seen / "journal.jsonl").read_text() == "line 1\n"
    assert (seen / "progress.json").read_text() == "{}"
    assert not (seen / "committed.json").exists()


def test_one_file_is_read_and_checked(open_it: Open) -> None:
    here = open_it()
    artifact = commit(here, *stage(here, b"weights"))
    there = open_it()
    assert there.read_file(artifact.digest, "tokenizer/tokenizer.json") == b"{}"
    assert there.read_file(artifact.digest, "diagnosis.json") is None
    path = f"{artifact.uri}/tokenizer/tokenizer.json"
    if isinstance(here, Store):
        (here.root / path).chmod(0o644)
    obstore.put(here.remote, path, b"[]")
    with pytest.raises(ValueError, match="tokenizer.json: sha256 is"):
        open_it().read_file(artifact.digest, "tokenizer/tokenizer.json")
    with pytest.raises((ValueError, OSError)):
        there.read_file("0" * 64, "diagnosis.json")

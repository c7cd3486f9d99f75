"""A run goes on and fencing stays safe when small files of the store hold anything but what was written."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vantage.schemas.records.stage_key import stage_key
from vantage.storage.durable_files import (
    locked,
    open_private,
    replace_file,
    replace_file_unsynced,
)
from vantage.storage.garbage import bytes_in
from vantage.storage.store import Fenced, Store

PARTS = {"kind": "sft", "seed": 1}
KEY = stage_key(PARTS)

GARBAGE = [b"", b"1", b"-5\n", b"7.0\n", b"{}", b"[1]\n", b"\xff\xfe\0", b"9" * 5000 + b"\n", b"1\n2\n", None]
"""What a file may hold instead of its content; None: a folder has its name."""


def spoil(path: Path, garbage: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if garbage is None:
        (path / "inside").mkdir(parents=True)
    else:
        path.write_bytes(garbage)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def staged(store: Store, content: bytes) -> tuple[Path, int]:
    attempt = store.next_attempt(KEY)
    folder = store.staging_folder(KEY, attempt)
    (folder / "weights.bin").write_bytes(content)
    return folder, attempt


def commit(store: Store, folder: Path, attempt: int) -> str:
    description = {"kind": "policy", "parents": {}, "metrics": {}, "tokenizer_digest": "b" * 64}
    return store.commit(
        folder,
        stage_key=KEY,
        attempt=attempt,
        run_id="r",
        description=description,
        key_parts=PARTS,
        provenance={},
    ).digest


@pytest.mark.parametrize("garbage", GARBAGE)
def test_attempts_go_on_above_every_earlier_one(
    store: Store, garbage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    _, before = staged(store, b"old")
    for _ in range(3):
        before = store.next_attempt(KEY)  # these were killed before they left anything
    spoil(store.root / "locks" / f"{KEY}.attempt", garbage)
    folder, attempt = staged(store, b"new")
    assert attempt > before
    assert f"{KEY}.attempt cannot be read" in caplog.text
    commit(store, folder, attempt)
    assert store.next_attempt(KEY) == attempt + 1


@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_attempt_under_way_commits_unless_another_has_begun(store: Store, garbage: bytes | None) -> None:
    counter = store.root / "locks" / f"{KEY}.attempt"
    folder, attempt = staged(store, b"old")
    spoil(counter, garbage)
    assert commit(store, folder, attempt) == store.lookup(KEY).ref.artifact.digest  # type: ignore[union-attr]

    superseded, its_attempt = staged(store, b"superseded")
    staged(store, b"newer")
    spoil(counter, garbage)
    superseded.mkdir(exist_ok=True)
    (superseded / "weights.bin").write_bytes(b"superseded")
    with pytest.raises(Fenced):
        commit(store, superseded, its_attempt)


def test_a_name_in_staging_that_is_nobodys_is_left_alone(store: Store) -> None:
    (store.root / "staging" / f"{KEY}.old").mkdir()
    staged(store, b"new")
    assert (store.root / "staging" / f"{KEY}.old").is_dir()


def test_a_folder_in_the_place_of_a_ref_is_set_aside(store: Store) -> None:
    spoil(store.root / "refs" / f"{KEY}.json", None)
    found = store.lookup(KEY)
    assert found.ref is None and "cannot be read as a ref" in found.damage[0]
    assert store.lookup(KEY).damage == ()


def test_a_folder_in_the_place_of_a_lock_is_named_with_the_remedy(store: Store) -> None:
    lock = store.root / "locks" / f"{KEY}.lock"
    lock.mkdir()
    told = r"\.lock is a folder where a lock's file belongs; move it away"
    with pytest.raises(ValueError, match=told), store.exclusive(KEY, holder="r"):
        pass
    with pytest.raises(ValueError, match="move it away"), locked(lock):
        pass


@pytest.mark.parametrize("write", [replace_file, replace_file_unsynced])
def test_a_folder_in_the_place_of_a_file_is_kept_aside(
    tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    spoil(tmp_path / "state.json", None)
    write(tmp_path / "state.json", b"{}")
    assert (tmp_path / "state.json").read_bytes() == b"{}"
    assert (tmp_path / "state.json.damaged.1" / "inside").is_dir()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_private_file_is_its_owners_alone_from_its_first_moment(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        descriptor = open_private(tmp_path / "new", os.O_RDWR | os.O_CREAT)
        assert os.fstat(descriptor).st_mode & 0o077 == 0
        os.close(descriptor)
        (tmp_path / "old").touch(0o644)
        (tmp_path / "old").chmod(0o644)
        os.close(open_private(tmp_path / "old", os.O_RDWR | os.O_CREAT))
        assert (tmp_path / "old").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_a_link_has_its_own_bytes_and_not_those_of_what_it_leads_to(tmp_path: Path) -> None:
    """Removing a link keeps its target."""
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "folder/one").write_bytes(b"x" * 1000)
    (tmp_path / "folder/below/two").write_bytes(b"x" * 500)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder")
    assert bytes_in(tmp_path / "folder") == 1500
    assert bytes_in(link) == link.lstat().st_size < 1000
    assert bytes_in(tmp_path / "folder/one") == 1000
    assert bytes_in(tmp_path / "nothing") == 0

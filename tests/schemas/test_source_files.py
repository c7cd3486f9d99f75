"""Files from outside are read whatever their size and kind, and although they may be replaced at any moment."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from tests.support.every import every
from vantage.schemas.source_files import (
    SizeLimit,
    SourceChanged,
    SourceTooLarge,
    check_unchanged,
    copy_hashed,
    data_format,
    data_limit,
    hash_file,
    is_saved,
    model_limit,
    saved_files,
    why_not_saved,
)

SMALL = SizeLimit(3 << 20, "make it smaller")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, 3 << 20])
def test_the_copy_and_both_digests_are_of_the_same_bytes(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    assert hash_file(tmp_path / "a", SMALL) == expected
    assert copy_hashed(tmp_path / "a", tmp_path / "b", SMALL) == expected
    assert (tmp_path / "b").read_bytes() == content


def test_a_terabyte_of_nothing_is_refused_at_once(tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.truncate(10**12)
    begun = time.monotonic()
    for limit, variable in ((data_limit(), "VANTAGE_MAX_DATA_GIB"), (model_limit(), "VANTAGE_MAX_MODEL_GIB")):
        with pytest.raises(
            SourceTooLarge, match=rf"rows.jsonl has 931.3 GiB, and at most .* raise {variable}"
        ):
            hash_file(tmp_path / "rows.jsonl", limit)
    assert time.monotonic() - begun < 5.0


def test_the_environment_says_how_much_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(2000))
    monkeypatch.setenv("VANTAGE_MAX_DATA_GIB", str(1999 / 2**30))
    with pytest.raises(SourceTooLarge):
        hash_file(tmp_path / "a", data_limit())
    monkeypatch.setenv("VANTAGE_MAX_DATA_GIB", str(2000 / 2**30))
    assert hash_file(tmp_path / "a", data_limit()) == hashlib.sha256(bytes(2000)).hexdigest()
    for wrong in ("much", "-1", "0", "nan", "inf"):
        monkeypatch.setenv("VANTAGE_MAX_DATA_GIB", wrong)
        with pytest.raises(ValueError, match=f"VANTAGE_MAX_DATA_GIB='{wrong}' is no number of GiB"):
            data_limit()


def test_a_pipe_or_a_device_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(FileNotFoundError, match="not a regular file"):
            hash_file(path, SMALL)


def test_another_digest_than_the_plans_is_refused_with_both() -> None:
    check_unchanged("a.jsonl", planned="1" * 64, found="1" * 64)
    check_unchanged("a.jsonl", planned=None, found="1" * 64)
    with pytest.raises(
        SourceChanged, match=r"'a.jsonl' has changed .* 111111111111… and is 222222222222… now"
    ):
        check_unchanged("a.jsonl", planned="1" * 64, found="2" * 64)


@every(
    ("name", "ending"),
    [
        ("a.json", ".json"), ("a.JSONL", ".jsonl"), ("a.b.csv", ".csv"), ("a.csv.gz", ".csv.gz"),
        ("a.jsonl.GZ", ".jsonl.gz"), ("a.gz", None), ("a.parquet.gz", None), ("a.jsonl.zst", ".jsonl.zst"), ("a.csv.XZ", ".csv.xz"), ("b.arrow", ".arrow"),
        ("a.json.bz2", ".json.bz2"), ("a.txt", None), ("json", None),
    ],
)  # fmt: skip
def test_a_name_says_its_format(name: str, ending: str | None) -> None:
    assert data_format(f"/some.json/{name}") == ending


def test_a_name_beyond_what_a_file_can_have_is_no_saved_dataset(tmp_path: Path) -> None:
    assert why_not_saved(tmp_path / ("9" * 5000)) is None


@pytest.mark.timeout(20)
@every("state", [b"[" * 100_000, b"[]", b"3", b'{"_data_files": 3}', b'{"_data_files": [3]}', b"\xff", None])
def test_a_folder_with_a_damaged_list_of_files_is_no_saved_dataset(
    tmp_path: Path, state: bytes | None
) -> None:
    """With None the list is a pipe, to which nobody writes."""
    if state is None:
        os.mkfifo(tmp_path / "state.json")
    else:
        (tmp_path / "state.json").write_bytes(state)
    assert saved_files(tmp_path) == tmp_path
    assert not is_saved(tmp_path / "data-*.arrow")

"""Marks beside a stage's checkpoints that cannot be right count as missing, and are written anew."""

from pathlib import Path

import pytest

from vantage.tasks.training.progress import Progress, read_progress
from vantage.tasks.training.scratch import read_committed, write_committed

GARBAGE = [
    b"", b"{", b"[]", b"null", b'{"step": 3}', b'{"step": "x", "journal_offset": 1}', b"\xff\xfe", b"[" * 100_000,
    b'{"step": 1e999, "journal_offset": 0}', b'{"step": -1, "journal_offset": 0}', b'{"step": null, "journal_offset": 1}',
    None,
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_cannot_be_right_counts_as_nothing_and_is_written_anew(
    tmp_path: Path, garbage: bytes | None
) -> None:
    for name in ("committed.json", "progress.json"):
        if garbage is None:
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(garbage)
    assert read_committed(tmp_path) == (0, 0)
    assert read_progress(tmp_path / "progress.json") is None
    write_committed(tmp_path, step=3, journal_offset=70)
    Progress(tmp_path / "progress.json", total=5, phase="running")
    assert read_committed(tmp_path) == (3, 70)
    shown = read_progress(tmp_path / "progress.json")
    assert shown is not None and shown.total == 5

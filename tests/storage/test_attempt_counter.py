"""The number of an attempt is one above every earlier one, also where nobody can read how many there were."""

import logging
from pathlib import Path

import pytest

from vantage.storage.attempt_counter import SKIPPED_ATTEMPTS, increment_count, read_count


def test_attempts_are_counted_from_one(tmp_path: Path) -> None:
    path = tmp_path / "count"
    assert read_count(path) == 0
    assert [increment_count(path, seen=0) for _ in range(2)] == [1, 2]
    assert increment_count(path, seen=7) == 8, "above what was seen elsewhere"
    assert read_count(path) == 8


@pytest.mark.parametrize("content", [b"", b"7", b"seven\n", b"-7\n", b"7\n7\n", b"\xff\n", None])
def test_a_count_that_cannot_be_read_skips_attempts(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those attempts may have been made, and no two attempts may have one number."""
    path = tmp_path / "count"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert read_count(path) is None
    with caplog.at_level(logging.WARNING):
        assert increment_count(path, seen=3) == 3 + SKIPPED_ATTEMPTS + 1
    assert "cannot be read" in caplog.text
    assert read_count(path) == 3 + SKIPPED_ATTEMPTS + 1

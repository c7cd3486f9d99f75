"""Batches are kept whole or not at all; whoever goes on finds the finished ones and a journal that fits them."""

from pathlib import Path
from typing import Any

import pytest

from tests.tasks.kills import Killed
from vantage.ledger.journal import read
from vantage.tasks.training import preemption
from vantage.tasks.training.batch_files import BATCHES, BatchFiles
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import JOURNAL, PROGRESS, read_committed

TOTAL = 5


def work(scratch: Path, *, kill_in: int | None = None) -> list[dict[str, Any]]:
    """Return the squares of the batches' numbers; raise ``Killed`` in the middle of batch ``kill_in``."""
    with BatchFiles(scratch, total=TOTAL, phase="squaring") as files:
        for number in files.remaining():
            if number == kill_in:
                raise Killed
            content = {"square": number**2, "text": "数 🙂"}
            files.finish(content, metrics={"share": number / 8}, num_tokens=3, headline="share")
        return files.finished


@pytest.mark.parametrize("kill_in", range(TOTAL))
def test_killed_in_any_batch_it_goes_on_from_there(tmp_path: Path, kill_in: int) -> None:
    with pytest.raises(Killed):
        work(tmp_path, kill_in=kill_in)
    assert read_committed(tmp_path)[0] == kill_in
    assert work(tmp_path) == [{"square": n**2, "text": "数 🙂"} for n in range(TOTAL)]
    assert [(entry.step, entry.metrics["share"]) for entry in read(tmp_path / JOURNAL)] == [
        (n + 1, n / 8) for n in range(TOTAL)
    ]
    assert read_committed(tmp_path) == (TOTAL, (tmp_path / JOURNAL).stat().st_size)
    assert work(tmp_path, kill_in=0) == work(tmp_path), "nothing is left to do, so nothing is killed"


def test_a_line_of_the_journal_whose_batch_was_not_kept_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: Path, data: bytes) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("vantage.tasks.training.batch_files.replace_file", die)
        work(tmp_path)
    assert len(list(read(tmp_path / JOURNAL))) == 1
    work(tmp_path)
    assert [entry.step for entry in read(tmp_path / JOURNAL)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_batch_and_all_after_it_are_done_again(tmp_path: Path, damage: str) -> None:
    whole = work(tmp_path)
    path = tmp_path / BATCHES / "2.json"
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if damage == "truncate" else data.replace(b'"square":4', b'"square":5'))
    with BatchFiles(tmp_path, total=TOTAL, phase="squaring") as files:
        assert files.finished == whole[:2]
    assert work(tmp_path) == whole
    assert [entry.step for entry in read(tmp_path / JOURNAL)] == [1, 2, 3, 4, 5]


def test_progress_shows_how_far_it_is(tmp_path: Path) -> None:
    work(tmp_path)
    shown = read_progress(tmp_path / PROGRESS)
    assert shown is not None
    assert (shown.phase, shown.step, shown.total, shown.value) == ("squaring", 5, 5, 0.5)


def test_a_request_to_stop_is_heard_after_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until_request = iter([False, False, True])
    with monkeypatch.context() as patched:
        patched.setattr(preemption, "requested", lambda: next(until_request))
        with pytest.raises(preemption.Preempted, match="stopped on request after batch 3 of 5"):
            work(tmp_path)
    assert read_committed(tmp_path)[0] == 3
    assert len(work(tmp_path)) == TOTAL

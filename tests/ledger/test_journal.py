"""The metric journal stays readable through kills and resumes."""

import itertools
import json
import math
import os
import signal
from pathlib import Path

import pytest

from vantage.ledger.journal import Entry, Journal, read


def steps(path: Path, *offsets: int) -> list[int]:
    return [entry.step for entry in read(path, *offsets)]


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(1, {"loss": 0.1 + 0.2, "undefined": None}, time=1.7e9)
    journal.append(2, {"loss": math.nan, "ratio": math.inf, "low": -math.inf}, time=1.7e9 + 0.25)
    first, second = read(journal.path)
    assert first == Entry(step=1, time=1.7e9, metrics={"loss": 0.1 + 0.2})
    assert math.isnan(second.metrics["loss"])
    assert (second.metrics["ratio"], second.metrics["low"]) == (math.inf, -math.inf)
    assert second.time == 1.7e9 + 0.25
    # any JSON reader can read it: there is no bare NaN
    for line in journal.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_line_is_there_for_others_as_soon_as_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for step in (1, 2):
        journal.append(step, {"loss": 1.0}, time=0.0)
        assert steps(journal.path)[-1] == step
        assert journal.offset == journal.path.stat().st_size


def test_resuming_cuts_the_journal_at_the_checkpoints_offset(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in (1, 2, 3):
        journal.append(step, {"loss": 1.0}, time=0.0)
        if step == 2:
            committed = journal.sync()
    journal.close()

    resumed = Journal(path)
    resumed.truncate(committed)
    assert resumed.offset == committed
    resumed.append(3, {"loss": 2.0}, time=9.0)
    assert [(entry.step, entry.metrics["loss"]) for entry in read(path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    resumed.truncate(0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("shift", [1, -1, -10_000])
def test_an_offset_of_another_journal_is_refused(tmp_path: Path, shift: int) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(1, {"loss": 1.0}, time=0.0)
    message = (
        f"no line that ends at offset={journal.offset + shift}, so it is not the journal of this checkpoint"
    )
    with pytest.raises(ValueError, match=message):
        journal.truncate(journal.offset + shift)
    assert steps(journal.path) == [1]


def test_wherever_a_line_is_torn_it_is_dropped_on_reading_and_cut_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in (1, 2):
        journal.append(step, {"λ": 1.0, "text": float(step)}, time=0.0)
    whole = path.read_bytes()
    first_end = whole.index(b"\n") + 1
    for size in range(first_end, len(whole)):
        path.write_bytes(whole[:size])
        assert steps(path) == [1]
        reopened = Journal(path)
        assert reopened.offset == first_end
        reopened.append(2, {"λ": 1.0, "text": 2.0}, time=0.0)
        reopened.close()
        assert path.read_bytes() == whole


def test_a_torn_line_longer_than_one_piece_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 300_000)
    assert Journal(path).offset == 0
    path.write_bytes(b"{}\n" + b"x" * 300_000)
    assert Journal(path).offset == 3


def test_a_killed_writer_leaves_every_line_it_was_done_with(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        journal = Journal(path)
        for step in itertools.count(1):
            journal.append(step, {"loss": 1.0 / step}, time=0.0)
            os.write(send, b".")
    os.close(send)
    done = 0
    while done < 200:
        done += len(os.read(receive, 50))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(receive, 65536):
        done += len(more)
    os.close(receive)
    found = steps(path)
    assert found == list(range(1, len(found) + 1))
    assert done <= len(found) <= done + 1


def test_reading_between_two_offsets_gives_the_whole_lines_between(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    ends = [0]
    for step in (1, 2, 3):
        journal.append(step, {"loss": 1.0}, time=0.0)
        ends.append(journal.offset)
    for start, end in itertools.combinations(range(4), 2):
        assert steps(journal.path, ends[start], ends[end]) == list(range(start + 1, end + 1))
    assert steps(journal.path, 0, ends[2] - 1) == [1]
    assert steps(journal.path, ends[1]) == [2, 3]


@pytest.mark.parametrize(
    "line",
    [
        *("{}", "[]", "3", "x", "[" * 100_000, '{"step":1,"time":0,"metrics":[1]}', '{"step":1,"time":0,"metrics":{"a":"b"}}'),
        *('{"step":1e999,"time":0,"metrics":{}}', '{"step":Infinity,"time":0,"metrics":{}}', '{"step":NaN,"time":0,"metrics":{}}'),
        f'{{"step":1,"time":1{"0" * 400},"metrics":{{}}}}',
        f'{{"step":1,"time":0,"metrics":{{"a":1{"0" * 400}}}}}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_entry_is_refused_by_its_offset(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    first = '{"step":1,"time":0,"metrics":{}}\n'
    path.write_text(f"{first}{line}\n")
    with pytest.raises(ValueError, match=f"the line at offset {len(first)} is not a journal entry"):
        list(read(path))


def test_a_line_that_only_half_fits_on_the_disk_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AlmostFull:
        def __init__(self, file: object) -> None:
            self._file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            return os.write(journal._file.fileno(), data[:10])

    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(1, {"loss": 1.0}, time=0.0)
    with monkeypatch.context() as full:
        full.setattr(journal, "_file", AlmostFull(journal._file))
        with pytest.raises(OSError, match="only 10 of"):
            journal.append(2, {"loss": 1.0}, time=0.0)
    journal.append(2, {"loss": 3.0}, time=0.0)
    assert [entry.metrics["loss"] for entry in read(journal.path)] == [1.0, 3.0]

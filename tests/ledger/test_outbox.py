"""The queue on disk holds the right operations after kills at the worst places."""

import fcntl
import os
import resource
from pathlib import Path

import pytest

from vantage.ledger.outbox import Outbox


def values(outbox: Outbox, start: int = 0) -> list[int]:
    return [operation["n"] for _, operation in outbox.read(start)]


def test_operations_come_back_in_order_from_any_end(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "run" / "ledger")
    for n in range(3):
        outbox.append({"n": n})
    ends = [end for end, _ in outbox.read()]
    assert values(Outbox(outbox.folder)) == [0, 1, 2]
    assert values(outbox, ends[0]) == [1, 2]
    assert values(outbox, ends[2]) == []


def test_a_line_that_is_nested_too_deeply_is_refused_as_any_that_is_no_json(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    (tmp_path / "outbox.jsonl").write_text("[" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"outbox\.jsonl: the line that ends at byte 200001 is nested"):
        values(outbox)


@pytest.mark.parametrize("half", ['{"n"', '{"n": 2}'])
def test_a_line_without_its_end_is_not_there_and_the_next_writer_cuts_it_off(
    tmp_path: Path, half: str
) -> None:
    outbox = Outbox(tmp_path)
    outbox.append({"n": 1})
    with (tmp_path / "outbox.jsonl").open("a") as file:
        file.write(half)
    after_the_kill = Outbox(tmp_path)
    assert values(after_the_kill) == [1]
    after_the_kill.append({"n": 3})
    assert values(Outbox(tmp_path)) == [1, 3]


def test_each_destination_has_its_own_end(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append({"n": 1})
    (end, _), *_ = outbox.read()
    outbox.mark_sent("one server", end)
    assert (outbox.is_pending("one server"), outbox.is_pending("another")) == (False, True)
    outbox.append({"n": 2})
    reopened = Outbox(tmp_path)
    assert reopened.is_pending("one server")
    assert values(reopened, reopened.sent("one server")) == [2]


def test_a_run_is_sent_when_one_destination_has_all_of_it(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    assert not outbox.is_unsent()
    for n in range(2):
        outbox.append({"n": n})
    first, last = (end for end, _ in outbox.read())
    assert outbox.is_unsent()
    outbox.mark_sent("one server", first)
    assert outbox.is_unsent()
    outbox.mark_sent("another", last)
    assert not outbox.is_unsent()


def test_each_line_is_on_the_disk_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    outbox = Outbox(tmp_path)
    outbox.append({"n": 1})
    outbox.append({"n": 2})
    ends = [end for end, _ in outbox.read()]
    assert [size for size in sizes if size in ends] == ends


def test_one_process_sends_at_a_time(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append({"n": 1})
    other = os.open(tmp_path / "sending.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    with outbox.sending(wait_seconds=0.05) as ours:
        assert not ours
    os.close(other)
    with outbox.sending(wait_seconds=0.0) as ours:
        assert ours


def test_what_cannot_be_read_is_kept_beside_a_new_outbox(tmp_path: Path) -> None:
    for n in (1, 2):
        outbox = Outbox(tmp_path / "ledger")
        outbox.append({"n": n})
        outbox.set_aside()
    kept = [values(Outbox(tmp_path / f"ledger-unreadable-{i}")) for i in (1, 2)]
    assert kept == [[1], [2]]
    assert values(Outbox(tmp_path / "ledger")) == []


def test_a_full_disk_costs_lateness_and_nothing_else(tmp_path: Path) -> None:
    """The kernel writes a part of the second line and refuses the rest, and then all of the third."""
    outbox = Outbox(tmp_path)
    outbox.append({"n": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "outbox.jsonl").stat().st_size + 3, before[1]))
    try:
        for n in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                outbox.append({"n": n})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert values(Outbox(tmp_path)) == [1]
    outbox.append({"n": 4})
    assert values(Outbox(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{", b"[]", b"3", b'{"here": "5"}', b'{"here": -1}', b'{"here": 1e9}', b'{"here": 7}', b'{"here": 10000}',
     b'{"here": null}', b'{"here": true}', b"\xff\0", b"[" * 100_000, None],
)  # fmt: skip
def test_a_note_of_what_was_sent_that_cannot_be_right_sends_all_again(
    tmp_path: Path, garbage: bytes | None
) -> None:
    outbox = Outbox(tmp_path)
    for n in range(2):
        outbox.append({"n": n})
    *_, (end, _) = outbox.read()
    outbox.mark_sent("here", end)
    assert not outbox.is_pending("here")
    (tmp_path / "sent.json").unlink()
    if garbage is None:
        (tmp_path / "sent.json").mkdir()
    else:
        (tmp_path / "sent.json").write_bytes(garbage)
    again = Outbox(tmp_path)
    assert again.is_pending("here")
    assert values(again, again.sent("here")) == [0, 1]
    again.mark_sent("here", end)
    assert not Outbox(tmp_path).is_pending("here")


def test_all_that_waits_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        outbox = Outbox(tmp_path / "ledger")
        outbox.append({"n": 1})
        outbox.mark_sent("here", 1)
        outbox.mark_refused("here", {"n": 1}, "no")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in outbox.folder.iterdir()}
    assert modes == {"outbox.jsonl": 0o600, "sent.json": 0o600, "refused.jsonl": 0o600}

"""An outbox can be replayed, and its lines are a chain: after the first line with a digest of its predecessor, every line has one."""

import hashlib
from typing import Any

from vantage.ledger.operations import RecordVerdicts
from vantage.ledger.outbox import BEFORE
from vantage.ledger.replay import OutboxLine, Replay, _Chain


def digest(*lines: bytes) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def test_lines_before_the_first_of_a_chain_may_be_without() -> None:
    """Lines that an earlier version wrote have no digest of the lines before them. The first digest covers them too."""
    chain = _Chain()
    assert not chain.add(1, b"one\n", {})
    assert chain.add(2, b"two\n", {BEFORE: digest(b"one\n")})
    assert chain.add(3, b"three\n", {BEFORE: digest(b"one\n", b"two\n")})
    assert (chain.changed, chain.is_begun) == ("", True)


def test_a_line_without_a_digest_after_one_with_it_was_changed() -> None:
    chain = _Chain()
    chain.add(1, b"one\n", {BEFORE: digest()})
    chain.add(2, b"two\n", {})
    chain.add(3, b"three\n", {})
    assert "line 2 has no sha256_before" in chain.changed
    assert chain.is_begun


def test_a_line_that_another_one_replaced_is_found_by_the_next() -> None:
    chain = _Chain()
    chain.add(1, b"another\n", {BEFORE: digest()})
    chain.add(2, b"two\n", {BEFORE: digest(b"one\n")})
    assert "the lines before line 2 are not those" in chain.changed


def test_the_last_verdicts_of_a_stage_count() -> None:
    def verdicts(time: int, stage: str) -> RecordVerdicts:
        return RecordVerdicts(time=time, stage=stage, verdicts=())

    operations = [verdicts(1, "policy"), verdicts(2, "policy"), verdicts(3, "reward")]
    entry: Any = None
    replay = Replay(tuple(OutboxLine(each, entry, end) for end, each in enumerate(operations)))
    found = replay.recorded_verdicts("policy")
    assert found is not None and found.time == 2
    assert replay.recorded_verdicts("sft") is None

"""The chain of an outbox's lines: each says what was before it, once one has said so."""

import hashlib

from vantage.ledger.outbox import BEFORE
from vantage.ledger.replay import _Chain


def digest(*lines: bytes) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def test_lines_before_the_first_of_a_chain_may_be_without() -> None:
    """An earlier version wrote them; they are in the first digest all the same."""
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

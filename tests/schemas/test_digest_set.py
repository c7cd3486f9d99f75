"""A set of digests holds what Python's own set holds, in a fraction of the memory."""

import hashlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as some

from vantage.schemas.digest_set import DigestSet


# Few bytes of few values: digests repeat, and begin inside two others that stand side by side
@given(some.lists(some.lists(some.sampled_from([0, 1]), min_size=4, max_size=4).map(bytes), max_size=40))
def test_it_says_of_each_digest_what_a_set_says(digests: list[bytes]) -> None:
    found, expected = DigestSet(4), set[bytes]()
    for digest in digests:
        assert found.add(digest) == (digest not in expected)
        expected.add(digest)
    assert len(found) == len(expected)


@pytest.mark.slow
def test_a_digest_of_16_bytes_takes_less_than_24() -> None:
    tracemalloc.start()
    try:
        found = DigestSet(16)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(200_000):
            found.add(hashlib.blake2b(number.to_bytes(4), digest_size=16).digest())
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 200_000
    assert (after - before) / 200_000 < 24

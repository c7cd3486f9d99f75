"""Each file has its own hash, although files are read in the order of their sizes."""

import hashlib
from collections.abc import Iterator

from vantage.storage.hashed_files import FileToHash, HashClock, hash_all

CONTENTS = [b"one", b"the second is the longest of all", b"", b"and the fourth", b"5"]


def parts_of(content: bytes) -> Iterator[bytes]:
    return iter([content[:2], content[2:]])


def test_a_hash_stands_where_its_file_stood() -> None:
    clock = HashClock()
    files = [
        FileToHash(str(n), len(each), lambda each=each: parts_of(each)) for n, each in enumerate(CONTENTS)
    ]  # type: ignore[misc]
    assert hash_all(files, clock) == [hashlib.sha256(each).hexdigest() for each in CONTENTS]
    assert clock.num_bytes == sum(map(len, CONTENTS))


def test_a_file_that_cannot_be_read_has_its_error_and_the_others_their_hashes() -> None:
    def broken() -> Iterator[bytes]:
        raise OSError("gone")

    files = [
        FileToHash("small", 1, lambda: iter([b"a"])),
        FileToHash("large", 9, broken),
        FileToHash("middle", 5, lambda: iter([b"abcde"])),
    ]
    first, second, third = hash_all(files, HashClock())
    assert isinstance(second, OSError) and str(second) == "gone"
    assert (first, third) == tuple(hashlib.sha256(each).hexdigest() for each in (b"a", b"abcde"))

"""Find training prompts that nearly equal a held-out one, by MinHash, and confirm them by their exact Jaccard similarity.

MinHash (Broder 1997) gives each text a signature; two texts agree in a share of its numbers that is about their similarity.
Signatures are cut into bands, and texts with an equal band are compared (Leskovec, Rajaraman and Ullman, Mining of Massive
Datasets, chapter 3).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from vantage.tasks.data.splits import TEST, TRAIN, VALIDATION, alike_text

SHINGLE = 3
"""Characters of a shingle. It is short, so that short prompts and scripts without spaces can be compared."""
NUM_HASHES = 256
"""Most hashes of a signature."""
RECALL = 0.99
"""Least chance of finding a pair whose similarity is exactly the threshold; pairs that are more similar are found more
often."""
_MARGIN = 0.1
"""Amount by which the similarity of two signatures may be below the threshold; its standard error is at most 0.032."""
_SEED = 1
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class NearDuplicate:
    """A training row and a held-out row with similar prompts."""

    row: int
    """Number of the training row among the usable rows, from 0."""
    held_out_row: int
    """Number of the held-out row among the usable rows; in another dataset, among its held-out rows, validation first."""
    similarity: float
    prompt: str
    """Beginning of the training row's prompt."""
    held_out: str
    held_out_of: str | None = None
    """Dataset that holds the row out; None: the same dataset."""


def near_duplicates(
    texts: Callable[[], Iterable[str]],
    sides: Sequence[str | None],
    *,
    similarity: float,
    elsewhere: Iterable[tuple[str, str]] = (),
) -> Iterator[NearDuplicate]:
    """Yield the training rows whose text has at least this Jaccard similarity with a held-out one, each once.

    Memory holds, for each held-out row, its signature, its text, and 2 to 4 kB of the index.

    Args:
        texts: function that returns the text of every row, in order; called twice.
        sides: side of every row; the caller may change those after the row that was found last.
        similarity: threshold for the similarity of two sets of shingles, above 0.
        elsewhere: (dataset, text) of rows that other datasets hold out.
    """
    from rensa import RMinHash, RMinHashLSH  # loaded only when needed

    num_bands, num_rows = banding(similarity)
    num_hashes = num_bands * num_rows
    index = RMinHashLSH(threshold=similarity, num_perm=num_hashes, num_bands=num_bands)

    def signed(text: str) -> "RMinHash":
        signature = RMinHash(num_perm=num_hashes, seed=_SEED)
        signature.update(sorted(shingles(text)))
        return signature

    held_out: list[tuple[str | None, int, str]] = []
    values = array("I")
    for dataset, row, text in chain(_held_out(texts(), sides), _numbered(elsewhere)):
        signature = signed(text)
        index.insert(len(held_out), signature)
        values.extend(signature.digest())
        held_out.append((dataset, row, text))
    signatures = np.frombuffer(values, dtype=np.uint32).reshape(len(held_out), num_hashes)
    for row, text in enumerate(texts()):
        if sides[row] != TRAIN:
            continue
        signature = signed(text)
        candidates = np.array(sorted(index.query(signature)), dtype=np.int64)
        alike = (signatures[candidates] == np.array(signature.digest(), dtype=np.uint32)).mean(axis=1)
        for place in np.argsort(-alike, kind="stable")[: int((alike >= similarity - _MARGIN).sum())]:
            dataset, other_row, other = held_out[candidates[place]]
            exact = jaccard(text, other)
            if exact >= similarity:
                yield NearDuplicate(
                    row, other_row, exact, text[:_SHOWN_CHARACTERS], other[:_SHOWN_CHARACTERS], dataset
                )
                break


def _held_out(texts: Iterable[str], sides: Sequence[str | None]) -> Iterator[tuple[None, int, str]]:
    for row, (text, side) in enumerate(zip(texts, sides, strict=True)):
        if side in (VALIDATION, TEST):
            yield None, row, text


def _numbered(elsewhere: Iterable[tuple[str, str]]) -> Iterator[tuple[str, int, str]]:
    rows: Counter[str] = Counter()
    for dataset, text in elsewhere:
        yield dataset, rows[dataset], text
        rows[dataset] += 1


def shingles(text: str) -> set[str]:
    """Return all shingles (``SHINGLE`` characters) of the text without case and repeated white space; a shorter text is
    one shingle."""
    alike = alike_text(text)
    return {alike[begin : begin + SHINGLE] for begin in range(max(1, len(alike) - SHINGLE + 1))}


def jaccard(one: str, other: str) -> float:
    """Return |A ∩ B| / |A ∪ B| of the texts' shingles."""
    first, second = shingles(one), shingles(other)
    return len(first & second) / len(first | second)


def banding(similarity: float) -> tuple[int, int]:
    """Return (bands, hashes per band) of a signature: the longest bands that still find ``RECALL`` of the pairs at the
    similarity.

    Pairs of similarity s share a band with probability 1 − (1 − s^r)^b; long bands give fewer candidates that are less similar.
    """
    for num_rows in range(NUM_HASHES, 1, -1):
        num_bands = NUM_HASHES // num_rows
        if 1 - (1 - similarity**num_rows) ** num_bands >= RECALL:
            return num_bands, num_rows
    return NUM_HASHES, 1

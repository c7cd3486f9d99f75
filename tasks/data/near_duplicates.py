"""Prompts for training that are nearly a held-out one: found by MinHash, confirmed by their exact Jaccard similarity.

MinHash (Broder 1997) gives each text a signature of which two texts share a share of about their similarity. Signatures are
cut into bands; texts with an equal band are compared (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from vantage.tasks.data.splits import TEST, TRAIN, VALIDATION, alike_text

SHINGLE = 3
"""Characters of a sequence: few, so that short prompts and scripts without spaces are compared, too."""
NUM_HASHES = 256
"""Of a signature, at most."""
RECALL = 0.99
"""At the least with which a pair of exactly the similarity that is asked for is found; more similar ones are found more often."""
_MARGIN = 0.1
"""Signatures of pairs that are confirmed may be so much less similar; their standard error is at most 0.032."""
_SEED = 1
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class NearDuplicate:
    """A row for training and a held-out row."""

    row: int
    """Its number among the usable rows, from 0."""
    held_out_row: int
    """The same; of another dataset, its number among that one's held-out rows, validation first."""
    similarity: float
    prompt: str
    """The beginning of it."""
    held_out: str
    held_out_of: str | None = None
    """The dataset that holds it out; None: the same."""


def near_duplicates(
    texts: Callable[[], Iterable[str]],
    sides: Sequence[str | None],
    *,
    similarity: float,
    elsewhere: Iterable[tuple[str, str]] = (),
) -> Iterator[NearDuplicate]:
    """Yield the rows for training whose text has at least that Jaccard similarity with a held-out one, each once.

    Memory holds for each held-out row its signature and its text, and 2 to 4 kB of the index.

    Args:
        texts: the text of every row, in order; called twice.
        sides: the side of every row; may be changed behind the row that was found last.
        similarity: of their sets of shingles, above 0.
        elsewhere: (dataset, text) that others hold out.
    """
    from rensa import RMinHash, RMinHashLSH  # only where it is asked for

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
    """Return all sequences of ``SHINGLE`` characters of the text without case and repeated white space; of a shorter text itself."""
    alike = alike_text(text)
    return {alike[begin : begin + SHINGLE] for begin in range(max(1, len(alike) - SHINGLE + 1))}


def jaccard(one: str, other: str) -> float:
    """Return |A ∩ B| / |A ∪ B| of their shingles."""
    first, second = shingles(one), shingles(other)
    return len(first & second) / len(first | second)


def banding(similarity: float) -> tuple[int, int]:
    """Return bands of a signature and hashes in each: the longest bands by which ``RECALL`` of pairs at the similarity are found.

    1 − (1 − s^r)^b of pairs of similarity s have an equal band; long bands bring up fewer pairs that are less similar.
    """
    for num_rows in range(NUM_HASHES, 1, -1):
        num_bands = NUM_HASHES // num_rows
        if 1 - (1 - similarity**num_rows) ** num_bands >= RECALL:
            return num_bands, num_rows
    return NUM_HASHES, 1

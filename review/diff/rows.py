"""Find rows that one Parquet file has and another has not, by content, in bounded memory.

The sha256 of every row is written to one of several temporary files, chosen by its first bits; then the files are compared one
by one. So memory holds a batch of rows, then the hashes in one file, whatever the number of rows.
"""

import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vantage.schemas.safe_text import safe_text

if TYPE_CHECKING:
    import numpy as np

EXAMPLES = 3
"""Number of added rows, and of removed rows, that are shown."""
_PARTS = 32
_BATCH = 4096
_HASH_BYTES = 16
_LONGEST = 160
"""Most characters of a value that are shown."""


@dataclass(frozen=True)
class RowDifference:
    """Rows of files A and B, compared as multisets: a row that occurs twice counts twice."""

    rows_a: int
    rows_b: int
    added: int
    """Number of rows of B that A does not have."""
    removed: int
    """Number of rows of A that B does not have."""
    examples_added: tuple[dict[str, str], ...] = ()
    examples_removed: tuple[dict[str, str], ...] = ()


def row_difference(a: Path | None, b: Path | None) -> RowDifference:
    """Compare two Parquet files; None: a file without rows.

    A column without any value is equal to a missing column; the order of rows and columns does not matter.

    Raises:
        OSError, ValueError: a file cannot be read as Parquet (pyarrow's errors are of these kinds).
    """
    import numpy as np

    with ExitStack() as held:
        sides = [_hashed(path, held) for path in (a, b)]
        added = removed = 0
        new: list[int] = []
        gone: list[int] = []
        for ours, theirs in zip(*(side.parts for side in sides), strict=True):
            (hashes_a, numbers_a), (hashes_b, numbers_b) = _read(ours), _read(theirs)
            _, index = np.unique(np.concatenate([hashes_a, hashes_b]), return_inverse=True)
            of_a, of_b = index[: len(hashes_a)], index[len(hashes_a) :]
            size = int(index.max()) + 1 if len(index) else 0
            surplus = np.bincount(of_b, minlength=size) - np.bincount(of_a, minlength=size)
            added += int(surplus.clip(min=0).sum())
            removed += int((-surplus).clip(min=0).sum())
            new = sorted([*new, *_first(numbers_b[surplus[of_b] > 0])])[:EXAMPLES]
            gone = sorted([*gone, *_first(numbers_a[surplus[of_a] < 0])])[:EXAMPLES]
    return RowDifference(sides[0].rows, sides[1].rows, added, removed, _shown(b, new), _shown(a, gone))


@dataclass
class _Hashed:
    """The hashes of a file's rows, each with the row's number."""

    parts: list[IO[bytes]]
    rows: int = 0


def _hashed(path: Path | None, held: ExitStack) -> _Hashed:
    files = (tempfile.TemporaryFile() for _ in range(_PARTS))  # noqa: SIM115  `held` closes them
    hashed = _Hashed([held.enter_context(file) for file in files])
    for row in _rows(path):
        digest = hashlib.sha256(_text(row).encode(errors="surrogatepass")).digest()[:_HASH_BYTES]
        hashed.parts[digest[0] % _PARTS].write(digest + hashed.rows.to_bytes(8, "little"))
        hashed.rows += 1
    return hashed


def _rows(path: Path | None) -> Iterator[dict[str, Any]]:
    if path is None:
        return
    import pyarrow.parquet as pq

    # Without these, the whole file would end up in memory.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        yield from chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(_BATCH))


def _text(row: dict[str, Any]) -> str:
    present = {column: value for column, value in row.items() if value is not None}
    return json.dumps(present, sort_keys=True, separators=(",", ":"), default=repr)


def _read(part: IO[bytes]) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Return the hashes in one file, and the numbers of their rows."""
    import numpy as np

    part.seek(0)
    found = np.frombuffer(part.read(), dtype=[("hash", f"V{_HASH_BYTES}"), ("row", "<u8")])
    return found["hash"].copy(), found["row"].copy()


def _first(numbers: "np.ndarray[Any, Any]") -> list[int]:
    import numpy as np

    return [int(number) for number in np.sort(numbers)[:EXAMPLES]]


def _shown(path: Path | None, numbers: Collection[int]) -> tuple[dict[str, str], ...]:
    """Return these rows of a file, as short texts."""
    wanted, found = set(numbers), []
    for number, row in enumerate(_rows(path) if wanted else ()):
        if number in wanted:
            found.append({column: _short(value) for column, value in row.items() if value is not None})
            if len(found) == len(wanted):
                break
    return tuple(found)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    text = safe_text(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

"""Read the rows of a user's file one at a time: an unreadable row is a fault of that row, and changes no other row.

Nothing is guessed. JSON keeps its types, and CSV is text. A wrong byte, quote or bracket costs only its own row. Memory
holds one row, whatever the size of the file (for Parquet: one batch of a row group).
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import pyarrow as pa

from vantage.schemas.doubled import doubled
from vantage.schemas.source_files import PACKINGS, SizeLimit
from vantage.tasks.data.arrow_rows import WRITE_AGAIN
from vantage.tasks.data.isolated_rows import isolated_rows
from vantage.tasks.data.row_faults import Fault, SourceRow, UnreadableFile, shown

MAX_ROW_BYTES = 16 << 20
"""Most bytes of one row in the file; a longer row is refused."""

ISOLATED = (".arrow", ".parquet")
"""Files that a library reads; a damaged one may crash the library."""

_CHUNK = 1 << 20
_PEEK = 1 << 12
_BOM = b"\xef\xbb\xbf"

PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PK\x03\x04": "zip",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""First bytes of a packed file → its format."""


class _DamagedFile(Exception):
    """The bytes of a packed file are damaged."""


class _Wrong(ValueError):
    """A row cannot be read; the message is the reason."""


def read_rows_of(path: Path, ending: str, limit: SizeLimit) -> Iterator[SourceRow]:
    """Yield the rows of a file in their order.

    Args:
        path: the file.
        ending: format: one of ``vantage.schemas.source_files.DATA_FORMATS``.
        limit: limit of the unpacked bytes of a packed file.

    Raises:
        UnreadableFile: the file does not have the format of ``ending``, or is cut off.
        SourceTooLarge: the file unpacks to more than the limit.
    """
    if ending in ISOLATED:
        yield from isolated_rows(ending, path, limit)
    else:
        with path.open("rb") as raw:
            yield from _text_rows(raw, str(path), ending, limit)


def read_rows_of_open(file: BinaryIO, named: str, ending: str, limit: SizeLimit) -> Iterator[SourceRow]:
    """Yield the rows of an open file that may be remote: only the parts that are needed are read.

    Args:
        file: a seekable file.
        named: the file's name in messages.

    Other arguments and errors as ``read_rows_of``.
    """
    if ending in ISOLATED:
        yield from isolated_rows(ending, file, limit)
    else:
        yield from _text_rows(io.BufferedReader(cast(io.RawIOBase, file)), named, ending, limit)


def _text_rows(raw: io.BufferedReader, named: str, ending: str, limit: SizeLimit) -> Iterator[SourceRow]:
    with _unpacked(raw, named, ending, limit) as file:
        if ending.startswith(".csv"):
            yield from _csv_rows(file)
        elif ending.startswith(".json") and not ending.startswith(".jsonl") and _begins_with_bracket(file):
            yield from (_json_row(text) for text in _elements(file))
        else:
            yield from (_json_row(line) for line in _lines(file) if line is None or line.strip())


# -- bytes


@contextmanager
def _unpacked(
    raw: io.BufferedReader, named: str, ending: str, limit: SizeLimit
) -> Iterator[io.BufferedReader]:
    packing = next((name for end, name in PACKINGS.items() if ending.endswith(end)), None)
    start = raw.peek(8)
    found = next((name for magic, name in PACKED.items() if start.startswith(magic)), None)
    if packing is not None and found != packing:
        last = ending.rpartition(".")[2]
        raise UnreadableFile(f"its name ends with .{last}, but it is not packed with {packing}; rename it")
    if found != packing:
        end = next((end for end, name in PACKINGS.items() if name == found), None)
        way_out = "" if end is None else f", or let its name end with {ending}{end}"
        raise UnreadableFile(f"by its first bytes it is {found}; make it plain text in UTF-8{way_out}")
    if packing is None:
        yield raw
        return
    try:
        yield io.BufferedReader(_Unpacked(named, _UNPACK[packing](raw), limit))
    except _DAMAGED as error:
        raise UnreadableFile(f"its {packing} is damaged or cut off ({error}); pack it again") from error


def _unpack_zstandard(raw: BinaryIO) -> Any:
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")


_UNPACK: dict[str, Callable[[BinaryIO], Any]] = {
    "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstandard": _unpack_zstandard,
}
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, _DamagedFile)


class _Unpacked(io.RawIOBase):
    """The content of a packed file, up to a limit."""

    def __init__(self, named: str, file: Any, limit: SizeLimit) -> None:
        self._file = file
        self._named, self._limit, self._size = named, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._file.read(len(buffer))
        except OSError as error:  # bzip2 and Arrow raise this for damage; the file itself was opened
            if isinstance(error, gzip.BadGzipFile) or error.errno is not None:
                raise
            raise _DamagedFile(str(error).splitlines()[0]) from error
        buffer[: len(content)] = content
        self._size += len(content)
        self._limit.check(f"{self._named}, unpacked,", self._size)
        return len(content)


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file without a byte order mark; None for a line that is too long."""
    is_first = True
    while line := file.readline(MAX_ROW_BYTES + 1):
        if is_first:
            line, is_first = line.removeprefix(_BOM), False
        if len(line) <= MAX_ROW_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_CHUNK)
        yield None


# -- JSON


def _json_row(text: bytes | None) -> SourceRow:
    if text is None:
        return Fault(f"longer than {MAX_ROW_BYTES >> 20} MiB", "")
    try:
        row = json.loads(text.decode(), object_pairs_hook=_without_doubles, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        return Fault("not UTF-8", shown(text))
    except RecursionError:
        return Fault("nested too deeply", shown(text))
    except _Wrong as error:
        return Fault(str(error), shown(text))
    except ValueError:  # also raised for an integer of more than 4,300 digits
        return Fault("not JSON", shown(text))
    return row if isinstance(row, dict) else Fault("not an object {column: value}", shown(text))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _Wrong("a key occurs twice")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise _Wrong(f"{name} is not JSON")


def _begins_with_bracket(file: io.BufferedReader) -> bool:
    """Return whether the file contains one list."""
    return file.peek(_PEEK).removeprefix(_BOM).lstrip().startswith(b"[")


_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')


def _elements(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the text of each element of the list that begins here; None for an element that is too long.

    Only quotes, brackets and commas are read, so that a fault in one element does not affect the others.
    """
    depth, in_string, escaped = 0, False, False
    element: bytearray | None = bytearray()
    number = 0
    while chunk := file.read(_CHUNK):
        begin = position = 0
        if escaped:
            position, escaped = 1, False
        while match := (_INSIDE if in_string else _OUTSIDE).search(chunk, position):
            mark, position = match[0], match.end()
            if mark == b"\\":
                position += 1
                escaped = position > len(chunk)
            elif mark == b'"':
                in_string = not in_string
            elif mark in b"[{":
                depth += 1
                if depth == 1:
                    begin = position
            elif mark == b"," and depth > 1:
                continue
            else:
                depth -= mark in b"]}"
                if depth > 1 or (depth == 1 and mark != b","):
                    continue
                element = _extended(element, chunk[begin : match.start()])
                if depth == 0:
                    if element is None or element.strip() or number:
                        yield element if element is None else bytes(element)
                    _refuse_rest(chunk[position:], file)
                    return
                yield element if element is None else bytes(element)
                element, begin, number = bytearray(), position, number + 1
        if depth:
            element = _extended(element, chunk[begin:])
    raise UnreadableFile(
        f"the list is not closed: the file is cut off in or after row {number}; {WRITE_AGAIN}"
    )


def _extended(element: bytearray | None, more: bytes) -> bytearray | None:
    if element is None or len(element) + len(more) > MAX_ROW_BYTES:
        return None
    element += more
    return element


def _refuse_rest(rest: bytes, file: BinaryIO) -> None:
    while not rest.strip():
        rest = file.read(_CHUNK)
        if not rest:
            return
    raise UnreadableFile("something follows the list; a .json file holds one list, or a row in each line")


# -- CSV


_MARKS = (",", ";", "\t", "|")
"""Possible separators of cells: the first of these that the header has outside of quotes is used."""
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def _csv_rows(file: BinaryIO) -> Iterator[SourceRow]:
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = _TextLines(file)
    header = lines.record()
    if not isinstance(header, list):
        raise UnreadableFile(
            "its first line, which names the columns, is no line of CSV with line ends of \\n; correct that line"
        )
    twice = sorted(filter(None, doubled(header)))
    if twice:
        raise UnreadableFile(f"two of its columns are called {twice[0]!r}; rename one")
    while (record := lines.record(len(header))) is not None:
        yield record if isinstance(record, Fault) else _csv_row(header, record)


def _csv_row(header: list[str], cells: list[str]) -> SourceRow:
    """Return the cells as text; an empty cell is missing, quoted or not."""
    text = ",".join(cells)
    if len(cells) != len(header):
        return Fault("another number of cells than the header has", shown(text))
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that were not UTF-8
        return Fault("not UTF-8", shown(text))
    return {name: cell or None for name, cell in zip(header, cells, strict=True)}


class _TextLines:
    """The records of a CSV file, whose first line decides the separator. After a wrong quote, lines that were read as the
    rest of a cell are put back."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = _lines(file)
        self._waiting: deque[str | None] = deque()
        self._taken: list[str | None] = []
        header = ""
        with suppress(csv.Error):  # a header that is too long is reported with the first record
            header = next(self._feed(), "")
        self._waiting.extend(self._taken)
        unquoted = _QUOTED.sub("", header)
        self._mark = next((mark for mark in _MARKS if mark in unquoted), _MARKS[0])

    def record(self, num_cells: int | None = None) -> list[str] | Fault | None:
        """Return the next record that is not blank, or the reason why it cannot be read; None at the end of the file.

        A quote that is never closed, or that is closed in the middle of a cell, costs only its own line. The same holds
        for a quote that is closed by the first quote of a later line, if all lines but the first are records of
        ``num_cells`` without it.
        """
        while True:
            self._taken = []
            try:
                cells = next(csv.reader(self._feed(), strict=True, delimiter=self._mark), None)
            except csv.Error:
                return self._fault("not CSV: its quotes, its line end or its length")
            if cells is None:
                return None
            rest = [line or "" for line in self._taken[1:]]
            if (
                num_cells is not None
                and len(cells) != num_cells
                and rest
                and self._are_records(rest, num_cells)
            ):
                return self._fault("not CSV: its quotes, its line end or its length")
            if cells:
                return cells

    def _are_records(self, lines: list[str], num_cells: int) -> bool:
        try:
            reader = csv.reader(lines, strict=True, delimiter=self._mark)
            return all(len(cells) in (0, num_cells) for cells in reader)
        except csv.Error:
            return False

    def _fault(self, reason: str) -> Fault:
        self._waiting.extendleft(reversed(self._taken[1:]))
        return Fault(reason, shown(self._taken[0] or ""))

    def _feed(self) -> Iterator[str]:
        size = 0
        while True:
            if self._waiting:
                line = self._waiting.popleft()
            else:
                read = next(self._lines, b"")
                if read == b"":
                    return
                line = None if read is None else read.decode("utf-8", "surrogateescape")
            self._taken.append(line)
            size += MAX_ROW_BYTES + 1 if line is None else len(line)
            if size > MAX_ROW_BYTES:
                raise csv.Error("too long")
            yield line or ""

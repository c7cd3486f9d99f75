"""Make data files by a number: a valid file of one of the formats that are read, then damaged in one to three places."""

import bz2
import datetime
import gzip
import io
import json
import lzma
import random
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    8,
    127,
    255,
    2**15,
    2**16,
    10**6,
    2**24,
    2**30,
    2**31 - 1,
    -(2**31),
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
)
"""The numbers to which a length or an offset is changed."""

_WORDS = ("", "a", "réponse", "翻译 🙂", 'say "no"', "x, y\nz", "0123456789" * 9, "\\", "{[")
_TYPES: tuple[pa.DataType, ...] = (
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
)


def valid_file(ending: str, chance: random.Random) -> bytes:
    """Return the content of a valid file of this suffix."""
    rows = [_row(chance) for _ in range(chance.choice((1, 3, 8, 40)))]
    return _WRITERS[ending](rows, chance)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the content with bytes flipped, numbers changed, a block repeated, or its end cut, in one to three places."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _DAMAGES[chance.randrange(len(_DAMAGES))](data, chance)
    return bytes(data)


def damaged_file(number: int, ending: str) -> bytes:
    """Return the content of a damaged file of this suffix, the same for the same number."""
    chance = random.Random(f"{ending}:{number}")
    return damaged(valid_file(ending, chance), chance)


def _row(chance: random.Random) -> dict[str, Any]:
    def word() -> str:
        return chance.choice(_WORDS)

    return {
        "prompt": word(),
        "response": None if chance.random() < 0.1 else word(),
        "kind": chance.choice(("good", "bad")),
        "score": chance.random(),
        "turns": [{"role": "user", "content": word()} for _ in range(chance.randrange(3))],
    }


def _json(rows: list[dict[str, Any]], _: random.Random) -> bytes:
    return json.dumps(rows).encode()


def _json_lines(rows: list[dict[str, Any]], _: random.Random) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _csv(rows: list[dict[str, Any]], chance: random.Random) -> bytes:
    mark = chance.choice((",", ";", "\t"))
    cells = [["prompt", "response"], *([row["prompt"], row["response"] or ""] for row in rows)]
    quoted = [mark.join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells]
    return "\n".join(quoted).encode() + b"\n"


def _packed(
    pack: Callable[[bytes], Any], write: Callable[[list[dict[str, Any]], random.Random], bytes]
) -> Callable[[list[dict[str, Any]], random.Random], bytes]:
    return lambda rows, chance: bytes(pack(write(rows, chance)))


def _table(rows: list[dict[str, Any]], chance: random.Random, *, views: bool) -> pa.Table:
    """Return the rows with texts of different types, and columns that are nested."""
    types = [each for each in _TYPES if views or each != pa.string_view()]
    columns = {
        "prompt": pa.array([row["prompt"] for row in rows], chance.choice(types[:2])),
        "response": pa.array([row["response"] for row in rows], pa.string()).cast(chance.choice(types)),
    }
    for name, column in _more_columns(rows).items():
        if chance.random() < 0.4:
            columns[name] = column
    return pa.table(columns)


def _more_columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "turns": pa.array([row["turns"] for row in rows]),
        "score": pa.array([row["score"] for row in rows]),
        "counts": pa.array([list(range(n % 4)) for n in range(len(rows))], pa.list_(pa.int16())),
        "pairs": pa.array([[0.5, n] for n in range(len(rows))], pa.list_(pa.float64(), 2)),
        "tags": pa.array(
            [[(row["kind"], n)] for n, row in enumerate(rows)], pa.map_(pa.string(), pa.int64())
        ),
        "day": pa.array([datetime.date(2024, 1, 1 + n % 28) for n in range(len(rows))]),
        "when": pa.array([datetime.datetime(2024, 1, 1)] * len(rows), pa.timestamp("us", "Europe/Berlin")),
        "raw": pa.array([row["prompt"].encode() for row in rows], pa.binary()),
        "nothing": pa.nulls(len(rows)),
    }


def _arrow(rows: list[dict[str, Any]], chance: random.Random) -> bytes:
    table = _table(rows, chance, views=True)
    options = pa.ipc.IpcWriteOptions(compression=chance.choice((None, None, "lz4", "zstd")))
    buffer = io.BytesIO()
    opened = chance.choice((pa.ipc.new_file, pa.ipc.new_stream))
    with opened(buffer, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=chance.choice((5, 100)))
    return buffer.getvalue()


def _parquet(rows: list[dict[str, Any]], chance: random.Random) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(
        _table(rows, chance, views=False),
        buffer,
        compression=chance.choice(("none", "snappy", "zstd", "gzip", "brotli", "lz4")),
        use_dictionary=chance.random() < 0.5,
        data_page_version=chance.choice(("1.0", "2.0")),
        row_group_size=chance.choice((5, 100)),
        store_schema=chance.random() < 0.7,
    )
    return buffer.getvalue()


_WRITERS: dict[str, Callable[[list[dict[str, Any]], random.Random], bytes]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".json.gz": _packed(gzip.compress, _json),
    ".jsonl.xz": _packed(lzma.compress, _json_lines),
    ".csv.bz2": _packed(bz2.compress, _csv),
    ".jsonl.zst": _packed(lambda content: pa.compress(content, "zstd", asbytes=True), _json_lines),
}
ENDINGS = tuple(_WRITERS)


def _flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 4, 30))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _change_number(data: bytearray, chance: random.Random) -> None:
    form, size = chance.choice((("<i", 4), ("<q", 8), ("<h", 2)))
    if len(data) >= size:
        place = chance.randrange(len(data) - size + 1) // size * size
        number = chance.choice(NUMBERS) % 2 ** (8 * size)
        data[place : place + size] = struct.pack(form.upper(), number)


def _repeat(data: bytearray, chance: random.Random) -> None:
    begin, size = chance.randrange(len(data) + 1), chance.choice((1, 8, 64, 500))
    place = chance.choice((begin, chance.randrange(len(data) + 1)))
    data[place:place] = data[begin : begin + size] * chance.choice((1, 1, 2, 9))


def _cut(data: bytearray, chance: random.Random) -> None:
    begin = chance.randrange(len(data) + 1)
    del data[begin : len(data) if chance.random() < 0.5 else begin + chance.choice((1, 4, 8, 64))]


_DAMAGES = (_flip, _flip, _change_number, _change_number, _repeat, _cut)

"""Every good row of a file with odd rows comes through unchanged, and every bad one is a fault of its own."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vantage.schemas.source_files import SizeLimit, SourceTooLarge
from vantage.tasks.data import source_rows
from vantage.tasks.data.row_faults import Fault, UnreadableFile
from vantage.tasks.data.source_rows import read_rows_of

NO_LIMIT = SizeLimit(1 << 40, "")
GOOD = {"prompt": 'q "0" [{,}] \\ \u2028 中 🙂', "response": "a\nb"}


def read(folder: Path, content: bytes | str, ending: str, *, limit: SizeLimit = NO_LIMIT) -> list[Any]:
    path = folder / f"rows{ending}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return list(read_rows_of(path, ending, limit))


def reasons(rows: list[Any]) -> list[str]:
    return [row.reason if isinstance(row, Fault) else "" for row in rows]


BAD_JSON = {
    b'{"prompt": "a"': "not JSON",
    b"{'prompt': 'a'}": "not JSON",
    b'{"prompt": "a\x00b"}': "not JSON",
    b'{"prompt": "a\tb"}': "not JSON",
    b'{"prompt": ' + b"1" * 5000 + b"}": "not JSON",
    b"nothing": "not JSON",
    b'{"prompt": "\xe9"}': "not UTF-8",
    b'{"prompt": "\xed\xa0\x80"}': "not UTF-8",
    b'{"prompt": NaN}': "NaN is not JSON",
    b'{"prompt": -Infinity}': "-Infinity is not JSON",
    b'{"prompt": "a", "prompt": "b"}': "a key occurs twice",
    b'{"prompt": {"a": 1, "a": 1}}': "a key occurs twice",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
    b'["prompt", "a"]': "not an object {column: value}",
    b'"prompt"': "not an object {column: value}",
    b"7": "not an object {column: value}",
    b"null": "not an object {column: value}",
}


@pytest.mark.parametrize(("bad", "reason"), BAD_JSON.items(), ids=range(len(BAD_JSON)))
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_row_of_json_changes_no_other(
    tmp_path: Path, bad: bytes, reason: str, ending: str, place: int
) -> None:
    texts = [json.dumps(GOOD).encode(), json.dumps(GOOD, ensure_ascii=False).encode()]
    texts.insert(place, bad)
    if ending == ".jsonl":
        rows = read(tmp_path, b"\n".join(texts), ending)
    elif bad.count(b"{") == bad.count(b"}"):
        rows = read(tmp_path, b"[" + b" ,\n".join(texts) + b"]", ending)
    else:
        with pytest.raises(UnreadableFile, match="the list is not closed"):
            read(tmp_path, b"[" + b" ,\n".join(texts) + b"]", ending)
        return
    expected: list[Any] = [GOOD, GOOD]
    assert [row for row in rows if not isinstance(row, Fault)] == expected
    assert [place for place, row in enumerate(rows) if isinstance(row, Fault)] == [place]
    assert reasons(rows)[place] == reason


@pytest.mark.parametrize(
    "value", [2**63, -(2**64), 10**400, 0.1, "2024-02-30", "2024-01-01T00:00:00Z", True, None, [], {}]
)
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_values_are_as_given(tmp_path: Path, value: Any, ending: str) -> None:
    rows = [{"x": "a"}, {"x": value}, {"y": "0001"}]
    text = json.dumps(rows) if ending == ".json" else "\n".join(map(json.dumps, rows))
    assert read(tmp_path, text, ending) == rows


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_where_a_list_is_cut_into_chunks_makes_no_difference(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [GOOD, {"a": {"b": [1, [2, "]"], {"c": '\\"'}]}}, {"d": ""}]
    monkeypatch.setattr(source_rows, "_CHUNK", size)
    for text in (
        json.dumps(rows),
        json.dumps(rows, ensure_ascii=False, indent=2),
        " \ufeff"[1:] + json.dumps(rows),
    ):
        assert read(tmp_path, text, ".json") == rows


@pytest.mark.parametrize("text", ["[]", " [ \n ] \n"])
def test_an_empty_list_has_no_rows(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text, ".json") == []


@pytest.mark.parametrize("text", ['[{"a": 1}', '[{"a": 1},', '[{"a": "1}]', "["])
def test_a_list_that_is_cut_off_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnreadableFile, match="the list is not closed: the file is cut off in or after row"):
        read(tmp_path, text, ".json")


def test_what_follows_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="something follows the list"):
        read(tmp_path, '[{"a": 1}] [{"a": 2}]', ".json")


def test_a_json_file_may_hold_a_row_in_each_line(tmp_path: Path) -> None:
    assert read(tmp_path, '\ufeff{"a": 1}\r\n\n  \n{"a": 2}', ".json") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_a_row_without_end_costs_itself_alone(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_rows, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(source_rows, "_CHUNK", 300)
    if ending == ".csv":
        rows = read(tmp_path, "a\nx\n" + "y" * 5000 + "\nz\n", ending)
    else:
        texts = ['{"a": "x"}', json.dumps({"a": "y" * 5000}), '{"a": "z"}']
        text = "[" + ",".join(texts) + "]" if ending == ".json" else "\n".join(texts)
        rows = read(tmp_path, text, ending)
    assert [row for row in rows if not isinstance(row, Fault)] == [{"a": "x"}, {"a": "z"}]
    assert isinstance(rows[1], Fault)


def test_cells_of_csv_are_text(tmp_path: Path) -> None:
    text = 'prompt,response\n0001,NA\nnull,\n1e3,nan\n2024-01-02,True\n\n ""x,\' \'\r\n"two\r\nlines","a ""b"", c"\n'
    assert read(tmp_path, "\ufeff" + text, ".csv") == [
        {"prompt": "0001", "response": "NA"},
        {"prompt": "null", "response": None},
        {"prompt": "1e3", "response": "nan"},
        {"prompt": "2024-01-02", "response": "True"},
        {"prompt": ' ""x', "response": "' '"},
        {"prompt": "two\r\nlines", "response": 'a "b", c'},
    ]


BAD_CSV = (
    b"one cell", b"three,cells,here", b'"never closed,b', b'a,"never closed', b'"closed" early,b', b"caf\xe9,b",
    b'a,"b" "c"', b" ",
)  # fmt: skip


@pytest.mark.parametrize("bad", BAD_CSV)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_line_of_csv_changes_no_other(tmp_path: Path, bad: bytes, place: int) -> None:
    lines = [b'"a ""q"", 1",b', b'"c\nd",e']
    lines.insert(place, bad)
    rows = read(tmp_path, b"\n".join([b"x,y", *lines]) + b"\n", ".csv")
    assert [row for row in rows if not isinstance(row, Fault)] == [
        {"x": 'a "q", 1', "y": "b"},
        {"x": "c\nd", "y": "e"},
    ]
    assert [place for place, row in enumerate(rows) if isinstance(row, Fault)] == [place]


def test_a_bad_record_of_several_lines_gives_no_row_of_its_own_text(tmp_path: Path) -> None:
    rows = read(tmp_path, 'x,y\n"one\nfoo,bar\nend",two,three\na,b\n', ".csv")
    assert reasons(rows) == ["another number of cells than the header has", ""]


def test_a_quote_that_a_later_row_closes_costs_its_own_line(tmp_path: Path) -> None:
    rows = read(tmp_path, 'x,y\n"never closed,b\n",c",d\ne,f\n', ".csv")
    assert rows[1:] == [{"x": ",c", "y": "d"}, {"x": "e", "y": "f"}]


@pytest.mark.parametrize("seed", range(20))
def test_wrong_quotes_among_plain_lines_cost_their_lines(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    bad = [b for b in BAD_CSV if b'"' in b]
    rows: list[Any] = [{"x": f"{n} 中", "y": "b'"} for n in range(20)]
    for _ in range(4):
        rows.insert(draw.randrange(len(rows) + 1), draw.choice(bad))
    found = read(tmp_path, written(rows, ".csv", random.Random(seed), plain=True), ".csv")
    assert [row for row in found if not isinstance(row, Fault)] == [r for r in rows if isinstance(r, dict)]
    assert len(found) == len(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,a\n1,2\n", "two of its columns are called 'a'"),
        ('"a\nb', "its first line, which names the columns"),
        ("\n\n", "its first line"),
        ("a,b\r1,2\r", "its first line"),
        pytest.param(
            ",".join(map(str, range(200_000))) * 2, "are called '1'", id="in time that grows with its length"
        ),
    ],
)
def test_a_csv_without_a_usable_header_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UnreadableFile, match=said):
        read(tmp_path, text, ".csv")


@pytest.mark.parametrize("mark", [";", "\t", "|"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_the_header_says_what_stands_between_cells(tmp_path: Path, mark: str, quote: str) -> None:
    header = f"{quote}prompt, or question{quote}" if quote else "prompt"
    text = f'{header}{mark}{quote}response{quote}\n"q, {mark} and\nmore"{mark}a, b\n"never closed{mark}c\nd{mark}e\n'
    (tmp_path / "rows.csv").write_text(text)
    first, broken, last = read_rows_of(tmp_path / "rows.csv", ".csv", NO_LIMIT)
    assert first == {header.strip('"'): f"q, {mark} and\nmore", "response": "a, b"}
    assert reasons([broken]) == ["not CSV: its quotes, its line end or its length"]
    assert last == {header.strip('"'): "d", "response": "e"}


def test_of_several_marks_in_the_header_a_comma_counts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,a;b\nx;y,z\n")
    assert list(read_rows_of(tmp_path / "rows.csv", ".csv", NO_LIMIT)) == [{"prompt": "x;y", "a;b": "z"}]


def test_a_bad_value_of_parquet_costs_its_row(tmp_path: Path) -> None:
    buffers = pa.array([b"a", b"\xe9", b"c"]).buffers()
    text = pa.StringArray.from_buffers(3, buffers[1], buffers[2])
    pq.write_table(pa.table({"x": text, "n": [1, 2, 3]}), tmp_path / "rows.parquet")
    rows = list(read_rows_of(tmp_path / "rows.parquet", ".parquet", NO_LIMIT))
    assert [rows[0], rows[2]] == [{"x": "a", "n": 1}, {"x": "c", "n": 3}]
    assert reasons(rows) == ["", "a value that cannot be read", ""]


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for content in (b"not parquet", b"PAR1" + bytes(40) + b"PAR1", b""):
        with pytest.raises(UnreadableFile):
            read(tmp_path, content, ".parquet")


# -- packed files


def zstandard(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content))


PACKINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    ".gz": ("gzip", gzip.compress),
    ".bz2": ("bzip2", bz2.compress),
    ".xz": ("xz", lzma.compress),
    ".zst": ("zstandard", zstandard),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_packed_files_are_read_where_the_name_says_so_and_only_there(
    tmp_path: Path, ending: str, packing: str
) -> None:
    text = {".csv": "a,b\n1,2\n", ".json": '[{"a": "1", "b": "2"}]', ".jsonl": '{"a": "1", "b": "2"}\n'}[
        ending
    ]
    name, pack = PACKINGS[packing]
    packed = pack(text.encode())
    assert read(tmp_path, packed, f"{ending}{packing}") == [{"a": "1", "b": "2"}]
    with pytest.raises(UnreadableFile, match=f"it is {name}; .*let its name end with {ending}{packing}"):
        read(tmp_path, packed, ending)
    with pytest.raises(UnreadableFile, match=rf"ends with {packing}, but it is not packed"):
        read(tmp_path, text, f"{ending}{packing}")


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_files_that_are_damaged_or_cut_off_are_refused(tmp_path: Path, packing: str) -> None:
    name, pack = PACKINGS[packing]
    rows = [{"a": f"{n} {n * 7919 % 10007}"} for n in range(5000)]
    packed = pack("".join(json.dumps(row) + "\n" for row in rows).encode())
    assert read(tmp_path, packed, f".jsonl{packing}") == rows
    with pytest.raises(UnreadableFile, match=f"its {name} is damaged or cut off"):
        read(tmp_path, packed[: len(packed) // 2], f".jsonl{packing}")
    if packing == ".zst":  # as Arrow writes it, without a checksum
        return
    damaged = bytearray(packed)
    for place in range(len(packed) // 2, len(packed) // 2 + 40):
        damaged[place] ^= 0xFF
    with pytest.raises(UnreadableFile, match=f"its {name} is damaged or cut off"):
        read(tmp_path, bytes(damaged), f".jsonl{packing}")


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_arrow_is_read_as_a_file_and_as_a_stream(tmp_path: Path, is_stream: bool) -> None:
    rows = [{"a": "1", "b": [{"c": n}]} for n in range(2500)]
    table = pa.Table.from_pylist(rows)
    buffer = io.BytesIO()
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=1100)
    assert read(tmp_path, buffer.getvalue(), ".arrow") == rows
    with pytest.raises(UnreadableFile):
        read(tmp_path, buffer.getvalue()[:100], ".arrow")
    with pytest.raises(UnreadableFile):
        read(tmp_path, b"no arrow at all", ".arrow")


@pytest.mark.parametrize("start", [b"BZh91AY", b"PK\3\4", b"\xff\xfea\0", b"\x28\xb5\x2f\xfd"])
def test_other_packings_and_encodings_are_named(tmp_path: Path, start: bytes) -> None:
    with pytest.raises(UnreadableFile, match="by its first bytes it is .*; make it plain text in UTF-8"):
        read(tmp_path, start + b"....", ".jsonl")


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(bytes(50 << 20))
    assert len(packed) < 60_000
    with pytest.raises(SourceTooLarge, match=r"rows.jsonl.gz, unpacked, has .* raise VANTAGE"):
        read(tmp_path, packed, ".jsonl.gz", limit=SizeLimit(1 << 20, "raise VANTAGE"))


# -- many files, at random


def random_text(draw: random.Random) -> str:
    return "".join(
        draw.choice("ab\"\\,{}[]\n\r\t :;é中🙂\u2028\ufeff'0") for _ in range(draw.randrange(1, 12))
    )


def written(rows: list[Any], ending: str, draw: random.Random, *, plain: bool = False) -> bytes:
    """Return the file in which each row is a mapping, or the bytes of a bad one."""
    if ending == ".csv":
        lines = [b"x,y"]
        for row in rows:
            if isinstance(row, bytes):
                lines.append(row)
            else:
                text = io.StringIO()
                quoting = csv.QUOTE_MINIMAL if plain else draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
                csv.writer(text, quoting=quoting).writerow([row["x"], row["y"]])
                lines.append(text.getvalue().removesuffix("\r\n").encode())
            lines += [b""] * draw.randrange(2)
        return b"\r\n".join(lines) + b"\r\n"
    texts = [
        row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=draw.random() < 0.5).encode()
        for row in rows
    ]
    if ending == ".jsonl":
        return b"\n".join(texts)
    return b"[" + b",".join(texts) + b"]"


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("seed", range(60))
def test_of_any_mixture_the_good_rows_come_through_unchanged(
    tmp_path: Path, ending: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(source_rows, "_CHUNK", draw.choice([1, 5, 100, 1 << 20]))
    # among cells with quotes of their own, a quote that is wrong could be taken for one of theirs
    bad = (
        [b for b in BAD_CSV if b'"' not in b] if ending == ".csv" else [b for b in BAD_JSON if len(b) < 1000]
    )
    if ending == ".json":
        bad = [text for text in bad if text.count(b"{") == text.count(b"}")]
    rows: list[Any] = [{"x": random_text(draw), "y": random_text(draw)} for _ in range(draw.randrange(30))]
    for _ in range(draw.randrange(1, 8)):
        rows.insert(draw.randrange(len(rows) + 1), draw.choice(bad))
    read_rows = read(tmp_path, written(rows, ending, draw), ending)
    expected = [row for row in rows if not isinstance(row, bytes)]
    assert [row for row in read_rows if not isinstance(row, Fault)] == expected
    assert len(read_rows) == len(rows)

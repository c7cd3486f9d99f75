"""A damaged file is read or refused by a sentence with a remedy; whatever a library does with it ends another process."""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tasks.data.damaged_files import ENDINGS, damaged_file
from vantage.schemas.source_files import SizeLimit, SourceTooLarge
from vantage.tasks.data import isolated_rows
from vantage.tasks.data.arrow_rows import arrow_rows, parquet_rows
from vantage.tasks.data.row_faults import UnreadableFile
from vantage.tasks.data.saved_datasets import rows_of_files
from vantage.tasks.data.source_rows import ISOLATED, read_rows_of, read_rows_of_open

pytestmark = pytest.mark.slow

LIMIT = SizeLimit(1 << 30, "raise it")
TABLE = pa.table({"prompt": [f"prompt {n}" for n in range(3000)], "response": ["a"] * 3000})


def written(path: Path, table: pa.Table = TABLE) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=1000)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    return path


# -- Damage at random


def outcome(number: int, ending: str, folder: Path) -> str:
    """Return ``read`` or ``refused``. The readers of libraries run in this process."""
    file = folder / f"rows{ending}"
    file.write_bytes(damaged_file(number, ending))
    if ending == ".parquet":
        rows = parquet_rows(file)
    elif ending == ".arrow":
        rows = arrow_rows(lambda: pa.memory_map(str(file)))
    else:
        rows = read_rows_of(file, ending, LIMIT)
    try:
        for _ in rows:
            pass
        return "read"
    except (UnreadableFile, SourceTooLarge) as error:
        message = str(error)
    assert "\n" not in message
    assert ";" in message, f"no remedy: {message}"
    return "refused"


TRIAL = """
import sys
from pathlib import Path
from tests.tasks.data.test_damaged_files import outcome
ending, first, end, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
for number in range(first, end):
    print(outcome(number, ending, folder), flush=True)
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_damage_at_random_is_read_or_refused(tmp_path: Path, ending: str) -> None:
    """Each input is the same for its number. The last line of the output tells which number ended the process."""
    count = 40
    if ending not in ISOLATED:
        ends = Counter(outcome(number, ending, tmp_path) for number in range(count))
    else:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL, ending, "0", str(count), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parents[3],
        )
        assert done.returncode == 0, (len(done.stdout.split()), done.returncode, done.stderr[-2000:])
        ends = Counter(done.stdout.split())
    assert ends.total() == count
    if ending not in (".jsonl", ".csv"):  # in these formats damage costs single rows
        assert ends["refused"] >= 5


# -- What a damaged file can do


@pytest.mark.parametrize("ending", ISOLATED)
def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, ending: str) -> None:
    """A page of a mapped file that is gone ends the process that looks at it (SIGBUS)."""
    table = pa.table({"prompt": [f"{n:0500}" for n in range(100_000)]})
    file = tmp_path / f"rows{ending}"
    if ending == ".parquet":
        pq.write_table(table, file, compression="none", use_dictionary=False, row_group_size=5000)
    else:
        written(file, table)
    rows = read_rows_of(file, ending, LIMIT)
    next(rows)
    with file.open("rb+") as opened:
        opened.truncate(100_000)
    with pytest.raises(UnreadableFile, match=r"; write it again, or fetch another copy"):
        list(rows)


def test_memory_for_a_batch_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_rows, "LEAST_MEMORY", 150 << 20)
    file = tmp_path / "rows.arrow"
    batch = pa.record_batch({"prompt": ["a" * (200 << 20)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(file), "wb") as opened,
        pa.ipc.new_file(opened, batch.schema, options=options) as writer,
    ):
        writer.write_batch(batch)
    assert file.stat().st_size < 1 << 20
    with pytest.raises(UnreadableFile, match=r"; write it again"):
        list(read_rows_of(file, ".arrow", SizeLimit(150 << 20, "raise it")))


def test_rows_without_bytes_are_counted(tmp_path: Path) -> None:
    """Only a number in the file shows how many rows there are, and a wrong one would be followed for ever."""
    file = written(tmp_path / "rows.arrow", pa.table({"prompt": pa.nulls(100_000)}))
    assert sum(1 for _ in read_rows_of(file, ".arrow", LIMIT)) == 100_000
    batch = pa.record_batch({"prompt": pa.nulls(1_000_000)})
    with pa.OSFile(str(file), "wb") as opened, pa.ipc.new_stream(opened, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(UnreadableFile, match="declares more rows than fit into its [0-9]+ bytes"):
        list(read_rows_of(file, ".arrow", LIMIT))


def test_a_name_that_is_not_utf8_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for ending in ISOLATED:
        file = written(tmp_path / f"rows{ending}")
        file.write_bytes(file.read_bytes().replace(b"response", b"resp\xff\xfese"))
        with pytest.raises(UnreadableFile, match="the name of a column, .* is not UTF-8; write it again"):
            list(read_rows_of(file, ending, LIMIT))


def test_an_index_beyond_its_dictionary_refuses_the_file(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 113, 0], pa.int32()), pa.array(["a", "b"]), safe=False
    )
    file = written(tmp_path / "rows.arrow", pa.table({"prompt": column}))
    with pytest.raises(UnreadableFile, match=r"113.*; write it again"):
        list(read_rows_of(file, ".arrow", LIMIT))


# -- The process that reads


def children() -> Iterator[int]:
    for folder in Path("/proc/self/task").iterdir():
        yield from map(int, (folder / "children").read_text().split())


@pytest.mark.parametrize("ending", ISOLATED)
def test_rows_are_those_that_were_written_and_the_process_ends_with_them(tmp_path: Path, ending: str) -> None:
    file = written(tmp_path / f"rows{ending}")
    before = set(children())
    assert list(read_rows_of(file, ending, LIMIT)) == TABLE.to_pylist()
    with file.open("rb") as opened:
        assert list(read_rows_of_open(opened, file.name, ending, LIMIT)) == TABLE.to_pylist()
    rows = read_rows_of(file, ending, LIMIT)
    assert next(rows) == TABLE.slice(0, 1).to_pylist()[0]
    assert len(set(children()) - before) == 1
    rows.close()  # type: ignore[attr-defined]
    assert not set(children()) - before


def test_of_several_files_the_damaged_one_is_named(tmp_path: Path) -> None:
    files = [written(tmp_path / f"part-{n}.parquet") for n in range(3)]
    files[1].write_bytes(files[1].read_bytes()[:500])
    with pytest.raises(UnreadableFile, match=r"^part-1\.parquet: .*; write it again"):
        list(rows_of_files(f"{tmp_path}/part-*.parquet", files, ".parquet"))


def test_a_failing_disk_is_not_the_files_fault(tmp_path: Path) -> None:
    class Failing(tempfile.SpooledTemporaryFile):  # type: ignore[type-arg]
        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

    with Failing() as opened:
        opened.write(written(tmp_path / "rows.parquet").read_bytes())
        with pytest.raises(OSError, match="Input/output error"):
            list(read_rows_of_open(opened, "rows.parquet", ".parquet", LIMIT))  # type: ignore[arg-type]

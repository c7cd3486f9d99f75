"""Reading data that an attacker made runs nothing of it."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vantage.schemas.source_files import data_limit
from vantage.tasks.data.benchmark_tasks import UnusableTasks, check_tasks
from vantage.tasks.data.row_faults import UnreadableFile
from vantage.tasks.data.source_rows import read_rows_of


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "the payload ran"


def pickled_type(canary: Path) -> pa.Schema:
    """Return a column of Arrow's old extension type, whose description is a pickle (CVE-2023-47248)."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Payload(canary)),
    }
    return pa.schema([pa.field("prompt", pa.string(), metadata=metadata)])


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_column_whose_type_is_a_pickle_is_read_as_its_plain_type(
    tmp_path: Path, canary: Path, ending: str
) -> None:
    table = pa.table({"prompt": ["1+1?"]}, schema=pickled_type(canary))
    path = tmp_path / f"rows{ending}"
    if ending == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert pickle.dumps(Payload(canary)) in path.read_bytes() or ending == ".parquet"
    assert [dict(row) for row in read_rows_of(path, ending, data_limit()) if isinstance(row, dict)] == [
        {"prompt": "1+1?"}
    ]
    assert not canary.exists()


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".json", ".jsonl", ".csv", ".jsonl.gz", ".csv.xz"])
def test_a_pickle_in_place_of_the_data_is_no_data(tmp_path: Path, canary: Path, ending: str) -> None:
    path = tmp_path / f"rows{ending}"
    path.write_bytes(pickle.dumps([Payload(canary)]))
    try:
        rows = list(read_rows_of(path, ending, data_limit()))
    except UnreadableFile:
        rows = []
    assert not any(isinstance(row, dict) and "prompt" in row for row in rows)
    assert not canary.exists()


TASK = "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"


@pytest.mark.parametrize(
    "change",
    [
        "doc_to_text: !!python/object/apply:os.system ['touch CANARY']\n",
        "doc_to_text: !!python/object/new:subprocess.Popen [['touch', 'CANARY']]\n",
        "process_docs: !!python/name:os.system\n",
        "doc_to_text: !function [utils, run]\n",
        "class: !function evil.Task\n",
        "custom_dataset: !function evil.rows\n",
        "unsafe_code: true\n",
        "include: ../outside.yaml\n",
        "include: [/etc/hostname]\n",
    ],
)
def test_a_benchmarks_definition_runs_nothing_as_it_is_checked(
    tmp_path: Path, canary: Path, change: str
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (tmp_path / "outside.yaml").write_text("task: other\n")
    (folder / "rows.jsonl").write_text(json.dumps({"a": 1}) + "\n")
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    (folder / "mine.yaml").write_text(TASK + change.replace("CANARY", str(canary)))
    with pytest.raises(UnusableTasks):
        check_tasks(folder)
    assert not canary.exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    "name", ["../outside.jsonl", "/etc/hostname", "https://evil.example/x.jsonl", "link.jsonl"]
)
def test_a_benchmarks_data_do_not_come_from_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (tmp_path / "outside.jsonl").write_text("{}\n")
    (folder / "link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (folder / "mine.yaml").write_text(TASK.replace("rows.jsonl", name))
    with pytest.raises(UnusableTasks, match=r"is no file of|no file"):
        check_tasks(folder)

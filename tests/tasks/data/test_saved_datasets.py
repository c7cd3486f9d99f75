"""A folder of `save_to_disk` is loaded by the library, and nothing in it but its data files decides what is loaded."""

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from tests.tasks.test_prepare_data import prepare
from vantage.schemas.recipe.inputs import Data, Split
from vantage.schemas.source_files import data_limit, saved_files
from vantage.tasks.data import library_rows
from vantage.tasks.data.row_faults import UnreadableFile
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.saved_datasets import rows_of_files, saved_rows
from vantage.tasks.data.source_rows import read_rows_of
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.prepare_data import UnusableData

pytestmark = pytest.mark.slow

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"翻译 {n}",
        "response": None if n == 7 else f"réponse {n} 🙂",
        "turns": [{"role": "user", "content": f"{n}"}] * (n % 3),
        "score": n / 7,
        "day": datetime.date(2024, 1, 1 + n % 28),
        "kind": n % 2,
    }
    for n in range(60)
]
FEATURES = datasets.Features(
    {
        "prompt": datasets.Value("large_string"),
        "response": datasets.Value("string"),
        "turns": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        "score": datasets.Value("float32"),
        "day": datasets.Value("date32"),
        "kind": datasets.ClassLabel(names=["bad", "good"]),
    }
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a folder that the library wrote: two files, rows in another order, and a format."""
    folder = tmp_path / "saved"
    rows = datasets.Dataset.from_list(ROWS, features=FEATURES).select([*range(30, 60), *range(30)])
    rows.with_format("numpy", columns=["prompt"]).save_to_disk(str(folder), num_shards=2)
    return folder


def rows_in(folder: Path) -> list[Any]:
    pattern = saved_files(folder)
    return list(rows_of_files(str(pattern), sorted(folder.glob("data-*.arrow")), ".arrow"))


def test_its_rows_are_those_of_the_library_and_those_of_its_files(saved: Path) -> None:
    found = rows_in(saved)
    whole = datasets.load_from_disk(str(saved))
    assert isinstance(whole, datasets.Dataset)
    assert found == whole.with_format(None).to_list()
    files = sorted(saved.glob("data-*.arrow"))
    assert len(files) == 2
    # So the digest of the files shows which rows these are, as it did when we read them by ourselves
    assert found == [row for file in files for row in read_rows_of(file, ".arrow", data_limit())]
    assert [row["prompt"] for row in found[:2]] == ["翻译 30", "翻译 31"]
    assert [type(row["kind"]) for row in found[:2]] == [int, int], "a label's number, not its name"


NOTED = """
import datasets
load = datasets.load_from_disk
def load_from_disk(folder, **options):
    with open({log!r}, "a") as log:
        print(folder, file=log)
    return load(folder, **options)
datasets.load_from_disk = load_from_disk
"""
"""Run at the start of the process that reads the rows."""


def test_a_stage_reads_it_by_the_library(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "loaded"
    (tmp_path / "sitecustomize.py").write_text(NOTED.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    data = Data(source=str(saved_files(saved)), split=Split(validation=4, test=4), max_dropped=0.1)
    result, output = prepare(tmp_path / "stage", "demonstrations", data)
    prompts = {row["prompt"] for side in SPLITS for row in read_rows(output, side)}
    assert prompts == {row["prompt"] for row in ROWS if row["response"] is not None}
    assert result.metrics["source_rows"] == 60
    loaded = log.read_text().splitlines()
    assert len(loaded) == 1
    assert not Path(loaded[0]).exists()
    assert Path(loaded[0]) != saved


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("state.json", {"_format_type": "torch", "_format_kwargs": {"device": "cuda:9"}}),
        ("state.json", {"_format_columns": ["no such column"], "_split": "a/b", "_fingerprint": None}),
        ("dataset_info.json", {"features": {"prompt": {"dtype": "int64", "_type": "Value"}}}),
        ("dataset_info.json", {"features": {"prompt": {"_type": "Image", "decode": True}}}),
        ("dataset_info.json", "no JSON"),
    ],
)
def test_what_lies_beside_the_data_files_changes_nothing(saved: Path, file: str, change: Any) -> None:
    before = rows_in(saved)
    path = saved / file
    path.write_text(
        change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change})
    )
    assert rows_in(saved) == before


def test_a_file_elsewhere_is_never_read(saved: Path, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "secret", "response": "x"}]).save_to_disk(str(tmp_path / "other"))
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": "../other/data-00000-of-00001.arrow"}]
    (saved / "state.json").write_text(json.dumps(state))
    assert saved_files(saved) == saved, "it is no folder of the library"


def test_broken_files_are_refused_with_the_remedy(saved: Path, tmp_path: Path) -> None:
    file = sorted(saved.glob("data-*.arrow"))[1]
    file.write_bytes(file.read_bytes()[:300])
    told = "datasets.load_from_disk refuses it .*; write it again with save_to_disk"
    with pytest.raises(UnreadableFile, match=told):
        rows_in(saved)
    data = Data(source=str(saved_files(saved)), split=Split(validation=4, test=4))
    with pytest.raises(
        UnusableData, match=rf"source='{saved}/data-\*.arrow' cannot be read as .arrow: {file.name}: {told}"
    ):
        prepare(tmp_path / "stage", "demonstrations", data)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"]], names=["prompt", "prompt"])
    with (
        pa.OSFile(str(tmp_path / "data-0.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    with pytest.raises(UnreadableFile, match="prompt|one name"):
        list(saved_rows([tmp_path / "data-0.arrow"]))


def test_rows_come_in_batches(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_in(saved)
    monkeypatch.setattr(library_rows, "BATCH_ROWS", 7)
    assert list(library_rows.library_rows(saved)) == whole


def test_an_offset_beyond_the_data_refuses_the_file_by_its_name(saved: Path) -> None:
    """Arrow does not check offsets, so such a file ended the process, or gave a row the text of others."""
    file = sorted(saved.glob("data-*.arrow"))[1]
    content = file.read_bytes()
    lengths = [len(f"翻译 {n}".encode()) for n in range(30)]
    places = [sum(lengths[:n]) for n in range(31)]
    offsets = b"".join(place.to_bytes(8, "little") for place in places)
    assert content.count(offsets) == 1
    for offset in (2**62, 5):
        wrong = offsets[:80] + offset.to_bytes(8, "little", signed=True) + offsets[88:]
        file.write_bytes(content.replace(offsets, wrong))
        with pytest.raises(UnreadableFile, match=rf"{file.name}: .*; write it again"):
            rows_in(saved)

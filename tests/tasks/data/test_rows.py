"""A prepared artifact is the same rows in the library `datasets` as in our own reader."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest

from tests.tasks.test_prepare_data import prepare, write
from vantage.schemas.recipe.inputs import Data, Split
from vantage.tasks.data.rows import column_names, num_rows, open_dataset, read_rows
from vantage.tasks.data.splits import SPLITS, TEST, TRAIN

BRIEF = {"role": "system", "content": "be brief"}
CONTENTS: dict[str, list[dict[str, Any]]] = {
    "demonstrations": [
        {
            "conversation": [
                BRIEF,
                {"role": "user", "content": f"{n}"},
                {"role": "assistant", "content": f"r{n}"},
            ]
        }
        for n in range(40)
    ],
    "preferences": [
        {
            "prompt": f"翻译 {n} 🙂",
            "chosen": f"a{n}",
            "rejected": f"b{n}",
            "margin": n / 7,
            "subgroup": str(n % 3),
        }
        for n in range(40)
    ],
    "rankings": [
        {
            "prompt": f"{n}",
            "responses": [f"a{n}", f"b{n}", f"c{n}"][: 2 + n % 2],
            "ranks": [1, 2, 3][: 2 + n % 2],
        }
        for n in range(40)
    ],
    "prompts": [{"prompt": f"{n}", "answer": None if n % 5 == 0 else str(n + 1)} for n in range(40)],
}


@pytest.fixture(params=CONTENTS)
def artifact(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    content = request.param
    source = write(tmp_path / "rows.jsonl", CONTENTS[content])
    columns: Any = {"conversation": "conversation"} if content == "demonstrations" else {}
    data = Data(source=str(source), columns=columns, split=Split(validation=6, test=6))
    return prepare(tmp_path / "stage", content, data)[1]


def test_all_rows_and_columns_are_those_of_our_own_reader(artifact: Path) -> None:
    opened = open_dataset(artifact)
    assert tuple(opened) == SPLITS
    for split in SPLITS:
        rows = opened[split]
        assert isinstance(rows, datasets.Dataset)
        assert rows.column_names == column_names(artifact, split)
        assert rows.num_rows == num_rows(artifact, split) > 0
        assert rows.to_list() == read_rows(artifact, split)
        assert [rows[n] for n in range(rows.num_rows)] == read_rows(artifact, split)
        stored = pq.read_schema(artifact / f"{split}.parquet")
        assert rows.data.table.schema.remove_metadata().equals(stored.remove_metadata())
        assert rows.features.arrow_schema.types == stored.types


def test_an_empty_split_has_its_columns(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", CONTENTS["prompts"])
    output = prepare(tmp_path / "stage", "prompts", Data(source=str(source), split=Split(test="all")))[1]
    opened = open_dataset(str(output))
    assert (opened[TRAIN].num_rows, opened[TEST].num_rows) == (0, 40)
    assert opened[TRAIN].column_names == opened[TEST].column_names


def test_a_folder_without_splits_is_refused_with_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"{tmp_path} has no train.parquet; name the folder of a prepared"
    ):
        open_dataset(tmp_path)


def test_nothing_is_written_to_the_cache_of_the_library(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    before = sorted(tmp_path.rglob("*"))
    assert open_dataset(artifact)[TRAIN].num_rows
    assert sorted(tmp_path.rglob("*")) == before

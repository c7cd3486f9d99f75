"""Data of the hub is read from its cache as files are, and never in part."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.tasks.test_prepare_data import prepare
from vantage.schemas.recipe.inputs import Data, Split
from vantage.schemas.recipe.sources import HubFiles
from vantage.schemas.records.job import StageResult
from vantage.tasks.data.hub_files import UnreachableHub, are_all, matching, source_files
from vantage.tasks.data.inspection import UnknownData, inspect_file
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.prepare_data import UnusableData

COMMIT = "0123456789" * 4
SOURCE = f"hub:org/name@{COMMIT}/data"
PARTS = [f"train-{part:05}-of-00002.jsonl" for part in range(2)]
ROWS = [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(60)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the hub's cache without network, with one repository as huggingface_hub lays it out; the result is its
    `data` folder.
    """
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "datasets--org--name"
    data = repository / "snapshots" / COMMIT / "data"
    data.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, name in enumerate((*PARTS, "other.jsonl")):
        rows = ROWS[number::2] if name in PARTS else ROWS[:1]
        (repository / "blobs" / str(number)).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (data / name).symlink_to(Path("../../../blobs") / str(number))
    return data


def prepared(folder: Path, source: str) -> tuple[StageResult, list[dict[str, Any]]]:
    data = Data(source=source, split=Split(validation=4, test=4))
    result, output = prepare(folder, "demonstrations", data)
    return result, [row for side in SPLITS for row in read_rows(output, side)]


@pytest.mark.parametrize(("named", "rows"), [("train-*.jsonl", ROWS), (PARTS[1], ROWS[1::2])])
def test_rows_of_the_cache_are_read_without_network(
    cache: Path, tmp_path: Path, named: str, rows: list[dict[str, str]]
) -> None:
    result, found = prepared(tmp_path / "stage", f"{SOURCE}/{named}")
    assert sorted(map(str, found)) == sorted(map(str, rows))
    assert result.metrics["source_rows"] == len(rows)
    assert cache.is_dir()


def test_files_come_in_the_order_of_their_names(cache: Path) -> None:
    assert [file.name for file in source_files(f"{SOURCE}/train-*.jsonl")] == PARTS
    assert source_files(str(cache / "train-*.jsonl")) == [cache / name for name in PARTS]


@pytest.mark.parametrize("named", ["missing.jsonl", "*.jsonl"])
def test_what_the_cache_may_lack_is_refused_without_network(cache: Path, tmp_path: Path, named: str) -> None:
    """For ``*.jsonl`` the cache cannot show whether there are other files."""
    wanted = rf"name@{COMMIT}/data/\S+' is not in the cache and could not be fetched .*hf download --repo-type dataset org/name"
    with pytest.raises(UnusableData, match=wanted):
        prepared(tmp_path / "stage", f"{SOURCE}/{named}")
    with pytest.raises(UnknownData, match=wanted):
        inspect_file(Path(f"{SOURCE}/{named}"), None)
    assert cache.is_dir()


def test_a_part_that_the_cache_lacks_is_no_smaller_dataset(cache: Path) -> None:
    (cache / PARTS[0]).unlink()
    with pytest.raises(UnreachableHub, match="could not be fetched"):
        source_files(f"{SOURCE}/train-*.jsonl")


def test_another_commit_is_not_what_the_cache_has(cache: Path) -> None:
    with pytest.raises(UnreachableHub):
        source_files(f"hub:org/name@{COMMIT[::-1]}/data/{PARTS[0]}")
    assert (cache / PARTS[0]).is_file()


def test_of_names_without_numbers_the_hub_says_which_there_are(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Api:
        def list_repo_files(self, repository: str, *, repo_type: str, revision: str) -> list[str]:
            asked.append((repository, repo_type, revision))
            return [
                "script.py",
                "data/other.jsonl",
                "data/old/other.jsonl",
                *(f"data/{name}" for name in PARTS),
            ]

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert [file.name for file in source_files(f"{SOURCE}/*.jsonl")] == ["other.jsonl", *PARTS]
    assert asked == [("org/name", "dataset", COMMIT)]
    assert source_files(f"{SOURCE}/none-*.jsonl") == []
    assert cache.is_dir()


def test_an_inspection_takes_what_a_recipe_takes(cache: Path) -> None:
    found, _ = inspect_file(Path(f"{SOURCE}/train-*.jsonl"), None)
    assert (found.content, found.num_rows) == ("demonstrations", 60)
    assert f"source: {SOURCE}/train-*.jsonl" in found.recipe
    assert cache.is_dir()


def test_names_match_in_their_folder_alone() -> None:
    source = HubFiles("a/b", COMMIT, "data/t*.parquet")
    names = ["data/t2.parquet", "data/t1.parquet", "t3.parquet", "data/x/t4.parquet", "data/u.parquet"]
    assert matching(source, names) == ["data/t1.parquet", "data/t2.parquet"]


@pytest.mark.parametrize(
    ("names", "all_there"),
    [
        (["a-00000-of-00001.parquet"], True),
        (["a-00000-of-00002.parquet"], False),
        (["a-00000-of-00002.parquet", "a-00001-of-00002.parquet", "b-00000-of-00001.parquet"], True),
        (["a-00000-of-00001.parquet", "b-00001-of-00002.parquet"], False),
        (["a-00000-of-00001.parquet", "b.parquet"], False),
        ([], False),
    ],
)
def test_numbered_names_say_whether_one_is_missing(names: list[str], all_there: bool) -> None:
    assert are_all(names) is all_there

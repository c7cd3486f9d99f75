"""A reward model on half of the prompts has the weights of one on a dataset that was halved by hand."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vantage.schemas.recipe.stages_on_data import RewardModelling
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.halves import EmptyHalf, is_in_half, rows_of_half
from vantage.tasks.data.rows import Row, read_rows, write_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.stages import run_stage

Contents = Callable[[Path], dict[str, bytes]]


def side_by_hand(prompt: str, division: int) -> int:
    alike = " ".join(prompt.casefold().split())
    return int(hashlib.sha256(f"half {division}:{alike}".encode()).hexdigest()[1], 16) % 2


@given(st.text(), st.integers(0, 9))
def test_each_prompt_is_in_one_half_of_each_division(prompt: str, division: int) -> None:
    halves = [is_in_half(prompt, 2 * division + number) for number in (1, 2)]
    assert halves == [side_by_hand(prompt, division) == side for side in (0, 1)]
    assert is_in_half(f" {prompt.upper()}\n", 1) == is_in_half(prompt.upper(), 1)


def test_halves_are_about_halves_and_divisions_are_independent() -> None:
    prompts = [f"prompt {number}" for number in range(4000)]
    first, third = ([is_in_half(prompt, half) for prompt in prompts] for half in (1, 3))
    for share in (sum(first), sum(third), sum(a == b for a, b in zip(first, third, strict=True))):
        assert abs(share - 2000) < 4 * (4000 * 0.25) ** 0.5


def test_a_table_without_rows_is_refused_of_a_half_alone(tmp_path: Path) -> None:
    write_rows(tmp_path, "train", [])
    assert list(rows_of_half(tmp_path, "train", None, at_once=8)) == []
    with pytest.raises(EmptyHalf, match="half=1 of the 0 rows has none"):
        list(rows_of_half(tmp_path, "train", 1, at_once=8))


def job_of(pipeline: Any, source: Path, folder: Path, role: str = "data", **changes: Any) -> StageJob:
    job: StageJob = pipeline.job("reward", folder=folder, epochs=1.0, **changes)
    inputs = {name: path for name, path in job.inputs.items() if name != "data"} | {role: source}
    return job.model_copy(update={"inputs": inputs, "digests": pipeline.digests(inputs)})


def halved(source: Path, folder: Path, side: int, division: int) -> list[Row]:
    """Write the dataset with the training rows of one half; returns them."""
    shutil.copytree(source, folder)
    rows = [row for row in read_rows(source, "train") if side_by_hand(row["prompt"], division) == side]
    write_rows(folder, "train", rows)
    return rows


@pytest.mark.parametrize(("half", "division", "side"), [(1, 0, 0), (2, 0, 1), (4, 1, 1)])
def test_a_half_makes_the_bytes_of_data_that_was_halved_by_hand(
    pipeline: Any, tmp_path: Path, contents: Contents, half: int, division: int, side: int
) -> None:
    source = pipeline.folder("preferences")
    rows = halved(source, tmp_path / "data", side, division)
    assert 20 < len(rows) < len(read_rows(source, "train")) - 20
    found = job_of(pipeline, source, tmp_path / "half", half=half)
    expected = job_of(pipeline, tmp_path / "data", tmp_path / "hand")
    assert run_stage(found).metrics == run_stage(expected).metrics
    assert contents(found.output) == contents(expected.output)


def rankings_in(folder: Path, count: int) -> Path:
    folder.mkdir()
    rows: list[Row] = [
        {"prompt": f"{number}+1=", "responses": [f"{number + 1}", "0"], "ranks": [1.0, 2.0]} for number in range(10, 10 + count)
    ]  # fmt: skip
    for split in SPLITS:
        write_rows(folder, split, rows)
    return folder


def test_rankings_are_halved_too_and_held_out_rows_are_not(
    pipeline: Any, tmp_path: Path, contents: Contents
) -> None:
    source = rankings_in(tmp_path / "source", 24)
    halved(source, tmp_path / "data", 0, 0)
    changes = {"data": None, "rankings": "ranked", "lm_coef": 0.0, "centre_coef": 0.0}
    found = job_of(pipeline, source, tmp_path / "half", "rankings", half=1, **changes)
    expected = job_of(pipeline, tmp_path / "data", tmp_path / "hand", "rankings", **changes)
    result = run_stage(found)
    assert result.metrics == run_stage(expected).metrics
    assert contents(found.output) == contents(expected.output)
    assert result.uncertainty["pair_accuracy"].rows == 24


def test_a_half_without_a_row_is_refused_with_a_remedy(pipeline: Any, tmp_path: Path) -> None:
    source = rankings_in(tmp_path / "source", 1)
    empty = next(half for half in (1, 2) if not is_in_half("10+1=", half))
    changes = {"data": None, "rankings": "ranked", "lm_coef": 0.0, "centre_coef": 0.0, "half": empty}
    job = job_of(pipeline, source, tmp_path / "half", "rankings", **changes)
    assert isinstance(job.work, RewardModelling)
    with pytest.raises(
        EmptyHalf, match=rf"half={empty} of the 1 rows has none: .*; give more data, or leave half out"
    ):
        run_stage(job)

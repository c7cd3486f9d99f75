"""Rows that a stage sampled are held to the rules before they are committed, and the stage fails where one breaks them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.dataset_check import check_dataset
from vantage.attempts.exit_codes import ExitCode
from vantage.runs.workspace import Workspace
from vantage.schemas.row_rules import UnusableTable

GOOD = [{"prompt": f"p {n}", "chosen": f"数 {n}", "rejected": "🙂"} for n in range(6)]

RECIPE = """\
recipe: pairs
model: {source: "builtin:tiny"}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 40, split: {validation: 8, test: 8}}
stages:
  pairs:
    kind: preference_collection
    policy: model
    prompts: prompts
    judge: {verifier: arithmetic}
  dpo: {kind: dpo, init: model, data: pairs}
"""


def write(folder: Path, **rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        pq.write_table(pa.Table.from_pylist(rows.get(split, GOOD)), folder / f"{split}.parquet")
    return folder


def test_good_rows_pass_and_may_repeat(tmp_path: Path) -> None:
    check_dataset(write(tmp_path / "d", validation=GOOD + GOOD[:2]), "preferences", step="pairs")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "chosen": "same", "rejected": "same"}, "1 x chosen equals rejected"),
        ({"prompt": "p", "chosen": " ", "rejected": "b"}, "1 x chosen is empty"),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, "1 x rejected is empty"),
        ({"prompt": "p", "chosen": "a", "rejected": "b\0"}, "1 x rejected holds a NUL byte"),
        ({"prompt": "p", "chosen": "a", "rejected": None}, "1 x rejected is missing"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_row_that_breaks_a_rule_is_named(
    tmp_path: Path, split: str, row: dict[str, Any], reason: str
) -> None:
    folder = write(tmp_path / "d", **{split: [*GOOD, row]})
    with pytest.raises(
        UnusableTable,
        match=rf"(?s)^pairs: {split}.parquet: preferences: 1 of 7 rows are unusable.*{reason}.*row 6",
    ):
        check_dataset(folder, "preferences", step="pairs")


def test_a_split_without_any_good_row_or_column_is_refused(tmp_path: Path) -> None:
    bad = [{"prompt": "p", "chosen": "a", "rejected": "a"}]
    with pytest.raises(UnusableTable, match=r"pairs: test.parquet: preferences: 1 of 1 rows are unusable"):
        check_dataset(write(tmp_path / "d", test=bad), "preferences", step="pairs")
    with pytest.raises(UnusableTable, match=r"pairs: test.parquet: preferences: there is no column rejected"):
        check_dataset(
            write(tmp_path / "d", test=[{"prompt": "p", "chosen": "a"}]), "preferences", step="pairs"
        )
    (tmp_path / "d" / "train.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        check_dataset(tmp_path / "d", "preferences", step="pairs")


def test_a_stage_whose_rows_break_a_rule_fails_and_commits_nothing(
    workspace: Workspace, tmp_path: Path
) -> None:
    recipe = tmp_path / "pairs.yaml"
    recipe.write_text(RECIPE)
    with orchestrated(workspace, recipe) as orchestrator:
        orchestrator.stage_function = "tests.support.fake_work.collect_equal_sides"
        stages = attempt_all(orchestrator)
    assert (stages["pairs"].status, stages["pairs"].exit_code) == ("failed", ExitCode.BAD_INPUT)
    reason = str(stages["pairs"].reason)
    assert "pairs: train.parquet: preferences: 2 of 2 rows are unusable" in reason
    assert "chosen equals rejected" in reason
    assert str(orchestrator.log_of("pairs")) in reason
    assert stages["pairs"].digest is None
    assert orchestrator.store.inspect(str(stages["pairs"].stage_key)).ref is None
    assert (stages["dpo"].status, stages["dpo"].reason) == ("blocked", "reads pairs, which is failed")

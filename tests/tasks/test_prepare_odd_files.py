"""Files that are not what they seem are prepared or refused: an odd row, another file in their place, a name like a pattern."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.recipe.inputs import Data, Generation, Split
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.source_files import SourceChanged, SourceTooLarge
from vantage.tasks.data import saved_datasets
from vantage.tasks.data.columns import MissingColumn
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.prepare_data import UnusableData, run

SPLIT = Split(validation=0.1, test=0.1)


def prepare(
    folder: Path, source: Path, content: Any = "prompts", *, sha256: str | None = None, **settings: Any
) -> tuple[StageResult, list[dict[str, Any]], dict[str, Any]]:
    """Return the result, the rows of all sides by prompt, and the report."""
    output, scratch = folder / "output", folder / "scratch"
    output.mkdir(parents=True)
    scratch.mkdir()
    settings = {"split": SPLIT, **settings}
    job = StageJob(
        run_id="0001-test",
        name="data.mine",
        attempt=1,
        stage_key="0" * 64,
        seed=0,
        work=PrepareData(content=content, data=Data(source=str(source), **settings)),
        generation=Generation(),
        source_sha256=sha256,
        scratch=scratch,
        output=output,
    )
    result = run(job)
    rows = [row for side in SPLITS for row in read_rows(output, side)]
    report = json.loads((output / "report.json").read_text())
    return result, sorted(rows, key=lambda row: str(row["prompt"])), report


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ODD = (7, 2.5, True, ["a", "b"], {"a": 1}, 2**63, [[]])


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("column", ["prompt", "response"])
def test_one_odd_value_costs_its_row_and_rewrites_no_other(tmp_path: Path, odd: Any, column: str) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"q{n:02}", "response": f"r{n}中"} for n in range(60)]
    rows[33][column] = odd
    source = lines(tmp_path / "rows.jsonl", rows)
    good = [row for number, row in enumerate(rows) if number != 33]
    result, kept, report = prepare(tmp_path / "kept", source, "demonstrations", max_dropped=0.02)
    assert kept == good
    assert (result.metrics["source_rows"], result.metrics["dropped_rows"]) == (60, 1)
    [(reason, count)] = report["dropped"].items()
    assert reason.startswith(f"{column}: a") and count == 1
    [first] = report["first_dropped"]
    assert first["row"] == 33 and first["reason"] == reason
    with pytest.raises(UnusableData, match=rf"(?s)1 of 60 rows cannot be used \({column}: a.*row 33: "):
        prepare(tmp_path / "refused", source, "demonstrations", max_dropped=0.01)


def test_cells_of_a_csv_stay_text_whatever_stands_in_the_others(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "prompt,response\n" + "".join(f"{n:04},NA\n" for n in range(60)) + "1e5,\n\n,x\n"
    )
    result, rows, report = prepare(tmp_path / "a", tmp_path / "rows.csv", "demonstrations", max_dropped=0.05)
    assert rows == [{"prompt": f"{n:04}", "response": "NA"} for n in range(60)]
    assert report["dropped"] == {"response is missing": 1, "prompt is missing": 1}
    assert result.metrics["source_rows"] == 62


@pytest.mark.parametrize("seed", range(10))
def test_of_good_and_bad_rows_exactly_the_good_ones_are_kept(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    good = [json.dumps({"prompt": f"{n:03} 🙂", "chosen": "a", "rejected": "b"}) for n in range(40)]
    bad = [
        '{"prompt": 3, "chosen": "a", "rejected": "b"}',
        '{"prompt": "p", "chosen": NaN, "rejected": "b"}',
        '{"prompt": "p", "chosen": ["a"], "rejected": "b"}',
        '{"prompt": "p", "chosen": "\\ud800", "rejected": "b"}',
        '{"prompt": "p", "chosen": "\\u0000", "rejected": "b"}',
        '{"prompt": "p", "chosen": [{"role": "user"}], "rejected": "b"}',
        '{"prompt": "p", "rejected": "b"}',
        "[" * 5000,
        "{}",
        "nothing",
    ]
    texts = [*good]
    num_bad = draw.randrange(1, 30)
    for _ in range(num_bad):
        texts.insert(draw.randrange(len(texts) + 1), draw.choice(bad))
    (tmp_path / "rows.jsonl").write_text("\n".join(texts))
    result, rows, report = prepare(tmp_path / "a", tmp_path / "rows.jsonl", "preferences", max_dropped=1.0)
    assert rows == [json.loads(text) for text in good]
    assert sum(report["dropped"].values()) == result.metrics["dropped_rows"] == num_bad
    numbers = [number for number, text in enumerate(texts) if text not in good]
    assert [bad_row["row"] for bad_row in report["first_dropped"]] == numbers[:10]


def test_a_key_that_some_rows_lack_is_missing_there_and_one_that_all_lack_is_a_wrong_mapping(
    tmp_path: Path,
) -> None:
    rows = [{"instruction": f"{n:02}", **({"input": "x"} if n % 2 else {})} for n in range(40)]
    source = lines(tmp_path / "rows.jsonl", rows)
    _, kept, _ = prepare(tmp_path / "a", source, columns={"prompt": "{instruction}\n{input}"})
    assert [row["prompt"] for row in kept] == [f"{n:02}\nx" if n % 2 else f"{n:02}" for n in range(40)]
    with pytest.raises(MissingColumn, match="there is no 'inputs' in the data; it has: instruction"):
        prepare(tmp_path / "b", source, columns={"prompt": "{instruction}\n{inputs}"})


# -- the file itself


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    source = lines(tmp_path / "p[1]*?.jsonl", [{"prompt": f"right {n:02}"} for n in range(40)])
    lines(tmp_path / "p1.jsonl", [{"prompt": f"wrong {n:02}"} for n in range(40)])
    _, rows, _ = prepare(tmp_path / "a", source)
    assert [row["prompt"] for row in rows] == [f"right {n:02}" for n in range(40)]


def test_a_source_that_was_replaced_since_the_plan_is_refused(tmp_path: Path) -> None:
    source = lines(tmp_path / "p.jsonl", [{"prompt": f"first {n:02}"} for n in range(40)])
    planned = hashlib.sha256(source.read_bytes()).hexdigest()
    prepare(tmp_path / "a", source, sha256=planned)
    lines(source, [{"prompt": f"second {n:02}"} for n in range(40)])
    with pytest.raises(SourceChanged, match=f"has changed since the run was planned.*{planned[:12]}"):
        prepare(tmp_path / "b", source, sha256=planned)
    assert not list((tmp_path / "b" / "output").iterdir())


def test_what_is_read_is_the_copy_that_was_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced in the moment between hashing and reading."""
    source = lines(tmp_path / "p.jsonl", [{"prompt": f"first {n:02}"} for n in range(40)])
    planned = hashlib.sha256(source.read_bytes()).hexdigest()
    hashed_only = saved_datasets.read_rows_of

    def replaced_then_read(*arguments: Any) -> Any:
        lines(source, [{"prompt": f"second {n:02}"} for n in range(40)])
        return hashed_only(*arguments)

    monkeypatch.setattr(saved_datasets, "read_rows_of", replaced_then_read)
    _, rows, _ = prepare(tmp_path / "a", source, sha256=planned)
    assert [row["prompt"] for row in rows] == [f"first {n:02}" for n in range(40)]
    assert [path.name for path in (tmp_path / "a" / "scratch").iterdir()] == ["progress.json"]


def test_a_file_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "p.jsonl").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(SourceTooLarge, match="VANTAGE_MAX_DATA_GIB"):
        prepare(tmp_path / "a", tmp_path / "p.jsonl")

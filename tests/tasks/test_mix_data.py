"""Mixtures have the right shares, repeat only what may repeat, hold out rows, and give the same bytes again."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vantage.schemas.recipe.inputs import Data, Generation, HeldOutRows, Shares, Split
from vantage.schemas.recipe.work import MixData, PrepareData
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks import mix_data, prepare_data
from vantage.tasks.data import rows as rows_of_files
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS, TEST, TRAIN, VALIDATION, TooFewRows, side_of
from vantage.tasks.mix_data import apportioned, most_without_repeats, part_order

SHARES = Shares(validation=0.2, test=0.2)


def job_of(folder: Path, work: Any, **fields: Any) -> StageJob[Any]:
    output, scratch = folder / "output", folder / "scratch"
    output.mkdir(parents=True)
    scratch.mkdir()
    named = {
        "run_id": "0001-test",
        "attempt": 1,
        "stage_key": "0" * 64,
        "seed": 3,
        "generation": Generation(),
    }
    return StageJob(
        **{"name": "mixtures.both", **named, "work": work, "scratch": scratch, "output": output, **fields}
    )


def prepared(folder: Path, content: Any, rows: list[dict[str, Any]]) -> Path:
    """Return a part as the recipe's step makes it."""
    folder.mkdir(parents=True)
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(source=str(source), split=Split(validation=0.2, test=0.2))
    job = job_of(folder / "stage", PrepareData(content=content, data=data, shares=SHARES))
    prepare_data.run(job)
    return job.output


def mix(
    folder: Path, content: Any, parts: dict[Path, float], *, seed: int = 3, **work: Any
) -> tuple[StageResult, Path]:
    total = sum(parts.values())
    mixing = MixData(
        content=content,
        parts=tuple(f"part_{number}" for number in range(len(parts))),
        weights=tuple(weight / total for weight in parts.values()),
        **work,
    )
    job = job_of(folder, mixing, seed=seed, inputs={f"part.{n}": path for n, path in enumerate(parts)})
    return mix_data.run(job), job.output


def demonstrations(name: str, number: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name} 问 {n}", "response": f"答 {n}"} for n in range(number)]


def by_part(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row["prompt"].split()[0] for row in rows)


@pytest.fixture(name="parts")
def _parts(tmp_path: Path) -> tuple[Path, Path]:
    return (
        prepared(tmp_path / "a", "demonstrations", demonstrations("a", 500)),
        prepared(tmp_path / "b", "demonstrations", demonstrations("b", 100)),
    )


def test_as_many_rows_as_the_shares_allow_and_none_twice(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    a, b = parts
    result, output = mix(tmp_path / "mixed", "demonstrations", {a: 7.0, b: 3.0})
    report = json.loads((output / "report.json").read_text())
    unused = 0
    for side in SPLITS:
        sizes = {"a": len(read_rows(a, side)), "b": len(read_rows(b, side))}
        rows = read_rows(output, side)
        found = by_part(rows)
        # By hand: one row more would take a share of one part that is larger than the part.
        assert max(0.7 * (len(rows) + 2) - sizes["a"], 0.3 * (len(rows) + 2) - sizes["b"]) > 0
        assert abs(found["a"] - 0.7 * len(rows)) < 1 and abs(found["b"] - 0.3 * len(rows)) < 1
        texts = [json.dumps(row, ensure_ascii=False) for row in rows]
        whole = {json.dumps(row, ensure_ascii=False) for part in (a, b) for row in read_rows(part, side)}
        assert len(set(texts)) == len(texts) and set(texts) <= whole
        assert all(side_of(row["prompt"], SHARES) == side for row in rows)
        assert [part[f"{side}_rows"] for part in report["parts"]] == [found["a"], found["b"]]
        assert [part[f"{side}_rows_there"] for part in report["parts"]] == list(sizes.values())
        assert result.metrics[f"{side}_rows"] == len(rows)
        unused += sum(sizes.values()) - len(rows)
    assert (result.metrics["unused_rows"], result.metrics["rows_again"]) == (unused, 0)
    assert [part["weight"] for part in report["parts"]] == [0.7, 0.3]


def test_every_stretch_of_a_mixture_has_its_shares(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    a, b = parts
    _, output = mix(tmp_path / "mixed", "demonstrations", {a: 3.0, b: 1.0})
    rows = read_rows(output, TRAIN)
    for begin in range(0, len(rows) - 20, 7):
        assert abs(by_part(rows[begin : begin + 20])["b"] - 5) <= 1


def test_with_a_number_of_rows_the_smaller_part_repeats_evenly(
    tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    a, b = parts
    size = len(read_rows(b, TRAIN))
    result, output = mix(tmp_path / "mixed", "demonstrations", {a: 1.0, b: 1.0}, rows=420)
    rows = read_rows(output, TRAIN)
    times = Counter(row["prompt"] for row in rows)
    assert by_part(rows) == {"a": 210, "b": 210}
    assert {n for prompt, n in times.items() if prompt.startswith("a")} == {1}
    of_b = [n for prompt, n in times.items() if prompt.startswith("b")]
    assert len(of_b) == size and set(of_b) == {210 // size, 210 // size + 1}
    assert result.metrics["rows_again"] == 210 - size
    for side in (VALIDATION, TEST):
        held_out = [row["prompt"] for row in read_rows(output, side)]
        assert len(set(held_out)) == len(held_out)


def test_what_one_part_holds_out_no_part_trains_on(tmp_path: Path) -> None:
    same = demonstrations("x", 300)
    a = prepared(tmp_path / "a", "demonstrations", same)
    b = prepared(tmp_path / "b", "demonstrations", [{**row, "response": "other"} for row in same])
    _, output = mix(tmp_path / "mixed", "demonstrations", {a: 1.0, b: 1.0})
    prompts = {side: {row["prompt"] for row in read_rows(output, side)} for side in SPLITS}
    assert (
        not prompts[TRAIN] & (prompts[TEST] | prompts[VALIDATION]) and not prompts[TEST] & prompts[VALIDATION]
    )


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_other_rows(
    tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    shares = dict(zip(parts, (0.2, 0.8), strict=True))
    read = {}
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        _, output = mix(tmp_path / name, "demonstrations", shares, seed=seed)
        read[name] = [(output / f"{side}.parquet").read_bytes() for side in SPLITS]
    assert read["one"] == read["two"] != read["three"]


def test_row_groups_are_written_one_after_the_other(
    tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = dict(zip(parts, (0.5, 0.5), strict=True))
    _, whole = mix(tmp_path / "whole", "demonstrations", shares, rows=300)
    monkeypatch.setattr(mix_data, "ROW_GROUP", 32)
    monkeypatch.setattr(mix_data, "_READ_ROWS", 7)
    _, pieces = mix(tmp_path / "pieces", "demonstrations", shares, rows=300)
    assert rows_of_files.read_rows(pieces, TRAIN) == rows_of_files.read_rows(whole, TRAIN)


def turns(n: int) -> list[dict[str, Any]]:
    said = [("user", f"c {n}"), ("assistant", "b"), ("user", "d"), ("assistant", f"e {n}")]
    return [{"role": role, "content": content} for role, content in said]


@pytest.mark.parametrize(
    ("content", "one", "other", "lacking"),
    [
        ("demonstrations", lambda n: {"messages": turns(n)}, lambda n: {"prompt": f"{n}", "response": "r"}, "messages"),
        (
            "preferences",
            lambda n: {"prompt": f"p {n}", "chosen": "a", "rejected": "b", "margin": 2.0},
            lambda n: {"prompt": f"q {n}", "chosen": "a", "rejected": "b"},
            "margin",
        ),
        (
            "rankings",
            lambda n: {"prompt": f"p {n}", "responses": ["a", "b"], "ranks": [1, 2]},
            lambda n: {"prompt": f"q {n}", "responses": ["a", "b", "c"], "ranks": [3, 2, 1]},
            None,
        ),
        ("prompts", lambda n: {"prompt": f"p {n}", "answer": str(n)}, lambda n: {"prompt": f"q {n}"}, "answer"),
    ],
)  # fmt: skip
def test_every_content_and_what_one_part_lacks_is_null(
    tmp_path: Path, content: str, one: Any, other: Any, lacking: str | None
) -> None:
    a = prepared(tmp_path / "a", content, [one(n) for n in range(100)])
    b = prepared(tmp_path / "b", content, [other(n) for n in range(100)])
    _, output = mix(tmp_path / "mixed", content, {a: 1.0, b: 1.0})
    rows = read_rows(output, TRAIN)
    known = [
        {**row, **({lacking: row.get(lacking)} if lacking else {})}
        for part in (a, b)
        for row in read_rows(part, TRAIN)
    ]
    assert all(row in known for row in rows) and len(rows) >= 80
    if lacking:
        assert 0.4 < sum(row[lacking] is None for row in rows) / len(rows) < 0.6


def test_demonstrations_mixed_as_prompts_lose_their_responses(
    tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    prompts = prepared(tmp_path / "p", "prompts", [{"prompt": f"p {n}", "answer": "1"} for n in range(100)])
    _, output = mix(tmp_path / "mixed", "prompts", {parts[0]: 1.0, prompts: 1.0})
    assert set(read_rows(output, TRAIN)[0]) == {"prompt", "answer"}


@pytest.mark.parametrize(
    ("weights", "work", "said"),
    [
        ((0.5, 0.5), {"split": HeldOutRows(test=90)}, r"split.test=90 takes 45 rows of data.part_1, which holds out \d+; ask for \d+ at most"),
        ((0.9999, 0.0001), {"rows": 20}, "parts.part_1: a share of 0.0001 of 20 rows is no row; raise its weight"),
    ],
)  # fmt: skip
def test_too_few_rows_are_refused_with_what_to_do(
    tmp_path: Path, parts: tuple[Path, Path], weights: tuple[float, float], work: Any, said: str
) -> None:
    with pytest.raises(TooFewRows, match=said):
        mix(tmp_path / "mixed", "demonstrations", dict(zip(parts, weights, strict=True)), **work)


def test_largest_remainders_by_hand() -> None:
    assert apportioned(10, [0.5, 0.3, 0.2]) == [5, 3, 2]
    # 3.5, 1.75, 1.75: the two remainders of 0.75 are rounded up
    assert apportioned(7, [0.5, 0.25, 0.25]) == [3, 2, 2]
    assert apportioned(3, [0.5, 0.5]) == [2, 1]  # a tie goes to the first
    # Of 72 rows 50.4 and 21.6, which are 50 and 22; of 73 rows 51.1 are more than 50
    assert most_without_repeats([50, 50], [0.7, 0.3]) == 72
    assert list(part_order([2, 1])) == [0, 1, 0]


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=6),
    weights=st.lists(st.floats(0.001, 100), min_size=6, max_size=6),
    total=st.integers(0, 100_000),
)
def test_shares_are_kept_to_a_row(sizes: list[int], weights: list[float], total: int) -> None:
    weights = weights[: len(sizes)]
    whole = sum(weights)
    counts = apportioned(total, weights)
    assert sum(counts) == total
    assert all(abs(count - total * weight / whole) < 1 for count, weight in zip(counts, weights, strict=True))
    most = most_without_repeats(sizes, [weight / whole for weight in weights])
    fits = apportioned(most, weights)
    assert all(count <= size for count, size in zip(fits, sizes, strict=True))
    assert (
        most
        >= min(size * whole / weight for size, weight in zip(sizes, weights, strict=True)) - len(sizes) - 1
    )

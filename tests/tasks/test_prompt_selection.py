"""Prompts are selected by their pass rate, as counted again by hand from the collected responses, and stages read them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.every import every
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.rollouts import HEADER, RolloutsHeader
from vantage.tasks.data.examples import codec_of, read_prompts
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import TooFewRows
from vantage.tasks.prompt_selection import count_passes
from vantage.tasks.rewards.term_scores import UnknownScore
from vantage.tasks.stages import run_stage
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.updates.gathering import batch_of


@pytest.fixture(scope="module")
def collected(pipeline: Any) -> Path:
    """Return four responses to each training prompt, scored by a reward model."""
    folder: Path = pipeline.folder("collected")
    return folder


def job_in(pipeline: Any, folder: Path, **fields: Any) -> StageJob:
    work = PromptSelection.model_validate(
        {"kind": "prompt_selection", "rollouts": "collected", "prompts": "prompts", **fields}
    )
    job: StageJob = pipeline.job("collected", folder=folder)
    inputs = {"rollouts": pipeline.folder("collected"), "prompts": pipeline.folder("prompts")}
    return job.model_copy(
        update={"work": resolve_work(work), "inputs": inputs, "rewards": {}, "name": "middling"}
    )


def rates_by_hand(folder: Path, column: str, above: float) -> dict[str, float]:
    """Return prompt → share of its training responses with more than so many points."""
    rows = pa.ipc.open_file(pa.memory_map(str(folder / "train.arrow"))).read_all().to_pylist()
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["prompt"], []).append(row[column])
    return {prompt: sum(score > above for score in each) / len(each) for prompt, each in scores.items()}


def middle(folder: Path, column: str) -> float:
    rows = pa.ipc.open_file(pa.memory_map(str(folder / "train.arrow"))).read_all()
    return float(sorted(rows[column].to_pylist())[len(rows) // 2])


@every("fields", [{}, {"term": "reward"}])
def test_the_rows_in_the_range_are_kept_and_all_are_counted(
    fields: dict[str, str], pipeline: Any, collected: Path, tmp_path: Path
) -> None:
    column = "score.reward" if fields else "weighted_sum"
    above = middle(collected, column)
    rates = rates_by_hand(collected, column, above)
    assert len({*rates.values()}) > 2, "some are neither always nor never right"
    low, high = 0.25, 0.75
    job = job_in(pipeline, tmp_path, pass_rate=(low, high), passes_above=above, **fields)
    result = run_stage(job)

    before = read_rows(pipeline.folder("prompts"), "train")
    kept = [
        row | {"pass_rate": rates[row["prompt"]]}
        for row in before
        if low <= rates.get(row["prompt"], -1) <= high
    ]
    assert 0 < len(kept) < len(before)
    assert read_rows(job.output, "train") == kept, "in their order, with their rates"
    for split in ("validation", "test"):
        assert read_rows(job.output, split) == read_rows(pipeline.folder("prompts"), split)
    known = [rates[row["prompt"]] for row in before if row["prompt"] in rates]
    report = json.loads((job.output / "report.json").read_text())
    assert result.metrics == {
        "train_rows": len(kept), "validation_rows": 16, "test_rows": 8,
        "rows_too_easy": sum(rate > high for rate in known),
        "rows_too_hard": sum(rate < low for rate in known),
        "rows_never_right": sum(rate == 0 for rate in known),
        "rows_always_right": sum(rate == 1 for rate in known),
        "mean_pass_rate": pytest.approx(sum(known) / len(known)),
    }  # fmt: skip
    assert report["rows_without_responses"] == len(before) - len(known)
    tenths = [sum(min(int(rate * 10), 9) == tenth for rate in known) for tenth in range(10)]
    assert report["rows_by_tenth_of_pass_rate"] == tenths
    assert report["pass_rate"] == [low, high] and report["passes_above"] == above
    assert len(kept) + report["rows_too_easy"] + report["rows_too_hard"] == len(known)


def test_the_same_inputs_make_the_same_bytes(pipeline: Any, collected: Path, tmp_path: Path) -> None:
    above = middle(collected, "weighted_sum")
    jobs = [
        job_in(pipeline, tmp_path / each, pass_rate=(0.0, 0.5), passes_above=above) for each in ("one", "two")
    ]
    for job in jobs:
        run_stage(job)
    for file in ("train.parquet", "validation.parquet", "test.parquet", "report.json"):
        assert (jobs[0].output / file).read_bytes() == (jobs[1].output / file).read_bytes(), file


def test_a_selection_of_a_selection_has_its_own_rates(pipeline: Any, collected: Path, tmp_path: Path) -> None:
    """A curriculum of several steps counts anew in between: the rows have one rate, that of the last count."""
    above = middle(collected, "weighted_sum")
    first = job_in(pipeline, tmp_path / "first", pass_rate=(0.25, 1.0), passes_above=above)
    run_stage(first)
    stricter = sorted(read["pass_rate"] for read in read_rows(first.output, "train"))[0]
    rows = pa.ipc.open_file(pa.memory_map(str(collected / "train.arrow"))).read_all()
    higher = float(sorted(rows["weighted_sum"].to_pylist())[3 * len(rows) // 4])
    rates = rates_by_hand(collected, "weighted_sum", higher)
    second = job_in(pipeline, tmp_path / "second", pass_rate=(0.0, 1.0), passes_above=higher)
    second = second.model_copy(update={"inputs": {**second.inputs, "prompts": first.output}})
    run_stage(second)
    found = pq.read_table(second.output / "train.parquet")
    assert found.column_names == pq.read_schema(first.output / "train.parquet").names
    assert found["pass_rate"].to_pylist() == [rates[prompt] for prompt in found["prompt"].to_pylist()]
    assert min(found["pass_rate"].to_pylist()) < stricter, (
        "the rates of the first selection are no longer there"
    )


def test_an_empty_selection_is_refused_with_its_counts(
    pipeline: Any, collected: Path, tmp_path: Path
) -> None:
    rows = len(read_rows(pipeline.folder("prompts"), "train"))
    job = job_in(pipeline, tmp_path, pass_rate=(0.5, 1.0), passes_above=1e9)
    message = rf"pass_rate=\[0.5, 1\] keeps none of {rows} prompts: 0 pass more often, {rows} less, and 0 have no response"
    with pytest.raises(TooFewRows, match=message):
        run_stage(job)


def test_a_policy_learns_from_the_selected_prompts_the_easy_ones_first(
    pipeline: Any, collected: Path, tmp_path: Path
) -> None:
    above = middle(collected, "weighted_sum")
    selection = job_in(pipeline, tmp_path / "selection", pass_rate=(0.25, 1.0), passes_above=above)
    run_stage(selection)
    rates = {row["prompt"]: row["pass_rate"] for row in read_rows(selection.output, "train")}
    job = pipeline.job("policy", folder=tmp_path / "policy", curriculum="easy_first", iterations=2)
    job = job.model_copy(
        update={"inputs": {**job.inputs, "prompts": selection.output}, "work": resolve_work(job.work)}
    )
    prompts = read_prompts(selection.output, "train", codec_of(job, "init"))
    size = job.work.batch_size // job.work.algorithm.samples_per_prompt  # type: ignore[union-attr]
    batches = [batch_of(job, prompts, number).indices for number in range(len(prompts) // size)]
    order = [rates[prompts.texts[index]] for batch in batches for index in batch]
    assert order == sorted(rates.values(), reverse=True)[: len(order)] and len({*order}) > 1
    assert len({index for batch in batches for index in batch}) == len(order)
    without = job.model_copy(update={"work": job.work.model_copy(update={"curriculum": "none"})})
    shuffled = [
        rates[prompts.texts[i]] for n in range(len(batches)) for i in batch_of(without, prompts, n).indices
    ]
    assert shuffled != order
    result = run_stage(job)
    assert result.metrics["test_score"] is not None


def test_equal_prompts_stay_shuffled_and_each_pass_begins_with_the_easiest() -> None:
    easiness = [0.2, 0.8, 0.8, 0.8, 0.2, 0.5]
    order = DataOrder(num_examples=6, batch_size=3, seed=1, easiness=easiness)
    epochs = [order.batch(2 * epoch) + order.batch(2 * epoch + 1) for epoch in range(8)]
    assert all({*epoch[:3]} == {1, 2, 3} and epoch[3] == 5 and {*epoch[4:]} == {0, 4} for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert order.batch(1) == order.batch(1)


def test_an_unknown_term_of_the_collected_responses_is_refused(
    pipeline: Any, collected: Path, tmp_path: Path
) -> None:
    job = job_in(pipeline, tmp_path, pass_rate=(0.0, 1.0), term="judge")
    with pytest.raises(UnknownScore) as refused:
        run_stage(job)
    assert str(refused.value) == (
        "stages.middling.term='judge' is no score of the collected responses; use one of: reward"
    )


def test_passes_are_counted_by_a_named_score_in_the_numbers_that_are_stored(tmp_path: Path) -> None:
    """0.1 and 0.7 are stored as float32, which are above 0.1 and below 0.7: the first would be above itself."""
    header = RolloutsHeader(
        tokenizer_digest="0" * 64,
        samples_per_prompt=3,
        held_out_samples_per_prompt=1,
        terms=("rubric.facts", "rubric.style"),
    )
    (tmp_path / HEADER).write_text(header.model_dump_json())
    scores = {"score.rubric.facts": [0.1, 0.1000001, 0.0], "score.rubric.style": [0.7, 0.7000001, 0.8]}
    table = pa.table(
        {"prompt": ["p"] * 3, "answer": [None, None, None], "weighted_sum": [9.0] * 3}
        | {name: pa.array(each, pa.float32()) for name, each in scores.items()}
    )
    with pa.ipc.new_file(str(tmp_path / "train.arrow"), table.schema) as writer:
        writer.write_table(table)

    def passed(term: str, above: float) -> int:
        work = PromptSelection.model_validate(
            {
                "kind": "prompt_selection",
                "rollouts": "c",
                "prompts": "p",
                "pass_rate": [0.0, 1.0],
                "term": term,
                "passes_above": above,
            }
        )
        [(case, counts)] = count_passes(tmp_path, work, path="stages.middling").items()
        assert case == ("p", None) and counts.responses == 3
        return counts.passed

    assert [passed("rubric.facts", above) for above in (0.1, 0.0, -0.1)] == [1, 2, 3]
    assert [passed("rubric.style", above) for above in (0.7, 0.75, 0.8)] == [2, 1, 0]
    with pytest.raises(
        UnknownScore, match=r"'rubric' is no score of .*; use one of: rubric.facts, rubric.style"
    ):
        passed("rubric", 0.0)

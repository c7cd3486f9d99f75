"""Collected responses, with their scores, are written once, whatever kills the stage."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from vantage.ledger.journal import read
from vantage.models.folders import load_policy
from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.metric_names import ANSWERS, ENGINE, GRAPHS, TERM_QUANTILES
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.metrics import curve_metric_names, estimated_metric_names, headline_metric_names
from vantage.tasks import rollout_collection
from vantage.tasks.data.arithmetic import DIALS, verify
from vantage.tasks.data.examples import codec_of
from vantage.tasks.data.rows import read_rows
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rollout.collected import Collected, part_of, read_collected
from vantage.tasks.rollout.rollouts import Sampled, Scored
from vantage.tasks.stages import run_stage
from vantage.tasks.training.batch_files import BatchFiles
from vantage.tasks.training.scratch import BATCHES, JOURNAL

SPLITS = ("train", "validation", "test")
SAMPLES = {"train": 4, "validation": 3, "test": 3}
CALIBRATED = Reward(
    terms=(VerifierTerm(verifier="arithmetic"), VerifierTerm(verifier="arithmetic_long", weight=0.5))
)


def rows_in(folder: Path, split: str) -> list[dict[str, Any]]:
    with pa.memory_map(str(folder / f"{split}.arrow")) as file:
        found: list[dict[str, Any]] = pa.ipc.open_file(file).read_all().to_pylist()
    return found


@pytest.fixture(scope="module")
def made(pipeline: Any) -> tuple[Path, StageResult, StageJob]:
    return pipeline.folder("collected"), pipeline.result("collected"), pipeline.job("collected")


@pytest.mark.parametrize("split", SPLITS)
def test_every_prompt_of_every_split_is_answered_as_often_as_asked(
    made: Any, pipeline: Any, split: str
) -> None:
    prompts = [row["prompt"] for row in read_rows(pipeline.folder("prompts"), split)]
    expected = [prompt for prompt in prompts for _ in range(SAMPLES[split])]
    assert [row["prompt"] for row in rows_in(made[0], split)] == expected
    assert made[1].metrics[f"{split}_rows"] == len(expected)


def test_a_batch_has_as_many_responses_whatever_the_split_samples() -> None:
    """A batch of 12 responses has 3 training prompts with 4 each, or 6 held-out prompts with 2 each."""
    work = SimpleNamespace(batch_size=12, samples_per_prompt=4, held_out_samples_per_prompt=2)
    prompts = {"train": range(7), "validation": range(6), "test": range(8)}
    batches = rollout_collection.cut_batches(prompts, work)  # type: ignore[arg-type]
    assert [(each.split, each.indices.start, each.indices.stop) for each in batches] == [
        ("test", 0, 6),
        ("test", 6, 8),
        ("validation", 0, 6),
        ("train", 0, 3),
        ("train", 3, 6),
        ("train", 6, 7),
    ]


def test_a_group_is_uniform_before_the_rule_for_a_missing_end() -> None:
    """Both responses to the first prompt are right, and the second of them has no end: its score is 0.5 lower."""
    collected = {
        "train": SimpleNamespace(
            weighted_sums=torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.5]),
            scores=torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 2.5]),
            samples_per_prompt=2,
        ),
        "test": SimpleNamespace(scores=torch.tensor([3.0, -1.0, 0.5])),
    }
    measured = rollout_collection.describe_groups(collected)  # type: ignore[arg-type]
    assert measured == {"reward_spread": 4.0, "uniform_group_share": pytest.approx(1 / 3)}


def test_a_prompt_s_responses_differ(made: Any) -> None:
    rows = rows_in(made[0], "train")
    groups = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    several = [len({tuple(row["response_ids"]) for row in group}) for group in groups]
    assert sum(several) / len(several) > 2


def test_ids_texts_ends_and_log_probabilities_are_the_policy_s(made: Any) -> None:
    """The written log-probabilities equal those of one pass over the written ids, without our samplers or caches."""
    folder, _, job = made
    codec = codec_of(job, "policy")
    model = load_policy(job.inputs["policy"])
    for row in rows_in(folder, "test"):
        assert row["response"] == codec.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert row["ended"] == (row["response_ids"][-1] in codec.stop_token_ids)
        assert row["ended"] or len(row["response_ids"]) == job.generation.max_response_tokens
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].double()
        expected = logits.log_softmax(dim=1).gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        assert row["sampler_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_scores_are_the_reward_s(made: Any) -> None:
    """The scores are those of the reward model itself, one response at a time; 1 is lost where a response was cut off."""
    folder, _, job = made
    model = load_scalar(job.inputs["reward.main.0"])
    for row in rows_in(folder, "validation"):
        with torch.no_grad():
            of_model = scores(
                model, collate([row["prompt_ids"]], [row["response_ids"]], pad_token_id=0)
            ).item()
        assert row["score.reward"] == pytest.approx(of_model, abs=1e-4)
        assert row["weighted_sum"] == pytest.approx(of_model, abs=1e-4)
        assert row["score"] == pytest.approx(of_model - (0.0 if row["ended"] else 1.0), abs=1e-4)


@pytest.mark.slow
def test_terms_are_kept_apart(pipeline: Any, tmp_path: Path) -> None:
    job = pipeline.job("collected", folder=tmp_path).model_copy(update={"rewards": {"main": CALIBRATED}})
    run_stage(job)
    rows = rows_in(job.output, "train")
    assert {row["score.arithmetic"] for row in rows} <= {0.0, 1.0}
    for row in rows:
        right = float(verify(row["prompt"], row["response"], dial=DIALS["arithmetic"]))
        long = float(verify(row["prompt"], row["response"], dial=DIALS["arithmetic_long"]))
        assert (row["score.arithmetic"], row["score.arithmetic_long"]) == (right, long)
        assert row["score"] == pytest.approx(right + 0.5 * long)
    assert json.loads((job.output / "rollouts.json").read_text())["terms"] == [
        "arithmetic",
        "arithmetic_long",
    ]


def test_it_reports_exactly_the_metrics_of_the_page(made: Any) -> None:
    folder, result, _ = made
    assert set(result.metrics) == headline_metric_names("rollout_collection")
    assert set(result.uncertainty) == estimated_metric_names("rollout_collection")
    tests = rows_in(folder, "test")
    scores_of_tests = [row["score"] for row in tests]
    assert result.metrics["test_score"] == pytest.approx(sum(scores_of_tests) / len(tests))
    assert result.metrics["reward_spread"] == pytest.approx(max(scores_of_tests) - min(scores_of_tests))
    assert result.metrics["truncated_share"] == pytest.approx(
        sum(not row["ended"] for row in tests) / len(tests)
    )
    lengths = [len(row["response_ids"]) for row in tests]
    assert result.metrics["mean_response_length"] == pytest.approx(sum(lengths) / len(tests))
    assert result.uncertainty["test_score"].n == len({row["prompt"] for row in tests})
    assert result.uncertainty["test_score"].rows == len(tests)
    train = rows_in(folder, "train")
    groups = [{row["weighted_sum"] for row in train[start : start + 4]} for start in range(0, len(train), 4)]
    assert result.metrics["uniform_group_share"] == sum(len(group) == 1 for group in groups) / len(groups)


@pytest.mark.slow
def test_the_journal_has_a_line_for_each_batch(pipeline: Any, tmp_path: Path) -> None:
    job = pipeline.job("collected", folder=tmp_path)
    run_stage(job)
    entries = list(read(job.scratch / JOURNAL))
    curves = {
        name.replace("TERM", "reward")
        for name in curve_metric_names("rollout_collection") - {*TERM_QUANTILES, *ANSWERS}
    }
    curves -= {*GRAPHS, *ENGINE, "seconds_beside"}  # curves of a GPU, and of other settings
    assert all(set(entry.metrics) == curves for entry in entries)
    prompts = {split: len(rows_in(job.output, split)) // SAMPLES[split] for split in SPLITS}
    per_batch = {split: 36 // SAMPLES[split] for split in SPLITS}
    assert len(entries) == sum(-(-prompts[split] // per_batch[split]) for split in SPLITS)


class Killed(BaseException):
    """Stands for a kill: nothing is saved on the way out."""


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("when", ["before its file", "after its file"])
def test_a_kill_in_a_batch_changes_no_byte(
    pipeline: Any,
    made: Any,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    when: str,
) -> None:
    finish = BatchFiles.finish

    def killed(self: BatchFiles, *arguments: Any, **named: Any) -> None:
        if len(self.finished) == batch:
            if when == "after its file":
                self.attachment(batch).write_bytes(named["attachment"][: len(named["attachment"]) // 2])
            raise Killed
        finish(self, *arguments, **named)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(BatchFiles, "finish", killed)
        run_stage(pipeline.job("collected", folder=tmp_path))
    again = pipeline.job("collected", folder=tmp_path)
    sampled = counting(monkeypatch)
    assert run_stage(again) == made[1]
    assert contents(again.output) == contents(made[0])
    steps = [entry.step for entry in read(again.scratch / JOURNAL)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(sampled) == len(steps) - batch, "what was finished is not sampled again"


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Scored]:
    """Return every batch that is sampled from now on."""
    found: list[Scored] = []
    sample = rollout_collection.sample_and_score

    def remember(*arguments: Any, **named: Any) -> Scored:
        found.append(sample(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(rollout_collection, "sample_and_score", remember)
    return found


def test_a_damaged_batch_and_all_after_it_are_sampled_again(
    pipeline: Any,
    made: Any,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = pipeline.job("collected", folder=tmp_path)
    run_stage(first)
    part = first.scratch / BATCHES / "1.attachment"
    damaged = bytearray(part.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    part.write_bytes(bytes(damaged))
    again = pipeline.job("collected", folder=tmp_path)
    sampled = counting(monkeypatch)
    run_stage(again)
    assert contents(again.output) == contents(made[0])
    assert len(sampled) == len(list(read(again.scratch / JOURNAL))) - 1


@pytest.mark.slow
def test_a_smaller_micro_batch_draws_the_same(made: Any, pipeline: Any, tmp_path: Path) -> None:
    job = pipeline.job("collected", folder=tmp_path, microbatch_size=5)
    run_stage(job)
    for split in SPLITS:
        for row, whole in zip(rows_in(job.output, split), rows_in(made[0], split), strict=True):
            assert row["response_ids"] == whole["response_ids"]
            assert row["score"] == pytest.approx(whole["score"], abs=1e-4)


def test_a_score_that_is_no_number_stops_the_stage(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = rollout_collection.sample_and_score

    def broken(*arguments: Any, **named: Any) -> Scored:
        scored = sample(*arguments, **named)
        scored.scores.total[1] = float("nan")
        return scored

    monkeypatch.setattr(rollout_collection, "sample_and_score", broken)
    job = pipeline.job("collected", folder=tmp_path)
    with pytest.raises(FloatingPointError, match="scores nan; look at the reward's models"):
        run_stage(job)
    assert list(job.output.iterdir()) == []


def test_rows_read_back_are_what_was_sampled(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = counting(monkeypatch)
    job = pipeline.job("collected", folder=tmp_path)
    result = run_stage(job)
    codec = codec_of(job, "policy")
    test = read_collected(job.output, "test", codec, tokenizer=result.tokenizer_digest or "")
    first = sampled[0]  # the held-out splits come first
    rows = list(range(len(first.sampled.prompts)))
    read_back = test.select(rows, torch.device("cpu"))
    assert read_back.sampled.prompts == first.sampled.prompts
    assert read_back.sampled.responses == first.sampled.responses
    assert torch.equal(read_back.sampled.sequences.input_ids, first.sampled.sequences.input_ids)
    assert torch.equal(read_back.sampled.sequences.response_mask, first.sampled.sequences.response_mask)
    assert torch.equal(read_back.sampled.sampler_logprobs, first.sampled.sampler_logprobs)
    assert torch.equal(read_back.sampled.ended, first.sampled.ended)
    assert torch.equal(read_back.scores.total, first.scores.total)
    assert torch.equal(read_back.scores.by_term["reward"], first.scores.by_term["reward"])
    other = test.select(rows[::-1], torch.device("cpu"))
    assert other.sampled.responses == first.sampled.responses[::-1]


def test_ids_of_another_tokenizer_are_refused(made: Any) -> None:
    codec = codec_of(made[2], "policy")
    with pytest.raises(TokenizersDiffer, match="another tokenizer"):
        read_collected(made[0], "train", codec, tokenizer="0" * 64)


def test_every_number_of_a_response_is_read_as_it_was_written() -> None:
    """Every number is another, so that none can be taken for that of another column or row."""
    sampled = Sampled(
        prompts=["p", "p", "q", "q"],
        answers=["x", "x", None, None],
        responses=["a", "b", "c", "d"],
        sequences=collate([[1], [1], [2, 3], [2, 3]], [[4, 5], [6], [7, 8, 9], [4]], pad_token_id=0),
        ended=torch.tensor([True, False, True, False]),
        sampler_logprobs=torch.tensor([[-1.0, -2.0, 0], [-3.0, 0, 0], [-4.0, -5.0, -6.0], [-7.0, 0, 0]]),
    )
    given = Scores(
        total=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        weighted_sum=torch.tensor([5.0, 6.0, 7.0, 8.0]),
        by_term={"one": torch.tensor([9.0, 10, 11, 12]), "two.a": torch.tensor([13.0, 14, 15, 16])},
    )
    table = pa.ipc.open_file(part_of(Scored(sampled=sampled, scores=given))).read_all()
    collected = Collected(table, samples_per_prompt=2, pad_token_id=0, graded=("two.a",))
    assert collected.cases() == [("p", "x"), ("q", None)]
    assert collected.scores.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert collected.weighted_sums.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert collected.lengths.tolist() == [2, 1, 3, 1]
    assert collected.rows_of([1, 0], count=1) == [2, 0]
    found = collected.select([2, 1], torch.device("cpu"))
    assert found.scores.total.tolist() == [3.0, 2.0]
    assert found.scores.weighted_sum.tolist() == [7.0, 6.0]
    assert {name: term.tolist() for name, term in found.scores.by_term.items()} == {
        "one": [11.0, 10.0],
        "two.a": [15.0, 14.0],
    }
    assert found.scores.graded == ("two.a",)
    assert (found.sampled.prompts, found.sampled.answers) == (["q", "p"], [None, "x"])
    assert found.sampled.responses == ["c", "b"]
    assert found.sampled.ended.tolist() == [True, False]
    assert found.sampled.sequences.response_rows() == [[7, 8, 9], [6]]
    assert found.sampled.sequences.prompt_rows() == [[2, 3], [1]]
    assert found.sampled.sampler_logprobs.tolist() == [[-4.0, -5.0, -6.0], [-3.0, 0.0, 0.0]]

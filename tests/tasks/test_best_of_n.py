"""Best of n keeps the right responses and learns from them, and a kill leaves no trace."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.kills import same_bytes_after_a_kill, same_weights_in_half_the_micro_batch
from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.metric_names import (
    ANSWERS,
    COMPILED,
    ENGINE,
    GRAPHS,
    NONFINITE,
    TERM_QUANTILES,
    UNCOMPILED,
    VALIDATION_TERMS,
    WATCHED,
)
from vantage.schemas.recipe.pass_limits import UNLIMITED
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.stages import BestOfN
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.tasks import best_of_n
from vantage.tasks.best_of_n import best_rows, run
from vantage.tasks.data.examples import codec_of, read_prompts
from vantage.tasks.rewards.scoring import Scorer, Term, score
from vantage.tasks.rewards.verifier_scores import scored_by
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.rollouts import Sampled, prompts_of_iteration, sample_responses
from vantage.tasks.rollout.selection import Selection
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.seeds import derive_seed, stage_seed

WORK = BestOfN(
    kind="best_of_n",
    init="sft",
    reward="main",
    prompts="prompts",
    samples_per_prompt=4,
    batch_size=16,
    minibatch_size=2,
    epochs=2,
    iterations=4,
    validate_every=2,
    validation_samples=16,
    learning_rate=1e-3,
    checkpoint_every=2,
)
MODEL = Reward(terms=(ModelTerm(model="reward"),), missing_eos=MissingEos(subtract=1.0))
VERIFIER = Reward(terms=(VerifierTerm(verifier="arithmetic"),))


def job_in(pipeline: Any, folder: Path, *, reward: Reward = MODEL, **changes: Any) -> StageJob:
    sources = {"init": "sft", "prompts": "prompts"} | ({"reward.main.0": "reward"} if reward is MODEL else {})
    inputs = pipeline.inputs(sources)
    changes_of_job = {
        "name": "best",
        "work": WORK.model_copy(update=changes),
        "inputs": inputs,
        "digests": pipeline.digests(inputs),
        "rewards": {"main": reward},
    }
    job: StageJob = pipeline.job("sft", folder=folder).model_copy(update=changes_of_job)
    return job


def test_the_best_of_each_prompt_is_kept_and_the_first_of_equals() -> None:
    """Each prompt has three samples. The best are 3 at rows 1 and 2, 5 at rows 3 and 4, and −1 at rows 6 and 8."""
    given = torch.tensor([1.0, 3.0, 3.0, 5.0, 5.0, 0.0, -1.0, -2.0, -1.0])
    assert best_rows(given, samples_per_prompt=3).tolist() == [1, 3, 6]
    assert best_rows(torch.zeros(8), samples_per_prompt=4).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (None, [0]),  # the right response, which was cut off, has 1, and the wrong one 0
        (MissingEos(subtract=0.75), [0]),  # 0.25, still before 0
        (MissingEos(subtract=2.0), [1]),  # −1
        (MissingEos(replace=-0.5), [1]),
        (MissingEos(replace=0.5), [0]),
    ],
)
def test_a_response_that_was_cut_off_is_kept_only_if_its_score_says_so(
    rule: MissingEos | None, kept: list[int]
) -> None:
    scorer = Scorer(
        terms=(Term(name="arithmetic", weight=1.0, scores=scored_by(BUILTIN_FUNCTIONS["arithmetic"])),),
        missing_eos=rule,
    )
    scored = score(
        scorer,
        collate([[1, 5], [1, 5]], [[8, 9, 9], [9, 2]], pad_token_id=0),
        prompts=["3 a+2?", "3 a+2?"],
        responses=["a+2:345 #5", "a+2:345 #6"],
        answers=[None, None],
        ended=torch.tensor([False, True]),
        limits=UNLIMITED,
    )
    assert best_rows(scored.total, samples_per_prompt=2).tolist() == kept


def test_an_iteration_learns_exactly_the_best_of_what_it_sampled(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test samples once more outside of the stage, scores by the reward model, and chooses by a plain loop."""
    learnt: list[Sampled] = []

    def remember(policy: Any, optimizer: Any, kept: Sampled, *args: Any, **kwargs: Any) -> dict[str, float]:
        learnt.append(kept)
        return {"nll": 0.0}

    monkeypatch.setattr(best_of_n, "update", remember)
    job = job_in(pipeline, tmp_path, iterations=1)
    run(job)

    codec = codec_of(job, "init")
    prompts = read_prompts(job.inputs["prompts"], "train", codec)
    indices = prompts_of_iteration(
        0, num_responses=16, samples_per_prompt=4, num_prompts=len(prompts), seed=stage_seed(job)
    )
    sampled = sample_responses(
        load_engine(load(job.inputs["init"]), codec, limits=UNLIMITED),
        codec,
        prompts,
        indices,
        device=torch.device("cpu"),
        count=4,
        seed=derive_seed(stage_seed(job), "sampling", 0),
    )
    with torch.no_grad():
        raw = scores(load_scalar(job.inputs["reward.main.0"]), sampled.sequences).tolist()
    total = [each - (not ended) for each, ended in zip(raw, sampled.ended.tolist(), strict=True)]
    kept = [max(range(start, start + 4), key=total.__getitem__) for start in range(0, 16, 4)]
    assert len(set(indices)) == 4
    expected = sampled.sequences.select(kept)
    assert torch.equal(learnt[0].sequences.input_ids, expected.input_ids)
    assert torch.equal(learnt[0].sequences.response_mask, expected.response_mask)
    of_kept = sampled.sampler_logprobs[kept, : expected.response_ids.shape[1]]
    torch.testing.assert_close(learnt[0].sampler_logprobs, of_kept, atol=1e-5, rtol=0)

    [entry] = read(job.scratch / JOURNAL)
    assert entry.metrics["score_mean"] == pytest.approx(sum(total) / 16, rel=1e-4, abs=1e-5)
    assert entry.metrics["score_mean_reward"] == pytest.approx(sum(raw) / 16, rel=1e-4, abs=1e-5)
    best = sum(total[row] for row in kept) / 4
    assert entry.metrics["best_score_mean"] == pytest.approx(best, rel=1e-4, abs=1e-5)
    assert entry.metrics["truncated_share"] == sampled.ended.tolist().count(False) / 16


@pytest.mark.slow
def test_it_learns_what_the_reward_asks_for(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy learns to pass a verifier of another task, which about a third of its responses pass at first."""
    monkeypatch.setitem(BUILTIN_FUNCTIONS, "arithmetic", lambda prompt, response, answer: "#" in response)
    job = job_in(pipeline, tmp_path, reward=VERIFIER, iterations=6, batch_size=64, minibatch_size=4)
    run(job)
    entries = list(read(job.scratch / JOURNAL))
    sampled = [entry.metrics["score_mean"] for entry in entries]
    assert sampled[-1] > sampled[0] + 0.25, sampled
    assert all(entry.metrics["best_score_mean"] >= entry.metrics["score_mean"] for entry in entries)


@pytest.mark.slow
def test_the_policy_that_scores_best_on_validation_prompts_is_the_artifact(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights_and_best(name: str, scripted: list[float], iterations: int) -> tuple[Any, float]:
        told = iter(scripted)
        monkeypatch.setattr(Selection, "score", lambda *_: next(told))
        job = job_in(pipeline, tmp_path / name, iterations=iterations, validate_every=1)
        result = run(job)
        return load_file(job.output / "model.safetensors"), result.metrics["best_iteration"]

    # before training, and after each iteration
    kept, iteration = weights_and_best("long", [0.0, 1.0, 5.0, 2.0, 5.0], 4)
    expected, _ = weights_and_best("short", [0.0, 1.0, 2.0], 2)
    assert iteration == 2
    assert kept.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in kept.items())

    kept, iteration = weights_and_best("none", [9.0, 1.0, 2.0], 2)
    start = load_file(pipeline.folder("sft") / "model.safetensors")
    assert iteration == 0
    assert all(torch.equal(tensor, start[name]) for name, tensor in kept.items())


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_killed_and_run_again_it_gives_the_same_bytes(
    step: int,
    pipeline: Any,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_bytes_after_a_kill(
        run, partial(job_in, pipeline), tmp_path, step=step, contents=contents, monkeypatch=monkeypatch
    )


@pytest.mark.slow
def test_out_of_memory_it_ends_with_the_same_weights_in_half_the_micro_batch(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_weights_in_half_the_micro_batch(
        run, partial(job_in, pipeline), tmp_path, microbatch_size=None, half=1, monkeypatch=monkeypatch
    )


@pytest.mark.slow
def test_it_reports_exactly_the_metrics_of_the_page(pipeline: Any, tmp_path: Path) -> None:
    job = job_in(pipeline, tmp_path)
    result = run(job)
    assert set(result.metrics) == headline_metric_names("best_of_n") - {*UNCOMPILED, "validation_watch_score"}
    written = {name for entry in read(job.scratch / JOURNAL) for name in entry.metrics}
    named = {name.replace("score_mean_reward", "score_mean_TERM") for name in written}
    assert named == curve_metric_names("best_of_n") - {
        *(*GRAPHS, *ENGINE, *COMPILED, *NONFINITE, *WATCHED, *TERM_QUANTILES, *VALIDATION_TERMS, *ANSWERS),
        "seconds_beside",
    }

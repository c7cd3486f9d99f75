"""Direct preference optimisation has the loss from full logits, whatever the micro-batch, and shows no trace of a kill."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.kills import same_bytes_after_a_kill, same_weights_in_half_the_micro_batch
from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.models.folders import load_policy
from vantage.schemas.metric_names import COMPILED, NONFINITE, UNCOMPILED
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.tasks.data.examples import Completions, codec_of, read_completions
from vantage.tasks.dpo import (
    SIDES,
    accumulate_preferences,
    measure_pairs,
    run,
)
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates.against_reference import Models

WORK = DirectPreferenceOptimization(
    kind="dpo",
    init="sft",
    data="preferences",
    beta=0.3,
    batch_size=8,
    epochs=0.25,
    learning_rate=1e-3,
    checkpoint_every=2,
)


def job_in(pipeline: Any, folder: Path, **changes: Any) -> StageJob:
    """Return a DPO job in a folder; another policy than ``init`` is the reference, so that the two tell apart."""
    inputs = pipeline.inputs({"init": "sft", "reference": "model", "data": "preferences"})
    changes_of_job = {
        "name": "dpo",
        "work": WORK.model_copy(update=changes),
        "inputs": inputs,
        "digests": pipeline.digests(inputs),
        "rewards": {},
    }
    job: StageJob = pipeline.job("sft", folder=folder).model_copy(update=changes_of_job)
    return job


def models_of(job: StageJob, *, temperature: float = 1.0) -> Models:
    return Models(
        policy=load(job.inputs["init"]),
        reference=load(job.inputs["reference"]),
        temperature=temperature,
    )


@pytest.fixture(scope="module")
def pairs(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[StageJob, Completions]:
    job = job_in(pipeline, tmp_path_factory.mktemp("dpo"))
    return job, read_completions(job.inputs["data"], "train", SIDES, codec_of(job, "init"))


def response_logprob(model: Any, prompt: list[int], response: list[int], temperature: float) -> float:
    """Return log π(response | prompt) from full logits of this sequence alone, in float64."""
    with torch.no_grad():
        logits = model.double()(input_ids=torch.tensor([[*prompt, *response]])).logits[0] / temperature
    total = 0.0
    for place, token in enumerate(response, start=len(prompt)):
        before = logits[place - 1]
        total += float(before[token]) - math.log(float(before.exp().sum()))
    return total


def by_hand(job: StageJob, data: Completions, rows: list[int], temperature: float) -> dict[str, float]:
    """Return the means over pairs of loss, accuracy and reward gap, and the NLL per chosen token, from full logits."""
    models = models_of(job)
    losses, gaps, nll, num_tokens = [], [], 0.0, 0
    for row in rows:
        rewards = {}
        for side in SIDES:
            response = data.response_ids[side][row]
            logprob, ref_logprob = (
                response_logprob(model, data.prompt_ids[row], response, temperature)
                for model in (models.policy.causal_lm, models.reference.causal_lm)
            )
            rewards[side] = 0.3 * (logprob - ref_logprob)
            if side == "chosen":
                nll -= logprob
                num_tokens += len(response)
        gaps.append(rewards["chosen"] - rewards["rejected"])
        losses.append(math.log1p(math.exp(-gaps[-1])))
    return {
        "loss": sum(losses) / len(rows),
        "accuracy": sum(gap > 0 for gap in gaps) / len(rows),
        "reward_gap": sum(gaps) / len(rows),
        "chosen_nll": nll / num_tokens,
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_is_that_of_a_plain_loop_over_full_logits(
    pairs: tuple[StageJob, Completions], temperature: float
) -> None:
    job, data = pairs
    rows = list(range(6))
    metrics, num_tokens = accumulate_preferences(models_of(job, temperature=temperature), data, rows, WORK)
    expected = by_hand(job, data, rows, temperature)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert metrics["reward_gap"] == pytest.approx(expected["reward_gap"], rel=1e-3, abs=1e-4)
    assert metrics["train_pair_accuracy"] == expected["accuracy"]
    assert metrics["chosen_nll"] == pytest.approx(expected["chosen_nll"], rel=1e-4)
    assert num_tokens == sum(
        len(data.prompt_ids[row]) + len(data.response_ids[side][row]) for row in rows for side in SIDES
    )


def test_a_policy_that_is_its_own_reference_prefers_nothing_yet(pairs: tuple[StageJob, Completions]) -> None:
    """Both log-ratios are 0: −log σ(0) = log 2, and a tie counts as wrong."""
    job, data = pairs
    models = Models(policy=load(job.inputs["init"]), reference=load(job.inputs["init"]), temperature=1.0)
    metrics, _ = accumulate_preferences(models, data, list(range(4)), WORK)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["train_pair_accuracy"] == 0.0
    assert metrics["reward_gap"] == 0.0


def gradient(job: StageJob, data: Completions, **changes: Any) -> tuple[torch.Tensor, dict[str, float]]:
    models = models_of(job)
    metrics, _ = accumulate_preferences(models, data, list(range(10)), WORK.model_copy(update=changes))
    assert all(p.grad is None for p in models.reference.parameters()), "the reference is frozen"
    return torch.cat([p.grad.flatten() for p in models.policy.parameters()]), metrics


@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_micro_batches_leave_the_gradient_unchanged(
    pairs: tuple[StageJob, Completions], microbatch_size: int
) -> None:
    job, data = pairs
    whole, whole_metrics = gradient(job, data)
    parts, part_metrics = gradient(job, data, microbatch_size=microbatch_size)
    torch.testing.assert_close(parts / whole.abs().max(), whole / whole.abs().max(), atol=2e-5, rtol=0)
    assert part_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)


def test_held_out_pairs_are_measured_over_the_whole_set(pairs: tuple[StageJob, Completions]) -> None:
    job, data = pairs
    few = Completions(
        prompt_ids=data.prompt_ids[:7],
        response_ids={side: ids[:7] for side, ids in data.response_ids.items()},
        pad_token_id=data.pad_token_id,
        num_too_long=0,
    )
    expected = by_hand(job, few, list(range(7)), 1.0)
    for size in (1, 3, 64):
        measured = measure_pairs(models_of(job), few, WORK.model_copy(update={"batch_size": size}))
        assert {name: each.value for name, each in measured.items()} == pytest.approx(
            {
                "pair_accuracy": expected["accuracy"],
                "preference_loss": expected["loss"],
                "reward_gap": expected["reward_gap"],
            },
            rel=1e-3,
            abs=1e-4,
        )


def test_training_widens_the_gap_and_reports_exactly_the_metrics_of_the_page(
    pipeline: Any, tmp_path: Path
) -> None:
    job = job_in(pipeline, tmp_path, epochs=1.0)
    result = run(job)
    entries = list(read(job.scratch / JOURNAL))
    assert {name for entry in entries for name in entry.metrics} == curve_metric_names("dpo") - {
        *COMPILED,
        *NONFINITE,
    }
    assert set(result.metrics) == headline_metric_names("dpo") - {
        "tied_share",  # only for collected responses
        *UNCOMPILED,
    }
    first, last = entries[0].metrics, entries[-1].metrics
    assert last["loss"] < first["loss"]
    assert last["reward_gap"] > first["reward_gap"]
    assert load_policy(job.output).config.vocab_size == load_policy(job.inputs["init"]).config.vocab_size


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
        run, partial(job_in, pipeline), tmp_path, microbatch_size=4, half=2, monkeypatch=monkeypatch
    )


@pytest.mark.slow
def test_half_precision_trains_and_holds_a_frozen_reference_in_it(pipeline: Any, tmp_path: Path) -> None:
    """The policy is its own reference here: in the first step the two differ by rounding alone."""
    job = job_in(pipeline, tmp_path, precision="bfloat16")
    job = job.model_copy(update={"inputs": {**job.inputs, "reference": job.inputs["init"]}})
    run(job)
    first = next(iter(read(job.scratch / JOURNAL)))
    assert first.metrics["loss"] == pytest.approx(math.log(2), abs=0.05)


def test_a_reference_with_another_tokenizer_is_refused(pipeline: Any, tmp_path: Path) -> None:
    other = tmp_path / "reference"
    shutil.copytree(pipeline.folder("model"), other)
    tokenizer = other / "tokenizer.json"
    tokenizer.chmod(0o644)
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.write_text(json.dumps(content))
    job = job_in(pipeline, tmp_path / "job", reference="other")
    job = job.model_copy(update={"inputs": {**job.inputs, "reference": other}})
    with pytest.raises(TokenizersDiffer, match="reference='other' has another tokenizer than init='sft'"):
        run(job)


def test_prompts_that_are_all_too_long_are_refused(pipeline: Any, tmp_path: Path) -> None:
    job = job_in(pipeline, tmp_path).model_copy(
        update={"generation": Generation(max_prompt_tokens=1, max_response_tokens=24)}
    )
    with pytest.raises(ValueError, match="generation.max_prompt_tokens=1 is shorter than each of the"):
        run(job)

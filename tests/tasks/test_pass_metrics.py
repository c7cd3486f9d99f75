"""A run's metrics of its passes equal what transformers' models were given, and the least that is possible."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.model_reads import record_reads
from vantage.ledger.journal import read
from vantage.models import logprobs
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy
from vantage.models.logprobs import response_logprobs
from vantage.models.pass_counts import taken_counts
from vantage.models.sampling import sample
from vantage.models.sequences import collate
from vantage.schemas.kinds import resolve_work
from vantage.tasks.rollout.rollouts import Rollout
from vantage.tasks.stages import run_stage
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.cuts import READ_AGAIN
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates import policy_update

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_an_iteration_reads_each_response_no_oftener_than_it_has_to(
    shares_prompts: bool, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy and critic read each response once before the update and once an epoch, and reference and reward model
    once. A prompt with several responses is read once where that is cheaper."""
    monkeypatch.setitem(READ_AGAIN, "cpu", 0 if shares_prompts else 10**9)
    job = pipeline.job("policy", folder=tmp_path, epochs=3, validate_every=100)
    job = job.model_copy(update={"work": resolve_work(job.work)})
    reads = record_reads(monkeypatch)
    sizes: list[tuple[int, int]] = []
    update = policy_update.update

    def noted(networks: Any, rollout: Rollout, *args: Any, **named: Any) -> Any:
        prompts = {tuple(prompt) for prompt in rollout.sequences.prompt_rows()}
        once = sum(map(len, prompts)) + int(rollout.sequences.response_mask.sum())
        sizes.append((int(rollout.sequences.attention_mask.sum()), once))
        return update(networks, rollout, *args, **named)

    monkeypatch.setattr("vantage.tasks.policy_optimization.update", noted)
    found: list[tuple[list[int], int]] = []
    finish_step = Attempt.finish_step

    def ended(self: Attempt[Any], *args: Any, **named: Any) -> None:
        of_models: Counter[int] = Counter()
        for each in reads:
            of_models[each.model] += each.tokens
        found.append((sorted(of_models.values()), len(reads)))
        reads.clear()
        finish_step(self, *args, **named)

    monkeypatch.setattr(Attempt, "finish_step", ended)
    run_stage(job)

    said = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert len(found) == len(said) == len(sizes) > 2
    # the first iteration's counts hold the validation before it, the last one's that after it
    for (tokens, made), metrics, (whole, once) in list(zip(found, said, sizes, strict=True))[1:-1]:
        assert once < whole
        if shares_prompts:
            assert tokens[:2] == [once, once]
            assert all(4 * once <= each < 4 * whole for each in tokens[2:]), (
                "a minibatch has a part of a prompt's rows"
            )
        else:
            assert tokens == [whole, whole, 4 * whole, 4 * whole]
        assert metrics["forward_passes"] == made
        assert metrics["logits_again_share"] == 0, "all are kept"
        assert 1 <= metrics["prompt_reads"] < 1.5, "padding alone, whatever number of responses a prompt has"


def test_logits_that_are_too_many_to_keep_are_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_builtin("tiny", tmp_path, seed=0)
    model = load_policy(tmp_path)
    sequences = collate([[5, 6, 7], [5]], [[8, 9], [8, 9, 10, 11]], pad_token_id=0)
    taken_counts()
    response_logprobs(model, sequences, temperature=1.0).logprobs.sum().backward()
    kept = taken_counts()
    assert (kept.logits_rows, kept.logits_rows_again) == (6, 0)
    monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", 6 * model.config.vocab_size - 1)
    response_logprobs(model, sequences, temperature=1.0).logprobs.sum().backward()
    again = taken_counts()
    assert (again.logits_rows, again.logits_rows_again) == (6, 6)
    with torch.no_grad():
        response_logprobs(model, sequences, temperature=1.0)
    assert taken_counts().logits_rows_again == 0


def test_the_sampler_counts_prompts_once_and_rows_that_have_ended(tmp_path: Path) -> None:
    build_builtin("tiny", tmp_path, seed=0)
    model = load_policy(tmp_path)
    prompts = [[5, 6, 7]] * 30 + [[5, 8]] * 30
    taken_counts()
    samples = sample(
        model,
        prompts,
        max_new_tokens=30,
        temperature=1.0,
        eos_token_ids=(1, 2),
        pad_token_id=0,
        seed=4,
    )
    counts = taken_counts()
    assert (counts.prompt_positions, counts.prompt_tokens) == (2 * 3, 3 + 2)
    needed = sum(len(response) - 1 for response in samples.responses)  # the first token comes with the prompt
    assert counts.sampled_rows - counts.ended_rows == needed
    assert 0 < counts.ended_rows <= 0.05 * counts.sampled_rows, (
        "rows leave the batch when a twentieth have ended"
    )

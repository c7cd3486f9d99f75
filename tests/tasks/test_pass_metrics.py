"""What a run says of its passes, against what transformers' models were given, and against the least that there is."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaModel

from ledger.journal import read
from models import logprobs
from models.builtin import build_tiny
from models.folders import load_policy
from models.logprobs import response_logprobs
from models.pass_counts import taken_counts
from models.sampling import sample
from models.sequences import collate
from schemas.kinds import resolve_work
from tasks.rollout.rollouts import Rollout
from tasks.stages import run_stage
from tasks.training.attempt import Attempt
from tasks.training.scratch import JOURNAL
from tasks.updates import policy_update


def test_an_iteration_reads_each_response_no_oftener_than_it_has_to(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy and critic: once before the update and once an epoch; reference and reward model: once."""
    job = pipeline.job("policy", folder=tmp_path, epochs=3, validate_every=100)
    job = job.model_copy(update={"work": resolve_work(job.work)})
    read_tokens: Counter[int] = Counter()
    passes = 0
    forward = LlamaModel.forward

    def recorded(self: LlamaModel, *args: Any, **inputs: Any) -> Any:
        nonlocal passes
        if inputs.get("attention_mask") is not None and not inputs["use_cache"]:
            read_tokens[id(self)] += int(inputs["attention_mask"].sum())
            passes += 1
        return forward(self, *args, **inputs)

    monkeypatch.setattr(LlamaModel, "forward", recorded)
    sizes: list[int] = []
    update = policy_update.update

    def noted(networks: Any, rollout: Rollout, *args: Any, **named: Any) -> Any:
        sizes.append(int(rollout.sequences.attention_mask.sum()))
        return update(networks, rollout, *args, **named)

    monkeypatch.setattr("tasks.policy_optimization.update", noted)
    found: list[tuple[list[int], int]] = []
    finish_step = Attempt.finish_step

    def ended(self: Attempt[Any], *args: Any, **named: Any) -> None:
        nonlocal passes
        found.append((sorted(read_tokens.values()), passes))
        read_tokens.clear()
        passes = 0
        finish_step(self, *args, **named)

    monkeypatch.setattr(Attempt, "finish_step", ended)
    run_stage(job)

    said = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert len(found) == len(said) == len(sizes) > 2
    # the first iteration's counts hold the validation before it, the last one's that after it
    for (tokens, made), metrics, size in list(zip(found, said, sizes, strict=True))[1:-1]:
        assert tokens == [size, size, 4 * size, 4 * size]
        assert metrics["forward_passes"] == made
        assert metrics["logits_again_share"] == 0, "all are kept"
        assert 1 <= metrics["prompt_reads"] < 1.5, "padding alone, whatever number of responses a prompt has"


def test_logits_that_are_too_many_to_keep_are_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(tmp_path, seed=0)
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
    build_tiny(tmp_path, seed=0)
    model = load_policy(tmp_path)
    prompts = [[5, 6, 7]] * 10 + [[5, 8]] * 10
    taken_counts()
    samples = sample(
        model,
        prompts,
        max_new_tokens=30,
        temperature=1.0,
        eos_token_ids=range(20),
        pad_token_id=0,
        seed=4,
    )
    counts = taken_counts()
    assert (counts.prompt_positions, counts.prompt_tokens) == (2 * 3, 3 + 2)
    needed = sum(len(response) - 1 for response in samples.responses)  # the first token comes with the prompt
    assert counts.sampled_rows - counts.ended_rows == needed
    assert 0 < counts.ended_rows <= 0.1 * counts.sampled_rows, "rows leave the batch when a tenth have ended"

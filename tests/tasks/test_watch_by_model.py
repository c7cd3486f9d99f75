"""A language model, or a reward, judges for a watch: it compares a policy with the one that its stage started from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slow import slow
from tests.tasks.kills import killed_in, same_bytes_after_a_kill
from tests.tasks.test_best_of_n import WORK as BEST_OF_N
from vantage.ledger.journal import read
from vantage.models.folders import load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.rewards import Judge, Reward
from vantage.schemas.recipe.terms import ModelTerm
from vantage.schemas.recipe.watch import Keep, Watch, WatchPrompts
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.rows import read_rows
from vantage.tasks.rollout.prompted_judge import UnusableJudge
from vantage.tasks.rollout.rollouts import Sampled, Scored
from vantage.tasks.rollout.watching import Watching
from vantage.tasks.stages import run_stage
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.stage_state import WatchedSoFar

Contents = Callable[[Path], dict[str, bytes]]
TEMPLATE = "{prompt}\n{first}\n{second}\n"
ANSWERS = ("0", "B")
"""Two that the untrained model likes about equally, so that some pairs are decided."""
BY_MODEL = Judge(model="model", template=TEMPLATE, answers=ANSWERS)
RATES = ("watch_win_rate", "watch_length_controlled_win_rate")


def job_of(
    pipeline: Any,
    watch: Watch,
    folder: Path | None = None,
    *,
    more: dict[str, str] | None = None,
    **changes: Any,
) -> StageJob:
    """Return the policy stage with a large enough rate that its responses change, and the untrained model at hand as judge."""
    changes = {"learning_rate": 3e-3, "validate_every": 100, "checkpoint_every": 1, **changes}
    job: StageJob = pipeline.job("policy", folder=folder, watch=watch, **changes)
    inputs = {**job.inputs, **pipeline.inputs(more or {"watch": "model"})}
    return job.model_copy(update={"inputs": inputs, "digests": pipeline.digests(inputs)})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Sampled]:
    """Return the responses of each measurement of a watch, in order."""
    responses: list[Sampled] = []
    look = Watching.look

    def noted(self: Watching, scored: Scored, before: WatchedSoFar) -> Any:
        responses.append(scored.sampled)
        return look(self, scored, before)

    monkeypatch.setattr(Watching, "look", noted)
    return responses


def preference(policy: PolicyModel, tokenizer: Any, text: str) -> float:
    """Return log-probability of the first answer after the text less that of the second, from transformers' own logits."""
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        logprobs = policy.causal_lm(torch.tensor([ids])).logits[0, -1].double().log_softmax(dim=-1)
    one, other = (tokenizer.convert_tokens_to_ids(letter) for letter in ANSWERS)
    return float(logprobs[one] - logprobs[other])


def wins_by_hand(job: StageJob, ours: Sampled, first: Sampled) -> list[float]:
    policy, tokenizer = fixed_policy(job, "watch", torch.device("cpu")), load_tokenizer(job.inputs["watch"])
    wins = []
    for prompt, own, other in zip(ours.prompts, ours.responses, first.responses, strict=True):
        both = [
            preference(policy, tokenizer, f"{prompt}\n{a}\n{b}\n") for a, b in ((own, other), (other, own))
        ]
        wins.append(0.5 if own == other or both[0] * both[1] >= 0 else float(both[0] > 0))
    return wins


def test_win_rates_against_init_are_those_of_a_loop_over_the_judges_own_logits(
    pipeline: Any, seen: list[Sampled]
) -> None:
    job = job_of(pipeline, Watch(judge=BY_MODEL, every=1, on_fall="warn"))
    result = run_stage(job)
    curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert len(seen) == 1 + len(curves)
    changed = sum(a != b for a, b in zip(seen[-1].responses, seen[0].responses, strict=True))
    assert changed > 2, "the policy answers otherwise than before"
    kept = [0.5]
    for metrics, sampled in zip(curves, seen[1:], strict=True):
        wins = wins_by_hand(job, sampled, seen[0])
        assert (
            metrics["validation_watch_score"]
            == metrics["watch_win_rate"]
            == pytest.approx(sum(wins) / len(wins))
        )
        assert 0 <= metrics["watch_length_controlled_win_rate"] <= 1
        differ = [a != b for a, b in zip(sampled.responses, seen[0].responses, strict=True)]
        tied = [win == 0.5 for win, each in zip(wins, differ, strict=True) if each]
        assert metrics["watch_order_disagreement"] == pytest.approx(sum(tied) / len(tied))
        kept.append(metrics["watch_win_rate"])
    assert len(set(kept)) > 1, "some judgement is decided"
    assert result.metrics["validation_watch_score"] == max(kept)
    assert result.metrics["best_iteration"] == kept.index(max(kept)), "keep by watch is by the win rate"


@pytest.mark.slow
@pytest.mark.parametrize("kill_in", [2, *slow(0)])
def test_a_kill_leaves_no_trace(
    pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch, kill_in: int
) -> None:
    """The responses of ``init`` go along with the checkpoints: they are not those of the policy that an attempt begins with."""
    watch = Watch(judge=BY_MODEL, every=1, on_fall="warn")
    same_bytes_after_a_kill(
        run_stage,
        lambda folder: job_of(pipeline, watch, folder),
        tmp_path,
        step=kill_in,
        contents=contents,
        monkeypatch=monkeypatch,
    )
    journals = [
        [{name: e.metrics[name] for name in (*RATES, "watch_change", "watch_order_disagreement") if name in e.metrics} for e in read(tmp_path / each / "scratch" / JOURNAL)]
        for each in ("whole", "cut")
    ]  # fmt: skip
    assert journals[0] == journals[1]
    assert all(journals[0])


@pytest.mark.slow
def test_a_model_that_only_looks_changes_no_bit(pipeline: Any, contents: Contents) -> None:
    watch = Watch(judge=BY_MODEL, every=2, on_fall="warn")
    looking = job_of(pipeline, watch, keep=Keep(by="validation"), validate_every=1)
    plain = pipeline.job("policy", guards="off", validate_every=1, learning_rate=3e-3, checkpoint_every=1)
    assert run_stage(looking).metrics == run_stage(plain).metrics
    assert contents(looking.output) == contents(plain.output)


def test_a_judge_that_cannot_read_two_long_responses_is_refused_before_anything_trains(pipeline: Any) -> None:
    long = Judge(model="model", template=TEMPLATE + "!" * 3000, answers=ANSWERS)
    job = job_of(pipeline, Watch(judge=long, every=1))
    with pytest.raises(
        UnusableJudge,
        match=r"watch.model='model' reads \d+ tokens, and a question about two responses of "
        r"generation.max_response_tokens=24 can have \d+; shorten template",
    ):
        run_stage(job)
    assert not (job.scratch / JOURNAL).exists()


def with_reward(pipeline: Any, job: StageJob) -> StageJob:
    """Return the job with a reward of another seed as the judge of its watch."""
    second = pipeline.job("reward", folder=pipeline.root / "second").model_copy(update={"seed": 6})
    if not (second.output / "model.safetensors").is_file():
        run_stage(second)
    inputs = {**job.inputs, "reward.other.0": second.output}
    rewards = {**job.rewards, "other": Reward(terms=(ModelTerm(model="second"),))}
    return job.model_copy(update={"inputs": inputs, "rewards": rewards, "digests": pipeline.digests(inputs)})


@pytest.mark.slow
def test_a_reward_as_judge_reports_its_win_rate_beside_its_score(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rates are computed by hand from the scores that it gave."""
    given: list[torch.Tensor] = []
    look = Watching.look

    def noted(self: Watching, scored: Scored, before: WatchedSoFar) -> Any:
        given.append(self.judge(scored.sampled))  # type: ignore[operator]
        return look(self, scored, before)

    monkeypatch.setattr(Watching, "look", noted)
    job = with_reward(pipeline, job_of(pipeline, Watch(judge=Judge(reward="other"), every=1, on_fall="warn")))
    run_stage(job)
    curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    for metrics, scores in zip(curves, given[1:], strict=True):
        differences = (scores.double() - given[0].double()).tolist()
        assert metrics["validation_watch_score"] == pytest.approx(scores.mean().item())
        wins = [0.5 if abs(each) < 1e-6 else float(each > 0) for each in differences]
        assert metrics["watch_win_rate"] == pytest.approx(sum(wins) / len(wins))
    assert len({metrics["watch_win_rate"] for metrics in curves}) > 1


@pytest.mark.slow
def test_a_stage_that_an_earlier_version_began_goes_on_without_win_rates(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(judge=Judge(reward="other"), every=1, on_fall="warn")
    with monkeypatch.context() as patched:
        patched.setattr("vantage.tasks.rollout.watching.with_scores", lambda first, _: type(first)())
        with killed_in(2, monkeypatch):
            run_stage(with_reward(pipeline, job_of(pipeline, watch, tmp_path)))
    job = with_reward(pipeline, job_of(pipeline, watch, tmp_path))
    run_stage(job)
    *_, last = (entry.metrics for entry in read(job.scratch / JOURNAL))
    assert "watch_win_rate" not in last and "validation_watch_score" in last


# -- prompts of its own


@pytest.mark.parametrize("split", ["validation", "train"])
def test_a_watch_has_prompts_of_its_own(
    pipeline: Any, seen: list[Sampled], contents: Contents, split: Any
) -> None:
    """The watch samples responses only to its own prompts, and validation is unchanged."""
    prompts = WatchPrompts(data="demonstrations", split=split, samples=6)
    watch = Watch(judge=Judge(verifier="arithmetic"), every=1, on_fall="warn", prompts=prompts)
    more = {"watch_prompts": "demonstrations"}
    job = job_of(pipeline, watch, more=more, keep=Keep(by="validation"), validate_every=1)
    result = run_stage(job)
    rows = [row["prompt"] for row in read_rows(pipeline.folder("demonstrations"), split)]
    assert all(each.prompts == rows[:6] for each in seen)
    held_out = [row["prompt"] for row in read_rows(pipeline.folder("prompts"), "test")]
    assert not set(held_out) & set(seen[0].prompts)
    curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    for metrics, sampled in zip(curves, seen[1:], strict=True):
        right = [
            verified(text, prompt) for text, prompt in zip(sampled.responses, sampled.prompts, strict=True)
        ]
        assert metrics["validation_watch_score"] == pytest.approx(sum(right) / 6)
        assert "watch_reward" in metrics
    plain = pipeline.job("policy", guards="off", validate_every=1, learning_rate=3e-3, checkpoint_every=1)
    assert run_stage(plain).metrics == result.metrics
    assert contents(plain.output) == contents(job.output)


def test_responses_of_a_watch_are_other_draws_than_those_of_validation(pipeline: Any) -> None:
    """They are other draws even for the same prompts."""
    prompts = WatchPrompts(data="prompts", samples=16)
    watch = Watch(judge=Judge(verifier="arithmetic"), every=1, on_fall="warn", prompts=prompts)
    job = job_of(pipeline, watch, more={"watch_prompts": "prompts"}, iterations=2)
    run_stage(job)
    for entry in read(job.scratch / JOURNAL):
        assert entry.metrics["watch_reward"] != pytest.approx(entry.metrics["validation_score"], abs=1e-4)


def verified(response: str, prompt: str) -> float:
    """Return whether a response ends with the result of a sum such as ``12+30=``, in plain Python."""
    expression = "".join(c for c in prompt if c in "0123456789+-*")
    numbers = "".join(c if c.isdigit() or c == "-" else " " for c in response).split()
    return float(bool(numbers) and numbers[-1] == str(eval(expression)))


# -- best of n


def test_best_of_n_keeps_the_policy_that_its_watch_likes_best(
    pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(judge=BY_MODEL, every=1, on_fall="warn")

    def in_folder(folder: Path) -> StageJob:
        job = job_of(pipeline, watch, folder)
        work = BEST_OF_N.model_copy(update={"watch": watch, "validate_every": 100, "checkpoint_every": 1})
        inputs = {role: path for role, path in job.inputs.items() if role not in ("reference", "critic")}
        return job.model_copy(update={"work": work, "inputs": inputs})

    same_bytes_after_a_kill(
        run_stage, in_folder, tmp_path, step=2, contents=contents, monkeypatch=monkeypatch
    )
    job = in_folder(tmp_path / "again")
    result = run_stage(job)
    rates = [0.5, *(entry.metrics["watch_win_rate"] for entry in read(job.scratch / JOURNAL))]
    assert result.metrics["validation_watch_score"] == max(rates)
    assert result.metrics["best_iteration"] == rates.index(max(rates))
    assert "validation_score" in result.metrics

"""Prompts that became too easy or stay impossible are counted as by hand, and as a policy stage sampled them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tasks.kills import killed_in
from vantage.ledger.journal import read
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.prompt_selection import DifficultyReport
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rewards.term_scores import UnknownScore
from vantage.tasks.rollout import engine
from vantage.tasks.rollout.rollouts import Scored
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates import gathering
from vantage.tasks.updates.prompt_difficulty import PromptDifficulty, Seen, seen_groups

REPORT = "prompt_difficulty.json"


def counts_of(*texts: str, **rule: Any) -> PromptDifficulty:
    prompts = Prompts(texts=texts, ids=[[1]] * len(texts), answers=[None] * len(texts), num_too_long=0)
    return PromptDifficulty(prompts, DifficultyReport(**rule))


def visit(counts: PromptDifficulty, **passed: int) -> None:
    counts.count([Seen([(text, None) for text in passed], torch.tensor(list(passed.values())), responses=4)])


def test_a_prompt_is_judged_by_its_groups(tmp_path: Path) -> None:
    """Right responses of 4 in each group: a has 4, 4 and is too easy; b has 0, 0 and is impossible; c has 4, 3, 4, so
    not 4 in a row; d has 0, 1 and is possible; e has one group only."""
    counts = counts_of(*"abcdef")
    visit(counts, a=4, b=0, c=4, d=0)
    assert counts.metrics() == {"prompts_too_easy": 0, "prompts_impossible": 0}
    visit(counts, a=4, b=0, c=3, d=1, e=0)
    visit(counts, c=4)
    assert counts.metrics() == {"prompts_too_easy": 1, "prompts_impossible": 1}
    counts.write(tmp_path)
    assert json.loads((tmp_path / REPORT).read_text()) == {
        "prompts_too_easy": 1, "prompts_impossible": 1, "prompts_visited": 5,
        "too_easy": [{"prompt": "a", "groups": 2, "responses": 8, "passed": 8}],
        "impossible": [{"prompt": "b", "groups": 2, "responses": 8, "passed": 0}],
    }  # fmt: skip


def test_an_easy_prompt_that_fails_again_is_no_longer_too_easy_and_the_most_visited_come_first(
    tmp_path: Path,
) -> None:
    counts = counts_of(*"abc", after=1)
    visit(counts, a=4, b=4)
    visit(counts, b=4)
    assert counts.metrics()["prompts_too_easy"] == 2
    counts.write(tmp_path)
    assert [each["prompt"] for each in json.loads((tmp_path / REPORT).read_text())["too_easy"]] == ["b", "a"]
    visit(counts, a=3)
    assert counts.metrics()["prompts_too_easy"] == 1


def test_a_named_score_passes_above_the_bound_and_not_at_it() -> None:
    """0.1 as float32 is a little more than 0.1."""
    scores = Scores(
        total=torch.zeros(6),
        weighted_sum=torch.tensor([9.0] * 6),
        by_term={"rubric.facts": torch.tensor([0.1, 0.1000001, 0.0, 0.1, 0.1, 0.1])},
    )
    sampled = SimpleNamespace(prompts=["p"] * 3 + ["q"] * 3, answers=[None] * 6)
    rule = DifficultyReport(term="rubric.facts", passes_above=0.1)
    seen = seen_groups(SimpleNamespace(scores=scores, sampled=sampled), rule, samples_per_prompt=3)  # type: ignore[arg-type]
    assert seen.cases == [("p", None), ("q", None)] and seen.passed.tolist() == [1, 0]


def test_a_score_that_the_reward_lacks_is_refused_before_anything_is_sampled(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = policy_job(pipeline, tmp_path, term="reward.facts")
    monkeypatch.setattr(engine.LocalEngine, "generate", lambda *_, **__: pytest.fail("something is sampled"))
    with pytest.raises(UnknownScore) as refused:
        run_stage(job)
    assert str(refused.value) == (
        "stages.policy.difficulty.term='reward.facts' is no score of rewards.main; use one of: reward"
    )


def policy_job(pipeline: Any, folder: Path, **fields: Any) -> StageJob:
    job: StageJob = pipeline.job("policy", folder=folder)
    switches = {"preset": "dapo", "samples_per_prompt": 4, "max_sampling_rounds": 3, "overlong_buffer": None}
    report = DifficultyReport(**{"after": 1, **fields})
    changes = {"algorithm": Algorithm.model_validate(switches), "difficulty": report, "epochs": 1}
    work = job.work.model_copy(update=changes)
    inputs = {role: path for role, path in job.inputs.items() if role != "critic"}
    return job.model_copy(update={"work": resolve_work(work), "inputs": inputs})


def test_a_policy_stage_counts_everything_that_it_samples_and_a_kill_leaves_no_trace(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group that was scored, those that were dropped too, is counted again here, from the scores themselves.

    The first group of each batch is given one score, so that it is dropped, and every rollout takes several batches.
    """
    scores: list[Scored] = []
    sample = gathering.sample_and_score

    def with_a_uniform_group(*args: Any, **named: Any) -> Scored:
        found = sample(*args, **named)
        sums = found.scores.weighted_sum.clone()
        sums[:4] = sums[0]
        scores.append(replace(found, scores=replace(found.scores, weighted_sum=sums)))
        return scores[-1]

    monkeypatch.setattr(gathering, "sample_and_score", with_a_uniform_group)
    above = -0.5
    whole = policy_job(pipeline, tmp_path / "whole", passes_above=above)
    result = run_stage(whole)
    groups: dict[str, list[list[bool]]] = {}
    for scored in scores:
        passes = (scored.scores.weighted_sum > above).tolist()
        for start in range(0, len(passes), 4):
            groups.setdefault(scored.sampled.prompts[start], []).append(passes[start : start + 4])
    easy = {prompt for prompt, each in groups.items() if all(each[-1])}
    impossible = {prompt for prompt, each in groups.items() if not any(map(any, each))}
    assert result.metrics["prompts_too_easy"] == len(easy)
    assert result.metrics["prompts_impossible"] == len(impossible)
    assert easy or impossible
    report = json.loads((whole.output / REPORT).read_text())
    assert {each["prompt"] for each in report["too_easy"]} == easy
    assert {each["prompt"] for each in report["impossible"]} == impossible
    assert report["prompts_visited"] == len(groups)
    journal = [entry.metrics for entry in read(whole.scratch / JOURNAL)]
    assert all(curve["sampling_rounds"] > 1 for curve in journal)
    assert journal[-1]["prompts_impossible"] == len(impossible)
    assert all({"prompts_too_easy", "prompts_impossible"} <= curve.keys() for curve in journal)

    with killed_in(3, monkeypatch):
        run_stage(policy_job(pipeline, tmp_path / "cut", passes_above=above))
    cut = policy_job(pipeline, tmp_path / "cut", passes_above=above)
    assert run_stage(cut) == result
    for file in (REPORT, "model.safetensors"):
        assert (cut.output / file).read_bytes() == (whole.output / file).read_bytes(), file

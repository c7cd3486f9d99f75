"""A stage reports each part of a step with its counts, and its numbers do not change by that."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from vantage.models.sampling import sample
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.stages import run_stage
from vantage.tasks.training import progress
from vantage.tasks.training.progress import Progress

pytestmark = pytest.mark.slow

Phases = list[tuple[int, str, int, int, str]]
Contents = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Phases:
    """Return (step, phase, done, total, note) of everything that was reported."""
    heard: Phases = []

    def listen(self: Progress, name: str, done: int = 0, total: int = 0, *, note: str = "") -> None:
        heard.append((self._report.step, name, done, total, note))

    monkeypatch.setattr(Progress, "phase", listen)
    return heard


def phases_in_step(reported: Phases, step: int) -> list[str]:
    return [name for name, _ in groupby(name for at, name, *_ in reported if at == step)]


@pytest.mark.parametrize(
    "stage, iteration",
    [
        ("value", ["sampling", "scoring", "computing log-probabilities", "updating"]),
        (
            "policy",
            ["sampling", "scoring", "computing log-probabilities", "computing values", "updating"],
        ),
    ],
)
def test_an_iteration_tells_each_of_its_parts_in_order_and_changes_nothing(
    stage: str, iteration: list[str], pipeline: Any, reported: Phases, contents: Contents
) -> None:
    expected = contents(pipeline.folder(stage))
    reported.clear()
    job = pipeline.job(stage, microbatch_size=5)
    run_stage(job)
    assert contents(job.output).keys() == expected.keys()
    assert phases_in_step(reported, 2)[: len(iteration)] == iteration
    assert any(name.startswith("validation: sampling") for _, name, *_ in reported)
    for name in iteration:
        counts = [(done, total) for at, said, done, total, _ in reported if (at, said) == (2, name)]
        assert len({done for done, _ in counts}) > 1, f"{name} moves"
        assert all(done < total for done, total in counts if name != "sampling")
    sampled = [(done, total) for at, name, done, total, _ in reported if (at, name) == (2, "sampling")]
    assert {total for _, total in sampled} == {job.work.batch_size}
    assert [done for done, _ in sampled] == sorted(done for done, _ in sampled)


def test_what_is_told_has_no_part_in_the_numbers(
    pipeline: Any, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(pipeline.folder("policy"))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_SHOWS", 0.0)  # written as often as it can be
    loud = pipeline.job("policy")
    run_stage(loud)
    assert contents(loud.output) == whole
    monkeypatch.setattr(Progress, "phase", lambda *_, **__: None)
    silent = pipeline.job("policy")
    run_stage(silent)
    assert contents(silent.output) == whole


def test_an_evaluation_says_whose_responses_it_samples(pipeline: Any, reported: Phases) -> None:
    pipeline.folder("evaluation")
    reported.clear()
    run_stage(pipeline.job("evaluation"))
    of_step = {step: phases_in_step(reported, step)[0] for step in range(4)}
    assert of_step == {
        0: "candidate: sampling",
        1: "candidate, greedy: sampling",
        2: "candidate: computing log-probabilities",
        3: "baseline, greedy: sampling",
    }
    assert "baseline: sampling" in phases_in_step(reported, 2)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_what_is_measured_after_the_last_step_is_told(stage: str, pipeline: Any, reported: Phases) -> None:
    pipeline.folder(stage)
    reported.clear()
    run_stage(pipeline.job(stage))
    assert {name for _, name, *_ in reported} == {"measuring"}
    assert all(total > 0 for *_, total, _ in reported)


def test_sampling_tells_every_token_and_how_many_have_ended(pipeline: Any) -> None:
    from vantage.models.folders import load_policy, load_tokenizer

    folder = pipeline.folder("sft")
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer(text)["input_ids"] for text in ("3 a+2?", "1 b-1 a+1?", "5 c+3?", "2 a-1?")]
    heard: list[tuple[int, int]] = []
    samples = sample(
        load_policy(folder),
        prompts,
        max_new_tokens=12,
        temperature=1.0,
        eos_token_ids=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
        seed=3,
        limits=PassLimits(2),
        on_token=lambda ended, token: heard.append((ended, token)),
    )
    by_batch = sorted(range(4), key=lambda row: len(prompts[row]))
    expected = []
    for start in (0, 2):
        rows = by_batch[start : start + 2]
        lengths = [len(samples.responses[row]) for row in rows]
        for token in range(1, max(lengths) + 1):
            # a response that ended with token 5 has ended before token 6
            ended = sum(
                samples.ended[row] and length < token for row, length in zip(rows, lengths, strict=True)
            )
            expected.append((start + ended, token))
    assert heard == expected

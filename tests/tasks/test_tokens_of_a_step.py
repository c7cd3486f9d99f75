"""``tokens_per_second`` counts all tokens that a step read or sampled, prompts included."""

from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.kinds import resolve_work
from vantage.tasks import policy_optimization, value_pretraining
from vantage.tasks.data.examples import codec_of, read_completions
from vantage.tasks.rollout.rollouts import Rollout
from vantage.tasks.stages import run_stage
from vantage.tasks.training.step_metrics import Speed

pytestmark = pytest.mark.slow


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of each step of a run, as they reach the meter of its speed."""
    counts: list[int] = []
    after = Speed.after

    def noted(self: Speed, num_tokens: int) -> float:
        counts.append(num_tokens)
        return after(self, num_tokens)

    monkeypatch.setattr(Speed, "after", noted)
    return counts


def tokens_of(rollout: Rollout) -> int:
    """Return how many ids the prompts and responses of a rollout have."""
    sequences = rollout.sequences
    return sum(map(len, [*sequences.prompt_rows(), *sequences.response_rows()]))


@pytest.mark.parametrize(("name", "sides"), [("sft", ["response"]), ("reward", ["chosen", "rejected"])])
def test_an_epoch_counts_each_prompt_with_each_of_its_responses(
    name: str, sides: list[str], pipeline: Any, tmp_path: Path, counted: list[int]
) -> None:
    job = pipeline.job(name, folder=tmp_path, epochs=1.0, batch_size=7)
    counted.clear()  # what the stages before it counted
    run_stage(job)
    rows = read_completions(job.inputs["data"], "train", sides, codec_of(job, "init"))
    of_rows = [
        len(prompt) + len(response)
        for responses in rows.response_ids.values()
        for prompt, response in zip(rows.prompt_ids, responses, strict=True)
    ]
    assert abs(len(counted) * 7 - len(rows)) < 7, "the last step is filled from the next epoch"
    of_seven = 7 * len(sides) * max(of_rows)
    assert abs(sum(of_rows) - sum(counted)) <= of_seven < sum(map(len, rows.prompt_ids))


@pytest.mark.parametrize(
    ("name", "stage", "learns"),
    [("policy", policy_optimization, "update"), ("value", value_pretraining, "regress")],
)
def test_an_iteration_counts_its_rollout_with_the_prompts(
    name: str,
    stage: Any,
    learns: str,
    pipeline: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counted: list[int],
) -> None:
    job = pipeline.job(name, folder=tmp_path)
    job = job.model_copy(update={"work": resolve_work(job.work)})
    expected: list[int] = []
    learn = getattr(stage, learns)

    def noted(*args: Any, **named: Any) -> Any:
        rollouts = [each if isinstance(each, Rollout) else getattr(each, "rollout", None) for each in args]
        expected.extend(tokens_of(each) for each in rollouts if each is not None)
        return learn(*args, **named)

    monkeypatch.setattr(stage, learns, noted)
    counted.clear()  # what the stages before it counted
    run_stage(job)
    assert counted == expected and len(counted) == job.work.iterations

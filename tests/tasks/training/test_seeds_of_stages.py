"""No two kinds of stage meet the same draws; two stages of one kind do, so that they are compared in pairs."""

import re
from pathlib import Path
from typing import Any

import pytest

from vantage.models.sampling import Samples, sample
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout import engine
from vantage.tasks.stages import run_stage
from vantage.tasks.training.seeds import derive_seed, stage_seed

pytestmark = pytest.mark.slow

TASKS = Path(__file__).parents[3] / "tasks"


def test_a_stage_seed_is_that_of_seed_and_kind(pipeline: Any) -> None:
    jobs: dict[str, StageJob] = {name: pipeline.job(name) for name in ("sft", "reward", "value", "policy")}
    seeds = {name: stage_seed(job) for name, job in jobs.items()}
    assert len(set(seeds.values())) == len(jobs)
    assert seeds["value"] == derive_seed(5, "value_pretraining")
    renamed = jobs["value"].model_copy(update={"name": "critic", "run_id": "0002-other", "attempt": 2})
    assert stage_seed(renamed) == seeds["value"]
    assert stage_seed(jobs["value"].model_copy(update={"seed": 6})) != seeds["value"]


def test_no_stage_draws_from_the_bare_seed() -> None:
    # mix_data draws by hash, without torch: its streams have the kind in their names; stages only says it in the log
    allowed = {"seeds.py", "import_model.py", "stages.py", "mix_data.py"}
    texts = {file: file.read_text() for file in TASKS.rglob("*.py")}
    drawing = [str(file) for file, text in texts.items() if re.search(r"\bjob\.seed\b", text)]
    assert len(texts) > 50
    assert [file for file in drawing if Path(file).name not in allowed] == []
    assert re.findall(r"\{job\.seed\}(:\w+:)", texts[TASKS / "mix_data.py"]) == [":mix_data:"]


def test_the_critic_and_the_policy_meet_neither_the_same_prompts_in_order_nor_the_same_draws(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages run with one seed and equal sizes; what each asks the sampler for is written down."""
    asked: dict[str, list[tuple[int, list[list[int]]]]] = {"value": [], "policy": []}
    pipeline.folder("policy")  # so that no stage before it is run, and written down, beneath
    for name, calls in asked.items():

        def recording(model: Any, prompts: list[list[int]], calls: Any = calls, **settings: Any) -> Samples:
            calls.append((settings["seed"], prompts))
            return sample(model, prompts, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "sample", recording)
            changes = {
                "iterations": 2,
                "batch_size": 64,
                "minibatch_size": 64,
                "validation_samples": 8,
                "test_samples": 8,
            }
            if name == "policy":
                algorithm = pipeline.job("policy").work.algorithm.model_copy(update={"samples_per_prompt": 1})
                changes |= {"algorithm": algorithm, "epochs": 1}
            run_stage(pipeline.job(name, **changes))
    value, policy = asked["value"], asked["policy"]
    assert not {seed for seed, _ in value} & {seed for seed, _ in policy}
    trained = [[prompts for _, prompts in calls if len(prompts) == 64] for calls in (value, policy)]
    assert len(trained[0]) == len(trained[1]) == 2
    for ours, theirs in zip(*trained, strict=True):
        # 64 prompts in two random orders have one in common at the same place on average; ten: less than one in 10^6
        assert sum(mine == other for mine, other in zip(ours, theirs, strict=True)) < 10


def test_two_stages_of_one_kind_and_seed_share_their_draws_and_another_seed_parts_them(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[list[int]] = []
    for seed in (5, 5, 6):
        seeds.append([])

        def recording(
            model: Any, prompts: list[list[int]], calls: Any = seeds[-1], **settings: Any
        ) -> Samples:
            calls.append(settings["seed"])
            return sample(model, prompts, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "sample", recording)
            job = pipeline.job("value", iterations=1, validation_samples=4, test_samples=4)
            run_stage(job.model_copy(update={"seed": seed, "name": f"critic_{len(seeds)}"}))
    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2])
    assert len(set(seeds[0])) == len(seeds[0])  # within a stage no two streams meet either

"""Whole stages with stop strings equal the oracle, which samples without them and cuts off what they would have stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.slow import slow
from tests.tasks import oracle_policy, oracle_rollouts, oracle_stages
from tests.tasks.kills import killed_in
from tests.tasks.oracle_networks import assert_moved_alike, language_model
from tests.tasks.oracle_rollouts import collected, rows_of
from tests.tasks.test_stages_on_ranks import start
from tests.tasks.unequal_inputs import GENERATION, job_of, write_inputs
from vantage.ledger.journal import read
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.slow

STOP = ("?", "3+", "0")
TRAINING = {
    "learning_rate": 0.02,
    "max_grad_norm": 0.5,
    "microbatch_size": 4,
    "reward": "main",
    "prompts": "prompts",
}
LOOP = {
    **TRAINING, "iterations": 3, "batch_size": 12, "minibatch_size": 6, "validate_every": 1, "validation_samples": 18,
    "test_samples": 13, "checkpoint_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_rollouts, "STOP", list(STOP))


def job(work: Any, folder: Path, folders: dict[str, Path], **roles: str) -> StageJob:
    """Return a job whose responses end at a stop string."""
    scored = {"reward.main.0": "reward", "reward.main.1": "last_digit", "prompts": "prompts"}
    inputs = {role: folders[name] for role, name in {**scored, **roles}.items()}
    generation = Generation(**{**GENERATION.model_dump(), "stop": STOP})
    return job_of(work, folder, inputs, seed=3).model_copy(update={"generation": generation})


def stages(**algorithm: Any) -> dict[str, tuple[Any, dict[str, str], Callable[[StageJob], Any]]]:
    """Return kind → work, the folders that it reads, and its oracle."""
    ppo = {"preset": "ppo", "gamma": 0.9, "kl_coef": 0.1, **algorithm}
    return {
        "policy_optimization": (
            PolicyOptimization.model_validate(
                {**LOOP, "kind": "policy_optimization", "init": "init", "reference": "reference", "critic": "critic",
                 "critic_learning_rate": 0.007, "algorithm": ppo}
            ),
            {"init": "init", "reference": "reference", "critic": "critic"},
            oracle_policy.run,
        ),
        "best_of_n": (
            BestOfN.model_validate(
                {**LOOP, "kind": "best_of_n", "init": "init", "samples_per_prompt": 3, "minibatch_size": 2}
            ),
            {"init": "init"},
            oracle_stages.best_of_n,
        ),
    }  # fmt: skip


def check(told: StageJob, outcome: Any, measured: dict[str, Any], result: Any) -> None:
    journal = [entry.metrics for entry in read(told.scratch / JOURNAL)]
    assert len(journal) == len(outcome.journal)
    for number, (entry, expected) in enumerate(zip(journal, outcome.journal, strict=True)):
        for metric, value in expected.items():
            assert entry[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), (number, metric)
    for metric, value in measured.items():
        assert result.metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize(
    ("kind", "is_killed"),
    [
        ("policy_optimization", False),
        *slow(("policy_optimization", True), ("best_of_n", False), ("best_of_n", True)),
    ],
)
def test_what_is_learnt_from_responses_that_a_string_ended(
    kind: str, is_killed: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such responses have ended: nothing is bootstrapped behind them, filtered out or charged for a missing end."""
    work, roles, oracle = stages(bootstrap_truncated=True, overlong_filter=True)[kind]
    told = job(work, tmp_path, folders, **roles)
    outcome = oracle(told)
    measured = getattr(outcome, "measured", None) or outcome.metrics
    assert kind == "best_of_n" or 0 < measured["truncated_share"] < 0.7
    if is_killed:
        with killed_in(2, monkeypatch):
            run_stage(told)
    check(told, outcome, measured, run_stage(told))
    before = language_model(folders["init"]).state_dict()
    assert_moved_alike(load_file(told.output / "model.safetensors"), outcome.weights, before)


def test_an_evaluation_reads_the_text_before_the_stop_string(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    work = PolicyEvaluation.model_validate(
        {
            "kind": "evaluation", "candidate": "init", "baseline": "reference", "judge": {"verifier": "last_digit"},
            "also": {"reward": "main"}, "prompts": "prompts", "demonstrations": "demonstrations", "samples_per_prompt": 6,
            "microbatch_size": 5,
        }
    )  # fmt: skip
    roles = {
        "candidate": "init",
        "baseline": "reference",
        "demonstrations": "demonstrations",
        "judge": "last_digit",
    }
    told = job(work, tmp_path, folders, **roles)
    metrics = run_stage(told).metrics
    for name, value in oracle_stages.evaluation(told).items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    responses = [row["response"] for row in rows_of(told.output, "candidate")]
    assert responses and not any(string in response for string in STOP for response in responses)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("alone", 1),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_collected_responses_keep_the_ids_of_the_stop_string(
    strategy: str, world_size: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    """They keep them also where ranks sample parts of a batch, and where ranks of a sharded model go on until the last
    response has ended.
    """
    work = RolloutCollection(
        kind="rollout_collection", policy="init", prompts="prompts", reward="main", samples_per_prompt=3,
        held_out_samples_per_prompt=4, batch_size=12,
    )  # fmt: skip
    told = job(resolve_work(work), tmp_path, folders, policy="init")
    if strategy == "alone":
        run_stage(told)
    else:
        start(world_size, tmp_path / "jobs", [told], strategy=strategy)
    for split, prompts in oracle_stages.rollouts(told).items():
        for found, expected in zip(collected(told.output, split), prompts, strict=True):
            assert (found.responses, found.ended) == (expected.responses, expected.ended)
            assert found.scores == pytest.approx(expected.scores, rel=1e-4, abs=1e-5)


def test_collected_pairs_have_the_text_before_it(folders: dict[str, Path], tmp_path: Path) -> None:
    work = PreferenceCollection.model_validate(
        {
            "kind": "preference_collection", "policy": "init", "prompts": "prompts", "judge": {"reward": "main"},
            "samples_per_prompt": 3, "batch_size": 6, "microbatch_size": 4,
        }
    )  # fmt: skip
    told = job(work, tmp_path, folders, policy="init")
    run_stage(told)
    for split, pairs in oracle_stages.preferences(told).items():
        found = [(row["prompt"], row["chosen"], row["rejected"]) for row in rows_of(told.output, split)]
        assert found == pairs
        assert not any(string in text for string in STOP for _, *texts in found for text in texts)

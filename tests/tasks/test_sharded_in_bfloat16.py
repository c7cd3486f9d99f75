"""Stages in bfloat16 on two ranks with FSDP2, which gathers weights in bfloat16, agree with one process in both precisions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.alike import ADAM_EPS, run_to_compare
from tests.tasks.test_stages_on_ranks import Job, last_metrics, moved, of_kind, of_preset, result_of, start
from vantage.ledger.journal import read
from vantage.schemas.records.job import StageJob
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.slow

CASES: dict[str, Callable[..., Job]] = {
    "sft": partial(of_kind, "sft", microbatch_size=3),
    "reward": partial(of_kind, "reward", microbatch_size=2),
    "vapo": partial(of_preset, "vapo", microbatch_size=2),
    "shared trunk": partial(of_preset, "shared trunk", microbatch_size=2),
    "evaluation": partial(of_kind, "evaluation"),
}

OTHER_RESPONSES = 1.2
"""Nats per token: over ten seeds ``reference_nll`` has a standard deviation of 0.2, so this is four of those of a difference."""


@pytest.fixture(scope="module")
def sharded(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StageJob]:
    """Return name → a stage in bfloat16 that two ranks have done by FSDP2."""
    jobs = {
        name: case(precision="bfloat16")(pipeline, tmp_path_factory.mktemp("sharded"))
        for name, case in CASES.items()
    }
    start(2, tmp_path_factory.mktemp("jobs") / "jobs", list(jobs.values()), strategy="fsdp2", eps=ADAM_EPS)
    return jobs


def alone(name: str, precision: str, pipeline: Any, folder: Path) -> StageJob:
    (folder / precision).mkdir()
    job = CASES[name](precision=precision)(pipeline, folder / precision)
    run_to_compare(job)
    return job


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_weights_are_as_near_to_those_in_float32_as_one_process_comes(
    name: str, sharded: dict[str, StageJob], pipeline: Any, tmp_path: Path
) -> None:
    """The measured distance is 0.8 times that of one process for SFT, and 1.4 times for the reward model, whose norms
    and embeddings are rounded too."""
    exact, near = (alone(name, precision, pipeline, tmp_path) for precision in ("float32", "bfloat16"))
    weights = moved(exact)
    far, one = (
        torch.cat([(each[key] - weights[key]).flatten() for key in weights]).norm()
        for each in (moved(sharded[name]), moved(near))
    )
    assert 0 < far < 2 * one
    found, expected = last_metrics(sharded[name]), last_metrics(near)
    assert found.keys() == expected.keys()
    for metric in ("loss", "grad_norm"):
        assert found[metric] == pytest.approx(expected[metric], rel=5e-3)
    measured = [result_of(sharded[name], rank).metrics for rank in range(2)]
    assert measured[0] == measured[1]


@pytest.mark.parametrize("name", ["vapo", "shared trunk"])
def test_what_samples_is_as_near_to_what_trains_as_in_one_process(
    name: str, sharded: dict[str, StageJob], pipeline: Any, tmp_path: Path
) -> None:
    """Rounding may change sampled tokens and all that follows from them; the gap between sampling and training stays rounding."""
    found, expected = last_metrics(sharded[name]), last_metrics(alone(name, "bfloat16", pipeline, tmp_path))
    assert found.keys() == expected.keys()
    assert 0 < found["sampler_gap"] < 2 * expected["sampler_gap"] < 0.01
    assert found["sampler_gap_worst"] < 0.05
    first, *_ = read(sharded[name].scratch / JOURNAL)
    print(name, first.metrics["kl_to_reference_per_token"])
    assert abs(first.metrics["kl_to_reference_per_token"]) < 1e-6, "the policy is its reference yet"
    assert found["reference_nll"] == pytest.approx(expected["reference_nll"], abs=OTHER_RESPONSES)
    measured = [result_of(sharded[name], rank).metrics for rank in range(2)]
    assert measured[0] == measured[1]


def test_an_evaluation_measures_the_same_on_both_ranks(
    sharded: dict[str, StageJob], pipeline: Any, tmp_path: Path
) -> None:
    found = [result_of(sharded["evaluation"], rank).metrics for rank in range(2)]
    job = CASES["evaluation"](precision="bfloat16")(pipeline, tmp_path)
    expected = run_to_compare(job).metrics
    assert found[0] == found[1]
    assert found[0].keys() == expected.keys()
    for metric in ("kl_to_baseline_per_token", "distinct_2"):
        assert found[0][metric] == pytest.approx(expected[metric], rel=0.3)

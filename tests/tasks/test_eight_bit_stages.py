"""Stages whose moments really are held in 8 bits, on two ranks: their model is wide enough, other than that of most tests."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tasks.alike import ADAM_EPS, run_to_compare
from tests.tasks.conftest import Pipeline
from tests.tasks.test_stages_on_ranks import last_metrics, moved, start
from vantage.schemas.kinds import resolve_work
from vantage.schemas.records.job import StageJob
from vantage.tasks.training.checkpoints import latest
from vantage.tasks.training.scratch import CHECKPOINTS

pytestmark = pytest.mark.slow

WIDTH = 64
"""Width of the model, each of whose matrices then has 4096 elements at least."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return Pipeline(tmp_path_factory.mktemp("wide"), width=WIDTH)


def job_in(pipeline: Pipeline, name: str, folder: Path, states: str) -> StageJob:
    iterations = {"iterations": 2} if name == "policy" else {}
    job = pipeline.job(name, folder=folder, microbatch_size=3, optimizer_states=states, **iterations)
    return job.model_copy(update={"work": resolve_work(job.work)})


def mean_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return torch.cat([(found[name] - each).abs().flatten() for name, each in expected.items()]).mean().item()


@pytest.mark.parametrize("name", ["sft", "policy"])
def test_two_ranks_make_what_one_process_makes(name: str, wide: Pipeline, tmp_path: Path) -> None:
    """A moment that is rounded to another of its 256 numbers moves single weights, but the mean difference is at most
    1/100 of what 8 bits change.

    The measured share is 1/800 for SFT, and 1/12,000 for the policy.
    """
    ranked, alone, exact = (
        job_in(wide, name, tmp_path / place, states)
        for place, states in (("ranked", "8bit"), ("alone", "8bit"), ("exact", "float32"))
    )
    start(2, tmp_path / "jobs", [ranked], eps=ADAM_EPS)
    run_to_compare(alone)
    run_to_compare(exact)
    kept = latest(ranked.scratch / CHECKPOINTS)
    assert kept is not None
    types = {
        each.dtype
        for key, each in load_file(kept.folder / "tensors.safetensors").items()
        if key.endswith("/state1")
    }
    assert torch.uint8 in types
    of_one = moved(alone)
    changed = mean_difference(moved(exact), of_one)
    assert 0 < mean_difference(moved(ranked), of_one) < changed / 100
    found, expected = last_metrics(ranked), last_metrics(alone)
    assert found == pytest.approx(expected, rel=2e-3, abs=2e-4)

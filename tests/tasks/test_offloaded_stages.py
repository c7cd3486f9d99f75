"""Stages whose frozen networks lie in host memory give the same bytes, with only the expected visits to the device."""

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.slow import slow
from tests.tasks import test_dpo
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training import offloading, optimization

pytestmark = pytest.mark.slow

Job = Callable[[Any, Path], StageJob]


def of_kind(name: str) -> Job:
    changes = {} if name == "collected" else {"iterations": 2}
    return lambda pipeline, folder: pipeline.job(name, folder=folder, **changes)


def dpo(pipeline: Any, folder: Path) -> StageJob:
    return test_dpo.job_in(pipeline, folder, reference="model")


def offloaded(job: StageJob, *roles: str) -> StageJob:
    resources = job.work.resources.model_copy(update={"offload": roles})
    return job.model_copy(update={"work": job.work.model_copy(update={"resources": resources})})


class Device:
    """A stand-in for a GPU, to which weights are copied, and which counts the copies that are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[weakref.ref[Tensor]] = []
        self.visits: Counter[int] = Counter()
        self.alive_in_updates: list[int] = []
        step = optimization.take_step

        def on(device: torch.device, weight: Tensor) -> Tensor:
            copy = weight.clone()
            self.copies.append(weakref.ref(copy.untyped_storage()))
            self.visits[weight.untyped_storage().data_ptr()] += 1
            return copy

        def take_step(*args: Any, **options: Any) -> float:
            self.alive_in_updates.append(self.alive())
            return step(*args, **options)

        monkeypatch.setattr(offloading, "on", on)
        monkeypatch.setattr(optimization, "take_step", take_step)

    def alive(self) -> int:
        return sum(copy() is not None for copy in self.copies)


@pytest.mark.parametrize(
    ("job_in", "roles"),
    [
        (of_kind("policy"), ("reference", "reward")),
        *slow(
            (of_kind("policy"), ("reward",)),
            (of_kind("value"), ("reference", "reward")),  # the reference is the policy that is sampled
            (of_kind("collected"), ("reward",)),
            (dpo, ("reference",)),
        ),
    ],
    ids=["policy", "reward alone", "value", "collected", "dpo"],
)
def test_the_bytes_are_those_of_networks_that_stay(
    job_in: Job,
    roles: tuple[str, ...],
    pipeline: Any,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = job_in(pipeline, tmp_path / "plain")
    expected = run_stage(plain)
    job = offloaded(job_in(pipeline, tmp_path / "offloaded"), *roles)
    assert isinstance(job.work.resources, Resources)
    device = Device(monkeypatch)
    assert run_stage(job) == expected
    assert contents(job.output) == contents(plain.output)
    assert len({*device.visits.values()}) <= len(roles), "all weights of a network come together"
    assert min(device.visits.values()) > 1
    assert bool(device.alive_in_updates) == (plain.name != "collected")
    assert not any(device.alive_in_updates), "no frozen weight is on the device while the policy learns"
    assert device.alive() == 0

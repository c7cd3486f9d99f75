"""Stages of several nodes wait for nodes, place their ranks and report how they end; tested without a cluster."""

import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.attempts.launchers.test_torchrun import TRAIN, job_in, work_of
from tests.support.version import PROJECT_VERSION
from vantage.attempts import machine
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers import waiting
from vantage.attempts.launchers.waiting import NodesAsked, Waiting
from vantage.attempts.machine import Machine, check_ray, num_ranks
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.recipe.stages import ValuePretraining
from vantage.schemas.records.attempt import Failure, Share
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import PROGRESS


@pytest.mark.parametrize("begins", [False, True])
def test_a_start_that_never_ends_is_ended_as_a_killed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Ray waits without limit for a process on a node that is lost after it was chosen; another attempt waits for nodes."""
    from vantage.attempts.launchers import ray_train

    job = job_in(tmp_path, ranks=1).model_copy(update={"work": work_of(1, nodes=2)})
    job_file, begun = tmp_path / "job.json", tmp_path / ray_train.BEGUN
    job_file.write_text(job.model_dump_json())
    begun.touch()  # left by an earlier attempt
    codes, is_ended = [], threading.Event()

    class Hanging:
        def fit(self) -> None:
            if begins:
                begun.touch()
            is_ended.wait(1.0 if begins else 20.0)

    def end(code: int) -> None:
        codes.append(code)
        is_ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(ray_train, "_SECONDS_TO_BEGIN", 0.2)
    for name in ("_connect", "_leave"):
        monkeypatch.setattr(ray_train, name, lambda *_: None)
    monkeypatch.setattr(ray_train, "wait_for_nodes", lambda *_, **__: 2)
    monkeypatch.setattr(ray_train, "_trainer", lambda *_, **__: Hanging())
    assert ray_train.run_ranks(job_file, TRAIN, nodes=2, num_ranks=2) == ExitCode.OK
    assert codes == ([] if begins else [128 + signal.SIGKILL])
    found = tmp_path / "failure.json"
    assert begins or "no rank has begun after 0 s" in found.read_text()
    assert begins != found.exists()


def test_a_node_that_does_not_see_the_folder_or_has_other_versions_is_refused(tmp_path: Path) -> None:
    from vantage.attempts.launchers import ray_train

    with pytest.raises(ValueError, match=r"does not see .*put the workspace"):
        ray_train._check_node(tmp_path / "job.json", ray_train._versions())
    (tmp_path / "job.json").touch()
    ray_train._check_node(tmp_path / "job.json", ray_train._versions())
    with pytest.raises(ValueError, match=r"'torch': '1\.0'.*install the same versions on all nodes"):
        ray_train._check_node(tmp_path / "job.json", {**ray_train._versions(), "torch": "1.0"})
    with pytest.raises(
        ValueError,
        match=rf"'vantage': '{re.escape(PROJECT_VERSION)} \(0{{12}}\)'.*install the same versions on all nodes",
    ):
        ray_train._check_node(
            tmp_path / "job.json", {**ray_train._versions(), "vantage": f"{PROJECT_VERSION} ({'0' * 12})"}
        )


def test_without_ray_a_recipe_that_needs_it_is_refused_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"resources\.nodes=4 needs Ray .*pip install 'vantage-rlhf\[ray\]'"):
        check_ray(4)


def test_ranks_are_those_of_each_node_and_take_nothing_of_the_machine_that_drives_them() -> None:
    assert num_ranks(work_of(None, nodes=4, gpus=8), Share(cpus=1)) == 32
    assert num_ranks(work_of(3, nodes=2), Share(cpus=1, gpus=("0",))) == 6
    assert num_ranks(work_of(None, nodes=2), None) == 2
    assert num_ranks(work_of(None, nodes={"least": 1, "most": 4}, gpus=8), None) == 32
    resources = Resources.model_validate({"nodes": 4, "gpus": 8})
    assert Machine(cpus=4, gpus=("0", "1")).share_of(resources) == (1, 0)


def test_ray_places_the_ranks_of_a_node_together_and_single_ones_apart() -> None:
    from vantage.attempts.launchers import ray_train

    def placement(nodes: int, num_ranks: int, **resources: Any) -> tuple[Any, ...]:
        found = ray_train._placement(
            Resources.model_validate({"nodes": nodes, **resources}), nodes=nodes, num_ranks=num_ranks
        )
        return (
            found.num_workers,
            found.use_gpu,
            (found.resources_per_worker or {})["CPU"],
            found.placement_strategy,
        )

    assert placement(4, 32, gpus=8, cpus=64) == (32, True, 8, "PACK")
    assert placement(2, 2) == (2, False, 1, "STRICT_SPREAD")


@pytest.mark.parametrize(("ahead", "threads"), [(0, 4), (1, 2)])
def test_a_rank_that_samples_ahead_has_half_of_its_threads(ahead: int, threads: int) -> None:
    """Two nodes of eight CPUs have four ranks."""
    from vantage.attempts.launchers import ray_train

    names = {"policy": "sft", "init": "reward", "reward": "main", "prompts": "prompts"}
    resources = {"nodes": 2, "cpus": 8, "distributed": {"ranks": 4}}
    work = ValuePretraining.model_validate(
        {"kind": "value_pretraining", **names, "rollout": {"ahead": ahead}, "resources": resources}
    )
    assert ray_train._threads(work, nodes=2, num_ranks=4) == threads
    assert ray_train._threads(work, nodes=2, num_ranks=32) == 1


class Nodes:
    """A cluster of which this many nodes of two CPUs are alive, and the first ``free`` can be reserved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, alive: int, free: int) -> None:
        from vantage.attempts.launchers import ray_nodes

        self.alive, self.free = alive, free
        self.reserved: list[int] = []
        self.open = 0
        monkeypatch.setattr(ray_nodes.ray, "nodes", self.listed)
        monkeypatch.setattr(ray_nodes, "placement_group", self.reserve)
        monkeypatch.setattr(ray_nodes, "remove_placement_group", self.release)
        monkeypatch.setattr(ray_nodes, "SECONDS_BETWEEN_LOOKS", 0.0)

    def listed(self) -> list[dict[str, Any]]:
        """Return Ray's nodes: one that was lost and one that is too small, before those that fit."""
        fitting = [{"Alive": True, "Resources": {"CPU": 2.0}}] * self.alive
        return [
            {"Alive": False, "Resources": {"CPU": 2.0}},
            {"Alive": True, "Resources": {"CPU": 1.0}},
            *fitting,
        ]

    def reserve(self, bundles: list[dict[str, float]], *, strategy: str) -> SimpleNamespace:
        assert (bundles[0], strategy) == ({"CPU": 2.0}, "STRICT_SPREAD")
        self.reserved.append(len(bundles))
        self.open += 1
        return SimpleNamespace(wait=lambda seconds: len(bundles) <= self.free)

    def release(self, group: object) -> None:
        self.open -= 1

    def waited_for(self, scratch: Path, least: int, most: int, *, looks: int = 2) -> int:
        """Return how many nodes are taken; 0: none at the last of so many looks, when the stage is stopped."""
        from vantage.attempts.launchers.ray_nodes import wait_for_nodes
        from vantage.tasks.training.preemption import Preempted

        asked = NodesAsked(least, most, cpus=2, gpus=0)
        stops = iter([False] * looks)
        with suppress(Preempted):
            return wait_for_nodes(asked, Waiting(scratch, asked), is_stopped=lambda: next(stops, True))
        return 0


def test_as_many_nodes_as_can_be_reserved_are_taken_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation only shows that Ray has them: the ranks reserve their own."""
    nodes = Nodes(monkeypatch, alive=5, free=5)
    assert nodes.waited_for(tmp_path, 1, 4) == 4
    assert (nodes.reserved, nodes.open) == ([4], 0)


def test_nodes_that_are_lost_or_too_small_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(monkeypatch, alive=1, free=9)
    assert nodes.waited_for(tmp_path, 2, 2) == 0
    assert nodes.reserved == [], "one of two fits"
    progress = read_progress(tmp_path / PROGRESS)
    assert progress is not None and progress.phase_note == "1 is alive"


def test_fewer_nodes_are_taken_only_when_more_have_been_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four are alive, and others use two of them."""
    nodes = Nodes(monkeypatch, alive=4, free=2)
    assert nodes.waited_for(tmp_path, 1, 4) == 0
    monkeypatch.setattr(waiting, "SECONDS_FOR_MORE", 0.0)
    nodes.reserved = []
    assert nodes.waited_for(tmp_path, 1, 4) == 2
    assert (nodes.reserved, nodes.open) == ([4, 3, 2], 0)


def test_a_lost_rank_or_node_ends_the_attempt_as_a_killed_one(tmp_path: Path) -> None:
    """Another attempt goes on from the checkpoint; an error of the stage itself is raised."""
    from ray.exceptions import RayActorError
    from ray.train.v2.api.exceptions import WorkerGroupError

    from vantage.attempts.launchers import ray_train

    job_file = tmp_path / "job.json"
    lost = WorkerGroupError("ranks failed", {1: RayActorError(error_msg="the node died")})
    assert ray_train._exit_code(job_file, lost) == 128 + signal.SIGKILL
    failure = Failure.model_validate_json((tmp_path / "failure.json").read_bytes())
    assert (failure.cause, failure.exit_code) == ("killed", ExitCode.RESUME)
    assert failure.message == "a rank was lost: the node died"
    assert ray_train._exit_code(job_file, lost) == ExitCode.RESUME, "what was reported counts"
    (tmp_path / "failure.json").unlink()
    with pytest.raises(ValueError, match="row 7"):
        ray_train._exit_code(job_file, WorkerGroupError("ranks failed", {0: ValueError("row 7")}))

"""Stages of several nodes run on a real Ray cluster of this machine with gloo ranks; ``ranked_stages`` has what they compute.

The last test is a whole run whose stage loses one of its two nodes: what people see meanwhile, and what is recorded of it.
All are in one file, since they share the cluster.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.attempts.launchers.test_torchrun import (
    ROOT,
    TRAIN,
    is_misbehaving,
    job_in,
    misbehaves,
    weights,
    work_of,
)
from tests.support.fork_server import WITH_BOTH, WITH_TORCH
from tests.support.ranked_stages import MISBEHAVES_AFTER, STEPS
from tests.support.real_runs import FORKED_VANTAGE, wait_for
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers import local_process
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.local_process import LocalProcess
from vantage.attempts.launchers.waiting import what_it_waits_for
from vantage.attempts.segments import ranks_of, read_segments
from vantage.cli.main import app
from vantage.schemas.records.attempt import Failure
from vantage.schemas.records.job import StageResult
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import PROGRESS, read_committed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
"""Ray's own waits are up to two minutes of a launch, and each of its many processes imports Ray and torch."""


class RayCluster:
    """``tests.support.ray_cluster`` as a child process."""

    def __init__(self) -> None:
        WITH_TORCH.listen()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()

    def say(self, command: str) -> int:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return int(self._answer())

    def have(self, nodes: int) -> None:
        """Add or lose nodes until there are so many.

        A node takes seconds of computation. So a test leaves its nodes to the next one, which asks for as many as it needs.
        """
        while self.say("count") < nodes:
            self.say("add")
        while self.say("count") > nodes:
            self.say("lose")

    def end(self) -> None:
        self.process.communicate("end\n", timeout=60)

    def _answer(self) -> Any:
        """Return the next line that is an answer: Ray prints others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise AssertionError("the cluster's process has ended")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Yield a cluster to which nodes of one CPU can be added."""
    found = RayCluster()
    try:
        yield found
    finally:
        found.end()


@pytest.fixture
def at_cluster(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """Return the cluster, with two nodes."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    cluster.have(2)
    return cluster


def launch(folder: Path, *, nodes: Any = 2, **options: Any) -> StageResult:
    job = job_in(folder, ranks=1, attempt=options.pop("attempt", 1))
    job = job.model_copy(update={"work": work_of(1, nodes=nodes)})
    launcher = LocalProcess(grace=options.pop("grace", 20.0))
    return launcher.launch(job, log=folder / "log.txt", function=TRAIN, **options)


def failure(folder: Path, **options: Any) -> tuple[str, int, str]:
    with pytest.raises(StageFailed) as caught:
        launch(folder, **options)
    found = caught.value.failure
    return found.cause, found.exit_code, found.message


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> StageResult:
    """Return the result of the stage in one process."""
    return launch(tmp_path_factory.mktemp("alone"), nodes=None)


@pytest.fixture(scope="module")
def asked_to_stop(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Failure]:
    """Return the folder of a stage on two nodes that was asked to stop after its first checkpoint, and its failure."""
    folder = tmp_path_factory.mktemp("stopped")
    cluster.have(2)
    misbehaves(folder, "waits to be stopped")
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as environment, pytest.raises(StageFailed) as caught:
        environment.setenv("RAY_ADDRESS", cluster.address)
        launch(
            folder,
            nodes={"least": 1, "most": 2},
            stop=stop,
            on_poll=lambda: stop.set() if is_misbehaving(folder) else None,
        )
    return folder, caught.value.failure


@pytest.fixture
def half_done(
    asked_to_stop: tuple[Path, Failure], cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a copy of a workspace whose stage is half done; one of the two nodes is lost now."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    cluster.have(1)
    return shutil.copytree(asked_to_stop[0], tmp_path / "half done")


def test_asked_to_stop_it_saves(asked_to_stop: tuple[Path, Failure]) -> None:
    folder, failed = asked_to_stop
    assert (failed.cause, failed.exit_code) == ("preempted", ExitCode.RESUME)
    saved, _ = read_committed(folder / "scratch")
    assert saved == MISBEHAVES_AFTER + 1
    assert f"after step {saved} of {STEPS}" in failed.message


def test_the_error_of_one_rank_is_that_of_the_stage(at_cluster: RayCluster, tmp_path: Path) -> None:
    misbehaves(tmp_path, "refuses")
    cause, code, message = failure(tmp_path)
    assert (cause, code) == ("refused", ExitCode.BAD_INPUT)
    assert message == "data.demonstrations: row 7 has no prompt; remove it"


@pytest.mark.parametrize("named", [True, False])
def test_what_a_cluster_starts_for_a_stage_asks_no_other_cluster(
    at_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Ray Train's cleaner asked the newer of two clusters on a machine, did not find the stage, and removed its ranks."""
    import ray

    from vantage.attempts.launchers import ray_train

    if not named:
        connect = ray.init
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        monkeypatch.setattr(
            ray,
            "init",
            lambda *, address, **options: connect(
                address=at_cluster.address if address == "auto" else address, **options
            ),
        )
    ray_train._connect(2)
    try:
        address = ray.remote(num_cpus=0)(lambda: os.environ["RAY_ADDRESS"])
        assert ray.get(address.remote()) == at_cluster.address
    finally:
        ray.shutdown()


def test_without_a_cluster_the_stage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    cause, code, message = failure(tmp_path)
    assert (cause, code) == ("refused", ExitCode.BAD_INPUT)
    assert "resources.nodes=2: this machine reaches no Ray cluster (RAY_ADDRESS=127.0.0.1:9)" in message
    assert "ray start --head" in message


def test_where_all_ranks_of_a_hanging_stage_stand_and_a_lost_node_is_a_killed_rank(
    alone: StageResult, at_cluster: RayCluster, tmp_path: Path
) -> None:
    """The driver writes the stacks on the signal that the watchdog sends before it kills; later one process goes on."""
    misbehaves(tmp_path, "hangs")
    log, nodes, asked_at = tmp_path / "log.txt", 2, 0.0

    def lose_a_node_when_both_are_seen() -> None:
        nonlocal nodes, asked_at
        if nodes == 1 or not is_misbehaving(tmp_path) or read_committed(tmp_path / "scratch")[0] != 5:
            return
        # the rank that hangs, and the one that waits for it
        if all(function in log.read_text() for function in ("in misbehave", "in add_gradients")):
            nodes = at_cluster.say("lose")
        elif time.monotonic() - asked_at > 5.0:
            asked_at = time.monotonic()
            [driver] = local_process._stages
            os.kill(driver, signal.SIGUSR1)

    cause, code, message = failure(tmp_path, on_poll=lose_a_node_when_both_are_seen)
    assert (cause, code) == ("killed", ExitCode.RESUME)
    assert re.match(r"a rank was lost: .*node", message), message
    result = launch(tmp_path, nodes=None, attempt=2)
    assert (result.metrics["ranks"], result.metrics["began"]) == (1, 5)
    assert weights(result) == pytest.approx(weights(alone), abs=1e-5)


def waits_for(folder: Path) -> str:
    return what_it_waits_for(read_progress(folder / "scratch" / PROGRESS)) or ""


def test_a_stage_that_waits_for_nodes_can_be_stopped(half_done: Path) -> None:
    stop = threading.Event()
    cause, code, message = failure(
        half_done, attempt=2, stop=stop, on_poll=lambda: stop.set() if waits_for(half_done) else None
    )
    assert (cause, code) == ("preempted", ExitCode.RESUME)
    assert message == "stopped on request while it waited for 2 Ray nodes with 1 CPU each"


def test_a_stage_that_waits_for_a_node_shows_it_and_goes_on_when_it_is_there(
    alone: StageResult, cluster: RayCluster, half_done: Path
) -> None:
    saved, _ = read_committed(half_done / "scratch")
    seen: list[str] = []

    def add_a_node_when_it_waits() -> None:
        said = waits_for(half_done)
        if said.endswith("1 is alive") and not seen:
            seen.append(said)
            progress = read_progress(half_done / "scratch" / PROGRESS)
            assert progress is not None
            assert progress.step == saved, "not what the earlier attempt showed"
            cluster.say("add")

    result = launch(half_done, attempt=2, on_poll=add_a_node_when_it_waits)
    assert re.fullmatch(r"waiting for 2 Ray nodes with 1 CPU each since \d\d:\d\d:\d\d, 1 is alive", seen[0])
    assert result.metrics["ranks"] == 2
    assert result.metrics["began"] == saved
    assert weights(result) == pytest.approx(weights(alone), abs=1e-5)
    assert [each.ranks for each in read_segments(half_done / "scratch")] == [2, 2]


def test_a_stage_that_may_goes_on_with_fewer_nodes_and_records_how_many_ranks_did_what(
    alone: StageResult, at_cluster: RayCluster, asked_to_stop: tuple[Path, Failure], tmp_path: Path
) -> None:
    """The second node is lost while the ranks start, after Ray has reserved it: the start fails, and the stage waits again. This costs
    no attempt. One rank computes what one process does that goes on from the same checkpoint, bit by bit."""
    folder, by_one_process = tmp_path / "goes on", tmp_path / "one process"
    for each in (folder, by_one_process):
        shutil.copytree(asked_to_stop[0], each)
    saved, _ = read_committed(folder / "scratch")
    nodes, seen = 2, set()

    def lose_a_node_that_was_found() -> None:
        nonlocal nodes
        progress = read_progress(folder / "scratch" / PROGRESS)
        if nodes == 2 and progress is not None and progress.phase.startswith("starting 2 ranks"):
            nodes = at_cluster.say("lose")
        if nodes == 1:
            seen.add(waits_for(folder).partition(" since ")[0])

    result = launch(folder, nodes={"least": 1, "most": 2}, attempt=2, on_poll=lose_a_node_that_was_found)
    assert nodes == 1
    assert "waiting for 1 to 2 Ray nodes with 1 CPU each" in seen
    assert "the ranks did not start, and are started again" in (folder / "log.txt").read_text()
    assert result.metrics["ranks"] == 1
    assert result.metrics["began"] == saved
    assert weights(result) == pytest.approx(weights(alone), abs=1e-5)
    assert weights(result) == weights(launch(by_one_process, nodes=None, attempt=2)), (
        "one rank is one process"
    )
    segments = read_segments(folder / "scratch")
    assert [(each.attempt, each.from_step, each.ranks) for each in segments] == [(1, 0, 2), (2, saved, 1)]
    assert ranks_of(segments)["ranks"] == f"2 until step {saved}, then 1"


RECIPE = """\
recipe: spread
seed: 17
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
stages:
  sft:
    kind: sft
    data: demonstrations
    epochs: 0.05
    batch_size: 32
    checkpoint_every: 5
    resources: {nodes: {least: 1, most: 2}, cpus: 1}
"""


def test_a_run_shows_what_it_waits_for_and_goes_on_with_the_node_that_is_left(
    at_cluster: RayCluster, tmp_path: Path
) -> None:
    recipe, workspace = tmp_path / "spread.yaml", tmp_path / "workspace"
    recipe.write_text(RECIPE)
    clients = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in clients}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": at_cluster.address}
    place = ("--workspace", str(workspace))

    def printed(*command: str) -> str:
        shown = CliRunner().invoke(app, [*command, *place])
        assert shown.exit_code == 0, shown.output
        return shown.output

    def stage() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(printed("status", "latest", "--json"))["stages"]["sft"]
        return found

    def committed() -> list[Path]:
        return list(workspace.glob("store/scratch/*/committed.json"))

    run = WITH_BOTH.popen(
        [*FORKED_VANTAGE, "run", str(recipe), *place],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(committed, seconds=300)
        folder = committed()[0].parent
        assert [each.ranks for each in read_segments(folder)] == [2]
        assert at_cluster.say("lose") == 1
        wait_for(lambda: what_it_waits_for(read_progress(folder / PROGRESS)), seconds=200)
        progress = stage()["progress"]
        assert progress["phase"].startswith("waiting for 1 to 2 Ray nodes with 1 CPU each since ")
        assert progress["phase_note"].startswith(
            ("1 is alive, enough from ", "2 are alive")
        )  # the loss of the node is not noticed yet
        plan = printed("plan", str(recipe))
        assert "being computed by run" in plan
        assert "waiting for 1 to 2 Ray nodes" in " ".join(plan.split())
        shown = printed("status", "latest")
        assert "waiting for 1 to 2 Ray nodes" in " ".join(shown.split())
    finally:
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    done = stage()
    assert done["status"] == "completed"
    ranks = done["provenance"]["ranks"]
    assert ranks.startswith("2 until step ")
    assert ranks.endswith(", then 1")
    assert done["provenance"]["world_size"] == "1"
    assert done["provenance"]["not_bitwise"] == "begun on 2 processes, continued on 1"
    assert done["attempt"] == 2
    assert ranks in printed("status", "latest")
    printed("audit", "latest")

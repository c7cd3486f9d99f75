"""Servers that a stage starts for itself sample, are started again, and end with the stage. Each is a small program that takes vLLM's arguments."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.support.fake_vllm_server import PROGRAM
from tests.support.fork_server import WITH_TORCH
from tests.support.processes import read_living
from tests.tasks.rollout.test_remote_engine import assert_alike, by_hand
from tests.tasks.rollout.test_vllm_engine import moved
from tests.tasks.rollout.test_vllm_engine import parts as parts_of
from vantage.attempts.machine import num_ranks
from vantage.ledger.journal import read
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.records.attempt import Share
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout import own_servers
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.remote_engine import RemoteEngine
from vantage.tasks.rollout.vllm_server import EngineUnavailable, ServerRefused
from vantage.tasks.stages import run_stage
from vantage.tasks.training import ranks
from vantage.tasks.training.scratch import JOURNAL

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start the small program in place of vLLM, which is not installed here."""
    monkeypatch.setattr(own_servers, "PROGRAM", PROGRAM)
    monkeypatch.setattr(own_servers, "find_spec", lambda name: "there")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RANK", "0")
    yield
    own_servers.close_own_servers()


@pytest.fixture(scope="module")
def prepared() -> None:
    """Have what forks the programs ready."""
    WITH_TORCH.listen()


def engine_of(
    policy: PolicyModel, codec: Codec, servers: int, *, settings: type[Sampling] = Sampling, **fields: Any
) -> RemoteEngine:
    rollout = settings(engine="vllm", servers=servers, **fields)
    engine = load_engine(policy, codec, limits=PassLimits(), rollout=rollout)
    assert isinstance(engine, RemoteEngine)
    return engine


def programs() -> list[psutil.Process]:
    """Return the servers that this process has started and that run, with the two processes that guard each of them."""
    lines = read_living(psutil.Process().children(recursive=True), psutil.Process.cmdline)
    return [each for each, line in lines.items() if "fake_vllm_server" in " ".join(line)]


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_a_server_of_the_stage_samples_and_ends_with_it(pipeline: Any, tmp_path: Path) -> None:
    policy, codec, prompts = parts_of(pipeline)
    engine = engine_of(policy, codec, 1)
    for seed in (1, 2):
        found = engine.generate(prompts, count=2, seed=seed)
        assert_alike(found, by_hand(policy, codec, prompts, count=2, seed=seed))
        moved(policy, 0.05)
        engine.take_weights(policy.causal_lm.named_parameters())
    assert len(programs()) == 3, "the server and what guards it, started once"
    own_servers.close_own_servers()
    assert programs() == []


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("faults", [{"stops_at": 3}, {"hanging": [2]}])
def test_a_server_that_dies_or_hangs_is_started_again(
    faults: dict[str, Any], pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    monkeypatch.setenv("FAKE_VLLM_FAULTS", str(tmp_path / "faults.json"))
    policy, codec, prompts = parts_of(pipeline)
    engine = engine_of(policy, codec, 1, request_seconds=20.0 if "stops_at" in faults else 3.0)
    found = engine.generate(prompts, count=2, seed=1)
    assert_alike(found, by_hand(policy, codec, prompts, count=2, seed=1))
    assert len(programs()) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_a_server_that_is_killed_between_rollouts_is_started_again_until_it_was_too_often(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_servers, "MAX_RESTARTS", 1)
    policy, codec, prompts = parts_of(pipeline)
    engine = engine_of(policy, codec, 1)
    expected = engine.generate(prompts, count=1, seed=1)
    for is_last in (False, True):
        for each in programs():
            each.kill()
        if not is_last:
            assert engine.generate(prompts, count=1, seed=1) == expected
    with pytest.raises(EngineUnavailable, match=r"server 0 of rollout.servers ended 2 times"):
        engine.generate(prompts, count=1, seed=1)


def test_a_server_that_cannot_start_is_refused_with_the_end_of_its_log(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = "import sys; sys.exit('no kernel for this model')"
    monkeypatch.setattr(own_servers, "PROGRAM", ("-c", failing))
    policy, codec, prompts = parts_of(pipeline)
    with pytest.raises(
        ServerRefused, match=r"server 0 did not start; its log ends with: .*no kernel for this model"
    ):
        engine_of(policy, codec, 1).generate(prompts, count=1, seed=1)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_a_whole_stage_samples_with_two_servers_of_its_own(pipeline: Any, tmp_path: Path) -> None:
    job = pipeline.job("policy", folder=tmp_path)
    rollout = job.work.rollout.model_copy(update={"engine": "vllm", "servers": 2})
    run_stage(job.model_copy(update={"work": job.work.model_copy(update={"rollout": rollout})}))
    digests = [entry.metrics["sampled_weights"] for entry in read(job.scratch / JOURNAL)]
    assert len(set(digests)) == len(digests) == job.work.iterations
    assert len(programs()) == 6


WANTING = """
import os, subprocess, sys, time
guarded, guard = os.pipe()
guarding = [sys.executable, "-m", "vantage.tasks.rollout.guarded_process", str(guarded)]
program = [sys.executable, "-c", "import time; time.sleep(600)", "guarded"]
started = subprocess.Popen([*guarding, *program], pass_fds=(guarded,), process_group=0)
os.close(guarded)
print(started.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["the stage", "what guards the server"])
def test_what_a_killed_stage_has_started_ends(killed: str) -> None:
    """Ray kills the children of a worker that ends, and no other processes, so a server's guard may end before it."""
    wanting = subprocess.Popen([sys.executable, "-c", WANTING], stdout=subprocess.PIPE, text=True)
    assert wanting.stdout is not None
    guarding = psutil.Process(int(wanting.stdout.readline()))
    deadline = time.monotonic() + 30
    while len(guarding.children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    started = [guarding, *guarding.children()]
    assert len(started) == 3
    os.kill(wanting.pid if killed == "the stage" else guarding.pid, signal.SIGKILL)
    if killed == "the stage":
        wanting.wait()
    _, alive = psutil.wait_procs(started[1:], timeout=30)
    wanting.kill()
    wanting.wait()
    assert read_living(alive, psutil.Process.cmdline) == {}


def test_the_gpus_of_servers_have_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks_of(gpus: int | None, servers: int | None, on: tuple[str, ...], *, parts: int = 1) -> int:
        work = RolloutCollection(
            kind="rollout_collection",
            policy="sft",
            prompts="prompts",
            reward="main",
            resources=Resources(gpus=gpus),
            rollout=Sampling(engine="vllm", servers=servers, tensor_parallel=parts)
            if servers
            else Sampling(),
        )
        return num_ranks(work, Share(cpus=1, gpus=on))

    eight = tuple(map(str, range(8)))
    assert ranks_of(8, 2, eight) == 6 and ranks_of(8, None, eight) == 8
    assert ranks_of(8, 2, eight, parts=3) == 2 and ranks_of(8, 1, eight, parts=4) == 4
    assert ranks_of(None, 1, ()) == 1, "on CPUs the servers run beside one process"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert own_servers._gpus_beside(2, each=1) == [["5"], ["6"]]
    assert own_servers._gpus_beside(1, each=2) == [["5", "6"]]
    with pytest.raises(
        ValueError,
        match="rollout.servers=3 needs as many GPUs beside those of 1 rank.*set resources.gpus to 4",
    ):
        own_servers._gpus_beside(3, each=1)
    with pytest.raises(
        ValueError,
        match=r"servers=2 needs 4 \(rollout.tensor_parallel=2 for each\) GPUs beside.*set resources.gpus to 5",
    ):
        own_servers._gpus_beside(2, each=2)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_server_in_parts_has_as_many_gpus(
    parts: int, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers have the last GPUs, and no other argument of vLLM changes; with Ray, each place has the GPUs and CPUs of all parts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    of_model, _, _ = parts_of(pipeline)
    policy: Any = SimpleNamespace(device=torch.device("cuda"), causal_lm=of_model.causal_lm)
    settings = own_servers.Settings("float32", 8, None, 1.0, tensor_parallel=parts)
    servers = own_servers.OwnServers(policy, tmp_path, count=2, key="k", settings=settings)
    found = [each._process._program for each in servers._servers]  # type: ignore[attr-defined]
    last = ["2,3", "4,5"] if parts == 2 else ["4", "5"]
    assert [each.fixed["CUDA_VISIBLE_DEVICES"] for each in found] == last
    plain = own_servers._arguments(tmp_path, replace(settings, tensor_parallel=1), is_on_gpu=True)
    added = ["--tensor-parallel-size", "2"] if parts == 2 else []
    for each in found:
        assert sorted(each.command) == sorted([*own_servers.PROGRAM, *plain, *added])
    asked: list[tuple[int, int, int]] = []
    places = SimpleNamespace(
        Places=lambda count, *, cpus, gpus: (
            asked.append((count, cpus, gpus)) or SimpleNamespace(process=lambda *_: None)
        )
    )
    monkeypatch.setitem(sys.modules, "vantage.tasks.rollout.servers_on_nodes", places)
    monkeypatch.setattr(own_servers, "_by_ray", own_servers._ByRay(cpus=3, nodes=2))
    for device in ("cuda", "cpu"):
        policy.device = torch.device(device)
        own_servers.OwnServers(policy, tmp_path, count=2, key="k", settings=settings)
    assert asked == [(4, 3 * parts, parts), (4, 3 * parts, 0)]


def test_parts_that_do_not_divide_the_attention_heads_are_refused(pipeline: Any, tmp_path: Path) -> None:
    policy, _, _ = parts_of(pipeline)
    heads = policy.causal_lm.config.num_attention_heads
    settings = own_servers.Settings("float32", 8, None, 1.0, tensor_parallel=heads + 1)
    message = f"tensor_parallel={heads + 1} must divide the {heads} attention heads of the model; set it to one of 1, .*{heads}$"
    with pytest.raises(ValueError, match=message):
        own_servers.OwnServers(policy, tmp_path, count=1, key="k", settings=settings)


def test_a_model_without_attention_is_left_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_servers, "find_spec", lambda name: "there")
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    policy: Any = SimpleNamespace(causal_lm=SimpleNamespace(config=config))
    for parts in (1, 2):
        settings = own_servers.Settings("float32", 8, None, 1.0, tensor_parallel=parts)
        own_servers.OwnServers(policy, tmp_path, count=2, key="k", settings=settings)


@pytest.mark.parametrize(
    ("gpu", "capability", "chosen", "expected"),
    [
        ("3", (9, 0), None, "1"),
        ("3", (8, 0), None, "1"),
        ("3", (7, 5), None, None),
        ("3", (9, 0), "0", "0"),
        pytest.param(None, None, None, None, id="on CPUs"),
    ],
)
def test_a_server_on_a_gpu_samples_each_response_as_if_it_were_alone(
    gpu: str | None,
    capability: tuple[int, int] | None,
    chosen: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server uses vLLM's batch-invariant mode where the GPU supports it, unless the environment sets another value."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    settings = own_servers.Settings(precision="float32", max_tokens=8, max_rows=None, seconds=1.0)
    policy: Any = SimpleNamespace(device=torch.device("cpu" if gpu is None else "cuda"))
    program = own_servers._program(policy, tmp_path, 0, key="k", settings=settings)
    placed = program if gpu is None else own_servers._on_gpus(program, [gpu])
    found = placed.environment({} if chosen is None else {"VLLM_BATCH_INVARIANT": chosen})
    assert found.get("VLLM_BATCH_INVARIANT") == expected
    assert found.get("CUDA_VISIBLE_DEVICES") == gpu
    assert found["TRITON_F32_DEFAULT"] == "ieee"

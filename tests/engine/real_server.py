"""Test a real server of vLLM on a CPU: ``make test-engine``, as ``real_vllm.py``."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engine.real_vllm import PROMPTS, model, moved, moved_adapters, worst_gap
from tests.support.ports import own_port
from tests.tasks.conftest import Pipeline
from tests.tasks.distillation_jobs import VERIFIER, job_in
from vantage.ledger.journal import read
from vantage.models.adapters import Adaptation, add_adapters
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.own_servers import close_own_servers
from vantage.tasks.rollout.remote_engine import RemoteEngine
from vantage.tasks.rollout.server_process import LocalProcess
from vantage.tasks.rollout.vllm_server import DESCRIBE, ServerRefused, VllmServer
from vantage.tasks.rollout.vllm_worker import VantageWorker
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates.teacher_server import ServedTeacher

START_SECONDS = 240.0
KEY = "a-key-of-this-test"


@contextmanager
def serving(folder: Path, *, precision: str = "float32", more: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a server for the model in ``folder`` inside the block, and yield its address."""
    port = own_port()
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": KEY,
    }
    program = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]  # `vllm serve` of vllm-cpu does not find itself
    settings = {
        "--model": str(folder),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": precision,
        "--max-model-len": "128",
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": f"{VantageWorker.__module__}.{VantageWorker.__qualname__}",
    }
    command = [
        *program,
        "--enable-scale-out",
        "--enforce-eager",
        *(part for pair in settings.items() for part in pair),
        *more,
    ]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        url, began = f"http://127.0.0.1:{port}", time.monotonic()
        while not _is_healthy(url):
            assert process.poll() is None, (folder / "server.log").read_text()[-4000:]
            assert time.monotonic() - began < START_SECONDS
            time.sleep(0.5)
        print(f"the server started in {time.monotonic() - began:.0f} s")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)


def engine_at(
    folder: Path, url: str, scratch: Path, *, lora: Lora | None = None, **generation: Any
) -> tuple[PolicyModel, Codec, RemoteEngine]:
    """Return a policy, its codec, and the server for it."""
    settings = Generation(max_prompt_tokens=32, max_response_tokens=24, **generation)
    policy, codec = PolicyModel(load_policy(folder)), Codec(load_tokenizer(folder), settings, None, scratch)
    if lora is not None:
        add_adapters(policy.causal_lm, Adaptation(lora, seed=5))
    rollout = Sampling(engine="vllm", url=(url,), api_key_variable="ENGINE_KEY")
    engine = load_engine(policy, codec, limits=PassLimits(), rollout=rollout)
    assert isinstance(engine, RemoteEngine)
    return policy, codec, engine


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tied", "qwen"])
def test_every_update_reaches_a_real_server(name: str, tmp_path: Path) -> None:
    """The policy is updated three times, the last time by little. The same seeds are sampled again, also greedily, and
    one response ends at a stop string.
    """
    folder = model(tmp_path / "model", name)
    with serving(folder) as url:
        policy, codec, engine = engine_at(folder, url, tmp_path, temperature=0.7)
        prompts = [prompt for prompt in PROMPTS for _ in range(8)]
        for update in (0.05, 0.02, 1e-4):
            found = engine.generate(PROMPTS, count=8, seed=3)
            assert len(found.responses) == 24 and len({*map(tuple, found.responses)}) == 24
            assert worst_gap(policy, 0.7, prompts, found) < 1e-4
            for ids, ended in zip(found.responses, found.ended, strict=True):
                assert ended == (ids[-1] in codec.stop_token_ids)
                assert ended or len(ids) == 24
            assert engine.generate(PROMPTS, count=8, seed=3).responses == found.responses
            moved(policy, update)
            began = time.monotonic()
            engine.take_weights(policy.causal_lm.named_parameters())
            print(f"update in {time.monotonic() - began:.2f} s, gap {engine._gap:.2g}")
            assert engine._gap < 2e-5
            known = engine._checksums._known[f" at {url}"]
            assert "model.embed_tokens.weight" in known
            [server], some = engine._servers, sorted(known)[::2]
            held = server.checksums()
            assert held is not None and server.checksums(some) == {name: held[name] for name in some}

        loop = load_engine(policy, codec, limits=PassLimits())
        ours, theirs = (each.generate(PROMPTS, count=1, seed=1, greedy=True) for each in (loop, engine))
        assert theirs.responses == ours.responses and theirs.ended == ours.ended
        text = codec.whole_texts(ours.responses)[0][5]
        stopped = Codec(
            codec.tokenizer, codec.generation.model_copy(update={"stop": (text,)}), None, tmp_path
        )
        loop = load_engine(policy, stopped, limits=PassLimits())
        rollout = Sampling(engine="vllm", url=(url,), api_key_variable="ENGINE_KEY")
        other_engine = load_engine(policy, stopped, limits=PassLimits(), rollout=rollout)
        ours, theirs = (each.generate(PROMPTS, count=1, seed=1, greedy=True) for each in (loop, other_engine))
        assert theirs.responses == ours.responses and theirs.ended == ours.ended
        assert all(len(ids) <= 24 for ids in ours.responses) and min(map(len, ours.responses)) < 24

        other = PolicyModel(load_policy(model(tmp_path / "other", name, seed=2)))
        server = VllmServer(url, key=KEY, seconds=60)
        version = server.version()
        server.take_weights(tmp_path / "other", version=version)
        with pytest.raises(WeightsDiffer, match="nothing was sampled"):
            other_engine.generate(PROMPTS, count=1, seed=1)  # the server has this package's version
        assert torch.isfinite(server.logprobs([[1, 20, 21, 22]])).all() and other is not policy


@pytest.mark.timeout(900)
def test_every_update_of_adapters_reaches_a_real_server(tmp_path: Path) -> None:
    """The base is given once; each adapter has a name of its own, the old one is removed, and the server's base answers otherwise."""
    folder, lora = model(tmp_path / "model", "tied"), Lora(rank=4, alpha=8.0, targets=("q_proj", "up_proj"))
    room = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "up_proj", "k_proj")
    with serving(folder, more=room) as url:
        policy, _, engine = engine_at(folder, url, tmp_path, lora=lora, temperature=0.7)
        prompts = [prompt for prompt in PROMPTS for _ in range(4)]
        server, names = VllmServer(url, key=KEY, seconds=60), []
        for update in (0.1, 0.05, 1e-4):
            found = engine.generate(PROMPTS, count=4, seed=3)
            assert worst_gap(policy, 0.7, prompts, found) < 1e-4
            names.append([each["id"] for each in server._call("GET", "/v1/models")["data"]][1:])
            moved_adapters(policy, update)
            began = time.monotonic()
            engine.take_weights(policy.causal_lm.named_parameters())
            print(f"adapter and proof in {time.monotonic() - began:.2f} s, gap {engine._gap:.2g}")
            assert engine._gap < 2e-5
        assert [len(each) for each in names] == [1, 1, 1] and len({each for (each,) in names}) == 3
        of_base = engine_at(folder, url, tmp_path)[2]._sampled.logprobs()
        held = server.logprobs(engine._sampled.fixed_rows)
        assert (held - of_base).abs().mean() < 2e-5, (
            "without the adapter's name the base answers, as it was given"
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("with_adapters", "parts"),
    [(False, 1), (True, 1), pytest.param(False, 2, id="in two parts")],
)
def test_a_stage_starts_a_real_server_of_its_own(with_adapters: bool, parts: int, tmp_path: Path) -> None:
    """The server has no tokenizer, and its weights come from the policy alone. When it is killed, it is started again."""
    folder = model(tmp_path / "model", "tied")
    settings = Generation(max_prompt_tokens=32, max_response_tokens=24)
    policy, codec = PolicyModel(load_policy(folder)), Codec(load_tokenizer(folder), settings, None, tmp_path)
    if with_adapters:
        add_adapters(policy.causal_lm, Adaptation(Lora(rank=4, alpha=8.0), seed=5))
    rollout = Sampling(engine="vllm", servers=1, tensor_parallel=parts)
    engine = load_engine(policy, codec, limits=PassLimits(), rollout=rollout)
    assert isinstance(engine, RemoteEngine) and engine._own is not None
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    try:
        found = engine.generate(PROMPTS, count=4, seed=3)
        assert worst_gap(policy, 1.0, prompts, found) < 1e-4
        (moved_adapters if with_adapters else moved)(policy, 0.02)
        engine.take_weights(policy.causal_lm.named_parameters())
        [server] = engine._own._servers
        assert server.client is not None and len(server.client._rpc(DESCRIBE)) == parts, "each worker answers"
        assert isinstance(server._process, LocalProcess) and server._process._process is not None
        os.killpg(server._process._process.pid, signal.SIGKILL)
        server._process._process.wait()
        found = engine.generate(PROMPTS, count=4, seed=3)
        assert worst_gap(policy, 1.0, prompts, found) < 1e-4
    finally:
        close_own_servers()


@pytest.mark.timeout(900)
def test_a_whole_stage_samples_with_a_real_server(tmp_path: Path) -> None:
    """The trainer compares its log-probabilities with the server's in each iteration; another model is refused."""
    pipeline = Pipeline(tmp_path / "pipeline", width=128)
    job = pipeline.job("policy")
    with serving(pipeline.folder("model")) as url:
        before: Any = job.work
        rollout = before.rollout.model_copy(
            update={"engine": "vllm", "url": (url,), "api_key_variable": "ENGINE_KEY"}
        )
        work = before.model_copy(update={"rollout": rollout})
        assert run_stage(job.model_copy(update={"work": work})).metrics
        curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
        assert len({each["sampled_weights"] for each in curves}) == len(curves) == work.iterations
        assert max(each["sampler_gap"] for each in curves) < 1e-4
        assert not any(each["stale_responses"] or each["engine_failures"] for each in curves)
        print("worst gap", max(each["engine_gap"] for each in curves))
        folder = model(tmp_path / "another", "tied")
        _, _, engine = engine_at(folder, url, tmp_path)
        with pytest.raises(ServerRefused, match=r"another model than the policy: .*hidden_size|vocab_size"):
            engine.generate(PROMPTS, count=1, seed=1)


@pytest.mark.timeout(900)
def test_a_real_server_teaches_as_the_teacher_in_process(tmp_path: Path) -> None:
    """Two whole distillations have the same KL of each rollout and at the end; a student with another tokenizer is
    refused.
    """
    pipeline = Pipeline(tmp_path / "pipeline", width=128)
    changes: dict[str, Any] = {"kl": "sampled", "reward": VERIFIER}
    held = job_in(pipeline, tmp_path / "held", **changes)
    expected, of_held = run_stage(held), _losses(held)
    raw = ("--served-model-name", "large", "--logprobs-mode", "raw_logprobs")  # the last mode counts
    with serving(pipeline.folder("sft"), more=raw) as url:
        teacher = TeacherServer(url=url, model="large", api_key_variable="ENGINE_KEY")
        plain = job_in(pipeline, tmp_path / "asked", **changes)
        work: Any = plain.work.model_copy(update={"teacher": None, "teacher_server": teacher})
        inputs = {role: folder for role, folder in plain.inputs.items() if role != "teacher"}
        asked: Any = plain.model_copy(update={"work": work, "inputs": inputs})
        found = run_stage(asked)
        assert of_held[0] > 0.1 and _losses(asked) == pytest.approx(of_held, abs=1e-5)
        assert found.metrics["kl_to_teacher"] == pytest.approx(expected.metrics["kl_to_teacher"], abs=1e-5)
        tokenizer = load_tokenizer(pipeline.folder("sft"))
        tokenizer.add_tokens(["What"])
        with pytest.raises(TokenizersDiffer, match=r"large has another tokenizer .* 'What is 17"):
            ServedTeacher(asked).prove(tokenizer)


def _losses(job: Any) -> list[float]:
    """Return ``reverse_kl`` of each rollout."""
    return [entry.metrics["reverse_kl"] for entry in read(job.scratch / JOURNAL)]

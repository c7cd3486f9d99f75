"""Servers get the base of policies with adapters once, then adapters alone, each under a name of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm_server import PROGRAM, FakeServer, serving
from tests.support.fork_server import WITH_TORCH
from tests.tasks.alike import ADAM_EPS, assert_alike_weights, run_to_compare
from tests.tasks.rollout.test_remote_engine import assert_alike, by_hand, engine_of
from tests.tasks.rollout.test_remote_stages import served
from tests.tasks.rollout.test_vllm_adapters import RANK, adapted_parts, adapter_bytes, moved_adapters
from tests.tasks.test_stages_on_ranks import moved, start
from vantage.ledger.journal import read
from vantage.models.folders import load_policy
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.rollout import own_servers, remote_engine
from vantage.tasks.rollout.ahead import AheadEngine
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.vllm_server import ServerRefused
from vantage.tasks.stages import run_stage
from vantage.tasks.training.engine_record import engine_metrics
from vantage.tasks.training.scratch import JOURNAL

ROOT = Path(__file__).parents[3]
TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(remote_engine, "PATIENCE_SECONDS", 0.5)


@pytest.fixture
def servers(pipeline: Any) -> Iterator[list[FakeServer]]:
    """Yield two servers of one model that take adapters."""
    with serving(pipeline.folder("model"), replicas=2, lora=(8, TARGETS)) as started:
        yield started


@pytest.mark.slow
def test_the_base_is_sent_once_and_each_update_sends_the_adapter_alone(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = adapted_parts(pipeline, temperature=0.7)
    engine = engine_of(policy, codec, servers)
    for update in range(3):
        found = engine.generate(prompts, count=2, seed=1)
        assert_alike(found, by_hand(policy, codec, prompts, count=2, seed=1))
        moved_adapters(policy, 0.2, seed=update)
        engine.take_weights(policy.causal_lm.named_parameters())
    base, size = load_policy(pipeline.folder("model")), adapter_bytes(policy)
    for server in servers:
        whole, *updates = server.seen.sent
        assert whole == sum(weight.nbytes for weight in base.parameters())
        assert len(updates) == 4 and all(size < each < size + 8192 for each in updates)
        given = [version for version in server.seen.versions if version != "updating"]
        assert server.seen.adapters == [f"vantage-{version}" for version in given]
        assert len(set(given)) == 4 and list(server.loaded) == server.seen.adapters[-1:]
        assert {body["model"] for body in server.seen.bodies} <= {*server.seen.adapters}
        assert not any(Path(folder).exists() for folder in server.seen.folders)
        assert server.seen.paths.count("/reset_prefix_cache") == 4


def test_a_restarted_server_gets_the_base_again_and_one_that_forgot_the_adapter_samples_later(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, 0.2)
    engine = engine_of(policy, codec, servers)
    expected = by_hand(policy, codec, prompts, count=2, seed=1)
    assert_alike(engine.generate(prompts, count=2, seed=1), expected)
    servers[0].stop()
    servers[0].start()
    assert_alike(engine.generate(prompts, count=2, seed=1), expected)
    assert len(servers[0].seen.sent) == 4 and len(servers[1].seen.sent) == 2
    engine_metrics()
    servers[1].faults.forgetting = {len(servers[1].seen.seeds) + 1}
    assert_alike(engine.generate(prompts, count=2, seed=1), expected)
    assert len(servers[1].seen.sent) == 4, "base and adapter again"
    assert engine_metrics()["engine_failures"] >= 1


def test_a_server_that_has_the_base_gets_the_adapter_alone_beside_one_that_restarted(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.generate(prompts, count=2, seed=1)
    servers[0].stop()
    servers[0].start()
    moved_adapters(policy, 0.2)
    engine.take_weights(policy.causal_lm.named_parameters())
    (base, adapter, *again), kept = (server.seen.sent for server in servers)
    assert again == [base, adapter] and kept == [base, adapter, adapter]


@pytest.mark.parametrize(
    "by, fault, message",
    [
        (0.2, {"loses_adapters": True}, "answers without the policy's adapters"),
        (1e-5, {"scaling": RANK**0.5}, r"effect there is (1\.99|2\.0[01]) times"),
    ],
)
def test_adapters_that_do_not_arrive_or_are_scaled_otherwise_are_found(
    by: float, fault: dict[str, Any], message: str, pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, by)
    for name, value in fault.items():
        setattr(servers[1].faults, name, value)
    with pytest.raises(WeightsDiffer, match=message):
        engine_of(policy, codec, servers).generate(prompts, count=1, seed=1)
    assert not any(server.seen.seeds for server in servers), "nothing was sampled"


def test_an_old_adapter_is_found(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, 0.2)
    engine = engine_of(policy, codec, servers)
    engine.generate(prompts, count=1, seed=1)
    servers[0].faults.keeps_old_adapter = True
    moved_adapters(policy, 1e-5, seed=4)
    with pytest.raises(WeightsDiffer, match="before the last update"):
        engine.take_weights(policy.causal_lm.named_parameters())


@pytest.mark.parametrize(
    "lora, message",
    [
        (None, "with no adapters, and the policy's need room for rank 16"),
        ((8, TARGETS), "with adapters of rank 8 at most, and the policy's need room for rank 16"),
        ((16, ["o_proj"]), r"adapters for o_proj, and the policy's are for down_proj q_proj"),
        (
            (16, None),
            "adapters for all layers, the output head too, and the policy's are for down_proj q_proj",
        ),
    ],
)
def test_a_server_that_cannot_take_the_adapters_is_refused_before_its_weights_are_replaced(
    lora: Any, message: str, pipeline: Any
) -> None:
    policy, codec, prompts = adapted_parts(
        pipeline, lora=Lora(rank=9, alpha=8.0, targets=("q_proj", "down_proj"))
    )
    with serving(pipeline.folder("model"), lora=lora) as servers:
        start = r".*--enable-lora --max-lora-rank 16 --lora-target-modules down_proj q_proj"
        with pytest.raises(ServerRefused, match=message + start):
            engine_of(policy, codec, servers).generate(prompts, count=1, seed=1)
        assert servers[0].seen.sent == []


def test_a_server_without_the_endpoints_of_adapters_is_refused(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    servers[1].faults.unknown = {"/v1/load_lora_adapter"}
    with pytest.raises(ServerRefused, match="start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        engine_of(policy, codec, servers).generate(prompts, count=1, seed=1)


@pytest.mark.slow
def test_servers_sample_ahead_with_the_adapter_from_before_the_update(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, 0.2)
    with AheadEngine(engine_of(policy, codec, servers)) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        expected = by_hand(policy, codec, prompts, count=2, seed=7)
        ahead.begin(prompts, count=2, seed=7)
        moved_adapters(policy, 0.2, seed=5)
        ahead.take_weights(policy.causal_lm.named_parameters())
        assert_alike(ahead.generate(prompts, count=2, seed=7), expected)
        after = by_hand(policy, codec, prompts, count=2, seed=8)
        assert_alike(ahead.generate(prompts, count=2, seed=8), after)
        assert after.responses != expected.responses


@pytest.mark.slow
def test_a_whole_stage_samples_from_adapters_on_a_server(lora_pipeline: Any, tmp_path: Path) -> None:
    with serving(lora_pipeline.folder("model"), lora=(8, TARGETS)) as servers:
        job: Any = served(lora_pipeline.job("policy", folder=tmp_path), servers)
        run_stage(job)
        base = load_policy(lora_pipeline.folder("model"))
        whole = sum(weight.nbytes for weight in base.parameters())
        assert servers[0].seen.sent.count(whole) == 1 == sum(each >= whole for each in servers[0].seen.sent)
        assert len(servers[0].seen.adapters) > job.work.iterations
        curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
        assert len({each["sampled_weights"] for each in curves}) == job.work.iterations == len(curves)
        assert max(each["sampler_gap"] for each in curves) < 1e-4


@pytest.mark.slow
def test_adapters_that_two_ranks_hold_in_parts_are_sent_as_adapters(
    lora_pipeline: Any, tmp_path: Path
) -> None:
    """Two ranks train the same weights as one process, and send the base once."""

    def job_in(folder: Path, server: FakeServer) -> Any:
        folder.mkdir()
        job = served(lora_pipeline.job("policy", folder=folder), [server])
        return job.model_copy(update={"work": resolve_work(job.work)})

    with serving(lora_pipeline.folder("model"), replicas=2, lora=(8, TARGETS)) as (first, second):
        alone, together = job_in(tmp_path / "alone", first), job_in(tmp_path / "together", second)
        run_to_compare(alone)
        start(2, tmp_path / "jobs", [together], eps=ADAM_EPS, strategy="fsdp2")
        assert second.seen.sent == first.seen.sent and len(second.seen.adapters) == len(first.seen.adapters)
    assert_alike_weights(moved(together), moved(alone), learning_rate=alone.work.learning_rate)
    assert not list(together.scratch.glob("weights*"))


@pytest.mark.slow
def test_servers_of_the_stage_are_started_for_adapters_and_serve_a_whole_policy_too(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    WITH_TORCH.listen()
    monkeypatch.setattr(own_servers, "PROGRAM", PROGRAM)
    monkeypatch.setattr(own_servers, "find_spec", lambda name: "there")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    policy, codec, prompts = adapted_parts(pipeline)
    moved_adapters(policy, 0.2)
    whole = type(policy)(load_policy(pipeline.folder("model")))
    rollout = Sampling(engine="vllm", servers=1)
    engines = [load_engine(each, codec, limits=PassLimits(), rollout=rollout) for each in (policy, whole)]
    try:
        for each, engine in zip((policy, whole), engines, strict=True):
            found = engine.generate(prompts, count=2, seed=1)
            assert_alike(found, by_hand(each, codec, prompts, count=2, seed=1))
        assert engines[0]._own is engines[1]._own  # type: ignore[attr-defined]
    finally:
        own_servers.close_own_servers()

"""Servers of vLLM sample for a stage; a server that speaks the same protocol and fails on request replaces them here."""

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_vllm_server import FakeServer, serving
from tests.tasks.rollout.test_vllm_engine import moved, parts
from tests.tasks.small_models import load
from vantage.models.folders import load_policy, load_tokenizer, save_policy
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples, sample
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout import checksums, remote_engine, remote_round, vllm_server, weight_files
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.remote_engine import EngineUnavailable, RemoteEngine
from vantage.tasks.rollout.vllm_server import ServerRefused
from vantage.tasks.rollout.vllm_worker import VantageWorker
from vantage.tasks.training import preemption, ranks
from vantage.tasks.training.engine_record import engine_metrics
from vantage.tasks.training.seeds import derive_seed


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(remote_engine, "PATIENCE_SECONDS", 0.5)


@pytest.fixture
def servers(pipeline: Any) -> Iterator[list[FakeServer]]:
    """Yield two servers of one model."""
    with serving(pipeline.folder("model"), replicas=2) as started:
        yield started


def engine_of(policy: PolicyModel, codec: Codec, servers: list[FakeServer], **settings: Any) -> RemoteEngine:
    rollout = Sampling(engine="vllm", url=tuple(each.url for each in servers), **settings)
    engine = load_engine(policy, codec, limits=PassLimits(), rollout=rollout)
    assert isinstance(engine, RemoteEngine)
    return engine


def by_hand(
    policy: PolicyModel,
    codec: Codec,
    prompts: list[list[int]],
    *,
    count: int,
    seed: int,
    greedy: bool = False,
) -> Samples:
    """Sample each response alone, with its own seed, and without any engine."""
    found = [
        sample(
            policy.causal_lm,
            [prompts[row // count]],
            max_new_tokens=codec.generation.max_response_tokens,
            temperature=codec.generation.temperature,
            eos_token_ids=codec.stop_token_ids,
            stop_strings=codec.stop_strings,
            pad_token_id=codec.pad_token_id,
            seed=derive_seed(seed, "response", row),
            greedy=greedy,
        )
        for row in range(len(prompts) * count)
    ]
    return Samples(
        *(
            [each for one in found for each in getattr(one, name)]
            for name in ("responses", "ended", "logprobs")
        )
    )


def assert_alike(found: Samples, expected: Samples) -> None:
    assert found.responses == expected.responses and found.ended == expected.ended
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-4, rtol=0)


@pytest.mark.parametrize("greedy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_response_has_its_own_seed_and_the_log_probabilities_of_its_ids(
    greedy: bool, pipeline: Any, servers: list[FakeServer]
) -> None:
    """They equal those of one pass over the whole text in float64, and the responses equal those sampled one by one."""
    policy, codec, prompts = parts(pipeline, temperature=0.7)
    found = engine_of(policy, codec, servers).generate(prompts, count=3, seed=5, greedy=greedy)
    assert_alike(found, by_hand(policy, codec, prompts, count=3, seed=5, greedy=greedy))
    for row, response in enumerate(found.responses):
        prompt = prompts[row // 3]
        with torch.no_grad():
            logits = policy.causal_lm(torch.tensor([prompt + response])).logits[0].double() / 0.7
        exact = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
        own = exact.gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.logprobs[row]).double(), own, atol=1e-4, rtol=0)
    seeds = [seed for server in servers for seed in server.seen.seeds]
    assert sorted(seeds) == sorted(derive_seed(5, "response", row) for row in range(12)), (
        "each is asked for once"
    )
    for server in servers:
        assert len(server.seen.seeds) == 6
    shared = [{tuple(prompt) for prompt in server.seen.prompts} for server in servers]
    assert not shared[0] & shared[1], "one server reads a prompt, and caches it for all of its responses"


@pytest.mark.slow
def test_a_response_ends_with_the_token_that_completes_a_stop_string(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = parts(pipeline)
    whole = by_hand(policy, codec, prompts, count=4, seed=2)
    text = codec.whole_texts([whole.responses[0]])[0][2]
    policy, codec, _ = parts(pipeline, stop=(text,))
    cut = engine_of(policy, codec, servers).generate(prompts, count=4, seed=2)
    assert_alike(cut, by_hand(policy, codec, prompts, count=4, seed=2))
    assert sum(map(len, cut.responses)) < sum(map(len, whole.responses))
    assert all(body["stream"] for server in servers for body in server.seen.bodies)


def test_responses_that_ended_at_a_stop_string_outlive_their_server(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    """Each response is asked for once, except the one at which the server ends."""
    policy, codec, prompts = parts(pipeline)
    whole = by_hand(policy, codec, prompts, count=4, seed=2)
    text = codec.whole_texts([whole.responses[0]])[0][2]
    policy, codec, _ = parts(pipeline, stop=(text,))
    engine = engine_of(policy, codec, servers, max_rows=1)
    servers[0].faults.stops_at = 7
    found = engine.generate(prompts, count=4, seed=2)
    assert_alike(found, by_hand(policy, codec, prompts, count=4, seed=2))
    assert codec.stop_strings is not None
    assert sum(codec.stop_strings.complete(ids) for ids in found.responses) >= 4
    seeds = [seed for server in servers for seed in server.seen.seeds]
    assert len(seeds) == 17 and len(set(seeds)) == 16


@pytest.mark.slow
def test_an_update_reaches_every_server_and_all_prove_it(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    before = engine.generate(prompts, count=2, seed=1)
    engine_metrics()
    moved(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    after = engine.generate(prompts, count=2, seed=1)
    assert after.responses != before.responses
    assert_alike(after, by_hand(policy, codec, prompts, count=2, seed=1))
    first, second = (server.seen.versions for server in servers)
    assert first == second and len(set(first)) == 3, "two versions, and none while the weights change"
    assert first[-1].split("-")[0] == "1" and f"{int(engine_metrics()['sampled_weights']):012x}" in first[-1]
    for server in servers:
        assert not any(Path(folder).exists() for folder in server.seen.folders)
        assert server.seen.dtypes == {torch.float32} and not server.is_paused
        for name, weight in policy.causal_lm.named_parameters():
            assert torch.equal(weight, dict(server.model.named_parameters())[name])
    with pytest.raises(KeyError, match="no_such_weight"):
        engine.take_weights([("no_such_weight", torch.zeros(1))])


@pytest.mark.slow
@pytest.mark.parametrize(
    "by, message",
    [(0.02, r"is above 0.0001"), (2e-6, "holds the weights from before the last update")],
)
def test_a_server_that_keeps_old_weights_is_found(
    by: float, message: str, pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.generate(prompts, count=1, seed=1)
    servers[1].faults.keeps_old_weights = True
    moved(policy, by)
    with pytest.raises(WeightsDiffer, match=message):
        engine.take_weights(policy.causal_lm.named_parameters())


@pytest.mark.parametrize("is_known", [True, False])
def test_one_bit_of_a_weight_is_found_by_checksums(
    is_known: bool, pipeline: Any, servers: list[FakeServer]
) -> None:
    """No log-probability of the fixed rows shows the bit. A server without checksums is believed."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.generate(prompts, count=1, seed=1)
    servers[1].faults.flipped = {2}
    if not is_known:
        servers[1].faults.unknown = {"/weight_checker"}
    moved(policy, 0.01)
    with (
        nullcontext()
        if not is_known
        else pytest.raises(
            WeightsDiffer,
            match=r"the sha256 of 1 of the \d+ that agreed before differ, the first that of .*qkv_proj",
        )
    ):
        engine.take_weights(policy.causal_lm.named_parameters())


def test_servers_with_large_weights_are_asked_for_parts_in_turn(
    pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights are compared at first, then a part after each update. A bit is found when its part is compared."""
    monkeypatch.setattr(checksums, "MOST_BYTES", 20_000)
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.generate(prompts, count=1, seed=1)
    for update in range(1, 5):
        moved(policy, 0.01)
        engine.take_weights(policy.causal_lm.named_parameters())
        for server in servers:
            assert server.seen.paths.count("/weight_checker") == 1
            assert len(server.seen.asked_names) == update
    assert servers[0].seen.asked_names == servers[1].seen.asked_names
    assert servers[0].seen.asked_names[0] != servers[0].seen.asked_names[1]
    servers[1].faults.flipped = set(range(100))
    with pytest.raises(WeightsDiffer, match=r"of .*qkv_proj"):
        for _ in range(20):
            moved(policy, 0.01)
            engine.take_weights(policy.causal_lm.named_parameters())
    assert any("qkv_proj" in name for name in servers[1].seen.asked_names[-1])


@pytest.mark.parametrize(
    "fault, message",
    [
        ({"is_elsewhere": True}, r"does not see model-00001\.safetensors in .*, which the stage has written"),
        ({"hidden": {"model-00003.safetensors"}}, r"does not see model-00003\.safetensors in"),
    ],
)
def test_a_server_that_does_not_see_the_files_keeps_its_old_weights_and_samples_nothing(
    fault: dict[str, Any],
    message: str,
    pipeline: Any,
    servers: list[FakeServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update is so small that no log-probability shows it, and the server computes no checksums."""
    monkeypatch.setattr(weight_files, "BYTES_IN_FILE", 20_000)
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.generate(prompts, count=1, seed=1)
    for server in servers:
        server.faults.unknown = {"/weight_checker"}
    for name, value in fault.items():
        setattr(servers[1].faults, name, value)
    moved(policy, 1e-8)
    engine.take_weights(policy.causal_lm.named_parameters())
    assert len(servers[0].seen.sent) == 2 and len(servers[1].seen.sent) == 1
    assert servers[1].version == "updating"
    asked = len(servers[1].seen.seeds)
    assert len(engine.generate(prompts, count=1, seed=1).responses) == 4
    assert len(servers[1].seen.seeds) == asked
    with pytest.raises(EngineUnavailable, match=rf"{message}.*set rollout\.weights_folder to a folder"):
        engine_of(policy, codec, servers[1:]).generate(prompts, count=1, seed=1)


def test_a_file_of_another_update_is_no_file_of_this_one(pipeline: Any, tmp_path: Path) -> None:
    policy, _, _ = parts(pipeline)
    with weight_files.weight_files(
        dict(policy.causal_lm.named_parameters()), tmp_path / "sent", precision="float32"
    ) as folder:
        count = weight_files.contents_of(folder)["model-00001.safetensors"]
        contents = json.dumps({"model-00001.safetensors": count + 1})
        with pytest.raises(ValueError, match=rf"with {count} weights, and the stage has written {count + 1}"):
            VantageWorker().vantage_take_weights(str(folder), contents)


@pytest.mark.slow
def test_weights_that_were_pushed_by_hand_are_found(pipeline: Any, servers: list[FakeServer]) -> None:
    """Weights of another version are replaced. Weights with the version of the policy's end the stage."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    expected = engine.generate(prompts, count=1, seed=1)
    version = servers[0].version
    servers[0].overtake()
    assert engine.generate(prompts, count=1, seed=1) == expected
    servers[0].overtake()
    servers[0].version = version
    asked = len(servers[0].seen.seeds)
    with pytest.raises(WeightsDiffer, match="nothing was sampled"):
        engine.generate(prompts, count=1, seed=2)
    assert len(servers[0].seen.seeds) == asked


@pytest.mark.parametrize(
    "fault",
    [
        *("failing", "stale"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("dropped", "aborted", "hanging", "overtaken", "overtaken in streams")
        ),
    ],
)
def test_responses_that_do_not_come_or_are_stale_are_sampled_again(
    fault: str, pipeline: Any, servers: list[FakeServer]
) -> None:
    kept = {"stop": ("zz",)} if fault.endswith("streams") else {}
    policy, codec, prompts = parts(pipeline, **kept)
    engine = engine_of(policy, codec, servers, request_seconds=1.0 if fault == "hanging" else 60.0)
    engine.take_weights(policy.causal_lm.named_parameters())
    engine_metrics()
    setattr(servers[0].faults, fault.split()[0], {1, 3})
    found = engine.generate(prompts, count=3, seed=4)
    assert_alike(found, by_hand(policy, codec, prompts, count=3, seed=4))
    metrics = engine_metrics()
    seeds = [seed for server in servers for seed in server.seen.seeds]
    assert set(seeds) == {derive_seed(4, "response", row) for row in range(12)}
    assert 12 < len(seeds) <= 24
    if fault in ("stale", "overtaken", "overtaken in streams"):
        assert metrics["stale_responses"] >= 1
    else:
        assert metrics["engine_failures"] >= 1 and metrics["stale_responses"] == 0


@pytest.mark.slow
def test_the_other_server_takes_over_from_one_that_dies(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    servers[0].faults.stops_at = 2
    found = engine.generate(prompts, count=3, seed=4)
    assert_alike(found, by_hand(policy, codec, prompts, count=3, seed=4))
    moved(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    servers[0].start()
    servers[0].faults.stops_at = None
    asked = len(servers[0].seen.seeds)
    found = engine.generate(prompts, count=3, seed=5)
    assert_alike(found, by_hand(policy, codec, prompts, count=3, seed=5))
    assert len(servers[0].seen.seeds) == asked + 6, "it is given the weights and takes part again"


def test_dead_servers_end_the_stage_as_a_temporary_failure(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    for server in servers:
        server.stop()
    with pytest.raises(
        EngineUnavailable, match=f"no server of rollout.url could sample.*{servers[1].url} did not answer"
    ):
        engine.generate(prompts, count=2, seed=4)


@pytest.mark.slow
def test_servers_that_go_on_failing_end_the_stage(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    for server in servers:
        server.faults.failing = set(range(1000))
    with pytest.raises(
        EngineUnavailable, match=r"0 of 8 responses are there after 6 rounds; .*answered.*with 500.*is broken"
    ):
        engine.generate(prompts, count=2, seed=4)


def test_an_update_that_breaks_off_leaves_a_version_that_nobody_believes(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.generate(prompts, count=1, seed=1)
    servers[0].faults.failing_updates = {2}
    moved(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    assert servers[0].version == "updating" and not servers[0].is_paused
    assert_alike(engine.generate(prompts, count=2, seed=1), by_hand(policy, codec, prompts, count=2, seed=1))
    assert servers[0].version == servers[1].version != "updating"


def test_another_model_tokenizer_or_setting_is_refused_before_weights_are_replaced(
    pipeline: Any,
) -> None:
    policy, codec, _ = parts(pipeline)
    model = pipeline.folder("model")

    def refusal(**changes: Any) -> str:
        with serving(model) as (server,):
            config = changes.pop("config", {})
            for name, value in config.items():
                setattr(server.config, name, value)
            if changes.pop("other_tokenizer", False):
                server.tokenizer.encode = lambda *_, **__: [3, 4]
            server.faults.has_no_worker = changes.pop("has_no_worker", False)
            for name, value in changes.items():
                setattr(server, name, value)
            with pytest.raises(ServerRefused) as refused:
                engine_of(policy, codec, [server]).take_weights(policy.causal_lm.named_parameters())
            assert server.seen.versions == [] and server.seen.seeds == []
            assert server.url in str(refused.value)
            return str(refused.value)

    size = policy.causal_lm.config.vocab_size
    message = refusal(config={"vocab_size": size + 1, "num_hidden_layers": 7})
    assert (
        f"vocab_size is {size + 1} there and {size} here" in message
        and "num_hidden_layers is 7 there" in message
    )
    assert "is another model than the policy" in message and str(model) in message
    message = refusal(other_tokenizer=True)
    assert "another tokenizer than the policy's: it reads" in message and "as [3, 4]" in message
    assert "dtype=bfloat16, and this stage needs float32; start it with --dtype float32" in refusal(
        dtype="bfloat16"
    )
    assert "another version of Vantage; install this version there" in refusal(revision=1)
    assert "start it with --logprobs-mode processed_logprobs" in refusal(logprobs_mode="raw_logprobs")
    message = refusal(max_tokens=16)
    assert "at most 16 tokens of a prompt and its response, and this stage needs 72" in message
    assert "--worker-extension-cls vantage.tasks.rollout.vllm_worker.VantageWorker" in refusal(
        has_no_worker=True
    )


def test_a_server_of_the_model_as_it_is_on_the_hub_is_taken(pipeline: Any, tmp_path: Path) -> None:
    """The import writes the tokenizer's special ids, other types and no dropout into the configuration."""
    hub, imported = tmp_path / "hub", tmp_path / "imported"
    shutil.copytree(pipeline.folder("model"), hub)
    config = json.loads((hub / "config.json").read_text())
    eos = config["eos_token_id"]
    config |= {"eos_token_id": [eos, eos + 1], "pad_token_id": None, "bos_token_id": None}
    config |= {"attention_dropout": 0.1, "torch_dtype": "bfloat16", "_name_or_path": "someone/a-model"}
    (hub / "config.json").write_text(json.dumps(config))
    save_policy(load_policy(hub), load_tokenizer(hub), imported)
    assert json.loads((imported / "config.json").read_text())["eos_token_id"] == eos
    _, codec, prompts = parts(pipeline)
    policy = load(imported)
    with serving(hub) as servers:
        found = engine_of(policy, codec, servers).generate(prompts, count=1, seed=1)
    assert_alike(found, by_hand(policy, codec, prompts, count=1, seed=1))


def test_configurations_are_compared_field_by_field_also_inside_each_other() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = {"eos_token_id": 1, "hidden_size": 64, "dtype": "float32", "attention_dropout": 0.0}
    ours = {"text_config": text, "pad_token_id": 0, "rope_parameters": rope}
    theirs = {
        "text_config": {**text, "eos_token_id": [1, 2], "dtype": "bfloat16", "attention_dropout": 0.1},
        "pad_token_id": None,
        "rope_parameters": rope,
    }
    assert remote_engine._differences(ours, theirs) == []
    theirs["text_config"]["hidden_size"] = 32
    theirs["rope_parameters"] = {**rope, "factor": 8.0}
    assert remote_engine._differences(ours, theirs) == [
        f"rope_parameters is {theirs['rope_parameters']} there and {rope} here",
        "text_config.hidden_size is 32 there and 64 here",
    ]


@pytest.mark.parametrize("path", ["/weight_info", "/inference/v1/generate"])
def test_a_server_without_its_switches_is_refused_with_how_to_start_it(
    path: str, pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = parts(pipeline)
    servers[0].faults.unknown = {path}
    with pytest.raises(
        ServerRefused, match=rf"answered {path} with 404.*VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable"
    ):
        engine_of(policy, codec, servers).generate(prompts, count=1, seed=1)


@pytest.mark.parametrize("fault", ["hanging_paths", "failing_paths"])
def test_a_busy_or_dead_engine_is_no_server_of_another_kind(
    fault: str, pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program still answers ``/health``. The other server samples, and the busy one takes part again when it
    answers.
    """
    monkeypatch.setattr(vllm_server, "ANSWER_SECONDS", 3.0)
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    setattr(servers[0].faults, fault, {"/collective_rpc"})
    expected = by_hand(policy, codec, prompts, count=1, seed=1)
    assert_alike(engine.generate(prompts, count=1, seed=1), expected)
    assert servers[0].seen.seeds == []
    setattr(servers[0].faults, fault, set())
    assert_alike(engine.generate(prompts, count=1, seed=1), expected)
    assert len(servers[0].seen.seeds) == 2


def test_a_stage_that_waits_for_a_long_response_does_not_count_as_hanging(
    pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr(remote_engine.progress, "phase", lambda *said, **_: shown.append(said))
    monkeypatch.setattr(remote_round, "SECONDS_BETWEEN_LOOKS", 0.02)
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers[:1], request_seconds=2.0)
    servers[0].faults.hanging = {3}
    engine.generate(prompts, count=1, seed=1)
    assert shown.count(("waiting for responses", 3, 4)) > 5


@pytest.mark.parametrize("max_rows, num_ranks, each", [(None, 1, 256), (None, 6, 42), (64, 6, 10), (2, 6, 1)])
def test_the_ranks_share_the_responses_that_a_server_draws_at_once(
    max_rows: int | None,
    num_ranks: int,
    each: int,
    pipeline: Any,
    servers: list[FakeServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the time of a request would include the queue before it, and healthy servers would be ended."""
    policy, codec, _ = parts(pipeline)
    monkeypatch.setattr(ranks, "world_size", lambda: num_ranks)
    monkeypatch.setattr(ranks, "agreed", lambda value: value)
    assert engine_of(policy, codec, servers, max_rows=max_rows)._at_once == each


def test_another_program_is_no_server(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    servers[0].faults.speaks_otherwise = True
    with pytest.raises(
        EngineUnavailable, match="answered /weight_info with something else than was asked for"
    ):
        engine_of(policy, codec, servers[:1]).generate(prompts, count=1, seed=1)


def test_a_server_without_a_tokenizer_is_used(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    for server in servers:
        server.faults.has_no_tokenizer = True
    assert len(engine_of(policy, codec, servers).generate(prompts, count=1, seed=1).responses) == 4


def test_the_key_comes_from_the_environment(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, codec, prompts = parts(pipeline)
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    with serving(pipeline.folder("model"), key="a-long-secret") as servers:
        with pytest.raises(ServerRefused, match=r"401.*rollout\.api_key_variable"):
            engine_of(policy, codec, servers).generate(prompts, count=1, seed=1)
        with pytest.raises(ValueError, match="api_key_variable=ENGINE_KEY names a variable that is not set"):
            engine_of(policy, codec, servers, api_key_variable="ENGINE_KEY")
        monkeypatch.setenv("ENGINE_KEY", "a-long-secret")
        found = engine_of(policy, codec, servers, api_key_variable="ENGINE_KEY").generate(
            prompts, count=1, seed=1
        )
    assert len(found.responses) == 4


def test_weights_go_through_the_folder_that_the_recipe_names(
    pipeline: Any, servers: list[FakeServer], tmp_path: Path
) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers, weights_folder=str(tmp_path))
    engine.generate(prompts, count=1, seed=1)
    moved(policy, 0.01)
    engine.take_weights(policy.causal_lm.named_parameters())
    folders = [Path(folder) for folder in servers[0].seen.folders]
    assert len(folders) == 2, "each update has a folder of its own"
    assert all(each.is_relative_to(tmp_path) for each in folders)
    assert not os.listdir(tmp_path), "they are removed when the servers have them"
    with pytest.raises(ValueError, match=r"weights_folder=.*missing is no folder of this machine"):
        engine_of(policy, codec, servers, weights_folder=str(tmp_path / "missing"))


@pytest.mark.slow
def test_a_request_to_stop_is_heard_at_once_while_servers_sample(
    pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.take_weights(policy.causal_lm.named_parameters())
    servers[0].faults.hanging, servers[1].faults.hanging = {0}, {0}
    monkeypatch.setattr(preemption, "_signals_received", 0)
    before = signal.getsignal(signal.SIGTERM)
    preemption.listen()
    asked = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    try:
        asked.start()
        with pytest.raises(preemption.Requested), preemption.at_once():
            engine.generate(prompts, count=2, seed=1)
    finally:
        asked.join()
        signal.signal(signal.SIGTERM, before)
    assert_alike(engine.generate(prompts, count=2, seed=1), by_hand(policy, codec, prompts, count=2, seed=1))


def test_a_request_to_stop_that_a_callback_receives_is_heard_all_the_same(
    pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives while asyncio runs a callback of a connection: it logs the error, and goes on."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    engine.take_weights(policy.causal_lm.named_parameters())
    servers[0].faults.hanging, servers[1].faults.hanging = {0}, {0}
    monkeypatch.setattr(preemption, "_signals_received", 0)
    draw, lost = remote_round.VllmServer.draw, []

    def lose(loop: Any, context: dict[str, Any]) -> None:
        lost.append(context["exception"])

    async def drawn(self: Any, *args: Any, **named: Any) -> Any:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lose)
        loop.call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        return await draw(self, *args, **named)

    monkeypatch.setattr(remote_round.VllmServer, "draw", drawn)
    before = signal.getsignal(signal.SIGTERM)
    preemption.listen()
    began = time.monotonic()
    try:
        with pytest.raises(preemption.Requested), preemption.at_once():
            engine.generate(prompts, count=2, seed=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(lost[0], preemption.Requested)
    assert time.monotonic() - began < 20, "a server that hangs does so for 60 s"


@pytest.mark.slow
def test_two_policies_take_turns_on_one_server(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    other = load(pipeline.folder("model"))
    engines = [engine_of(each, codec, servers[:1]) for each in (policy, other)]
    with ExitStack() as entered:
        for engine in engines:
            entered.enter_context(engine)
        for seed in (1, 2):
            for each, engine in zip((policy, other), engines, strict=True):
                found = engine.generate(prompts, count=1, seed=seed)
                assert_alike(found, by_hand(each, codec, prompts, count=1, seed=seed))

"""Servers of a stage that hang, at any moment, are ended and started again, and the responses are those of servers that never hung."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fake_vllm_server import GENERATE, FakeServer
from tests.support.on_ranks import on_ranks
from tests.tasks.rollout.test_own_servers import engine_of
from tests.tasks.rollout.test_remote_engine import assert_alike, by_hand
from tests.tasks.rollout.test_vllm_engine import moved, parts
from vantage.schemas.recipe.rollout import Ahead
from vantage.tasks.rollout import own_servers, remote_engine, vllm_server
from vantage.tasks.rollout.ahead import AheadEngine
from vantage.tasks.rollout.remote_engine import RemoteEngine
from vantage.tasks.rollout.vllm_server import EngineUnavailable, ServerTimedOut, VllmServer
from vantage.tasks.training import preemption, ranks
from vantage.tasks.training.engine_record import engine_metrics, note_ended


class Started:
    """A stand-in for ``Process`` that runs the small server in a thread, with a new server at each start."""

    def __init__(self, model: Path, key: str) -> None:
        self._model, self._key = model, key
        self.servers: list[FakeServer] = []
        self._runs = False

    @property
    def server(self) -> FakeServer:
        return self.servers[-1]

    def begin(self) -> None:
        self.servers.append(FakeServer(self._model, key=self._key))
        self._runs = True

    def url(self) -> str | None:
        return self.server.url if self._runs else None

    def is_running(self) -> bool:
        return self._runs and not self.server._released.is_set()

    def is_lost(self) -> bool:
        return False

    def end(self) -> None:
        if self._runs:
            self.server.stop()
        self._runs = False


@pytest.fixture
def processes(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    """Have the stage's servers be those of this process, which have 6 seconds for an answer."""
    found: list[Started] = []

    def started(self: Any, policy: Any, programs: Any) -> list[Started]:
        found[:] = [Started(pipeline.folder("model"), program.fixed["VLLM_API_KEY"]) for program in programs]
        return found

    monkeypatch.setattr(own_servers, "find_spec", lambda name: "there")
    monkeypatch.setattr(own_servers.OwnServers, "_processes", started)
    monkeypatch.setattr(own_servers, "HUNG_SECONDS", 1.0)
    monkeypatch.setattr(vllm_server, "ANSWER_SECONDS", 6.0)
    monkeypatch.setattr(remote_engine, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(remote_engine, "PATIENCE_SECONDS", 0.5)
    yield found
    own_servers.close_own_servers()


def starts(processes: list[Started]) -> list[int]:
    return [len(each.servers) for each in processes]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version", GENERATE, "/weight_checker"])
def test_a_server_that_hangs_in_an_update_is_started_again(
    path: str, pipeline: Any, processes: list[Started]
) -> None:
    """The server hangs while it takes the weights, or while it proves them."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, 2, request_seconds=6.0)
    engine.generate(prompts, count=1, seed=1)
    processes[0].server.faults.hanging_paths = {path}
    moved(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    assert_alike(engine.generate(prompts, count=1, seed=1), by_hand(policy, codec, prompts, count=1, seed=1))
    assert starts(processes) == [2, 1]
    assert len(processes[0].server.seen.seeds) == 2, "the new one takes part"


@pytest.mark.slow
def test_the_only_server_gets_the_time_of_a_new_start(pipeline: Any, processes: list[Started]) -> None:
    """The stage waits for it, though its time-out took longer than the stage usually waits for servers."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, 1, request_seconds=6.0)
    engine.generate(prompts, count=1, seed=1)
    processes[0].server.faults.hanging_paths = {GENERATE}
    assert_alike(engine.generate(prompts, count=1, seed=1), by_hand(policy, codec, prompts, count=1, seed=1))
    assert starts(processes) == [2]


@pytest.mark.slow
def test_a_server_that_hangs_between_rollouts_is_started_again(
    pipeline: Any, processes: list[Started]
) -> None:
    """The process of a hanging server still runs. A new one has the time of a start again."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, 1)
    engine.generate(prompts, count=1, seed=1)
    processes[0].server.faults.hanging_paths = {"/weight_info", "/health"}
    begun = time.monotonic()
    assert_alike(engine.generate(prompts, count=1, seed=1), by_hand(policy, codec, prompts, count=1, seed=1))
    assert time.monotonic() - begun < 30
    assert starts(processes) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("path", [GENERATE, "/weight_info"])
def test_a_server_that_hangs_while_it_samples_ahead_is_started_again(
    path: str, pipeline: Any, processes: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one samples what is missing meanwhile."""
    policy, codec, prompts = parts(pipeline, stop=("zz",))
    engine = engine_of(policy, codec, 2, request_seconds=6.0)
    with AheadEngine(engine) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        expected = by_hand(policy, codec, prompts, count=2, seed=4)
        held = engine.hold()
        monkeypatch.setattr(engine, "hold", lambda: held)  # it hangs when it has the weights
        processes[0].server.faults.hanging_paths = {path}
        ahead.begin(prompts, count=2, seed=4)
        moved(policy, by=0.05)
        assert_alike(ahead.generate(prompts, count=2, seed=4), expected)
        assert starts(processes) == [1, 1] and not processes[0].is_running()
        ahead.take_weights(policy.causal_lm.named_parameters())
        found = ahead.generate(prompts, count=1, seed=5)
        assert_alike(found, by_hand(policy, codec, prompts, count=1, seed=5))
    assert starts(processes) == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"stops_at": 6}, {"hanging": {6}}])
def test_the_only_server_that_ends_while_it_samples_ahead_gets_the_weights_of_before_again(
    fault: dict[str, Any], pipeline: Any, processes: list[Started], tmp_path: Path
) -> None:
    """Responses that had ended are kept; the files of the weights are there until all have."""
    policy, codec, prompts = parts(pipeline)
    folder = tmp_path / "weights"
    folder.mkdir()
    engine = engine_of(
        policy, codec, 1, settings=Ahead, ahead=1, request_seconds=6.0, weights_folder=str(folder)
    )
    with AheadEngine(engine) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        expected = by_hand(policy, codec, prompts, count=2, seed=4)
        server = processes[0].server
        for name, value in fault.items():
            setattr(server.faults, name, value)
        ahead.begin(prompts, count=2, seed=4)
        assert len(list(folder.rglob("*.safetensors"))) == 1
        moved(policy, by=0.05)
        ahead.take_weights(policy.causal_lm.named_parameters())
        ahead.tensors()
        assert list(folder.iterdir()) == []
        assert_alike(ahead.generate(prompts, count=2, seed=4), expected)
        assert ahead.took_begun and starts(processes) == [2]
        assert processes[0].server.seen.versions[-1] == server.seen.versions[-1]
        assert len(processes[0].server.seen.seeds) < 8, "those that had ended are kept"
        after = by_hand(policy, codec, prompts, count=1, seed=5)
        assert_alike(ahead.generate(prompts, count=1, seed=5), after)
    moved(policy, by=0.05)
    ahead.take_weights(policy.causal_lm.named_parameters())
    assert list(folder.iterdir()) == [], "nothing is sampled ahead any longer"


@pytest.mark.parametrize("case", ["validated", "a fixed policy"])
def test_the_only_server_may_end_beside_any_rollout(
    case: str, pipeline: Any, processes: list[Started], tmp_path: Path
) -> None:
    """Its weights are kept as long as rollouts are sampled from them: beside the training after a validation, which has given them,
    and beside each rollout of a policy that does not train."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, 1, settings=Ahead, ahead=1, weights_folder=str(tmp_path))
    with AheadEngine(engine) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        ahead.begin(prompts, count=1, seed=3)
        if case == "validated":
            moved(policy, by=0.05)
            ahead.take_weights(policy.causal_lm.named_parameters())
            ahead.generate(prompts[:1], count=1, seed=9)
        ahead.tensors()
        ahead.generate(prompts, count=1, seed=3)
        assert ahead.took_begun
        expected = by_hand(policy, codec, prompts, count=2, seed=4)
        server = processes[0].server
        server.faults.stops_at = len(server.seen.seeds) + 2
        ahead.begin(prompts, count=2, seed=4)
        if case == "validated":
            moved(policy, by=0.05)
            ahead.take_weights(policy.causal_lm.named_parameters())
        assert_alike(ahead.generate(prompts, count=2, seed=4), expected)
        assert ahead.took_begun and starts(processes) == [2]
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_request_to_stop_keeps_the_weights_of_what_servers_sample_ahead(
    pipeline: Any, processes: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are kept in place of the responses, which the next attempt samples from them."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, 1, settings=Ahead, ahead=1)
    with AheadEngine(engine) as ahead:
        note_ended(3)
        ahead.take_weights(policy.causal_lm.named_parameters())
        expected = by_hand(policy, codec, prompts, count=2, seed=4)
        processes[0].server.faults.hanging = {2}
        ahead.begin(prompts, count=2, seed=4)
        moved(policy, by=0.05)
        note_ended(4)
        ahead.take_weights(policy.causal_lm.named_parameters())
        monkeypatch.setattr(preemption, "_signals_received", 1)
        begun = time.monotonic()
        kept = ahead.tensors()
        assert time.monotonic() - begun < 20, "a request may take 600 s"
        assert len(kept["lengths"]) == 0
    monkeypatch.setattr(preemption, "_signals_received", 0)
    now = {name: each.detach().clone() for name, each in policy.causal_lm.named_parameters()}
    engine_metrics()
    resumed = AheadEngine(engine_of(policy, codec, 1, settings=Ahead, ahead=1))
    resumed.restore(kept)
    with resumed:
        resumed.take_weights(policy.causal_lm.named_parameters())
        assert all(torch.equal(each, now[name]) for name, each in policy.causal_lm.named_parameters())
        assert_alike(resumed.generate(prompts, count=2, seed=4), expected)
        assert resumed.took_begun
        assert engine_metrics()["sampled_iteration"] == 3
        after = by_hand(policy, codec, prompts, count=1, seed=5)
        assert_alike(resumed.generate(prompts, count=1, seed=5), after)


def test_the_checksums_of_a_server_that_gets_the_weights_of_before_again_are_compared(
    pipeline: Any, processes: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared as those of any other server that gets weights."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, 1, settings=Ahead, ahead=1)
    compared: list[str] = []
    compare = engine._checksums.compare
    monkeypatch.setattr(
        engine._checksums, "compare", lambda place, ask: (compared.append(place), compare(place, ask))[1]
    )
    with AheadEngine(engine) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        processes[0].server.faults.stops_at = 1
        ahead.begin(prompts, count=1, seed=4)
        ahead.tensors()
        assert starts(processes) == [2]
        assert f" at {processes[0].server.url}" in compared


def test_a_server_that_starts_again_while_nobody_waits_any_longer_is_not_waited_for(
    pipeline: Any, processes: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, 1, settings=Ahead, ahead=1)
    with AheadEngine(engine) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        processes[0].server.faults.stops_at = 0
        monkeypatch.setattr(Started, "url", lambda self: None)
        ahead.begin(prompts, count=1, seed=4)
        while starts(processes) != [2]:
            time.sleep(0.05)
        begun = time.monotonic()
    assert time.monotonic() - begun < 30, "a start may take 900 s"


def test_a_server_is_one_and_the_same_on_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with the same address is the same object. Otherwise a failed one would take part in the next round."""
    monkeypatch.setattr(own_servers, "find_spec", lambda name: "there")
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    settings = own_servers.Settings("float32", 8, None, 1.0)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=4))
    policy: Any = SimpleNamespace(causal_lm=SimpleNamespace(config=config))
    servers = own_servers.OwnServers(policy, Path(), count=2, key="k", settings=settings)
    monkeypatch.setattr(ranks, "agreed_text", lambda text: "http://a http://b")
    first, second = servers.running()
    monkeypatch.setattr(ranks, "agreed_text", lambda text: "http://a http://c")
    again, new = servers.running()
    assert again is first and new is not second


def servers_ended(folder: Path) -> dict[str, Any]:
    """Have the second rank alone find that the second server hangs; return the servers that this rank ends."""
    ended: list[str] = []
    engine: Any = object.__new__(RemoteEngine)
    engine._servers = [VllmServer(url, key=None, seconds=1.0) for url in ("http://a", "http://b")]
    engine._own = SimpleNamespace(kill=lambda server: ended.append(server.url))
    engine._hung = set()
    if ranks.rank() == 1:
        engine._end_hung([(engine._servers[1], ServerTimedOut("slow"))])
    engine._end_hung_of_all_ranks()
    engine._end_hung_of_all_ranks()
    return {"ended": ended}


def test_the_first_rank_ends_what_hangs_for_another(tmp_path: Path) -> None:
    first, _ = on_ranks(servers_ended, tmp_path)
    assert first["ended"] == ["http://b"], "once"


@pytest.mark.slow
def test_a_server_that_hangs_again_and_again_ends_the_stage(
    pipeline: Any, processes: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_servers, "MAX_RESTARTS", 1)
    monkeypatch.setattr(Started, "begin", _begin_hanging)
    policy, codec, prompts = parts(pipeline)
    with pytest.raises(EngineUnavailable, match="server 0 of rollout.servers ended 2 times"):
        engine_of(policy, codec, 1, request_seconds=1.0).generate(prompts, count=1, seed=1)


def _begin_hanging(self: Started) -> None:
    self.servers.append(FakeServer(self._model, key=self._key))
    self.server.faults.hanging_paths = {"/collective_rpc"}
    self._runs = True

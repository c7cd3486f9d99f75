"""Servers sample the next rollout while one trains: the right weights sample it, also after kills, hangs and lost weights."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.fake_vllm_server import FakeServer, serving
from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.rollout import test_remote_stages
from tests.tasks.rollout.test_remote_engine import assert_alike, by_hand, engine_of
from tests.tasks.rollout.test_vllm_engine import moved, parts
from vantage.ledger.journal import read
from vantage.schemas.metric_names import PHASES
from vantage.schemas.recipe.rollout import Ahead
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout import remote_engine
from vantage.tasks.rollout.ahead import AheadEngine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.remote_engine import EngineUnavailable
from vantage.tasks.rollout.rollout_models import load_rollout_models
from vantage.tasks.stages import run_stage
from vantage.tasks.training import progress
from vantage.tasks.training.engine_record import engine_metrics, note_ended
from vantage.tasks.training.phase_seconds import of_process
from vantage.tasks.training.scratch import JOURNAL


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(remote_engine, "PATIENCE_SECONDS", 0.5)


@pytest.fixture
def servers(pipeline: Any) -> Iterator[list[FakeServer]]:
    """Yield two servers of one model."""
    with serving(pipeline.folder("model"), replicas=2) as started:
        yield started


def served(pipeline: Any, servers: list[FakeServer], folder: Path, **changes: Any) -> StageJob:
    """Return a policy stage that samples ahead with these servers."""
    job = test_remote_stages.served(pipeline.job("policy", folder=folder, **changes), servers)
    work: Any = job.work
    rollout = Ahead(engine="vllm", url=work.rollout.url, ahead=1)
    return job.model_copy(update={"work": work.model_copy(update={"rollout": rollout})})


def curves_of(job: StageJob) -> list[dict[str, float]]:
    return [entry.metrics for entry in read(job.scratch / JOURNAL)]


def test_what_was_begun_comes_from_the_weights_of_before(pipeline: Any, servers: list[FakeServer]) -> None:
    """Requests made meanwhile are sampled from the weights after the update, which the servers get when the rollout is
    done."""
    policy, codec, prompts = parts(pipeline)
    engine_metrics()
    with AheadEngine(engine_of(policy, codec, servers)) as ahead:
        # copies, so that the engine reads the moved weights only from the second call
        ahead.take_weights(
            [(name, each.detach().clone()) for name, each in policy.causal_lm.named_parameters()]
        )
        before = by_hand(policy, codec, prompts, count=2, seed=4)
        note_ended(6)
        ahead.begin(prompts, count=2, seed=4)
        moved(policy, by=0.05)
        ahead.take_weights(policy.causal_lm.named_parameters())
        note_ended(7)
        held = [server.version for server in servers]
        validation = ahead.generate(prompts[:1], count=1, seed=9)
        assert_alike(validation, by_hand(policy, codec, prompts[:1], count=1, seed=9))
        assert not set(held) & {server.version for server in servers}, "they got the new weights"
        engine_metrics()
        assert_alike(ahead.generate(prompts, count=2, seed=4), before)
        assert ahead.took_begun
    recorded = engine_metrics()
    assert recorded["sampled_weights"] == int(held[0].split("-")[1], 16)
    assert recorded["sampled_iteration"] == 6
    assert recorded["stale_responses"] == 0


class Heard:
    """A listener that notes what it receives, and how many of the requests for responses had been made."""

    def __init__(self, servers: list[FakeServer]) -> None:
        self._servers = servers
        self.responses: dict[int, list[int]] = {}
        self.num_asked: list[int] = []

    def sampled(self, rows: Sequence[int], responses: Sequence[list[int]]) -> None:
        self.num_asked.append(sum(len(server.seen.seeds) for server in self._servers))
        self.responses |= dict(zip(rows, responses, strict=True))

    def keep_up(self) -> None:
        pass

    def give_up(self) -> None:
        self.responses.clear()


def test_a_listener_gets_each_response_of_the_servers_when_it_has_come(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    """Each server samples one response after the other, so the first have come before the last are asked for. All have
    come before the rollout is taken."""
    policy, codec, prompts = parts(pipeline)
    heard, unused = Heard(servers), Heard(servers)
    with AheadEngine(engine_of(policy, codec, servers, max_rows=1)) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        ahead.begin(prompts, count=3, seed=4, listener=heard)
        deadline = time.monotonic() + 60
        while len(heard.responses) < 3 * len(prompts) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = ahead.generate(prompts, count=3, seed=4, listener=unused)
        assert heard.responses == dict(enumerate(found.responses))
        assert heard.num_asked[0] < 3 * len(prompts)
        assert not unused.num_asked
        ahead.begin(prompts, count=1, seed=5, listener=unused)
        while not unused.responses and time.monotonic() < deadline:
            time.sleep(0.01)
    assert unused.num_asked and not unused.responses, "nobody took what was begun last"


def test_a_checkpoint_keeps_what_was_begun_and_by_which_weights(
    pipeline: Any, servers: list[FakeServer]
) -> None:
    policy, codec, prompts = parts(pipeline)
    engine_metrics()
    with AheadEngine(engine_of(policy, codec, servers)) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        note_ended(4)
        ahead.begin(prompts, count=2, seed=4)
        kept = ahead.tensors()
        expected = ahead.generate(prompts, count=2, seed=4)
    whole = engine_metrics()
    note_ended(5)
    assert whole["sampled_iteration"] == 4
    num_asked = sum(len(server.seen.seeds) for server in servers)
    moved(policy, by=0.05)
    resumed = AheadEngine(engine_of(policy, codec, servers))
    resumed.restore(kept)
    with resumed:
        assert resumed.generate(prompts, count=2, seed=4) == expected
    assert sum(len(server.seen.seeds) for server in servers) == num_asked, "nothing was sampled again"
    assert engine_metrics() == whole
    del kept["origin_iteration"]  # as checkpoints of earlier versions
    resumed.restore(kept)
    with resumed:
        assert resumed.generate(prompts, count=2, seed=4) == expected
    assert engine_metrics() == {name: each for name, each in whole.items() if name != "sampled_iteration"}


@pytest.mark.parametrize("is_served", [False, True])
def test_no_memory_is_kept_for_a_copy_where_servers_sample(
    is_served: bool, pipeline: Any, servers: list[FakeServer], tmp_path: Path
) -> None:
    job = served(pipeline, servers, tmp_path)
    if not is_served:
        work: Any = job.work
        job = job.model_copy(update={"work": work.model_copy(update={"rollout": Ahead(ahead=1)})})
    policy, _, _ = parts(pipeline)
    models = load_rollout_models(
        job, cast(Any, job.work), policy, role="init", with_reference=False, with_scorer=True
    )
    assert models.sampler is not None and models.ahead
    assert models.sampler.beside_training == (not is_served)


def test_who_leaves_waits_for_no_server_that_hangs(pipeline: Any, servers: list[FakeServer]) -> None:
    policy, codec, prompts = parts(pipeline)
    for server in servers:
        server.faults.hanging = set(range(100))
    ahead = AheadEngine(engine_of(policy, codec, servers))
    begun = time.monotonic()
    with ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        ahead.begin(prompts, count=2, seed=4)
        while not any(server.seen.seeds for server in servers):
            time.sleep(0.01)
    assert time.monotonic() - begun < 60, "a request may take 600 s"
    assert not [each for each in threading.enumerate() if each.name == "sampling ahead"]


def test_a_server_that_loses_the_weights_is_left_out(pipeline: Any, servers: list[FakeServer]) -> None:
    """A server that starts again has other weights, and the other server samples what is missing. If no server has the
    weights, the stage ends for now."""
    policy, codec, prompts = parts(pipeline)
    with AheadEngine(engine_of(policy, codec, servers)) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        expected = by_hand(policy, codec, prompts, count=2, seed=4)
        servers[0].faults.stops_at = len(servers[0].seen.seeds)
        ahead.begin(prompts, count=2, seed=4)
        moved(policy, by=0.05)
        assert_alike(ahead.generate(prompts, count=2, seed=4), expected)
        servers[0].start()
        servers[0].faults.stops_at = None
        ahead.take_weights(policy.causal_lm.named_parameters())
        for server in servers:
            server.faults.stops_at = len(server.seen.seeds)
        ahead.begin(prompts, count=2, seed=5)
        with pytest.raises(EngineUnavailable, match="no server of rollout.url has the weights any longer"):
            ahead.generate(prompts, count=2, seed=5)


def test_a_server_to_which_another_gives_weights_meanwhile_samples_nothing(
    pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec, servers)
    hold = engine.hold

    def overtaken() -> object:
        origin = hold()
        servers[0].overtake()
        return origin

    monkeypatch.setattr(engine, "hold", overtaken)
    with AheadEngine(engine) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        expected = by_hand(policy, codec, prompts, count=2, seed=4)
        ahead.begin(prompts, count=2, seed=4)
        moved(policy, by=0.05)
        assert_alike(ahead.generate(prompts, count=2, seed=4), expected)
        assert servers[1].seen.seeds
        assert not servers[0].seen.seeds


def replaced_by_hand(server: FakeServer, *, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server's weights replaced under the same version after so many more requests."""
    drawn, asked = server.drawn, len(server.seen.seeds)

    def replacing(body: dict[str, Any]) -> Any:
        found = drawn(body)
        if found[0] == asked + after:
            version = server.version
            server.overtake()
            server.version = version
        return found

    monkeypatch.setattr(server, "drawn", replacing)


def test_weights_that_are_pushed_by_hand_while_servers_sample_end_the_stage(
    pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the version of the policy's weights. They end the stage also beside the training, where the next update
    would have replaced them unseen."""
    policy, codec, prompts = parts(pipeline)
    not_used = "does not hold the policy's weights.*what was sampled meanwhile is not used"
    with AheadEngine(engine_of(policy, codec, servers)) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        with monkeypatch.context() as patched:
            replaced_by_hand(servers[1], after=2, monkeypatch=patched)
            ahead.begin(prompts, count=2, seed=4)
            moved(policy, by=0.05)
            ahead.take_weights(policy.causal_lm.named_parameters())
            with pytest.raises(WeightsDiffer, match=not_used):
                ahead.tensors()
        ahead.begin(prompts, count=1, seed=5)
        ahead.tensors()
    engine = engine_of(policy, codec, servers)
    engine.take_weights(policy.causal_lm.named_parameters())
    replaced_by_hand(servers[0], after=2, monkeypatch=monkeypatch)
    with pytest.raises(WeightsDiffer, match=not_used):
        engine.generate(prompts, count=2, seed=4)


@pytest.mark.parametrize("is_validated", [False, True])
def test_time_in_which_servers_are_waited_for_is_none_of_another_phase(
    is_validated: bool, pipeline: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting counts as such from its first moment on, also where a validation has to wait for the rollout. Then the
    servers get weights, which is waiting too."""
    policy, codec, prompts = parts(pipeline)
    seconds = 0.4  # of each response: far more than anything else takes, also on a busy machine
    for server in servers:
        drawn = server.drawn
        monkeypatch.setattr(server, "drawn", lambda body, drawn=drawn: (time.sleep(seconds), drawn(body))[1])
    with AheadEngine(engine_of(policy, codec, servers, max_rows=1)) as ahead:
        ahead.take_weights(policy.causal_lm.named_parameters())
        of_process.begin()
        ahead.begin(prompts, count=2, seed=4)
        progress.phase("updating", 1, 2)
        moved(policy, by=0.05)
        ahead.take_weights(policy.causal_lm.named_parameters())
        if is_validated:
            with progress.within("validation"):
                ahead.generate(prompts[:1], count=1, seed=9)
        ahead.tensors()
        found = of_process.taken()
    assert found["seconds_waiting"] > 3.5 * seconds, "four responses one after the other"
    assert found["seconds_waiting"] > 0.6 * sum(found[f"seconds_{phase}"] for phase in PHASES) or is_validated
    assert found["seconds_updating"] < 3 * seconds
    assert (found["seconds_measuring"] > 0) == is_validated


@pytest.mark.slow
def test_a_stage_learns_from_responses_that_are_one_update_old(
    pipeline: Any, servers: list[FakeServer], tmp_path: Path
) -> None:
    """The first two rollouts come from the first policy, each other one from the policy before the last update."""
    job = served(pipeline, servers, tmp_path, iterations=4)
    run_stage(job)
    curves = curves_of(job)
    digests = [step["sampled_weights"] for step in curves]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert [step["sampled_iteration"] for step in curves] == [0, 0, 1, 2]
    assert [step["stale_responses"] for step in curves] == [0.0] * 4
    assert ["seconds_beside" in step for step in curves] == [False, True, True, True]
    assert [step["importance_weight"] == pytest.approx(1.0, abs=1e-4) for step in curves] == [
        True,
        False,
        False,
        False,
    ]
    given = [int(version.split("-")[1], 16) for version in servers[0].seen.versions if version != "updating"]
    assert [digest for digest in dict.fromkeys(given) if digest in digests] == list(dict.fromkeys(digests))


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_a_killed_stage_ends_with_the_same_bytes(
    step: int,
    pipeline: Any,
    servers: list[FakeServer],
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def job_in(folder: Path) -> StageJob:
        return served(pipeline, servers, folder, iterations=4, checkpoint_every=2)

    same_bytes_after_a_kill(
        run_stage, job_in, tmp_path, step=step, contents=contents, monkeypatch=monkeypatch
    )
    assert [step["sampled_iteration"] for step in curves_of(job_in(tmp_path / "cut"))] == [0, 0, 1, 2]

"""The estimate of vLLM's sampling time equals one hand-worked shape, keeps its bounds, and enters a recipe's estimate."""

from dataclasses import replace
from typing import Literal

import pytest

from vantage.estimates import engine_timing
from vantage.estimates.devices import Device
from vantage.estimates.engine_timing import on_ranks, sampled, seconds_of_engine, tokens_per_second
from vantage.estimates.fewer_gpus import faster_with_fewer
from vantage.estimates.layouts import Layout, memory_of
from vantage.estimates.model_shape import LLAMA, ModelShape
from vantage.estimates.timing import parts_of, seconds_of
from vantage.estimates.workload import Engine, Network, Pass, Sampling, Sequences, Workload
from vantage.tasks.rollout import remote_engine, running_vllm

SHAPE = ModelShape(
    family=LLAMA,
    hidden_size=1_000,
    num_layers=10,
    num_heads=10,
    num_kv_heads=2,
    head_dim=100,
    intermediate_size=3_000,
    vocab_size=10_000,
    num_positions=0,
    has_tied_head=False,
    counted_weights=134_000_000,
)
"""A layer has 1000·(2·1000 + 2·200 + 3·3000) = 11.4 million weights that multiply, all ten 114 million, and the head 10 million. A token's
cache has 2·10·200 numbers: 8,000 bytes in bfloat16."""
DEVICE = Device(
    name="round",
    memory=1e9,
    float32=1e11,
    bfloat16=1e12,
    bandwidth=1e11,
    link=1e10,
    network=1e9,
    source="made up",
    matmul_share=0.5,
    bandwidth_share=0.5,
)
SAMPLING = Sampling(
    role="policy", times=3, count=100, at_once=100, prompt=100, response=50, steps=80, longest=200
)
SERVERS = Engine(place="servers", count=2, max_rows=8)
PROCESS = Engine(place="process", count=1, max_rows=None)


def workload(engine: Engine, *, is_trained: bool = True, adapters: int = 0) -> Workload:
    network = Network(role="policy", shape=SHAPE, is_trained=is_trained, adapter_weights=adapters)
    return Workload(
        networks=(network,),
        passes=(),
        samplings=(SAMPLING,),
        is_bfloat16=True,
        at_once=1,
        recipe_at_once=1,
        counts={},
        basis=(),
        engine=engine,
    )


def test_two_servers_by_hand() -> None:
    """Each server has 50 responses and 8 rows, so it takes 50·50/8 = 312.5 passes. A pass reads 268 MB of weights and
    8·125 tokens of 8,000 bytes at 50 GB/s in 5.52 ms, longer than the 4.05 ms that its 8·233 + 160 MFLOP take at 500
    GFLOP/s. The prompts are 5,000 tokens of 232 MFLOP."""
    found = sampled(SAMPLING, workload(SERVERS), SERVERS, DEVICE)
    assert (found.gpus, found.rows, found.waking) == (1, 8, 0)
    assert found.decode == pytest.approx(312.5 * (276e6 / 5e10 + 2e-3))
    assert found.prefill == pytest.approx(5_000 * 232e6 / 5e11)
    sampling, sending = seconds_of_engine(workload(SERVERS), DEVICE)
    assert sampling == pytest.approx(3 * (found.decode + found.prefill))
    assert sending == pytest.approx(3 * 2 * 268e6 / 2e9), "written, and read by both at once"
    assert tokens_per_second(workload(SERVERS), DEVICE) == pytest.approx(15_000 / sampling)


def test_an_engine_in_the_process_whose_weights_need_two_gpus_by_hand() -> None:
    """The weights of 268 MB are more than four fifths of 300 MB. Two GPUs have room for 276 rows of 150 tokens, so all
    100 begin at once. They take 80 passes, as many as the longest response has tokens, with 62.5 open rows on average.
    A pass is bound by its 15.8 GFLOP, which take 15.8 ms on both GPUs."""
    found = sampled(SAMPLING, workload(PROCESS), PROCESS, DEVICE)
    assert (found.gpus, found.rows) == (2, 62.5)
    flops = 62.5 * (233e6 + 20e6)
    sums = 2 * 10 * (1e-5 + 2 * 0.5 * 62.5 * 2 * 1_000 / 1e10)
    assert found.decode == pytest.approx(80 * (flops / 2 / 5e11 + 2e-3 + sums))
    assert found.waking == pytest.approx(2 * 268e6 / 25e9)
    assert seconds_of_engine(workload(PROCESS), DEVICE)[1] == 0


@pytest.mark.parametrize(("strategy", "gathered"), [("ddp", 0.0), ("fsdp2", 0.5 * 268e6 / 1e10)])
def test_each_of_two_ranks_has_an_engine_in_its_process_by_hand(
    strategy: Literal["ddp", "fsdp2"], gathered: float
) -> None:
    """Each samples 50 responses at once in 80 passes, with 31.25 open rows. A rank gathers the other's half of the weights over a link of
    10 GB/s, for each of three rollouts."""
    layout = Layout(2, 1, strategy)
    found = on_ranks(workload(PROCESS), world=layout.world, is_sharded=layout.is_sharded)
    assert found.engine is not None
    assert sampled(SAMPLING, found, found.engine, DEVICE).rows == 31.25
    sampling, sending = seconds_of_engine(found, DEVICE)
    assert sending == pytest.approx(3 * gathered)
    assert parts_of(workload(PROCESS), layout, DEVICE).sampling == pytest.approx(sampling + sending)
    assert on_ranks(workload(SERVERS), world=2, is_sharded=True) == workload(SERVERS)


def test_memory_bounds_the_rows() -> None:
    """920 MB less 268 MB of weights have room for 543 rows of 1.2 MB; of 2,000 responses 543 are open."""
    many = replace(SAMPLING, count=2_000)
    one = Engine(place="servers", count=1, max_rows=4_096)
    assert sampled(many, workload(one), one, DEVICE).rows == pytest.approx(543)


@pytest.mark.parametrize(
    ("given", "memory", "expected"),
    [
        (1, 1e9, 1),
        (4, 1e9, 4),
        pytest.param(1, 2e8, 2, id="one GPU has room for 147 MB of weights beside the cache, two for 294"),
        pytest.param(3, 6e7, 12, id="three have room for 132 MB, six for 265, and twelve for 530"),
    ],
)
def test_a_server_has_the_gpus_that_it_was_given_or_needs_more(
    given: int, memory: float, expected: int
) -> None:
    engine = replace(SERVERS, tensor_parallel=given)
    found = sampled(SAMPLING, workload(engine), engine, replace(DEVICE, memory=memory))
    assert found.gpus == expected
    assert engine.own_gpus == 2 * given
    assert replace(PROCESS, tensor_parallel=given).own_gpus == 0


@pytest.mark.parametrize(
    ("is_trained", "adapters", "expected"),
    [
        pytest.param(True, 0, 3 * 0.268, id="each rollout of a policy that trains"),
        pytest.param(False, 0, 0.268, id="a fixed policy once"),
        pytest.param(True, 1_000_000, 3 * 0.004, id="adapters alone, in float32"),
    ],
)
def test_weights_are_sent_when_they_have_changed(is_trained: bool, adapters: int, expected: float) -> None:
    found = workload(SERVERS, is_trained=is_trained, adapters=adapters)
    assert seconds_of_engine(found, DEVICE)[1] == pytest.approx(expected)
    validated = replace(found, samplings=(SAMPLING, replace(SAMPLING, times=2)))
    assert seconds_of_engine(validated, DEVICE)[1] == pytest.approx(expected), "validation has the same"


def with_training(engine: Engine, count: float) -> Workload:
    sequences = Sequences(count=count, at_once=8, tokens=150, longest=200)
    return replace(
        workload(engine),
        samplings=(replace(SAMPLING, is_rollout=True),),
        passes=(Pass(role="policy", does="train", times=10, sequences=sequences, in_update=True),),
    )


@pytest.mark.parametrize(("count", "is_hidden"), [(1, False), (4_096, True)])
def test_beside_an_update_the_longer_of_both_counts(count: float, is_hidden: bool) -> None:
    """The first of three rollouts is sampled before the first update, and the last update has no rollout beside it."""
    layout = Layout(1)
    before, beside = (with_training(replace(SERVERS, is_beside=ahead), count) for ahead in (False, True))
    sampling, sending = seconds_of_engine(before, DEVICE)
    training = seconds_of(before, layout, DEVICE) - sampling - sending
    assert training > 0
    rollout, update = sampling / 3, training / 3
    assert (update > rollout) == is_hidden
    expected = sending + rollout + 2 * max(rollout, update) + update
    assert seconds_of(beside, layout, DEVICE) == pytest.approx(expected)


def test_what_comes_before_or_after_an_update_is_added_to_it() -> None:
    """Passes over a rollout and a validation are beside nothing."""
    layout = Layout(1)
    one = with_training(replace(SERVERS, is_beside=True), 1)
    scoring = replace(one.passes[0], does="score", times=3, in_update=False)
    validation = replace(SAMPLING, times=2)
    more = replace(one, passes=(*one.passes, scoring), samplings=(*one.samplings, validation))
    alone = replace(workload(SERVERS), passes=(scoring,), samplings=())
    once = sampled(validation, one, SERVERS, DEVICE)
    added = seconds_of(alone, layout, DEVICE) + 2 * (once.prefill + once.decode)
    assert seconds_of(more, layout, DEVICE) == pytest.approx(seconds_of(one, layout, DEVICE) + added)


def test_more_gpus_that_train_do_not_sample_faster_and_a_slow_link_is_named_as_the_reason() -> None:
    slow = replace(DEVICE, network=1e7, link=1e7, memory=1e10)
    many = with_training(SERVERS, 8)
    assert parts_of(many, Layout(2, 1, "ddp"), slow).sampling == parts_of(many, Layout(1), slow).sampling
    faster = faster_with_fewer(many, Layout(8, 1, "ddp"), slow)
    assert faster is not None and faster.layout == Layout(1)
    assert "sums of gradients" in faster.reason


def test_servers_take_no_memory_of_the_ranks_and_the_process_shares_its_gpu() -> None:
    assert memory_of(workload(SERVERS), Layout(1), DEVICE).kv_cache == 0
    assert memory_of(workload(PROCESS), Layout(1), DEVICE).kv_cache == pytest.approx(0.3e9)


def test_the_constants_are_those_of_the_engines() -> None:
    assert engine_timing.SHARE_IN_PROCESS == running_vllm.GPU_MEMORY_SHARE
    assert engine_timing.MOST_ROWS == remote_engine.AT_ONCE

"""Layouts: sharding as ZeRO published it, and the fewest GPUs for a model of 7 billion weights by hand."""

from dataclasses import replace

import pytest

from tests.estimates.test_flops import LLAMA_7B
from vantage.estimates.devices import GPUS
from vantage.estimates.layouts import (
    Layout,
    fits,
    fitted,
    largest_microbatch,
    layouts,
    memory_of,
    smallest_layout,
    with_microbatch,
    with_sampled_rows,
)
from vantage.estimates.memory import CHUNK_LOGITS, CHUNK_LOGITS_OF_GPU
from vantage.estimates.timing import flops_of, seconds_of
from vantage.estimates.workload import Network, Pass, Sampling, Sequences, Workload

H100, A100 = GPUS["h100"], GPUS["a100"]


def training(*, tokens: float = 512, rows: int = 8, is_bfloat16: bool = False, weights: int = 0) -> Workload:
    """One optimiser step of a language model on ``rows`` sequences."""
    shape = replace(LLAMA_7B, counted_weights=weights, has_tied_head=True) if weights else LLAMA_7B
    sequences = Sequences(count=rows, at_once=rows, tokens=tokens, longest=tokens, logit_tokens=tokens)
    return Workload(
        networks=(Network(role="policy", shape=shape, is_trained=True),),
        passes=(Pass(role="policy", does="train", times=1, sequences=sequences),),
        samplings=(),
        is_bfloat16=is_bfloat16,
        at_once=rows,
        recipe_at_once=rows,
        counts={},
        basis=(),
    )


def sampling(*, rows: int = 1) -> Workload:
    """``rows`` responses of 256 tokens in bfloat16, to prompts of 256."""
    policy = Network(role="policy", shape=LLAMA_7B)
    drawn = Sampling(
        role="policy", times=1, count=rows, at_once=rows, prompt=256, response=256, steps=256, longest=512
    )
    return replace(training(is_bfloat16=True), networks=(policy,), passes=(), samplings=(drawn,))


def test_sharding_is_that_of_zero() -> None:
    # arXiv 1910.02054, figure 1: of 120 GB, 64 GPUs hold 1.9 GB each with all three parts sharded
    memory = memory_of(training(weights=7_500_000_000), Layout(8, 8, "fsdp2"), H100)
    assert memory.weights + memory.optimizer + memory.gradients == pytest.approx(1.9e9, rel=0.02)
    whole = memory_of(training(weights=7_500_000_000), Layout(8, 8, "ddp"), H100)
    assert whole.weights + whole.optimizer + whole.gradients == 120e9


def test_llama_7b_is_trained_on_two_gpus_of_80_gb() -> None:
    # 16 bytes · 6.74 billion = 107.8 GB: more than 72 (80 less the reserve) on one, 53.9 on each of two
    smallest = smallest_layout(training(rows=2), H100)
    assert smallest is not None and smallest[0] == Layout(2, 1, "fsdp2")
    assert smallest_layout(training(rows=2), GPUS["h200"]) is not None
    assert not fits(training(rows=2), Layout(1), H100)
    assert not fits(training(rows=2), Layout(2, 1, "ddp"), H100)


def test_a_microbatch_is_halved_until_it_fits() -> None:
    # a layer of one token: 65,536 + 4 · 68,608 bytes; 32 layers, 512 tokens: 5.6 GB a row, beside 53.9 GB
    workload = training(rows=64)
    layout = Layout(2, 1, "fsdp2")
    size = largest_microbatch(workload, layout, H100)
    assert size is not None and size < 64
    assert not fits(with_microbatch(workload, 2 * size), layout, H100)
    assert fits(with_microbatch(workload, size), layout, H100)
    assert largest_microbatch(workload, Layout(1), H100) is None, "the weights alone do not fit"


def test_responses_are_halved_until_they_fit_whatever_a_microbatch_is() -> None:
    # Beside 27 GB of weights in float32 and their copy in bfloat16, 512 positions of the cache take 0.27 GB a response
    drawn = sampling(rows=1000)
    shown = fitted(drawn, 4, Layout(1), H100)
    [rows] = [each.at_once for each in shown.samplings]
    assert 4 < rows < 1000
    assert fits(with_sampled_rows(drawn, rows), Layout(1), H100)
    assert not fits(with_sampled_rows(drawn, 2 * rows), Layout(1), H100)


def test_a_microbatch_is_that_of_each_rank() -> None:
    """`microbatch_size` bounds the rows of a rank's pass, so that more ranks make fewer passes and not smaller ones."""
    workload = with_microbatch(training(rows=64), 4)
    one, eight = (memory_of(workload, each, H100).activations for each in (Layout(1), Layout(8, 1, "ddp")))
    assert one == eight
    of_many = memory_of(workload, Layout(8, 4, "ddp"), H100).activations
    assert of_many == pytest.approx(one / 2, rel=0.01), "64 rows of 32 ranks are two of each"


def test_more_gpus_never_need_more_memory() -> None:
    peaks = [memory_of(training(rows=1024), each, H100).peak for each in layouts() if each.is_sharded]
    assert peaks == sorted(peaks, reverse=True)


def test_on_a_cpu_what_was_freed_is_not_given_back() -> None:
    cpu = replace(H100, is_cpu=True)
    both = replace(training(), samplings=sampling().samplings)
    gpu, host = memory_of(both, Layout(1), H100), memory_of(both, Layout(1), cpu)
    fixed = gpu.weights + gpu.optimizer
    assert gpu.peak == fixed + gpu.gradients + gpu.activations, "sampling takes less than that"
    logits = (CHUNK_LOGITS_OF_GPU - CHUNK_LOGITS) * 4 * 3
    assert host.activations == gpu.activations - logits
    assert host.peak == gpu.peak + gpu.kv_cache - logits


def test_what_fits_nowhere_is_said() -> None:
    assert smallest_layout(training(weights=10**15), H100) is None


def test_training_is_bound_by_compute() -> None:
    workload = training(rows=64, tokens=2048, is_bfloat16=True)
    step = LLAMA_7B.weights * 40 / (0.7 * 3350e9)
    assert seconds_of(workload, Layout(1), H100) == pytest.approx(
        flops_of(workload) / (0.4 * 989.4e12) + step
    )


def test_decoding_one_response_is_bound_by_the_bandwidth() -> None:
    # a token reads 2 · 6.74e9 bytes at 0.7 · 2039e9 bytes/s: 9.44 ms, 256 times; the cache adds about 3 %
    seconds = seconds_of(sampling(), Layout(1), A100)
    assert seconds == pytest.approx(256 * 9.44e-3, rel=0.06)
    assert seconds > 256 * 9.44e-3
    assert seconds_of(sampling(), Layout(1), H100) < seconds, "the weights are read faster"


def test_eight_gpus_train_eight_times_as_fast_where_nothing_is_waited_for() -> None:
    workload = replace(training(rows=64, tokens=2048), is_bfloat16=True)
    step = LLAMA_7B.weights * 40 / (0.7 * 3350e9)
    one, eight = (seconds_of(workload, each, H100) - step for each in (Layout(1), Layout(8, 1, "ddp")))
    assert one / eight == pytest.approx(8)


def test_a_slow_network_is_waited_for() -> None:
    # one row a GPU: two thirds of a second of computing, and 2 · 15/16 · 27 GB of gradients at 50 GB/s: 1.01 s
    workload = training(rows=16, tokens=64, is_bfloat16=True)
    step = LLAMA_7B.weights * 40 / (0.7 * 3350e9)
    seconds = seconds_of(workload, Layout(8, 2, "ddp"), H100) - step
    assert seconds == pytest.approx(2 * 15 / 16 * 4 * LLAMA_7B.weights / 50e9)


def test_sharded_sampling_gathers_the_weights_for_every_token() -> None:
    # 7/8 of 27 GB at 450 GB/s are 52 ms, five times what a whole copy takes to be read
    gathered = 7 / 8 * 4 * LLAMA_7B.weights / H100.link
    seconds = seconds_of(sampling(), Layout(8, 1, "fsdp2"), H100)
    assert seconds == pytest.approx((256 + 1) * gathered)
    assert seconds_of(sampling(), Layout(8, 1, "ddp"), H100) < seconds / 5

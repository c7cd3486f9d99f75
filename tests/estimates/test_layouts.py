"""Layouts shard as ZeRO published it, and the fewest GPUs for a model of 7 billion weights equal those worked out by hand."""

from dataclasses import replace

import pytest

from tests.estimates.test_flops import LLAMA_7B
from vantage.estimates.devices import GPUS
from vantage.estimates.fewer_gpus import faster_with_fewer, reason_of
from vantage.estimates.layouts import (
    Layout,
    fits,
    fitted,
    keeps_gathered,
    largest_microbatch,
    layouts,
    memory_of,
    smallest_layout,
    with_microbatch,
    with_sampled_rows,
)
from vantage.estimates.memory import CHUNK_LOGITS, CHUNK_LOGITS_OF_GPU
from vantage.estimates.timing import flops_of, parts_of, seconds_of
from vantage.estimates.workload import Network, Pass, Sampling, Sequences, Workload
from vantage.models.gathered_weights import suffices

H100, A100 = GPUS["h100"], GPUS["a100"]


def training(*, tokens: float = 512, rows: int = 8, is_bfloat16: bool = False, weights: int = 0) -> Workload:
    """Return one optimiser step of a language model on ``rows`` sequences."""
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
    """Return the sampling of ``rows`` responses of 256 tokens in bfloat16, to prompts of 256."""
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
    # one row a GPU: 24 ms of starting 32 layers, 16 of them in the backward pass, which hides as much of sending
    # 2 · 15/16 · 27 GB of gradients at 50 GB/s: 1.01 s
    workload = training(rows=16, tokens=64, is_bfloat16=True)
    step = LLAMA_7B.weights * 40 / (0.7 * 3350e9)
    seconds = seconds_of(workload, Layout(8, 2, "ddp"), H100) - step
    assert seconds == pytest.approx(2 * 15 / 16 * 4 * LLAMA_7B.weights / 50e9 + 0.008)


def test_gradients_of_ddp_are_sent_beside_the_last_backward_pass_alone() -> None:
    # eight micro-batches of one row: the computation of the last one is 24 ms
    workload = with_microbatch(training(rows=128, tokens=64, is_bfloat16=True), 1)
    parts = parts_of(workload, Layout(8, 2, "ddp"), H100)
    assert parts.communicating == pytest.approx(2 * 15 / 16 * 4 * LLAMA_7B.weights / 50e9 - 0.016)
    assert parts.gathering == 0


def test_sharded_training_gathers_in_bfloat16_and_adds_up_in_float32() -> None:
    # each of two micro-batches gathers 13.5 GB twice and adds up 27 GB, of which 15/16 are sent at 50 GB/s
    workload = with_microbatch(training(rows=32, tokens=64), 1)
    for is_bfloat16, bytes_of_a_weight in ((False, 12), (True, 8)):
        parts = parts_of(replace(workload, is_bfloat16=is_bfloat16), Layout(8, 2, "fsdp2"), H100)
        sent = 2 * 15 / 16 * bytes_of_a_weight * LLAMA_7B.weights / 50e9
        step = LLAMA_7B.weights * 40 / 16 / (0.7 * 3350e9)
        assert parts.communicating + parts.computing - step == pytest.approx(sent)


def test_gathered_weights_stay_for_a_rollout_where_they_fit() -> None:
    # 13.5 GB twice, beside 1.7 GB that stay: gathered once, 7/8 of it at 450 GB/s
    layout = Layout(8, 1, "fsdp2")
    whole = 2 * LLAMA_7B.weights
    assert keeps_gathered(sampling().networks[0], sampling(), layout, H100)
    kept = parts_of(sampling(), layout, H100)
    prefill = 256 * 2 * LLAMA_7B.trunk_weights / (0.4 * 989.4e12)
    assert kept.gathering == pytest.approx(7 / 8 * whole / H100.link - prefill, rel=0.05)
    assert kept.computing == pytest.approx(seconds_of(sampling(), Layout(8, 1, "ddp"), H100))
    peaks = [memory_of(sampling(), layout, device).kv_cache for device in (H100, GPUS["4090"])]
    assert peaks[0] - peaks[1] > 0.8 * whole, "a 4090 holds two layers at a time"


def test_sharded_sampling_gathers_the_weights_for_every_token_where_they_do_not_fit() -> None:
    # 24 GB, of which 2.4 stay free and 1.7 are weights: no room for twice 13.5 GB; 7/8 of 13.5 GB at the link's rate, 257 times
    device = GPUS["4090"]
    layout = Layout(8, 1, "fsdp2")
    assert not keeps_gathered(sampling().networks[0], sampling(), layout, device)
    gathered = 7 / 8 * 2 * LLAMA_7B.weights / device.link
    assert seconds_of(sampling(), layout, device) == pytest.approx((256 + 1) * gathered)


def test_the_rule_of_kept_weights_is_that_of_sampling() -> None:
    network, layout = sampling().networks[0], Layout(8, 1, "fsdp2")
    own, whole = 2 * LLAMA_7B.weights / 8, 2 * LLAMA_7B.weights
    for memory in (28e9, 31e9, 32e9, 33e9, 40e9):  # 27 GB, 1.7 GB and a tenth
        free = int(memory - own / 0.9)  # a tenth of all, not of what is free
        expected = suffices(whole, 0, free)
        assert keeps_gathered(network, sampling(), layout, replace(H100, memory=memory)) == expected


def test_the_base_of_adapters_is_cut_but_not_shared() -> None:
    policy = Network(role="policy", shape=LLAMA_7B, is_trained=True, adapter_weights=10**7)
    reference = Network(role="reference", shape=LLAMA_7B, shares_base=True)
    both = replace(training(), networks=(policy, reference))
    assert memory_of(both, Layout(8, 1, "ddp"), H100).weights == 4 * (LLAMA_7B.weights + 10**7)
    assert memory_of(both, Layout(8, 1, "fsdp2"), H100).weights == 4 * (2 * LLAMA_7B.weights + 10**7) / 8
    both = replace(both, is_bfloat16=True)
    # what is frozen is held as it is gathered: two bytes
    assert memory_of(both, Layout(8, 1, "fsdp2"), H100).weights == (4 * LLAMA_7B.weights + 4 * 10**7) / 8


def test_more_gpus_that_are_slower_have_a_reason() -> None:
    one_row = training(rows=16, tokens=64, is_bfloat16=True, weights=10**9)
    found = faster_with_fewer(one_row, Layout(8, 2, "ddp"), H100)
    assert found is not None and found.layout.nodes == 1
    assert found.seconds < seconds_of(one_row, Layout(8, 2, "ddp"), H100)
    assert "waiting for the sums of gradients" in found.reason and "(50 GB/s between nodes)" in found.reason
    shared = faster_with_fewer(one_row, Layout(8, 2, "fsdp2"), H100)
    assert (
        shared is not None and "weights and gradients of the other GPUs in each micro-batch" in shared.reason
    )
    drawn = sampling()
    assert "each sampled token gathers again" in reason_of(drawn, Layout(8, 1, "fsdp2"), GPUS["4090"])
    assert (
        faster_with_fewer(training(rows=1024, tokens=2048, weights=10**9), Layout(8, 1, "ddp"), H100) is None
    )
    assert faster_with_fewer(one_row, Layout(1), H100) is None
    too_large = training(rows=16, tokens=64, is_bfloat16=True, weights=10**12)
    assert faster_with_fewer(too_large, Layout(8, 2, "ddp"), H100) is None, "it does not fit there"
    # shared weights are faster on as many GPUs, and those are no fewer
    in_parts, in_copies = (seconds_of(one_row, Layout(4, 1, each), H100) for each in ("fsdp2", "ddp"))
    assert in_parts < 0.9 * in_copies
    assert faster_with_fewer(one_row, Layout(4, 1, "ddp"), H100) is None


@pytest.mark.parametrize("is_in_4_bits", [False, True])
def test_a_base_in_4_bits_beneath_adapters_is_not_cut(is_in_4_bits: bool) -> None:
    """200 billion weights of 4.5 bits are too many for a GPU, and 4 bytes for eight."""
    shape = replace(LLAMA_7B, counted_weights=2 * 10**11, num_layers=950, has_tied_head=True)
    adapted = Network(
        role="policy", shape=shape, is_trained=True, adapter_weights=10**7, is_in_4_bits=is_in_4_bits
    )
    found = smallest_layout(replace(training(rows=1, tokens=8), networks=(adapted,)), H100)
    assert (found is None) == is_in_4_bits
    assert found is None or found[0].is_sharded

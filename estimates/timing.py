"""Estimate the seconds of a stage: compute-bound passes, and sampling that is bound by memory bandwidth.

A pass takes the longest of three times (the roofline; Williams et al. 2009): its FLOPs at the assumed rate, its bytes at
the assumed bandwidth, and the time in which Python starts its operations. A CPU does one after the other, so there the
three are added. Communication of fsdp2 is assumed to overlap with the computation, and ddp's sums of gradients with
the backward pass of the last micro-batch. Not counted: loading weights and data, the visits of offloaded networks,
checkpoints,
verifiers, and the start of the process.
"""

from typing import NamedTuple

from vantage.estimates.devices import FORWARD_HOST_SECONDS, TRAINING_HOST_SECONDS, Device
from vantage.estimates.engine_timing import on_ranks, seconds_beside, seconds_of_engine
from vantage.estimates.flops import head_flops, scoring_flops, training_flops, trunk_flops
from vantage.estimates.layouts import Layout, keeps_gathered, width_of
from vantage.estimates.memory import FLOAT32, decoding_bytes, kv_cache_bytes, layer_activation_bytes
from vantage.estimates.workload import Network, Pass, Sampling, Workload

SCORING_TRAFFIC = 2
"""Transfers of each tensor of a layer in a pass without gradients: the tensor is written and read once."""
TRAINING_TRAFFIC = 5
"""Transfers in a training pass: the backward pass also reads the tensor, writes its gradient, and reads the gradient."""
BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a training pass: it has two products for each product of the forward pass."""
STEP_BYTES = 40
"""Bytes per weight in an optimiser step: the norm of its gradient (4), its clipping (8), and AdamW (28), which reads the
weight, its gradient and its moments, and writes all but the gradient."""


def seconds_of(workload: Workload, layout: Layout, device: Device) -> float:
    """Return the wall-clock seconds of the stage's computation."""
    return sum(parts_of(workload, layout, device))


class Parts(NamedTuple):
    """Seconds of a stage."""

    computing: float
    gathering: float
    """Waiting for weights during sampling."""
    communicating: float
    """Waiting for weights and gradients in other passes."""
    sampling: float = 0.0
    """vLLM's sampling, without the time that overlaps with updates."""


def parts_of(workload: Workload, layout: Layout, device: Device) -> Parts:
    """Return the seconds of computation, and the seconds of waiting for other GPUs."""
    passes = [(each.times, _pass_seconds(each, workload, layout, device)) for each in workload.passes]
    if workload.engine is not None:
        placed = on_ranks(workload, world=layout.world, is_sharded=layout.is_sharded)
        pairs = zip(workload.passes, passes, strict=True)
        update = sum(times * sum(seconds) for each, (times, seconds) in pairs if each.in_update)
        return Parts(
            computing=sum(times * computed for times, (computed, _) in passes),
            gathering=0.0,
            communicating=sum(times * waiting for times, (_, waiting) in passes),
            sampling=sum(seconds_of_engine(placed, device)) - seconds_beside(placed, device, update=update),
        )
    drawn = [(each.times, _sampling_seconds(each, workload, layout, device)) for each in workload.samplings]
    return Parts(
        computing=sum(times * computed for times, (computed, _) in [*passes, *drawn]),
        gathering=sum(times * waiting for times, (_, waiting) in drawn),
        communicating=sum(times * waiting for times, (_, waiting) in passes),
    )


def flops_of(workload: Workload) -> float:
    """Return the FLOPs of the whole stage."""
    passes = sum(each.times * _pass_flops(each, workload) for each in workload.passes)
    return passes + sum(each.times * _sampling_flops(each, workload) for each in workload.samplings)


def _pass_flops(each: Pass, workload: Workload) -> float:
    sequences = each.sequences
    network = workload.network(each.role)
    tokens, logit_tokens = sequences.count * sequences.tokens, sequences.count * sequences.logit_tokens
    if each.does == "score":
        return scoring_flops(
            network.shape, tokens=tokens, context=sequences.tokens, logit_tokens=logit_tokens
        )
    return training_flops(
        network.shape,
        tokens=tokens,
        context=sequences.tokens,
        logit_tokens=logit_tokens,
        adapter_weights=network.adapter_weights,
        is_checkpointed=workload.is_checkpointed,
    )


def _pass_seconds(each: Pass, workload: Workload, layout: Layout, device: Device) -> tuple[float, float]:
    """Return the seconds of the computation, and of waiting for other GPUs."""
    network, sequences = workload.network(each.role), each.sequences
    trains = each.does == "train"
    is_bfloat16 = network.is_bfloat16 or (workload.is_bfloat16 and each.has_precision)
    rows = sequences.count / layout.world
    micro = max(1.0, -(-rows // sequences.rows_at_once(layout.world)))
    layer = layer_activation_bytes(network.shape, is_bfloat16=is_bfloat16) * network.shape.num_layers
    traffic = rows * sequences.tokens * layer * (TRAINING_TRAFFIC if trains else SCORING_TRAFFIC)
    traffic += micro * network.weights * width_of(network, is_bfloat16=is_bfloat16) * (2 if trains else 1)
    host_seconds = TRAINING_HOST_SECONDS if trains else FORWARD_HOST_SECONDS
    computed = _longest(
        device,
        flops=_pass_flops(each, workload) / layout.world,
        moved=traffic,
        host=micro * network.shape.num_layers * host_seconds,
        is_bfloat16=is_bfloat16,
    )
    sent = _communication(network, micro, layout, device, trains=trains, is_bfloat16=is_bfloat16)
    beside = computed if layout.is_sharded else computed / micro * BACKWARD_SHARE
    waiting = max(0.0, sent - beside)
    if trains and each.takes_step:
        parts = layout.world if layout.is_sharded else 1
        computed += network.trained_weights * STEP_BYTES / parts / device.bytes_per_second
    return computed, waiting


def _sampling_flops(each: Sampling, workload: Workload) -> float:
    shape = workload.network(each.role).shape
    prefill = trunk_flops(shape, tokens=each.count * each.prompt, context=each.prompt)
    context = each.prompt + each.response / 2
    decode = trunk_flops(shape, tokens=each.count * each.response, context=context)
    return prefill + decode + head_flops(shape, tokens=each.count * each.response)


def _sampling_seconds(
    each: Sampling, workload: Workload, layout: Layout, device: Device
) -> tuple[float, float]:
    """Return the seconds of sampling and of waiting for weights: one prefill, then one pass per token, which reads the weights
    and the cache of all open rows."""
    network = workload.network(each.role)
    shape, is_bfloat16 = network.shape, workload.is_bfloat16
    rows = each.rows_at_once(layout.world)
    batches = max(1.0, -(-each.count // (layout.world * rows)))
    host = shape.num_layers * FORWARD_HOST_SECONDS
    width = width_of(network, is_bfloat16=is_bfloat16)
    prompt_tokens = rows * each.prompt
    layer = layer_activation_bytes(shape, is_bfloat16=is_bfloat16) * shape.num_layers
    prefill = _longest(
        device,
        flops=trunk_flops(shape, tokens=prompt_tokens, context=each.prompt),
        moved=network.weights * width + SCORING_TRAFFIC * prompt_tokens * layer,
        host=host,
        is_bfloat16=is_bfloat16,
    )
    open_rows = rows * each.response / each.steps
    context = each.prompt + each.response / 2
    cache = kv_cache_bytes(shape, tokens=open_rows * context, bytes_each=width)
    one_token = _longest(
        device,
        flops=trunk_flops(shape, tokens=open_rows, context=context) + head_flops(shape, tokens=open_rows),
        # the cache is copied whenever a token is appended to it: read, written, and read by attention
        moved=network.weights * width + 3 * cache + decoding_bytes(shape, rows=open_rows),
        host=host,
        is_bfloat16=is_bfloat16,
    )
    sent = _communication(network, 1, layout, device, trains=False, is_bfloat16=is_bfloat16)
    waiting = max(0.0, sent - prefill)
    if not keeps_gathered(network, workload, layout, device):  # fsdp2 gathers for every token
        waiting = batches * (waiting + each.steps * max(0.0, sent - one_token))
    return batches * (prefill + each.steps * one_token), waiting


def _longest(device: Device, *, flops: float, moved: float, host: float, is_bfloat16: bool) -> float:
    parts = (flops / device.flops(is_bfloat16=is_bfloat16), moved / device.bytes_per_second, host)
    return sum(parts) if device.is_cpu else max(parts)


def _communication(
    network: Network, micro: float, layout: Layout, device: Device, *, trains: bool, is_bfloat16: bool
) -> float:
    """Return the seconds of a ring: every GPU sends (w − 1)/w of the bytes to gather, and twice that share of the bytes
    to sum everywhere.

    fsdp2 gathers for each micro-batch, in training once forward and once backward, and sums gradients in float32.
    """
    if layout.world == 1:
        return 0.0
    rate = device.network if layout.nodes > 1 else device.link
    of_a_ring = (layout.world - 1) / layout.world
    gradients = network.trained_weights * FLOAT32 if trains else 0
    if not layout.is_sharded:
        return 2 * gradients * of_a_ring / rate
    gathered = network.weights * width_of(network, is_bfloat16=is_bfloat16) * (2 if trains else 1)
    return micro * (gathered + gradients) * of_a_ring / rate

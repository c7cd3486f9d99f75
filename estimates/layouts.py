"""Compute the memory of one GPU when a stage is spread over several, and the smallest layout in which the stage fits.

``ddp``: every GPU holds every whole network and computes a part of each minibatch. ``fsdp2``: weights, gradients and
optimiser state are split into as many parts as there are GPUs (ZeRO stage 3, arXiv 1910.02054 §3.1). A layer is
gathered while it computes, and the next layer is gathered meanwhile. During sampling, all layers stay gathered if
memory suffices; otherwise they are gathered for every token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vantage.estimates.devices import Device
from vantage.estimates.engine_timing import memory_of_engine
from vantage.estimates.engine_timing import width_of as width_of_engine
from vantage.estimates.memory import (
    BFLOAT16,
    CHUNK_LOGITS,
    CHUNK_LOGITS_OF_GPU,
    FLOAT32,
    NF4,
    decoding_bytes,
    gradient_bytes,
    kv_cache_bytes,
    optimizer_bytes,
    scoring_activation_bytes,
    training_activation_bytes,
    weight_bytes,
)
from vantage.estimates.workload import Network, Pass, Sampling, Workload

RESERVE = 0.1
"""Share of a GPU's memory that is left free: for the CUDA context, communication buffers, and blocks that the allocator
cannot join."""
GPUS_OF_A_NODE = (1, 2, 4, 8)
MOST_NODES = 128
LAYERS_GATHERED = 2
"""Number of layers that fsdp2 gathers at one time: the layer that computes, and the next one."""
TIMES_GATHERED = 2
"""Multiple of all gathered weights for which memory must suffice if they stay gathered during sampling, as in
``vantage.models.gathered_weights.suffices``."""


@dataclass(frozen=True)
class Layout:
    """Number of GPUs and nodes, and how the GPUs share the weights."""

    gpus: int
    """GPUs of each node."""
    nodes: int = 1
    strategy: Literal["single", "ddp", "fsdp2"] = "single"

    @property
    def world(self) -> int:
        """Number of GPUs on all nodes."""
        return self.gpus * self.nodes

    @property
    def is_sharded(self) -> bool:
        """Return whether a GPU holds only its part of the weights."""
        return self.strategy == "fsdp2"

    def __str__(self) -> str:
        """Return the layout as it is printed: ``2 × 8 fsdp2``."""
        size = f"{self.nodes} × {self.gpus}" if self.nodes > 1 else str(self.gpus)
        return size if self.strategy == "single" else f"{size} {self.strategy}"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one GPU, or of the process on a CPU. On a GPU ``peak`` is not their sum: activations, KV cache and
    gradients do not all exist at once."""

    weights: float
    optimizer: float
    gradients: float
    activations: float
    """The most bytes that one pass keeps, including its logits."""
    kv_cache: float
    """The most bytes during sampling, including those for drawing a token."""
    peak: float


def memory_of(workload: Workload, layout: Layout, device: Device) -> Memory:
    """Return the memory of one GPU, or of the process on a CPU."""
    parts = layout.world if layout.is_sharded else 1
    weights, optimizer = _lasting(workload, layout, device)
    gradients = sum(gradient_bytes(each.trained_weights) for each in workload.networks) / parts
    training, scoring = 0.0, 0.0
    for each in workload.passes:
        network = workload.network(each.role)
        extra = _gathered(network, workload, layout, trains=each.does == "train")
        extra += _held(network, workload, layout) if network.is_offloaded else 0
        held = _activations(each, workload, layout, device) + extra
        training = max(training, held if each.does == "train" else 0.0)
        scoring = max(scoring, held if each.does == "score" else 0.0)
    sampling = max((_sampling(each, workload, layout, device) for each in workload.samplings), default=0.0)
    step = _step_bytes(workload, device) / parts
    phases = (gradients + max(training, step) if training else 0.0, scoring, sampling)
    # PyTorch reuses a GPU's memory for the next phase; the C library keeps most of the memory that was freed in pieces
    together = sum(phases) if device.is_cpu else max(phases)
    return Memory(
        weights=weights,
        optimizer=optimizer,
        gradients=gradients,
        activations=max(training, scoring),
        kv_cache=sampling,
        peak=weights + optimizer + together,
    )


def fits(workload: Workload, layout: Layout, device: Device) -> bool:
    """Return whether the peak leaves the reserve free."""
    return memory_of(workload, layout, device).peak <= (1 - RESERVE) * device.memory


def with_microbatch(workload: Workload, size: int) -> Workload:
    """Return the workload with micro-batches of at most ``size`` rows of each rank; the number of responses at once
    stays."""
    share = min(1.0, size / workload.at_once)
    return replace(
        workload,
        at_once=min(size, workload.at_once),
        passes=tuple(
            replace(each, sequences=replace(each.sequences, at_once=max(1.0, each.sequences.at_once * share)))
            for each in workload.passes
        ),
    )


def with_sampled_rows(workload: Workload, rows: float) -> Workload:
    """Return the workload with at most ``rows`` responses sampled at once on each rank."""
    bounded = tuple(replace(each, at_once=min(each.at_once, rows)) for each in workload.samplings)
    return replace(workload, samplings=bounded)


def fitted(workload: Workload, size: int, layout: Layout, device: Device) -> Workload:
    """Return the workload with this micro-batch, and with the number of responses sampled at once, halved until they
    fit."""
    small = with_microbatch(workload, size)
    rows = max((each.rows_at_once(layout.world) for each in small.samplings), default=1.0)
    while rows > 1 and not fits(with_sampled_rows(small, rows), layout, device):
        rows = max(1, rows // 2)
    return with_sampled_rows(small, rows)


def largest_microbatch(workload: Workload, layout: Layout, device: Device) -> int | None:
    """Return the largest micro-batch that fits, by halving that of the recipe as the launcher does; None: one row does
    not fit."""
    size = workload.at_once
    while True:
        if fits(with_sampled_rows(with_microbatch(workload, size), 1), layout, device):
            return size
        if size <= 1:
            return None
        size = max(1, size // 2)


def smallest_layout(workload: Workload, device: Device) -> tuple[Layout, int] | None:
    """Return the layout of the fewest GPUs in which the stage fits, ddp before fsdp2, and its micro-batch; None: it is
    too large."""
    for layout in layouts():
        if layout.is_sharded and (workload.has_packed_base or workload.has_8_bit_states):
            continue
        size = largest_microbatch(workload, layout, device)
        if size is not None:
            return layout, size
    return None


def layouts() -> Iterator[Layout]:
    """Yield layouts from one GPU up; whole nodes of 8 beyond one node."""
    yield Layout(1)
    for gpus in GPUS_OF_A_NODE[1:]:
        yield Layout(gpus, 1, "ddp")
        yield Layout(gpus, 1, "fsdp2")
    nodes = 2
    while nodes <= MOST_NODES:
        yield Layout(GPUS_OF_A_NODE[-1], nodes, "ddp")
        yield Layout(GPUS_OF_A_NODE[-1], nodes, "fsdp2")
        nodes *= 2


def _trained(workload: Workload) -> list[Network]:
    return [network for network in workload.networks if network.is_trained]


def _lasting(workload: Workload, layout: Layout, device: Device) -> tuple[float, float]:
    """Return the bytes of weights and of optimisers' state, which a GPU holds all the time."""
    parts = layout.world if layout.is_sharded else 1
    here = [each for each in workload.networks if not each.is_offloaded]
    held = [(network, _held(network, workload, layout)) for network in here]
    stay = sum(size for network, size in held if not network.is_held_in_turn)
    in_turn = max((size for network, size in held if network.is_held_in_turn), default=0)
    in_host = workload.has_host_optimizer and not device.is_cpu
    trained = 0 if in_host else sum(each.trained_weights for each in workload.networks)
    optimizer = optimizer_bytes(trained, in_8_bits=workload.has_8_bit_states)
    return (stay + in_turn) / parts, optimizer / parts


def _held(network: Network, workload: Workload, layout: Layout) -> int:
    """Return the bytes of a network's weights on all GPUs that share them.

    Each sharded network has its own base. With bfloat16, frozen weights are then held in the type in which they are
    gathered.
    """
    shares = network.shares_base and not layout.is_sharded
    base = 0 if shares else network.weights
    narrow = 0 if shares or layout.is_sharded else network.weights_in_4_bits
    is_frozen = bool(network.adapter_weights) or not network.is_trained
    is_bfloat16 = network.is_bfloat16 or (layout.is_sharded and workload.is_bfloat16 and is_frozen)
    adapters = weight_bytes(network.adapter_weights) + weight_bytes(narrow, bytes_each=NF4)
    return adapters + weight_bytes(base - narrow, bytes_each=BFLOAT16 if is_bfloat16 else FLOAT32)


def _gathered(network: Network, workload: Workload, layout: Layout, *, trains: bool) -> float:
    """Return the bytes that a pass needs besides the held weights: autocast's copy, fsdp2's gathered layers, and the
    widest 4-bit matrix, which is dequantised for its product."""
    casts = workload.is_bfloat16 and not network.is_bfloat16
    if not layout.is_sharded:
        copies = (network.weights - network.weights_in_4_bits) * BFLOAT16 if casts else 0.0
        if not network.is_in_4_bits:
            return copies
        widest = network.shape.hidden_size * max(network.shape.intermediate_size, network.shape.query_width)
        return copies + widest * (BFLOAT16 if workload.is_bfloat16 else FLOAT32)
    whole = max(network.shape.layer_weights * LAYERS_GATHERED, network.shape.head_matrix)
    width = width_of(network, is_bfloat16=workload.is_bfloat16)
    # the gradient of one layer in the type of computation, and in float32 for sending if that type has fewer bits
    gradient = whole / LAYERS_GATHERED * (width + (FLOAT32 if width < FLOAT32 else 0)) if trains else 0.0
    return whole * width + gradient


def width_of(network: Network, *, is_bfloat16: bool) -> int:
    """Return the bytes of a weight in products and when fsdp2 gathers it; autocast keeps its copy for a whole pass or
    sampling."""
    return BFLOAT16 if is_bfloat16 or network.is_bfloat16 else FLOAT32


def keeps_gathered(network: Network, workload: Workload, layout: Layout, device: Device) -> bool:
    """Return whether weights that fsdp2 has gathered stay gathered from one sampled token to the next; a CPU's memory
    is not checked."""
    if not layout.is_sharded or device.is_cpu:
        return layout.is_sharded
    free = (1 - RESERVE) * device.memory - sum(_lasting(workload, layout, device))
    return TIMES_GATHERED * network.weights * width_of(network, is_bfloat16=workload.is_bfloat16) <= free


def _activations(each: Pass, workload: Workload, layout: Layout, device: Device) -> float:
    rows = each.sequences.rows_at_once(layout.world)
    network = workload.network(each.role)
    tokens, logit_tokens = rows * each.sequences.longest, rows * each.sequences.logit_tokens
    narrow = network.is_bfloat16 or (workload.is_bfloat16 and each.has_precision)
    chunk = CHUNK_LOGITS if device.is_cpu else CHUNK_LOGITS_OF_GPU
    if each.does == "score":
        return scoring_activation_bytes(
            network.shape,
            tokens=tokens,
            logit_tokens=logit_tokens,
            is_bfloat16=narrow,
            chunk_logits=chunk,
        )
    return training_activation_bytes(
        network.shape,
        tokens=tokens,
        logit_tokens=logit_tokens,
        is_bfloat16=narrow,
        is_checkpointed=workload.is_checkpointed,
        chunk_logits=chunk,
    )


def _sampling(each: Sampling, workload: Workload, layout: Layout, device: Device) -> float:
    """Return the bytes of sampling by the loop: the KV cache at its end, the probabilities of one step, and the weights
    in the type of the products."""
    if workload.engine is not None:
        if workload.engine.place != "process":
            return 0.0
        weights = workload.network(each.role).weights * width_of_engine(workload) if device.is_cpu else 0
        return memory_of_engine(workload.engine, device) + weights
    network = workload.network(each.role)
    rows = each.rows_at_once(layout.world)
    narrow = BFLOAT16 if workload.is_bfloat16 else FLOAT32
    cache = kv_cache_bytes(network.shape, tokens=rows * each.longest, bytes_each=narrow)
    copy = _gathered(network, workload, layout, trains=False)
    if keeps_gathered(network, workload, layout, device):
        copy = network.weights * width_of(network, is_bfloat16=workload.is_bfloat16)
    return cache + decoding_bytes(network.shape, rows=rows) + copy


def _step_bytes(workload: Workload, device: Device) -> float:
    """Return the bytes of AdamW's intermediate results: on a GPU for all weights at once, on a CPU for the largest
    matrix."""
    most = max((each.trained_weights for each in workload.networks), default=0)
    if workload.has_host_optimizer and not device.is_cpu:
        return 0.0
    if not device.is_cpu:
        return most * FLOAT32
    whole = (each.shape.head_matrix for each in _trained(workload) if not each.adapter_weights)
    return 2.0 * FLOAT32 * max(whole, default=0)

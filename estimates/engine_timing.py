"""Estimate the seconds in which vLLM samples a stage's responses.

Decoding: one pass for each token reads the weights and the cache of the open rows (the roofline; Pope et al., arXiv
2211.05102 §2). As many rows are open as fit in memory, and a finished row makes room for the next one (continuous
batching, Yu et al., OSDI 2022; Kwon et al., arXiv 2309.06180). Prefill: the FLOPs of the prompts. The weights must also
be sent to the engine, once for each sampling of a policy that trains. **No GPU was measured for any of this**;
``docs/estimate`` has the results of a CPU.

Not counted: the start, an engine's proof of its weights, prompts of a group that are in its cache already, and the cost
of batch-invariant kernels.
"""

from dataclasses import dataclass, replace

from vantage.estimates.devices import GIGA, Device
from vantage.estimates.flops import head_flops, trunk_flops
from vantage.estimates.memory import BFLOAT16, FLOAT32, kv_cache_bytes
from vantage.estimates.workload import Engine, Network, Sampling, Workload

SHARE_IN_PROCESS = 0.3
"""Equal to ``vantage.tasks.rollout.running_vllm.GPU_MEMORY_SHARE``: share of a GPU's memory for vLLM in the stage's process."""
SHARE_OF_SERVER = 0.92
"""Share of a GPU's memory that a server of vLLM 0.32 takes by default."""
CACHE_SHARE = 0.2
"""Least share of that memory for the cache; weights that leave less are split over more GPUs (tensor parallel)."""
CACHE_ON_CPU = 2**30
"""Bytes of the cache on a CPU: ``VLLM_CPU_KVCACHE_SPACE``."""
MOST_ROWS = 256
"""Most responses at once of one vLLM without ``rollout.max_rows``; equal to ``vantage.tasks.rollout.remote_engine.AT_ONCE``."""
STEP_SECONDS = 2e-3
"""Seconds of a pass besides its computation: vLLM's scheduler, drawing tokens and, on servers, returning them.
Assumed."""
SUM_SECONDS = 1e-5
"""Seconds until a sum over the GPUs of one server begins; each layer has two sums. An assumption."""
HOST_BYTES_PER_SECOND = 25 * GIGA
"""Bytes/s between a GPU and its host: vLLM in the stage's process moves its weights there. An assumption: half the rate
of PCIe 5."""
FILE_BYTES_PER_SECOND = 2 * GIGA
"""Bytes/s of writing weights to a folder for servers, and of reading them there. An assumption."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One sampling by vLLM."""

    gpus: int
    """GPUs of each engine."""
    rows: float
    """Mean number of open rows of each engine."""
    prefill: float
    """Seconds of reading the prompts."""
    decode: float
    """Seconds of drawing tokens."""
    waking: float
    """Seconds of moving weights to the GPU before and back afterwards."""


def on_ranks(workload: Workload, *, world: int, is_sharded: bool) -> Workload:
    """Return the workload with a vLLM in the process of each of ``world`` ranks; unchanged if these do not sample."""
    engine = workload.engine
    if engine is None or engine.place != "process":
        return workload
    return replace(workload, engine=replace(engine, count=world, gathers=is_sharded))


def sampled(each: Sampling, workload: Workload, engine: Engine, device: Device) -> Sampled:
    """Return the seconds of one sampling of ``each.count`` responses, divided among the engines.

    With n rows for each engine, of s + r/2 tokens on average (prompt s, response r), and room for m of them, an engine makes
    max(longest response, n·r/m) passes, so that n·r / passes rows are open on average.
    """
    network = workload.network(each.role)
    width = width_of(workload)
    gpus = gpus_of_each(network, workload, engine, device)
    count = each.count / engine.count
    room = memory_of_engine(engine, device) * gpus - (0 if device.is_cpu else network.weights * width)
    of_row = kv_cache_bytes(network.shape, tokens=each.prompt + each.response, bytes_each=width)
    most = max(1.0, min(engine.max_rows or MOST_ROWS, count, room // of_row))
    passes = max(each.steps, count * each.response / most)
    rows = count * each.response / passes
    context = each.prompt + each.response / 2
    flops = trunk_flops(network.shape, tokens=rows, context=context) + head_flops(network.shape, tokens=rows)
    cache = kv_cache_bytes(network.shape, tokens=rows * context, bytes_each=width)
    one_pass = _longest(
        device,
        flops=flops / gpus,
        moved=(network.weights * width + cache) / gpus,
        is_bfloat16=workload.is_bfloat16,
    )
    sums = _sums(network, rows * width, gpus, device)
    prompts = trunk_flops(network.shape, tokens=count * each.prompt, context=each.prompt)
    return Sampled(
        gpus=gpus,
        rows=rows,
        prefill=prompts / gpus / device.flops(is_bfloat16=workload.is_bfloat16),
        decode=passes * (one_pass + STEP_SECONDS + sums),
        waking=_waking(network, workload, engine, device),
    )


def seconds_of_engine(workload: Workload, device: Device) -> tuple[float, float]:
    """Return the seconds of all sampling of a stage, and the seconds of sending the weights to the engines.

    The weights of a policy that trains are sent once for each of its rollouts, even if its validation samples too;
    others once.
    """
    engine = workload.engine
    assert engine is not None
    sampling, updates = 0.0, dict[str, float]()
    for each in workload.samplings:
        once = sampled(each, workload, engine, device)
        sampling += each.times * (once.prefill + once.decode + once.waking)
        times = each.times if workload.network(each.role).is_trained else 1
        updates[each.role] = max(times, updates.get(each.role, 0))
    sending = sum(
        times * _update(workload.network(role), workload, engine, device) for role, times in updates.items()
    )
    return sampling, sending


def seconds_beside(workload: Workload, device: Device, *, update: float) -> float:
    """Return the seconds of sampling that ``ahead: 1`` hides behind updates: each rollout but the first is sampled
    during the previous update. Scores and other passes over a rollout, new weights, and validation come before or after
    both.

    Args:
        update: seconds of all updates.
    """
    assert workload.engine is not None
    hidden = 0.0
    for each in workload.samplings:
        if each.is_rollout and workload.engine.is_beside:
            once = sampled(each, workload, workload.engine, device)
            hidden += (each.times - 1) * min(once.prefill + once.decode, update / each.times)
    return hidden


def tokens_per_second(workload: Workload, device: Device) -> float | None:
    """Return the sampled tokens per second of all engines, without the time of new weights; None: it samples
    nothing."""
    engine = workload.engine
    assert engine is not None
    tokens = seconds = 0.0
    for each in workload.samplings:
        once = sampled(each, workload, engine, device)
        tokens += each.times * each.count * each.response
        seconds += each.times * (once.prefill + once.decode + once.waking)
    return tokens / seconds if seconds else None


def gpus_of_each(network: Network, workload: Workload, engine: Engine, device: Device) -> int:
    """Return the GPUs of an engine, doubled until its weights leave room for its cache."""
    gpus, weights = 1 if device.is_cpu else engine.tensor_parallel, network.weights * width_of(workload)
    while not device.is_cpu and weights > (1 - CACHE_SHARE) * memory_of_engine(engine, device) * gpus:
        gpus *= 2
    return gpus


def memory_of_engine(engine: Engine, device: Device) -> float:
    """Return the bytes of one GPU that an engine takes; on a CPU, the bytes of its cache."""
    if device.is_cpu:
        return CACHE_ON_CPU
    return device.memory * (SHARE_IN_PROCESS if engine.place == "process" else SHARE_OF_SERVER)


def width_of(workload: Workload) -> int:
    """Return the bytes of an element of vLLM's weights and cache, by the type of the stage's arithmetic."""
    return BFLOAT16 if workload.is_bfloat16 else FLOAT32


def _longest(device: Device, *, flops: float, moved: float, is_bfloat16: bool) -> float:
    parts = (flops / device.flops(is_bfloat16=is_bfloat16), moved / device.bytes_per_second)
    return sum(parts) if device.is_cpu else max(parts)


def _sums(network: Network, row_bytes: float, gpus: int, device: Device) -> float:
    """Return the seconds of the sums over an engine's GPUs in one pass: two for each layer, in a ring; ``row_bytes``:
    bytes of one element for all open rows."""
    if gpus == 1:
        return 0.0
    sent = 2 * (gpus - 1) / gpus * row_bytes * network.shape.hidden_size / device.link
    return 2 * network.shape.num_layers * (SUM_SECONDS + sent)


def _waking(network: Network, workload: Workload, engine: Engine, device: Device) -> float:
    """Return the seconds in which an engine in the stage's process moves its weights to the GPU and back to the host; 0
    on a CPU."""
    if engine.place != "process" or device.is_cpu:
        return 0.0
    return 2 * network.weights * width_of(workload) / HOST_BYTES_PER_SECOND


def _update(network: Network, workload: Workload, engine: Engine, device: Device) -> float:
    """Return the seconds until all engines have the weights, or only the adapters. For servers they are written once,
    and then read by all. In the stage's process they are tensors in memory, and each rank gathers the parts of the
    others."""
    width = width_of(workload)
    if engine.place == "process":
        sent = network.adapter_weights * FLOAT32 or network.weights * width
        return sent * (engine.count - 1) / engine.count / device.link if engine.gathers else 0.0
    return 2 * (network.adapter_weights * FLOAT32 or network.weights * width) / FILE_BYTES_PER_SECOND

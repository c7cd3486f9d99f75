"""Find a layout with fewer GPUs on which a stage takes less time, and the reason why more GPUs are slower."""

from collections.abc import Iterator
from dataclasses import dataclass

from vantage.estimates.devices import Device
from vantage.estimates.layouts import Layout, fitted, largest_microbatch, layouts
from vantage.estimates.timing import parts_of, seconds_of
from vantage.estimates.workload import Workload

CLEARLY = 0.97
"""Share of the time below which a layout counts as faster."""


@dataclass(frozen=True)
class Faster:
    """A layout with fewer GPUs, on which the stage is faster."""

    layout: Layout
    seconds: float
    reason: str
    """Reason why the stage takes longer on more GPUs, as a part of a sentence."""


def faster_with_fewer(workload: Workload, layout: Layout, device: Device) -> Faster | None:
    """Return the fastest of the layouts with fewer GPUs in which the stage fits, if it is faster than ``layout``.

    Args:
        workload: the workload of the recipe, before its micro-batches were fitted to a layout.
    """
    size = largest_microbatch(workload, layout, device)
    if size is None or layout.world == 1:
        return None
    here = fitted(workload, size, layout, device)
    seconds, other = min(_fitting(workload, layout, device), key=lambda each: each[0], default=(0.0, None))
    if other is None or seconds >= CLEARLY * seconds_of(here, layout, device):
        return None
    return Faster(other, seconds, reason_of(here, layout, device))


def _fitting(workload: Workload, layout: Layout, device: Device) -> Iterator[tuple[float, Layout]]:
    for other in layouts():
        if other.world >= layout.world or (other.is_sharded and workload.has_packed_base):
            continue
        size = largest_microbatch(workload, other, device)
        if size is not None:
            yield seconds_of(fitted(workload, size, other, device), other, device), other


def reason_of(workload: Workload, layout: Layout, device: Device) -> str:
    """Return the main reason of waiting on a layout, with its share of the time."""
    parts = parts_of(workload, layout, device)
    waiting = max(parts.gathering, parts.communicating)
    if waiting < (1 - CLEARLY) * sum(parts):
        return "each GPU has too few rows to fill its passes"
    share = f"{waiting / sum(parts):.0%} of the time is waiting for"
    link = f" ({device.network / 1e9:g} GB/s between nodes)" if layout.nodes > 1 else ""
    if parts.gathering == waiting:
        return f"{share} weights, which each sampled token gathers again since all of them do not fit on a GPU{link}"
    if layout.is_sharded:
        return f"{share} weights and gradients of the other GPUs in each micro-batch{link}"
    return f"{share} the sums of gradients, which only the last backward pass of a step hides{link}"

"""The table: what each part took, beside what it cannot do without."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.devices import Facts
from benchmarks.gpu.floor import Rates, Work
from benchmarks.gpu.sizes import Fit, Rollout
from benchmarks.gpu.timing import Timed
from vantage.models.pass_counts import PassCounts
from vantage.schemas.metric_names import GRAPHS

HEADER = (
    "| part | seconds | tokens/s | MFU | share of the bandwidth bound | floor, s | times the floor | peak memory, GB | waits |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
WHOLE = "iteration"


@dataclass(frozen=True)
class Row:
    """A row of the table: one part of the iteration, or the whole iteration."""

    part: str
    seconds: float
    lowest: float
    highest: float
    tokens_per_second: float
    mfu: float
    """FLOPs that the part cannot do without, a second, over the peak of the device's data sheet, or what was measured."""
    bandwidth_share: float | None
    """Seconds that its bytes would take at the peak, over those that it took; None where bytes do not bound it."""
    floor_seconds: float
    peak_memory: float
    waits: int | None

    @property
    def over_floor(self) -> float:
        """The seconds that the part took, as a multiple of its floor."""
        return self.seconds / self.floor_seconds


def rows(timed: Mapping[str, Timed], works: Mapping[str, Work], facts: Facts) -> list[Row]:
    """Return a row for each part, then one for all of them.

    Floors are by measured products and, where it is known, the data sheet's bandwidth; MFU and shares by the data sheet.
    """
    peak = facts.peak or facts.measured
    rates = Rates(facts.measured.flops, peak.bandwidth)
    found = [_row(name, timed[name], works[name], peak=peak, rates=rates) for name in works]
    return [*found, _whole(found, works, peak)]


def _row(name: str, timed: Timed, work: Work, *, peak: Rates, rates: Rates) -> Row:
    return Row(
        part=name,
        seconds=timed.seconds,
        lowest=timed.lowest,
        highest=timed.highest,
        tokens_per_second=work.tokens / timed.seconds,
        mfu=work.flops / timed.seconds / peak.flops,
        bandwidth_share=work.read_seconds(peak) / timed.seconds if name == "sampling" else None,
        floor_seconds=work.seconds(rates),
        peak_memory=timed.peak_memory,
        waits=timed.waits,
    )


def _whole(parts: list[Row], works: Mapping[str, Work], peak: Rates) -> Row:
    seconds = sum(each.seconds for each in parts)
    waits = [each.waits for each in parts if each.waits is not None]
    return Row(
        part=WHOLE,
        seconds=seconds,
        lowest=sum(each.lowest for each in parts),
        highest=sum(each.highest for each in parts),
        tokens_per_second=works["sampling"].tokens / seconds,
        mfu=sum(work.flops for work in works.values()) / seconds / peak.flops,
        bandwidth_share=None,
        floor_seconds=sum(each.floor_seconds for each in parts),
        peak_memory=max(each.peak_memory for each in parts),
        waits=sum(waits) if waits else None,
    )


def line(row: Row) -> str:
    """Return a line of the table."""
    share = "" if row.bandwidth_share is None else f"{row.bandwidth_share:.1%}"
    cells = (
        row.part,
        f"{row.seconds:.3g} ({row.lowest:.3g}–{row.highest:.3g})",
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu:.1%}",
        share,
        f"{row.floor_seconds:.3g}",
        f"{row.over_floor:.3g}",
        f"{row.peak_memory / 1e9:.3g}",
        "" if row.waits is None else f"{row.waits:,}",
    )
    return f"| {' | '.join(cells)} |"


def graphs_line(counts: PassCounts, plain: Timed | None, *, sampling: Row) -> str:
    """Return what the sampler captured and replayed (docs/decisions/0037), and what sampling takes without it."""
    lines = (
        f"CUDA graphs while sampling: {counts.graphs_captured} captured, {counts.graph_replays} replays, "
        f"{counts.graph_fallbacks} times without"
    )
    if plain is None:
        return lines
    return (
        f"{lines}; switched off: {plain.seconds:.3g} s, {plain.seconds / sampling.seconds:.2f} times as long"
    )


def heading(size: str, rollout: Rollout, fit: Fit, facts: Facts, *, precision: str) -> str:
    """Return the heading of a report: model, precision, device with its peak rates, and size of the rollout."""
    peak = "" if facts.peak is None else f", data sheet {_rates_line(facts.peak)}"
    return (
        f"{size}, {precision}, {facts.name} (measured {_rates_line(facts.measured)}{peak}): {rollout.prompts} × {rollout.samples} "
        f"responses of {rollout.response_tokens} tokens to prompts of {rollout.prompt_tokens}, {rollout.minibatches} steps; "
        f"{fit.sampled_rows} sampled at once, passes of {fit.pass_tokens:,} positions"
    )


def _rates_line(rates: Rates) -> str:
    return f"{rates.flops / 1e12:.3g} TFLOP/s, {rates.bandwidth / 1e9:.4g} GB/s"


def as_json(
    size: str, found: list[Row], facts: Facts, fit: Fit, counts: PassCounts, plain: Timed | None
) -> dict[str, Any]:
    """Return the whole report as JSON."""
    return {
        "size": size,
        "device": asdict(facts),
        "fit": asdict(fit),
        "rows": [asdict(row) for row in found],
        "graphs": {name: getattr(counts, name) for name in GRAPHS},
        "sampling_without_graphs": None if plain is None else asdict(plain),
    }

"""Sections of a report that consist of words and tables."""

from collections.abc import Sequence
from itertools import groupby

from vantage.ledger.pages.elements import Table, cut, rows, safe
from vantage.review.reports.curve_words import title_and_note
from vantage.review.reports.gathered import Cost, Gate, Remark, Report, StageCurves
from vantage.review.reports.words import (
    about,
    consequence,
    duration,
    energy,
    interval_text,
    mark_of,
    number,
    verdict_sentence,
    words,
)
from vantage.schemas.recipe.rollout import SampledAhead
from vantage.schemas.records.facts import FACTS

_LONGEST = 600
"""Most characters of a reason or a remark."""


def steps_table(report: Report) -> str:
    """Return a table of all steps: the text of the drawing."""
    body = tuple(
        (
            step.name,
            f"{mark_of(step.status)[0]} {words(step.status)}",
            words(step.kind),
            ", ".join(f"{words(role)}: {read}" for role, read in step.reads) or "–",
            cut(step.outcome, _LONGEST) + (f" (made by run {step.made_by})" if step.made_by else "") or "–",
            (step.digest or "–")[:12],
            duration(step.seconds) if step.seconds else "–",
        )
        for step in report.steps
    )
    headings = ("step", "status", "kind", "reads", "outcome", "artifact", "time")
    return rows(Table("Steps of the run", "", headings, body, left=6, whole=(0, 1, 5)))


SHORTENED_BY = {
    "sampling": "rollout.engine: vllm; a larger rollout.max_rows",
    "waiting": "more processes that sample or judge",
    "scoring": "precision: auto; a larger microbatch_tokens",
    "reading": "precision: auto; a larger microbatch_tokens",
    "updating": "precision: auto; compile: true; a larger microbatch_tokens; more GPUs",
    "measuring": "a larger validate_every; fewer validation prompts",
    "other": "a larger checkpoint_every",
}
"""Group of phases → settings that may shorten it. None of them asks less of the policy."""
OF_VLLM = "a larger rollout.max_rows"
"""Setting that may shorten the sampling of vLLM."""
SERVERS = "; rollout.servers, which sample on GPUs of their own"
AHEAD = "; rollout.ahead: 1, whose responses are one update old"


def _shortened_by(phase: str, stage: StageCurves) -> str:
    """Return the settings that may shorten a phase of the stage, without those that it already has."""
    rollout = stage.rollout
    if phase == "sampling" and rollout is not None and rollout.engine == "vllm":
        return OF_VLLM + ("" if rollout.is_served else SERVERS)
    where = "waiting" if rollout is not None and rollout.is_served else "sampling"
    is_offered = phase == where and isinstance(rollout, SampledAhead) and not rollout.ahead
    return SHORTENED_BY[phase] + (AHEAD if is_offered else "")


def times_table(stage: StageCurves) -> str:
    """Return where the time of a stage's iterations went, and what may shorten it."""
    times = stage.times
    if times is None:
        return ""
    body = tuple(
        (
            each.phase,
            f"{number(each.seconds)} s",
            f"{100 * each.share:.0f} %",
            f"{100 * each.low:.0f} to {100 * each.high:.0f} %",
            _shortened_by(each.phase, stage),
        )
        for each in times.phases
    )
    note = f"Means of {times.iterations:,} of its iterations, {number(times.seconds)} s each."
    if times.beside is not None:
        note += (
            f" Beside them, {number(times.beside)} s an iteration were spent on sampling the next responses."
        )
    headings = ("phase", "time", "share", "10th to 90th percentile of the share", "what may shorten it")
    table = Table(f"{stage.step}: where the time went", "", headings, body, text=(4,), whole=(0,))
    return f"<p>{safe(note)}</p>{rows(table)}"


def gate_article(gate: Gate) -> str:
    """Return the article about one gate: its condition, the measured value, and the consequence."""
    title = f"{gate.step}: {gate.asks}"
    if gate.verdict is None:
        return (
            f'<article class="gate open"><h3>– {safe(title)}</h3><p>Nothing was measured: the step has no artifact in this '
            f'run.</p><p class="soft">{safe(gate.meaning)}</p></article>'
        )
    passed = gate.verdict.passed
    mark, style = ("✓", "good-text") if passed else ("✗", "bad-text")
    return (
        f'<article class="gate{" passed" if passed else ""}"><h3>{safe(title)}</h3>'
        f'<p class="{style}"><strong>{mark} {safe(consequence(gate.verdict))}</strong></p>'
        f"<p>{safe(verdict_sentence(gate.verdict))}</p>"
        f'<p class="soft">{safe(gate.meaning)}</p></article>'
    )


def remark_lines(remarks: Sequence[Remark]) -> list[str]:
    """Return the remarks, warnings first."""
    order = ("bad", "warning", "note")
    return [
        f'<div class="advice {each.level}"><strong>{safe(each.step)}</strong>: {safe(cut(each.text, _LONGEST))}</div>'
        for each in sorted(remarks, key=lambda remark: order.index(remark.level))
    ]


def attempts_and_cost(report: Report) -> str:
    """Return time, GPUs and tokens of the steps that this run computed."""
    if not report.costs:
        return "<p>Nothing was computed: every artifact was there already.</p>"
    has_gpus = any(cost.gpus for cost in report.costs)
    has_tokens = any(cost.tokens for cost in report.costs)
    headings = ["step", "device", "attempts", "last attempt", "all attempts"]
    headings += ["GPUs", "GPU-seconds"] if has_gpus else []
    headings += ["tokens, about", "padding"] if has_tokens else []
    kinds = [kind for kind in _ENERGY if any(_joules(cost, kind) is not None for cost in report.costs)]
    headings += [_ENERGY[kind] for kind in kinds]
    known = [fact for fact in FACTS if any(fact.name in cost.facts for cost in report.costs)]
    headings += [fact.heading for fact in known]
    body = []
    for cost in report.costs:
        cells = [
            cost.step,
            cost.device,
            f"{cost.attempts}",
            duration(cost.seconds),
            duration(cost.all_seconds),
        ]
        cells += [f"{cost.gpus}", f"{cost.gpus * cost.all_seconds:,.0f}"] if has_gpus else []
        if has_tokens:
            cells += [about(cost.tokens) if cost.tokens else "–"]
            cells += [f"{100 * cost.padding:.0f} %" if cost.padding is not None else "–"]
        cells += [_energy_of(cost, kind) for kind in kinds]
        cells += [cost.facts.get(fact.name, "–") for fact in known]
        body.append(tuple(cells))
    tokens = sum(cost.tokens or 0 for cost in report.costs)
    total = ["together", "", f"{sum(cost.attempts for cost in report.costs)}"]
    total += [
        duration(sum(getattr(cost, name) for cost in report.costs)) for name in ("seconds", "all_seconds")
    ]
    if has_gpus:
        total += ["", f"{sum(cost.gpus * cost.all_seconds for cost in report.costs):,.0f}"]
    total += [about(tokens), ""] if has_tokens else []
    for kind in kinds:
        joules = sum(_joules(cost, kind) or 0.0 for cost in report.costs)
        total.append(f"at most {energy(joules)}" if kind == "cpu_joules" else energy(joules))
    of_energy = tuple(zip(kinds, total[len(total) - len(kinds) :], strict=True))
    total += [""] * len(known)
    said = (
        "Wall time of this run's own attempts; what was reused cost nothing here. GPU-seconds are seconds × GPUs, on a CPU "
        f"none. Tokens are worked out from the speed at each step. {_on_energy(kinds)}"
        + "".join(f" {fact.meaning}" for fact in known)
    )
    seconds = sum(cost.all_seconds for cost in report.costs)
    gpu_seconds = sum(cost.gpus * cost.all_seconds for cost in report.costs)
    facts = [
        ("computed for", f"{duration(seconds)}, all steps and attempts together"),
        ("GPU-seconds", f"{gpu_seconds:,.0f}" if has_gpus else "0: it was computed on CPUs"),
        ("tokens", f"about {about(tokens)}" if has_tokens else "not measured"),
        *((_ENERGY[kind], each) for kind, each in of_energy),
        *([] if kinds else [("energy", "not measured")]),
    ]
    listed = "".join(f"<dt>{safe(name)}</dt><dd>{safe(text)}</dd>" for name, text in facts)
    shown = Table("Cost", "", tuple(headings), (*body, tuple(total)), left=2, whole=(0, 1))
    return f'<dl class="facts">{listed}</dl><p>{said}</p>{rows(shown)}'


_ENERGY = {"gpu_joules": "energy of GPUs", "cpu_joules": "energy of the processor"}


def _joules(cost: Cost, kind: str) -> float | None:
    joules: float | None = getattr(cost.energy, kind, None)
    return joules


def _energy_of(cost: Cost, kind: str) -> str:
    """Return the energy with the number of attempts that measured it, if others died before they could."""
    joules = _joules(cost, kind)
    if joules is None:
        return "not measured"
    part = f" ({cost.measured_attempts} of {cost.attempts} attempts)"
    return energy(joules) + (part if cost.measured_attempts < cost.attempts else "")


def _on_energy(kinds: Sequence[str]) -> str:
    """Return the meaning of the energies, or the reason why there are none."""
    said = []
    if "gpu_joules" in kinds:
        said.append("Energy of GPUs is what their own counters (NVML) counted while the step had them.")
    if "cpu_joules" in kinds:
        said.append(
            "Energy of the processor is that of whole packages (RAPL) while the step ran, whatever else the machine computed; of "
            "steps side by side each has all of it, so that the sum may count it several times."
        )
    return " ".join(said) or (
        "Energy was not measured: the machine has no counter that could be read (NVML of a GPU, or RAPL of a processor)."
    )


def curve_meanings(stages: Sequence[StageCurves]) -> str:
    """Return the unit and the meaning of every curve on the page."""
    drawn = {curve.metric: (curve, stage.kind) for stage in reversed(stages) for curve in stage.curves}
    body = tuple(
        (title_and_note(name, kind)[0], name, curve.unit if curve.unit != "1" else "none", curve.meaning)
        for name, (curve, kind) in sorted(drawn.items())
    )
    shown = rows(
        Table("What the curves mean", "", ("curve", "metric", "unit", "meaning"), body, left=4, whole=(1, 2))
    )
    return f"<details><summary>What each curve measures, and its unit</summary>{shown}</details>"


def environment(report: Report) -> str:
    """Return libraries, device and code: those that all steps share, and those that differ."""
    if not report.environment and not report.origin:
        return ""
    alike = [(part, values[0][0]) for part, values in report.environment if len(values) == 1]
    differ = [(part, values) for part, values in report.environment if len(values) > 1]
    facts = "".join(
        f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in [*report.origin, *alike]
    )
    parts = [f'<dl class="facts">{facts}</dl>']
    if differ:
        body = tuple((part, value, ", ".join(steps)) for part, values in differ for value, steps in values)
        parts.append("<h3>Different from step to step</h3>")
        parts.append(
            rows(
                Table("Differences between steps", "", ("part", "value", "steps"), body, left=3, whole=(0, 1))
            )
        )
    if report.code:
        codes = tuple((step, digest[:12]) for step, digest in report.code)
        parts.append(
            "<details><summary>Digest of the code that each step ran</summary>"
            f"{rows(Table('Code of each step', '', ('step', 'code'), codes, left=2, whole=(0, 1)))}</details>"
        )
    return "\n".join(parts)


def measured_tables(report: Report) -> str:
    """Return every headline metric with its interval and its meaning, one closed table a step."""
    headings = ("metric", "value", "95 % interval", "prompts", "unit", "meaning")
    parts = []
    for step, of_step in groupby(report.measured, key=lambda each: each.step):
        body = tuple(
            (
                each.metric,
                number(each.value),
                interval_text(each.interval),
                f"{each.n:,}" if each.n is not None else "–",
                each.unit if each.unit != "1" else "",
                each.meaning,
            )
            for each in of_step
        )
        shown = rows(Table(f"Numbers of {step}", "", headings, body, text=(5,), whole=(0,)))
        parts.append(f"<details><summary>{safe(step)}: {len(body)}</summary>{shown}</details>")
    return "\n".join(parts)

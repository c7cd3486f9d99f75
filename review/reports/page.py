"""Build the page of a report: a pure function of the gathered values; the same report gives the same page."""

from collections.abc import Callable, Sequence

from vantage.ledger.pages.elements import figures, page, safe
from vantage.review.reports.annex_section import ANNEX_STYLE, annex_section
from vantage.review.reports.annex_xi import Question
from vantage.review.reports.column import column
from vantage.review.reports.first_screen import FIRST_STYLE, first_screen
from vantage.review.reports.gathered import Report
from vantage.review.reports.graph import lineage
from vantage.review.reports.plots import curve_plots, distribution_plots, ridge_plots, time_plots
from vantage.review.reports.samples import SAMPLES_STYLE, sample_parts
from vantage.review.reports.sections import (
    attempts_and_cost,
    curve_meanings,
    environment,
    gate_article,
    measured_tables,
    remark_lines,
    steps_table,
    times_table,
)
from vantage.review.reports.words import words

_STYLE = """
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; margin: .75rem 0; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .75rem 0; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
.lineage { display: block; font: 13px system-ui, sans-serif; max-width: none; }
.lineage .name { font-weight: 600; font-size: 14px; fill: var(--ink); } .lineage text { fill: var(--ink); }
.lineage.narrow { display: none; } .lineage .dot { fill: var(--other); }
@media (max-width: 45rem) { .lineage.wide { display: none; } .lineage.narrow { display: block; } }
.beside { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: flex-start; }
.beside section { flex: 1 1 24rem; min-width: 0; max-width: 100%; } .beside section:first-child { flex: 0 1 auto; }
.beside section:first-child p { max-width: 34rem; }
.lineage .edge { fill: none; stroke: var(--other); stroke-width: 1.5; }
.lineage .box { fill: var(--card); stroke: var(--line); stroke-width: 2; }
.lineage .good-line { stroke: var(--good); } .lineage .bad-line { stroke: var(--bad); }
.lineage .warning-line { stroke: var(--warning); } .lineage .note-line { stroke: var(--note); }
.lineage .other-line { stroke: var(--line); stroke-dasharray: 5 4; }
.lineage .good-fill { fill: var(--good); } .lineage .bad-fill { fill: var(--bad); }
.lineage .warning-fill { fill: var(--warning); } .lineage .note-fill { fill: var(--note); }
.lineage .soft-fill, .lineage .other-fill { fill: var(--soft); }
.lineage .soft-fill { font-family: ui-monospace, monospace; font-size: 11px; }
.gate { border-left: .4rem solid var(--bad); background: var(--card); padding: .6rem 1rem; margin: .75rem 0; max-width: 60rem; }
.gate.passed { border-color: var(--good); } .gate.open { border-color: var(--other); }
.gate h3 { margin: 0; } .gate p { margin: .25rem 0; max-width: none; }
.commands { background: var(--card); padding: .6rem 1rem; overflow-wrap: anywhere; white-space: pre-wrap;
  font-family: ui-monospace, monospace; font-size: .85rem; }
@media print {
  body { max-width: none; padding: 0; } nav { display: none; }
  details::details-content { content-visibility: visible; block-size: auto; }
  figure, .gate, .advice, .side, .token { break-inside: avoid; } h2, h3, h4 { break-after: avoid; }
  .scroll { overflow: visible; } .lineage { max-width: 100%; height: auto !important; }
}
"""


def report_page(report: Report, *, annex: Sequence[Question] = ()) -> str:
    """Return the whole page; ``annex``: the questions of an annex with their answers."""
    sections: list[tuple[str, str, Callable[[Report], str]]] = [
        ("lineage", "Pipeline", _lineage),
        ("gates", "Gates", _gates),
        ("steps", "Steps", steps_table),
        ("comparison", "Before and after", _comparisons),
        ("curves", "Learning curves", _curves),
        ("times", "Where the time went", _times),
        ("remarks", "Warnings and what was left out", _remarks),
        ("cost", "Cost", attempts_and_cost),
        ("environment", "Environment", environment),
        ("numbers", "All measured numbers", measured_tables),
    ]
    drawn = [(name, title, draw(report)) for name, title, draw in sections]
    if annex:
        drawn.append(("annex", "Annex: EU AI Act, Annex XI", annex_section(annex)))
    shown = [each for each in drawn if each[2]]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in shown)
    body = [
        first_screen(report),
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
        f'<div class="beside">{"".join(_section(*each) for each in shown if each[0] in _BESIDE)}</div>',
        *(_section(*each) for each in shown if each[0] not in _BESIDE),
    ]
    return page(
        f"{report.recipe} · run {report.run_id}",
        "\n".join(body),
        style=_STYLE + FIRST_STYLE + SAMPLES_STYLE + (ANNEX_STYLE if annex else ""),
    )


_BESIDE = ("lineage", "gates")
"""Sections that are side by side on a wide screen."""


def _section(name: str, title: str, content: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n{content}</section>'


def _lineage(report: Report) -> str:
    wide, narrow = lineage(report.steps), column(report.steps)
    drawing = narrow.replace("narrow", "only", 1) if wide is None else wide + narrow
    return (
        "<p>Each box is a step of the recipe, with its status, kind, the beginning of its artifact's digest and its time. "
        "Lines run from what is read down to what reads it. A line is left out where the other lines lead from the one to the "
        "other already; the table of steps has everything that is read.</p>"
        '<figure><figcaption>Lineage of the run</figcaption><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Lineage, scrolls sideways">{drawing}</div></figure>'
    )


def _gates(report: Report) -> str:
    if not report.gates:
        return "<p>The recipe has no gate: nothing was asked of any stage.</p>"
    return "\n".join(map(gate_article, report.gates))


def _comparisons(report: Report) -> str:
    parts: list[str] = []
    for each in report.comparisons:
        parts.append(
            f"<h3>{safe(each.step)}: {safe(each.baseline)} (before) and {safe(each.candidate)} (after)</h3>"
        )
        if each.summary:
            parts.append(f"<p>{safe(each.summary)}</p>")
        if each.distributions:
            parts.append(
                f"<p>{each.responses:,} responses of each model to the same test prompts: the baseline "
                f"({safe(each.baseline)}) and the candidate ({safe(each.candidate)}).</p>"
            )
        parts += [figures(distribution_plots(each)), *sample_parts(each)]
    return "\n".join(parts)


def _curves(report: Report) -> str:
    parts: list[str] = []
    for stage in report.curves:
        made = f" It was made by run {stage.made_by}; these are its curves." if stage.made_by else ""
        others = ""
        if stage.others:
            others = f'<p class="soft">Not drawn, but in the ledger: {safe(", ".join(stage.others))}.</p>'
        kind = "" if stage.kind == stage.step else f" ({words(stage.kind)})"
        parts.append(
            f"<h3>{safe(stage.step + kind)}</h3><p>By {stage.by}.{safe(made)}</p>"
            f"{figures([*curve_plots(stage), *ridge_plots(stage)])}{others}"
        )
    if not parts:
        return ""
    explained = (
        '<p class="soft">Under each title: the first value and the last, and what to look for. Of a curve with many points, the '
        "first and last are drawn, and of each of equal parts between them the lowest and the highest (thin line), so that no "
        "spike is lost; the thick line shows means of 25 parts.</p>"
    )
    return "\n".join([explained, curve_meanings(report.curves), *parts])


def _times(report: Report) -> str:
    parts = [
        f"<h3>{safe(stage.step)}</h3>{figures(time_plots(stage))}{times_table(stage)}"
        for stage in report.curves
        if stage.times is not None
    ]
    if not parts:
        return ""
    explained = (
        '<p class="soft">Of stages that sample: what the stage\'s process did in each iteration. On a GPU, what a phase started '
        "last may count for the phase after it.</p>"
    )
    return "\n".join([explained, *parts])


def _remarks(report: Report) -> str:
    lines = [*remark_lines(report.remarks), *_plain(report.missing)]
    return "\n".join(lines) or "<p>None.</p>"


def _plain(texts: Sequence[str]) -> list[str]:
    return [f'<div class="advice warning">{safe(text)}</div>' for text in texts]

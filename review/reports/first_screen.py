"""The first screen of a report: the verdict and its certainty, what is wrong, and what a person who decides must know."""

from collections import Counter
from collections.abc import Iterator

from vantage.ledger.pages.elements import cut, safe
from vantage.review.reports.gathered import Decision, ModelFact, Report
from vantage.review.reports.words import duration, outcome_of

_LONGEST = 600
"""Most characters of a reason or a remark."""
_LONGEST_COMMAND = 4_000
_MOST_OVERRIDES = 100
_MOST_NAMED = 8
_MOST_SHOWN = 4
"""Number of evaluations whose numbers the verdict contains; the others are under "Before and after"."""

FIRST_STYLE = """
.decision { display: grid; grid-template-columns: minmax(0, 1fr); gap: 0 2rem; }
@media (min-width: 64rem) { .decision { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); } }
.decision .advice { max-width: none; } .decision .advice p { margin: .25rem 0; max-width: none; }
.decision .verdict { font-size: 1.25rem; line-height: 1.35; font-weight: 600; margin: 0; max-width: none; }
.decision .numbers { font-size: 1.05rem; }
.decision h2 { margin: .75rem 0 .25rem; font-size: 1.1rem; }
.decision dl.facts { margin-top: .5rem; align-content: start; }
@media (max-width: 45rem) {
  .decision dl.facts { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .decision dl.facts dd { margin-bottom: .4rem; }
}
"""


def first_screen(report: Report) -> str:
    """Return the verdict with everything that is wrong beside the facts about the run, then what can be done."""
    said = "\n".join([_verdict(report), *_problems(report), *_publications(report)])
    return (
        f'<p>{safe(_what(report))}</p><div class="decision"><div>{said}</div>'
        f"<div>{_facts(report)}</div></div>{_next_steps(report)}"
    )


def _verdict(report: Report) -> str:
    """Return the conclusion, the effects with their intervals, and how the run ended."""
    level, ended = outcome_of(report.status)
    decision = report.decision
    lines = []
    if decision is not None:
        level = decision.conclusion.level
        text = decision.conclusion.text.partition(": ")[0]
        lines.append(f'<p class="verdict">Verdict: {safe(text)}</p>')
        lines += [f'<p class="numbers">{safe(each)}</p>' for each in _effects(decision)]
    lines.append(f"<p>{safe(ended + _on_gates(report))}</p>")
    return f'<div class="advice {level} first">{"".join(lines)}</div>'


def _effects(decision: Decision) -> Iterator[str]:
    """Yield a sentence for each effect of the first evaluations."""
    measured = [each for each in decision.judged if each.effects]
    for each in measured[:_MOST_SHOWN]:
        for effect in each.effects:
            yield effect.sentence(each.candidate, each.baseline)
    if len(measured) > _MOST_SHOWN:
        yield f"{len(measured) - _MOST_SHOWN} more evaluations are under “Before and after”."
    if not measured:
        yield "Nothing was compared: the run has no result of an evaluation, so nothing is known of how good its model is."


def _problems(report: Report) -> list[str]:
    """Return what is wrong: alarms, failures, loosened and closed gates."""
    alarms = report.decision.alarms if report.decision is not None else ()
    parts = [
        f'<div class="advice bad alarm"><strong>{safe(each.title)}</strong> in {safe(each.step)}: '
        f"{safe(cut(each.text, _LONGEST))}</div>"
        for each in alarms
    ]
    parts += [
        f'<div class="advice bad">{safe(step.name)} failed: {safe(cut(step.outcome, _LONGEST))}</div>'
        for step in report.steps
        if step.status == "failed"
    ]
    parts += [
        f'<div class="advice bad">The gate of {safe(step)} was loosened: {safe(gate)}</div>'
        for step, gate in report.loosened
    ]
    return parts + [
        f'<div class="advice bad">The gate of {safe(gate.step)} is closed: {safe(str(gate.verdict))}</div>'
        for gate in report.gates
        if gate.verdict is not None and not gate.verdict.passed
    ]


def _publications(report: Report) -> list[str]:
    decision = report.decision
    parts = [
        f'<div class="advice note">{safe(subject)} was {safe(answer)}</div>'
        for subject, answer in (decision.approvals if decision is not None else ())
    ]
    parts += [
        f'<div class="advice warning">{safe(subject)} waits for a person: `vantage approve` answers.</div>'
        for subject in (decision.waiting if decision is not None else ())
    ]
    return parts + [
        f'<div class="advice {"good" if each.is_published else "warning"}">{safe(each.step)} as '
        f"<strong>{safe(each.model)}</strong> {safe(each.result)}.</div>"
        for each in report.publications
    ]


def _next_steps(report: Report) -> str:
    if not report.next_steps:
        return ""
    lines = safe("\n".join(cut(line, _LONGEST_COMMAND) for line in report.next_steps))
    return f'<h2>What can be done</h2><div class="commands">{lines}</div>'


def _what(report: Report) -> str:
    """Return the run's stages in their order, in a sentence."""
    stages = [step.name for step in report.steps if not step.is_implicit]
    more = f" and {len(stages) - _MOST_NAMED} more" if len(stages) > _MOST_NAMED else ""
    named = f": {' → '.join(stages[:_MOST_NAMED])}{more}" if stages else ""
    return f"Report of one training run: the stages of recipe {report.recipe}{named}."


def _on_gates(report: Report) -> str:
    """Return `` Gates: 2 passed, 1 not reached.``"""
    counts = Counter(
        "not reached" if gate.verdict is None else "passed" if gate.verdict.passed else "closed"
        for gate in report.gates
    )
    said = ", ".join(f"{counts[each]} {each}" for each in ("passed", "closed", "not reached") if counts[each])
    return f" Gates: {said}." if said else ""


def _facts(report: Report) -> str:
    done = [step for step in report.steps if step.digest]
    reused = sum(step.status == "reused" for step in report.steps)
    total = sum(cost.all_seconds for cost in report.costs)
    again = f", opened {report.openings} times" if report.openings > 1 else ""
    facts = [*_decided(report)]
    facts += [
        ("recipe", report.source if report.source == report.recipe else f"{report.recipe} ({report.source})"),
        ("started", f"{report.decision.began if report.decision else report.started}{again}"),
        *([("ended", report.decision.ended)] if report.decision else []),
        ("steps", f"{len(done)} of {len(report.steps)} have an artifact, {reused} of them reused"),
        ("computed for", f"{duration(total)} in all steps together" if total else "nothing was computed"),
        ("check it", f"vantage audit {report.run_id}"),
    ]
    rows_of = "".join(f"<dt>{safe(name)}</dt><dd>{safe(cut(text, 2000))}</dd>" for name, text in facts)
    return f'<dl class="facts">{rows_of}</dl>{_overrides(report)}'


def _decided(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the task, the model and the author."""
    decision = report.decision
    if decision is None:
        return
    for sentence in decision.task[:_MOST_SHOWN]:
        yield "task", sentence
    for model in decision.models:
        yield "model", _named(model)
        yield "digest", model.digest or "none"
    if not decision.models:
        yield "model", "none: no stage has made one"
    yield "author", decision.author
    closed = [each for each in report.gates if each.verdict is not None and not each.verdict.passed]
    yield "loosened", _count(len(report.loosened), "gate") or "no gate"
    yield (
        "approved",
        _count(len(decision.approvals), "answer", "by people") or "nothing was asked of a person",
    )
    if closed:
        yield "closed gates", ", ".join(f"{each.step}: {each.asks}" for each in closed)


def _count(number: int, noun: str, more: str = "") -> str:
    """Return ``2 gates``; empty for none."""
    return f"{number} {noun}{'s' if number > 1 else ''} {more}".rstrip() if number else ""


def _named(model: ModelFact) -> str:
    if model.registered is None:
        return f"{model.step}, not published"
    version = f" version {model.version}" if model.version else ", version not recorded"
    return f"{model.registered}{version} (stage {model.step})"


def _overrides(report: Report) -> str:
    if not report.overrides:
        return ""
    shown = [
        f"<li><code>{safe(cut(each, _LONGEST))}</code></li>" for each in report.overrides[:_MOST_OVERRIDES]
    ]
    count = len(report.overrides)
    more = f"<li>and {count - len(shown):,} more</li>" if count > len(shown) else ""
    return f"<details><summary>Changed by --set: {count:,}</summary><ul>{''.join(shown)}{more}</ul></details>"

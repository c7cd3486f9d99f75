"""The result of an audit as one HTML page, without network and scripts, for light and dark, and for phones."""

from collections.abc import Iterable, Iterator
from html import escape

from vantage.cli.audit_tree import MARKS, WORDS, checks_shown_alone, last_line, subject_of
from vantage.schemas.records.audit import AuditedArtifact, AuditReport, Check, Outcome, worst
from vantage.schemas.safe_text import safe_text

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --faint: #63676d; --page: #fff; --line: #d9dce0;
  --ok: #1a7f37; --wrong: #c1121f; --unchecked: #8a5a00; --note: #0a5cad; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e7e9; --faint: #9ba1a8; --page: #16181b; --line: #363a40;
  --ok: #57c26e; --wrong: #ff7b72; --unchecked: #e3b341; --note: #6cb6ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0 auto; max-width: 60rem;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .25rem; }
.verdict { font-weight: 600; border-left: 4px solid; padding: .25rem .75rem; margin: .75rem 0 1.25rem; }
ul { list-style: none; margin: 0; padding-left: .9rem; border-left: 1px solid var(--line); }
body > ul { padding-left: 0; border: 0; }
li { margin: .2rem 0; }
summary { cursor: pointer; }
summary:focus-visible, a:focus-visible { outline: 2px solid var(--note); outline-offset: 2px; }
.faint { color: var(--faint); }
code { font: .88em ui-monospace, monospace; }
.ok { color: var(--ok); } .wrong { color: var(--wrong); } .unchecked { color: var(--unchecked); } .note { color: var(--note); }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 14px; } ul { padding-left: .5rem; } }
"""
_NAMES: dict[Outcome, str] = {"ok": "agrees", "wrong": "wrong", "unchecked": "not checked", "note": "note"}


def audit_page(report: AuditReport) -> str:
    """Return the page."""
    artifacts = {artifact.id: artifact for artifact in report.artifacts}
    shown: set[str] = set()
    items = [*_checks(report.checks)]
    for root in report.roots:
        items += _artifact(artifacts[root], artifacts, shown, edge=None)
    for run in report.runs:
        items.append(_details(f"run {run.run_id}", "", worst(run.checks), _checks(run.checks)))
    title = _text(f"Audit of {report.described}")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f'<h1>{title}</h1><div class="faint">vantage audit {_text(report.target)}</div>',
            f'<p class="verdict {report.outcome}">{MARKS[report.outcome]} {_text(last_line(report))}</p>',
            f"<ul>{''.join(items)}</ul>",
            "</body></html>",
            "",
        ]
    )


def _artifact(
    artifact: AuditedArtifact, artifacts: dict[str, AuditedArtifact], shown: set[str], *, edge: str | None
) -> Iterator[str]:
    name = artifact.step if edge is None else f"{edge}: {artifact.step}"
    outcome = worst(artifact.checks)
    if artifact.id in shown:
        link = f'<a href="#{_text(artifact.id)}">{_text(artifact.digest[:12])}, above</a>'
        yield f"<li>{_mark(outcome)} {_text(name)} {link}</li>"
        return
    shown.add(artifact.id)
    alone = list(checks_shown_alone(artifact.checks))
    items = [*_checks(alone), *_checks(check for check in artifact.checks if check not in alone)]
    for each in artifact.parents:
        wrong = [check for check in each.checks if check.outcome != "ok"]
        items += _checks(
            check.model_copy(update={"subject": f"{each.role} {check.subject}"}) for check in wrong
        )
        if each.parent is not None:
            items += _artifact(artifacts[each.parent], artifacts, shown, edge=each.role)
    yield _details(name, subject_of(artifact), outcome, items, anchor=artifact.id, digest=artifact.digest)


def _details(
    name: str, rest: str, outcome: Outcome, items: Iterable[str], *, anchor: str = "", digest: str = ""
) -> str:
    identity = f' id="{_text(anchor)}"' if anchor else ""
    full = f'<li class="faint"><code>{_text(digest)}</code></li>' if digest else ""
    return (
        f"<li><details open{identity}><summary>{_mark(outcome)} {_text(name)} "
        f'<span class="faint">{_text(rest)}</span></summary><ul>{full}{"".join(items)}</ul></details></li>'
    )


def _checks(checks: Iterable[Check]) -> Iterator[str]:
    for check in checks:
        detail = f"{WORDS[check.outcome]}{check.detail}"
        style = "faint" if check.outcome == "ok" else check.outcome
        yield f'<li>{_mark(check.outcome)} {_text(check.subject)} <span class="{style}">{_text(detail)}</span></li>'


def _mark(outcome: Outcome) -> str:
    return f'<span class="{outcome}" role="img" aria-label="{_NAMES[outcome]}">{MARKS[outcome]}</span>'


def _text(text: str) -> str:
    return escape(safe_text(text))

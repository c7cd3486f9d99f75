"""The result of an audit on a terminal: a tree from the target to the sources, and one last line."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from vantage.schemas.records.audit import AuditedArtifact, AuditReport, Check, Outcome, worst
from vantage.schemas.safe_text import safe_text

MARKS: dict[Outcome, str] = {"ok": "✓", "wrong": "✗", "unchecked": "?", "note": "!"}
_STYLES: dict[Outcome, str] = {"ok": "green", "wrong": "bold red", "unchecked": "yellow", "note": "cyan"}
WORDS: dict[Outcome, str] = {"ok": "", "wrong": "", "unchecked": "not checked: ", "note": "note: "}
_GATES = "gate"
_DIGEST = 12
_WRONG_NAMED = 4


def show_audit(console: Console, report: AuditReport) -> None:
    """Print the tree and the last line."""
    tree = Tree(Text(_plain(report.described), style="bold"), guide_style="dim")
    _add_checks(tree, report.checks)
    artifacts = {artifact.id: artifact for artifact in report.artifacts}
    shown: set[str] = set()
    for root in report.roots:
        _add(tree, artifacts[root], artifacts, shown, edge=None)
    for run in report.runs:
        branch = tree.add(_line(f"run {run.run_id}", worst(run.checks), _names(run.checks)))
        _add_checks(branch, [check for check in run.checks if check.outcome != "ok"])
    console.print(tree, soft_wrap=not console.is_terminal)
    console.print(_last_line(report), soft_wrap=True)


def last_line(report: AuditReport) -> str:
    """Return the result, the amount of compared data, and the speed of reading."""
    checks = [check for _, check in report.every_check()]
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in MARKS}
    said = {
        "wrong": f"WRONG: {_plural(counts['wrong'], 'check')} failed: {_where(report)}",
        "unchecked": f"nothing is wrong, but {_plural(counts['unchecked'], 'check')} could not be made",
    }.get(report.outcome, "all agrees")
    others = []
    if report.outcome == "wrong" and counts["unchecked"]:
        others.append(f"{counts['unchecked']} could not be made")
    if counts["note"]:
        others.append(_plural(counts["note"], "note"))
    more = f" ({', '.join(others)})" if others else ""
    done = f"{_plural(len(report.artifacts), 'artifact')}, {_plural(len(checks), 'check')}"
    return f"{said}{more}. {done}, {_speed(report)}."


def subject_of(artifact: AuditedArtifact) -> str:
    """Return the artifact in one line."""
    made = f", made by run {artifact.run_id}" if artifact.run_id else ""
    kind = artifact.kind.replace("_", " ")
    return f"{kind} {artifact.digest[:_DIGEST]}{made}"


def checks_shown_alone(checks: Iterable[Check]) -> Iterator[Check]:
    """Yield the checks that get their own line: gates, copies and aliases, and failed checks."""
    for check in checks:
        if check.outcome != "ok" or check.subject.startswith((_GATES, "alias ", "version ", "copy ")):
            yield check


def _add(
    branch: Tree,
    artifact: AuditedArtifact,
    artifacts: dict[str, AuditedArtifact],
    shown: set[str],
    *,
    edge: str | None,
) -> None:
    name = artifact.step if edge is None else f"{edge}: {artifact.step}"
    if artifact.id in shown:
        branch.add(_line(name, worst(artifact.checks), f"{artifact.digest[:_DIGEST]}, checked above"))
        return
    shown.add(artifact.id)
    node = branch.add(_line(name, worst(artifact.checks), subject_of(artifact)))
    fine = [check for check in artifact.checks if check not in list(checks_shown_alone(artifact.checks))]
    if fine:
        node.add(Text.from_markup(f"[green]✓[/] [dim]{escape(_plain(_listed(fine)))}[/]"))
    _add_checks(node, checks_shown_alone(artifact.checks))
    for each in artifact.parents:
        _add_checks(node, [
            check.model_copy(update={"subject": f"{each.role} {check.subject}"})
            for check in each.checks
            if check.outcome != "ok"
        ])  # fmt: skip
        if each.parent is not None:
            _add(node, artifacts[each.parent], artifacts, shown, edge=each.role)


def _add_checks(branch: Tree, checks: Iterable[Check]) -> None:
    for check in checks:
        parts = check.detail.split("; ") if check.outcome == "wrong" else [check.detail]
        text = f"{check.subject} {WORDS[check.outcome]}{parts[0]}"
        node = branch.add(_line(text, check.outcome, ""))
        for part in parts[1:]:
            node.add(Text(_plain(part), style=_STYLES[check.outcome]))


def _line(name: str, outcome: Outcome, rest: str) -> Text:
    text = Text()
    text.append(f"{MARKS[outcome]} ", style=_STYLES[outcome])
    text.append(_plain(name), style="" if outcome == "ok" else _STYLES[outcome])
    if rest:
        text.append(f"  {_plain(rest)}", style="dim")
    return text


def _plain(text: str) -> str:
    """Return a text in one line, so that no record can imitate a line of the audit."""
    return safe_text(text).replace("\n", "\\n").replace("\t", "\\t")


def _listed(checks: Iterable[Check]) -> str:
    return " · ".join(f"{check.subject}{f' ({check.detail})' if check.detail else ''}" for check in checks)


def _where(report: AuditReport) -> str:
    """Return the first failed checks, by name."""
    names = [
        check.subject if where == report.target else f"{where} {check.subject}"
        for where, check in report.every_check()
        if check.outcome == "wrong"
    ]
    return ", ".join(names[:_WRONG_NAMED]) + (" …" if len(names) > _WRONG_NAMED else "")


def _names(checks: Iterable[Check]) -> str:
    return " · ".join(check.subject for check in checks if check.outcome == "ok")


def _last_line(report: AuditReport) -> Text:
    return Text(f"{MARKS[report.outcome]} {_plain(last_line(report))}", style=_STYLES[report.outcome])


def _speed(report: AuditReport) -> str:
    hashing = report.hashing
    if not hashing.num_bytes:
        return "no file was hashed"
    size = _size(hashing.num_bytes)
    if hashing.seconds < 0.01:
        return f"{size} hashed at once"
    bound = (
        "hashing took longer than reading"
        if hashing.bound == "hashing"
        else "reading took longer than hashing"
    )
    return (
        f"{size} hashed in {hashing.seconds:.2f} s ({_size(hashing.num_bytes / hashing.seconds)}/s; {bound})"
    )


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

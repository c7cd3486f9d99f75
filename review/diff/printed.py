"""Print a difference on a console: a table for each part, and one line at the end."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vantage.schemas.records.difference import ComparedSide, Difference, Interval, MetricDifference, Sharing
from vantage.schemas.safe_text import safe_text

_LONGEST = 120
"""Most characters of a value in a table."""
_SHARING: dict[Sharing, tuple[str, str]] = {
    "shared": ("shared", "green"),
    "differs": ("differs", "yellow"),
    "not_reproduced": ("NOT REPRODUCED", "bold red"),
    "unfinished": ("unfinished", "yellow"),
    "neither": ("in neither", "dim"),
    "unknown": ("unknown", "yellow"),
    "only_a": ("only in A", "cyan"),
    "only_b": ("only in B", "cyan"),
}
"""Sharing → its words and their style."""
_REASONS_SHOWN = 4


def show_difference(console: Console, found: Difference) -> None:
    """Print what differs; parts without a difference are left out."""
    for letter, side in (("A", found.a), ("B", found.b)):
        console.print(Text.assemble((f"{letter}  ", "bold"), safe_text(_named(side))), soft_wrap=True)
    if found.recipe:
        rows = [(each.field, *_sides(each.a, each.b, each.only)) for each in found.recipe]
        _show_table(console, "recipe", ("field", "A", "B"), rows)
    _show_stages(console, found)
    _show_data(console, found)
    _show_provenance(console, found)
    if found.gates:
        gates = [(gate.step, _or_none(gate.a), _or_none(gate.b)) for gate in found.gates]
        _show_table(console, "gates", ("stage", "A", "B"), gates)
    _show_metrics(console, found)
    for note in found.notes:
        console.print(Text(f"note: {safe_text(note)}", style="yellow"), soft_wrap=True)
    console.print(Text(summary(found), style="green" if found.is_same else "bold"), soft_wrap=True)


def summary(found: Difference) -> str:
    """Return a line that tells what differs, or that nothing does."""
    shared = sum(stage.sharing == "shared" for stage in found.stages)
    stages = f"{shared} of {len(found.stages)} stages {'would be ' if found.expected else ''}shared"
    if found.is_same:
        return f"the same: {stages}"
    return "; ".join([*_differing(found), stages])


def _differing(found: Difference) -> Iterator[str]:
    loud = [stage.step for stage in found.stages if stage.sharing == "not_reproduced"]
    if loud:
        yield f"NOT REPRODUCED: {', '.join(loud)} (the same work gave another artifact)"
    if found.recipe:
        yield f"differs in {_count(len(found.recipe), 'field')} of the recipe"
    if found.data:
        added, removed = (sum(getattr(each, name) for each in found.data) for name in ("added", "removed"))
        yield f"+{added:,} −{removed:,} rows"
    if found.gates:
        yield _count(len(found.gates), "gate")
    changed = [each for each in found.metrics if each.a != each.b]
    if changed:
        clear = sum(each.is_clear for each in changed)
        yield f"{_count(len(changed), 'metric')}, {clear} of them clearly (the interval of B − A excludes 0)"
    if not found.recipe and not loud and not changed:
        yield "differs"


def _show_stages(console: Console, found: Difference) -> None:
    table = _table("stages, by what they depend on" if found.expected else "stages")
    for column in ("stage", "", "A", "B"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    for stage in found.stages:
        words, style = _SHARING[stage.sharing]
        name = stage.step if stage.step_b is None else f"{stage.step} · {stage.step_b}"
        if found.expected and stage.sharing == "shared":
            words = "would share"
        reasons = list(stage.reasons[:_REASONS_SHOWN])
        if len(stage.reasons) > _REASONS_SHOWN:
            reasons.append(f"and {len(stage.reasons) - _REASONS_SHOWN} more")
        if stage.sharing == "not_reproduced":
            reasons = ["the same key, and another artifact: the same work gave other bits"]
        digests = [Text(safe_text(digest or "")[:12]) for digest in (stage.digest_a, stage.digest_b)]
        table.add_row(
            Text(safe_text(name)), Text(words, style=style), *digests, Text(_short("\n".join(reasons), 10**4))
        )
    console.print(table)


def _show_data(console: Console, found: Difference) -> None:
    if not found.data:
        return
    rows = [
        (
            f"{each.step} {each.split}",
            f"{each.rows_a:,}",
            f"{each.rows_b:,}",
            f"+{each.added:,}",
            f"−{each.removed:,}",
        )
        for each in found.data
    ]
    _show_table(console, "rows", ("dataset", "A", "B", "added", "removed"), rows)
    for each in found.data:
        for sign, style, examples in (
            ("+", "green", each.examples_added),
            ("−", "red", each.examples_removed),
        ):
            for row in examples:
                text = json.dumps(row, ensure_ascii=False)
                line = f"  {sign} {each.step} {each.split}: {_short(text, 300)}"
                console.print(Text(line, style=style), soft_wrap=True)


def _show_provenance(console: Console, found: Difference) -> None:
    if found.provenance:
        rows = [
            (each.part, _digest(each.a), _digest(each.b), ", ".join(each.steps)) for each in found.provenance
        ]
        _show_table(console, "code and machine", ("part", "A", "B", "stages"), rows)
    if found.libraries:
        libraries = [(each.field, *_sides(each.a, each.b, each.only)) for each in found.libraries]
        _show_table(console, "installed", ("distribution", "A", "B"), libraries)


def _show_metrics(console: Console, found: Difference) -> None:
    changed = [each for each in found.metrics if each.a != each.b]
    if not changed:
        return
    table = _table("metrics (intervals at 95 %)")
    for column in ("stage", "metric", "A", "B", "B − A"):
        table.add_column(column, overflow="fold")
    for each in changed:
        style = "bold" if each.is_clear else ""
        table.add_row(
            Text(safe_text(each.step)),
            Text(safe_text(each.metric)),
            Text(_with_interval(each.a, each.interval_a)),
            Text(_with_interval(each.b, each.interval_b)),
            Text(_compared(each), style=style),
        )
    console.print(table)


def _compared(each: MetricDifference) -> str:
    if each.difference is None:
        return ""
    text = _with_interval(each.difference, each.interval, sign="+")
    if each.interval is None:
        return text
    return f"{text} {f'paired, {each.n:,} prompts' if each.paired and each.n else 'unpaired'}"


def _with_interval(value: float | None, interval: Interval | None, *, sign: str = "") -> str:
    if value is None:
        return "—"
    text = f"{value:{sign}.4g}"
    return text if interval is None else f"{text} [{interval[0]:.3g}, {interval[1]:.3g}]"


def _named(side: ComparedSide) -> str:
    parts = [side.named]
    if side.kind == "recipe":
        return f"{side.named}  recipe {side.recipe}, as it is written: nothing of it was computed"
    if side.run_id is not None and side.run_id != side.named:
        parts.append(f"run {side.run_id}")
    if side.stage is not None:
        parts.append(f"{side.stage} {(side.digest or 'without an artifact')[:12]}")
    return "  ".join([*parts, f"recipe {side.recipe}, {str(side.status).replace('_', ' ')}"])


def _sides(a: Any, b: Any, only: str | None) -> tuple[str, str]:
    return ("—" if only == "b" else _value(a), "—" if only == "a" else _value(b))


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _short(text, _LONGEST)


def _or_none(text: str | None) -> str:
    return "—" if text is None else text


def _digest(text: str | None) -> str:
    if text is None:
        return "not recorded"
    is_digest = len(text) in (40, 64) and set(text) <= set("0123456789abcdef")
    return text[:12] if is_digest else text


def _short(text: str, longest: int) -> str:
    text = safe_text(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _show_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = _table(title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(safe_text(cell)) for cell in row))
    console.print(table)

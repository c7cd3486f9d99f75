"""Write numbers, statuses and gates in words."""

from vantage.schemas.records.verdicts import DEFAULT_CONFIDENCE, Verdict

_MARKS = {
    "completed": ("✓", "good"),
    "reused": ("✓", "good"),
    "gate_closed": ("✗", "bad"),
    "failed": ("✗", "bad"),
    "blocked": ("–", "other"),
    "waiting": ("–", "other"),
    "running": ("…", "note"),
    "resumable": ("‖", "warning"),
    "interrupted": ("‖", "warning"),
}
_RUN = {
    "completed": ("good", "The run is complete: every stage has its artifact."),
    "gate_closed": ("bad", "A gate is closed: what depends on it did not run."),
    "failed": ("bad", "A stage failed. The same command goes on from what is kept."),
    "resumable": ("warning", "The run was interrupted. The same command goes on where it stopped."),
    "running": ("note", "The run is under way; this page shows what was known when it was made."),
    "removed": ("warning", "The run was removed by `vantage gc`; its record is left."),
}


def words(name: str) -> str:
    """Return ``gate_closed`` as ``gate closed``."""
    return name.replace("_", " ")


def mark_of(status: str) -> tuple[str, str]:
    """Return a sign for the status of a step, and its colour."""
    return _MARKS.get(status, ("·", "other"))


def outcome_of(status: str) -> tuple[str, str]:
    """Return level and sentence for the status of a run."""
    return _RUN.get(status, ("note", f"The run is {words(status)}."))


def number(value: float | None) -> str:
    """Return four digits; whole numbers in full."""
    if value is None:
        return "undefined"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return ``0.8 s``, ``45 s``, ``12 min 5 s`` or ``3 h 20 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def energy(joules: float) -> str:
    """Return ``850 J``, ``12.5 Wh``, ``4.56 kWh`` or ``2 MWh``."""
    if joules < 3600:
        return f"{joules:.3g} J" if joules < 999.5 else f"{joules:.0f} J"
    watt_hours = joules / 3600
    size, unit = next(
        each for each in ((1e6, "MWh"), (1e3, "kWh"), (1, "Wh")) if watt_hours >= 0.9995 * each[0]
    )
    return (
        f"{watt_hours / size:,.0f} {unit}"
        if watt_hours >= 999.5 * size
        else f"{watt_hours / size:.3g} {unit}"
    )


def about(count: float) -> str:
    """Return a count with two digits: ``1.3 million``."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.2g} {name}" if count < 100 * size else f"{count / size:.0f} {name}"
    return f"{count:.0f}"


def interval_text(interval: tuple[float, float] | None) -> str:
    """Return ``0.995 to 0.999``."""
    return f"{interval[0]:.4g} to {interval[1]:.4g}" if interval else "–"


def verdict_sentence(verdict: Verdict) -> str:
    """Return the measured value, the comparison, and the consequence."""
    asks = "at least" if verdict.relation == ">=" else "at most"
    level = f"{100 * (verdict.confidence or DEFAULT_CONFIDENCE):g} %"
    if verdict.measured is None:
        measured = "It is undefined for these data, which closes a gate"
    else:
        measured = f"Measured was {number(verdict.measured)}"
    over = f" over {verdict.n:,} independent prompts" if verdict.n is not None else ""
    if verdict.interval is not None:
        measured += f"{over}; the {level} interval is {interval_text(verdict.interval)}"
    else:
        measured += over
    compared = ""
    if verdict.confidence is not None and verdict.interval is not None:
        end = "lower" if verdict.relation == ">=" else "upper"
        compared = f" The {end} end of the interval was compared with it."
    why = "".join(f" {each[0].upper()}{each[1:]}." for each in (verdict.reason, verdict.warning) if each)
    return f"It asks for {asks} {verdict.threshold:g}. {measured}.{compared}{why}"


def consequence(verdict: Verdict) -> str:
    """Return ``passed``, or the effect of a closed gate."""
    if verdict.passed:
        return "passed"
    return {
        "stop": "closed: what depends on it did not run",
        "extend": "closed, and the stage is extended no further: what depends on it did not run",
        "continue": "closed, and the recipe says to go on",
    }.get(verdict.on_fail, f"closed ({verdict.on_fail})")

"""The facts of an attempt that MLflow and the report show beside its time and energy: one row each.

A new fact is one row here and its reader in ``vantage.attempts.facts``. The outbox, MLflow's tags, the audit, the report and
the table in docs/report.md follow from the row.
"""

from dataclasses import dataclass

Facts = dict[str, str]
"""Name → value as it is shown; a fact that could not be read is missing."""

TAG = "vantage.fact."
"""Prefix of the names of MLflow's tags."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One row: a fact of the machine or the process when the computation of an attempt begins."""

    name: str
    """Name in records, and after ``TAG`` in MLflow."""
    heading: str
    """Heading of its column in the report."""
    meaning: str
    """One sentence, below the report's table and in the documentation."""


FACTS: tuple[Fact, ...] = (
    Fact(
        name="load",
        heading="load at its start",
        meaning="The load is the machine's mean number of running processes in the minute before the attempt computed, and its CPUs: "
        "times of a loaded machine are not those of an idle one.",
    ),
)
"""All facts, in the order of the report's columns."""


def fact_tags(facts: Facts) -> dict[str, str]:
    """Return tag of MLflow → value."""
    return {f"{TAG}{name}": value for name, value in facts.items()}


def docs_table() -> str:
    """Return the table of facts in docs/report.md."""
    rows = [f"| {fact.heading} | `{TAG}{fact.name}` | {fact.meaning} |" for fact in FACTS]
    return "\n".join(["| column | tag in MLflow | meaning |", "|---|---|---|", *rows]) + "\n"

"""Draw the annex of a report: each question with its facts and where they are recorded, and what is unknown."""

from collections.abc import Sequence

from vantage.ledger.pages.elements import cut, safe
from vantage.review.reports.annex_xi import Question

_LONGEST = 600

ANNEX_STYLE = """
.question { border-top: 1px solid var(--line); padding: .5rem 0; max-width: 60rem; break-inside: avoid-page; }
.question h3 { margin: 0; } .question ul { margin: .25rem 0; padding-left: 1.25rem; } .question li { overflow-wrap: anywhere; }
.unknown { color: var(--warning); font-weight: 600; }
"""


def annex_section(questions: Sequence[Question]) -> str:
    """Return the section that answers the questions of the EU AI Act's Annex XI."""
    answered = sum(bool(each.facts) for each in questions)
    complete = sum(not each.unknown for each in questions)
    explained = (
        f"<p>The points of Annex XI of Regulation (EU) 2024/1689, in our own words. Every answer is a fact of this run's record, "
        f"with its place; what the record does not contain is marked as unknown. The record answers {complete} of "
        f"{len(questions)} points whole and {answered - complete} in part. Whether the regulation applies to this model, and "
        "whether an answer is enough, is not decided here.</p>"
    )
    return "\n".join([explained, *map(_question, questions)])


def _question(of: Question) -> str:
    facts = "".join(
        f'<li>{safe(cut(fact.text, _LONGEST))} <span class="soft">({safe(fact.source)})</span></li>'
        for fact in of.facts
    )
    unknown = "".join(f'<li><span class="unknown">Unknown:</span> {safe(each)}</li>' for each in of.unknown)
    return f'<article class="question"><h3>{safe(of.point)}: {safe(of.asks)}</h3><ul>{facts}{unknown}</ul></article>'

"""The page of an evaluation's samples, side by side: one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from schemas.safe_text import POLICY, safe_text

MAX_SHOWN = 100
"""Prompts on the page."""
ROLES = ("baseline", "candidate")
JUDGEMENTS = ("judgement", "also_judgement")
"""Columns of a response: by the stage's ``judge``, and by ``also``."""

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --card: #8881; --good: #2e9e5b; --bad: #d64545; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } section { margin: 2rem 0; border-top: 1px solid var(--line); }
pre { font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0; }
.prompt { background: var(--card); padding: .6rem 1rem; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
.side { padding: .6rem 1rem; border: 1px solid var(--line); border-radius: .5rem; }
.side.won { border-color: var(--good); } .side.lost { border-color: var(--bad); }
.said { font-size: .9rem; font-weight: 600; }
"""


def samples_page(
    title: str, candidate: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]
) -> str:
    """Prompt, both responses and their judgements, for the first response to each prompt.

    The first prompts at which the two say different things come first, whoever did better, as on the console.

    Args:
        candidate, baseline: rows of an evaluation's artifact (``prompt``, ``response``, ``ended``, ``judgement`` …), the i-th of
            one beside the i-th of the other.
    """
    first: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for ours, theirs in zip(candidate, baseline, strict=True):
        first.setdefault(ours["prompt"], (ours, theirs))
    pairs = sorted(first.values(), key=lambda pair: pair[0]["response"] == pair[1]["response"])[:MAX_SHOWN]
    told = f"{len(pairs):,} of {len(first):,} prompts, the first response of each model."
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{POLICY}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>\n<h1>{_text(title)}</h1>\n<p>{told}</p>\n"
        + "\n".join(_pair(ours, theirs) for ours, theirs in pairs)
        + "\n</body></html>\n"
    )


def _pair(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    difference = ours["judgement"] - theirs["judgement"]
    marks = dict.fromkeys(ROLES, "")
    if difference:
        marks = (
            {"candidate": " won", "baseline": " lost"}
            if difference > 0
            else {"candidate": " lost", "baseline": " won"}
        )
    sides = "".join(
        f'<div class="side{marks[role]}"><div class="said">{_said(role, row)}</div><pre>{_text(row["response"])}</pre></div>'
        for role, row in zip(ROLES, (theirs, ours), strict=True)
    )
    return f'<section><pre class="prompt">{_text(ours["prompt"])}</pre><div class="sides">{sides}</div></section>'


def _said(role: str, row: Mapping[str, Any]) -> str:
    """The side, what its judges say, and whether it was cut off."""
    judged = [f"{name.replace('_', ' ')} {row[name]:g}" for name in JUDGEMENTS if name in row]
    cut = [] if row["ended"] else ["cut off"]
    return " · ".join([role, *judged, *cut])


def _text(text: str) -> str:
    """Text of prompts and responses, which may hold anything; never for an attribute."""
    return escape(safe_text(text), quote=False)

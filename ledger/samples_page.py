"""The page of an evaluation's samples, side by side: one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from vantage.ledger.pages.elements import page, safe

MAX_SHOWN = 100
"""Number of prompts on the page."""
ROLES = ("baseline", "candidate")
JUDGEMENTS = ("judgement", "also_judgement")
"""Columns with a response's judgements: by the stage's ``judge``, and by ``also``."""


def samples_page(
    title: str, candidate: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]
) -> str:
    """Return prompt, both responses and their judgements, for the first response to each prompt.

    The first prompts with different responses come first, whichever model did better, as on the console.

    Args:
        candidate, baseline: rows of an evaluation's artifact (``prompt``, ``response``, ``ended``, ``judgement`` …), the i-th of
            one beside the i-th of the other.
    """
    first: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for ours, theirs in zip(candidate, baseline, strict=True):
        first.setdefault(ours["prompt"], (ours, theirs))
    pairs = sorted(first.values(), key=lambda pair: pair[0]["response"] == pair[1]["response"])[:MAX_SHOWN]
    summary = f"{len(pairs):,} of {len(first):,} prompts, the first response of each model."
    return page(title, f"<p>{summary}</p>\n" + "\n".join(pair(ours, theirs) for ours, theirs in pairs))


def pair(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return a section with one prompt and the responses of candidate (``ours``) and baseline (``theirs``)."""
    difference = ours["judgement"] - theirs["judgement"]
    marks = dict.fromkeys(ROLES, "")
    if difference:
        marks = (
            {"candidate": " won", "baseline": " lost"}
            if difference > 0
            else {"candidate": " lost", "baseline": " won"}
        )
    sides = "".join(
        f'<div class="side{marks[role]}"><div class="said">{_said(role, row)}</div><pre>{safe(row["response"])}</pre></div>'
        for role, row in zip(ROLES, (theirs, ours), strict=True)
    )
    return f'<section class="pair"><pre class="prompt">{safe(ours["prompt"])}</pre><div class="sides">{sides}</div></section>'


def _said(role: str, row: Mapping[str, Any]) -> str:
    """Return the side, its judges' judgements, and whether it was cut off."""
    judged = [f"{name.replace('_', ' ')} {row[name]:g}" for name in JUDGEMENTS if name in row]
    cut = [] if row["ended"] else ["cut off"]
    return " · ".join([role, *judged, *cut])

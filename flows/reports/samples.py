"""Samples of an evaluation side by side, with the log-probability of each token where it was recorded."""

from flows.reports.gathered import Answer, Comparison, Sample
from flows.reports.words import words
from ledger.pages.elements import cut, safe

_LONGEST = 2_000
"""Characters of a prompt or a response."""
_RARE = -2.0
"""Nats: a token that was drawn with a probability below 0.14 is marked."""


def sample_parts(comparison: Comparison) -> list[str]:
    """Heading, pairs, and what is missing."""
    notes = [f'<p class="soft">{safe(each)}</p>' for each in comparison.missing]
    if not comparison.samples:
        return notes
    shown = len(comparison.samples)
    heading = (
        f"<h3>Samples side by side</h3><p>The first response of each model to {shown} test prompts; those come first at which "
        "the two say different things, whoever did better.</p>"
    )
    return [heading, *notes, *(_pair(sample, comparison) for sample in comparison.samples)]


def _pair(sample: Sample, comparison: Comparison) -> str:
    sides = (
        ("baseline", comparison.baseline, sample.baseline),
        ("candidate", comparison.candidate, sample.candidate),
    )
    drawn = "".join(
        f'<div class="side{_mark(role, sample)}"><div class="said">{safe(_said(role, name, answer))}</div>'
        f"<pre>{safe(cut(answer.text, _LONGEST))}</pre>{_tokens(answer)}</div>"
        for role, name, answer in sides
    )
    prompt = safe(cut(sample.prompt, _LONGEST))
    return f'<div class="pair"><pre class="prompt">{prompt}</pre><div class="sides">{drawn}</div></div>'


def _mark(role: str, sample: Sample) -> str:
    """Which side did better, by the first judge."""
    if not sample.baseline.judgements or not sample.candidate.judgements:
        return ""
    difference = sample.candidate.judgements[0][1] - sample.baseline.judgements[0][1]
    if not difference:
        return ""
    return " won" if (difference > 0) == (role == "candidate") else " lost"


def _said(role: str, name: str, answer: Answer) -> str:
    judged = [f"{words(judge)} {value:g}" for judge, value in answer.judgements]
    return " · ".join([f"{role} ({name})", *judged, *([] if answer.ended else ["cut off"])])


def _tokens(answer: Answer) -> str:
    if not answer.tokens:
        return ""
    total = sum(token.logprob for token in answer.tokens)
    tokens = "".join(
        f'<span class="{"rare" if token.logprob < _RARE else "likely"}">{safe(_visible(token.text))}'
        f"<small>{_two_decimals(token.logprob)}</small></span>"
        for token in answer.tokens
    )
    more = f" {answer.more_tokens:,} more tokens were not recorded." if answer.more_tokens else ""
    return (
        f'<details><summary>Log-probability of each of {len(answer.tokens)} tokens</summary><p class="soft">In nats, when it was '
        f"drawn; {_two_decimals(total)} together. A token that was drawn against the odds (below {_RARE:g}) has a thick border.{more}</p>"
        f'<div class="tokens">{tokens}</div></details>'
    )


def _two_decimals(logprob: float) -> str:
    """Without a sign where nothing is left of the number."""
    shown = f"{logprob:.2f}"
    return shown.lstrip("-") if float(shown) == 0.0 else shown


def _visible(text: str) -> str:
    """Spaces and line ends as signs."""
    return text.replace(" ", "␣").replace("\n", "⏎") or "∅"

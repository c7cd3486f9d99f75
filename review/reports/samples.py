"""Show samples of an evaluation side by side, and token by token if that was recorded."""

from collections.abc import Iterator

from vantage.ledger.pages.elements import cut, figures, safe
from vantage.review.reports.gathered import Answer, Comparison, Sample, Token
from vantage.review.reports.plots import value_plot
from vantage.review.reports.words import number, words

_LONGEST = 2_000
"""Most characters of a prompt or a response."""
_SURPRISE = ((-0.1, "s0", "90 % or more"), (-1.0, "s1", "37 to 90 %"), (-2.0, "s2", "14 to 37 %"))
"""Lowest log-probability (nats), style and probability in words of each class of drawn tokens."""
_RARE = ("s3", "below 14 %")
SAMPLES_STYLE = """
.tokens, .legend { font-family: ui-monospace, monospace; font-size: .85rem; }
.tokens { display: flex; flex-wrap: wrap; gap: .35rem .2rem; align-items: flex-start; margin: .35rem 0; }
.token { border: 1px solid var(--line); border-radius: .2rem; padding: 0 .25rem; text-align: center; white-space: pre-wrap;
  max-width: 100%; min-width: 2.6rem; overflow-wrap: anywhere; color: var(--ink); print-color-adjust: exact; }
.token small { display: block; font-size: .8rem; white-space: nowrap; }
.s1 { background: color-mix(in srgb, var(--two) 15%, var(--page)); }
.s2 { background: color-mix(in srgb, var(--two) 30%, var(--page)); }
.s3 { background: color-mix(in srgb, var(--two) 45%, var(--page)); border: 2px solid var(--two); }
.token i { display: block; height: .3rem; margin: .1rem 0; background: var(--line); print-color-adjust: exact; }
.token i b { display: block; height: 100%; background: var(--one); print-color-adjust: exact; }
.legend { background: var(--card); padding: .6rem 1rem; max-width: 60rem; }
.legend p { font-family: system-ui, sans-serif; margin: .25rem 0; max-width: none; }
.by-token figure { max-width: 30rem; }
"""


def sample_parts(comparison: Comparison) -> list[str]:
    """Return heading, legend, pairs, and missing parts."""
    notes = [f'<p class="soft">{safe(each)}</p>' for each in comparison.missing]
    if not comparison.samples:
        return notes
    shown = len(comparison.samples)
    heading = (
        f"<h3>Samples side by side</h3><p>The first response of each model to {shown} test prompts; those come first at which "
        "the two say different things, whoever did better. A green frame is around the response that was judged better, a red "
        "one around the other.</p>"
    )
    pairs = [_pair(place, sample, comparison) for place, sample in enumerate(comparison.samples)]
    return [heading, *notes, _legend(comparison), *pairs]


def _pair(place: int, sample: Sample, comparison: Comparison) -> str:
    drawn = "".join(
        f'<div class="side{_mark(role, sample)}"><div class="said">{safe(_said(role, name, answer))}</div>'
        f'<pre dir="auto">{safe(cut(answer.text, _LONGEST))}</pre></div>'
        for role, name, answer in _sides(sample, comparison)
    )
    prompt = safe(cut(sample.prompt, _LONGEST))
    return (
        f'<div class="pair"><h4>Prompt {place + 1} of {len(comparison.samples)}</h4><pre class="prompt" dir="auto">{prompt}</pre>'
        f'<div class="sides">{drawn}</div>{_by_token(place, sample, comparison)}</div>'
    )


def _sides(sample: Sample, comparison: Comparison) -> tuple[tuple[str, str, Answer], ...]:
    return (
        ("baseline", comparison.baseline, sample.baseline),
        ("candidate", comparison.candidate, sample.candidate),
    )


def _mark(role: str, sample: Sample) -> str:
    """Return which side did better, by the first judge."""
    if not sample.baseline.judgements or not sample.candidate.judgements:
        return ""
    difference = sample.candidate.judgements[0][1] - sample.baseline.judgements[0][1]
    if not difference:
        return ""
    return " won" if (difference > 0) == (role == "candidate") else " lost"


def _said(role: str, name: str, answer: Answer) -> str:
    judged = [f"{words(judge)} {number(value)}" for judge, value in answer.judgements]
    return " · ".join([f"{role} ({name})", *judged, *([] if answer.ended else ["cut off"])])


# -- token by token


def _legend(comparison: Comparison) -> str:
    """Return the legend of tokens; empty if none was recorded."""
    scale = _scale(comparison)
    if not any(answer.tokens for sample in comparison.samples for answer in _answers(sample)):
        return ""
    levels = [(-0.02, _SURPRISE[0]), (-0.5, _SURPRISE[1]), (-1.5, _SURPRISE[2]), (-3.2, (0, *_RARE))]
    examples = "".join(
        f'<span class="token {style}">{said}<small>{logprob:.2f}</small></span>'
        for logprob, (_, style, said) in levels
    )
    parts = [
        "<p><strong>How to read the tokens.</strong> A response is drawn token by token. The number under a token is the "
        "logarithm of the probability with which it was drawn (in nats; 0 is certain). The stronger its colour, the less likely it "
        f'was:</p><div class="tokens">{examples}</div>'
    ]
    if scale is not None:
        low, high = scale
        middle = (low + high) / 2
        values = "".join(
            f'<span class="token">{said}{_value(value, scale)}</span>'
            for said, value in (("lowest", low), ("middle", middle), ("highest", high))
        )
        parts.append(
            f"<p>The number after V is the token's value: how much reward the critic of <strong>{safe(comparison.critic or '')}</strong> "
            "expects from here to the end, before it has seen the token. A value that falls shows that the critic did not like "
            "the token before. The fuller the bar, the higher the value among those of these samples:</p>"
            f'<div class="tokens">{values}</div>'
        )
    return f'<div class="legend">{"".join(parts)}</div>'


def _answers(sample: Sample) -> tuple[Answer, Answer]:
    return sample.baseline, sample.candidate


def _values(comparison: Comparison) -> Iterator[float]:
    for sample in comparison.samples:
        for answer in _answers(sample):
            yield from (token.value for token in answer.tokens if token.value is not None)


def _scale(comparison: Comparison) -> tuple[float, float] | None:
    """Return the lowest and the highest value of all tokens; None: there are no values."""
    values = list(_values(comparison))
    return (min(values), max(values)) if values else None


def _by_token(place: int, sample: Sample, comparison: Comparison) -> str:
    if not any(answer.tokens for answer in _answers(sample)):
        return ""
    scale = _scale(comparison)
    plot = value_plot(comparison, place)
    sides = "".join(
        f'<div class="side"><div class="said">{safe(f"{role} ({name})")}</div>{_tokens(answer, scale)}</div>'
        for role, name, answer in _sides(sample, comparison)
    )
    what = "log-probability and value" if scale is not None else "log-probability"
    return (
        f'<details class="by-token"{" open" if place == 0 else ""}><summary>Prompt {place + 1} token by token: {what}</summary>'
        f'{figures([plot] if plot else [])}<div class="sides">{sides}</div></details>'
    )


def _tokens(answer: Answer, scale: tuple[float, float] | None) -> str:
    if not answer.tokens:
        return '<p class="soft">Its tokens were not recorded.</p>'
    total = sum(token.logprob for token in answer.tokens)
    more = f" {answer.more_tokens:,} more tokens were not recorded." if answer.more_tokens else ""
    return (
        f'<p class="soft">{len(answer.tokens)} tokens, log-probability {_two_decimals(total)} together.{more}</p>'
        f'<div class="tokens">{"".join(_box(token, scale) for token in answer.tokens)}</div>'
    )


def _box(token: Token, scale: tuple[float, float] | None) -> str:
    """Return a token with its numbers; the style shows how surprising it was, the bar shows the critic's value."""
    style = next((style for lowest, style, _ in _SURPRISE if token.logprob >= lowest), _RARE[0])
    value = _value(token.value, scale) if token.value is not None and scale is not None else ""
    return (
        f'<span class="token {style}"><bdi>{safe(_visible(token.text))}</bdi>'
        f"<small>{_two_decimals(token.logprob)}</small>{value}</span>"
    )


def _value(value: float, scale: tuple[float, float]) -> str:
    """Show a value as a number and as a bar."""
    low, high = scale
    share = (value - low) / (high - low) if high > low else 1.0
    return f'<small>V {_two_decimals(value)}</small><i><b style="width:{100 * share:.0f}%"></b></i>'


def _two_decimals(found: float) -> str:
    """Write a number without a sign if it is rounded to 0; a large one in four digits."""
    if abs(found) >= 1000:
        return number(found)
    shown = f"{found:.2f}"
    return shown.lstrip("-") if float(shown) == 0.0 else shown


def _visible(text: str) -> str:
    """Show spaces and line ends as visible signs."""
    return text.replace(" ", "␣").replace("\n", "⏎") or "∅"

"""Warnings about a stage's headline metrics, and a summary of the data that it dropped.

Both depend on headline metrics alone, so a reused artifact gives the same texts. All thresholds are in ``RULES``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class Rule:
    """A warning for a headline metric, or for its share of another metric, beyond a bound."""

    metric: str
    text: str
    """Meaning and remedy; ``{value}`` is the share in per cent."""
    above: float | None = None
    at_most: float | None = None
    of: str | None = None
    """The metric to divide by; None: the metric is used as it is."""
    less: str | None = None
    """A metric that is subtracted before the division."""

    def broken_by(self, metrics: Metrics) -> str | None:
        """Return the warning if the metrics exceed the bound; None also if one of them is missing or undefined."""
        names = [name for name in (self.metric, self.less, self.of) if name is not None]
        if any(metrics.get(name) is None for name in names):
            return None
        value = _number(metrics, self.metric) - (_number(metrics, self.less) if self.less else 0.0)
        if self.of is not None:
            whole = _number(metrics, self.of)
            value = value / whole if whole else 0.0
        is_broken = (self.above is not None and value > self.above) or (
            self.at_most is not None and value <= self.at_most
        )
        return self.text.format(value=_per_cent(value)) if is_broken else None


RULES: tuple[Rule, ...] = (
    Rule(
        "dropped_rows", above=0.01, less="repeated_rows", of="source_rows",
        text="{value} of the source's rows cannot be used and were dropped; report.json shows the first of them",
    ),
    Rule(
        "repeated_rows", above=0.1, of="source_rows",
        text="{value} of the source's rows repeat an earlier row and were left out",
    ),
    Rule(
        "prompts_too_long_share", above=0.01,
        text="{value} of the rows were left out, since their prompts are longer than generation.max_prompt_tokens",
    ),
    Rule(
        "responses_cut_share", above=0.1,
        text="{value} of the data's responses were cut off at generation.max_response_tokens, so the model is never "
        "shown how they end; raise it, or use shorter ones",
    ),
    Rule(
        "unknown_token_share", above=0.01,
        text="{value} of the tokens are unknown to the model's tokenizer (<unk>), which cannot tell such text apart; "
        "use a model that knows its characters",
    ),
    Rule(
        "single_byte_share", above=0.5,
        text="{value} of the tokens are single bytes: the model's tokenizer has hardly a piece for this text, and the "
        "model has probably not seen its language; use one that has",
    ),
    Rule(
        "truncated_share", above=0.4999,
        text="{value} of the sampled responses were cut off at generation.max_response_tokens before they ended; raise "
        "it, or teach the policy to end (missing_eos, demonstrations that end)",
    ),
    Rule(
        "tied_share", above=0.8999,
        text="{value} of the prompts gave no pair: the judge can hardly tell the responses apart",
    ),
    Rule(
        "return_variance", at_most=0.0,
        text="all returns are equal, so there is nothing for a critic to learn; look at the reward",
    ),
    Rule(
        "uncompiled_share", above=0.0,
        text="{value} of the networks run as they are written, though the stage says compile: true; its log says why",
    ),
    Rule(
        "reward_spread", at_most=0.0,
        text="all responses got the same score; unless the task is solved, the reward teaches nothing",
    ),
)  # fmt: skip


def warnings_of(metrics: Metrics) -> tuple[str, ...]:
    """Return the warnings for a stage's headline metrics."""
    return tuple(text for rule in RULES if (text := rule.broken_by(metrics)) is not None)


def dropped_summary(metrics: Metrics, reasons: Mapping[str, int] | None = None) -> str | None:
    """Return one line with the data that a stage dropped or truncated; None if there is none.

    Args:
        metrics: the stage's headline metrics.
        reasons: for prepared data: reason why rows were dropped → number of rows.
    """
    parts = []
    if dropped := metrics.get("dropped_rows"):
        why = ", ".join(f"{reason}: {count:,}" for reason, count in (reasons or {}).items())
        rows = (
            f"{dropped:,.0f} of {metrics['source_rows']:,.0f} rows"
            if metrics.get("source_rows")
            else f"{dropped:,.0f} rows"
        )
        parts.append(f"{rows} dropped{f' ({why})' if why else ''}")
    for name, share, text in (
        ("prompts_too_long", "prompts_too_long_share", "prompts too long"),
        ("responses_cut", "responses_cut_share", "responses cut off"),
        ("rows_alike_after_cut", None, "rows with equal responses after the cut"),
    ):
        if count := metrics.get(name):
            of = metrics.get(share) if share else None
            parts.append(f"{count:,.0f} {text}{f' ({_per_cent(of)})' if of else ''}")
    return "; ".join(parts) or None


def _number(metrics: Metrics, name: str) -> float:
    value = metrics[name]
    assert value is not None
    return value


def _per_cent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"

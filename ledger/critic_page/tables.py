"""The tables of a critic's diagnosis, each with a sentence about good values."""

from collections.abc import Callable, Iterable, Sequence

from vantage.ledger.pages.elements import Table
from vantage.schemas.records.critic_advice import number, share, tokens
from vantage.schemas.records.critic_diagnosis import (
    CriticDiagnosis,
    CriticDrift,
    DiagnosedSlice,
    DriftPoint,
    Estimated,
)

_MOST_ITERATIONS = 24
"""Most iterations of a course that are shown."""


def summary(diagnosis: CriticDiagnosis) -> str:
    """Return the measurements, in one sentence."""
    return (
        f"{_count(diagnosis.responses, 'response')} to {_count(diagnosis.prompts, 'test prompt')}, "
        f"{_count(diagnosis.tokens, 'token')}; mean return {number(diagnosis.return_mean)}, variance "
        f"{number(diagnosis.return_variance)}. Intervals are at 95 %, over prompts."
    )


def diagnosis_tables(diagnosis: CriticDiagnosis) -> list[Table]:
    """Return all tables of a pretrained critic; those without a row are left out."""
    tables = [
        _whole(diagnosis),
        _baselines(diagnosis),
        _slices(
            "Along the response",
            "A critic knows more the nearer the end is. Good: above 0 from the first tenth on, and rising.",
            "tenth of the response",
            [(f"{each.label}.", each) for each in diagnosis.by_tenth],
            diagnosis.tokens,
        ),
        _slices(
            "By tokens left",
            "The same by the number of tokens from a token to the end. Good: above 0 far from the end too, where the policy "
            "decides most.",
            "tokens left",
            [(tokens(each.label), each) for each in diagnosis.by_tokens_left],
            diagnosis.tokens,
        ),
        _slices(
            "By length of the response",
            "Good: above 0 in all rows. Long responses below 0 are what the critic has seen too little of.",
            "length",
            [(tokens(each.label), each) for each in diagnosis.by_length],
            diagnosis.tokens,
        ),
        _slices(
            "By difficulty",
            "By how well the other responses to the same prompt did. Good: above 0 in all rows, and no large bias.",
            "responses",
            [(f"{each.label} third", each) for each in diagnosis.by_difficulty],
            diagnosis.tokens,
        ),
        _calibration(diagnosis),
        _orderings(diagnosis),
        _worst_prompts(diagnosis),
    ]
    return [table for table in tables if table.rows]


def drift_table(drift: CriticDrift) -> Table:
    """Return a critic over the iterations of a policy stage."""
    weight = (
        " Critic's weight: 1, advantages are the critic's; 0, the batch mean's." if drift.is_switched else ""
    )
    columns: list[tuple[str, Callable[[DriftPoint], str]]] = [
        ("iteration", lambda point: str(point.iteration)),
        ("explained variance", lambda point: share(point.explained_variance)),
        *([("critic's weight", lambda point: share(point.critic_weight))] if drift.is_switched else []),
        ("bias", lambda point: number(point.value_bias)),
        ("value loss", lambda point: number(point.value_loss)),
    ]
    return Table(
        "Over the iterations",
        "Explained variance is measured on each iteration's responses, before the critic learned from them. Good: it stays "
        f"above 0 while the policy changes, and bias (value − return) stays near 0.{weight}",
        tuple(heading for heading, _ in columns),
        tuple(tuple(cell(point) for _, cell in columns) for point in _thinned(drift.points)),
        left=0,
    )


def _whole(diagnosis: CriticDiagnosis) -> Table:
    rows = [
        ("all tokens", diagnosis.explained_variance),
        ("which prompts go well (their mean returns)", diagnosis.between_prompts),
        ("which responses to a prompt go well", diagnosis.within_prompts),
    ]
    return Table(
        "Explained variance",
        "How much of the differences between returns the critic predicts. 1: all; 0: no more than a constant; below 0: less "
        "than a constant. Good: the whole interval is above 0.",
        ("", "explained variance", "95 % interval", "prompts"),
        tuple(
            (name, share(each.value), _interval(each, share), f"{each.n:,}")
            for name, each in rows
            if each is not None
        ),
    )


def _baselines(diagnosis: CriticDiagnosis) -> Table:
    squares = diagnosis.advantages
    rows = [
        ("this critic", squares.critic),
        ("mean of the batch", squares.batch_mean),
        ("mean of the other responses to the prompt", squares.others_mean),
    ]
    whole = squares.batch_mean.value
    return Table(
        "Baselines on the same responses",
        "An advantage is a return less a baseline, and large advantages make the policy's gradient noisy, above all at "
        "tokens that the policy found improbable. Good: this critic's mean square is the smallest.",
        ("baseline", "mean squared advantage", "95 % interval", "of the batch mean's"),
        tuple(
            (
                name,
                number(each.value),
                _interval(each),
                f"{100 * each.value / whole:.0f} %" if each.value is not None and whole else "–",
            )
            for name, each in rows
            if each is not None
        ),
    )


def _slices(
    title: str, good: str, heading: str, slices: Sequence[tuple[str, DiagnosedSlice]], all_tokens: int
) -> Table:
    return Table(
        title,
        good,
        (heading, "explained variance", "95 % interval", "bias", "of the tokens"),
        tuple(
            (
                name,
                share(each.explained_variance.value),
                _interval(each.explained_variance, share),
                number(each.bias.value),
                _per_cent(each.tokens / all_tokens),
            )
            for name, each in slices
        ),
    )


def _calibration(diagnosis: CriticDiagnosis) -> Table:
    return Table(
        "Calibration",
        "Tokens in the order of their values, in tenths. Good: in each row the mean return is about the mean value. Bias over "
        f"all tokens: {number(diagnosis.bias.value)} (interval {_interval(diagnosis.bias)}).",
        ("mean value", "mean return", "value − return", "95 % interval", "tokens"),
        tuple(
            (
                number(each.value),
                number(each.returned.value),
                number(each.error.value),
                _interval(each.error),
                f"{each.tokens:,}",
            )
            for each in diagnosis.calibration
        ),
        left=0,
    )


def _orderings(diagnosis: CriticDiagnosis) -> Table:
    names = {0.25: "after a quarter", 0.5: "half-way", 0.75: "after three quarters", 1.0: "at the last token"}
    return Table(
        "Order of responses to one prompt",
        "Of two responses to a prompt, does the better one have the higher value? 1: always; 0: as often as by chance; "
        "−1: never. Good: above 0 half-way, and rising.",
        ("part of the response", "rank correlation", "95 % interval", "pairs"),
        tuple(
            (
                names[each.at],
                share(each.correlation.value),
                _interval(each.correlation, _correlation),
                f"{each.correlation.rows:,}",
            )
            for each in diagnosis.orderings
        ),
    )


def _worst_prompts(diagnosis: CriticDiagnosis) -> Table:
    return Table(
        "Prompts with the largest error",
        "Where the critic is wrong most. One unlucky response is no fault of the critic; look for prompts that have "
        "something in common.",
        ("prompt", "responses", "mean value", "mean return", "of the squared error"),
        tuple(
            (
                " ".join(each.prompt.split()),
                f"{each.responses:,}",
                number(each.value),
                number(each.returned),
                f"{100 * each.share:.1f} %",
            )
            for each in diagnosis.worst_prompts
        ),
    )


def _thinned(points: Sequence[DriftPoint]) -> Iterable[DriftPoint]:
    """Return at most ``_MOST_ITERATIONS`` points, including the first and the last."""
    if len(points) <= _MOST_ITERATIONS:
        return points
    last = len(points) - 1
    return [points[round(place * last / (_MOST_ITERATIONS - 1))] for place in range(_MOST_ITERATIONS)]


def _interval(estimate: Estimated, shown: Callable[[float], str] = number) -> str:
    interval = estimate.interval
    return f"{shown(interval[0])} to {shown(interval[1])}" if interval else "–"


def _correlation(bound: float) -> str:
    """Return the bound of a correlation's interval in words, cut to −1 … 1, beyond which few prompts may move it."""
    return share(min(max(bound, -1.0), 1.0))


def _per_cent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 else "< 1 %"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

"""Formulas of two-sided intervals: numbers in, numbers out. `t` is the quantile for the confidence."""

import math
from collections.abc import Callable

_HALVINGS = 100
"""Halvings of a range of 2: more than float64 has digits."""


def student(confidence: float, degrees: float) -> float:
    """Return the quantile of Student's t that a two-sided interval at this confidence has at its ends."""
    from scipy.special import stdtrit  # lazily: it takes a tenth of a second to load

    return float(stdtrit(degrees, (1 + confidence) / 2))


def wilson(share: float, rows: float, t: float) -> tuple[float, float]:
    """Return Wilson's score interval (1927) of a share of `rows` independent rows."""
    weight = t * t / rows
    centre = (share + weight / 2) / (1 + weight)
    half = t * math.sqrt(share * (1 - share) / rows + weight / (4 * rows)) / (1 + weight)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def exact_share(share: float, rows: float, confidence: float) -> tuple[float, float]:
    """Return the exact interval (Clopper and Pearson, 1934) of a share of `rows` independent rows, which need not be whole."""
    from scipy.special import betaincinv  # lazily, as above

    right, tail = share * rows, (1 - confidence) / 2
    low = float(betaincinv(right, rows - right + 1, tail)) if right > 0 else 0.0
    high = float(betaincinv(right + 1, rows - right, 1 - tail)) if right < rows else 1.0
    return low, high


def share_of_gate(share: float, rows: float, t: float, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval; its end on the side of the rarer outcome is the exact one if that is wider.

    Of n rows, one right answer puts Wilson's lower end at 0.18/n, and a share of 0.18/n gives one or more in 16 % of cases.
    """
    low, high = wilson(share, rows, t)
    exact = exact_share(share, rows, confidence)
    return (min(low, exact[0]) if share < 0.5 else low, max(high, exact[1]) if share > 0.5 else high)


def paired_score(difference: float, differing: float, rows: float, t: float) -> tuple[float, float]:
    """Return the score interval of a difference of two paired shares (Tango, Statistics in Medicine 17, 1998, 891-908).

    Of `rows` pairs a share `differing` has two different outcomes, b pairs for and c pairs against, with
    b − c = `difference`·rows. The interval holds every δ with |b − c − rows·δ| ≤ t·√(rows·(2·q + δ·(1 − δ))), where q is
    the share against that is most likely if the difference is δ: the variance is that of the bound, not that of the
    measured pairs, which is 0 where none differs. `rows` need not be whole.
    """
    gained, lost = rows * (differing + difference) / 2, rows * (differing - difference) / 2
    return _lower_score(gained, lost, rows, t), -_lower_score(lost, gained, rows, t)


def bonett_price(difference: float, differing: float, rows: float, t: float) -> tuple[float, float]:
    """Return the interval of a difference of two paired shares with one pair more of either kind.

    p = (b + 1)/(rows + 2) and q = (c + 1)/(rows + 2), counts as in `paired_score`: p − q ± t·√((p + q − (p − q)²)/(rows + 2)).
    (Bonett and Price, J. of Educational and Behavioral Statistics 37, 2012, 479-488, there with the normal quantile.)
    """
    centre, both = rows * difference / (rows + 2), (rows * differing + 2) / (rows + 2)
    half = t * math.sqrt(max(both - centre * centre, 0.0) / (rows + 2))
    return max(centre - half, -1.0), min(centre + half, 1.0)


def paired_shares(difference: float, differing: float, rows: float, t: float) -> tuple[float, float]:
    """Return the wider end of both intervals on each side.

    Where most pairs that differ are gained, the score's lower end is a little too high, and where most are lost, the other's.
    """
    score, more = (each(difference, differing, rows, t) for each in (paired_score, bonett_price))
    return min(score[0], more[0]), max(score[1], more[1])


def around_zero_to_infinity(value: float, error: float, t: float) -> tuple[float, float] | None:
    """Return value·e^(∓t·error/value), of a positive number whose logarithm is nearly normal; None beyond float64."""
    if not value > 0:
        return None
    exponent = t * error / value
    if exponent > math.log(1e300):
        return None
    return value * math.exp(-exponent), value * math.exp(exponent)


def bounded_score(
    mean: float, error: float, prompts: float, t: float, *, lowest: float, highest: float
) -> tuple[float, float]:
    """Return the interval of a mean of numbers between two bounds, which holds where none of n prompts was far off.

    Among the prompts that were not drawn, a share p may be at the bound. It moves the mean by x = h·p and adds h·x/n to
    its variance, h the distance to the bound. So x² = t²·(error² + h·x/n), solved for x on each side.
    """

    def reach(distance: float) -> float:
        half = t * t * distance / (2 * prompts)
        return half + math.sqrt(half * half + t * t * error * error)

    return max(mean - reach(mean - lowest), lowest), min(mean + reach(highest - mean), highest)


def _lower_score(gained: float, lost: float, rows: float, t: float) -> float:
    """Return the lowest difference that the score test does not reject."""
    measured = (gained - lost) / rows

    def is_rejected(delta: float) -> bool:
        linear = -gained - lost + (2 * rows - gained + lost) * delta
        root = math.sqrt(max(linear * linear + 8 * rows * lost * delta * (1 - delta), 0.0))
        against = (root - linear) / (4 * rows)
        variance = max(2 * against + delta * (1 - delta), 0.0)
        return rows * (measured - delta) ** 2 > t * t * variance

    return _last(is_rejected, -1.0, min(max(measured, -1.0), 1.0))


def _last(is_rejected: Callable[[float], bool], low: float, high: float) -> float:
    """Return the end of the rejected part at the beginning of a range; ``low`` if nothing is rejected."""
    if not is_rejected(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_rejected(middle) else (low, middle)
    return low


def fieller(
    numerator: float, denominator: float, variances: tuple[float, float], covariance: float, t: float
) -> tuple[float, float] | None:
    """Return Fieller's interval (1954) of a ratio of two correlated means; None: it is not bounded.

    It holds every ρ with |`numerator` − ρ·`denominator`| ≤ t·√(v_n − 2·ρ·c + ρ²·v_d), with `variances` (v_n, v_d) of the two
    means and their `covariance` c. These ρ lie between two ends where the denominator differs from 0 by more than t standard
    errors, and else are no interval.
    """
    of_numerator, of_denominator = variances
    squared = denominator * denominator - t * t * of_denominator
    if squared <= 0:
        return None
    centre = numerator * denominator - t * t * covariance
    constant = numerator * numerator - t * t * of_numerator
    half = math.sqrt(max(centre * centre - squared * constant, 0.0))
    return (centre - half) / squared, (centre + half) / squared

"""Measure how often gates open by chance: draw data whose true metric equals the gate's bound, and judge it as a stage's is judged.

``python -m tests.intervals.study`` prints the table of docs/intervals.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from vantage.algorithms.calibration import brier_scores, calibration_gaps
from vantage.algorithms.critic_quality import squared_advantages
from vantage.algorithms.length_control import length_controlled_win_rate
from vantage.algorithms.uncertainty import (
    Estimate,
    clustered_explained_variance,
    clustered_mean,
    with_cluster_sizes,
    with_differing,
)
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.verdicts import check_gate
from vantage.tasks.rollout.comparison import Estimates, _exponential
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.resampling import bootstrapped, bootstrapped_size

Rng = np.random.Generator
Draw = Callable[[Rng], Estimates]
_UNEQUAL = (1, 1, 2, 8)
"""Rows of a prompt, drawn at random."""


@dataclass(frozen=True)
class Case:
    """Data of one kind, and the true value of the metric that is measured on it."""

    metric: str
    data: str
    n: int
    exact: float | Callable[[], float]
    """The true value, or what computes it."""
    draw: Draw
    resampled: bool = False
    """Whether one judgement takes long."""

    @cached_property
    def truth(self) -> float:
        """The true value of the metric, computed at first use: collecting the tests needs only their names."""
        return self.exact() if callable(self.exact) else self.exact


@dataclass(frozen=True)
class Rates:
    """Shares of the simulated gates."""

    above: float
    """The interval lies above the truth: a gate ``at_least`` opens by chance."""
    below: float
    """The interval lies below the truth: a gate ``at_most`` opens by chance."""
    without: float
    """There is no interval: a gate with a confidence is closed."""


def rates_of(case: Case, *, repeats: int, seed: int = 0) -> Rates:
    """Return how often both gates at the truth open, and how often neither can."""
    rng = np.random.default_rng([seed, case.n])
    above = below = without = 0
    for _ in range(repeats):
        estimates = case.draw(rng)
        metrics, uncertainty = values_of(estimates), uncertainty_of(estimates)
        verdict = check_gate(
            Gate(metric=case.metric, at_least=case.truth, confidence=0.95), metrics, uncertainty
        )
        if verdict.interval is None:
            assert not verdict.passed
            without += 1
            continue
        low, high = verdict.interval
        assert verdict.passed is (low >= case.truth)
        above += low > case.truth + 1e-9
        below += high < case.truth - 1e-9
    return Rates(above / repeats, below / repeats, without / repeats)


# -- rows in clusters


def _sizes(rng: Rng, n: int, rows: int) -> np.ndarray:
    return rng.choice(_UNEQUAL, size=n) if rows == 0 else np.full(n, rows)


def _outcomes(
    rng: Rng, n: int, rows: int, chances: tuple[float, ...], alike: float
) -> tuple[np.ndarray, torch.Tensor]:
    """Return an outcome for each row, a number from 0 on, and the rows' prompts.

    A row has its prompt's own outcome with probability √alike, else an independent one.

    Args:
        rows: rows of each prompt; 0: unequal numbers.
    """
    sizes = _sizes(rng, n, rows)
    clusters = np.repeat(np.arange(n), sizes)
    levels = np.cumsum(chances)
    own = rng.random(n)[clusters]
    drawn = np.where(rng.random(len(clusters)) < np.sqrt(alike), own, rng.random(len(clusters)))
    return np.searchsorted(levels, drawn, side="right"), torch.tensor(clusters)


def share(n: int, chance: float, *, rows: int = 1, alike: float = 0.0, metric: str = "pair_accuracy") -> Case:
    """Return the case of rows that are right with a chance."""

    def draw(rng: Rng) -> Estimates:
        found, clusters = _outcomes(rng, n, rows, (1 - chance, chance), alike)
        return {metric: with_cluster_sizes(clustered_mean(torch.tensor(found).double(), clusters), clusters)}

    return Case(metric, f"{chance:g} right{_rows(rows, alike)}", n, chance, draw)


def paired(
    n: int, gained: float, lost: float, *, rows: int = 1, alike: float = 0.0, metric: str = "accuracy_gain"
) -> Case:
    """Return the case of pairs of which some are gained, some lost, and the others the same."""
    is_rate = metric == "win_rate"

    def draw(rng: Rng) -> Estimates:
        found, clusters = _outcomes(rng, n, rows, (lost, 1 - gained - lost, gained), alike)
        values = torch.tensor(found).double() - 1
        of = clustered_mean((1 + values) / 2 if is_rate else values, clusters)
        return {metric: with_cluster_sizes(with_differing(of, values), clusters)}

    truth = (1 + gained - lost) / 2 if is_rate else gained - lost
    kind = ("wins", "losses") if is_rate else ("gained", "lost")
    return Case(metric, f"{gained:g} {kind[0]}, {lost:g} {kind[1]}{_rows(rows, alike)}", n, truth, draw)


def length_controlled(n: int, wins: float, ties: float = 0.0, *, rows: int = 1, alike: float = 0.0) -> Case:
    """Return the case of wins that do not depend on the length."""

    def draw(rng: Rng) -> Estimates:
        found, clusters = _outcomes(rng, n, rows, (1 - wins - ties, ties, wins), alike)
        won = torch.tensor(found).double() / 2
        lengths = torch.tensor(rng.integers(-20, 21, size=len(won)))
        of = bootstrapped(
            partial(length_controlled_win_rate, won, lengths), clusters, seed=int(rng.integers(2**31))
        )
        return {"length_controlled_win_rate": with_cluster_sizes(with_differing(of, 2 * won - 1), clusters)}

    data = f"{wins:g} wins, {ties:g} ties{_rows(rows, alike)}"
    return Case("length_controlled_win_rate", data, n, wins + ties / 2, draw, resampled=True)


def _rows(rows: int, alike: float) -> str:
    if rows == 1:
        return ""
    return f"; {'1, 1, 2 or 8' if rows == 0 else rows} rows a prompt, correlated {alike:g}"


# -- a reward model's probabilities


def _margins(rng: Rng, n: int, confidence: np.ndarray, accuracy: np.ndarray) -> torch.Tensor:
    level = rng.integers(len(confidence), size=n)
    right = rng.random(n) < accuracy[level]
    return torch.tensor(np.log(confidence / (1 - confidence))[level] * np.where(right, 1, -1))


def calibration(n: int, confidence: tuple[float, ...], accuracy: tuple[float, ...]) -> Case:
    """Return the case of pairs at some levels of confidence, each with its own true accuracy."""
    levels = np.array(confidence), np.array(accuracy)

    def draw(rng: Rng) -> Estimates:
        margins = _margins(rng, n, *levels)
        gaps = partial(calibration_gaps, torch.cat((margins, -margins)))
        seed = int(rng.integers(2**31))
        return {"expected_calibration_error": bootstrapped_size(gaps, torch.arange(n), seed=seed)}

    truth = float(np.abs(levels[0] - levels[1]).mean())
    data = f"confidence {_listed(confidence)}, right {_listed(accuracy)}"
    return Case("expected_calibration_error", data, n, truth, draw, resampled=True)


def brier(n: int, confidence: tuple[float, ...], accuracy: tuple[float, ...]) -> Case:
    """Return the case of the same pairs, measured by their squared errors."""
    levels = np.array(confidence), np.array(accuracy)

    def draw(rng: Rng) -> Estimates:
        return {"brier_score": clustered_mean(brier_scores(_margins(rng, n, *levels)), torch.arange(n))}

    truth = float((levels[1] * (1 - levels[0]) ** 2 + (1 - levels[1]) * levels[0] ** 2).mean())
    return Case("brier_score", f"confidence {_listed(confidence)}, right {_listed(accuracy)}", n, truth, draw)


def _listed(numbers: tuple[float, ...]) -> str:
    return "/".join(f"{each:g}" for each in numbers)


# -- a critic, demonstrations, scores

_MANY = 400_000


def critic(metric: str, n: int, success: float, known: float, *, rows: int = 4) -> Case:
    """Return a critic that knows each prompt's chance of success, and a part of what is chance."""

    def returns(rng: Rng, prompts: int) -> tuple[np.ndarray, np.ndarray]:
        chance = rng.beta(2 * success, 2 * (1 - success), size=(prompts, 1))
        right = (rng.random((prompts, rows)) < chance).astype(float)
        return right, chance + known * (right - chance) + 0.1 * rng.standard_normal((prompts, rows))

    def draw(rng: Rng) -> Estimates:
        found, values = (torch.tensor(each).reshape(-1, 1) for each in returns(rng, n))
        clusters = torch.arange(n).repeat_interleave(rows)
        batch = (values, found, torch.ones_like(found, dtype=torch.bool), clusters)
        squares = squared_advantages(*batch)
        estimates = {
            "explained_variance": clustered_explained_variance(*batch),
            "value_mse": squares.critic,
            "others_mean_mse": squares.others_mean,
            "squared_advantage_ratio": squares.ratio,
        }
        nan = Estimate(float("nan"), float("nan"), n, n * rows)
        estimates.setdefault(metric, nan)
        return {name: each or nan for name, each in estimates.items() if each is not None or name == metric}

    def truth() -> float:
        found, values = returns(np.random.default_rng(12345), _MANY // rows)
        errors = found - values
        if metric == "explained_variance":
            return float(1 - errors.var() / found.var())
        return float(np.square(errors).mean() / found.var())

    data = f"success {success:g}, {known:g} of the chance known; {rows} responses a prompt"
    return Case(metric, data, n, truth, draw)


def perplexity_ratio(n: int) -> Case:
    """Return the case of two models' NLL on the same demonstrations of 5 to 50 tokens, the candidate's lower by 0.1 per
    token.
    """

    def draw(rng: Rng) -> Estimates:
        tokens = torch.tensor(rng.integers(5, 51, size=n))
        per_token = torch.tensor(-0.1 + 0.3 * rng.standard_normal(n))
        return {"perplexity_ratio": _exponential(per_token * tokens, tokens, torch.arange(n))}

    return Case("perplexity_ratio", "NLL per token lower by 0.1", n, float(np.exp(-0.1)), draw)


def score(n: int, *, rows: int = 1) -> Case:
    """Return the case of normal scores; those of a prompt share half of their variance."""

    def draw(rng: Rng) -> Estimates:
        sizes = _sizes(rng, n, rows)
        clusters = np.repeat(np.arange(n), sizes)
        values = rng.standard_normal(n)[clusters] + rng.standard_normal(len(clusters))
        of = clustered_mean(torch.tensor(values), torch.tensor(clusters))
        return {"score_gain": with_cluster_sizes(of, torch.tensor(clusters))}

    return Case("score_gain", f"normal{_rows(rows, 0.5)}", n, 0.0, draw)


# -- the study


def cases() -> Iterator[Case]:
    """Yield the cases of the table: each metric, with 2 to 300 prompts of one row, of several or of unequal numbers."""
    for n, lost in ((2, 0.02), (4, 0.02), (16, 0.1), (64, 0.05), (256, 0.02), (300, 0.01)):
        yield paired(n, 0.0, lost)
        yield paired(n, 0.02, 0.02)
    for n in (4, 16, 64, 256):
        yield paired(n, 0.5, 0.5)
        yield paired(n, 0.0, 0.1, rows=8, alike=0.3)
        yield paired(n, 0.0, 0.1, rows=0, alike=0.3)
        yield paired(n, 0.0, 0.1, rows=0, alike=1.0)
        yield paired(n, 0.3, 0.2, rows=4, alike=0.3, metric="win_rate")
        yield paired(n, 0.05, 0.05, metric="win_rate")
        yield share(n, 0.75)
        yield share(n, 0.95)
        yield share(n, 0.75, rows=8, alike=0.3)
        yield share(n, 0.95, rows=0, alike=0.3)
        yield share(n, 0.95, rows=0, alike=1.0)
        yield brier(n, (0.99,), (0.9,))
        yield score(n)
        yield score(n, rows=0)
        yield perplexity_ratio(n)
    for n in (2, 4, 16, 64):
        yield length_controlled(n, 0.9)
        yield length_controlled(n, 0.3, 0.4, rows=4, alike=0.3)
        yield calibration(n, (0.99,), (0.9,))
        yield calibration(n, (0.6, 0.7, 0.8, 0.9), (0.5, 0.6, 0.7, 0.8))
    for metric in ("explained_variance", "squared_advantage_ratio"):
        for n, success in ((4, 0.5), (16, 0.5), (16, 0.9), (64, 0.5), (64, 0.9), (64, 0.97), (256, 0.97)):
            yield critic(metric, n, success, 0.5)
        yield critic(metric, 64, 0.97, 0.5, rows=1)
        yield critic(metric, 64, 0.97, 0.0, rows=1)
        yield critic(metric, 256, 0.97, 0.0)


def main() -> None:
    """Print the table in Markdown."""
    print("| metric | data | prompts | truth | above | below | no interval |\n|---|---|---|---|---|---|---|")
    for case in cases():
        found = rates_of(case, repeats=300 if case.resampled else 2000)
        shown = (f"{100 * each:.1f} %" for each in (found.above, found.below, found.without))
        row = (f"`{case.metric}`", case.data, f"{case.n}", f"{case.truth:.3g}", *shown)
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

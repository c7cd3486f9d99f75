"""Average what the seeds' JSON files contain: means with 95 % intervals over seeds (Student's t)."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from docs.critic_boundary.study.variance import (
    GradientMoments,
    crossing,
    jackknife_error,
    variance_ratio,
)
from vantage.flows.sweeps.report import interval

Row = dict[str, Any]
MEASURES = ("explained_variance", "explained_mse", "explained_weighted")
KEYS = ("family", "critic", "x")
CURVES = ("white noise", "response noise", "prompt noise", "scaled")
"""Families that take a critic from as it is to ever worse ones by one number."""
LEARNED = "learned"
"""The curve of one critic over its training."""
NOT_LEARNED = ("fresh head", "oracle")
BY_CRITIC = ("switched", "blended")
"""Families that choose between a critic and the batch mean."""


def moments_of(row: Row) -> GradientMoments:
    """Return the moments that an arm's row, or its ``whole``, holds."""
    return GradientMoments(row["squared_norms"], row["products"])


def with_ratios(seed: Row) -> list[Row]:
    """Return one seed's arms with the trace of each gradient's covariance over the batch mean's, which comes first."""
    mean = seed["arms"][0]
    rows = []
    for arm in seed["arms"]:
        row = {name: arm[name] for name in (*KEYS, *MEASURES)}
        row["variance_ratio"] = variance_ratio(moments_of(arm), moments_of(mean))
        row["jackknife_error"] = jackknife_error(moments_of(arm), moments_of(mean))
        rows.append(row)
    return rows


def over_seeds(tables: Iterable[list[Row]], keys: Sequence[str], quantities: Sequence[str]) -> list[Row]:
    """Return rows of all seeds with the same ``keys`` as one: of each quantity the mean and half of its interval."""
    samples: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for table in tables:
        for row in table:
            found = samples.setdefault(tuple(row[key] for key in keys), {name: [] for name in quantities})
            for name in quantities:
                if row[name] is not None and math.isfinite(row[name]):
                    found[name].append(row[name])
    rows = []
    for key, found in samples.items():
        row = dict(zip(keys, key, strict=True))
        for name, numbers in found.items():
            centre, _, high = interval(numbers)
            row |= {name: centre, f"{name}_half": None if high is None or centre is None else high - centre}
        rows.append({**row, "seeds": max(map(len, found.values()))})
    return rows


def arm_table(ratios: list[list[Row]]) -> list[Row]:
    """Return every arm: what its baseline knows of the return in three ways, and its ratio of variances."""
    quantities = (*MEASURES, "variance_ratio", "jackknife_error")
    return over_seeds(ratios, KEYS, quantities)


def whole_ratios(seed: Row, of_last_block: list[Row]) -> list[Row]:
    """Return one seed's arms of which the gradient of all parameters was taken, with the measures of the same arms.

    The gradient-weighted measure with the weights of all parameters is there where it was measured.
    """
    measures = {keys_of(row): {name: row[name] for name in MEASURES} for row in of_last_block}
    mean, rows = seed["arms"][0], []
    for arm in (arm for arm in seed["arms"] if "whole" in arm):
        row = {name: arm[name] for name in KEYS} | measures[keys_of(arm)]
        for name in ("whole", "part_of_whole"):
            row[f"{name}_ratio"] = variance_ratio(moments_of(arm[name]), moments_of(mean[name]))
        row["whole_error"] = jackknife_error(moments_of(arm["whole"]), moments_of(mean["whole"]))
        squares = [math.fsum(each["weighted_squares"]) for each in (arm, mean) if "weighted_squares" in each]
        row["whole_weighted"] = 1 - squares[0] / squares[1] if squares else None
        rows.append({**row, "rollouts": len(arm["whole"]["products"])})
    return rows


def whole_table(whole: list[list[Row]], fewer: list[list[Row]]) -> list[Row]:
    """Return the ratios of the gradient of all parameters and of the last block's, on the same rollouts, of which there
    are ``rollouts``.

    `whole` are the seeds of `all_parameters`; what only `fewer` rollouts have follows.
    """
    names = (*MEASURES, "whole_weighted", "whole_ratio", "whole_error", "part_of_whole_ratio")
    rows: list[Row] = []
    for tables in (whole, fewer):
        known = {keys_of(row) for row in rows}
        rows += [row for row in over_seeds(tables, (*KEYS, "rollouts"), names) if keys_of(row) not in known]
    return rows


def keys_of(row: Row) -> tuple[Any, ...]:
    """Return what names an arm."""
    return tuple(row[name] for name in KEYS)


def crossing_table(ratios: list[list[Row]]) -> list[Row]:
    """Return, for each curve and measure, where the ratio passes 1, over the seeds in which it does, and its ends."""
    rows = []
    for name, critic in curves_in(ratios[0]):
        curves = [on_curve(table, name, critic) for table in ratios]
        extremes = [row["variance_ratio"] for curve in curves for row in curve]
        for measure in MEASURES:
            passed = [
                crossing([row[measure] for row in curve], [row["variance_ratio"] for row in curve])
                for curve in curves
            ]
            numbers = [number for number in passed if number is not None]
            centre, low, high = interval(numbers)
            rows.append(
                {
                    "curve": name,
                    "critic": critic,
                    "measure": measure,
                    "crossing": centre,
                    "crossing_low": low,
                    "crossing_high": high,
                    "seeds_that_cross": len(numbers),
                    "seeds": len(ratios),
                    "smallest_ratio": min(extremes),
                    "largest_ratio": max(extremes),
                }
            )
    return rows


def curves_in(table: list[Row]) -> list[tuple[str, str]]:
    """Return name and critic of every curve of a seed."""
    made = [
        (name, critic)
        for name in CURVES
        for critic in dict.fromkeys(row["critic"] for row in table if row["family"] == name)
    ]
    return [(LEARNED, "all"), *made]


def on_curve(table: list[Row], name: str, critic: str) -> list[Row]:
    """Return the arms of one curve: a family's with the critic as it is, which is where the curve begins."""
    if name == LEARNED:
        return [row for row in table if row["family"] == "critic" and row["critic"] not in NOT_LEARNED]
    own = [row for row in table if row["critic"] == critic]
    # a factor below 1 leads back to a constant
    made = [row for row in own if row["family"] == name and (name != "scaled" or row["x"] > 1)]
    return [*(row for row in own if row["family"] == "critic"), *made]


def agreement_table(tables: list[list[Row]], *, ratio: str, measures: Sequence[str]) -> list[Row]:
    """Return how well each measure tells on which side of 1 the ratio lies, and how far 1 − measure is from it, over all arms.

    Without the batch mean itself, and without the arms that choose between it and a critic.
    """
    judged = []
    for table in tables:
        arms = [row for row in table[1:] if row["family"] not in BY_CRITIC]
        rows = []
        for measure in measures:
            # a constant's explained variance is 0 but for rounding: it says nothing, and counts as not above 0
            right = [(row[measure] > 1e-6) == (row[ratio] < 1) for row in arms]
            distances = [abs(1 - row[measure] - row[ratio]) for row in arms]
            rows.append(
                {
                    "measure": measure,
                    "arms": len(arms),
                    "right_side": sum(right) / len(right),
                    "distance": sum(distances) / len(distances),
                }
            )
        judged.append(rows)
    return over_seeds(judged, ("measure",), ("arms", "right_side", "distance"))


def part_table(measured: list[Row]) -> list[Row]:
    """Return the arms by tokens left."""
    return over_seeds(
        [seed["parts"] for seed in measured],
        ("family", "critic", "tokens_left"),
        (*MEASURES, "variance_ratio", "variance_share"),
    )


def token_table(measured: list[Row]) -> list[Row]:
    """Return what the rollouts are like."""
    return over_seeds(
        [[{"of": "tokens", **seed["tokens"]}] for seed in measured],
        ("of",),
        tuple(measured[0]["tokens"]),
    )


def write_csv(path: Path, table: list[Row]) -> None:
    """Write one line for each row, numbers with six significant digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        for row in table:
            writer.writerow(
                {name: f"{cell:.6g}" if isinstance(cell, float) else cell for name, cell in row.items()}
            )

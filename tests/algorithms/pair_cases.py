"""Make 1,000 random cases of log-probabilities on which another library's losses were recorded (``pairs_by_trl.json``)."""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RECORDED = Path(__file__).with_name("pairs_by_trl.json")
NUM_CASES = 1000


@dataclass(frozen=True)
class PairCase:
    """Sums of log-probabilities of N responses a side, under policy and reference, and the switches of the losses."""

    chosen: list[float]
    rejected: list[float]
    ref_chosen: list[float]
    ref_rejected: list[float]
    chosen_lengths: list[int]
    rejected_lengths: list[int]
    beta: float
    target_margin: float
    label_smoothing: float
    weights: tuple[float, float]
    """Weights of desirable and of undesirable responses."""
    mismatched: list[float]
    """Log-ratios of mismatched responses."""


def means(sums: list[float], lengths: list[int]) -> list[float]:
    return [total / length for total, length in zip(sums, lengths, strict=True)]


@cache
def pair_case(number: int) -> PairCase:
    """Return the same case on every machine: the generator's ``random`` is the same in all versions of Python."""
    draw = random.Random(number).random
    size = 1 + int(5 * draw())

    def side() -> tuple[list[float], list[float], list[int]]:
        lengths = [1 + int(60 * draw()) for _ in range(size)]
        sums = [-length * (0.02 + 4 * draw() ** 2) for length in lengths]
        references = [
            total + (draw() - 0.5) * length**0.5 for total, length in zip(sums, lengths, strict=True)
        ]
        return sums, references, lengths

    (chosen, ref_chosen, chosen_lengths), (rejected, ref_rejected, rejected_lengths) = side(), side()
    return PairCase(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        beta=10 ** (2 * draw() - 1.5),
        target_margin=2 * draw(),
        label_smoothing=0.49 * draw(),
        weights=(0.5 + draw(), 0.5 + draw()),
        mismatched=[4 * draw() - 1.5 for _ in range(size)],
    )


@cache
def recorded() -> dict[str, list[list[float]]]:
    """Return loss → for each case its value, and its derivative by the first chosen response's log-probability."""
    losses: dict[str, list[list[float]]] = json.loads(RECORDED.read_text())["losses"]
    return losses

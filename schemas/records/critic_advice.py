"""Advice on a critic: one rule per finding, from its diagnosis alone.

The rules are sorted by importance; the first that applies is the most important advice.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from statistics import fmean
from typing import Literal

from vantage.schemas.frozen import Frozen
from vantage.schemas.records.critic_diagnosis import (
    CriticDiagnosis,
    CriticDrift,
    DiagnosedSlice,
    Estimated,
    PretrainedCritic,
)

LARGE_BIAS = 0.25
"""Size of the bias, in standard deviations of the returns, from which it is large."""
BETTER_BASELINE = 0.95
"""Factor of the critic's squared advantages below which another baseline is better than the critic."""
LATE = 0.75
"""A critic whose best iteration comes after this share of its iterations was still improving."""
A_COURSE = 4
"""Fewest iterations from which a course can be seen."""
LOST = 0.2
"""Loss of explained variance during a policy stage from which it is reported."""

Level = Literal["good", "note", "warning", "bad"]


class Advice(Frozen):
    """One finding, and what to do about it."""

    rule: str
    level: Level
    text: str


def advice_on_pretraining(critic: PretrainedCritic) -> list[Advice]:
    """Return the findings from a diagnosis, the most important first."""
    found = [advice for rule in _PRETRAINING for advice in rule(critic)]
    if not any(each.level in ("bad", "warning") for each in found):
        found.insert(0, _usable(critic.diagnosis))
    return found


def advice_on_drift(drift: CriticDrift) -> list[Advice]:
    """Return the findings from a critic's course during policy optimisation, the most important first."""
    measured = [
        (point.iteration, point.explained_variance)
        for point in drift.points
        if point.explained_variance is not None
    ]
    if not measured:
        text = f"{drift.step} has measured no iteration yet: look again later."
        if not drift.is_running:
            text = f"Explained variance was undefined in all iterations of {drift.step}: its returns did not vary."
        return [Advice(rule="not_measured", level="note", text=text)]
    return [advice for rule in _DRIFT for advice in rule(drift, measured)][:1] or [_steady(drift, measured)]


# -- a pretrained critic


def _equal_returns(critic: PretrainedCritic) -> list[Advice]:
    if critic.diagnosis.explained_variance.value is not None:
        return []
    text = "All returns are equal, so there is nothing for a critic to learn: look at the reward."
    return [Advice(rule="equal_returns", level="bad", text=text)]


def _explains_nothing(critic: PretrainedCritic) -> list[Advice]:
    explained = critic.diagnosis.explained_variance
    if explained.value is None or explained.value > 0:
        return []
    text = (
        f"Explained variance is {number(explained.value)}, not above 0: the mean of a batch is a better baseline than this "
        f"critic. {_longer(critic)}, or switch (algorithm.critic_ev_threshold: 0 leaves the critic out while it is like this)."
    )
    return [Advice(rule="explains_nothing", level="bad", text=text)]


def _may_explain_nothing(critic: PretrainedCritic) -> list[Advice]:
    explained = critic.diagnosis.explained_variance
    interval = explained.interval
    if explained.value is None or explained.value <= 0 or (interval and interval[0] > 0):
        return []
    text = (
        f"{explained.n:,} prompts are too few to tell whether the critic explains anything "
        f"({share(explained.value)}{_range(explained)}): measure on more (stages.{critic.step}.test_samples, "
        f"data split.test), or {_lower(_longer(critic))}."
    )
    return [Advice(rule="too_few_prompts", level="warning", text=text)]


def _below_zero_in_parts(critic: PretrainedCritic) -> list[Advice]:
    diagnosis = critic.diagnosis
    if diagnosis.explained_variance.value is None or diagnosis.explained_variance.value <= 0:
        return []
    families: tuple[tuple[Sequence[DiagnosedSlice], Callable[[DiagnosedSlice], str]], ...] = (
        (diagnosis.by_length, lambda each: f"on responses of {tokens(each.label)}"),
        (diagnosis.by_tokens_left, lambda each: f"{tokens(each.label)} before the end"),
        (diagnosis.by_tenth, lambda each: f"in tenth {each.label} of the response"),
        (diagnosis.by_difficulty, lambda each: f"on the {each.label} third of the responses"),
    )
    below = [[each for each in slices if is_below_zero(each.explained_variance)] for slices, _ in families]
    if not any(below):
        return []
    where = "; ".join(
        f"{', '.join(name(each) for each in found)} "
        f"({100 * sum(each.tokens for each in found) / diagnosis.tokens:.0f} % of the tokens)"
        for found, (_, name) in zip(below, families, strict=True)
        if found
    )
    text = (
        f"Below 0 {where}: {_lower(_longer(critic))}, or switch to a preset without a critic (rloo, grpo) if that is where "
        "the policy has to learn."
    )
    return [Advice(rule="below_zero_in_parts", level="warning", text=text)]


def _others_are_better(critic: PretrainedCritic) -> list[Advice]:
    ours, others = critic.diagnosis.advantages.critic, critic.diagnosis.advantages.others_mean
    if others is None or ours.value is None or others.value is None:
        return []
    if others.value >= BETTER_BASELINE * ours.value:
        return []
    text = (
        f"The mean of the other responses to the prompt leaves smaller advantages than this critic (mean square "
        f"{number(others.value)} against {number(ours.value)}): switch to a preset with groups (rloo, grpo), or "
        f"{_lower(_longer(critic))}."
    )
    return [Advice(rule="others_are_better", level="warning", text=text)]


def _biased(critic: PretrainedCritic) -> list[Advice]:
    bias, spread = critic.diagnosis.bias, sqrt(critic.diagnosis.return_variance)
    interval = bias.interval
    if bias.value is None or interval is None or interval[0] <= 0 <= interval[1]:
        return []
    if abs(bias.value) <= LARGE_BIAS * spread:
        return []
    side = "high" if bias.value > 0 else "low"
    text = (
        f"Values are too {side} by {number(abs(bias.value))} on average, while returns have a standard deviation of "
        f"{number(spread)}: let the critic correct itself before the policy learns (policy_starts_at: 2), or "
        f"{_lower(_longer(critic))}."
    )
    return [Advice(rule="biased", level="warning", text=text)]


def _orders_by_chance(critic: PretrainedCritic) -> list[Advice]:
    half_way = [each.correlation for each in critic.diagnosis.orderings if each.at == 0.5]
    if not half_way or half_way[0].value is None:
        return []
    interval = half_way[0].interval
    if interval is not None and interval[0] > 0:
        return []
    text = (
        f"Half-way through two responses to a prompt, the critic does not know which will do better "
        f"(rank correlation {share(half_way[0].value)}{_range(half_way[0])}). The mean of a group knows as much about the "
        f"prompt: use one (rloo, grpo), or {_lower(_longer(critic))}."
    )
    return [Advice(rule="orders_by_chance", level="warning", text=text)]


def _one_response_each(critic: PretrainedCritic) -> list[Advice]:
    diagnosis = critic.diagnosis
    if diagnosis.within_prompts is not None and diagnosis.advantages.others_mean is not None:
        return []
    some = "Each" if diagnosis.within_prompts is None else "One or more"
    text = (
        f"{some} of the {diagnosis.prompts:,} test prompts has one response, so not all can be measured within a prompt: "
        f"stages.{critic.step}.test_samples: {4 * diagnosis.prompts} gives each of them four (of collected responses, with "
        "held_out_samples_per_prompt: 4)."
    )
    return [Advice(rule="one_response_each", level="note", text=text)]


def _usable(diagnosis: CriticDiagnosis) -> Advice:
    ratio = diagnosis.advantages.ratio
    smaller = f", and squared advantages are {share(ratio.value)} of the batch mean's" if ratio else ""
    text = (
        f"Use it: it explains {share(diagnosis.explained_variance.value)} of the returns' variance"
        f"{_range(diagnosis.explained_variance)}{smaller}."
    )
    return Advice(rule="usable", level="good", text=text)


_PRETRAINING: tuple[Callable[[PretrainedCritic], list[Advice]], ...] = (
    _equal_returns,
    _explains_nothing,
    _may_explain_nothing,
    _below_zero_in_parts,
    _others_are_better,
    _biased,
    _orders_by_chance,
    _one_response_each,
)


def _longer(critic: PretrainedCritic) -> str:
    """Return the advice to pretrain longer, if the critic was still getting better; else other advice."""
    best, most = critic.diagnosis.best_iteration, critic.diagnosis.iterations
    if best >= LATE * most:
        return f"Pretrain longer (stages.{critic.step}.iterations: {2 * most})"
    return (
        f"Pretrain it otherwise (it was best after {best} of {most} iterations, so longer does not help: "
        f"stages.{critic.step}.learning_rate or batch_size)"
    )


# -- a critic during policy optimisation

_Measured = Sequence[tuple[int, float]]


def _lost_at_the_end(drift: CriticDrift, measured: _Measured) -> list[Advice]:
    end = _end(measured)
    if end > 0:
        return []
    if drift.is_switched:
        text = (
            f"Explained variance ends at {share(end)}, and the switch left the critic out: advantages were the batch "
            "mean's. Let the critic learn more (critic_steps: 2, critic_learning_rate), or use a preset without a critic."
        )
        return [Advice(rule="switched_off", level="warning", text=text)]
    text = (
        f"Explained variance ends at {share(end)}, not above 0: the mean of a batch was the better baseline. Switch "
        f"(stages.{drift.step}.algorithm.critic_ev_threshold: 0), or let the critic learn more (critic_steps: 2, "
        "critic_learning_rate)."
    )
    return [Advice(rule="ends_below_zero", level="bad", text=text)]


def _falls(drift: CriticDrift, measured: _Measured) -> list[Advice]:
    start, end = _start(measured), _end(measured)
    if start - end <= LOST:
        return []
    losses = [(point.iteration, point.value_loss) for point in drift.points if point.value_loss is not None]
    fall = f"Explained variance falls from {share(start)} to {share(end)}"
    if losses and _end(losses) <= _start(losses):
        text = (
            f"{fall} while the critic's error falls too (value loss {number(_start(losses))} to {number(_end(losses))}): "
            "returns vary less as the policy gets better, so there is less to explain. Nothing to do while it is above 0."
        )
        return [Advice(rule="less_to_explain", level="good", text=text)]
    text = (
        f"{fall}: the critic does not keep up with the policy. Let it learn more "
        f"(stages.{drift.step}.algorithm.critic_steps: 2, or a higher critic_learning_rate)."
    )
    return [Advice(rule="falls", level="warning", text=text)]


def _starts_below_zero(drift: CriticDrift, measured: _Measured) -> list[Advice]:
    first = next((number for number, (_, explained) in enumerate(measured) if explained > 0), len(measured))
    if not first or drift.is_switched:
        return []
    text = (
        f"Explained variance was not above 0 in the first {first} iteration{'s' if first > 1 else ''}, and the policy "
        "learned from it: pretrain the critic (a value_pretraining stage), or let the policy wait "
        f"(stages.{drift.step}.algorithm.policy_starts_at: {first})."
    )
    return [Advice(rule="starts_below_zero", level="warning", text=text)]


def _steady(drift: CriticDrift, measured: _Measured) -> Advice:
    if len(measured) < A_COURSE:
        text = (
            f"Explained variance is {share(measured[-1][1])}, above 0; {len(measured)} of {drift.step}'s iterations are too few "
            "to see where it goes."
        )
        return Advice(rule="too_early", level="note", text=text)
    text = (
        f"The critic keeps up with the policy: explained variance goes from {share(_start(measured))} to "
        f"{share(_end(measured))}. Nothing to do."
    )
    return Advice(rule="keeps_up", level="good", text=text)


_DRIFT: tuple[Callable[[CriticDrift, _Measured], list[Advice]], ...] = (
    _lost_at_the_end,
    _falls,
    _starts_below_zero,
)


def _start(measured: _Measured) -> float:
    """Return the mean of the first quarter of the iterations."""
    return fmean(explained for _, explained in measured[: max(1, len(measured) // 4)])


def _end(measured: _Measured) -> float:
    """Return the mean of the last quarter of the iterations."""
    return fmean(explained for _, explained in measured[-max(1, len(measured) // 4) :])


# -- words


def is_below_zero(explained: Estimated) -> bool:
    """Return whether the whole interval is below 0."""
    interval = explained.interval
    return interval is not None and interval[1] < 0


def tokens(label: str) -> str:
    """Return ``8-15`` as ``8 to 15 tokens``."""
    if label == "1":
        return "1 token"
    if label.endswith("+"):
        return f"{int(label[:-1]):,} tokens or more"
    low, high = label.split("-")
    return f"{int(low):,} to {int(high):,} tokens"


def number(value: float | None) -> str:
    """Return a number with three digits, or ``–`` for an undefined one."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}" if value else "0"


def share(value: float | None) -> str:
    """Return a number that is at most 1, such as explained variance, with two decimals."""
    if value is None:
        return "–"
    return f"{value:z.2f}" if abs(value) < 100 else f"{value:,.0f}"  # the flag z avoids −0.00


def _range(estimate: Estimated) -> str:
    interval = estimate.interval
    return f", 95 % interval {share(interval[0])} to {share(interval[1])}" if interval else ""


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]

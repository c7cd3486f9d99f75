"""Texts for the end of a run: comparisons, the folders of its models, and how to ask its policy."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from vantage.runs.own_commands import own_command
from vantage.runs.record import SUCCEEDED, RunRecord, StageRecord
from vantage.schemas.kind import MODELS
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.records.uncertainty import (
    Uncertainty,
    bracketed,
    gate_interval_of_share,
    interval_among,
)
from vantage.schemas.records.verdicts import DEFAULT_CONFIDENCE, Verdict
from vantage.storage.storage import Storage

_LONGEST_PROMPT = 80
"""Most characters of a prompt in a printed command."""


def comparison(stage: StageRecord) -> str:
    """Return the comparison of an evaluation, else empty; values are followed by their intervals at 95 %.

    ``accuracy 0.911 [0.88, 0.93] against 0.600 [0.55, 0.65] (+0.311 [0.27, 0.35]); greedy 0.996 [0.98, 1.00] against
    1.000 [0.99, 1.00]``. The results of two judges follow one another. A model that judges pairs gives
    ``win rate 0.540 [0.49, 0.59] (orders disagree 0.210 [0.17, 0.26])``.
    """
    found = [_comparison_by(stage, name) for name in ("accuracy", "score")]
    return "  ".join(text for text in (*found, _preference(stage)) if text)


def headline_of(stage: StageRecord) -> str:
    """Return the comparison of an evaluation, else its ``headline_metrics`` with their intervals at 95 %."""
    if compared := comparison(stage):
        return compared
    names = headline_metrics(stage.metrics, stage.verdicts)
    return "  ".join(
        f"{name} {_estimate(stage.metrics.get(name), stage.intervals.get(name))}" for name in names
    )


def _estimate(value: float | None, interval: tuple[float, float] | None) -> str:
    """Return a number with its interval; a whole number has the interval's decimals, since it is an estimate like the others."""
    shown, bounds = short_number(value), bracketed(interval)
    if value is not None and bounds and float(value).is_integer():
        shown = f"{value:,.{len(bounds.rpartition('.')[2]) - 1}f}"
    return shown + bounds


def headline_metrics(metrics: Mapping[str, float | None], verdicts: Sequence[Verdict]) -> list[str]:
    """Return the gated metrics, else the first two informative ones of a stage."""
    first = (name for name, value in metrics.items() if value or not name.endswith("_rows"))
    return [verdict.metric for verdict in verdicts] or list(islice(first, 2))


def printed_intervals(
    metrics: Mapping[str, float | None],
    uncertainty: Mapping[str, Uncertainty],
    verdicts: Sequence[Verdict],
) -> dict[str, tuple[float, float]]:
    """Return the intervals at 95 % of the metrics that are printed in a stage's line."""
    names = dict.fromkeys((*_COMPARED, *headline_metrics(metrics, verdicts)))
    shares = {
        verdict.metric for verdict in verdicts if verdict.method == "share"
    }  # these shares are printed with the interval that was judged
    found = {
        name: gate_interval_of_share(metrics[name] or 0.0, uncertainty[name], confidence=DEFAULT_CONFIDENCE)
        if name in shares
        else interval_among(name, metrics, uncertainty, confidence=DEFAULT_CONFIDENCE)
        for name in names
    }
    return {name: interval for name, interval in found.items() if interval is not None}


_COMPARED = (
    *(
        f"{prefix}{name}"
        for name in ("accuracy", "score")
        for prefix in ("", "baseline_", "greedy_", "baseline_greedy_")
    ),
    *("accuracy_gain", "score_gain", "win_rate", "preference_win_rate", "order_disagreement"),
    "pair_accuracy",
)
"""Metrics that a comparison prints, and metrics that warnings mention."""


def _preference(stage: StageRecord) -> str:
    """Return a model judge's result on pairs; the win rate of a second judge has another name."""
    if "order_disagreement" not in stage.metrics:
        return ""
    rate = "preference_win_rate" if "preference_win_rate" in stage.metrics else "win_rate"
    return f"win rate {_shown(stage, rate)} (orders disagree {_shown(stage, 'order_disagreement')})"


def _comparison_by(stage: StageRecord, name: str) -> str:
    metrics = stage.metrics
    if metrics.get(name) is None or metrics.get(f"baseline_{name}") is None:
        return ""
    text = f"{name} {_shown(stage, name)} against {_shown(stage, f'baseline_{name}')}"
    if metrics.get(gain := f"{name}_gain") is not None:
        text += f" ({_shown(stage, gain, sign='+')})"
    if metrics.get(f"greedy_{name}") is not None:
        ours, theirs = (_shown(stage, f"{each}_{name}") for each in ("greedy", "baseline_greedy"))
        text += f"; greedy {ours} against {theirs}"
    return text


def _shown(stage: StageRecord, name: str, *, sign: str = "") -> str:
    value = stage.metrics.get(name)
    written = "undefined" if value is None else f"{value:{sign}.3f}"
    return written + bracketed(stage.intervals.get(name))


def short_number(value: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def samples_heading(record: RunRecord, step: str) -> str:
    """Return the heading of an evaluation's samples."""
    stage = record.recipe.stages.get(step)
    if not isinstance(stage, PolicyEvaluation):
        return step
    return f"{step}: {stage.baseline} (baseline) and {stage.candidate} (candidate) on test prompts, with their judgements"


def model_folders(record: RunRecord, storage: Storage) -> dict[str, Path]:
    """Return stage → folder of its model, in the order of the recipe; without the imported model, and without those that this
    machine has not fetched."""
    folders = {
        name: storage.local_folder(stage.digest)
        for name, stage in record.stages.items()
        if name in record.recipe.stages
        and stage.digest is not None
        and stage.status in SUCCEEDED
        and KINDS[record.recipe.stages[name].kind].makes in MODELS
    }
    return {name: folder for name, folder in folders.items() if folder is not None}


def commands_for_policy(record: RunRecord, workspace: str) -> dict[str, str]:
    """Return ``ask`` and ``export`` → the command that does it with the run's policy, in one line for a shell; empty without one."""
    made = (
        name in record.recipe.stages
        and stage.status in SUCCEEDED
        and KINDS[record.recipe.stages[name].kind].makes == "policy"
        for name, stage in record.stages.items()
    )
    if not any(made):
        return {}
    place = ["--workspace", workspace]
    return {
        "ask": own_command("sample", record.run_id, *_short_prompt(record), *place),
        "export": own_command("export", record.run_id, "FOLDER", *place),
    }


def _short_prompt(record: RunRecord) -> list[str]:
    """Return the first prompt of an evaluation's samples if it is a short line; else none, which begins a conversation."""
    samples = (sample for stage in record.stages.values() for sample in stage.samples)
    prompt = str(next(samples, {}).get("prompt", ""))
    return (
        [prompt] if prompt.isprintable() and 0 < len(prompt) <= _LONGEST_PROMPT and prompt[0] != "-" else []
    )


def why(stage: StageRecord) -> str:
    """Return the reason for a stage's status: its reason, remedy and exit code, or its verdicts."""
    if stage.reason:
        return f"{stage.reason}; exit code {stage.exit_code}" if stage.exit_code else stage.reason
    return " · ".join(map(str, stage.verdicts))


def reasons(record: RunRecord) -> list[str]:
    """Return the reasons of all unsuccessful stages that were not blocked, a line each; failed stages come first."""
    return [
        f"{name} {stage.status.replace('_', ' ')}: {why(stage)}"
        for status in ("failed", "gate_closed", "waiting_approval", "resumable")
        for name, stage in record.stages.items()
        if stage.status == status
    ]

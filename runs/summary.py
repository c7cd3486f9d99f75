"""Texts for the end of a run: comparisons, the folders of its models, and how to ask its policy."""

from collections.abc import Mapping
from pathlib import Path

from vantage.runs.own_commands import own_command
from vantage.runs.record import SUCCEEDED, RunRecord, StageRecord
from vantage.schemas.kind import MODELS
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.storage.storage import Storage

_LONGEST_PROMPT = 80
"""Characters of a prompt that stands in a printed command."""


def comparison(stage: StageRecord) -> str:
    """Return ``accuracy 0.911 against 0.600 (+0.311 ± 0.012); greedy 0.996 against 1.000`` for an evaluation, else empty.

    Of two judges, one after the other; of a model that judges pairs, ``win rate 0.540 (orders disagree 0.210)``.
    """
    found = [_comparison_by(stage.metrics, name) for name in ("accuracy", "score")]
    return "  ".join(text for text in (*found, _preference(stage.metrics)) if text)


def _preference(metrics: Mapping[str, float | None]) -> str:
    """Return what a model says of pairs: its win rate has a name of its own where it is the second judge."""
    if "order_disagreement" not in metrics:
        return ""
    rate = metrics.get("preference_win_rate", metrics.get("win_rate"))
    disagree = metrics["order_disagreement"]
    return f"win rate {_three_decimals(rate)} (orders disagree {_three_decimals(disagree)})"


def _comparison_by(metrics: Mapping[str, float | None], name: str) -> str:
    if metrics.get(name) is None or metrics.get(f"baseline_{name}") is None:
        return ""
    text = _compared(metrics, name, f"baseline_{name}")
    gain, error = metrics.get(f"{name}_gain"), metrics.get(f"{name}_gain_standard_error")
    if gain is not None:
        text += f" ({gain:+.3f}{f' ± {error:.3f}' if error is not None else ''})"
    if metrics.get(f"greedy_{name}") is not None:
        text += f"; greedy {_compared(metrics, f'greedy_{name}', f'baseline_greedy_{name}')[len(name) + 8 :]}"
    return text


def _compared(metrics: Mapping[str, float | None], name: str, baseline: str) -> str:
    ours, theirs = metrics.get(name), metrics.get(baseline)
    return f"{name} {_three_decimals(ours)} against {_three_decimals(theirs)}"


def _three_decimals(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def samples_heading(record: RunRecord, step: str) -> str:
    """Return the heading of an evaluation's samples."""
    stage = record.recipe.stages.get(step)
    if not isinstance(stage, PolicyEvaluation):
        return step
    return f"{step}: {stage.baseline} (baseline) and {stage.candidate} (candidate) on test prompts, with their judgements"


def model_folders(record: RunRecord, storage: Storage) -> dict[str, Path]:
    """Stage → folder of its model, in the order of the recipe; without the imported model, and without those that this
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

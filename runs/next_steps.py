"""Suggest next steps after a gate has closed: fields to change, commands, and the steps that they run again."""

from collections.abc import Mapping, Sequence

from vantage.runs.own_commands import own_command, run_command
from vantage.runs.record import SUCCEEDED, RunRecord
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Gate, Training
from vantage.schemas.recipe.stages import Rollouts, ValuePretraining
from vantage.schemas.records.no_gain import accepts_a_loss
from vantage.schemas.records.verdicts import STOPS, Verdict
from vantage.schemas.sweep import with_downstream

COMMAND_INDENT = " " * 6
"""Beginning of a line that is a command."""


def after_parts(record: RunRecord, workspace: str) -> list[str]:
    """Return lines to print for a run that failed, was stopped, or ran a part of the recipe."""
    if record.status == "failed":
        failed = [step for step, stage in record.stages.items() if stage.status == "failed"]
        return [
            f"What is made is kept. The log of {_join(failed)}:",
            *(
                f"{COMMAND_INDENT}{own_command('logs', record.run_id, step, '--workspace', workspace)}"
                for step in failed
            ),
            "  When the cause is corrected, go on with:",
            f"{COMMAND_INDENT}{run_command(record.source, record.overrides, workspace)}",
        ]
    if record.status == "resumable":
        return [
            "What is made is kept. Go on with:",
            f"{COMMAND_INDENT}{own_command('resume', record.run_id, '--workspace', workspace)}",
        ]
    if record.status == "completed" and record.part is not None:
        return [
            f"The run was {record.part}. The rest, which reuses what is made:",
            f"{COMMAND_INDENT}{run_command(record.source, record.overrides, workspace)}",
        ]
    return []


def after_closed_gates(record: RunRecord, workspace: str) -> list[str]:
    """Return lines to print for each closed gate that stopped the run."""
    lines: list[str] = []
    for step, stage in record.stages.items():
        for number, verdict in enumerate(stage.verdicts):
            if not verdict.passed and verdict.on_fail in STOPS:
                lines += _steps_after_gate(record, workspace, step, number, verdict)
    return lines


def after_questions(record: RunRecord, workspace: str) -> list[str]:
    """Return lines to print for each question that a person has not answered."""
    lines: list[str] = []
    for subject, question in record.open_questions.items():
        place = ["--workspace", workspace]
        about = "; ".join(str(verdict) for verdict in question.verdicts if not verdict.passed)
        lines += [
            f"{subject} waits for a person{f': {about}' if about else ''}. Look at it, then:",
            *(
                f"{COMMAND_INDENT}{own_command(word, record.run_id, subject, '--reason', 'WHY', *place)}"
                for word in ("approve", "reject")
            ),
        ]
    if lines:
        lines += [
            "  and go on with:",
            f"{COMMAND_INDENT}{own_command('resume', record.run_id, '--workspace', workspace)}",
        ]
    return lines


def _steps_after_gate(
    record: RunRecord, workspace: str, step: str, number: int, verdict: Verdict
) -> list[str]:
    recipe = record.recipe
    kept, again = _reused_and_rerun(record, step)

    def command(*more: str) -> str:
        return f"{COMMAND_INDENT}{run_command(record.source, record.overrides, workspace, *more)}"

    gate = _gate_field(recipe, step, number)
    side = "at_least" if verdict.relation == ">=" else "at_most"
    lines = [
        f"{step} did not pass {verdict.metric} {verdict.relation} {verdict.threshold:g}. What can be done:"
    ]
    if isinstance(recipe.stages[step], ValuePretraining):
        lines += [
            "  where its critic explains the returns and where not:",
            f"{COMMAND_INDENT}{own_command('critic', f'{record.run_id}/{step}', '--workspace', workspace)}",
        ]
    if (extend := recipe.stages[step].extend) is not None:
        lines += [
            f"  1. train it further: {gate}.extend.at_most. It goes on from its last iteration; {again} run again:",
            command(f"{gate}.extend.at_most={2 * extend.at_most}"),
        ]
    elif fields := _fields_to_try(recipe, step):
        values = "  ".join(f"{name}={value}" for name, value in fields.items())
        lines += [
            f"  1. train it otherwise: {values}. {kept} reused; {again} run again:",
            command(*(f"{name}={value}" for name, value in list(fields.items())[:1])),
        ]
    else:
        lines.append(f"  1. change what it reads; {kept} reused where nothing they read changes")
    if (lower := _lower_bound(verdict, record.stages[step].metrics)) is not None:
        lines += [
            f"  2. ask for less: {gate}.{side}. Nothing that is made is made again, {step} included, and the ledger and the "
            "model's card show that the gate was loosened:",
            command(f"{gate}.{side}={lower}"),
        ]
    lines += [
        f"  {2 if lower is None else 3}. let a person decide, whose name and reason are recorded (`vantage approve`): "
        f"{gate}.on_fail",
        command(f"{gate}.on_fail=approve", *([f"{gate}.extend=null"] if verdict.on_fail == "extend" else [])),
    ]
    return lines


def _fields_to_try(recipe: ResolvedRecipe, step: str) -> dict[str, str]:
    """Return the stage's fields for the amount of training and the learning rate → a value to try."""
    stage = recipe.stages[step]
    if not isinstance(stage, Training):
        return {}
    if isinstance(stage, Rollouts) and hasattr(stage, "iterations"):
        amount = {f"stages.{step}.iterations": f"{2 * stage.iterations}"}
    else:
        amount = {f"stages.{step}.epochs": f"{2 * getattr(stage, 'epochs', 1):g}"}
    rate = stage.learning_rate
    return amount if rate is None else amount | {f"stages.{step}.learning_rate": f"{2 * rate:g}"}


def _gate_field(recipe: ResolvedRecipe, step: str, number: int) -> str:
    """Return the path for an override of the gate; a single gate needs no index."""
    gates: Sequence[Gate] = recipe.stages[step].gate
    return f"stages.{step}.gate" if len(gates) == 1 else f"stages.{step}.gate.{number}"


def _lower_bound(verdict: Verdict, measured: Mapping[str, float | None]) -> str | None:
    """Return a bound that the judged value meets; None: there is none, or only one that accepts a loss."""
    if verdict.judged is None:
        return None
    bound = _threshold_met_by(verdict)
    return None if accepts_a_loss(verdict.metric, verdict.relation, float(bound), measured) else bound


def _threshold_met_by(verdict: Verdict) -> str:
    """Return a threshold of two digits that the judged value meets."""
    judged = verdict.judged
    assert judged is not None
    digits = f"{judged:.2g}"
    step = 10.0 ** (int(f"{judged:e}".partition("e")[2]) - 1)
    if verdict.relation == ">=" and float(digits) > judged:
        digits = f"{float(digits) - step:.2g}"
    if verdict.relation == "<=" and float(digits) < judged:
        digits = f"{float(digits) + step:.2g}"
    return digits


def _reused_and_rerun(record: RunRecord, step: str) -> tuple[str, str]:
    """Return (steps that are reused, steps that run again) if the step is changed, as texts."""
    again = with_downstream(record.recipe, [step])
    kept = [name for name, stage in record.stages.items() if name not in again and stage.status in SUCCEEDED]
    return f"{_join(kept)} {'is' if len(kept) == 1 else 'are'}", _join(
        [n for n in record.stages if n in again]
    )


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing"

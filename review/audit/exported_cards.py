"""Check the card of an exported folder: it is derived again from the run that made the model."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vantage.ledger.entries import RunEntry
from vantage.ledger.replay import Replay
from vantage.review.audit.card_texts import Compared, compare_cards
from vantage.review.audit.evidence import Evidence
from vantage.review.exports.exported_card import MadeBy, model_card
from vantage.review.exports.exporting import CARD
from vantage.runs.named_models import NamedModel, Origin
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.view import Broken, Maker, Missing
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.audit import Check
from vantage.schemas.records.sampling import ModelOpened

_MAX_BYTES = 2**20
_WRITES_DATE = "The template writes today's date"
_SERVED = re.compile(r"^transformers serve (.+?) {6}# or: vllm serve ", re.MULTILINE)
_LOADED = re.compile(r"\.from_pretrained\((.+?)\)")


def exported_card_checks(
    evidence: Evidence, path: Path, provenance: Mapping[str, Any], artifact: Artifact
) -> Iterator[Check]:
    """Yield the check of ``README.md``; none for a folder without one, which claims nothing.

    Args:
        path: the folder.
        provenance: its ``vantage.json``.
        artifact: the artifact that the folder holds.
    """
    try:
        found = _read(path / CARD)
    except (OSError, ValueError) as error:
        yield Check(subject=CARD, outcome="wrong", detail=f"it cannot be read ({error})")
        return
    if found is None:
        return
    run_id, step = str(provenance.get("run_id")), str(provenance.get("stage"))
    record = evidence.record(run_id)
    if isinstance(record, Missing | Broken):
        yield Check(subject=CARD, outcome="unchecked", detail=f"it could not be compared: {record}")
        return
    stage = record.stages.get(step)
    if stage is None or (stage.stage_key, stage.digest) != (artifact.stage_key, artifact.digest):
        said = f"{step} of run {run_id[:80]} has not made or found this artifact"
        yield Check(subject=CARD, outcome="wrong", detail=said)
        return
    compared = _compared(evidence, found, provenance, path, record, step)
    yield Check(subject=CARD, outcome=compared.outcome, detail=compared.detail)


def _compared(
    evidence: Evidence, found: str, provenance: Mapping[str, Any], path: Path, record: RunRecord, step: str
) -> Compared:
    """Return the comparison of the card with the run's present state, else with an earlier state."""
    view = evidence.view(record.run_id)
    entry = view.entry()
    maker = view.maker(step)
    if isinstance(entry, Missing | Broken) or not isinstance(maker, Maker):
        return Compared("unchecked", "it could not be compared: the run that made the model cannot be read")
    made_by = None if maker.run.run_id == record.run_id else MadeBy(maker.run.run_id, maker.step)
    now = _against(found, provenance, path, record, step, entry, made_by)
    if now.outcome != "wrong":
        return now
    replay = evidence.replay(record.run_id)
    for each in reversed(replay.lines) if isinstance(replay, Replay) else ():
        earlier = _as_recorded(each.entry, entry)
        if (
            step in earlier.stages
            and _against(found, provenance, path, record, step, earlier, made_by).outcome == "ok"
        ):
            return Compared(
                "note", f"it is of an earlier state of the run, which has recorded more since: {now.detail}"
            )
    if len(entry.stages) < sum(stage.digest is not None for stage in record.stages.values()):
        return Compared("unchecked", "it could not be compared: artifacts of the run were removed")
    return now


def _as_recorded(earlier: RunEntry, now: RunEntry) -> RunEntry:
    """Return an earlier state of a run: the steps that had an artifact then, described as in the present state."""
    stages = {
        name: replace(
            now.stages[name],
            verdicts=stage.verdicts,
            loosened=stage.loosened,
            inputs={
                role: given
                for role, given in now.stages[name].inputs.items()
                if given.stage in earlier.stages
            },
        )
        for name, stage in earlier.stages.items()
        if name in now.stages and stage.artifact is not None
    }
    ordered = {name: stages[name] for name in now.stages if name in stages}
    return replace(now, stages=ordered, approvals=earlier.approvals)


def _against(
    found: str,
    provenance: Mapping[str, Any],
    path: Path,
    record: RunRecord,
    step: str,
    entry: RunEntry,
    made_by: MadeBy | None,
) -> Compared:
    """Return the comparison with the card of one state of the run."""
    model, folder = _model(provenance, record, step, entry), _place(found) or path
    opened = _opened(found, provenance, model)
    return compare_cards(found, model_card(model, opened, folder=folder, entry=entry, made_by=made_by))


def _model(provenance: Mapping[str, Any], record: RunRecord, step: str, entry: RunEntry) -> NamedModel:
    """Return the model in the form in which it was exported, from the run's record."""
    stage: StageRecord = record.stages[step]
    artifact = entry.stages[step].artifact
    assert artifact is not None and stage.stage_key is not None and stage.digest is not None, (
        "compared before"
    )
    return NamedModel(
        label=f"{step} of run {record.run_id}",
        kind=artifact.kind,
        folder=None,
        generation=record.recipe.generation,
        date=record.recipe.model.date,
        origin=Origin(
            recipe=record.recipe.recipe,
            run_id=record.run_id,
            stage=step,
            stage_key=stage.stage_key,
            digest=stage.digest,
            base=None,
            parents=artifact.parents,
            metrics=artifact.metrics,
            # MLflow's copy has no provenance
            provenance=stage.provenance if provenance.get("provenance") else {},
        ),
    )


def _opened(found: str, provenance: Mapping[str, Any], model: NamedModel) -> ModelOpened | None:
    """Return a policy's sampling settings, from ``vantage.json``; None for a reward model.

    No record says whether the template writes a date, so this is taken from the card itself.
    """
    if model.kind != "policy":
        return None
    tokens = provenance.get("stop_tokens")
    return ModelOpened(
        uses_chat=bool(provenance.get("chat")),
        stop_token_ids=(),
        stop_tokens=tuple(str(each) for each in tokens) if isinstance(tokens, list) else (),
        writes_date=_WRITES_DATE in found,
    )


def _place(found: str) -> Path | None:
    """Return the folder in the card's commands, to which the model was exported."""
    served, loaded = _SERVED.search(found), _LOADED.search(found)
    try:
        if served is not None:
            return Path(shlex.split(served[1])[0])
        return None if loaded is None else Path(ast.literal_eval(loaded[1]))
    except (ValueError, IndexError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _read(path: Path) -> str | None:
    """Return the text of a card; None: there is none. Raises ValueError if it is no text, or too long."""
    if not path.exists() and not path.is_symlink():
        return None
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it is no plain file of at most {_MAX_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")

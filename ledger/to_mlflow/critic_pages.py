"""Log the page about a stage's critic among the artifacts of its run in MLflow."""

import logging
from pathlib import Path

from mlflow.tracking import MlflowClient
from pydantic import ValidationError

from vantage.ledger.critic_page.page import critic_page
from vantage.ledger.entries import StageEntry
from vantage.schemas.records.critic_advice import advice_on_drift, advice_on_pretraining
from vantage.schemas.records.critic_diagnosis import (
    DIAGNOSIS_FILE,
    DRIFT_CURVES,
    CriticDiagnosis,
    CriticDrift,
    PretrainedCritic,
    drift_points,
)

PAGE = "critic.html"
TAG = "vantage.critic"
"""Name of the tag with the advice, in one line."""

log = logging.getLogger(__name__)


def log_critic_page(client: MlflowClient, run_id: str, stage: StageEntry) -> None:
    """Log the page of a pretrained critic, or of a critic's course during a policy stage; idempotent.

    The first is made from a file of the artifact, the second from the run's curves in MLflow. Without these, nothing
    is logged.
    """
    if stage.kind == "value_pretraining" and (critic := _pretrained(stage)) is not None:
        page = critic_page(f"Critic of {stage.name}", [critic])
        advice = advice_on_pretraining(critic)
    elif stage.kind == "policy_optimization" and (drift := _drift(client, run_id, stage.name)) is not None:
        page = critic_page(f"Critic of {stage.name}", [], [drift])
        advice = advice_on_drift(drift)
    else:
        return
    client.log_text(run_id, page, PAGE)
    client.set_tag(run_id, TAG, advice[0].text)


def _pretrained(stage: StageEntry) -> PretrainedCritic | None:
    file = Path(stage.folder or "", DIAGNOSIS_FILE)
    if stage.folder is None or not file.is_file():
        return None
    try:
        diagnosis = CriticDiagnosis.model_validate_json(file.read_bytes())
    except ValidationError as error:  # another version wrote the file; the ledger still has the metrics
        log.warning("%s cannot be read, so there is no page about it (%s)", file, type(error).__name__)
        return None
    return PretrainedCritic(step=stage.name, diagnosis=diagnosis)


def _drift(client: MlflowClient, run_id: str, step: str) -> CriticDrift | None:
    """Return the critic's course from MLflow's own curves; None for a policy without a critic."""
    curves: dict[int, dict[str, float]] = {}
    names: set[str] = set()
    for name in DRIFT_CURVES:
        for point in client.get_metric_history(run_id, name):
            curves.setdefault(point.step, {})[name] = point.value
            names.add(name)
    if "explained_variance" not in names:
        return None
    return CriticDrift(step=step, points=drift_points(curves), is_switched="critic_weight" in names)

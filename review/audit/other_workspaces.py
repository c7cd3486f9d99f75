"""Find runs of other workspaces in the same MLflow: what they have changed there is in no record of this workspace."""

import json
import re
from collections.abc import Mapping

from vantage.review.audit.evidence import Evidence
from vantage.runs.view import Missing

_RUN_ID = "vantage.run_id"
_POSSIBLE_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
"""MLflow is asked for no other ids: it could refuse a question with an odd text, and then count as not answering."""


def is_elsewhere(evidence: Evidence, run_id: str) -> bool:
    """Return whether MLflow has a run of this id, and the workspace has not."""
    return run_id not in evidence.run_ids and bool(_tags_with(evidence, _RUN_ID, run_id))


def mover_elsewhere(evidence: Evidence, tag: str | None) -> str:
    """Return the run of another workspace that moved an alias last, by the tag of the registered model; empty: none."""
    try:
        run_id = json.loads(tag or "")["run_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    is_possible = isinstance(run_id, str) and _POSSIBLE_ID.fullmatch(run_id) is not None
    return run_id if is_possible and is_elsewhere(evidence, run_id) else ""


def publishers_elsewhere(evidence: Evidence, digest: str) -> list[str]:
    """Return the runs of other workspaces that published an artifact, by the tags of MLflow's runs."""
    found = _tags_with(evidence, "vantage.digest", digest)
    return _elsewhere(evidence, [each for each in found if "vantage.published" in each])


def readers_elsewhere(evidence: Evidence, digest: str) -> list[str]:
    """Return the runs of other workspaces that have a dataset, or the source file of one, with this digest."""
    names = ("vantage.digest", "vantage.source.sha256")
    return _elsewhere(evidence, [each for name in names for each in _tags_with(evidence, name, digest)])


def _elsewhere(evidence: Evidence, found: list[Mapping[str, str]]) -> list[str]:
    run_ids = dict.fromkeys(each[_RUN_ID] for each in found if _RUN_ID in each)
    return [each for each in run_ids if each not in evidence.run_ids]


def _tags_with(evidence: Evidence, tag: str, value: str) -> list[Mapping[str, str]]:
    """Return the tags of each of MLflow's runs that has this one."""
    found = evidence.once(
        ("runs with", tag, value), lambda: evidence.ask(lambda server: server.tags_with(tag, value))
    )
    return [] if isinstance(found, Missing) else found

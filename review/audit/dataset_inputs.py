"""Compare the datasets among the inputs of MLflow's runs with what was sent."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vantage.ledger.expected.artifact_fields import ROLE
from vantage.ledger.expected.runs import ExpectedRun
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_tags import PREFIX, shown
from vantage.review.audit.other_workspaces import readers_elsewhere
from vantage.review.audit.sent import expected_of

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import DatasetInput, MlflowRun


def dataset_problems(
    evidence: Evidence, required: ExpectedRun, allowed: ExpectedRun, found: "MlflowRun"
) -> Iterator[str]:
    """Yield differences between the datasets among the inputs of one of MLflow's runs and those that were sent."""
    given = {each.tags.get("vantage.digest", ""): each for each in found.datasets}
    known = allowed.datasets | allowed.optional_datasets
    optional = {digest: tags for digest, tags in required.optional_datasets.items() if digest in given}
    for digest, tags in (required.datasets | optional).items():
        if digest not in given:
            yield f"dataset input {digest[:12]} is missing"
            continue
        dataset = given[digest]
        for name, value in tags.items():
            if dataset.tags.get(name) not in (value, known[digest].get(name)):
                yield f"dataset input {digest[:12]}: {name} is {shown(dataset.tags.get(name))}, and was sent as {shown(value)}"
        yield from _field_problems(evidence, digest, dataset, allowed.dataset_fields[digest])
    for dataset in found.datasets:
        digest = dataset.tags.get("vantage.digest", "")
        what = f"dataset input {digest[:12] or 'without our digest'}"
        if digest not in known:
            yield f"{what}: nobody sent it"
            continue
        if dataset is not given[digest]:
            yield f"{what}: there are two, and one was sent"
        for name in sorted(dataset.tags.keys() - known[digest].keys() - {ROLE}):
            if name.startswith(PREFIX):
                yield f"{what}: {name} is {shown(dataset.tags[name])}, which nobody sent"


def _field_problems(
    evidence: Evidence, digest: str, dataset: "DatasetInput", sent: list[dict[str, str]]
) -> Iterator[str]:
    """Yield differences in MLflow's own fields.

    MLflow has one row for each pair of name and digest of a dataset, and keeps the fields of the run that sent it
    first. So a dataset from two sources, or a file that was read from two paths, has only the first source in these
    fields, and both in the tags.
    """
    described = f"dataset input {sent[0]['digest'][:12]}"
    if dataset.digest != sent[0]["digest"]:
        yield f"{described} has the digest {dataset.digest[:12]} in MLflow's own field"
    if dataset.name not in {fields["name"] for fields in sent}:
        yield f"{described} has the name {shown(dataset.name)}, and was sent as {shown(sent[0]['name'])}"
    if dataset.source_type != "vantage" or dataset.schema:
        yield f"{described} is of the type {shown(dataset.source_type)} with the schema {shown(dataset.schema)}, and was sent without a schema"
    sources = {_source_digest(fields.get("source", "")) for fields in sent}
    if _source_digest(dataset.source) not in sources | {None}:
        yield f"{described} has a source of another sha256 ({shown(dataset.source)}) than was sent"
    for field in sent[0].keys() & {"source", "profile"}:
        found, ours = _parsed(getattr(dataset, field)), _parsed(sent[0][field])
        if found != ours and not _is_anothers(evidence, digest, field, found, ours):
            yield f"{described} has the {field} {shown(str(found))}, and was sent as {shown(str(ours))}"


def _source_digest(text: str) -> object:
    """Return the sha256 of the file that a dataset was prepared from; None: the text names no file."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value.get("source_sha256") if isinstance(value, dict) else None


def _parsed(text: str) -> object:
    """Return a field of a dataset, without the parts that may differ."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return (
        {name: each for name, each in value.items() if name != "source_sha256"}
        if isinstance(value, dict)
        else value
    )


def _is_anothers(evidence: Evidence, digest: str, field: str, found: object, ours: object) -> bool:
    """Return whether another run may have sent this source first: the same bytes at another address."""
    if field != "source" or not isinstance(found, dict) or not isinstance(ours, dict):
        return False
    if {**found, "uri": None} != {**ours, "uri": None}:
        return False
    return found in _sources_of(evidence, digest) or bool(readers_elsewhere(evidence, digest))


def _sources_of(evidence: Evidence, digest: str) -> list[object]:
    """Return the sources that the runs of the workspace have sent for the datasets of a digest."""

    def read() -> list[object]:
        replays = [(run_id, evidence.replay(run_id)) for run_id in evidence.run_ids]
        expected = [
            expected_of(evidence, run_id, each) for run_id, each in replays if isinstance(each, Replay)
        ]
        runs = [run for stages in expected for run in stages.values()]
        return [_parsed(each["source"]) for run in runs for each in run.dataset_fields.get(digest, ())]

    return evidence.once(("sources", digest), read)

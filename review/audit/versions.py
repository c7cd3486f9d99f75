"""Check versions of registered models: their fields and tags in MLflow, their files, and the aliases that point to them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vantage.ledger.expected.answer_tags import ALIAS
from vantage.ledger.replay import Replay
from vantage.review.audit.aliases import alias_check
from vantage.review.audit.cards import version_card_checks
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_tags import PREFIX, shown
from vantage.review.audit.other_workspaces import mover_elsewhere, publishers_elsewhere
from vantage.review.audit.publications import Recorded, gone, movements, publications
from vantage.review.audit.served import copy_check
from vantage.runs.view import Missing
from vantage.schemas.records.audit import Check

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowVersion

_FACTS = ("vantage.gate.", "vantage.measured.")
_OWN_TAGS = frozenset({"vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id"})


def versions_of(evidence: Evidence, digest: str) -> "list[MlflowVersion] | Missing":
    """Return every version that names an artifact, asking MLflow once."""
    return evidence.once(
        ("versions of", digest), lambda: evidence.ask(lambda server: server.versions_of(digest))
    )


def version_checks(evidence: Evidence, version: "MlflowVersion") -> Iterator[Check]:
    """Check a version that names an artifact: its fields and tags, its files, and every alias that points to it."""
    published = publications(evidence, version.name)
    subject = f"version {version.name}/{version.version}"
    problems = [
        *_tag_problems(evidence, version, published),
        *_field_problems(version),
        *_registered_problems(evidence, version),
    ]
    ours = [each for each in published if each.digest == version.tags["vantage.digest"]]
    if problems:
        yield Check(subject=subject, outcome="wrong", detail="; ".join(problems))
    elif not ours:
        yield _unknown_publication(evidence, version, subject)
    elif facts := list(_fact_problems(version, ours)):
        yield _published_elsewhere(evidence, version, subject, "; ".join(facts))
    else:
        yield Check(subject=subject, detail=f"published by run {ours[-1].run_id}")
    yield copy_check(evidence, version)
    for card in version_card_checks(evidence, version):
        yield (
            _published_elsewhere(evidence, version, card.subject, card.detail)
            if card.outcome == "wrong"
            else card
        )
    for alias in version.aliases:
        yield alias_check(evidence, version, alias)


def _tag_problems(evidence: Evidence, version: "MlflowVersion", published: list[Recorded]) -> Iterator[str]:
    tags, digest = version.tags, version.tags["vantage.digest"]
    refs = evidence.refs_of.get(digest, [])
    keys = {ref.artifact.stage_key for ref in refs}
    if keys and tags.get("vantage.stage_key") not in keys:
        yield f"tag vantage.stage_key is {str(tags.get('vantage.stage_key'))[:12]}, the artifact's is {min(keys)[:12]}"
    for name in ("vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id"):
        if version.model_tags and version.model_tags.get(name) != tags.get(name):
            yield f"tag {name} is {tags.get(name)}, that of its logged model is {version.model_tags.get(name)}"
    made = evidence.ask(lambda server: server.tags_of(version.run_id)) if version.run_id else None
    if made is None:
        yield f"MLflow has no run {version.run_id or 'of its own'}, which it names as the one that made it"
    elif not isinstance(made, Missing) and made.get("vantage.digest") != digest:
        yield f"the run of MLflow that it names made {str(made.get('vantage.digest'))[:12]}"
    doubles = versions_of(evidence, digest)
    numbers = (
        []
        if isinstance(doubles, Missing)
        else [int(each.version) for each in doubles if each.name == version.name]
    )
    if numbers and int(version.version) != min(numbers):
        yield (
            f"version {min(numbers)} holds the artifact already, and no run makes a second one: a process may have been killed as two "
            f"registered it at once; `vantage publish RUN --model {version.name}` or the same recipe again deletes one that has neither "
            "an alias nor a text, and another one is to be deleted in MLflow"
        )
    if not any(each.digest == digest and each.facts is not None for each in published):
        return
    for name in sorted(tags):
        if name.startswith("vantage.") and not name.startswith(_FACTS) and name not in _OWN_TAGS:
            yield f"tag {name} is “{tags[name]}”, which no run sent"


def _fact_problems(version: "MlflowVersion", ours: list[Recorded]) -> Iterator[str]:
    """Yield gates and measurements that are not those that the publications sent."""
    tags = version.tags
    facts = [each.facts for each in ours if each.facts is not None]
    if not facts:
        return
    for name, value in tags.items():
        if name.startswith(_FACTS) and value not in {each.get(name) for each in facts}:
            yield f"tag {name} is “{value}”, which no run sent"
    for name, value in facts[-1].items():
        if name not in tags:
            yield f"tag {name} is absent, and was sent as “{value}”"


def _published_elsewhere(evidence: Evidence, version: "MlflowVersion", subject: str, problems: str) -> Check:
    """Return the check of a version whose text or tags differ: a run of another workspace may have written them."""
    others = publishers_elsewhere(evidence, version.tags["vantage.digest"])
    if not others:
        return Check(subject=subject, outcome="wrong", detail=problems)
    said = f"run {others[-1]}, which is not in {evidence.workspace.address}, has published it too: audit it where that run is"
    return Check(subject=subject, outcome="unchecked", detail=f"{said}; {problems}")


def _field_problems(version: "MlflowVersion") -> Iterator[str]:
    """Yield MLflow's own fields that no publication sets."""
    if version.status != "READY":
        yield f"its status is {version.status}, and it was registered as READY"
    if version.stage != "None":
        yield f"it is in MLflow's stage {version.stage}, by which MLflow loads it, and no run gave it one"
    if version.run_link:
        yield f"its run link is {shown(version.run_link)}, which nobody sent"
    if version.status_message:
        yield f"its message is {shown(version.status_message)}, which nobody sent"


def _registered_problems(evidence: Evidence, version: "MlflowVersion") -> Iterator[str]:
    """Yield tags of the registered model that no run sent; there is one for every alias that was moved."""
    is_whole = all(isinstance(evidence.replay(run_id), Replay) for run_id in evidence.run_ids)
    for name, value in sorted(version.registered.items()):
        if not name.startswith(PREFIX):
            continue
        if not name.startswith(ALIAS):
            yield f"tag {name} of the registered model is {shown(value)}, which no run sent"
        elif (
            is_whole
            and not movements(evidence, version.name, name.removeprefix(ALIAS))
            and not mover_elsewhere(evidence, value)
        ):
            yield f"tag {name} of the registered model is {shown(value)}, and no run moved that alias"


def _unknown_publication(evidence: Evidence, version: "MlflowVersion", subject: str) -> Check:
    run_id = version.tags.get("vantage.run_id", "")
    if run_id not in evidence.run_ids:
        said = f"it says that run {run_id} made it, which is not in {evidence.workspace.address}"
        return Check(subject=subject, outcome="unchecked", detail=said)
    if why := gone(evidence, version.name, version.tags.get("vantage.digest")):
        return Check(subject=subject, outcome="unchecked", detail=why)
    return Check(subject=subject, outcome="wrong", detail="no run published it")

"""``vantage publish`` and ``vantage rollback``: move aliases after a run has ended."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vantage.flows.publishing.ended_run import EndedRun, ended_run
from vantage.flows.publishing.publishing import (
    Outcome,
    approval_of,
    publish,
    published_step,
    required_steps,
    why_alias_stays,
    why_not_published,
)
from vantage.ledger import tracking
from vantage.runs.alias_history import Pointed, movements, pointed_to
from vantage.runs.contradictions import contradictions
from vantage.runs.origin import user
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.run import read_run
from vantage.runs.watching import Watcher
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.recipe import Publication
from vantage.schemas.reserved_aliases import RESERVED_ALIAS
from vantage.signing.deciding import (
    Signer,
    how_to_sign,
    movements_of,
    sign_movements,
    signer_of_movement,
)
from vantage.signing.decisions import Decision

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.published_models import PublishedVersion

_VERSION = re.compile(r"[1-9][0-9]{0,8}")
"""The number of a version in MLflow."""


class RolledBack(NamedTuple):
    """An alias was moved back."""

    registered_model: str
    alias: str
    from_version: str
    to_version: str
    stage: str
    run_id: str
    """The run that published ``to_version``, and whose ledger contains the movement."""
    by: str
    sent: bool
    """Whether MLflow has received the movement."""


def publish_again(
    workspace: Workspace,
    run_id: str,
    watcher: Watcher,
    *,
    model: str | None,
    alias: str | None,
    key: Path | None = None,
) -> dict[str, Outcome]:
    """Publish the models that the recipe of an ended run lists; returns ``NAME@ALIAS`` → outcome.

    Args:
        workspace: the run's workspace.
        run_id: id of a run that no process executes.
        watcher: shows the steps that were done.
        model: the only registered model to publish; None: all of the recipe.
        alias: alias to move; None: the recipe's.
        key: file of the private key that signs the movements; None: the recipe's, if it can be used.

    Raises:
        RunError: the recipe publishes nothing of that name, the alias is invalid, an artifact is damaged or differs
            from the run's record, the policy asks for another key, or a process executes the run. Then nothing is
            published.
        vantage.signing.keys.BadKey, vantage.signing.policy.BadPolicy: the named key or the policy cannot be used. Then
            nothing is published.
    """
    record = read_run(workspace, run_id)
    if record.status == REMOVED:
        raise RunError(f"run {run_id} was removed by `vantage gc`; run its recipe again")
    wanted = _publications(record, model, alias)
    outcomes: dict[str, Outcome] = {}
    signer = Signer(None)
    for publication in wanted:
        if publication.alias is not None:
            signer = signer_of_movement(
                workspace, record, publication.registered_model, publication.alias, key
            )
    with ended_run(workspace, run_id, watcher) as ended:
        moved_before = movements_of(workspace, run_id)
        for publication in wanted:
            if why_not_published(publication, ended) is None:
                _require_intact(publication, ended)
                _require_borne_out(publication, ended)
        ended.run.update(unpublished={})
        for publication in wanted:
            outcomes[publication.target] = publish(publication, ended, by=user())
        before, outcome = ended.run.record.status, ended.run.outcome()
        ended.run.update(status=outcome)
        if before != outcome:
            ended.ledger.finish_run(outcome)
        _sign(ended, moved_before, signer)
    return outcomes


def roll_back(
    workspace: Workspace,
    name: str,
    alias: str,
    *,
    to: str | None,
    by: str | None,
    reason: str,
    watcher: Watcher,
    key: Path | None = None,
) -> RolledBack:
    """Move an alias to the version that it pointed to before, after the checks of every publication.

    Args:
        workspace: the workspace whose runs have published the versions.
        name, alias: the registered model and its alias.
        to: the version to which the alias moves; None: the version before, by the records of the runs.
        by: name of the person; None: the login name.
        reason: the person's reason; not empty.
        watcher: shows warnings.
        key: file of the private key that signs the movement; None: the recipe's, if it can be used.

    Raises:
        RunError: there is no earlier version, a check fails, MLflow's copy is damaged, the alias was moved meanwhile,
            or the policy asks for another key.
        vantage.signing.keys.BadKey, vantage.signing.policy.BadPolicy: the named key or the policy cannot be used.
        vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
    """
    if to is not None and not _VERSION.fullmatch(to):
        raise RunError(
            f"--to {to!r} is no version, which is a number such as 3; leave it out to go back by one"
        )
    address = tracking.address(None, workspace.root)
    present = _present_version(address, name, alias)
    history = movements(workspace, name, alias)
    if to is not None:
        target = _find(address, name, version=to)
    else:
        target = _earlier(address, _find(address, name, alias=alias), history, name, alias)
    if target.version == present:
        raise RunError(
            f"{name}@{alias} points to version {target.version} already; name another version with --to"
        )
    with ended_run(workspace, _publishing_run(workspace, target, history), watcher) as ended:
        publication = _publication_of(ended, target, history, alias)
        _require_publishable(publication, ended, target.version)
        signer = signer_of_movement(workspace, ended.run.record, name, alias, key)
        _require_borne_out(publication, ended)
        _require_intact_copy(address, target)
        if (now := _present_version(address, name, alias)) != present:
            raise RunError(
                f"{name}@{alias} was moved from version {present} to {now} meanwhile, and not by this command; run it again "
                "if it still has to go back"
            )
        moved_before = movements_of(workspace, ended.run.record.run_id)
        ended.ledger.move_alias(
            publication.stage,
            target.digest,
            name,
            alias,
            from_version=present,
            to_version=target.version,
            by=by or user(),
            login=user(),
            reason=reason,
            newest=history[-1].order if history else None,
        )
        sent = ended.ledger.flush()
        if why := ended.ledger.why_not_moved(name, alias):
            raise RunError(f"{name}@{alias} was not moved: {why}")
        _sign(ended, moved_before, signer)
        run_id = ended.run.record.run_id
    stage = publication.stage
    return RolledBack(name, alias, present, target.version, stage, run_id, by or user(), sent)


def _sign(ended: EndedRun, moved_before: Collection[Decision], signer: Signer) -> None:
    """Sign the aliases that were just moved; they stay moved if that fails."""
    run = ended.run
    for why in sign_movements(run.workspace, run.record.run_id, moved_before, signer):
        remedy = how_to_sign(run.workspace, run.record.run_id)
        ended.watcher.say(f"  the movement is NOT SIGNED: {why}; sign it later: {remedy}", "red")


def _publications(record: RunRecord, model: str | None, alias: str | None) -> list[Publication]:
    chosen = [each for each in record.recipe.publish if model in (None, each.registered_model)]
    if not chosen:
        there = ", ".join(each.registered_model for each in record.recipe.publish) or "nothing"
        raise RunError(
            f"the recipe of run {record.run_id} publishes {there}{'' if model is None else f', and not {model}'}; "
            "name one of these, or add the model to `publish` of the recipe"
        )
    if alias is None:
        return chosen
    models = dict.fromkeys((each.stage, each.registered_model) for each in chosen)
    return [
        _for_alias([each for each in chosen if (each.stage, each.registered_model) == which], alias, record)
        for which in models
    ]


def _for_alias(entries: Sequence[Publication], alias: str, record: RunRecord) -> Publication:
    """Return the recipe's entry for a model: the one with this alias, else the only entry.

    Raises:
        RunError: no entry is for this alias, and the entries have different conditions; or the alias is invalid.
    """
    own = [each for each in entries if each.alias == alias] or entries
    fitting = [_with_alias(each, alias) for each in own]
    if any(each != fitting[0] for each in fitting):
        named = ", ".join(each.alias or "no alias" for each in entries)
        raise RunError(
            f"the recipe of run {record.run_id} publishes {entries[0].registered_model} under {named}, which differ in after, "
            f"approve or merge, and has no {alias}; name one of them, or add {alias} to the recipe"
        )
    return fitting[0]


def _with_alias(publication: Publication, alias: str) -> Publication:
    """Return the publication with another alias. Raises RunError if it is not a valid alias."""
    try:
        if RESERVED_ALIAS.fullmatch(alias):
            raise ValueError("reserved")
        return Publication.model_validate({**publication.model_dump(), "alias": alias})
    except ValueError:
        raise RunError(
            f"{alias!r} is no alias: one has at most 63 lower-case letters, digits and hyphens, begins with a letter, and is "
            "neither latest nor v and a number, which MLflow reserves; name another"
        ) from None


def _require_borne_out(publication: Publication, ended: EndedRun) -> None:
    """Check that the verdicts and metrics of the run's record agree with the artifacts in the store."""
    record, store = ended.run.record, ended.store
    steps: Collection[str] = {
        step
        for step in required_steps(publication, ended)
        if (digest := record.stages[step].digest) is not None and store.has_object(digest)
    }
    if differing := contradictions(ended.run.workspace, record, steps):
        raise RunError(
            f"the record of run {record.run_id} differs from its artifacts: {'; '.join(differing)}; look who edited it "
            f"(`vantage audit {record.run_id}`), and run the recipe again, which records anew"
        )


def _require_intact(publication: Publication, ended: EndedRun) -> None:
    """Read every byte of the artifact; raise if one is damaged."""
    artifact = ended.artifacts.get(published_step(publication, ended))
    problems = ["the store has it no longer"] if artifact is None else ended.store.verify(artifact)
    if problems:
        raise RunError(
            f"the artifact of {publication.stage} is not intact: {'; '.join(problems)}; `vantage resume "
            f"{ended.run.record.run_id}` makes it again"
        )


def _require_registry(address: str, name: str) -> None:
    if tracking.is_missing_database(address):  # MLflow would create a missing database
        raise RunError(
            f"MLflow has no registered model {name}, and nothing was published from here yet; run a recipe that publishes it, "
            "or set MLFLOW_TRACKING_URI"
        )
    tracking.set_up_client()


def _present_version(address: str, name: str, alias: str) -> str:
    """Return the version that the alias points to now, whether or not Vantage published it."""
    _require_registry(address, name)
    from vantage.ledger.to_mlflow.published_models import NoSuchModel, version_of_alias  # imports MLflow

    try:
        return version_of_alias(address, name, alias)
    except NoSuchModel as error:
        raise RunError(str(error)) from None


def _find(
    address: str, name: str, *, version: str | None = None, alias: str | None = None
) -> "PublishedVersion":
    _require_registry(address, name)
    from vantage.ledger.to_mlflow.published_models import NoSuchModel, find_published  # imports MLflow

    try:
        return find_published(address, name, version=version, alias=alias)
    except NoSuchModel as error:
        raise RunError(str(error)) from None


def _earlier(
    address: str, present: "PublishedVersion", history: Sequence[Pointed], name: str, alias: str
) -> "PublishedVersion":
    """Return the version before the present one that MLflow still has."""
    from vantage.ledger.to_mlflow.published_models import find_by_digest  # imports MLflow

    remedy = "name a version with --to"
    stack = pointed_to(list(history))
    if not stack or stack[-1].digest != present.digest:
        raise RunError(
            f"{name}@{alias} points to version {present.version}, and no run of this workspace has recorded that it was "
            f"moved there; find out what moved it; {remedy}"
        )
    for each in reversed(stack[:-1]):
        found = find_by_digest(address, name, each.digest)
        if found is not None:
            return found
    raise RunError(
        f"{name}@{alias} has pointed to no other version before, by what runs have recorded; {remedy}"
    )


def _publishing_run(workspace: Workspace, target: "PublishedVersion", history: Sequence[Pointed]) -> str:
    """Return the newest run that moved the alias to the version at its end, else the one that made the model."""
    published = [each.run_id for each in history if each.digest == target.digest and not each.goes_back]
    run_id = published[-1] if published else target.run_id
    try:
        read_run(workspace, run_id)
    except RunError as error:
        raise RunError(
            f"version {target.version} of {target.name} was published by run {run_id}, whose gates cannot be looked at "
            f"here ({error}); name the workspace of that run with --workspace"
        ) from None
    return run_id


def _publication_of(
    ended: EndedRun, target: "PublishedVersion", history: Sequence[Pointed], alias: str
) -> Publication:
    """Return the publication of this version by the run, with the alias that is to move."""
    run_id = ended.run.record.run_id
    stages = [each.stage for each in history if (each.run_id, each.digest) == (run_id, target.digest)]
    stage = stages[-1] if stages else target.stage
    fitting = [
        each
        for each in ended.recipe.publish
        if each.registered_model == target.name and stage in (each.stage, published_step(each, ended))
    ]
    made = ended.run.record.stages.get(published_step(fitting[0], ended)) if fitting else None
    if made is None or made.digest != target.digest:
        raise RunError(
            f"run {run_id} has not published {stage} as version {target.version} of {target.name}; name another version, or the "
            "run that published this one"
        )
    return _for_alias(fitting, alias, ended.run.record)


def _require_publishable(publication: Publication, ended: EndedRun, version: str) -> None:
    """Make the checks of the run's end, for the version's own run. Raises RunError if one fails."""
    why = why_not_published(publication, ended) or why_alias_stays(publication, ended)
    if not why and publication.approve:
        answer = approval_of(publication, ended)
        why = None if answer and answer.approved else str(answer or "nobody has approved of it")
    if why:
        raise RunError(
            f"version {version} of {publication.registered_model} (run {ended.run.record.run_id}) must not get "
            f"{publication.alias}: {why}"
        )


def _require_intact_copy(address: str, target: "PublishedVersion") -> None:
    from vantage.ledger.to_mlflow.published_models import problems_of_published  # imports MLflow

    if problems := problems_of_published(address, target):
        raise RunError(
            f"MLflow's copy of {target.name} version {target.version} is damaged: {'; '.join(problems)}; run the recipe "
            "that made it again, which makes the copy again, or name another version with --to"
        )

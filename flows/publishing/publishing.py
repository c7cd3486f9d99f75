"""Register models whose gates have passed, and move aliases to them.

A run publishes at its end, and ``vantage publish`` later; ``vantage rollback`` moves an alias back. All three call
``why_alias_stays`` first.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal, Protocol

from vantage.ledger.run_ledger import Ledger
from vantage.runs.alias_history import newest_order
from vantage.runs.record import SUCCEEDED, PublishedCopy
from vantage.runs.run import Run
from vantage.runs.watching import Watcher
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import Publication, ResolvedRecipe
from vantage.schemas.records.approvals import PUBLISH_PREFIX, Approval, Question, answer_to
from vantage.schemas.records.artifacts import Artifact, is_same
from vantage.schemas.records.verdicts import Verdict
from vantage.schemas.safe_text import safe_text
from vantage.schemas.steps import merging_step
from vantage.signing.policy import check_publish_policy
from vantage.storage.key_locks import Locked
from vantage.storage.storage import Storage

LOCK_SECONDS = 120.0
"""Seconds that publishing waits for another run that publishes or makes the same artifact."""

Outcome = Literal["published", "alias_stays", "waiting_approval", "refused"]
"""``published``: with the alias, if there is one; the operation may wait in the outbox until MLflow answers.
``alias_stays``: a version is there, but the alias did not move. ``refused``: nothing was published."""


class Published(Protocol):
    """A run whose models can be published: an ``Orchestrator`` at its end, or an ``EndedRun``."""

    @property
    def run(self) -> Run:
        """The run; this process holds its lock."""

    @property
    def recipe(self) -> ResolvedRecipe:
        """The run's recipe."""

    @property
    def inputs(self) -> Mapping[str, Mapping[str, str]]:
        """Step → role → step that it reads."""

    @property
    def artifacts(self) -> Mapping[str, Artifact]:
        """Step → its artifact, for artifacts that are in the store."""

    @property
    def store(self) -> Storage:
        """The storage of artifacts."""

    @property
    def ledger(self) -> Ledger:
        """The run's ledger."""

    @property
    def watcher(self) -> Watcher:
        """Display of the steps that were done."""


def publish(publication: Publication, given: Published, *, by: str | None = None) -> Outcome:
    """Register the stage's model and move its alias, or print the reason why not.

    ``by``: login name of the person who publishes after the run's end.
    """
    if missing := why_not_published(publication, given):
        given.watcher.say(
            f"  {publication.stage} is not published as {publication.registered_model}: {missing}", "magenta"
        )
        return "refused"
    kept = _why_not_earned(publication, given) if publication.alias else None
    refused = None if kept else _why_forbidden(publication, given)
    question = None
    if publication.approve and (kept or refused):
        given.run.withdraw(f"{PUBLISH_PREFIX}{publication.target}")
    elif publication.approve:
        answer = approval_of(publication, given)
        if answer is None:
            kept, question = "it waits for approval", question_about(publication, given)
        elif not answer.approved:
            refused = str(answer)
    if stays := kept or refused:
        given.watcher.say(f"  {publication.alias} stays where it is: {stays}", "yellow")
    _record_refusal(publication, given, refused)
    alias = None if stays else publication.alias
    outcome = _register(publication, given, alias, by)
    if outcome == "refused":
        return outcome
    if question is not None:
        given.run.ask(question)
    return "waiting_approval" if question else "alias_stays" if stays else outcome


def _record_refusal(publication: Publication, given: Published, refused: str | None) -> None:
    """Record in run.json why a policy or a person forbids the alias to move; remove the record if it may move.

    A gate's verdict is recorded already. The recipe continues after a refusal, so it does not change the exit code.
    """
    record = given.run.record
    others = {target: why for target, why in record.refused_aliases.items() if target != publication.target}
    now = others | ({publication.target: refused} if publication.alias and refused else {})
    if now != record.refused_aliases:
        given.run.update(refused_aliases=now)


def why_not_published(publication: Publication, given: Published) -> str | None:
    """Return the step that did not succeed although the publication needs it; None: all did."""
    stages = given.run.record.stages
    for step in required_steps(publication, given):
        if step not in stages:
            return f"the run's record has no {step}; run the recipe again, which records anew"
        if stages[step].status not in SUCCEEDED:
            return f"{step} is {stages[step].status.replace('_', ' ')}"
    return None


def why_alias_stays(publication: Publication, given: Published) -> str | None:
    """Return the reason why an alias must not point to the stage's model; None: it may, unless a person still has to approve.

    This makes all checks for the run's end, ``vantage publish`` and ``vantage rollback``: the stage's gates and those
    of ``after`` passed, or a person approved of them; the model is neither the one from which its stage started nor the
    baseline of its evaluation; and the policy on publishing, if there is one, allows the movement.
    """
    return _why_not_earned(publication, given) or _why_forbidden(publication, given)


def question_about(publication: Publication, given: Published) -> Question:
    """Return the question to a person before the alias moves."""
    stages, step = given.run.record.stages, published_step(publication, given)
    key, digest = stages[step].stage_key, stages[step].digest
    assert key is not None and digest is not None, "it succeeded"
    return Question(
        subject=f"{PUBLISH_PREFIX}{publication.target}",
        stage=publication.stage,
        stage_key=key,
        digest=digest,
        verdicts=_verdicts(publication, given),
    )


def approval_of(publication: Publication, given: Published) -> Approval | None:
    """Return a person's answer to ``question_about``."""
    return answer_to(question_about(publication, given), given.run.record.approvals)


def _register(publication: Publication, given: Published, alias: str | None, by: str | None) -> Outcome:
    """Register the version, move the alias, and print the result."""
    name = publication.registered_model
    artifact = given.artifacts[published_step(publication, given)]
    _tell_bill(publication.stage, given)
    with _held(artifact, given):
        newest = None if alias is None else newest_order(given.run.workspace, name, alias)
        version = given.ledger.publish(
            publication.stage, artifact, given.store.folder(artifact), name, alias=alias, by=by, newest=newest
        )
    copy = given.ledger.copy_status(name, artifact)
    if copy.refused:
        given.run.update(unpublished={**given.run.record.unpublished, name: copy.refused})
        given.watcher.say(f"  {publication.stage} is not published as {name}: {copy.refused}", "red")
        return "refused"
    if copy.location:
        kept = PublishedCopy(location=copy.location, digest=artifact.digest, version=version)
        given.run.update(copies={**given.run.record.copies, name: kept})
    for problem in copy.repaired:
        given.watcher.say(
            f"  MLflow's copy of {name} was damaged, and is made again from the store: {problem}", "red"
        )
    if copy.alias_stays:
        given.watcher.say(f"  {alias} stays where it is: {copy.alias_stays}", "yellow")
        alias = None
    result = f"version {version}" if version else "MLflow does not answer; the next run sends it"
    given.watcher.say(f"  published {publication.stage} as {name}{f'@{alias}' if alias else ''}: {result}")
    return "alias_stays" if copy.alias_stays else "published"


@contextmanager
def _held(artifact: Artifact, given: Published) -> Iterator[None]:
    """Hold the artifact's lock, so that only one of several runs copies it to MLflow, and the others find its version.

    If another run keeps the lock for too long, the artifact is published without it: of two versions, one is removed
    later.
    """

    def tell(holder: str) -> None:
        given.watcher.say(f"  publishing waits for {holder}", "dim")

    with ExitStack() as held:
        with suppress(Locked):
            held.enter_context(
                given.store.exclusive(
                    artifact.stage_key,
                    holder=f"run {given.run.record.run_id}",
                    on_wait=tell,
                    timeout=LOCK_SECONDS,
                )
            )
        yield


def _tell_bill(stage: str, given: Published) -> None:
    """Log the bill of materials of a published artifact; a model is published even if none can be made."""
    from vantage.review.exports.bills import tell_bill

    try:
        tell_bill(given.run, stage, ledger=given.ledger)
    except (OSError, ValueError, KeyError) as error:
        reason = safe_text(str(error) or type(error).__name__)
        given.watcher.say(f"  there is no bill of materials of {stage}: {reason}", "yellow")


def published_step(publication: Publication, given: Published) -> str:
    """Return the step whose artifact is registered: adapters are merged first."""
    merged = merging_step(publication.stage)
    return merged if publication.merge and merged in given.run.record.stages else publication.stage


def required_steps(publication: Publication, given: Published) -> list[str]:
    """Return steps that must have succeeded."""
    step = published_step(publication, given)
    required = [publication.stage, *([publication.after] if publication.after else []), step]
    return list(dict.fromkeys(required))


def _verdicts(publication: Publication, given: Published) -> tuple[Verdict, ...]:
    stages = given.run.record.stages
    return tuple(verdict for step in required_steps(publication, given) for verdict in stages[step].verdicts)


def _why_not_earned(publication: Publication, given: Published) -> str | None:
    """Return the run's own objections to the movement: a closed gate, or a model that is not a new one."""
    return _why_gates(publication, given) or _why_unchanged(publication, given)


def _why_gates(publication: Publication, given: Published) -> str | None:
    """Return a gate that neither passed nor was approved."""
    stages = given.run.record.stages
    for step in required_steps(publication, given):
        closed = [verdict for verdict in stages[step].verdicts if not verdict.passed]
        for verdict in closed:
            if verdict.on_fail != "approve" or not _is_approved(step, verdict, given):
                return f"gate of {step}: {verdict}"
    return None


def _is_approved(step: str, verdict: Verdict, given: Published) -> bool:
    """Return whether a person has approved exactly this verdict on exactly this artifact."""
    stage = given.run.record.stages[step]
    return any(
        answer.approved
        and answer.question.subject == step
        and (answer.question.stage_key, answer.question.digest) == (stage.stage_key, stage.digest)
        and verdict in answer.question.verdicts
        for answer in given.run.record.approvals
    )


def _why_forbidden(publication: Publication, given: Published) -> str | None:
    """Return a rule of the policy on publishing that forbids the movement."""
    if publication.alias is None:
        return None
    step = published_step(publication, given)
    return check_publish_policy(
        given.run.workspace,
        given.run.record,
        step,
        model=publication.registered_model,
        alias=publication.alias,
        after=publication.after,
    )


def _why_unchanged(publication: Publication, given: Published) -> str | None:
    """Return a reason if the stage's model equals its initial model or a baseline, else None."""
    stage = publication.stage
    same_as = [("which it started from", given.inputs[stage].get("init"))]
    for name, other in given.recipe.stages.items():
        if isinstance(other, PolicyEvaluation) and other.candidate == stage:
            same_as.append((f"the baseline of {name}", given.inputs[name]["baseline"]))
    for what, step in same_as:
        known = step in given.artifacts and stage in given.artifacts
        if step and known and is_same(given.artifacts[stage], given.artifacts[step]):
            return f"{stage} holds the weights of {step}, {what}"
    return None

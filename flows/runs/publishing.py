"""Publishing after the stages: registers models whose gates have passed."""

from flows.orchestrator import Orchestrator
from flows.runs.record import SUCCEEDED, PublishedCopy
from flows.signing.policy import check_publish_policy
from schemas.recipe.evaluations import PolicyEvaluation
from schemas.recipe.recipe import Publication
from schemas.records.artifacts import is_same
from schemas.steps import merging_step


def publish(publication: Publication, orchestrator: Orchestrator) -> None:
    """Register the stage's model, or print why not.

    The alias moves only if the stage's own gates and those of ``after`` passed. It never moves to a model with the same
    files as its stage's initial model, or as the baseline of its evaluation.
    """
    stages = orchestrator.run.record.stages
    merged = merging_step(publication.stage)
    has_merged = publication.merge and merged in stages
    required = [publication.stage, *([publication.after] if publication.after else [])]
    required += [merged] if has_merged else []
    for step in required:
        if stages[step].status not in SUCCEEDED:
            status = stages[step].status.replace("_", " ")
            orchestrator.watcher.say(
                f"  {publication.stage} is not published as {publication.registered_model}: {step} is {status}",
                "magenta",
            )
            return
    passed = all(verdict.passed for step in required for verdict in stages[step].verdicts)
    made_by = merged if has_merged else publication.stage
    artifact = orchestrator.artifacts[made_by]
    unchanged = _why_unchanged(publication.stage, orchestrator) if publication.alias else None
    if unchanged:
        orchestrator.watcher.say(f"  {publication.alias} stays where it is: {unchanged}", "yellow")
    alias = publication.alias if passed and not unchanged else None
    if alias is not None and _is_forbidden(publication.registered_model, alias, made_by, orchestrator):
        alias = None
    version = orchestrator.ledger.publish(
        publication.stage,
        artifact,
        orchestrator.store.folder(artifact),
        publication.registered_model,
        alias=alias,
    )
    name = publication.registered_model
    copy = orchestrator.ledger.copy_status(name, artifact)
    if copy.refused:
        orchestrator.run.update(unpublished={**orchestrator.run.record.unpublished, name: copy.refused})
        orchestrator.watcher.say(f"  {publication.stage} is not published as {name}: {copy.refused}", "red")
        return
    if copy.location:
        kept = PublishedCopy(location=copy.location, digest=artifact.digest)
        orchestrator.run.update(copies={**orchestrator.run.record.copies, name: kept})
    for problem in copy.repaired:
        orchestrator.watcher.say(
            f"  MLflow's copy of {name} was damaged, and is made again from the store: {problem}", "red"
        )
    result = f"version {version}" if version else "MLflow does not answer; the next run sends it"
    orchestrator.watcher.say(
        f"  published {publication.stage} as {publication.registered_model}{f'@{alias}' if alias else ''}: {result}"
    )


def _is_forbidden(model: str, alias: str, step: str, orchestrator: Orchestrator) -> bool:
    """Whether the policy on publishing keeps the alias where it is; then it is recorded and said why."""
    run = orchestrator.run
    why = check_publish_policy(run.workspace, run.record, step, model=model, alias=alias)
    if why is None:
        return False
    run.update(refused_aliases={**run.record.refused_aliases, f"{model}@{alias}": why})
    orchestrator.watcher.say(f"  {alias} stays where it is: {why}", "red")
    return True


def _why_unchanged(stage: str, orchestrator: Orchestrator) -> str | None:
    """A reason if the stage's model equals its initial model or a baseline, else None."""
    same_as = [("which it started from", orchestrator.inputs[stage].get("init"))]
    for name, other in orchestrator.recipe.stages.items():
        if isinstance(other, PolicyEvaluation) and other.candidate == stage:
            same_as.append((f"the baseline of {name}", orchestrator.inputs[name]["baseline"]))
    for what, step in same_as:
        if step in orchestrator.artifacts and is_same(
            orchestrator.artifacts[stage], orchestrator.artifacts[step]
        ):
            return f"{stage} holds the weights of {step}, {what}"
    return None

"""What happens after the stages: models that came to be, and whose gates passed, are registered."""

from flows.orchestrator import Orchestrator
from flows.runs.run import GOOD, PublishedCopy
from schemas.recipe.recipe import Publication
from schemas.recipe.stages import PolicyEvaluation
from schemas.records.artifacts import is_same


def publish(publication: Publication, orchestrator: Orchestrator) -> None:
    """Register the stage's model, or say why not; the alias moves only if its own and ``after``'s gates passed.

    It never moves to a model that is, file by file, the one that its stage started from or that an evaluation measures
    it against.
    """
    stages = orchestrator.run.record.stages
    concerned = [publication.stage, *([publication.after] if publication.after else [])]
    for step in concerned:
        if stages[step].status not in GOOD:
            status = stages[step].status.replace("_", " ")
            orchestrator.watcher.say(
                f"  {publication.stage} is not published as {publication.registered_model}: {step} is {status}",
                "magenta",
            )
            return
    passed = all(verdict.passed for step in concerned for verdict in stages[step].verdicts)
    artifact = orchestrator.artifacts[publication.stage]
    nothing_new = _nothing_new(publication.stage, orchestrator) if publication.alias else None
    if nothing_new:
        orchestrator.watcher.say(f"  {publication.alias} stays where it is: {nothing_new}", "yellow")
    alias = publication.alias if passed and not nothing_new else None
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
    told = f"version {version}" if version else "MLflow does not answer; the next run sends it"
    orchestrator.watcher.say(
        f"  published {publication.stage} as {publication.registered_model}{f'@{alias}' if alias else ''}: {told}"
    )


def _nothing_new(stage: str, orchestrator: Orchestrator) -> str | None:
    """Why the stage's model is no other than one it came from or is measured against; None where it is another."""
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

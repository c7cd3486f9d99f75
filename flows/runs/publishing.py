"""What happens after the stages: models that came to be, and whose gates passed, are registered."""

from flows.attempts.stage_life import StageLife
from flows.runs.run import GOOD, PublishedCopy
from schemas.recipe.recipe import Publication
from schemas.recipe.stages import PolicyEvaluation
from schemas.records.artifacts import is_same


def publish(publication: Publication, life: StageLife) -> None:
    """Register the stage's model, or say why not; the alias moves only if its own and ``after``'s gates passed.

    It never moves to a model that is, file by file, the one that its stage started from or that an evaluation measures
    it against.
    """
    stages = life.run.record.stages
    concerned = [publication.stage, *([publication.after] if publication.after else [])]
    for step in concerned:
        if stages[step].status not in GOOD:
            status = stages[step].status.replace("_", " ")
            life.watcher.say(
                f"  {publication.stage} is not published as {publication.registered_model}: {step} is {status}",
                "magenta",
            )
            return
    passed = all(verdict.passed for step in concerned for verdict in stages[step].verdicts)
    artifact = life.artifacts[publication.stage]
    nothing_new = _nothing_new(publication.stage, life) if publication.alias else None
    if nothing_new:
        life.watcher.say(f"  {publication.alias} stays where it is: {nothing_new}", "yellow")
    alias = publication.alias if passed and not nothing_new else None
    version = life.ledger.publish(
        publication.stage, artifact, life.store.folder(artifact), publication.registered_model, alias=alias
    )
    name = publication.registered_model
    copy = life.ledger.said_of_copy(name, artifact)
    if copy.refused:
        life.run.update(unpublished={**life.run.record.unpublished, name: copy.refused})
        life.watcher.say(f"  {publication.stage} is not published as {name}: {copy.refused}", "red")
        return
    if copy.location:
        kept = PublishedCopy(location=copy.location, digest=artifact.digest)
        life.run.update(copies={**life.run.record.copies, name: kept})
    for problem in copy.repaired:
        life.watcher.say(
            f"  MLflow's copy of {name} was damaged, and is made again from the store: {problem}", "red"
        )
    told = f"version {version}" if version else "MLflow does not answer; the next run sends it"
    life.watcher.say(
        f"  published {publication.stage} as {publication.registered_model}{f'@{alias}' if alias else ''}: {told}"
    )


def _nothing_new(stage: str, life: StageLife) -> str | None:
    """Why the stage's model is no other than one it came from or is measured against; None where it is another."""
    same_as = [("which it started from", life.inputs[stage].get("init"))]
    for name, other in life.recipe.stages.items():
        if isinstance(other, PolicyEvaluation) and other.candidate == stage:
            same_as.append((f"the baseline of {name}", life.inputs[name]["baseline"]))
    for what, step in same_as:
        if step in life.artifacts and is_same(life.artifacts[stage], life.artifacts[step]):
            return f"{stage} holds the weights of {step}, {what}"
    return None

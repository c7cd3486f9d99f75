"""What happens after the stages: models that came to be, and whose gates passed, are registered."""

from flows.runs import GOOD
from flows.stage_life import StageLife
from schemas.recipe import Publication


def publish(publication: Publication, life: StageLife) -> None:
    """Register the stage's model, or say why not; the alias moves only if its own and ``after``'s gates passed."""
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
    alias = publication.alias if passed else None
    version = life.ledger.publish(
        publication.stage, artifact, life.store.folder(artifact), publication.registered_model, alias=alias
    )
    told = f"version {version}" if version else "MLflow does not answer; the next run sends it"
    life.watcher.say(
        f"  published {publication.stage} as {publication.registered_model}{f'@{alias}' if alias else ''}: {told}"
    )

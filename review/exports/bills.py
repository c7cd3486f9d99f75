"""The bill of materials of a step of a run, for whoever asks, and for MLflow when a model is published."""

from collections.abc import Mapping

from vantage.ledger.run_ledger import Ledger
from vantage.review.exports.bill_of_materials import Material, bill_of_materials
from vantage.runs.run import Run
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.steps import dependencies
from vantage.storage.durable_files import make_folder, replace_file
from vantage.storage.environments import read_environment
from vantage.storage.storage import Storage

FOLDER = "bills"
"""In a run's folder: ``STAGE.cdx.json`` of each published stage."""


def bill_of(
    recipe: ResolvedRecipe,
    step: str,
    *,
    artifacts: Mapping[str, Artifact],
    provenance: Mapping[str, str],
    storage: Storage | None,
) -> str | None:
    """Return the bill as CycloneDX in JSON; None: what was installed where it was made is not recorded.

    Args:
        artifacts: step → its artifact, of those that are in the store; the step's own among them.
        provenance: of the step.
    """
    digest = provenance.get("environment")
    environment = None if digest is None or storage is None else read_environment(storage, digest)
    if environment is None:
        return None
    materials = {
        name: _material(recipe, name, artifacts[name])
        for name in _made_of(recipe, step)
        if name in artifacts and name != step
    }
    facts = {f"provenance.{part}": text for part, text in provenance.items()}
    return bill_of_materials(_material(recipe, step, artifacts[step], facts), materials.values(), environment)


def tell_bill(
    run: Run, step: str, *, artifacts: Mapping[str, Artifact], storage: Storage, ledger: Ledger
) -> None:
    """Write the bill of a step into the run's folder, and have it logged to MLflow; nothing where none can be made.

    Raises:
        OSError: the disk.
    """
    record = run.record
    bill = bill_of(
        record.recipe,
        step,
        artifacts=artifacts,
        provenance=record.stages[step].provenance,
        storage=storage,
    )
    if bill is not None:
        file = run.folder / FOLDER / f"{step}.cdx.json"
        make_folder(file.parent)
        replace_file(file, bill.encode())
        ledger.log_bill(step, file)


def _made_of(recipe: ResolvedRecipe, step: str) -> list[str]:
    """Return the step and all that it reads, at any depth, in the order of the recipe."""
    read = dependencies(recipe)
    wanted, waiting = set[str](), [step]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += read[name].values()
    return [name for name in read if name in wanted]


def _material(
    recipe: ResolvedRecipe, name: str, artifact: Artifact, facts: Mapping[str, str] | None = None
) -> Material:
    return Material(
        name=f"{recipe.recipe}/{name}",
        kind=artifact.kind,
        digest=artifact.digest,
        parents=frozenset(artifact.parents.values()),
        facts={"stage_key": artifact.stage_key, **(facts or {})},
        license=recipe.licenses.get(name, ""),
    )

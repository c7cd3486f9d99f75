"""``vantage sbom``: the bill of materials of an artifact."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.app import DEFAULT_WORKSPACE, Place, Verbose, complete_run
from flows.commands.output import explained, workspace_at

if TYPE_CHECKING:
    from flows.diff.sides import Side
    from flows.runs.bill_of_materials import Material
    from flows.runs.workspace import Workspace


def sbom(
    named: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/STAGE]|MODEL",
            help="A run (its published policy, else its last), a stage of it (or model, data.NAME of its recipe), or a "
            "registered model of MLflow: NAME, NAME@ALIAS, NAME/VERSION.",
            autocompletion=complete_run,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write a file; standard output if none is named."),
    ] = None,
    workspace: Place = DEFAULT_WORKSPACE,
    verbose: Verbose = False,
) -> None:
    """Write a CycloneDX 1.6 bill of materials: what was installed where an artifact was made, and what it was made of."""
    with explained(verbose):
        text = _bill(workspace_at(workspace), named)
        if to is None:
            print(text, end="")
            return
        from storage.durable_files import replace_file

        replace_file(to.expanduser().absolute(), text.encode())
        print(f"{to}: {text.count(chr(10)):,} lines")


def _bill(place: "Workspace", named: str) -> str:
    from flows.diff.sides import find_side
    from flows.runs.bill_of_materials import bill_of_materials
    from flows.runs.workspace import RunError
    from storage.environments import read_environment

    side = find_side(place, named)
    if side.is_recipe:
        raise RunError(f"{named} is a recipe, of which nothing was computed; name a run, a stage or a model")
    if side.told.stage is None:
        side = find_side(place, f"{side.told.run_id}/{_main_stage(side)}")
    step = side.told.stage or ""
    digest = side.steps[step].record.provenance.get("environment")
    storage = place.existing_storage
    environment = None if digest is None or storage is None else read_environment(storage, digest)
    if environment is None:
        raise RunError(
            f"{step} of run {side.told.run_id}: what was installed where it was made is not recorded (it was made by an "
            "earlier version, or the list was removed from the store); run the recipe in a new workspace to record it"
        )
    materials = _materials(side)
    if step not in materials:
        raise RunError(
            f"{step} of run {side.told.run_id} has no artifact in the store; run the same recipe again"
        )
    made = materials.pop(step)
    return bill_of_materials(made, materials.values(), environment)


def _main_stage(side: "Side") -> str:
    """The stage that the run publishes, else its last that made a policy."""
    from flows.runs.workspace import RunError

    published = [each.stage for each in side.recipe.publish]
    policies = [
        name
        for name, step in side.steps.items()
        if step.artifact is not None and step.artifact.kind == "policy"
    ]
    ready = [name for name in published if name in side.steps and side.steps[name].artifact is not None]
    if not ready and not policies:
        raise RunError(f"run {side.told.run_id} has made no policy; name a stage: {side.told.run_id}/STAGE")
    return (ready or policies[-1:])[0]


def _materials(side: "Side") -> "dict[str, Material]":
    """Step → its artifact, of the stage that was named and of everything that it was made of."""
    from flows.runs.bill_of_materials import Material
    from schemas.steps import dependencies

    read = dependencies(side.recipe)
    wanted, waiting = set[str](), [side.told.stage or ""]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += read[name].values()
    found = {}
    for name, step in side.steps.items():
        if name in wanted and step.artifact is not None:
            facts = {"stage_key": step.artifact.stage_key}
            if name == side.told.stage:
                facts |= {"run_id": str(side.told.run_id)}
                facts |= {f"provenance.{part}": text for part, text in step.record.provenance.items()}
            found[name] = Material(
                name=f"{side.told.recipe}/{name}",
                kind=step.artifact.kind,
                digest=step.artifact.digest,
                parents=frozenset(step.artifact.parents.values()),
                facts=facts,
            )
    return found

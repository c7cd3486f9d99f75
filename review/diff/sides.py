"""Find one side of a comparison by the name that people give it: a run, a stage of it, a registered model, or a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vantage.attempts.jobs import gates_of, key_parts_of, work_of
from vantage.runs.meanings import MADE, Command, OfRun, RecipeNamed, RegisteredNamed, RunNamed
from vantage.runs.names import Names
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.registry import MlflowRegistry
from vantage.runs.resolving import load_resolved
from vantage.runs.run import read_run
from vantage.runs.view import Broken, Missing, RunView
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.difference import ComparedSide
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies, ordered_steps

DIFF = Command("diff", (*MADE, RecipeNamed))


@dataclass(frozen=True)
class Step:
    """A step of a side."""

    name: str
    kind: str
    gates: tuple[Gate, ...]
    key: str | None
    """Its stage key; for a recipe, the hash of everything that the key will depend on. None: not known."""
    parts: Mapping[str, object]
    """Values whose hash is the key."""
    record: StageRecord
    """Record of the step in the run; empty for a recipe."""
    artifact: Artifact | None = None
    """The step's artifact; None: it was not made, or the store no longer has it."""


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared."""

    subject: ComparedSide
    recipe: ResolvedRecipe
    steps: Mapping[str, Step] = field(default_factory=dict)

    @property
    def is_recipe(self) -> bool:
        """Return whether nothing on this side was computed."""
        return self.subject.kind == "recipe"


def find_side(
    workspace: Workspace, named: str, overrides: Sequence[str] = (), *, command: Command = DIFF
) -> Side:
    """Find the side that ``named`` means.

    Args:
        workspace: the workspace with the runs; its MLflow has the registered models.
        named: a name as docs/names.md describes it.
        overrides: ``KEY=VALUE``, for a recipe only.
        command: the command, which accepts runs, steps of them, registered models or recipes.

    Raises:
        RunError: ``named`` is none of these, or a model whose run is not in the workspace.
        vantage.schemas.problems.RecipeError, ValueError: the recipe is invalid.
        vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
    """
    registry = MlflowRegistry(workspace)
    found = Names(workspace, registry=registry).resolve(named, command)
    if isinstance(found, RecipeNamed):
        return _of_recipe(found.source, overrides, workspace)
    if isinstance(found, RegisteredNamed):
        return _of_model(workspace, registry, found, named)
    assert isinstance(found, OfRun), "no other meaning is accepted"
    step = None if isinstance(found, RunNamed) else found.step
    return _of_run(workspace, read_run(workspace, found.run_id), named, step)


def find_sides(workspace: Workspace, a: str, b: str, overrides: Sequence[str]) -> tuple[Side, Side]:
    """Return both sides; overrides apply to B if that is a recipe, else to A.

    Raises:
        RunError: as ``find_side``; or there are overrides, but no recipe.
    """
    other = find_side(workspace, b, overrides)
    if overrides and other.is_recipe:
        return find_side(workspace, a), other
    one = find_side(workspace, a, overrides)
    if overrides and not one.is_recipe:
        raise RunError(f"--set {overrides[0]} changes a recipe, and neither {a} nor {b} is one; leave it out")
    return one, other


def expected_steps(recipe: ResolvedRecipe) -> dict[str, Step]:
    """Return the steps of a recipe with expected keys, in which the expected key of an input replaces its digest.

    Two steps with equal expected keys will have equal stage keys if their inputs are reproducible; nothing needs to be
    computed.
    """
    found: dict[str, Step] = {}
    read = dependencies(recipe)
    for name in ordered_steps(recipe):
        inputs = {role: found[step].key for role, step in read[name].items()}
        known = {role: key for role, key in inputs.items() if key is not None}
        parts: Mapping[str, object] = {}
        if len(known) == len(inputs):
            try:
                parts = key_parts_of(recipe, name, known)
            except (OSError, ValueError):  # the source is not on this machine
                parts = {}
        key = stage_key(parts) if parts else None
        found[name] = Step(
            name, work_of(recipe, name).kind, gates_of(recipe, name), key, parts, StageRecord()
        )
    return found


def _of_recipe(named: str, overrides: Sequence[str], workspace: Workspace) -> Side:
    recipe, _ = load_resolved(named, overrides, workspace=workspace)
    return Side(
        ComparedSide(named=named, kind="recipe", recipe=recipe.recipe), recipe, expected_steps(recipe)
    )


def _of_run(workspace: Workspace, record: RunRecord, named: str, step: str | None) -> Side:
    if step is not None and step not in record.stages:
        there = f"there are {', '.join(record.stages)}" if record.stages else "it has recorded none yet"
        raise RunError(f"run {record.run_id} has no stage {step}; {there}")
    steps = {name: _step(workspace, record, name) for name in _around(record.recipe, step, record)}
    subject = ComparedSide(
        named=named,
        kind="run" if step is None else "stage",
        recipe=record.recipe.recipe,
        run_id=record.run_id,
        status=record.status,
        stage=step,
        digest=None if step is None else record.stages[step].digest,
    )
    return Side(subject, record.recipe, steps)


def _around(recipe: ResolvedRecipe, step: str | None, record: RunRecord) -> list[str]:
    """Return all steps of a run; or one step, its inputs at any depth, and its evaluations."""
    read = dependencies(recipe)
    if step is None:
        return [name for name in ordered_steps(recipe) if name in record.stages]
    wanted, waiting = set[str](), [step]
    waiting += [name for name, inputs in read.items() if inputs.get("candidate") == step]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += read[name].values()
    return [name for name in ordered_steps(recipe) if name in wanted and name in record.stages]


def _step(workspace: Workspace, record: RunRecord, name: str) -> Step:
    stage, artifact = record.stages[name], RunView.of(workspace, record).artifact(name)
    return Step(
        name=name,
        kind=work_of(record.recipe, name).kind,
        gates=gates_of(record.recipe, name),
        key=stage.stage_key,
        parts=stage.key_parts,
        record=stage,
        artifact=None if isinstance(artifact, Missing | Broken) else artifact,
    )


def _of_model(workspace: Workspace, registry: MlflowRegistry, model: RegisteredNamed, named: str) -> Side:
    """Return the stage of the run that published a registered model."""
    found = registry.published(model)
    what = f"{found.name} version {found.version}"
    try:
        record = read_run(workspace, found.run_id)
    except RunError as error:
        raise RunError(f"{what} was published by run {found.run_id}: {error}") from None
    side = _of_run(workspace, record, named, found.stage)
    if side.subject.digest != found.digest:
        raise RunError(
            f"{what} holds {found.digest[:12]}, and {found.stage} of run {found.run_id} made "
            f"{str(side.subject.digest)[:12]}: the run was changed, or the model is another's; compare RUN/STAGE"
        )
    return Side(side.subject.model_copy(update={"kind": "model"}), side.recipe, side.steps)

"""A sweep: variants of one recipe (arms) over paired seeds, and the recipes of its runs.

All arms with the same seed use the same random numbers in the reseeded stages, so they are compared seed by seed. Steps
that do not depend on a seed have the same key in every run and are computed once.
"""

import contextlib
import hashlib
import json
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Annotated, Any, Generic, Literal

from pydantic import Field, StringConstraints, field_validator
from typing_extensions import TypeVar

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.checks.sweep_rules import (
    MAX_SEEDS,
    Draft,
    draft_of,
    draft_problems,
    mapping_of,
    selection_problems,
)
from vantage.schemas.frozen import Frozen
from vantage.schemas.loading import plain_yaml
from vantage.schemas.loading.field_errors import validated
from vantage.schemas.loading.recipe_file import find_recipe, load_recipe, read_document
from vantage.schemas.loading.source_paths import (
    UnresolvablePath,
    absolute,
    is_file,
    mode_of,
)
from vantage.schemas.problems import (
    Path,
    Problem,
    RecipeError,
    quote,
    suggest,
)
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    Name,
    Number,
    Seed,
    is_default,
)
from vantage.schemas.recipe.members import Member, member_seed
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rounds import Round, round_seed
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages_on_data import RewardModelling
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import headline_metric_names, one_of_each_family
from vantage.schemas.records.stage_key import NOT_IN_KEY, dumped
from vantage.schemas.steps import (
    MIXTURE_PREFIX,
    OTHER_MODEL_PREFIX,
    dependencies,
    ordered_steps,
    rewards_read,
)

NOT_COMPARED = NOT_IN_KEY - {"kind", "seed"}
"""Fields of a stage that never change its metrics."""


class Measure(Frozen):
    """A headline metric by which arms are compared."""

    stage: Name
    """The stage that reports it."""
    metric: str
    """A headline metric of the stage (docs/metrics.md)."""
    better: Literal["higher", "lower"] = "higher"
    """Whether higher or lower is better."""

    @property
    def name(self) -> str:
        """Name of its column."""
        return f"{self.stage}.{self.metric}"


class Published(Frozen):
    """A paper's numbers for the same arms, printed next to the results."""

    source: str
    """The paper and its table."""
    unit: str
    """Unit of its numbers."""
    values: dict[Name, Number]
    """Arm → the paper's number, for the arms in the paper."""


class Sweep(Frozen):
    """The file of a sweep."""

    sweep: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
    """The sweep's own name."""
    recipe: str
    """A file (relative to the sweep's folder), or a built-in recipe's name."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Overrides for every arm, applied after its own."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=MAX_SEEDS)]
    """Seeds; every arm runs once with each."""
    reseeds: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_NAMED)]
    """Stages that use the sweep's seed; all others keep the recipe's."""
    baseline: Name
    """The arm that the others are compared with."""
    measure: Annotated[tuple[Measure, ...], Field(min_length=1, max_length=MAX_NAMED)]
    """One measure, or a list."""
    arms: Annotated[dict[Name, dict[str, Any]], Field(min_length=2, max_length=MAX_NAMED)]
    """Arm → its overrides: dotted key → value."""
    published: Published | None = None
    """A paper's numbers for the same arms."""
    correct: Literal["none", "bonferroni"] = Field("none", exclude_if=is_default("none"))
    """``bonferroni``: intervals of differences hold together at 95 %: each at 1 − 0.05/m, for m = (arms − 1) · measures
    comparisons. ``none``: each on its own."""

    @property
    def comparisons(self) -> int:
        """Return the number of comparisons that the intervals are corrected for; 1: none."""
        return 1 if self.correct == "none" else max(1, (len(self.arms) - 1) * len(self.measure))

    @field_validator("measure", mode="before")
    @classmethod
    def _one_measure_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (dict, Measure)) else value


R = TypeVar("R", bound=Recipe, default=Recipe)


@dataclass(frozen=True)
class Cell(Generic[R]):
    """One arm with one seed: one run."""

    arm: str
    seed: int
    recipe: R

    @property
    def name(self) -> str:
        """Return the cell's name as it is printed."""
        return f"{self.arm} · {self.seed}"


@dataclass(frozen=True)
class SweepPlan(Generic[R]):
    """A loaded sweep with the recipe of every arm."""

    sweep: Sweep
    recipes: dict[str, R]
    """Arm → its recipe, reduced to the steps that the measured stages need; it publishes nothing."""

    def cells(self) -> list[Cell[R]]:
        """Return the cells of all runs, ordered by seed, so that an unfinished sweep has complete pairs."""
        return [
            Cell(arm, seed, _reseeded(recipe, self.sweep.reseeds, seed))
            for seed in self.sweep.seeds
            for arm, recipe in self.recipes.items()
        ]

    @property
    def digest(self) -> str:
        """sha256 of the runs, the baseline and the measures."""
        content = self.sweep.model_dump(mode="json", include={"seeds", "reseeds", "baseline", "measure"})
        content["recipes"] = {arm: recipe.model_dump(mode="json") for arm, recipe in self.recipes.items()}
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def load_sweep(
    source: str | File,
    overrides: Sequence[str] = (),
    *,
    arms: Sequence[str] | None = None,
    seeds: Sequence[str] | None = None,
) -> SweepPlan:
    """Load a sweep's file (or a built-in one by its name) and the recipe of every arm.

    Args:
        overrides: ``KEY=VALUE``, applied to every arm after the sweep's ``set``.
        arms, seeds: use only these of the sweep; None: all.

    Raises:
        RecipeError: all problems that were found, each with its line, arm or override.
    """
    file = find_recipe(source)
    sweep_file = _SweepFile(str(source), file.parent, read_document(file, str(source)))
    sweep, problems = _validate(sweep_file)
    draft = draft_of(sweep_file.reading.value)
    problems += [*draft_problems(draft, overrides), *selection_problems(draft, arms, seeds)]
    chosen = {arm: own for arm, own in draft.arms.items() if arms is None or arm in arms}
    recipes, found = _load_arms(replace(draft, arms=chosen), overrides, sweep_file)
    problems += [*found, *_recipe_problems(draft, recipes)]
    sweep_file.raise_problems(problems)
    assert sweep is not None  # it is None only if there was a problem, which was raised
    sweep = sweep.model_copy(
        update={
            "seeds": tuple(seed for seed in sweep.seeds if seeds is None or str(seed) in seeds),
            "arms": {arm: each for arm, each in sweep.arms.items() if arm in chosen},
        }
    )
    needed = {
        arm: _restricted_to(recipe, [measure.stage for measure in sweep.measure])
        for arm, recipe in recipes.items()
    }
    sweep_file.raise_problems(_equal_arms(needed))
    return SweepPlan(sweep, needed)


def with_downstream(recipe: Recipe, reseeds: Iterable[str]) -> set[str]:
    """Return the given steps, members of an ensemble by its name, and all steps that depend on one of them, directly or not."""
    inputs, found = dependencies(recipe), _stages_named(recipe, reseeds)
    for step in ordered_steps(recipe):
        if found & set(inputs[step].values()):
            found.add(step)
    return found


# -- the file


@dataclass(frozen=True)
class _SweepFile:
    """The sweep's file and its lines, to locate problems."""

    source: str
    folder: File
    reading: plain_yaml.Document

    def raise_problems(self, problems: Iterable[Problem]) -> None:
        """Raise RecipeError if there are problems; those of the file get their lines."""
        located = [self.locate(problem) for problem in problems]
        if located:
            raise RecipeError(
                sorted(located, key=lambda problem: (problem.source != self.source, problem.line or 0))
            )

    def locate(self, problem: Problem) -> Problem:
        """Return the problem with its line in the sweep's file, unless it has another source."""
        if problem.source:
            return problem
        lines, path = self.reading.lines, problem.path
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        line = next((lines[prefix] for prefix in prefixes if prefix in lines), 1)
        return replace(problem, source=self.source, line=problem.line or line)


def _validate(sweep_file: _SweepFile) -> tuple[Sweep | None, list[Problem]]:
    """Return the sweep and the problems of its fields; None if there are any.

    Raises:
        RecipeError: it is not a sweep.
    """
    plain, problems = sweep_file.reading.value, list(sweep_file.reading.problems)
    if not isinstance(plain, dict):
        sweep_file.raise_problems(
            [*problems, Problem((), "is not a mapping", "a sweep starts with `sweep: NAME`")]
        )
    if "sweep" not in plain and "stages" in plain:
        sweep_file.raise_problems([*problems, Problem((), "is a recipe, not a sweep", "use `vantage run`")])
    fields = validated(Sweep, plain)
    return (None if fields.problems else fields.value), problems + fields.problems


# -- the recipes


def _load_arms(
    sweep: Draft, overrides: Sequence[str], sweep_file: _SweepFile
) -> tuple[dict[str, Recipe], list[Problem]]:
    """Return arm → its recipe, for the arms that load; problems of the shared recipe, then further problems of arms."""
    if sweep.recipe is None:
        return {}, []
    try:
        beside = absolute(sweep.recipe, sweep_file.folder)
        found = is_file(beside)
    except UnresolvablePath as error:
        message = f"{quote(sweep.recipe)} cannot be looked up ({error})"
        return {}, [Problem(("recipe",), message, "name a .yaml file, or a built-in recipe")]
    is_path = found or beside.suffix in (".yaml", ".yml")
    recipe = str(sweep_file.folder / sweep.recipe) if is_path else sweep.recipe
    common = {_as_override(key, value, sweep_file.folder): ("set", key) for key, value in sweep.set.items()}
    given = {**common, **dict.fromkeys(overrides, ())}
    _, shared = _load(recipe, given)
    problems = [_in_sweep_file(problem, recipe, given) for problem in shared]
    known = {(problem.path, problem.message) for problem in shared}
    recipes: dict[str, Recipe] = {}
    for arm, own in sweep.arms.items():
        texts = {
            _as_override(key, value, sweep_file.folder): ("arms", arm, key) for key, value in own.items()
        }
        loaded, added = _load(recipe, {**texts, **given})
        new = [problem for problem in added if (problem.path, problem.message) not in known]
        problems += (_in_sweep_file(problem, recipe, {**texts, **given}, arm) for problem in new)
        if loaded is not None:
            recipes[arm] = loaded
    return recipes, problems


def _load(recipe: str, texts: Iterable[str]) -> tuple[Recipe | None, tuple[Problem, ...]]:
    try:
        return load_recipe(recipe, list(texts)), ()
    except RecipeError as error:
        return None, error.problems


def _in_sweep_file(
    problem: Problem, recipe: str, texts: Mapping[str, Path], arm: str | None = None
) -> Problem:
    """Return a recipe's problem at the place in the sweep's file that causes it (``texts``: override → its place)."""
    paths = {f"--set {text}": path for text, path in texts.items() if path}
    path = paths.get(problem.source) or (("arms", arm) if arm and problem.source == recipe else ())
    if path:  # the message may be about another field than the overridden one
        said = problem.field if problem.field and problem.field != path[-1] else ""
        message = ": ".join(filter(None, [said, problem.message]))
        return Problem(path, message, problem.remedy)
    return problem if problem.source else replace(problem, source=recipe)


def _as_override(key: str, value: Any, folder: File) -> str:
    """Return ``KEY=VALUE``; the path of a source is relative to the sweep's folder."""
    if key.endswith(".source") and isinstance(value, str):
        with contextlib.suppress(UnresolvablePath):  # the recipe's loader reports it
            file = absolute(value, folder)
            value = str(file) if mode_of(file) else value
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _recipe_problems(sweep: Draft, recipes: dict[str, Recipe]) -> Iterator[Problem]:
    """Yield stages and metrics of the sweep that the recipes (of the arms that load) do not have."""
    if not recipes:
        return
    known = next(iter(recipes.values())).stages
    reseeds = [stage for stage in sweep.reseeds if isinstance(stage, str)]
    for i, stage in enumerate(sweep.reseeds):
        if stage in reseeds and not any(_stages_named(recipe, [stage]) for recipe in recipes.values()):
            message = f"{quote(stage)} is not a stage of the recipe"
            yield Problem(("reseeds", i), message, suggest(stage, known))
    for path, written in sweep.measures:
        measure = mapping_of(written)
        if not isinstance(measure.get("stage"), str):
            continue
        for arm, recipe in recipes.items():
            problem = _measure_problem(measure["stage"], measure.get("metric"), recipe, reseeds, path, arm)
            if problem:
                yield problem
                break


def _measure_problem(
    name: str, metric: Any, recipe: Recipe, reseeds: Sequence[str], path: Path, arm: str
) -> Problem | None:
    """Return the problem of a measure in one arm."""
    stage = recipe.stages.get(name)
    if stage is None:
        message = f"{quote(name)} is not a stage of arm '{arm}'"
        return Problem((*path, "stage"), message, suggest(name, recipe.stages))
    known = headline_metric_names(stage.kind, has=settings_of(stage.model_dump()))
    if isinstance(metric, str) and metric not in known:
        message = f"{quote(metric)} is not measured by '{name}'"
        return Problem(
            (*path, "metric"), message, suggest(metric, sorted(known), listed=one_of_each_family(known))
        )
    if reseeds and name not in with_downstream(recipe, reseeds):
        message = f"no seed reaches '{name}' in arm '{arm}', so every seed would measure the same"
        return Problem((*path, "stage"), message, f"add {name}, or what it reads, to reseeds")
    return None


def _restricted_to(recipe: Recipe, measured: Iterable[str]) -> Recipe:
    """Return the recipe reduced to these stages and everything that they depend on; a sweep publishes nothing and sends
    no messages."""
    inputs, needed, found = dependencies(recipe), set[str](), list(measured)
    stand_ins = {f"{OTHER_MODEL_PREFIX}{name}": model.otherwise for name, model in recipe.models.items()}
    while found:
        step = found.pop()
        if step not in needed:
            needed.add(step)
            found += inputs.get(step, {}).values()  # a model that nothing else reads is no step
            found += [other for other in [stand_ins.get(step)] if other is not None]
    stages = {name: stage for name, stage in recipe.stages.items() if name in needed}
    rewards = {name for stage in stages.values() for name in rewards_read(stage)}
    return recipe.model_copy(
        update={
            "stages": stages,
            "models": {
                name: model
                for name, model in recipe.models.items()
                if f"{OTHER_MODEL_PREFIX}{name}" in needed
            },
            "data": {name: data for name, data in recipe.data.items() if f"data.{name}" in needed},
            "mixtures": {
                name: mixture
                for name, mixture in recipe.mixtures.items()
                if f"{MIXTURE_PREFIX}{name}" in needed
            },
            "rewards": {name: reward for name, reward in recipe.rewards.items() if name in rewards},
            "publish": (),
            "notify": None,
        }
    )


def _equal_arms(recipes: dict[str, Recipe]) -> Iterator[Problem]:
    """Yield arms with the same measured stages as another arm."""
    first: dict[str, str] = {}
    for arm, recipe in recipes.items():
        content = recipe.model_dump(mode="json")
        for name in content["stages"]:
            content["stages"][name] = stage = dumped(recipe.stages[name])
            for field in NOT_COMPARED & stage.keys():
                del stage[field]
            stage.get("algorithm", {}).pop("preset", None)  # a preset is only a name for its switches
        known = first.setdefault(canonical_json(content), arm)
        if known != arm:
            message = f"differs from '{known}' in nothing that the measured stages depend on"
            yield Problem(("arms", arm), message, "remove it, or correct its overrides")


def _reseeded(recipe: R, reseeds: Iterable[str], seed: int) -> R:
    """Return the recipe with the seed set in the named stages."""
    named = _stages_named(recipe, reseeds)
    stages = {
        name: stage.model_copy(update={"seed": _seed_in(stage, seed)}) if name in named else stage
        for name, stage in recipe.stages.items()
    }
    return recipe.model_copy(update={"stages": stages})


def _stages_named(recipe: Recipe, names: Iterable[str]) -> set[str]:
    """Return the stages of these names; the name of an ensemble is that of all its members, and of a loop that of all its rounds."""
    named = set(names)
    return {name for name, stage in recipe.stages.items() if name in named or _written_as(stage) in named}


def _written_as(stage: Stage) -> str | None:
    """Return the name by which the recipe's file writes a member or a round; None: the stage is neither."""
    place: Member | Round | None = getattr(stage, "member", None) or getattr(stage, "round", None)
    return None if place is None else place.of


def _seed_in(stage: Stage, seed: int) -> int:
    """Return the seed of a stage that a sweep reseeds: members of an ensemble by seed, and rounds of a loop, stay different."""
    in_loop: Round | None = getattr(stage, "round", None)
    if in_loop is not None:
        return round_seed(seed, in_loop.number)
    if not isinstance(stage, RewardModelling) or stage.member is None or stage.half is not None:
        return seed
    return member_seed(seed, stage.member.number)

"""A sweep: variants of one recipe (arms) over paired seeds, and the recipe of every run that follows from it.

All arms with the same seed draw the same random numbers in the stages that the seed reaches, so they are compared
seed by seed. What no seed reaches has the same key in every run and is made once.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator

from schemas import plain_yaml
from schemas.algorithm import Number
from schemas.field_errors import field_problems
from schemas.frozen import Frozen
from schemas.loading import find_recipe, load_recipe
from schemas.metrics import measured_by
from schemas.problems import Path, Problem, RecipeError, suggest
from schemas.recipe import MAX_NAMED, AnyStage, Name, PolicyEvaluation, Recipe, Seed
from schemas.references import dependencies, order, reward_of
from schemas.stage_key import NOT_IN_KEY, canonical_json

ONLY_HOW = NOT_IN_KEY - {"kind", "seed"}
"""Fields of a stage that never change what it measures."""


class Measure(Frozen):
    """A headline metric of a stage, by which arms are compared."""

    stage: Name
    metric: str
    better: Literal["higher", "lower"] = "higher"

    @property
    def name(self) -> str:
        """What its column is called."""
        return f"{self.stage}.{self.metric}"


class Published(Frozen):
    """What a paper reports of the same arms, printed beside what is measured here."""

    source: str
    """The paper and its table."""
    unit: str
    """What its numbers are."""
    values: dict[Name, Number]
    """Arm → the paper's number; an arm that the paper does not have is left out."""


class Sweep(Frozen):
    """The file of a sweep."""

    sweep: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
    """The sweep's own name."""
    recipe: str
    """A file (from the sweep's folder on), or a built-in recipe's name."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Overrides laid over every arm, after its own."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    reseeds: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Stages that take the sweep's seed; all others keep the recipe's."""
    baseline: Name
    """The arm that the others are compared with."""
    measure: Annotated[tuple[Measure, ...], Field(min_length=1)]
    """One measure, or a list."""
    arms: Annotated[dict[Name, dict[str, Any]], Field(min_length=2, max_length=MAX_NAMED)]
    """Arm → its overrides: dotted key → value."""
    published: Published | None = None

    @field_validator("measure", mode="before")
    @classmethod
    def _one_measure_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (dict, Measure)) else value


@dataclass(frozen=True)
class Cell:
    """One arm with one seed: one run."""

    arm: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.arm} · {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A sweep whose every run is known to load."""

    sweep: Sweep
    recipes: dict[str, Recipe]
    """Arm → its resolved recipe, cut down to what the measured stages need; it publishes nothing."""

    def cells(self) -> list[Cell]:
        """Every run, all arms of a seed before the next seed, so that an unfinished sweep has whole pairs."""
        return [
            Cell(arm, seed, _reseeded(recipe, self.sweep.reseeds, seed))
            for seed in self.sweep.seeds
            for arm, recipe in self.recipes.items()
        ]

    @property
    def digest(self) -> str:
        """sha256 of all that is compared: the runs, the baseline and the measures."""
        told = self.sweep.model_dump(mode="json", include={"seeds", "reseeds", "baseline", "measure"})
        told["recipes"] = {arm: recipe.model_dump(mode="json") for arm, recipe in self.recipes.items()}
        return hashlib.sha256(canonical_json(told).encode()).hexdigest()


def load_sweep(
    source: str | File,
    overrides: Sequence[str] = (),
    *,
    arms: Sequence[str] | None = None,
    seeds: Sequence[str] | None = None,
) -> Plan:
    """Load a sweep's file (or a built-in one by its bare name) and the recipe of every arm.

    Args:
        overrides: ``KEY=VALUE``, laid over every arm like the sweep's ``set``, and after it.
        arms, seeds: take these of the sweep's alone; None: all.

    Raises:
        RecipeError: with every problem that was found, each with its line, arm or override.
    """
    file = find_recipe(source)
    try:
        with file.open("rb") as stream:
            reading = plain_yaml.read(plain_yaml.decode(stream.read(plain_yaml.MAX_BYTES + 1)))
    except RecipeError as error:
        raise RecipeError(replace(problem, source=str(source)) for problem in error.problems) from None
    place = _Place(str(source), file.parent, reading)
    sweep = _validate(place)
    problems = [*_rules(sweep, overrides), *_choice_problems(sweep, arms, seeds)]
    place.refuse(problems)
    sweep = sweep.model_copy(
        update={
            "seeds": tuple(seed for seed in sweep.seeds if seeds is None or str(seed) in seeds),
            "arms": {arm: each for arm, each in sweep.arms.items() if arms is None or arm in arms},
        }
    )
    recipes = _load_arms(sweep, overrides, place)
    place.refuse(_recipe_problems(sweep, recipes, place))
    needed = {
        arm: _needed(recipe, [measure.stage for measure in sweep.measure]) for arm, recipe in recipes.items()
    }
    place.refuse(_equal_arms(needed))
    return Plan(sweep, needed)


def reached(recipe: Recipe, reseeds: Iterable[str]) -> set[str]:
    """Steps whose artifact differs from seed to seed: those that are reseeded, and all that read one of these."""
    inputs, found = dependencies(recipe), set(reseeds)
    for step in order(recipe):
        if found & set(inputs[step].values()):
            found.add(step)
    return found


# -- the file


@dataclass(frozen=True)
class _Place:
    """Where problems are found: the sweep's file and its lines."""

    source: str
    folder: File
    reading: plain_yaml.Reading

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise RecipeError where there are problems, those of the file with their lines."""
        located = [self.locate(problem) for problem in problems]
        if located:
            raise RecipeError(
                sorted(located, key=lambda problem: (problem.source != self.source, problem.line or 0))
            )

    def locate(self, problem: Problem) -> Problem:
        """The problem with the line of the sweep's file, unless it comes from somewhere else."""
        if problem.source:
            return problem
        lines, path = self.reading.lines, problem.path
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        line = next((lines[prefix] for prefix in prefixes if prefix in lines), 1)
        return replace(problem, source=self.source, line=problem.line or line)


def _validate(place: _Place) -> Sweep:
    """The sweep, where each of its fields is one by itself."""
    plain, problems = place.reading.value, list(place.reading.problems)
    if not isinstance(plain, dict):
        problems.append(Problem((), "is not a mapping", "a sweep starts with `sweep: NAME`"))
    elif "sweep" not in plain and "stages" in plain:
        problems.append(Problem((), "is a recipe, not a sweep", "use `vantage run`"))
    else:
        try:
            sweep = Sweep.model_validate(plain)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            known = [each for each in errors if each["type"] != "extra_forbidden"]
            problems += field_problems(known, plain)
            problems += (_unknown_field(each["loc"]) for each in errors if each["type"] == "extra_forbidden")
    place.refuse(problems)
    return sweep


def _unknown_field(location: Path) -> Problem:
    models: dict[str | int, type[Frozen]] = {"measure": Measure, "published": Published}
    known = models.get(location[0], Sweep).model_fields
    path: Path = location if len(location) < 3 else (location[0], location[-1])
    return Problem(path, f"there is no field '{location[-1]}' here", suggest(str(location[-1]), known))


def _rules(sweep: Sweep, overrides: Sequence[str]) -> Iterator[Problem]:
    """What only the whole sweep can say of itself, before any recipe is loaded."""
    for field in ("seeds", "reseeds"):
        values = getattr(sweep, field)
        for i, value in enumerate(values):
            if value in values[:i]:
                yield Problem((field, i), f"{value} stands twice", "keep one of the two")
    if sweep.baseline not in sweep.arms:
        yield Problem(("baseline",), f"'{sweep.baseline}' is not an arm", suggest(sweep.baseline, sweep.arms))
    for arm in sweep.published.values if sweep.published else ():
        if arm not in sweep.arms:
            yield Problem(("published", "values", arm), f"'{arm}' is not an arm", suggest(arm, sweep.arms))
    common = [*((key, f"set.{key}") for key in sweep.set)]
    common += [(text.partition("=")[0].strip(), f"--set {text}") for text in overrides]
    for arm, own in sweep.arms.items():
        for key, value in own.items():
            for over, said in common:
                if _decides(key, value, over):
                    message = f"is laid over by {said}, so this arm would be without it"
                    yield Problem(("arms", arm, key), message, "remove one of the two")
    written: list[tuple[Path, str, Any]] = [(("set", key), key, value) for key, value in sweep.set.items()]
    written += [
        (("arms", arm, key), key, each) for arm, own in sweep.arms.items() for key, each in own.items()
    ]
    for path, key, value in written:
        for stage in sweep.reseeds:
            if _decides(key, value, f"stages.{stage}.seed"):
                remedy = f"remove it, or take {stage} out of reseeds"
                yield Problem(path, f"the seed of '{stage}' is the sweep's", remedy)


def _decides(key: str, value: Any, field: str) -> bool:
    """Whether an override decides a field, or something inside it."""
    own, parts = key.split("."), field.split(".")
    if own[: len(parts)] == parts:
        return True
    if parts[: len(own)] != own:
        return False
    for part in parts[len(own) :]:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _choice_problems(
    sweep: Sweep, arms: Sequence[str] | None, seeds: Sequence[str] | None
) -> Iterator[Problem]:
    """What is wrong with the choice of a few arms or seeds."""
    for option, chosen, known in (
        ("--arms", arms, list(sweep.arms)),
        ("--seeds", seeds, [str(seed) for seed in sweep.seeds]),
    ):
        for word in chosen or ():
            if word not in known:
                message = f"'{word}' is not among the sweep's"
                yield Problem((), message, f"use some of: {', '.join(known)}", source=option)
    if arms is not None and sweep.baseline in sweep.arms and sweep.baseline not in arms:
        message = f"the baseline '{sweep.baseline}' is missing, and there is nothing to compare with"
        yield Problem((), message, f"add {sweep.baseline}", source="--arms")


# -- the recipes


def _load_arms(sweep: Sweep, overrides: Sequence[str], place: _Place) -> dict[str, Recipe]:
    """Arm → its recipe; RecipeError with the problems of the recipe itself, or else with those of all arms."""
    beside = place.folder / sweep.recipe
    recipe = str(beside) if beside.is_file() or beside.suffix in (".yaml", ".yml") else sweep.recipe
    common = {_as_override(key, value, place.folder): ("set", key) for key, value in sweep.set.items()}
    _load(recipe, {**common, **dict.fromkeys(overrides, ())}, place)
    recipes: dict[str, Recipe] = {}
    problems: list[Problem] = []
    for arm, own in sweep.arms.items():
        texts = {_as_override(key, value, place.folder): ("arms", arm, key) for key, value in own.items()}
        try:
            recipes[arm] = _load(recipe, {**texts, **common, **dict.fromkeys(overrides, ())}, place, arm)
        except RecipeError as error:
            problems += error.problems
    place.refuse(problems)
    return recipes


def _load(recipe: str, texts: dict[str, Path], place: _Place, arm: str | None = None) -> Recipe:
    """The recipe with overrides (text → where the sweep's file has it); problems are placed in that file."""
    try:
        return load_recipe(recipe, list(texts))
    except RecipeError as error:
        problems = error.problems
    paths = {f"--set {text}": path for text, path in texts.items() if path}
    told = []
    for problem in problems:
        path = paths.get(problem.source) or (("arms", arm) if arm and problem.source == recipe else ())
        if path:  # the field that the message is about need not be the one that was overridden
            said = problem.field if problem.field and problem.field != path[-1] else ""
            message = ": ".join(filter(None, [said, problem.message]))
            problem = Problem(path, message, problem.remedy)
        elif not problem.source:
            problem = replace(problem, source=recipe)
        told.append(place.locate(problem))
    raise RecipeError(told)


def _as_override(key: str, value: Any, folder: File) -> str:
    """``KEY=VALUE``; a path to a source starts at the sweep's folder."""
    if key.endswith(".source") and isinstance(value, str) and (folder / value).exists():
        value = str((folder / value).resolve())
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _recipe_problems(sweep: Sweep, recipes: dict[str, Recipe], place: _Place) -> Iterator[Problem]:
    """Whether the sweep's stages and metrics are those of the recipes."""
    for i, stage in enumerate(sweep.reseeds):
        if not any(stage in recipe.stages for recipe in recipes.values()):
            known = recipes[sweep.baseline].stages
            yield Problem(("reseeds", i), f"'{stage}' is not a stage of the recipe", suggest(stage, known))
    is_list = isinstance(place.reading.value["measure"], list)
    for i, measure in enumerate(sweep.measure):
        path: Path = ("measure", i) if is_list else ("measure",)
        said = (
            _measure_problem(measure, recipe, sweep.reseeds, path, arm) for arm, recipe in recipes.items()
        )
        yield from list(filter(None, said))[:1]


def _measure_problem(
    measure: Measure, recipe: Recipe, reseeds: Sequence[str], path: Path, arm: str
) -> Problem | None:
    """What is wrong with a measure in one arm."""
    stage = recipe.stages.get(measure.stage)
    if stage is None:
        remedy = suggest(measure.stage, recipe.stages)
        return Problem((*path, "stage"), f"'{measure.stage}' is not a stage of arm '{arm}'", remedy)
    known = measured_by(stage.kind, judge=_judge_of(stage))
    if measure.metric not in known:
        message = f"'{measure.metric}' is not measured by '{measure.stage}'"
        return Problem((*path, "metric"), message, suggest(measure.metric, sorted(known)))
    if measure.stage not in reached(recipe, reseeds):
        message = f"no seed reaches '{measure.stage}' in arm '{arm}', so every seed would measure the same"
        return Problem((*path, "stage"), message, f"add {measure.stage}, or what it reads, to reseeds")
    return None


def _judge_of(stage: AnyStage) -> str | None:
    if not isinstance(stage, PolicyEvaluation):
        return None
    return "verifier" if stage.judge.verifier else "reward"


def _needed(recipe: Recipe, measured: Iterable[str]) -> Recipe:
    """The recipe without what none of these stages depends on; a sweep publishes nothing."""
    inputs, needed = dependencies(recipe), set(measured)
    for step in reversed(order(recipe)):
        if step in needed:
            needed.update(inputs[step].values())
    stages = {name: stage for name, stage in recipe.stages.items() if name in needed}
    rewards = {reward_of(stage) for stage in stages.values()}
    return recipe.model_copy(
        update={
            "stages": stages,
            "data": {name: data for name, data in recipe.data.items() if f"data.{name}" in needed},
            "rewards": {name: reward for name, reward in recipe.rewards.items() if name in rewards},
            "publish": (),
        }
    )


def _equal_arms(recipes: dict[str, Recipe]) -> Iterator[Problem]:
    """Arms that would measure what another arm measures."""
    first: dict[str, str] = {}
    for arm, recipe in recipes.items():
        content = recipe.model_dump(mode="json")
        for stage in content["stages"].values():
            for field in ONLY_HOW & stage.keys():
                del stage[field]
            stage.get("algorithm", {}).pop("preset", None)  # a preset is only a name for its switches
        known = first.setdefault(canonical_json(content), arm)
        if known != arm:
            message = f"differs from '{known}' in nothing that the measured stages depend on"
            yield Problem(("arms", arm), message, "remove it, or correct its overrides")


def _reseeded(recipe: Recipe, reseeds: Iterable[str], seed: int) -> Recipe:
    """The recipe with the seed in the named stages that it has."""
    stages = {
        name: stage.model_copy(update={"seed": seed}) if name in reseeds else stage
        for name, stage in recipe.stages.items()
    }
    return recipe.model_copy(update={"stages": stages})

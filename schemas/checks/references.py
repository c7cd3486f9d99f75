"""Resolve the names in a recipe: each is looked up once, and must refer to something of the right kind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from vantage.schemas.checks.partial_recipe import PartialPublication, PartialRecipe, PartialStage
from vantage.schemas.kind import PUBLISHED, Kind
from vantage.schemas.kinds import kinds_collecting, kinds_making
from vantage.schemas.problems import Path, Problem, quote, suggest
from vantage.schemas.recipe.inputs import MODEL, Content
from vantage.schemas.steps import BUILTIN_VERIFIERS, WATCH_PROMPTS, WATCHED_AT

_COLLECTORS: Mapping[str, tuple[str, ...]] = {
    content: kinds_collecting(content) for content in get_args(Content)
}
"""Content → kinds of stage that collect a dataset of it."""


@dataclass(frozen=True)
class UnknownName:
    """A name that does not exist in the recipe."""

    path: Path
    none: str
    """Beginning of the message: ``no stage``."""
    name: str
    known: Sequence[str]
    """Names that would be valid."""
    otherwise: str = ""
    """The remedy if no valid name is similar, or none exists."""

    def problem(self) -> Problem:
        """Return the problem, with a similar name as its remedy. The search for one takes time."""
        remedy = suggest(self.name, self.known) or self.otherwise
        return Problem(self.path, f"{self.none} is called {quote(self.name)}", remedy)


Wrong = Problem | UnknownName


@dataclass(frozen=True)
class Reference:
    """A field that names something."""

    path: Path
    name: str
    wrong: Wrong | None = None
    """The problem of the name; None: it is valid."""
    collects: bool = False
    """Whether it names a stage whose artifact is read as a dataset."""

    @property
    def field(self) -> str:
        """The last part of its path."""
        return str(self.path[-1])


References = tuple[Reference, ...]


@dataclass(frozen=True, kw_only=True)
class RecipeReferences:
    """All references of a recipe, by the part with the field: a stage, a model, a reward, a mixture or a dataset."""

    models: Mapping[str, References]
    """Stage → its fields that name a stage, the recipe's model, or another model."""
    stand_ins: Mapping[str, References]
    """Other model → the stage that replaces it."""
    judging_models: Mapping[str, References]
    """Stage → models that judge in it."""
    rewards: Mapping[str, References]
    """Stage → rewards that it reads."""
    reward_models: Mapping[str, References]
    """Reward → stages and other models whose scores are its terms."""
    scoring_judges: Mapping[str, References]
    """Reward → policies that judge responses as its terms."""
    parts: Mapping[str, References]
    """Mixture → datasets."""
    data: Mapping[str, References]
    """Stage → datasets, mixtures, or stages that collect a dataset."""
    held_out: Mapping[str, References]
    """Dataset → other datasets whose held-out prompts it leaves out."""
    scoring_verifiers: Mapping[str, References]
    """Reward → verifiers that are its terms."""
    stage_verifiers: Mapping[str, References]
    """Stage → verifiers in its own fields."""
    benchmarks: Mapping[str, References]
    """Stage → benchmarks."""
    publications: Sequence[References]
    """References of each item of ``publish``: the published stage, and the one whose gate has to pass."""
    licenses: References
    """Steps for which a licence is given."""


def resolved_references(recipe: PartialRecipe) -> RecipeReferences:
    """Look up every name in a recipe."""
    names = _Names(recipe)
    stages = recipe.stages.items()
    kinds = [(name, stage, stage.kind) for name, stage in stages if stage.kind is not None]
    return RecipeReferences(
        models={name: tuple(names.models(name, stage, kind)) for name, stage, kind in kinds},
        stand_ins={
            name: (names.stage(("models", name, "otherwise"), otherwise, kinds_making(("policy",))),)
            for name, otherwise in recipe.models.items()
            if otherwise is not None
        },
        judging_models={name: tuple(names.judging_models(name, stage, kind)) for name, stage, kind in kinds},
        rewards={name: tuple(names.rewards(name, stage, kind)) for name, stage, kind in kinds},
        reward_models={
            name: tuple(
                names.reward_model((*term.path, field), target)
                for term in terms
                for field, target in term.reward_models.items()
            )
            for name, terms in recipe.rewards.items()
        },
        scoring_judges={
            name: tuple(
                names.scoring_judge((*term.path, "judge", "model"), term.judging_model)
                for term in terms
                if term.judging_model is not None
            )
            for name, terms in recipe.rewards.items()
        },
        parts={
            name: tuple(names.part(name, part) for part in parts) for name, parts in recipe.mixtures.items()
        },
        data={name: tuple(names.data(name, stage, kind)) for name, stage, kind in kinds},
        held_out={
            name: tuple(names.held_out(name, path, other) for path, other in data.held_out_of)
            for name, data in recipe.data.items()
        },
        scoring_verifiers={
            name: tuple(
                names.verifier((*term.path, field), verifier)
                for term in terms
                for field, verifier in term.verifiers.items()
            )
            for name, terms in recipe.rewards.items()
        },
        stage_verifiers={name: tuple(names.stage_verifiers(name, stage)) for name, stage in stages},
        benchmarks={name: tuple(names.benchmarks(name, stage, kind)) for name, stage, kind in kinds},
        publications=tuple(tuple(names.publication(i, each)) for i, each in enumerate(recipe.publish)),
        licenses=tuple(names.licensed(step) for step in recipe.licenses),
    )


class _Names:
    """The names of a recipe, with the kind of each."""

    def __init__(self, recipe: PartialRecipe) -> None:
        self._recipe = recipe
        self._kinds = {
            name: stage.kind.name for name, stage in recipe.stages.items() if stage.kind is not None
        }
        self._gated = [name for name, stage in recipe.stages.items() if stage.has_gate]
        self._verifiers = (*recipe.verifiers, *BUILTIN_VERIFIERS)
        sourced = {"models": recipe.models, "data": recipe.data}
        steps = [f"{section}.{name}" for section, named in sourced.items() for name in named]
        self._steps = (MODEL, *steps, *recipe.stages)
        self._members: dict[str, list[str]] = {}
        for name, stage in recipe.stages.items():
            if stage.member_of is not None and stage.member_of not in recipe.stages:
                self._members.setdefault(stage.member_of, []).append(name)

    def models(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to models in the stage's own fields."""
        for field, artifacts in kind.reads.items():
            target, path = stage.texts.get(field), ("stages", name, field)
            if target is None:
                continue
            if field in kind.other_models and target in self._recipe.models:
                yield Reference(path, target)
            else:
                yield self.stage(path, target, kinds_making(artifacts))

    def judging_models(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to models that judge in the stage: policies, or other models."""
        for field, judge in stage.judges.items():
            path = (*judge.path, "model")
            if judge.model is not None and field in kind.work.model_fields:
                yield self._policy(path, judge.model)

    def scoring_judge(self, path: Path, target: str) -> Reference:
        """Look up a policy that judges responses as a term of a reward."""
        found = self._policy(path, target)
        if not isinstance(found.wrong, UnknownName):
            return found
        none = f"the judge has no url, so its model is one of the run, and {found.wrong.none}"
        return replace(found, wrong=replace(found.wrong, none=none))

    def _policy(self, path: Path, target: str) -> Reference:
        """Look up a policy: a stage that makes one, the recipe's model, or another model."""
        if target in self._recipe.models:
            return Reference(path, target)
        return self.stage(path, target, kinds_making(("policy",)))

    def reward_model(self, path: Path, target: str) -> Reference:
        """Look up a reward model: a stage that trains one, or another model."""
        if target in self._recipe.models:
            return Reference(path, target)
        return self.stage(path, target, kinds_making(("reward_model",)))

    def rewards(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to rewards, if the kind of stage has such a field."""
        named: dict[Path, str | None] = {("stages", name, "reward"): stage.texts.get("reward")}
        named |= {(*judge.path, "reward"): judge.reward for judge in stage.judges.values()}
        for path, reward in named.items():
            if reward is not None and path[2] in kind.work.model_fields:
                remedy = "define it under rewards"
                yield self._among(path, "no reward", reward, tuple(self._recipe.rewards), remedy)

    def benchmarks(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to benchmarks."""
        for field in kind.benchmarks:
            path, target, remedy = (
                ("stages", name, field),
                stage.texts.get(field),
                "define it under benchmarks",
            )
            if target is not None:
                yield self._among(path, "no benchmark", target, self._recipe.benchmarks, remedy)

    def data(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to datasets, mixtures, and stages that collect a dataset."""
        for field, content in kind.data.items():
            at = WATCHED_AT if field == WATCH_PROMPTS else (field,)
            path, target, collectors = ("stages", name, *at), stage.texts.get(field), _COLLECTORS[content]
            if target is None:
                continue
            if target in self._recipe.datasets:
                yield Reference(path, target)
            elif self._is_collected(target, content):
                yield replace(self.stage(path, target, collectors), collects=True)
            else:
                collecting = (name for name, kind in self._kinds.items() if kind in collectors)
                known = (*self._recipe.datasets, *collecting)
                wrong = UnknownName(path, "no dataset", target, known, "define it under data")
                yield Reference(path, target, wrong)

    def _is_collected(self, target: str, content: Content) -> bool:
        """Return whether a name is to be looked up as a stage that makes data of the content."""
        if target not in self._recipe.stages:
            return False
        # a stage in the place of a dataset of prompts is a mistake, unless it selects prompts
        return content == "preferences" or self._kinds.get(target) in _COLLECTORS[content]

    def stage_verifiers(self, name: str, stage: PartialStage) -> Iterator[Reference]:
        """Yield the references to verifiers in the stage's own fields, whatever its kind."""
        named: dict[Path, str | None] = {
            (*judge.path, "verifier"): judge.verifier for judge in stage.judges.values()
        }
        named["stages", name, "algorithm", "positive_verifier"] = stage.positive_verifier
        for path, verifier in named.items():
            if verifier is not None:
                yield self.verifier(path, verifier)

    def publication(self, i: int, publication: PartialPublication) -> Iterator[Reference]:
        """Yield the references to the published stage, and to the one whose gate has to pass."""
        published = tuple(name for name in kinds_making(PUBLISHED) if name != MODEL)
        if publication.stage is not None:
            yield self.stage(("publish", i, "stage"), publication.stage, published)
        if publication.after is not None:
            yield self._gated_stage(("publish", i, "after"), publication.after)

    def _gated_stage(self, path: Path, target: str) -> Reference:
        gated = self._gated
        remedy = f"use one of: {', '.join(gated)}" if gated else "give a stage a gate"
        wrong: Wrong | None = None
        if target in self._members:
            wrong = self._several(path, target)
        elif target not in self._recipe.stages:
            wrong = UnknownName(path, "no stage", target, gated, remedy)
        elif target not in gated:
            wrong = Problem(path, f"'{target}' has no gate that could pass", remedy)
        return Reference(path, target, wrong)

    def stage(self, path: Path, target: str, allowed: tuple[str, ...]) -> Reference:
        """Look up a stage (or the model) that must be of an allowed kind."""
        itself, kind = path[1] if path[0] == "stages" else None, self._kinds.get(target)
        is_fitting_stage = target in self._recipe.stages and (kind is None or kind in allowed)
        if MODEL in allowed if target == MODEL else is_fitting_stage and target != itself:
            return Reference(path, target)
        fitting = [name for name, kind in self._kinds.items() if kind in allowed and name != itself]
        fitting += [MODEL] if MODEL in allowed else []
        remedy = f"use one of: {', '.join(fitting)}" if fitting else f"add a {_kinds_text(allowed)}"
        field = str(path[-1])
        rule = f"{field} names a" if field.endswith("s") else f"{_article(field)} {field} is a"
        rule = f"{rule} {_kinds_text(allowed)}"
        wrong: Wrong
        if target == MODEL:
            wrong = Problem(path, f"'{MODEL}' is the recipe's model; {rule}", remedy)
        elif target == itself:
            wrong = Problem(path, f"'{target}' is this stage itself", remedy)
        elif target in self._recipe.stages:
            wrong = Problem(path, f"'{target}' is {with_article(self._kinds[target])}; {rule}", remedy)
        elif target in self._recipe.models:
            message = f"'{target}' is another model, which stages sample from and compare with; {rule}"
            wrong = Problem(path, message, remedy)
        elif target in self._members:
            wrong = self._several(path, target)
        else:
            wrong = UnknownName(path, "no stage", target, fitting, remedy)
        return Reference(path, target, wrong)

    def _several(self, path: Path, target: str) -> Problem:
        """Return the problem of a field that names an ensemble where one model is needed."""
        members = self._members[target]
        remedy = f"name one of them: {', '.join(members)}"
        if path[0] == "rewards":
            remedy = f"add ensemble: {{combine: mean}} to the reward, or {remedy}"
        return Problem(path, f"'{target}' has {len(members)} members, and one stage is needed here", remedy)

    def part(self, mixture: str, part: str) -> Reference:
        """Look up a part of a mixture: a dataset with a source."""
        path, data = ("mixtures", mixture, "parts", part), self._recipe.data
        wrong: Wrong | None = None
        if part in data:
            pass
        elif part in self._recipe.mixtures:
            message = f"'{part}' is this mixture itself" if part == mixture else f"'{part}' is a mixture too"
            wrong = Problem(path, message, "name datasets here, each with its weight")
        elif part in self._recipe.stages:
            message = f"'{part}' is a stage; a part of a mixture is a dataset under data"
            wrong = Problem(path, message, "name a dataset")
        else:
            wrong = UnknownName(path, "no dataset", part, tuple(data), "define it under data")
        return Reference(path, part, wrong)

    def held_out(self, name: str, path: Path, other: str) -> Reference:
        """Look up a dataset whose held-out prompts the dataset ``name`` leaves out."""
        wrong: Wrong | None = None
        if other == name:
            remedy = "its own held-out prompts count anyway; leave it out"
            wrong = Problem(path, f"{quote(name)} is the dataset itself", remedy)
        elif other in self._recipe.mixtures:
            wrong = Problem(path, f"{quote(other)} is a mixture", "name its parts")
        elif other not in self._recipe.data:
            wrong = UnknownName(path, "no dataset", other, tuple(self._recipe.data), "define it under data")
        return Reference(path, other, wrong)

    def verifier(self, path: Path, name: str) -> Reference:
        """Look up a verifier: one of the recipe's, or a built-in one."""
        return self._among(path, "no verifier", name, self._verifiers)

    def licensed(self, step: str) -> Reference:
        """Look up a step whose licence is given."""
        if step in self._members:
            path = ("licenses", step)
            return Reference(path, step, self._several(path, step))
        return self._among(("licenses", step), "nothing here", step, self._steps)

    def _among(
        self, path: Path, none: str, name: str, known: Sequence[str], otherwise: str = ""
    ) -> Reference:
        wrong = None if name in known else UnknownName(path, none, name, known, otherwise)
        return Reference(path, name, wrong)


def with_article(kind: str) -> str:
    """Return ``an sft stage``, ``a reward_model stage`` …"""
    return f"{_article(kind)} {kind} stage"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" or word == "sft" else "a"


def _kinds_text(kinds: tuple[str, ...]) -> str:
    stages = f"{' or '.join(kind for kind in kinds if kind != MODEL)} stage"
    return f"{stages}, or the recipe's model" if MODEL in kinds else stages

"""Who refers to what: every name in a recipe must mean something of the right kind, and no stage itself.

``reference_problems`` reads the plain mapping, so that it finds what is wrong even where other fields are refused;
everything else reads a ``Recipe``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from schemas.metrics import measured_by
from schemas.problems import Path, Problem, quote, suggest
from schemas.recipe import MODEL, AnyStage, PolicyOptimization, Recipe, Reward, ValuePretraining

Content = Literal["demonstrations", "preferences", "prompts"]

VERIFIERS = ("arithmetic",)
"""Rules that say whether a response is right."""

_POLICY = (MODEL, "sft", "policy_optimization")

STAGE_FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "sft": {"init": _POLICY},
    "reward_model": {"init": _POLICY},
    "value_pretraining": {"policy": _POLICY, "init": ("reward_model", *_POLICY), "reference": _POLICY},
    "policy_optimization": {"init": _POLICY, "reference": _POLICY, "critic": ("value_pretraining", "reward_model")},
    "evaluation": {"candidate": _POLICY, "baseline": _POLICY},
}
"""Kind of stage → field → kinds of stage that it may name (``model``: the recipe's model)."""

DATA_FIELDS: dict[str, dict[str, Content]] = {
    "sft": {"data": "demonstrations"},
    "reward_model": {"data": "preferences", "centre_on": "demonstrations"},
    "value_pretraining": {"prompts": "prompts"},
    "policy_optimization": {"prompts": "prompts"},
    "evaluation": {"prompts": "prompts"},
}
"""Kind of stage → field that names a dataset → what it reads there."""

_PUBLISHED = ("policy_optimization", "sft", "reward_model")

_Reader = tuple[Path, Content]


# -- the plain mapping ---------------------------------------------------------------------------------------------


def reference_problems(plain: Any) -> list[Problem]:
    """Everything that is wrong with the names in a recipe, however little of it is valid otherwise."""
    recipe = _Plain(plain)
    return [
        *_reserved_names(recipe),
        *_stage_references(recipe),
        *_reward_references(recipe),
        *_data_references(recipe),
        *_verifiers(recipe),
        *_gates(recipe),
        *_publications(recipe),
        *_cycles(recipe),
    ]


class _Plain:
    """The parts of a plain recipe that names live in; what has another shape is left out (pydantic refuses it)."""

    def __init__(self, plain: Any) -> None:
        recipe = plain if isinstance(plain, Mapping) else {}
        self.data = _mapping(recipe.get("data"))
        self.rewards = _mapping(recipe.get("rewards"))
        self.stages = {name: stage for name, stage in _mapping(recipe.get("stages")).items() if _mapping(stage)}
        self.publish = recipe.get("publish") if isinstance(recipe.get("publish"), list | tuple) else ()
        self.kinds = {name: str(stage.get("kind")) for name, stage in self.stages.items()}

    def terms(self, reward: str) -> list[tuple[int, Mapping[str, Any]]]:
        terms = _mapping(self.rewards.get(reward)).get("terms")
        return [(i, _mapping(term)) for i, term in enumerate(terms)] if isinstance(terms, list | tuple) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _a(kind: str) -> str:
    return "the recipe's model" if kind == MODEL else f"{'an' if kind[0] in 'aeiou' or kind == 'sft' else 'a'} {kind} stage"


def _any_of(kinds: tuple[str, ...]) -> str:
    stages = [kind for kind in kinds if kind != MODEL]
    text = f"{' or '.join(stages)} stage"
    return f"{text}, or the recipe's model" if MODEL in kinds else text


def _reserved_names(recipe: _Plain) -> Iterator[Problem]:
    if MODEL in recipe.stages:
        yield Problem(("stages", MODEL), f"'{MODEL}' always means the recipe's model", "give the stage another name")


def _stage_references(recipe: _Plain) -> Iterator[Problem]:
    for name, stage in recipe.stages.items():
        for field, kinds in STAGE_FIELDS.get(recipe.kinds[name], {}).items():
            if isinstance(stage.get(field), str):
                yield from _names_stage(recipe, ("stages", name, field), stage[field], kinds)


def _names_stage(recipe: _Plain, path: Path, target: str, kinds: tuple[str, ...]) -> Iterator[Problem]:
    fitting = [name for name, kind in recipe.kinds.items() if kind in kinds and name != path[1]]
    fitting += [MODEL] if MODEL in kinds else []
    use = f"use one of: {', '.join(fitting)}" if fitting else f"the recipe has no {_any_of(kinds)} yet; add one"
    role = f"{path[-1]} is a {_any_of(kinds)}"
    if target == MODEL:
        if MODEL not in kinds:
            yield Problem(path, f"'{MODEL}' is the recipe's model; a {role}", use)
    elif path[0] == "stages" and target == path[1]:
        yield Problem(path, f"'{target}' is this stage itself", use)
    elif target not in recipe.stages:
        yield Problem(path, f"no stage is called {quote(target)}", suggest(target, fitting) or use)
    elif recipe.kinds[target] not in kinds and recipe.kinds[target] in STAGE_FIELDS:
        yield Problem(path, f"'{target}' is {_a(recipe.kinds[target])}; a {role}", use)


def _reward_references(recipe: _Plain) -> Iterator[Problem]:
    for name, stage in recipe.stages.items():
        for path, reward in _reads_rewards(name, stage):
            if isinstance(reward, str) and reward not in recipe.rewards:
                remedy = suggest(reward, recipe.rewards) or "define it under rewards"
                yield Problem(path, f"no reward is called {quote(reward)}", remedy)
    for reward in recipe.rewards:
        for i, term in recipe.terms(reward):
            if isinstance(term.get("model"), str):
                yield from _names_stage(recipe, ("rewards", reward, "terms", i, "model"), term["model"], ("reward_model",))


def _reads_rewards(name: str, stage: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Where a stage names a reward, and what it names."""
    if stage.get("kind") in ("value_pretraining", "policy_optimization"):
        yield ("stages", name, "reward"), stage.get("reward")
    if stage.get("kind") == "evaluation":
        yield ("stages", name, "judge", "reward"), _mapping(stage.get("judge")).get("reward")


def _data_references(recipe: _Plain) -> Iterator[Problem]:
    readers: dict[str, list[_Reader]] = {}
    for name, stage in recipe.stages.items():
        for field, content in DATA_FIELDS.get(recipe.kinds[name], {}).items():
            target, path = stage.get(field), ("stages", name, field)
            if isinstance(target, str):
                readers.setdefault(target, []).append((path, content))
                if target not in recipe.data:
                    remedy = suggest(target, recipe.data) or "define it under data"
                    yield Problem(path, f"no dataset is called {quote(target)}", remedy)
    for target, readings in readers.items():
        if target in recipe.data:
            yield from _content_problems(readings, str(_mapping(recipe.data[target]).get("source")))


def _content_problems(readings: list[_Reader], source: str) -> Iterator[Problem]:
    path, content = _richest(readings)
    for other_path, other in readings:
        if other != content and not (other == "prompts" and content == "demonstrations"):
            there = ".".join(map(str, path))
            message = f"is read here as {other}, but as {content} by {there}"
            yield Problem(other_path, message, "name the source a second time as another dataset")
    builtin = source.startswith("builtin:") and source.partition("/")[2]
    if builtin in ("demonstrations", "preferences", "prompts") and content not in (builtin, "prompts"):
        yield Problem(path, f"reads {content}, but {source} holds {builtin}", "name another dataset here")


def _richest(readings: list[_Reader]) -> _Reader:
    """The reading that decides what a dataset holds: whatever has more than prompts."""
    return next((reading for reading in readings if reading[1] != "prompts"), readings[0])


def _verifiers(recipe: _Plain) -> Iterator[Problem]:
    named: list[tuple[Path, Any]] = []
    for name, stage in recipe.stages.items():
        named.append((("stages", name, "judge", "verifier"), _mapping(stage.get("judge")).get("verifier")))
        switches = ("stages", name, "algorithm", "positive_verifier")
        named.append((switches, _mapping(stage.get("algorithm")).get("positive_verifier")))
    for reward in recipe.rewards:
        named += [(("rewards", reward, "terms", i, "verifier"), t.get("verifier")) for i, t in recipe.terms(reward)]
    for path, verifier in named:
        if isinstance(verifier, str) and verifier not in VERIFIERS:
            yield Problem(path, f"no verifier is called {quote(verifier)}", suggest(verifier, VERIFIERS))


def _gates(recipe: _Plain) -> Iterator[Problem]:
    for name, stage in recipe.stages.items():
        kind, gates = recipe.kinds[name], stage.get("gate")
        if kind not in STAGE_FIELDS:
            continue
        judge = next(iter(_mapping(stage.get("judge"))), None) if kind == "evaluation" else None
        measured = sorted(measured_by(kind, judge=judge if judge in ("verifier", "reward") else None))
        for i, gate in enumerate(_items(gates)):
            path: Path = ("stages", name, "gate", i) if isinstance(gates, list | tuple) else ("stages", name, "gate")
            metric = _mapping(gate).get("metric")
            if isinstance(metric, str) and metric not in measured:
                by = f"{_a(kind)} with a {judge} as judge" if judge else _a(kind)
                yield Problem((*path, "metric"), f"{by} does not measure {quote(metric)}", suggest(metric, measured))


def _publications(recipe: _Plain) -> Iterator[Problem]:
    aliases: dict[tuple[Any, Any], int] = {}
    for i, publication in enumerate(recipe.publish):
        stage, after = _mapping(publication).get("stage"), _mapping(publication).get("after")
        if isinstance(stage, str):
            yield from _names_stage(recipe, ("publish", i, "stage"), stage, _PUBLISHED)
        if isinstance(after, str):
            gated = [name for name, each in recipe.stages.items() if each.get("gate")]
            use = f"use one of: {', '.join(gated)}" if gated else "give that stage a gate"
            if after not in recipe.stages:
                yield Problem(("publish", i, "after"), f"no stage is called {quote(after)}", suggest(after, gated) or use)
            elif after not in gated:
                yield Problem(("publish", i, "after"), f"'{after}' has no gate that could pass", use)
        place = (_mapping(publication).get("registered_model"), _mapping(publication).get("alias"))
        if None not in place and place in aliases:
            message = f"publish.{aliases[place]} moves the alias {quote(place[1])} of {quote(place[0])} too"
            yield Problem(("publish", i, "alias"), message, "an alias points at one model; name another")
        aliases.setdefault(place, i)


def _cycles(recipe: _Plain) -> Iterator[Problem]:
    """One problem for each ring of stages that wait for one another, named in full."""
    edges = {name: _edges(recipe, name) for name in recipe.stages}
    done: set[str] = set()

    def visit(name: str, trail: list[tuple[str, Path]]) -> Iterator[Problem]:
        names = [each for each, _ in trail]
        if name in names:
            ring = trail[names.index(name) :]
            told = ", ".join(
                f"{stage} reads {ring[(i + 1) % len(ring)][0]} ({'.'.join(map(str, path))})"
                for i, (stage, path) in enumerate(ring)
            )
            if len(ring) > 1:  # a stage that names itself was refused by its field, unless through a reward
                yield Problem(ring[0][1], f"stages wait for one another: {told}", "name an earlier stage in one of them")
            elif ring[0][1][0] == "rewards":
                yield Problem(ring[0][1], f"a stage waits for itself: {told}", "name an earlier stage")
            return
        if name in done:
            return
        for path, target in edges[name]:
            yield from visit(target, [*trail, (name, path)])
        done.add(name)

    for name in recipe.stages:
        yield from visit(name, [])


def _edges(recipe: _Plain, name: str) -> list[tuple[Path, str]]:
    """Which stages a stage waits for, and the field that says so."""
    stage = recipe.stages[name]
    fields = STAGE_FIELDS.get(recipe.kinds[name], {})
    named: list[tuple[Path, Any]] = [(("stages", name, field), stage.get(field)) for field in fields]
    for _, reward in _reads_rewards(name, stage):
        if isinstance(reward, str):
            named += [(("rewards", reward, "terms", i, "model"), t.get("model")) for i, t in recipe.terms(reward)]
    return [(path, target) for path, target in named if isinstance(target, str) and target in recipe.stages]


# -- a recipe whose names are right --------------------------------------------------------------------------------


def stage_reference(stage: ValuePretraining | PolicyOptimization) -> str:
    """What the stage measures KL against: its ``reference``, or where its responses come from."""
    if stage.reference is not None:
        return stage.reference
    return stage.policy if isinstance(stage, ValuePretraining) else stage.init


def dependencies(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Step → role → step whose artifact it reads; what is published is no dependency.

    Steps are the recipe's stages and the implicit ``model`` and ``data.NAME`` that they read. Roles are the
    fields' names; term i of reward r that is a model has the role ``reward.r.i``.
    """
    stages = {name: _inputs(recipe, stage) for name, stage in recipe.stages.items()}
    read = {step for inputs in stages.values() for step in inputs.values()}
    implicit = [step for step in (MODEL, *(f"data.{name}" for name in recipe.data)) if step in read]
    return {**{step: {} for step in implicit}, **stages}


def _inputs(recipe: Recipe, stage: AnyStage) -> dict[str, str]:
    inputs: dict[str, str] = {}
    for field in STAGE_FIELDS[stage.kind]:
        inputs[field] = getattr(stage, field)
    if isinstance(stage, ValuePretraining | PolicyOptimization):
        inputs["reference"] = stage_reference(stage)
    for field in DATA_FIELDS[stage.kind]:
        if getattr(stage, field) is not None:
            inputs[field] = f"data.{getattr(stage, field)}"
    reward = reward_of(stage)
    if reward is not None:
        for i, term in enumerate(recipe.rewards[reward].terms):
            if term.model is not None:
                inputs[f"reward.{reward}.{i}"] = term.model
    return inputs


def reward_of(stage: AnyStage) -> str | None:
    """The name of the reward that a stage scores responses with, if it does."""
    if isinstance(stage, ValuePretraining | PolicyOptimization):
        return stage.reward
    return stage.judge.reward if stage.kind == "evaluation" else None


def order(recipe: Recipe) -> list[str]:
    """Every step after all that it reads; otherwise as the recipe lists them, ``model`` and data first.

    Raises:
        ValueError: stages wait for one another (a recipe that was loaded has no such ring).
    """
    waiting = {step: set(inputs.values()) for step, inputs in dependencies(recipe).items()}
    ordered: list[str] = []
    while waiting:
        ready = next((step for step, inputs in waiting.items() if not inputs), None)
        if ready is None:
            raise ValueError(f"stages wait for one another: {', '.join(waiting)}")
        ordered.append(ready)
        del waiting[ready]
        for inputs in waiting.values():
            inputs.discard(ready)
    return ordered


def content_of(recipe: Recipe, data_name: str) -> Content:
    """What a dataset holds, which is what its readers read it as.

    Raises:
        ValueError: no stage reads it, so nothing says what it holds.
    """
    readings: list[_Reader] = [
        (("stages", name, field), content)
        for name, stage in recipe.stages.items()
        for field, content in DATA_FIELDS[stage.kind].items()
        if getattr(stage, field) == data_name
    ]
    if not readings:
        raise ValueError(f"data.{data_name} is read by no stage; remove it, or name it in one")
    return _richest(readings)[1]


# -- agreement of what a critic learns with what the policy will see ------------------------------------------------


def resolve(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """The recipe with everything that stages inherit from each other written out, and the disagreements.

    A critic must have been pretrained on the return that the policy will see: the same reward, ``kl_coef``,
    ``gamma`` and, where KL is counted, reference. What its stage leaves open is taken from the policy stages that
    start from it.
    """
    problems: list[Problem] = []
    stages: dict[str, AnyStage] = {}
    for name, stage in recipe.stages.items():
        if isinstance(stage, ValuePretraining):
            learners = _policy_stages_of(recipe, name)
            stage, found = _inherit(name, stage, learners)
            problems += found
            for learner, policy_stage in learners.items():
                problems += _disagreements(recipe, name, stage, learner, policy_stage)
        if isinstance(stage, ValuePretraining | PolicyOptimization):
            stage = stage.model_copy(update={"reference": stage_reference(stage)})
        stages[name] = stage
    return recipe.model_copy(update={"stages": stages}), problems


def _policy_stages_of(recipe: Recipe, critic: str) -> dict[str, PolicyOptimization]:
    return {
        name: stage
        for name, stage in recipe.stages.items()
        if isinstance(stage, PolicyOptimization) and stage.critic == critic
    }


def _inherit(
    name: str, stage: ValuePretraining, learners: Mapping[str, PolicyOptimization]
) -> tuple[ValuePretraining, list[Problem]]:
    problems, inherited = [], {}
    for field in ("kl_coef", "gamma"):
        if getattr(stage, field) is not None:
            continue
        values = {learner: getattr(policy_stage.algorithm, field) for learner, policy_stage in learners.items()}
        told = ", ".join(f"{learner} has {value:g}" for learner, value in values.items())
        if len(set(values.values())) > 1:
            remedy = f"set {field} here and in all of them, or pretrain a critic for each"
            problems.append(Problem(("stages", name, field), f"is inherited, but the heirs differ: {told}", remedy))
        elif not values:
            message = "has nobody to inherit from: no policy_optimization stage starts from this critic"
            problems.append(Problem(("stages", name, field), message, f"set {field} here"))
        else:
            inherited[field] = next(iter(values.values()))
    return stage.model_copy(update=inherited), problems


def _disagreements(
    recipe: Recipe, critic: str, stage: ValuePretraining, learner: str, policy_stage: PolicyOptimization
) -> Iterator[Problem]:
    if not _same_reward(recipe.rewards[stage.reward], recipe.rewards[policy_stage.reward]):
        message = f"'{stage.reward}' is not the reward that '{learner}' is trained on ('{policy_stage.reward}')"
        yield Problem(("stages", critic, "reward"), message, f"use '{policy_stage.reward}' in both")
    for field in ("kl_coef", "gamma"):
        ours, theirs = getattr(stage, field), getattr(policy_stage.algorithm, field)
        if ours is not None and ours != theirs:
            message = f"{ours:g} is not the {field} of '{learner}' ({theirs:g}), which starts from this critic"
            yield Problem(("stages", critic, field), message, f"leave {field} out here to inherit it")
    ours, theirs = stage_reference(stage), stage_reference(policy_stage)
    if policy_stage.algorithm.kl_coef > 0 and ours != theirs:
        message = f"'{ours}' is not the reference of '{learner}' ('{theirs}'), whose reward has a KL part"
        yield Problem(("stages", critic, "reference"), message, f"set reference: {theirs}")


def _same_reward(one: Reward, other: Reward) -> bool:
    return one == other


# -- what is allowed, but warned against ---------------------------------------------------------------------------


def warnings(recipe: Recipe) -> list[str]:
    """What a source warns against, or what is likely a slip; nothing here stops a run."""
    return [*_unread(recipe), *_pairings(recipe), *_technique_warnings(recipe)]


def _unread(recipe: Recipe) -> Iterator[str]:
    read = {step for inputs in dependencies(recipe).values() for step in inputs.values()}
    for name in recipe.data:
        if f"data.{name}" not in read:
            yield f"data.{name}: no stage reads it"
    scored = {reward_of(stage) for stage in recipe.stages.values()}
    for name in recipe.rewards:
        if name not in scored:
            yield f"rewards.{name}: no stage reads it"


def _pairings(recipe: Recipe) -> Iterator[str]:
    upstream = _upstream(recipe)
    for i, publication in enumerate(recipe.publish):
        after, stage = publication.after, publication.stage
        if after is not None and after != stage and stage not in upstream[after]:
            yield f"publish.{i}.after: '{after}' does not read '{stage}', so its gate says nothing about it"
    for name, each in recipe.stages.items():
        if each.kind == "evaluation" and each.candidate == each.baseline:
            yield f"stages.{name}.baseline: '{each.baseline}' is the candidate too; it can only be compared with itself"
        if not isinstance(each, PolicyOptimization):
            continue
        critic = recipe.stages[each.critic]
        if isinstance(critic, ValuePretraining) and critic.policy != each.init:
            yield (
                f"stages.{name}.init: starts from '{each.init}', but its critic was pretrained on responses of "
                f"'{critic.policy}'"
            )


def _technique_warnings(recipe: Recipe) -> Iterator[str]:
    longest = recipe.generation.max_response_tokens
    for name, stage in recipe.stages.items():
        path = f"stages.{name}"
        if isinstance(stage, ValuePretraining) and any(gate.metric == "explained_variance" for gate in stage.gate):
            for step in dependencies(recipe)[name].values():
                if step in recipe.stages and recipe.stages[step].kind == "reward_model" and not recipe.stages[step].gate:
                    yield (
                        f"{path}.gate: a reward model at chance level can be predicted well too; give stages.{step} "
                        "a gate on pair_accuracy"
                    )
        if not isinstance(stage, PolicyOptimization):
            continue
        switches = stage.algorithm
        alpha = switches.length_adaptive_alpha
        if alpha is not None and 2 / alpha >= longest:
            extent = "every λ" if alpha * longest <= 1 else f"λ of every response of up to {1 / alpha:g} tokens"
            yield (
                f"{path}.algorithm.length_adaptive_alpha: {alpha:g} makes {extent} zero (λ = 1 − 1/(α·l), VAPO, arXiv "
                f"2504.05118 eq. 4-5), and responses have at most {longest} tokens; short tasks need a larger α"
            )
        if recipe.stages[stage.critic].kind == "reward_model":
            yield (
                f"{path}.critic: a reward model scores unfinished text low, so that as a critic it favours early tokens "
                "and responses collapse in length (VC-PPO, arXiv 2503.01491); pretrain it in a value_pretraining stage"
            )
        if switches.positive_nll_coef and switches.positive_verifier is None:
            yield from _uncentred(recipe, path, stage)
        updates = stage.epochs * stage.batch_size // stage.minibatch_size
        if switches.clip_range_low is None and switches.clip_range_high is None and updates > 1:
            yield (
                f"{path}.algorithm: the ratio is not clipped, and {updates} optimiser steps are taken on each rollout; "
                "without a clip only the first is a policy gradient (PPO, arXiv 1707.06347 §2-3)"
            )


def _uncentred(recipe: Recipe, path: str, stage: PolicyOptimization) -> Iterator[str]:
    for term in recipe.rewards[stage.reward].terms:
        model = recipe.stages[term.model] if term.model else None
        if model is not None and model.kind == "reward_model" and model.centre_on is None:
            yield (
                f"{path}.algorithm.positive_threshold: {stage.algorithm.positive_threshold:g} is compared with scores of "
                f"'{term.model}', whose zero means nothing (Bradley-Terry fixes differences only); "
                f"set stages.{term.model}.centre_on"
            )


def _upstream(recipe: Recipe) -> dict[str, set[str]]:
    """Step → every step that it depends on, however far up."""
    inputs = dependencies(recipe)
    upstream: dict[str, set[str]] = {}
    for step in order(recipe):
        direct = set(inputs[step].values())
        upstream[step] = direct.union(*(upstream[each] for each in direct)) if direct else set()
    return upstream

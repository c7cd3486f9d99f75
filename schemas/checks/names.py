"""Checks of the names in a recipe: each must refer to something of the right kind, without cycles.

They read the plain mapping, not a ``Recipe``, so that a wrong name is found even where other fields are invalid.
Values of the wrong shape are skipped here: pydantic refuses them.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from schemas.kinds import PUBLISHED, STAGES, kinds_collecting, kinds_making
from schemas.metric_names import JUDGED
from schemas.problems import (
    MAX_PROBLEMS,
    Path,
    Problem,
    quote,
    suggest,
)
from schemas.recipe.fields import MAX_NAMED
from schemas.recipe.inputs import EXACT_MATCH, MODEL, Content
from schemas.recipe.sources import Builtin, FileSource, file_source
from schemas.recipe.terms import TERMS
from schemas.records.metric import Settings, settings_of
from schemas.records.metrics import (
    SELECTION_PREFIX,
    estimated_metric_names,
    gate_metric_names,
    headline_metric_names,
    how_to_measure,
    one_of_each_family,
)
from schemas.steps import BUILTIN_VERIFIERS, CONTENT_COLUMNS, JUDGES, missing_columns

Plain = Mapping[str, Any]
_NAMED = ("models", "data", "mixtures", "verifiers", "rewards", "stages")
"""Sections of a recipe whose keys are names."""
_VERIFIER_FIELDS = (*((field, "verifier") for field in JUDGES), ("algorithm", "positive_verifier"))
"""Fields of stages under which a verifier is named, and where."""
_CYCLE_REMEDY = "name a stage before them in one of these fields"


def name_problems(plain: Plain) -> list[Problem]:
    """Everything that is wrong with the names in a recipe; the rest of it may be invalid."""
    if any(len(_mapping(plain.get(field))) > MAX_NAMED for field in _NAMED):
        return []  # pydantic refuses the number
    found = itertools.chain(
        _reserved_names(plain),
        _stage_references(plain),
        _unread_models(plain),
        _stand_ins(plain),
        _judges(plain),
        _reward_references(plain),
        _data_references(plain),
        _verifiers(plain),
        _verifiers_of_another_task(plain),
        _comparisons_without_answers(plain),
        _gates(plain),
        _publications(plain),
        _cycles(plain),
    )
    return list(itertools.islice(found, MAX_PROBLEMS))


# -- the parts of a plain recipe


def _mapping(value: Any) -> Plain:
    return value if isinstance(value, Mapping) else {}


def _is_in(named: Plain, name: Any) -> bool:
    return isinstance(name, str) and name in named


def _items(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _stages(plain: Plain) -> dict[str, Plain]:
    stages = _mapping(plain.get("stages"))
    return {name: stage for name, stage in stages.items() if isinstance(stage, Mapping)}


def _kinds(plain: Plain) -> dict[str, str]:
    """Stage → kind, for the stages with a known kind."""
    kinds = {name: stage.get("kind") for name, stage in _stages(plain).items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, str) and kind in STAGES}


def _terms(plain: Plain) -> Iterator[tuple[str, Path, Plain]]:
    """Reward, path and value of every reward's terms."""
    for reward, definition in _mapping(plain.get("rewards")).items():
        for i, term in enumerate(_items(_mapping(definition).get("terms"))):
            yield reward, ("rewards", reward, "terms", i), _mapping(term)


def _fields_that_name(what: str) -> list[str]:
    """Fields of a reward term that name a ``what``."""
    return [kind.field for kind in TERMS if kind.names == what]


def _reads_rewards(name: str, stage: Plain) -> Iterator[tuple[Path, str]]:
    """(Path, reward) for each reward that a stage names."""
    kind = stage.get("kind")
    fields = STAGES[kind].work.model_fields if isinstance(kind, str) and kind in STAGES else {}
    reward = stage.get("reward")
    if isinstance(reward, str) and "reward" in fields:
        yield ("stages", name, "reward"), reward
    for field in JUDGES:
        judge = _mapping(stage.get(field)).get("reward")
        if isinstance(judge, str) and field in fields:
            yield ("stages", name, field, "reward"), judge


# -- what names mean


def _reserved_names(plain: Plain) -> Iterator[Problem]:
    for name in _mapping(plain.get("models")):
        if name == MODEL or name in _stages(plain):
            whose = "the recipe's model" if name == MODEL else "a stage"
            yield Problem(("models", name), f"'{name}' is {whose} already", "give the model another name")
    if MODEL in _stages(plain):
        message = f"'{MODEL}' always means the recipe's model"
        yield Problem(("stages", MODEL), message, "give the stage another name")
    for name, kind in _kinds(plain).items():
        if STAGES[kind].makes == "dataset" and name in _datasets(plain):
            message = f"a dataset is called '{name}' too, and both are read as data"
            yield Problem(("stages", name), message, "give the stage another name")
    for name in _mapping(plain.get("mixtures")):
        if name in _mapping(plain.get("data")):
            message = f"a dataset is called '{name}' too, and both are read as data"
            yield Problem(("mixtures", name), message, "give the mixture another name")


def _datasets(plain: Plain) -> dict[str, tuple[str, ...]]:
    """Dataset or mixture → the datasets of which its rows are."""
    mixtures = _mapping(plain.get("mixtures"))
    parts = {name: tuple(_mapping(_mapping(mixture).get("parts"))) for name, mixture in mixtures.items()}
    return {**parts, **{name: (name,) for name in _mapping(plain.get("data"))}}


def _stage_references(plain: Plain) -> Iterator[Problem]:
    stages = _stages(plain)
    for name, kind in _kinds(plain).items():
        for field, artifacts in STAGES[kind].reads.items():
            allowed, path, target = kinds_making(artifacts), ("stages", name, field), stages[name].get(field)
            takes_others = field in STAGES[kind].other_models
            if not (takes_others and _is_in(_mapping(plain.get("models")), target)):
                yield from _stage_named(plain, path, target, allowed)


def _unread_models(plain: Plain) -> Iterator[Problem]:
    read = [
        target for name, kind in _kinds(plain).items() for target in _other_models(_stages(plain)[name], kind)
    ]
    for name in _mapping(plain.get("models")):
        if name not in read and name not in (MODEL, *_stages(plain)):
            yield Problem(("models", name), "no stage reads it", "name it in one, or remove it")


def _other_models(stage: Plain, kind: str) -> list[Any]:
    """What a stage names where another model may stand."""
    judges = [model for _, model in _judging_models("", stage, kind)]
    return [*(stage.get(field) for field in STAGES[kind].other_models), *judges]


def _judging_models(name: str, stage: Plain, kind: str) -> Iterator[tuple[Path, Any]]:
    """(Path, model) for each judge of a stage that is a model."""
    for field in JUDGES:
        if field in STAGES[kind].work.model_fields and _mapping(stage.get(field)).get("model") is not None:
            yield ("stages", name, field, "model"), _mapping(stage[field])["model"]


def _judges(plain: Plain) -> Iterator[Problem]:
    """Models that judge responses: policies, or other models."""
    for name, kind in _kinds(plain).items():
        for path, target in _judging_models(name, _stages(plain)[name], kind):
            if not _is_in(_mapping(plain.get("models")), target):
                yield from _stage_named(plain, path, target, kinds_making(("policy",)))


def _stand_ins(plain: Plain) -> Iterator[Problem]:
    """Stages that stand in for registered models: each makes a policy."""
    for name, model in _mapping(plain.get("models")).items():
        target = _mapping(model).get("otherwise")
        yield from _stage_named(plain, ("models", name, "otherwise"), target, kinds_making(("policy",)))


def _stage_named(plain: Plain, path: Path, target: Any, allowed: tuple[str, ...]) -> Iterator[Problem]:
    """What is wrong where a field names a stage (or the model) that must be of an allowed kind."""
    kinds, itself = _kinds(plain), path[1] if path[0] == "stages" else None
    fitting = [name for name, kind in kinds.items() if kind in allowed and name != itself]
    fitting += [MODEL] if MODEL in allowed else []
    remedy = f"use one of: {', '.join(fitting)}" if fitting else f"add a {_kinds_text(allowed)}"
    field = str(path[-1])
    rule = f"{field} names a" if field.endswith("s") else f"{_article(field)} {field} is a"
    rule = f"{rule} {_kinds_text(allowed)}"
    if not isinstance(target, str):
        return
    if target == MODEL:
        if MODEL not in allowed:
            yield Problem(path, f"'{MODEL}' is the recipe's model; {rule}", remedy)
    elif target == itself:
        yield Problem(path, f"'{target}' is this stage itself", remedy)
    elif target in _mapping(plain.get("models")) and target not in _stages(plain):
        message = f"'{target}' is another model, which stages sample from and compare with; {rule}"
        yield Problem(path, message, remedy)
    elif target not in _stages(plain):
        yield Problem(path, f"no stage is called {quote(target)}", suggest(target, fitting) or remedy)
    elif target in kinds and kinds[target] not in allowed:
        yield Problem(path, f"'{target}' is {_with_article(kinds[target])}; {rule}", remedy)


def _with_article(kind: str) -> str:
    return f"{_article(kind)} {kind} stage"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" or word == "sft" else "a"


def _kinds_text(kinds: tuple[str, ...]) -> str:
    stages = f"{' or '.join(kind for kind in kinds if kind != MODEL)} stage"
    return f"{stages}, or the recipe's model" if MODEL in kinds else stages


def _reward_references(plain: Plain) -> Iterator[Problem]:
    rewards = _mapping(plain.get("rewards"))
    for name, stage in _stages(plain).items():
        for path, reward in _reads_rewards(name, stage):
            if reward not in rewards:
                remedy = suggest(reward, rewards) or "define it under rewards"
                yield Problem(path, f"no reward is called {quote(reward)}", remedy)
    for _, path, term in _terms(plain):
        for field in _fields_that_name("reward_model"):
            yield from _stage_named(plain, (*path, field), term.get(field), kinds_making(("reward_model",)))


def _data_references(plain: Plain) -> Iterator[Problem]:
    data, stages, datasets = _mapping(plain.get("data")), _stages(plain), _datasets(plain)
    yield from _parts(plain)
    readers: dict[str, list[tuple[Path, Content]]] = {}
    for name, kind in _kinds(plain).items():
        for field, content in STAGES[kind].data.items():
            target, field_path = stages[name].get(field), ("stages", name, field)
            collectors = kinds_collecting(content)
            if collectors and _is_in(stages, target) and not _is_in(datasets, target):
                yield from _stage_named(plain, field_path, target, collectors)
            elif isinstance(target, str) and target in datasets:
                for part in filter(data.__contains__, datasets[target]):
                    readers.setdefault(part, []).append((field_path, content))
            elif isinstance(target, str):
                known = [*datasets, *(each for each, of in _kinds(plain).items() if of in collectors)]
                remedy = suggest(target, known) or "define it under data"
                yield Problem(field_path, f"no dataset is called {quote(target)}", remedy)
    for target, uses in readers.items():
        known_content = _builtin_content(_mapping(data[target]))
        # Prefer the content that the source is known to hold, else the one that needs more than prompts.
        ranked = sorted(uses, key=lambda reading: (reading[1] != known_content, reading[1] == "prompts"))
        path, content = ranked[0]
        for other_path, other in uses:
            if other != content and not (other == "prompts" and content == "demonstrations"):
                message = f"reads as {other} what {'.'.join(map(str, path))} reads as {content}"
                yield Problem(other_path, message, "name the source a second time, as another dataset")
        yield from _source_problems(target, _mapping(data[target]), path, content)


def _parts(plain: Plain) -> Iterator[Problem]:
    """Parts of mixtures that are no datasets with a source."""
    data, mixtures = _mapping(plain.get("data")), _mapping(plain.get("mixtures"))
    for name, mixture in mixtures.items():
        for part in _mapping(_mapping(mixture).get("parts")):
            path = ("mixtures", name, "parts", part)
            if part in data or not isinstance(part, str):
                continue
            if part in mixtures:
                message = f"'{part}' is this mixture itself" if part == name else f"'{part}' is a mixture too"
                yield Problem(path, message, "name datasets here, each with its weight")
            elif part in _stages(plain):
                message = f"'{part}' is a stage; a part of a mixture is a dataset under data"
                yield Problem(path, message, "name a dataset")
            else:
                remedy = suggest(part, data) or "define it under data"
                yield Problem(path, f"no dataset is called {quote(part)}", remedy)


def _source_problems(name: str, data: Plain, reader: Path, content: Content) -> Iterator[Problem]:
    """What the reader needs and the dataset's source or columns do not have."""
    source, columns, known_content = data.get("source"), data.get("columns"), _builtin_content(data)
    if known_content is not None and content not in (known_content, "prompts"):
        yield Problem(
            reader, f"reads {content}, but {source} holds {known_content}", "name another dataset here"
        )
    if content == "rankings" and isinstance(source, str) and source.lower().endswith(".csv"):
        message = "rankings are lists of responses and ranks, and a .csv file has no lists"
        yield Problem(("data", name, "source"), message, "use .json, .jsonl or .parquet")
    if known_content and columns:
        yield Problem(("data", name, "columns"), f"{source} has our columns already", "remove columns")
    elif isinstance(columns, Mapping) and columns:
        missing = missing_columns(content, set(columns))
        if missing:
            message = f"says nothing of {' and '.join(missing)}, which {'.'.join(map(str, reader))} reads"
            yield Problem(("data", name, "columns"), message, f"add `{missing[0]}: COLUMN`")


def _builtin_content(data: Plain) -> str | None:
    origin = _origin(data)
    known_content = origin.kind if isinstance(origin, Builtin) else None
    return known_content if known_content in CONTENT_COLUMNS else None


def _origin(data: Plain) -> FileSource | None:
    source = data.get("source")
    return file_source(source) if isinstance(source, str) else None


def _verifiers(plain: Plain) -> Iterator[Problem]:
    named: list[tuple[Path, Any]] = [
        ((*path, field), term.get(field))
        for field in _fields_that_name("verifier")
        for _, path, term in _terms(plain)
    ]
    for name, stage in _stages(plain).items():
        for field, key in _VERIFIER_FIELDS:
            named.append((("stages", name, field, key), _mapping(stage.get(field)).get(key)))
    own = _mapping(plain.get("verifiers"))
    for path, verifier in named:
        if isinstance(verifier, str) and verifier not in BUILTIN_VERIFIERS and verifier not in own:
            message, known = f"no verifier is called {quote(verifier)}", (*own, *BUILTIN_VERIFIERS)
            yield Problem(path, message, suggest(verifier, known))
    for name in own:
        if name in BUILTIN_VERIFIERS:
            message = f"'{name}' is a built-in verifier, and would mean two rules"
            yield Problem(("verifiers", name), message, "give yours another name")


def _verifiers_of_another_task(plain: Plain) -> Iterator[Problem]:
    """Built-in prompts with the verifier of another built-in task, which cannot read them."""
    for name, stage in _stages(plain).items():
        for prompts, data in _prompts_of(plain, stage):
            origin = _origin(data)
            if not isinstance(origin, Builtin):
                continue
            task = origin.name
            for path, verifier in _reads_verifiers(plain, name, stage):
                if verifier in BUILTIN_VERIFIERS and task in BUILTIN_VERIFIERS and verifier != task:
                    message = f"'{verifier}' does not understand the prompts that {name} reads (data.{prompts}: {origin})"
                    yield Problem(path, message, f"use {task}")


def _prompts_of(plain: Plain, stage: Plain) -> Iterator[tuple[str, Plain]]:
    """The dataset that a stage reads as prompts, by name; of a mixture its parts."""
    data, prompts = _mapping(plain.get("data")), stage.get("prompts")
    parts = _datasets(plain).get(prompts, ()) if isinstance(prompts, str) else ()
    yield from ((part, _mapping(data[part])) for part in parts if part in data)


def _comparisons_without_answers(plain: Plain) -> Iterator[Problem]:
    """``exact_match`` on prompts that are known to have no answers; the stage checks other files when it starts."""
    own = _mapping(plain.get("verifiers"))
    for name, stage in _stages(plain).items():
        for prompts, data in _prompts_of(plain, stage):
            columns = _mapping(data.get("columns"))
            is_builtin = _builtin_content(data) is not None
            if "answer" in columns or not (columns or is_builtin):
                continue
            for path, verifier in _reads_verifiers(plain, name, stage):
                if _is_in(own, verifier) and _mapping(own[verifier]).get("source") == EXACT_MATCH:
                    message = f"'{verifier}' compares with answers, and data.{prompts}, which {name} reads, has none"
                    remedy = "name another verifier" if is_builtin else f"add data.{prompts}.columns.answer"
                    yield Problem(path, message, remedy)


def _reads_verifiers(plain: Plain, name: str, stage: Plain) -> list[tuple[Path, Any]]:
    """(Path, verifier) for each verifier that a stage or its reward names."""
    read: list[tuple[Path, Any]] = [
        (("stages", name, field, key), _mapping(stage.get(field)).get(key)) for field, key in _VERIFIER_FIELDS
    ]
    rewards = [reward for _, reward in _reads_rewards(name, stage)]
    return read + [
        ((*path, field), term.get(field))
        for field in _fields_that_name("verifier")
        for r, path, term in _terms(plain)
        if r in rewards
    ]


def _gates(plain: Plain) -> Iterator[Problem]:
    stages = _stages(plain)
    for name, kind in _kinds(plain).items():
        has = settings_of(stages[name])
        measured = sorted(headline_metric_names(kind, has=has))
        gates = stages[name].get("gate")
        for i, gate in enumerate(_items(gates)):
            path: Path = (
                "stages",
                name,
                "gate",
                *((i,) if isinstance(gates, list | tuple) else ()),
                "metric",
            )
            metric = _mapping(gate).get("metric")
            if isinstance(metric, str) and metric.startswith(SELECTION_PREFIX) and metric in measured:
                message = f"{quote(metric)} is measured on what chose the best, so that it is optimistic"
                others = one_of_each_family(gate_metric_names(kind, has=has))
                yield Problem(path, message, f"use one of: {', '.join(others)}")
            elif isinstance(metric, str) and metric not in measured:
                yield _unmeasured(path, metric, kind, stages[name], measured)
            elif isinstance(metric, str) and _mapping(gate).get("confidence") is not None:
                yield from _confidence_without_estimate((*path[:-1], "confidence"), metric, kind, has)


def _unmeasured(path: Path, metric: str, kind: str, stage: Plain, measured: list[str]) -> Problem:
    """A gate on a metric that the kind of stage does not report, or not with the stage's settings."""
    has = settings_of(stage) or ()
    judges = [judge for judge in JUDGED if judge in has and f"also.{judge}" not in has]
    by = _with_article(kind) + "".join(f" with a {judge} as judge" for judge in judges)
    instead = suggest(metric, measured, listed=one_of_each_family(measured))
    if has and metric in headline_metric_names(kind):
        instead = f"{how_to_measure(metric, has)}, or {instead}"
    return Problem(path, f"{by} does not measure {quote(metric)}", instead)


def _confidence_without_estimate(
    path: Path, metric: str, kind: str, has: Settings | None
) -> Iterator[Problem]:
    """A gate with ``confidence`` on a metric that has no standard error."""
    estimated = estimated_metric_names(kind, has=has) & gate_metric_names(kind, has=has)
    if metric not in estimated:
        one_of = "one of: " if len(estimated) > 1 else ""
        others = f", or gate on {one_of}{', '.join(one_of_each_family(estimated))}" if estimated else ""
        message = f"{quote(metric)} comes without a standard error, so no confidence can be asked of it"
        yield Problem(path, message, f"remove confidence{others}")


def _publications(plain: Plain) -> Iterator[Problem]:
    aliases: dict[tuple[str, str], int] = {}
    published = tuple(name for name in kinds_making(PUBLISHED) if name != MODEL)
    for i, publication in enumerate(map(_mapping, _items(plain.get("publish")))):
        yield from _stage_named(plain, ("publish", i, "stage"), publication.get("stage"), published)
        yield from _gated_stage(plain, ("publish", i, "after"), publication.get("after"))
        model, alias = publication.get("registered_model"), publication.get("alias")
        if isinstance(model, str) and isinstance(alias, str):
            first = aliases.setdefault((model, alias), i)
            if first != i:
                message = f"publish.{first} moves the alias {quote(alias)} of {quote(model)} too"
                yield Problem(("publish", i, "alias"), message, "an alias points at one model; name another")


def _gated_stage(plain: Plain, path: Path, target: Any) -> Iterator[Problem]:
    stages = _stages(plain)
    gated = [name for name, stage in stages.items() if stage.get("gate")]
    remedy = f"use one of: {', '.join(gated)}" if gated else "give a stage a gate"
    if isinstance(target, str) and target not in stages:
        yield Problem(path, f"no stage is called {quote(target)}", suggest(target, gated) or remedy)
    elif isinstance(target, str) and target not in gated:
        yield Problem(path, f"'{target}' has no gate that could pass", remedy)


# -- cycles


def _cycles(plain: Plain) -> Iterator[Problem]:
    """One problem for each cycle of stages, which lists the whole cycle."""
    waiting = _dependencies(plain)
    while waiting:
        free = [name for name, waits in waiting.items() if not any(to in waiting for _, to in waits)]
        for name in free:
            del waiting[name]
        if free or not waiting:
            continue
        ring = _find_cycle(waiting)
        listed = ", ".join(f"{name} reads {to} ({'.'.join(map(str, path))})" for name, path, to in ring)
        yield Problem(ring[0][1], f"stages wait for one another: {listed}", _CYCLE_REMEDY)
        for name, _, _ in ring:
            del waiting[name]


def _dependencies(plain: Plain) -> dict[str, list[tuple[Path, str]]]:
    """Stage → (path of a field, stage that it names). A stage that names itself is refused elsewhere."""
    stages, data, models = _stages(plain), _datasets(plain), _mapping(plain.get("models"))
    waits: dict[str, list[tuple[Path, str]]] = {name: [] for name in stages}
    for name, kind in _kinds(plain).items():
        collectable = [field for field, content in STAGES[kind].data.items() if kinds_collecting(content)]
        collected = [field for field in collectable if not _is_in(data, stages[name].get(field))]
        fields: list[tuple[Path, Any]] = [
            (("stages", name, field), stages[name].get(field)) for field in (*STAGES[kind].reads, *collected)
        ]
        fields += _judging_models(name, stages[name], kind)
        others = _other_models(stages[name], kind)
        fields += [  # a stage that stands in for it would have to end first
            (("models", other, "otherwise"), _mapping(models[other]).get("otherwise"))
            for other in others
            if isinstance(other, str) and other in models
        ]
        waits[name] += [
            (path, to) for path, to in fields if isinstance(to, str) and to in stages and to != name
        ]
        for _, reward in _reads_rewards(name, stages[name]):
            terms = [
                ((*path, field), term.get(field))
                for field in _fields_that_name("reward_model")
                for r, path, term in _terms(plain)
                if r == reward
            ]
            waits[name] += [(path, to) for path, to in terms if isinstance(to, str) and to in stages]
    return waits


def _find_cycle(waiting: dict[str, list[tuple[Path, str]]]) -> list[tuple[str, Path, str]]:
    """A cycle among stages that all wait for another of them: (stage, field, stage it waits for)."""
    trail: list[tuple[str, Path, str]] = []
    name = next(iter(waiting))
    while name not in (names := [passed for passed, _, _ in trail]):
        path, to = next((path, to) for path, to in waiting[name] if to in waiting)
        trail.append((name, path, to))
        name = to
    return trail[names.index(name) :]

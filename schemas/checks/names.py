"""Checks of the names in a recipe: each must refer to something of the right kind, without cycles.

They read the plain mapping, not a ``Recipe``, so that a wrong name is found even where other fields are invalid.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from vantage.schemas.checks.cycles import cycles
from vantage.schemas.checks.data_names import data_references
from vantage.schemas.checks.kept_apart import kept_apart_problems
from vantage.schemas.checks.plain_recipe import (
    Plain,
    datasets_of,
    fields_that_name,
    items_of,
    kinds_of,
    mapping_of,
    rewards_read,
    stages_of,
    terms_of,
)
from vantage.schemas.checks.stage_names import (
    judge_references,
    stage_named,
    stage_references,
    stand_in_references,
    unread_models,
    with_article,
)
from vantage.schemas.checks.verifier_names import (
    comparisons_without_answers,
    verifier_references,
    verifiers_of_another_task,
)
from vantage.schemas.kind import PUBLISHED
from vantage.schemas.kinds import STAGES, kinds_making
from vantage.schemas.metric_names import JUDGED
from vantage.schemas.problems import MAX_PROBLEMS, Path, Problem, quote, suggest
from vantage.schemas.recipe.fields import MAX_NAMED
from vantage.schemas.recipe.inputs import MODEL
from vantage.schemas.records.metric import Settings, settings_of
from vantage.schemas.records.metrics import (
    SELECTION_PREFIX,
    estimated_metric_names,
    gate_metric_names,
    headline_metric_names,
    how_to_measure,
    one_of_each_family,
)
from vantage.schemas.reserved_aliases import RESERVED_ALIAS

_NAMED = ("models", "data", "mixtures", "verifiers", "benchmarks", "rewards", "stages")
"""Sections of a recipe whose keys are names."""


def name_problems(plain: Plain) -> list[Problem]:
    """Return everything that is wrong with the names in a recipe; the rest of it may be invalid."""
    if any(len(mapping_of(plain.get(field))) > MAX_NAMED for field in _NAMED):
        return []  # pydantic refuses the number
    found = itertools.chain(
        _reserved_names(plain),
        stage_references(plain),
        unread_models(plain),
        stand_in_references(plain),
        judge_references(plain),
        _reward_references(plain),
        data_references(plain),
        kept_apart_problems(plain),
        verifier_references(plain),
        verifiers_of_another_task(plain),
        comparisons_without_answers(plain),
        _benchmark_references(plain),
        _gates(plain),
        _publications(plain),
        _licensed_steps(plain),
        cycles(plain),
    )
    return list(itertools.islice(found, MAX_PROBLEMS))


def _reserved_names(plain: Plain) -> Iterator[Problem]:
    for name in mapping_of(plain.get("models")):
        if name == MODEL or name in stages_of(plain):
            whose = "the recipe's model" if name == MODEL else "a stage"
            yield Problem(("models", name), f"'{name}' is {whose} already", "give the model another name")
    if MODEL in stages_of(plain):
        message = f"'{MODEL}' always means the recipe's model"
        yield Problem(("stages", MODEL), message, "give the stage another name")
    for name, kind in kinds_of(plain).items():
        if STAGES[kind].makes == "dataset" and name in datasets_of(plain):
            message = f"a dataset is called '{name}' too, and both are read as data"
            yield Problem(("stages", name), message, "give the stage another name")
    for name in mapping_of(plain.get("mixtures")):
        if name in mapping_of(plain.get("data")):
            message = f"a dataset is called '{name}' too, and both are read as data"
            yield Problem(("mixtures", name), message, "give the mixture another name")


def _reward_references(plain: Plain) -> Iterator[Problem]:
    rewards = mapping_of(plain.get("rewards"))
    for name, stage in stages_of(plain).items():
        for path, reward in rewards_read(name, stage):
            if reward not in rewards:
                remedy = suggest(reward, rewards) or "define it under rewards"
                yield Problem(path, f"no reward is called {quote(reward)}", remedy)
    for _, path, term in terms_of(plain):
        for field in fields_that_name("reward_model"):
            yield from stage_named(plain, (*path, field), term.get(field), kinds_making(("reward_model",)))


def _benchmark_references(plain: Plain) -> Iterator[Problem]:
    benchmarks = mapping_of(plain.get("benchmarks"))
    for name, kind in kinds_of(plain).items():
        for field in STAGES[kind].benchmarks:
            target = stages_of(plain)[name].get(field)
            if isinstance(target, str) and target not in benchmarks:
                remedy = suggest(target, benchmarks) or "define it under benchmarks"
                yield Problem(("stages", name, field), f"no benchmark is called {quote(target)}", remedy)


def _gates(plain: Plain) -> Iterator[Problem]:
    stages = stages_of(plain)
    for name, kind in kinds_of(plain).items():
        has = settings_of(stages[name])
        measured = sorted(headline_metric_names(kind, has=has))
        gates = stages[name].get("gate")
        for i, gate in enumerate(items_of(gates)):
            path: Path = (
                "stages",
                name,
                "gate",
                *((i,) if isinstance(gates, list | tuple) else ()),
                "metric",
            )
            metric = mapping_of(gate).get("metric")
            if isinstance(metric, str) and metric.startswith(SELECTION_PREFIX) and metric in measured:
                message = f"{quote(metric)} is measured on what chose the best, so that it is optimistic"
                others = one_of_each_family(gate_metric_names(kind, has=has))
                yield Problem(path, message, f"use one of: {', '.join(others)}")
            elif isinstance(metric, str) and metric not in measured:
                yield _unmeasured(path, metric, kind, stages[name], measured)
            elif isinstance(metric, str) and mapping_of(gate).get("confidence") is not None:
                yield from _confidence_without_estimate((*path[:-1], "confidence"), metric, kind, has)


def _unmeasured(path: Path, metric: str, kind: str, stage: Plain, measured: list[str]) -> Problem:
    """Return a gate on a metric that the kind of stage does not report, or not with the stage's settings."""
    has = settings_of(stage) or ()
    judges = [judge for judge in JUDGED if judge in has and f"also.{judge}" not in has]
    by = with_article(kind) + "".join(f" with a {judge} as judge" for judge in judges)
    instead = suggest(metric, measured, listed=one_of_each_family(measured))
    if has and metric in headline_metric_names(kind):
        instead = f"{how_to_measure(metric, has)}, or {instead}"
    return Problem(path, f"{by} does not measure {quote(metric)}", instead)


def _confidence_without_estimate(
    path: Path, metric: str, kind: str, has: Settings | None
) -> Iterator[Problem]:
    """Find a gate with ``confidence`` on a metric that has no standard error."""
    estimated = estimated_metric_names(kind, has=has) & gate_metric_names(kind, has=has)
    if metric not in estimated:
        one_of = "one of: " if len(estimated) > 1 else ""
        others = f", or gate on {one_of}{', '.join(one_of_each_family(estimated))}" if estimated else ""
        message = f"{quote(metric)} comes without a standard error, so no confidence can be asked of it"
        yield Problem(path, message, f"remove confidence{others}")


def _publications(plain: Plain) -> Iterator[Problem]:
    aliases: dict[tuple[str, str], int] = {}
    published = tuple(name for name in kinds_making(PUBLISHED) if name != MODEL)
    for i, publication in enumerate(map(mapping_of, items_of(plain.get("publish")))):
        yield from stage_named(plain, ("publish", i, "stage"), publication.get("stage"), published)
        yield from _gated_stage(plain, ("publish", i, "after"), publication.get("after"))
        model, alias = publication.get("registered_model"), publication.get("alias")
        if isinstance(alias, str) and RESERVED_ALIAS.fullmatch(alias):
            message = f"{quote(alias)} is reserved by MLflow, which would not register the model under it"
            yield Problem(("publish", i, "alias"), message, "name another, such as champion")
        if isinstance(model, str) and isinstance(alias, str):
            first = aliases.setdefault((model, alias), i)
            if first != i:
                message = f"publish.{first} moves the alias {quote(alias)} of {quote(model)} too"
                yield Problem(("publish", i, "alias"), message, "an alias points at one model; name another")


def _licensed_steps(plain: Plain) -> Iterator[Problem]:
    known = [
        MODEL,
        *(f"{section}.{name}" for section in ("models", "data") for name in mapping_of(plain.get(section))),
        *stages_of(plain),
    ]
    for step in mapping_of(plain.get("licenses")):
        if isinstance(step, str) and step not in known:
            yield Problem(("licenses", step), f"nothing here is called {quote(step)}", suggest(step, known))


def _gated_stage(plain: Plain, path: Path, target: Any) -> Iterator[Problem]:
    stages = stages_of(plain)
    gated = [name for name, stage in stages.items() if stage.get("gate")]
    remedy = f"use one of: {', '.join(gated)}" if gated else "give a stage a gate"
    if isinstance(target, str) and target not in stages:
        yield Problem(path, f"no stage is called {quote(target)}", suggest(target, gated) or remedy)
    elif isinstance(target, str) and target not in gated:
        yield Problem(path, f"'{target}' has no gate that could pass", remedy)

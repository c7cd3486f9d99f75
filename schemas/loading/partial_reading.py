"""Read a plain mapping as a ``PartialRecipe``; parts with another shape than a recipe's are left out."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from vantage.schemas.checks.partial_recipe import (
    PartialData,
    PartialGate,
    PartialJudge,
    PartialPublication,
    PartialRecipe,
    PartialStage,
    PartialTerm,
)
from vantage.schemas.kinds import STAGES
from vantage.schemas.recipe.fields import MAX_NAMED
from vantage.schemas.recipe.terms import TERMS
from vantage.schemas.records.metric import settings_of
from vantage.schemas.steps import JUDGES, WATCH_PROMPTS, WATCHED_AT

Plain = Mapping[str, Any]

_NAMED = ("models", "data", "mixtures", "verifiers", "benchmarks", "rewards", "stages")
"""Sections of a recipe whose keys are names."""


def partial_recipe(plain: Plain) -> PartialRecipe:
    """Return the valid parts of a recipe; none if a section has more items than pydantic accepts."""
    if any(len(_mapping(plain.get(section))) > MAX_NAMED for section in _NAMED):
        return PartialRecipe()
    data = {name: _data(name, _mapping(each)) for name, each in _named(plain.get("data")).items()}
    mixtures = {
        name: tuple(_named(_mapping(each).get("parts")))
        for name, each in _named(plain.get("mixtures")).items()
    }
    return PartialRecipe(
        models={
            name: _text(_mapping(each), "otherwise") for name, each in _named(plain.get("models")).items()
        },
        data=data,
        mixtures=mixtures,
        verifiers={
            name: _text(_mapping(each), "source") for name, each in _named(plain.get("verifiers")).items()
        },
        benchmarks=tuple(_named(plain.get("benchmarks"))),
        rewards={name: _terms(name, _mapping(each)) for name, each in _named(plain.get("rewards")).items()},
        publish=tuple(_publication(_mapping(each)) for each in _items(plain.get("publish"))),
        licenses=tuple(_named(plain.get("licenses"))),
        datasets={**mixtures, **{name: (name,) for name in data}},
        stages={
            name: _stage(name, each)
            for name, each in _named(plain.get("stages")).items()
            if isinstance(each, Mapping)
        },
    )


def _data(name: str, plain: Plain) -> PartialData:
    near = ("data", name, "near_duplicates", "held_out_of")
    named = enumerate(_items(_mapping(plain.get("near_duplicates")).get("held_out_of")))
    return PartialData(
        source=_text(plain, "source"),
        columns=tuple(_named(plain.get("columns"))),
        has_columns=bool(plain.get("columns")),
        is_test_set=_mapping(plain.get("split")).get("test") == "all",
        held_out_of=tuple(((*near, i), other) for i, other in named if isinstance(other, str)),
    )


def _terms(reward: str, plain: Plain) -> tuple[PartialTerm, ...]:
    named = {
        what: [kind.field for kind in TERMS if kind.names == what] for what in ("reward_model", "verifier")
    }
    given = [_mapping(term) for term in _items(plain.get("terms"))]
    terms = [(_texts(term), _mapping(term.get("judge"))) for term in given]
    return tuple(
        PartialTerm(
            path=("rewards", reward, "terms", i),
            reward_models={field: term[field] for field in named["reward_model"] if field in term},
            verifiers={field: term[field] for field in named["verifier"] if field in term},
            judging_model=None if "url" in judge else _text(judge, "model"),
        )
        for i, (term, judge) in enumerate(terms)
    )


def _stage(name: str, plain: Plain) -> PartialStage:
    texts, gate = {**_texts(plain), **_watch_prompts(plain)}, plain.get("gate")
    gates = [(i, _mapping(each)) for i, each in enumerate(_items(gate))]
    judges = {each: reduce(_inner, path, plain) for each, path in JUDGES.items() if each in plain}
    return PartialStage(
        kind=STAGES.get(texts.get("kind", "")),
        texts=texts,
        judges={
            each: PartialJudge(
                path=("stages", name, *JUDGES[each]),
                verifier=_text(judge, "verifier"),
                reward=_text(judge, "reward"),
                model=_text(judge, "model"),
            )
            for each, judge in judges.items()
        },
        positive_verifier=_text(_mapping(plain.get("algorithm")), "positive_verifier"),
        gates=tuple(
            PartialGate(
                path=("stages", name, "gate", *((i,) if isinstance(gate, list | tuple) else ())),
                metric=each["metric"],
                has_confidence=each.get("confidence") is not None,
            )
            for i, each in gates
            if isinstance(each.get("metric"), str)
        ),
        has_gate=bool(gate),
        member_of=_text(_mapping(plain.get("member")), "of"),
        settings=settings_of(plain),
    )


def _watch_prompts(plain: Plain) -> dict[str, str]:
    """Return the dataset of a watch's own prompts, by the role that reads it."""
    named = _mapping(plain.get(WATCHED_AT[0])).get(WATCHED_AT[1])
    data = named if isinstance(named, str) else _text(_mapping(named), "data")
    return {} if data is None else {WATCH_PROMPTS: data}


def _inner(plain: Plain, field: str) -> Plain:
    return _mapping(plain.get(field))


def _publication(plain: Plain) -> PartialPublication:
    return PartialPublication(
        stage=_text(plain, "stage"),
        after=_text(plain, "after"),
        registered_model=_text(plain, "registered_model"),
        alias=_text(plain, "alias"),
    )


def _named(value: Any) -> Plain:
    return {key: each for key, each in _mapping(value).items() if isinstance(key, str)}


def _mapping(value: Any) -> Plain:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> list[Any]:
    """Return the items of a list; for a single value, that value."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _texts(plain: Plain) -> dict[str, str]:
    return {key: value for key, value in plain.items() if isinstance(value, str)}


def _text(plain: Plain, key: str) -> str | None:
    value = plain.get(key)
    return value if isinstance(value, str) else None

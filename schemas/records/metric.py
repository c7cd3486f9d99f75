"""A metric, and the settings that a stage needs to report it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vantage.schemas.metric_names import JUDGED, PASS_AT

Settings = Collection[str]
"""Names in ``NEEDS`` of the settings that a stage has."""


@dataclass(frozen=True)
class Need:
    """A setting that a metric needs."""

    condition: str
    """Condition as it is written on the page of metrics."""
    remedy: str
    """Remedy in the message about a stage without the setting."""


NEEDS: Mapping[str, Need] = {
    "verifier": Need("With a verifier as `judge` or `also`.", "name a verifier as judge or also"),
    "reward": Need("With a reward as `judge` or `also`.", "name a reward as judge or also"),
    "model": Need("With a model as `judge` or `also`.", "name a model as judge or also"),
    "also.model": Need("With a model as `also`.", "name a model as also"),
    "also.verifier": Need("With a verifier as `also`.", "name a verifier as also"),
    "also.reward": Need("With a reward as `also`.", "name a reward as also"),
    "teacher": Need(
        "With a `teacher`, or a `teacher_server` with `sampled: true`.",
        "set teacher_server.sampled: true, so that the server's responses are scored too, or name a folder or a stage as teacher",
    ),
    "demonstrations": Need("With `demonstrations`.", "name a dataset as demonstrations"),
    **{f"samples.{k}": Need("", f"set samples_per_prompt: {k} or more") for k in PASS_AT},
}


@dataclass(frozen=True)
class Metric:
    """A number that stages report."""

    name: str
    unit: str
    """``1`` for a plain number, a share or a probability; ``reward`` is the unit of the recipe's reward."""
    meaning: str
    needs: tuple[str, ...] = ()
    """Names in ``NEEDS``; only a stage that has all of them reports it."""
    family: str | None = None
    """Name in ``docs/metrics.md`` of several metrics with one meaning, which are one row there."""


def settings_of(stage: Mapping[str, Any]) -> Settings | None:
    """Return the settings of an evaluation or a distillation, from its fields in a recipe; None: another kind, or a wrong judge."""
    if stage.get("kind") == "distillation":
        server = stage.get("teacher_server")
        is_scored = server is None or (isinstance(server, Mapping) and server.get("sampled") is True)
        return {"teacher" if is_scored else "teacher_server"}
    if stage.get("kind") != "evaluation":
        return None
    main, also = (_kind_of_judge(stage.get(field)) for field in ("judge", "also"))
    if main is None:
        return None
    samples = stage.get("samples_per_prompt", 1)
    samples = samples if isinstance(samples, int) else 1
    return {
        main,
        *(() if also is None else (also, f"also.{also}")),
        *(("demonstrations",) if stage.get("demonstrations") is not None else ()),
        *(f"samples.{k}" for k in PASS_AT if k <= samples),
    }


def _kind_of_judge(judge: Any) -> str | None:
    named = judge if isinstance(judge, Mapping) else {}
    kinds = [kind for kind in JUDGED if named.get(kind) is not None]
    return kinds[0] if len(kinds) == 1 else None

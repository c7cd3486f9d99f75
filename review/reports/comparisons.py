"""Compare candidate and baseline by an evaluation's own files: distributions, and samples side by side."""

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from vantage.ledger.samples_page import JUDGEMENTS, ROLES
from vantage.review.reports.gathered import Answer, Comparison, Distribution, Sample, Token
from vantage.runs.record import StageRecord
from vantage.runs.summary import comparison as summary_of
from vantage.schemas.metric_names import JUDGED
from vantage.schemas.recipe.evaluations import PolicyEvaluation

Rows = list[dict[str, Any]]
Read = Callable[[str], bytes | None]
"""Name of a file → its content, checked; None: it does not exist. Raises ValueError or OSError if it cannot be read."""

MOST_RESPONSES = 50_000
"""Most responses of each model that the distributions use."""
MOST_SAMPLES = 12
"""Number of prompts that are shown with both responses."""
MOST_BINS = 24
FEW_VALUES = 6
"""Number of different judgements up to which each value gets its own bar."""

NO_LOGPROBS = "Log-probabilities of the tokens are not shown: the run's record has none (a version before this one made it)."
NO_VALUES = "Values of the tokens are not shown: no critic read them. `critic:` in an evaluation stage names one (docs/report.md)."


def compared(step: str, stage: PolicyEvaluation, done: StageRecord, read: Read) -> Comparison:
    """Return the comparison of one evaluation, as far as its files can be read."""
    names = {"baseline": stage.baseline, "candidate": stage.candidate}
    try:
        rows = {role: _rows(read(f"{role}.parquet")) for role in ROLES}
        problem = None if all(rows.values()) else "its artifact holds no responses"
    except (ValueError, OSError, KeyError) as error:
        rows, problem = {role: [] for role in ROLES}, str(error)
    missing = [] if problem is None else [f"Responses are not shown: {problem}."]
    if problem is None and len(rows["candidate"]) != len(rows["baseline"]):
        problem, missing = "", ["Responses are not shown: the two models have different numbers of them."]
    samples = _samples(rows, done.samples, _judges(stage)) if problem is None else ()
    if samples:
        missing += _missing_of(samples, stage)
    return Comparison(
        step=step,
        candidate=names["candidate"],
        baseline=names["baseline"],
        summary=summary_of(done).replace("  ", " · "),
        responses=len(rows["candidate"]),
        distributions=_distributions(stage, rows) if problem is None else (),
        samples=samples,
        critic=stage.critic,
        missing=tuple(missing),
    )


def _rows(data: bytes | None) -> Rows:
    if data is None:
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
    except pa.ArrowException as error:
        raise ValueError(f"its rows cannot be read ({type(error).__name__})") from error
    columns = [name for name in ("prompt", "response", "ended", *JUDGEMENTS) if name in table.column_names]
    rows: Rows = table.slice(0, MOST_RESPONSES).select(columns).to_pylist()
    return rows


# -- distributions


def _distributions(stage: PolicyEvaluation, rows: Mapping[str, Rows]) -> tuple[Distribution, ...]:
    found = []
    for column, judge in _judges(stage).items():
        sides = {role: [row[column] for row in of if column in row] for role, of in rows.items()}
        found.append(distribution(f"{_words_of(judge)} of a response", sides))
    lengths = {role: [float(len(row["response"])) for row in of] for role, of in rows.items()}
    found.append(distribution("Length of a response (characters)", lengths, is_length=True))
    return tuple(each for each in found if each is not None)


def _judges(stage: PolicyEvaluation) -> dict[str, str]:
    """Return column → kind of its judge's judgements: ``accuracy``, ``score`` or ``preference``."""
    judges = [JUDGED[each.kind] for each in (stage.judge, stage.also) if each is not None]
    return dict(zip(JUDGEMENTS, judges, strict=False))


def _words_of(judge: str) -> str:
    return {
        "accuracy": "Accuracy (verifier: 1 right, 0 wrong)",
        "score": "Score (reward)",
        "preference": "Preference (judge: 1 preferred, 0 not)",
    }.get(judge, judge)


def distribution(
    what: str, sides: Mapping[str, Sequence[float]], *, is_length: bool = False
) -> Distribution | None:
    """Return counts of both models in the same bins; None if one model has no finite value."""
    finite = {role: [float(each) for each in of if isfinite(each)] for role, of in sides.items()}
    if not all(finite.values()):
        return None
    together = [*finite["baseline"], *finite["candidate"]]
    values = sorted(set(together))
    is_discrete = len(values) <= FEW_VALUES and not is_length
    edges = tuple(values) if is_discrete else _edges(min(together), max(together))
    count = _by_value if is_discrete else _by_bin
    return Distribution(
        what=what,
        edges=edges,
        is_discrete=is_discrete,
        baseline=count(finite["baseline"], edges),
        candidate=count(finite["candidate"], edges),
        baseline_mean=fmean(finite["baseline"]),
        candidate_mean=fmean(finite["candidate"]),
    )


def _edges(low: float, high: float) -> tuple[float, ...]:
    """Return the ends of equal bins; equal numbers get one bin around them."""
    if low == high:
        return (low - 0.5, high + 0.5)
    return tuple(low + (high - low) * place / MOST_BINS for place in range(MOST_BINS + 1))


def _by_value(of: Sequence[float], values: Sequence[float]) -> tuple[int, ...]:
    counts = Counter(of)
    return tuple(counts[value] for value in values)


def _by_bin(of: Sequence[float], edges: Sequence[float]) -> tuple[int, ...]:
    """Return the number of values in each bin; the last bin contains its upper end."""
    width, bins = (edges[-1] - edges[0]), len(edges) - 1
    places = Counter(min(int((each - edges[0]) / width * bins), bins - 1) for each in of)
    return tuple(places[place] for place in range(bins))


# -- samples


def _samples(
    rows: Mapping[str, Rows], recorded: Sequence[Mapping[str, Any]], judges: Mapping[str, str]
) -> tuple[Sample, ...]:
    """Return the first response to each prompt; first those prompts whose responses differ, as on the console."""
    first: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for theirs, ours in zip(rows["baseline"], rows["candidate"], strict=True):
        first.setdefault(ours["prompt"], (theirs, ours))
    pairs = sorted(first.values(), key=lambda pair: pair[0]["response"] == pair[1]["response"])
    known = {str(each.get("prompt")): each for each in recorded}
    return tuple(
        Sample(
            prompt=ours["prompt"],
            baseline=_answer(theirs, known.get(ours["prompt"], {}), "baseline", judges),
            candidate=_answer(ours, known.get(ours["prompt"], {}), "candidate", judges),
        )
        for theirs, ours in pairs[:MOST_SAMPLES]
    )


def _answer(
    row: Mapping[str, Any], recorded: Mapping[str, Any], role: str, judges: Mapping[str, str]
) -> Answer:
    """Return a response, with its tokens if the record of the run contains those of this text."""
    tokens = recorded.get(f"{role}_tokens") if recorded.get(role) == row["response"] else None
    shown = tuple(Token(str(text), *map(float, numbers)) for text, *numbers in tokens or ())
    return Answer(
        text=row["response"],
        judgements=tuple((judge, float(row[name])) for name, judge in judges.items() if name in row),
        ended=bool(row.get("ended", True)),
        tokens=shown,
        more_tokens=max(int(recorded.get(f"{role}_num_tokens", len(shown))) - len(shown), 0) if shown else 0,
    )


def _missing_of(samples: Sequence[Sample], stage: PolicyEvaluation) -> list[str]:
    """Return in words what the samples lack."""
    if not any(answer.tokens for sample in samples for answer in (sample.baseline, sample.candidate)):
        return [NO_LOGPROBS]
    return [] if stage.critic is not None else [NO_VALUES]

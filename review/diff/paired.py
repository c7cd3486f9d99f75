"""Differences between two evaluations on the same prompts, from the responses that both artifacts keep.

An artifact keeps every response's judgement by prompt. So the difference of two means has an error of its own, in which
the difficulty of prompts cancels out. Only metrics that the kept rows reproduce are compared in this way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vantage.schemas.metric_names import JUDGED
from vantage.schemas.recipe.evaluations import PolicyEvaluation

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_ROLES = ("candidate", "baseline")
_COLUMNS = ("judgement", "also_judgement")
_TOLERANCE = 1e-6
"""Largest relative difference between the mean of the rows and the recorded metric: judgements are kept as float32 or
float64."""


@dataclass(frozen=True)
class Samples:
    """Rows of an evaluation: metric → its value for every response, whose mean is the metric; and the responses' prompts."""

    prompts: Sequence[str]
    values: Mapping[str, "Array"]


@dataclass(frozen=True)
class PairedDifference:
    """B − A of a mean over the responses to the same prompts."""

    value: float
    standard_error: float | None
    """Standard error over prompts; None for a single prompt."""
    num_prompts: int
    num_rows: int
    differing: float | None = None
    """Mean of |B − A| over rows; None if the two sides have different rows."""


def kept_samples(folder: Path, stage: PolicyEvaluation) -> Samples | None:
    """Return the samples in the folder of an evaluation's artifact; None: it has none in this format.

    Raises:
        OSError, ValueError: a file cannot be read as Parquet.
    """
    import pyarrow.parquet as pq

    files = [folder / f"{role}.parquet" for role in _ROLES]
    if not all(file.is_file() for file in files):
        return None
    names = [JUDGED[judge.kind] for judge in (stage.judge, stage.also) if judge is not None]
    columns = dict(zip(names, _COLUMNS, strict=False))
    wanted = ["prompt", "ended", *columns.values()]
    tables = []
    for file in files:
        with pq.ParquetFile(file) as opened:  # `read_table` would load pandas
            if not set(wanted) <= set(opened.schema_arrow.names):
                return None
            tables.append(opened.read(columns=wanted))
    candidate, baseline = tables
    prompts = candidate["prompt"].to_pylist()
    if not prompts or prompts != baseline["prompt"].to_pylist():
        return None
    sides = [{name: _numbers(table, name) for name in wanted[1:]} for table in tables]
    return Samples(prompts, dict(_values(columns, *sides)))


def paired_difference(a: Samples, b: Samples, metric: str) -> PairedDifference | None:
    """Return B − A with its standard error, clustered by prompt; None: the metric is not a mean of the rows.

    With s_c and m_c the sum and the number of a side's rows at prompt c of n, M = Σ m_c, r = Σ s_c / M, and
    u_c = (s_c − r·m_c)/M:

        standard error² = n/(n − 1) · Σ_c (u_c of B − u_c of A)²

    the linearised error of a difference of two means over the same clusters (Cochran, Sampling Techniques, 1977, 6.10).
    Both must have the same prompts (``same_prompts``).
    """
    import numpy as np

    if metric not in a.values or metric not in b.values:
        return None
    number = {prompt: index for index, prompt in enumerate(dict.fromkeys(a.prompts))}
    n, means, parts = len(number), [], []
    for side in (a, b):
        index = np.array([number[prompt] for prompt in side.prompts])
        values = side.values[metric]
        mean = float(values.mean())
        parts.append(np.bincount(index, weights=values - mean, minlength=n) / len(values))
        means.append(mean)
    squares = float(np.square(parts[1] - parts[0]).sum())
    return PairedDifference(
        value=means[1] - means[0],
        standard_error=(squares * n / (n - 1)) ** 0.5 if n > 1 else None,
        num_prompts=n,
        num_rows=min(len(a.prompts), len(b.prompts)),
        differing=float(np.abs(b.values[metric] - a.values[metric]).mean())
        if list(a.prompts) == list(b.prompts)
        else None,
    )


def same_prompts(a: Samples, b: Samples) -> bool:
    """Return whether both sides answered the same prompts, however often."""
    return set(a.prompts) == set(b.prompts)


def reproduces(samples: Samples, metric: str, recorded: float | None) -> bool:
    """Return whether the mean of the rows equals the recorded metric."""
    if recorded is None or metric not in samples.values:
        return False
    return abs(float(samples.values[metric].mean()) - recorded) <= _TOLERANCE * max(1.0, abs(recorded))


def _values(
    columns: Mapping[str, str], candidate: Mapping[str, "Array"], baseline: Mapping[str, "Array"]
) -> "list[tuple[str, Array]]":
    """Return an evaluation's metrics that are means over its responses, computed as in ``vantage.tasks.rollout.comparison``."""
    found: list[tuple[str, Array]] = []
    for place, (name, column) in enumerate(columns.items()):
        ours, theirs = candidate[column], baseline[column]
        if name != "preference":  # a preference does not judge a single response
            found += [(name, ours), (f"baseline_{name}", theirs), (f"{name}_gain", ours - theirs)]
        prefix = f"{name}_" if place else ""
        wins = (ours > theirs) + 0.5 * (ours == theirs)
        found += [(f"{prefix}win_rate", wins), (f"{prefix}tied_pairs", (ours == theirs) * 1.0)]
    ours, theirs = (1.0 - side["ended"] for side in (candidate, baseline))
    found += [("truncated_share", ours), ("baseline_truncated_share", theirs)]
    return [*found, ("truncated_share_difference", ours - theirs)]


def _numbers(table: Any, column: str) -> "Array":
    import numpy as np

    return np.asarray(table[column].to_pylist(), dtype=np.float64)

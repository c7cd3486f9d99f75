"""Count and measure what ``schedule_many.py`` found, write it as tables and draw it."""

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

STEPS_OF_A_PIPELINE = 9
"""Five stages, the model, three datasets."""


@dataclass(frozen=True)
class Sample:
    """The load at one moment; CPU in cores, since the sample before."""

    seconds: float
    waiting: int
    running: int
    ended: int
    prefect_cpu: float
    postgres_cpu: float
    workers_cpu: float
    prefect_mib: float
    commits_per_second: float
    database_mib: float
    load_average: float
    """Load of the whole machine, over the last minute: other work may run on it."""


@dataclass(frozen=True)
class Pipeline:
    """What Prefect's database says of one flow run; seconds since the workers were started."""

    number: int
    state: str
    started: float
    ended: float


def counts(connection: psycopg.Connection[Any], column: str, table: str) -> dict[str, int]:
    """Return value of a column → number of rows."""
    query = sql.SQL("SELECT {0}, count(*) FROM {1} GROUP BY 1").format(
        sql.Identifier(column), sql.Identifier(table)
    )
    return dict(connection.execute(query).fetchall())


def read_pipelines(prefect: str, opened_at: float) -> list[Pipeline]:
    """Read all flow runs, in the order of their numbers."""
    with psycopg.connect(prefect) as connection:
        rows: list[tuple[str, str, datetime, datetime]] = connection.execute(
            "SELECT parameters->'overrides'->>0, state_name, start_time, end_time FROM flow_run"
            " WHERE end_time IS NOT NULL"
        ).fetchall()
    return sorted(
        (
            Pipeline(
                int(seed.partition("=")[2]),
                state,
                round(started.timestamp() - opened_at, 2),
                round(ended.timestamp() - opened_at, 2),
            )
            for seed, state, started, ended in rows
        ),
        key=lambda each: each.number,
    )


def count_steps(rows: Iterable[tuple[int, str, str]], pipelines: int) -> dict[str, int]:
    """Return what was lost and what was doubled, from (pipeline, step, event) in the order of time."""
    histories: dict[tuple[int, str], list[str]] = {}
    for number, step, event in rows:
        histories.setdefault((number, step), []).append(event)
    done = [events.count("done") for events in histories.values()]
    once, retried = ["started", "done"], ["started", "lost", "started", "done"]
    expected = pipelines * STEPS_OF_A_PIPELINE
    return {
        "steps expected": expected,
        "steps done": sum(times > 0 for times in done),
        "steps lost": expected - sum(times > 0 for times in done),
        "steps done twice": sum(times > 1 for times in done),
        "first attempts lost on purpose, and retried": sum(
            events == retried for events in histories.values()
        ),
        "steps with any other history": sum(events not in (once, retried) for events in histories.values()),
    }


def count(table: str, prefect: str, pipelines: int) -> dict[str, Any]:
    """Return the steps by the table that they write, and the runs by Prefect's own."""
    with psycopg.connect(table) as connection:
        rows: list[tuple[int, str, str]] = connection.execute(
            "SELECT pipeline, stage, event FROM events ORDER BY at"
        ).fetchall()
    with psycopg.connect(prefect) as connection:
        in_prefect = {
            f"{what} runs in Prefect": counts(connection, "state_name", f"{what}_run")
            for what in ("flow", "task")
        }
    described = {
        what: ", ".join(f"{state} {number:,}" for state, number in sorted(states.items()))
        for what, states in in_prefect.items()
    }
    return {**count_steps(rows, pipelines), **described}


def speed(
    pipelines: Sequence[Pipeline],
    table: str,
    samples: Sequence[Sample],
    options: argparse.Namespace,
    requests: int,
) -> dict[str, Any]:
    """Return throughput, waiting times and load; a "full" sample has pipelines waiting and the first ones ended."""
    with psycopg.connect(table) as connection:
        pauses = [
            float(seconds)
            for (seconds,) in connection.execute(
                "SELECT extract(epoch FROM started - done) FROM ("
                " SELECT event, at AS started, lag(event) OVER by_time AS before, lag(at) OVER by_time AS done,"
                " stage FROM events WINDOW by_time AS (PARTITION BY pipeline ORDER BY at)) AS pairs"
                " WHERE event = 'started' AND before = 'done' AND stage IN ('reward', 'value', 'policy', 'evaluation')"
            )
        ]
    ends = max(each.ended for each in pipelines)
    took = [each.ended - each.started for each in pipelines]
    waited = [each.started for each in pipelines]
    refills = refill_seconds(pipelines, options.slots)
    full = [each for each in samples if each.waiting and each.ended] or list(samples)
    mean = {
        field.name: sum(getattr(each, field.name) for each in full) / len(full) for field in fields(Sample)
    }
    return {
        "seconds until all had ended": round(ends, 1),
        "pipelines per minute": round(60 * len(pipelines) / ends, 1),
        "seconds of a pipeline (50, 99 %, most)": quantiles(took),
        "seconds in the queue (50, 99 %, most)": quantiles(waited),
        "seconds from a slot's end to its next start (50, 99 %, most)": quantiles(refills),
        "seconds between two stages of a pipeline (50, 99 %, most)": quantiles(pauses),
        "slots in use while any pipeline waited": f"{mean['running'] / options.slots:.1%}",
        "HTTP requests of the workers, per second": round(requests / ends, 1),
        "HTTP requests per pipeline": round(requests / len(pipelines), 1),
        "commits of PostgreSQL per second": round(mean["commits_per_second"], 1),
        "cores used: Prefect's server": round(mean["prefect_cpu"], 2),
        "cores used: PostgreSQL": round(mean["postgres_cpu"], 2),
        "cores used: workers": round(mean["workers_cpu"], 2),
        "load average of the machine": round(mean["load_average"], 1),
        "memory of Prefect's server, MiB": round(max(each.prefect_mib for each in samples)),
    }


def refill_seconds(pipelines: Sequence[Pipeline], slots: int) -> list[float]:
    """Return, for each end of a pipeline while others waited, how long it took until the next start that it made room for.

    The start number ``slots + k`` cannot come before the end number ``k``.
    """
    starts = sorted(each.started for each in pipelines)
    ends = sorted(each.ended for each in pipelines)
    return [start - end for start, end in zip(starts[slots:], ends, strict=False)]


def quantiles(values: Sequence[float]) -> str:
    """Return the median, the 99 % quantile and the largest."""
    if not values:
        return "none"
    ordered = sorted(values)
    picked = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99, 1.0)]
    return ", ".join(f"{each:.2f}" for each in picked)


def write(
    output: Path,
    facts: dict[str, Any],
    pipelines: Sequence[Pipeline],
    samples: Sequence[Sample],
    *,
    slots: int,
) -> None:
    """Write the tables and the plot."""
    lines = [f"| {name} | {value} |" for name, value in facts.items()]
    (output / "summary.md").write_text("\n".join(["| | |", "|---|---|", *lines]) + "\n")
    for name, rows in (("pipelines.csv", pipelines), ("load.csv", samples)):
        with (output / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(each) for each in rows)
    draw(output / "plot.png", pipelines, samples, slots=slots)


def draw(path: Path, pipelines: Sequence[Pipeline], samples: Sequence[Sample], *, slots: int) -> None:
    """Draw slots in use, the queue and the load against time, and how long pipelines waited."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((use, queue), (load, wait)) = pyplot.subplots(2, 2, figsize=(11, 6.5))
    minutes = [each.seconds / 60 for each in samples]
    use.plot(minutes, [each.running for each in samples], label="slots in use")
    use.axhline(slots, color="grey", linewidth=0.8, linestyle="--", label="slots")
    queue.plot(minutes, [each.waiting for each in samples], label="waiting")
    queue.plot(minutes, [each.ended for each in samples], label="ended")
    for name, label in (
        ("prefect_cpu", "Prefect's server"),
        ("postgres_cpu", "PostgreSQL"),
        ("workers_cpu", "workers"),
    ):
        load.plot(minutes, [getattr(each, name) for each in samples], label=label)
    wait.hist([each.started / 60 for each in pipelines], bins=30, label="minutes in the queue")
    for axes, ylabel in ((use, "pipelines"), (queue, "pipelines"), (load, "cores")):
        axes.set_ylabel(ylabel)
        axes.set_xlabel("minutes since the workers started")
    wait.set_ylabel("pipelines")
    wait.set_xlabel("minutes in the queue")
    for axes in (use, queue, load):
        axes.legend(loc="best", fontsize=8)
    for axes in (use, queue, load, wait):
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=100)

"""Check the schedule of a deployment before Prefect gets it: its server computes the next dates of all schedules in one
loop.

A rule whose next date takes long to find blocks that loop, and so the server, for everybody. A date that never comes,
or is beyond the year 9999, starts nothing, and fills the server's log with tracebacks.
"""

import datetime
import math
import subprocess
import sys
from typing import Any

from prefect._vendor.croniter.croniter import CroniterError, croniter
from prefect.client.schemas.schedules import SCHEDULE_TYPES, CronSchedule, construct_schedule
from pydantic import ValidationError

MOST_SECONDS = 10 * 366 * 86_400
"""Longest interval: ten years."""
_CPU_SECONDS = 3
"""Most processor time in which the next date of a rule must be found; rules with a daily date take some milliseconds."""
_MEMORY = 1 << 30
_WALL_SECONDS = 120

_NEXT_DATE = f"""
import resource, sys
from datetime import datetime
from dateutil.rrule import rrulestr
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_SECONDS}, {_CPU_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
rule = rrulestr(sys.stdin.read(), dtstart=datetime(2020, 1, 1), ignoretz=True)  # Prefect begins at that date
print(next(iter(rule.xafter(datetime.now(), count=1, inc=True)), ""))
"""


def schedule_of(
    *, cron: str | None, interval: float | None, rrule: str | None, timezone: str | None
) -> SCHEDULE_TYPES | None:
    """Return the schedule that the options describe; None if they give no time.

    Raises:
        ValueError: the options are no schedule, or one that is never due or takes Prefect's server too long.
    """
    times: dict[str, Any] = {"cron": cron, "interval": interval, "rrule": rrule}
    named = [name for name, value in times.items() if value is not None]
    if not named:
        if timezone:
            raise ValueError(
                f"--timezone {timezone} is that of a schedule; add --cron, --interval or --rrule"
            )
        return None
    if len(named) > 1:
        raise ValueError(f"{', '.join(f'--{name}' for name in named)} exclude each other; give one of them")
    if interval is not None:
        _check_interval(interval)
    try:
        schedule = construct_schedule(**times, timezone=timezone)
    except ValidationError as error:
        reasons = "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in error.errors())
        raise ValueError(f"the schedule is refused: {' '.join(reasons.split())[:500]}; correct it") from None
    if isinstance(schedule, CronSchedule):
        _check_cron(schedule.cron)
    if rrule is not None:
        _check_rule(rrule)
    return schedule


def _check_interval(seconds: float) -> None:
    if not (math.isfinite(seconds) and 1 <= seconds <= MOST_SECONDS):
        raise ValueError(
            f"--interval={seconds:g} is not between 1 and {MOST_SECONDS:,} seconds (ten years); for a single start leave it out and use "
            "`prefect deployment run`"
        )


def _check_cron(cron: str) -> None:
    library: Any = croniter  # the library has no type annotations
    try:
        library(cron, datetime.datetime.now(datetime.UTC)).get_next(datetime.datetime)
    except CroniterError as error:
        raise ValueError(f"--cron={cron!r} is never due ({error}); name a day that there is") from None


def _check_rule(rrule: str) -> None:
    """Find the next date in a separate process, since for some rules the search never ends."""

    try:
        found = subprocess.run(
            [sys.executable, "-I", "-c", _NEXT_DATE],
            input=rrule,
            capture_output=True,
            text=True,
            timeout=_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(_too_slow(rrule)) from None
    if found.returncode < 0:
        raise ValueError(_too_slow(rrule))
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["unknown"])[-1]
        raise ValueError(
            f"--rrule={rrule[:200]!r} is refused ({reason[:300]}); write a rule of RFC 5545, such as FREQ=DAILY"
        )
    if not found.stdout.strip():
        raise ValueError(f"--rrule={rrule[:200]!r} is never due from now on; name a later date")


def _too_slow(rrule: str) -> str:
    return (
        f"--rrule={rrule[:200]!r}: its next date was not found within {_CPU_SECONDS} s, and Prefect's server looks for it again and "
        "again, for all schedules in one loop; begin it near today (DTSTART), let it repeat less often, or use --interval"
    )

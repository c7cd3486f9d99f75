"""A schedule that is never due, beyond Prefect's dates or too slow to work out is refused before Prefect gets it."""

import asyncio
import datetime
import math
from functools import partial
from typing import Any

import pytest

from vantage.flows.pools.schedules import schedule_of

slow = partial(pytest.param, marks=pytest.mark.slow)
NOTHING: dict[str, Any] = {"cron": None, "interval": None, "rrule": None, "timezone": None}


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300, 3e9, 0.5, -1.0])
def test_an_interval_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"--interval=\S+ is not between 1 and 316,224,000 seconds"):
        schedule_of(**NOTHING | {"interval": seconds})


def test_a_time_that_never_comes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--cron='0 2 30 2 \*' is never due .*; name a day"):
        schedule_of(**NOTHING | {"cron": "0 2 30 2 *"})


@pytest.mark.parametrize(
    ("rrule", "message"),
    [
        ("FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30", "its next date was not found within 3 s"),
        slow("FREQ=MINUTELY;INTERVAL=0", "its next date was not found within 3 s"),
        slow("DTSTART:19000101T000000\nRRULE:FREQ=SECONDLY", "its next date was not found within 3 s"),
        ("FREQ=DAILY;COUNT=3", "is never due from now on"),
        ("FREQ=DAILY;UNTIL=20210101T000000Z", "is never due from now on"),
        ("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30", "is never due from now on"),
        ("FREQ=SOMETIMES", "the schedule is refused: Invalid RRule string"),
    ],
)
def test_a_rule_that_would_stop_prefects_scheduler_is_refused(rrule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_of(**NOTHING | {"rrule": rrule})


@pytest.mark.parametrize(
    "given",
    [
        {"cron": "0 2 * * *", "timezone": "Europe/Berlin"},
        {"cron": "0 0 29 2 *"},
        {"cron": "@daily"},
        {"interval": 1.0},
        {"interval": 3600.0},
        {"interval": 316_224_000.0},
        {"rrule": "FREQ=WEEKLY;BYDAY=MO;BYHOUR=2;BYMINUTE=0;BYSECOND=0", "timezone": "Europe/Berlin"},
        {"rrule": "DTSTART:20260101T020000Z\nRRULE:FREQ=HOURLY;UNTIL=20990101T000000Z"},
    ],
    ids=str,
)
def test_what_is_accepted_has_a_next_date_in_prefects_server(given: dict[str, Any]) -> None:
    """Prefect's own classes of the server work it out, as its scheduler does."""
    from prefect.server.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule

    made = schedule_of(**NOTHING | given)
    assert made is not None
    kind = {"cron": CronSchedule, "interval": IntervalSchedule, "rrule": RRuleSchedule}[next(iter(given))]
    served = kind.model_validate(made.model_dump(mode="json"))
    [date] = asyncio.run(served.get_dates(n=1, start=datetime.datetime.now(datetime.UTC)))
    assert date >= datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)

"""Readings of the machine are bounded in number, and equal what psutil and NVML report."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from vantage.attempts import usage
from vantage.attempts.usage import EVERY_SECONDS, MOST, UsageMeter
from vantage.schemas.records.usage import Usage


class Clock:
    """Seconds that pass when the test lets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def cpu(monkeypatch: pytest.MonkeyPatch, *times: tuple[float, float]) -> None:
    """Set the (busy, idle) seconds of all processors, at the start and at each reading."""
    waiting = iter(times)

    class Times(tuple):  # type: ignore[type-arg]
        idle = property(lambda self: self[1])

    monkeypatch.setattr(usage.psutil, "cpu_times", lambda: Times(next(waiting)))


def memory(monkeypatch: pytest.MonkeyPatch, used: int, percent: float) -> None:
    monkeypatch.setattr(usage.psutil, "virtual_memory", lambda: SimpleNamespace(used=used, percent=percent))


def test_a_reading_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four seconds are busy, and then one of four."""
    cpu(monkeypatch, (10.0, 90.0), (13.0, 91.0), (14.0, 94.0))
    memory(monkeypatch, used=2_000_000_000, percent=12.5)
    clock = Clock()
    meter = UsageMeter(clock=clock)
    meter.poll()
    clock.now += EVERY_SECONDS
    meter.poll()
    meter.poll()
    found = meter.finish()
    assert found.readings == {
        "cpu_utilization_percentage": (75.0, 25.0),
        "system_memory_usage_megabytes": (2000.0, 2000.0),
        "system_memory_usage_percentage": (12.5, 12.5),
    }
    assert len(found.times) == 2
    assert found.times[0] <= found.times[1]


def test_a_short_attempt_has_one_reading() -> None:
    found = UsageMeter().finish()
    assert len(found.times) == 1
    assert found.readings["system_memory_usage_megabytes"][0] == pytest.approx(
        psutil.virtual_memory().used / 1e6, rel=0.5
    )


def test_a_month_has_no_more_readings_than_an_hour() -> None:
    clock = Clock()
    meter = UsageMeter(clock=clock)
    for _ in range(30 * 24 * 60):
        clock.now += 60.0
        meter.poll()
    found = meter.finish()
    assert MOST // 2 <= len(found.times) <= MOST
    assert {len(each) for each in found.readings.values()} == {len(found.times)}


class Nvml(SimpleNamespace):
    """Two GPUs, of which the second tells nothing of its power."""

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=(gpu + 1) * 10**9, total=80 * 10**9)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=90 + gpu)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == 1:
            raise RuntimeError("not supported")
        return 400_000


def test_gpus_are_numbered_from_0_and_what_one_does_not_tell_is_left_out() -> None:
    found = UsageMeter(("0", "1"), nvml=Nvml()).finish().readings  # type: ignore[arg-type]
    gpus = {name: values for name, values in found.items() if name.startswith("gpu")}
    assert gpus == {
        "gpu_0_memory_usage_megabytes": (1000.0,),
        "gpu_0_memory_usage_percentage": (1.2,),
        "gpu_0_utilization_percentage": (90.0,),
        "gpu_0_power_usage_watts": (400.0,),
    }


def test_a_gpu_is_the_one_that_the_attempt_was_given() -> None:
    """The attempt's first is the third of the machine, which uses 3 GB."""
    found = UsageMeter(("2",), nvml=Nvml()).finish().readings  # type: ignore[arg-type]
    assert found["gpu_0_memory_usage_megabytes"] == (3000.0,)


def test_time_of_guests_is_counted_once_and_a_wait_for_the_disk_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 s, 2 are users' (1 of these a guest's), 3 are idle and 5 are waiting, so the CPU is 20 % busy."""
    names = "user nice system idle iowait guest guest_nice"
    Times = namedtuple("Times", names)  # type: ignore[misc]
    waiting = iter([Times(0, 0, 0, 0, 0, 0, 0), Times(2, 0, 0, 3, 5, 1, 0)])
    monkeypatch.setattr(usage.psutil, "cpu_times", lambda: next(waiting))
    assert UsageMeter().finish().readings["cpu_utilization_percentage"] == (20.0,)


def test_a_reading_keeps_its_time_when_every_second_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test as many megabytes are in use as seconds have passed."""
    clock = Clock()
    monkeypatch.setattr(usage.time, "time_ns", lambda: round(clock.now * 1e9))
    monkeypatch.setattr(
        usage.psutil, "virtual_memory", lambda: SimpleNamespace(used=clock.now * 1e6, percent=1.0)
    )
    meter = UsageMeter(clock=clock)
    for _ in range(5 * MOST):
        clock.now += EVERY_SECONDS
        meter.poll()
    found = meter.finish()
    assert len(found.times) <= MOST
    assert found.readings["system_memory_usage_megabytes"] == tuple(time / 1000 for time in found.times)


def test_readings_go_through_json() -> None:
    found = Usage(times=(1, 2), readings={"cpu_utilization_percentage": (None, 3.5)})
    assert Usage.model_validate_json(found.model_dump_json()) == found

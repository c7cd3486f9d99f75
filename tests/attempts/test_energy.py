"""Energy is read from counters: here those of a made-up folder of RAPL zones and a made-up NVML, worked out by hand."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.attempts import energy
from vantage.attempts import run_attempt as attempts
from vantage.attempts.energy import EnergyMeter
from vantage.attempts.jobs import request_for, steps_of
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.run_attempt import run_attempt
from vantage.runs.resolving import load_resolved
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import AttemptOutcome, Failure, Share
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.job import StageJob, StageResult

RANGE = 262_143_328_850
"""Microjoules after which the counter of a real package begins anew."""


class Zones:
    """The kernel's folder, with as many packages as are given, in microjoules."""

    def __init__(self, folder: Path, *packages: int) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for number, used in enumerate(packages):
            self.zone(f"intel-rapl:{number}", f"package-{number}", used)
            self.zone(f"intel-rapl:{number}:0", "core", 10**9)  # a part of the package
        self.zone("intel-rapl-mmio:0", "package-0", 10**9)  # a second path to the first package
        self.zone("intel-rapl:9", "psys", 10**9)
        (folder / "intel-rapl").mkdir()

    def zone(self, name: str, called: str, used: int) -> None:
        (self.folder / name).mkdir()
        (self.folder / name / "name").write_text(f"{called}\n")
        (self.folder / name / "max_energy_range_uj").write_text(f"{RANGE}\n")
        self.set(name, used)

    def set(self, name: str, used: int) -> None:
        (self.folder / name / "energy_uj").write_text(f"{used}\n")


class Nvml(SimpleNamespace):
    """NVML's millijoules of each GPU since its driver was loaded, by index and UUID; None without a counter."""

    def __init__(self, **gpus: int | None) -> None:
        super().__init__(gpus=gpus, open=0)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.gpus)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid.replace("-", "_") not in self.gpus:
            raise RuntimeError("Not Found")
        return uuid.replace("-", "_")

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:
        if self.gpus[device] is None:
            raise RuntimeError("Not Supported")
        return self.gpus[device]


def meter(zones: Zones | Path, *gpus: str, nvml: Any = None) -> EnergyMeter:
    powercap = zones.folder if isinstance(zones, Zones) else zones
    return EnergyMeter(gpus, powercap=powercap, nvml=nvml)


def test_two_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    """1.5 J of one package and 0.25 J of the other are added. The zones core, mmio and psys would count them twice."""
    zones = Zones(tmp_path / "powercap", 7_000_000, 100)
    began = meter(zones)
    zones.set("intel-rapl:0", 8_500_000)
    zones.set("intel-rapl:1", 250_100)
    for other in ("intel-rapl:0:0", "intel-rapl-mmio:0", "intel-rapl:9"):
        zones.set(other, 5 * 10**9)
    assert began.finish() == Energy(cpu_joules=1.75)


def test_a_counter_that_begins_anew_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter wraps from 2 J below its range to 3 J, which makes 5 J, and wraps again to 1 J, which makes the range
    less 2 J. A poll sees each round; polls within ten seconds of the one before read nothing.
    """
    now = 100.0
    monkeypatch.setattr(energy.time, "monotonic", lambda: now)
    zones = Zones(tmp_path / "powercap", RANGE - 2_000_000)
    began = meter(zones)
    zones.set("intel-rapl:0", 3_000_000)
    now += 11
    began.poll()
    zones.set("intel-rapl:0", 999_000_000)  # a poll that comes too early does not read the counter
    began.poll()
    zones.set("intel-rapl:0", 1_000_000)
    found = began.finish()
    assert found is not None
    assert found.cpu_joules == pytest.approx(5 + RANGE / 1e6 - 2)


def test_a_part_of_what_the_machine_has_is_not_shown_as_the_whole(tmp_path: Path) -> None:
    """One of two packages cannot be read: at the start, or from some moment on."""
    zones = Zones(tmp_path / "powercap", 1, 1)
    began = meter(zones)
    (zones.folder / "intel-rapl:1" / "energy_uj").unlink()
    assert began.finish() is None
    assert meter(zones).finish() is None


@pytest.mark.parametrize("powercap", ["missing", "empty"])
def test_a_machine_without_counters_has_none(tmp_path: Path, powercap: str) -> None:
    (tmp_path / "empty").mkdir()
    assert meter(tmp_path / powercap).finish() is None


def test_a_counter_that_only_root_may_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zones, read = Zones(tmp_path / "powercap", 1), Path.read_text

    def refusing(self: Path, *given: Any, **more: Any) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *given, **more)

    monkeypatch.setattr(Path, "read_text", refusing)
    assert meter(zones).finish() is None


def test_several_gpus_by_index_and_uuid(tmp_path: Path) -> None:
    """The attempt's GPUs used 1.5 J and 2 J; the third is another attempt's. The connection to the driver is closed."""
    nvml = Nvml(GPU_a=1000, GPU_b=5000, GPU_c=7)
    began = meter(tmp_path, "0", "GPU-b", nvml=nvml)
    nvml.gpus.update(GPU_a=2500, GPU_b=7000, GPU_c=10**9)
    assert began.finish() == Energy(gpu_joules=3.5)
    assert nvml.open == 0


def test_a_gpu_is_the_one_that_the_attempt_was_given(tmp_path: Path) -> None:
    """The third and second GPU of the machine, which are the attempt's first and second, used 4 J and 0.5 J."""
    nvml = Nvml(GPU_a=0, GPU_b=0, GPU_c=0)
    began, last = meter(tmp_path, "2", "1", nvml=nvml), meter(tmp_path, "2", nvml=nvml)
    nvml.gpus.update(GPU_a=10**9, GPU_b=500, GPU_c=4000)
    assert began.finish() == Energy(gpu_joules=4.5)
    assert last.finish() == Energy(gpu_joules=4.0)


@pytest.mark.parametrize("after", [None, 3], ids=["not supported", "driver loaded anew"])
def test_a_gpu_without_a_counter_is_not_guessed(tmp_path: Path, after: int | None) -> None:
    nvml = Nvml(GPU_a=1000, GPU_b=1000)
    began = meter(tmp_path, "0", "1", nvml=nvml)
    nvml.gpus["GPU_b"] = after
    assert began.finish() is None
    assert meter(tmp_path, "MIG-x", nvml=nvml).finish() is None, "a part of a GPU has no counter of its own"


def test_without_the_driver_gpus_are_not_measured_and_packages_are(tmp_path: Path) -> None:
    """Where the installed library finds no driver, the 1 J of the package is the whole measurement."""
    zones = Zones(tmp_path / "powercap", 0)
    missing = SimpleNamespace(nvmlInit=lambda: (_ for _ in ()).throw(OSError("no driver")))
    began = meter(zones, "0", nvml=missing)
    zones.set("intel-rapl:0", 1_000_000)
    assert began.finish() == Energy(cpu_joules=1.0)


class UsesEnergy:
    """A launcher without a process: it uses 2.5 J of the first package, and may fail."""

    def __init__(self, zones: Zones, *, fails: bool = False) -> None:
        self.zones, self.fails = zones, fails

    def launch(
        self,
        job: StageJob,
        *,
        log: Path,
        share: Share | None = None,
        stop: threading.Event | None = None,
        on_poll: Callable[[], None] | None = None,
        function: str = "",
        hang_seconds: float | None = None,
    ) -> StageResult:
        self.zones.set("intel-rapl:0", 2_500_000)
        if on_poll is not None:
            on_poll()
        if self.fails:
            raise StageFailed(Failure(exit_code=1, cause="internal", message="m", remedy="r"), log=log)
        (job.output / "weights.txt").write_text("w")
        return StageResult(metrics={}, tokenizer_digest="d" * 64)


@pytest.mark.parametrize("fails", [False, True])
def test_an_attempt_says_what_it_used_also_where_it_failed_and_one_that_computed_nothing_says_nothing(
    workspace: Workspace, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    zones = Zones(tmp_path / "powercap", 0)
    monkeypatch.setattr(attempts, "EnergyMeter", lambda gpus: EnergyMeter(gpus, powercap=zones.folder))
    asked = request_for(
        steps_of(load_resolved(recipe_file)[0])["model"],
        {},
        run_id="r",
        storage="unused",
        log=tmp_path / "log",
    )
    launcher: Any = UsesEnergy(zones, fails=fails)
    outcome = run_attempt(asked, storage=workspace.storage, launcher=launcher)
    assert (outcome.status, outcome.energy) == ("failed" if fails else "made", Energy(cpu_joules=2.5))
    assert AttemptOutcome.model_validate_json(outcome.model_dump_json()) == outcome
    if not fails:
        again = run_attempt(asked, storage=workspace.storage, launcher=launcher)
        assert (again.status, again.energy) == ("reused", None)

"""Measure the energy of an attempt by counters of the hardware: NVML's of each GPU, and RAPL's of each processor package.

A GPU belongs to one attempt, so its energy is the attempt's. A package's counter knows no processes: each of several
parallel attempts gets all energy that the package used meanwhile. Counters that cannot be read are left out, never
guessed.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from vantage.attempts.nvml import handle_of, initialised
from vantage.schemas.records.energy import Energy

POWERCAP = Path("/sys/class/powercap")
READ_EVERY_SECONDS = 10.0
"""Seconds between two readings. A package's counter starts again after 60 kJ to 260 kJ, which a large package uses in
five minutes."""


class EnergyMeter:
    """Reads the counters at its construction, at some polls, and at the end."""

    def __init__(
        self, gpus: Sequence[str] = (), *, powercap: Path = POWERCAP, nvml: ModuleType | None = None
    ) -> None:
        """
        Args:
            gpus: the GPUs of the attempt, as CUDA_VISIBLE_DEVICES names them.
            powercap: the kernel's folder of RAPL zones.
            nvml: the module ``pynvml``; None: the installed one.
        """
        self._packages = [_Package(zone) for zone in _packages(powercap)]
        self._gpus = tuple(gpus)
        self._nvml = nvml
        self._gpus_before = self._of_gpus()
        self._next_read = time.monotonic() + READ_EVERY_SECONDS

    def poll(self) -> None:
        """Read the counters of the packages if it is time, often enough to see every wrap-around."""
        if time.monotonic() >= self._next_read:
            self._next_read = time.monotonic() + READ_EVERY_SECONDS
            self.read_packages()

    def read_packages(self) -> None:
        """Add the energy that each package has used since it was last read."""
        for package in self._packages:
            package.read()

    def finish(self) -> Energy | None:
        """Return the energy used since the meter was made; None: nothing on this machine can be measured."""
        self.read_packages()
        found = Energy(gpu_joules=self._gpu_joules(), cpu_joules=self._cpu_joules())
        return None if found == Energy() else found

    def _cpu_joules(self) -> float | None:
        """Return the joules of all packages; None if one cannot be read, since a part would look like the whole."""
        used = [package.joules for package in self._packages]
        known = [each for each in used if each is not None]
        return sum(known) if known and len(known) == len(used) else None

    def _gpu_joules(self) -> float | None:
        before, after = self._gpus_before, self._of_gpus()
        # the counter fell: the driver was loaded again
        if before is None or after is None or after < before:
            return None
        return after - before

    def _of_gpus(self) -> float | None:
        """Return joules that all GPUs of the attempt together have used since the driver was loaded; None: not measured."""
        if not self._gpus:
            return None
        # no driver, no library, or a GPU without a counter (an older GPU, or a part of one)
        with suppress(Exception), initialised(self._nvml) as nvml:
            return sum(_millijoules(nvml, gpu) for gpu in self._gpus) / 1000
        return None


class _Package:
    """A processor package, and the energy that it has used since this object was made."""

    def __init__(self, zone: Path) -> None:
        self._zone = zone
        self._used = 0
        self._last = _microjoules(zone / "energy_uj")

    @property
    def joules(self) -> float | None:
        """Return joules; None: a reading failed, so the total is unknown."""
        return None if self._last is None else self._used / 1e6

    def read(self) -> None:
        if self._last is None:
            return
        now = _microjoules(self._zone / "energy_uj")
        if now is not None and now < self._last:  # the counter has wrapped around
            whole = _microjoules(self._zone / "max_energy_range_uj")
            self._used += 0 if whole is None else whole
            now = now if whole is not None else None
        if now is not None:
            self._used += now - self._last
        self._last = now


def _packages(powercap: Path) -> list[Path]:
    """Return one zone for each package, without parts of packages and second zones of one package
    (``intel-rapl-mmio``)."""
    zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    return [zone for zone in zones if _text(zone / "name").partition("-")[0] == "package"]


def _microjoules(counter: Path) -> int | None:
    """Return the number in the file; None if it is missing or this process may not read it (since 2020 only root may,
    unless the machine's owner allows it)."""
    text = _text(counter)
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _millijoules(nvml: ModuleType, gpu: str) -> int:
    """Return the millijoules since the driver was loaded; NVML raises an error without such a GPU or counter."""
    return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle_of(nvml, gpu)))

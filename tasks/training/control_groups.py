"""Read the kernel's limits on a group of processes (a container, a Slurm job, a systemd unit), of both versions of cgroups.

Where a group is found: cgroups(7), "/proc files"; the files: the kernel's admin-guide/cgroup-v2 and cgroup-v1/memory.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def oom_kills(proc: Path = PROC) -> int:
    """Return the number of processes of this process's group that the kernel has killed for lack of memory.

    If the kernel counts for no group, returns the count of the whole machine; 0 if that is unknown, too.
    """
    for group in _groups("memory", proc):
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            if (count := _numbers(group / name).get("oom_kill")) is not None:
                return count
    return _numbers(proc / "vmstat").get("oom_kill", 0)


def memory_limit(proc: Path = PROC) -> int | None:
    """Return the bytes that this process's group may use; None: no group limits it."""
    limits = [
        int(text)
        for group in _groups("memory", proc)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(group / name).strip()).isdecimal()
    ]
    least = min(limits, default=None)
    return (
        None if least is None or least >= 2**62 else least
    )  # version 1 writes no limit as a number of pages


def available_memory(proc: Path = PROC) -> int:
    """Return the bytes that this process can still take: the machine's free bytes, or fewer if its group's limit leaves
    fewer.

    Files in the page cache count as free if the kernel can drop them at once. Returns 0 if the kernel does not report
    it.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE)
    free = [0 if found is None else 1024 * int(found[1])]
    for group in _groups("memory", proc):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2, version 1
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, taken = (_read(group / name).strip() for name in (limit, used))
            if most.isdecimal() and taken.isdecimal():
                dropped = _numbers(group / "memory.stat").get(cached, 0)
                free.append(max(0, int(most) - int(taken) + dropped))
    return min(free)


def cpu_limit(proc: Path = PROC) -> float | None:
    """Return the CPUs whose time this process's group may use; None: no group limits it."""
    found = []
    for group in _groups("cpu", proc):
        quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        if not quota:  # version 1
            quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def whole_cpus(cpus: int, proc: Path = PROC) -> int:
    """Return ``cpus``, or the whole CPUs of the group's quota if these are fewer; at least one."""
    limit = cpu_limit(proc)
    return cpus if limit is None else max(1, min(cpus, math.floor(limit)))


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the folder of this process's group, then those of the groups around it, of each version that has the controller."""
    mounts = _read(proc / "self" / "mountinfo")
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        found = _mount(mounts, None if number == "0" else controller, path)
        if found is None:
            continue
        root, folder = found
        inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path(path.lstrip("/"))
        if ".." in inside.parts:  # the group is above what this container sees
            inside = Path()
        yield folder / inside
        yield from (folder / parent for parent in inside.parents if inside.parts)


def _mount(mounts: str, controller: str | None, group: str) -> tuple[str, Path] | None:
    """Return (root within the hierarchy, folder) of a mount: of version 2, or of a controller of version 1.

    Several parts of one hierarchy may be mounted. Returns the first mount that contains the group, else the first of
    all.
    """
    found = []
    for line in mounts.splitlines():
        mount, _, of = line.partition(" - ")
        fields, (kind, *_, options) = mount.split(), of.split() or ("", "")
        is_it = (
            kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(",")
        )
        if is_it:
            found.append((_unescaped(fields[3]), Path(_unescaped(fields[4]))))
    return next((each for each in found if Path(group).is_relative_to(each[0])), found[0] if found else None)


def _unescaped(path: str) -> str:
    """Return a path of ``mountinfo``, which writes spaces as ``\\\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _numbers(path: Path) -> dict[str, int]:
    """Return the file's lines ``name number``."""
    fields = (line.split() for line in _read(path).splitlines())
    return {each[0]: int(each[1]) for each in fields if len(each) == 2 and each[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())  # mountinfo has names of any bytes
    except OSError:
        return ""

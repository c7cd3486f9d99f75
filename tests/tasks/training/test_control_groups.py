"""Limits and kills of a group of processes are read from files as kernels, containers, systemd and Slurm write them."""

import os
from pathlib import Path

import pytest

from vantage.attempts.machine import available_cpus
from vantage.tasks.training.control_groups import (
    available_memory,
    cpu_limit,
    memory_limit,
    oom_kills,
    whole_cpus,
)


class Host:
    """A ``/proc`` and the folders that its ``mountinfo`` names."""

    def __init__(self, folder: Path, *, groups: str, mounts: dict[str, str]) -> None:
        """Write the files of a machine. ``mounts``: folder below ``sys`` → ``ROOT TYPE OPTIONS``."""
        self.proc, self.sys = folder / "proc", folder / "sys fs"
        lines = ["22 1 0:20 / /proc rw,nosuid - proc proc rw"]
        for number, (name, described) in enumerate(mounts.items(), 30):
            root, kind, options = described.split()
            place = str(self.sys / name).replace(" ", r"\040")
            lines.append(
                f"{number} 22 0:{number} {root} {place} rw,relatime shared:9 - {kind} {kind} {options}"
            )
        self.write(self.proc / "self" / "mountinfo", "\n".join(lines) + "\n")
        self.write(self.proc / "self" / "cgroup", groups)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, **files: str) -> None:
        for name, text in files.items():
            self.write(self.sys / path / name.replace("__", "."), text)


V2 = {"": "/ cgroup2 rw,nsdelegate"}
EVENTS = "low 0\nhigh 0\nmax 3\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
NO_LIMIT = "9223372036854771712\n"


def test_version_2_in_a_container_whose_group_is_the_root_of_what_it_sees(tmp_path: Path) -> None:
    host = Host(tmp_path, groups="0::/\n", mounts=V2)
    host.group("", memory__events=EVENTS.format(5), memory__max="1073741824\n", cpu__max="150000 100000\n")
    assert (oom_kills(host.proc), memory_limit(host.proc), cpu_limit(host.proc)) == (5, 2**30, 1.5)


def test_version_2_on_a_host_reads_its_own_group_and_the_limits_around_it(tmp_path: Path) -> None:
    """A step of a Slurm job reads the limits of the job. What the kernel has killed in other jobs does not count."""
    host = Host(tmp_path, groups="0::/system.slice/slurmd.service/job_7/step_0/task_0\n", mounts=V2)
    host.group(
        "system.slice/slurmd.service/job_7/step_0/task_0",
        memory__events=EVENTS.format(1),
        memory__max="max\n",
    )
    host.group(
        "system.slice/slurmd.service/job_7",
        memory__events=EVENTS.format(1),
        memory__max="4096\n",
        cpu__max="200000 100000\n",
    )
    host.group(
        "system.slice/slurmd.service",
        memory__events=EVENTS.format(9),
        cpu__max="max 100000\n",
        memory__max="8192\n",
    )
    assert (oom_kills(host.proc), memory_limit(host.proc), cpu_limit(host.proc)) == (1, 4096, 2.0)


V1 = {
    "cpu,cpuacct": "/ cgroup rw,cpu,cpuacct",
    "memory": "/ cgroup rw,memory",
    "systemd": "/ cgroup rw,xattr,name=systemd",
    "unified": "/ cgroup2 rw",
}
V1_GROUPS = (
    "11:memory:/user.slice/ada\n4:cpu,cpuacct:/user.slice\n1:name=systemd:/user.slice\n0::/user.slice\n"
)


def test_version_1(tmp_path: Path) -> None:
    """Limits of control groups of version 1 are read."""
    host = Host(tmp_path, groups=V1_GROUPS, mounts=V1)
    host.group(
        "memory/user.slice/ada", memory__oom_control=CONTROL.format(2), memory__limit_in_bytes=NO_LIMIT
    )
    host.group("memory/user.slice", memory__limit_in_bytes="65536\n")
    host.group("memory", memory__oom_control=CONTROL.format(8), memory__limit_in_bytes=NO_LIMIT)
    host.group("cpu,cpuacct/user.slice", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    host.group("cpu,cpuacct", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert (oom_kills(host.proc), memory_limit(host.proc), cpu_limit(host.proc)) == (2, 65536, 0.5)


def test_version_1_writes_a_large_number_where_nothing_limits_a_group(tmp_path: Path) -> None:
    host = Host(tmp_path, groups="5:memory:/ada\n", mounts={"memory": "/ cgroup rw,memory"})
    host.group("memory/ada", memory__limit_in_bytes=NO_LIMIT)
    assert memory_limit(host.proc) is None


def test_version_1_in_a_container_that_sees_its_own_part_alone(tmp_path: Path) -> None:
    """In Docker without a cgroup namespace the path is the host's, and the container's mount begins there."""
    host = Host(
        tmp_path, groups="5:memory:/docker/4f2a\n", mounts={"memory": "/docker/4f2a cgroup rw,memory"}
    )
    host.group("memory", memory__oom_control=CONTROL.format(3), memory__limit_in_bytes="4096\n")
    assert (oom_kills(host.proc), memory_limit(host.proc)) == (3, 4096)


def test_of_several_mounts_the_one_with_the_group_is_read(tmp_path: Path) -> None:
    """A monitoring container also sees the host's groups, and its name begins with the name of another container."""
    host = Host(
        tmp_path,
        groups="0::/docker/4f2a-1/job\n",
        mounts={
            name: f"{root} cgroup2 rw"
            for name, root in (
                ("other", "/lxc"),
                ("near", "/docker/4f2a"),
                ("own", "/docker/4f2a-1"),
                ("all", "/"),
            )
        },
    )
    for name, kills in (("other", 7), ("near", 8), ("all/docker/4f2a-1/job", 9)):
        host.group(name, memory__events=EVENTS.format(kills), memory__max="1024\n")
    host.group("near/-1/job", memory__events=EVENTS.format(6), memory__max="2048\n")
    host.group("own/job", memory__events=EVENTS.format(3), memory__max="4096\n")
    assert (oom_kills(host.proc), memory_limit(host.proc)) == (3, 4096)


def test_a_mount_with_a_name_that_is_not_utf_8_hides_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path, groups="0::/a\xe9\n", mounts=V2)
    for name in ("mountinfo", "cgroup"):
        file = host.proc / "self" / name
        stick = b"99 22 0:9 / /media/Schl\xfcssel rw - vfat /dev/sdb1 rw\n" if name == "mountinfo" else b""
        file.write_bytes(stick + file.read_text().encode("latin-1"))
    group = Path(os.fsdecode(os.fsencode(host.sys) + b"/a\xe9"))
    host.write(group / "memory.events", EVENTS.format(4))
    host.write(group / "memory.max", "4096\n")
    assert (oom_kills(host.proc), memory_limit(host.proc)) == (4, 4096)


@pytest.mark.parametrize("groups", ["0::/../../other\n", "", "nonsense\n", "0:memory\n"])
def test_where_no_group_counts_the_machine_does(tmp_path: Path, groups: str) -> None:
    host = Host(tmp_path, groups=groups, mounts=V2)
    assert (oom_kills(host.proc), memory_limit(host.proc), cpu_limit(host.proc)) == (0, None, None)
    host.write(host.proc / "vmstat", "pgfault 7\noom_kill 4\nother x\n")
    assert oom_kills(host.proc) == 4
    host.group("", memory__events="nonsense\n\n", memory__max="\n", cpu__max="max\n")
    assert (oom_kills(host.proc), memory_limit(host.proc), cpu_limit(host.proc)) == (4, None, None)


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max", 8), ("100000", 1), ("50000", 1), ("350000", 3), ("9900000", 8)]
)
def test_cpus_are_whole_ones_of_the_quota_and_at_least_one(tmp_path: Path, quota: str, cpus: int) -> None:
    host = Host(tmp_path, groups="0::/\n", mounts=V2)
    host.group("", cpu__max=f"{quota} 100000\n")
    assert whole_cpus(8, host.proc) == cpus


def test_this_machine_can_be_asked() -> None:
    assert oom_kills() >= 0
    assert 1 <= available_cpus() <= len(os.sched_getaffinity(0))


MEMINFO = "MemTotal:       24000 kB\nMemFree:         1000 kB\nMemAvailable:   20000 kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "dropped", "expected"),
    [
        ("max\n", 5_000_000, 1_000_000, 20000 * 1024),  # no group limits it
        ("9000000\n", 5_000_000, 1_000_000, 5_000_000),
        ("4000000\n", 5_000_000, 0, 0),  # the limit was lowered since
        ("99000000000\n", 5_000_000, 0, 20000 * 1024),  # the machine has less
    ],
)
def test_available_memory_is_the_least_of_the_machines_and_the_groups(
    tmp_path: Path, limit: str, used: int, dropped: int, expected: int
) -> None:
    host = Host(tmp_path, groups="0::/job/task\n", mounts=V2)
    host.write(host.proc / "meminfo", MEMINFO)
    host.group("job/task", memory__max="max\n", memory__current="1\n", memory__stat="inactive_file 0\n")
    stat = f"anon 3\ninactive_file {dropped}\n"
    host.group("job", memory__max=limit, memory__current=f"{used}\n", memory__stat=stat)
    assert available_memory(host.proc) == expected


def test_available_memory_under_version_1_and_where_nothing_is_known(tmp_path: Path) -> None:
    host = Host(tmp_path, groups="4:memory:/job\n", mounts={"memory": "/ cgroup rw,memory"})
    host.write(host.proc / "meminfo", MEMINFO)
    host.group("memory/job", memory__limit_in_bytes="9000000\n", memory__usage_in_bytes="5000000\n")
    host.group("memory/job", memory__stat="inactive_file 1\ntotal_inactive_file 500000\n")
    assert available_memory(host.proc) == 4_500_000
    assert available_memory(tmp_path / "none") == 0

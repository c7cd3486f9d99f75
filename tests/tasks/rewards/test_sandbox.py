"""Programs that do their worst hit each limit, see and reach nothing of the machine, and leave nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import read_living
from vantage.schemas.recipe.builtin_verifiers import CodeVerifier
from vantage.tasks.rewards import sandbox
from vantage.tasks.rewards.sandbox import (
    NAMESPACES,
    NotIsolated,
    Ran,
    refuse_without_isolation,
    why_not_isolated,
)

pytestmark = pytest.mark.needs("isolation")

LIMITS = CodeVerifier(source="builtin:code", seconds=1, memory=128, disk=1, output=10_000)
FAILED = Ran("failed", "")
SECRET = "canary-of-this-test"


def ran(program: str, *, stdin: str = "", isolated: bool = True) -> Ran:
    [found] = sandbox.run(LIMITS, program, [{"stdin": stdin}], isolated=isolated)
    return found


def below() -> set[int]:
    return {
        child.pid for child in read_living(psutil.Process().children(recursive=True), psutil.Process.ppid)
    }


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = below()
    yield
    assert below() <= before


def test_this_machine_isolates_programs() -> None:
    assert why_not_isolated() is None
    refuse_without_isolation(LIMITS, name="mine")
    assert sandbox.recorded([LIMITS]) == {"isolation": NAMESPACES}
    assert sandbox.warnings({"mine": LIMITS}) == []


def test_no_time_is_left_to_a_program_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the processor ends it, long before that on the clock."""
    monkeypatch.setattr(sandbox, "CLOCK_FACTOR", 250)
    began = time.monotonic()
    assert ran("while True: pass") == Ran("time", "")
    assert time.monotonic() - began < 200


def test_programs_read_their_input_and_print() -> None:
    assert ran("a, b = map(int, input().split())\nprint(a + b)", stdin="3 4\n") == Ran("ended", "7\n")
    assert ran("import sys; print(sys.stdin.read()[::-1], end='')", stdin="é🙂\n") == Ran("ended", "\n🙂é")
    assert ran("print('x' * 9_999)").status == "ended"


def test_functions_return_json_and_their_prints_do_not_count() -> None:
    program = "def double(a, b):\n    print('noise')\n    return (a * 2, {'b': b})"
    [found] = sandbox.run(LIMITS, program, [{"function": "double", "arguments": [2, "x"]}], isolated=True)
    assert found.status == "ended" and json.loads(found.output) == [4, {"b": "x"}]
    program = "class Solution:\n    def one(self): return 1"
    assert sandbox.run(LIMITS, program, [{"function": "one", "arguments": []}], isolated=True) == [
        Ran("ended", "1")
    ]


def test_a_test_that_fails_is_the_last_and_each_starts_from_nothing() -> None:
    program = "import os, sys\nopen('kept', 'x').write(input())\nprint(os.listdir('.'))\nsys.exit(open('kept').read() == 'b')"
    tests = [{"stdin": each} for each in ("a", "a", "b", "a")]
    listed = Ran("ended", "['kept']\n")
    expected = [listed, listed, Ran("failed", "['kept']\n")]
    assert sandbox.run(LIMITS, program, tests, isolated=True) == expected
    assert sandbox.run(LIMITS, program, tests, isolated=False) == expected


def test_a_program_that_takes_the_next_folder_fails_itself_alone() -> None:
    for taken in (
        "open('../1', 'w').close()",
        "here = os.getcwd(); os.rmdir(here); os.rmdir(os.path.dirname(here))",
    ):
        program = f"import os\n{taken}\nprint(1)"
        found = sandbox.run(LIMITS, program, [{"stdin": ""}] * 3, isolated=False)
        assert found == [Ran("ended", "1\n"), FAILED]


def test_nothing_is_left_of_a_folder_that_a_program_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    program = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nfor each in ('a/b', 'a', '.'): os.chmod(each, 0)"
    tests = [{"stdin": ""}] * 2
    assert sandbox.run(LIMITS, program, tests, isolated=False) == [Ran("ended", "")] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: pass",
        "import resource\ntry:\n    resource.setrlimit(resource.RLIMIT_CPU, (100, 100))\nexcept ValueError: pass\nwhile True: pass",
        "10**(10**9)",
    ],
)
@pytest.mark.slow
def test_time_of_the_processor_is_limited(program: str) -> None:
    began = time.monotonic()
    assert ran(program).status in ("time", "failed"), "a MemoryError may come first"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "program",
    [
        "import time\ntime.sleep(1000)",
        "import os, signal\nsignal.raise_signal(signal.SIGSTOP)",
        "import os, time\nos.close(1)\ntime.sleep(1000)",
    ],
)
@pytest.mark.slow
def test_time_on_the_clock_is_limited(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CLOCK_FACTOR", 1)
    monkeypatch.setattr(sandbox, "TEST_SECONDS", 1)
    assert ran(program) == Ran("time", "")


@pytest.mark.parametrize(
    "program",
    [
        "bytearray(2**27)",
        "x = []\nwhile True: x.append(bytes(2**16))",
        "import mmap\nmmap.mmap(-1, 2**27)",
        "import mmap\nmmap.mmap(-1, 2**27, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        "import os\nos.memfd_create('x')",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nassert libc.shmget(0, 2**20, 0o1600) >= 0",
        "file = open('x', 'wb')\nfile.write(bytes(2**20 + 1))\nfile.close()",
        "for i in range(100): open(str(i), 'wb').write(bytes(2**18))",
        "for i in range(10_000): open(str(i), 'x').close()",
        "x = [open('/tmp/x', 'w') for _ in range(100)]",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ],
)
def test_memory_and_files_are_limited(program: str) -> None:
    assert ran(program).status in ("failed", "time", "signal 11")


def test_a_file_is_limited_where_nothing_is_mounted_too() -> None:
    write = "file = open('x', 'wb', buffering=0)\nfile.write(bytes(2**20))\n"
    assert ran(write, isolated=False) == Ran("ended", "")
    assert ran(f"{write}file.write(b'x')", isolated=False) == FAILED


def test_a_program_has_no_capability() -> None:
    program = """
import ctypes
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[7] * 6)
print(ctypes.CDLL(None).capget(header, sets), list(sets))
"""
    assert ran(program) == Ran("ended", "0 [0, 0, 0, 0, 0, 0]\n")


@pytest.mark.slow
def test_the_tests_of_a_response_share_the_time_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tests have 4 · 1 s and 1 s each, together 8 s. Each sleeps 3 s, so the third has no time left."""
    monkeypatch.setattr(sandbox, "CLOCK_FACTOR", 4)
    monkeypatch.setattr(sandbox, "TEST_SECONDS", 1)
    program = "import time\ntime.sleep(3)\nprint(1)"
    found = sandbox.run(LIMITS, program, [{"stdin": ""}] * 4, isolated=True)
    assert found == [Ran("ended", "1\n")] * 2 + [Ran("time", "")]


def test_output_is_limited() -> None:
    """A program that prints too much is ended and wrong."""
    assert ran("while True: print('x' * 1000)") == Ran("output", "")
    assert ran("print('x' * 10_001)") == Ran("output", "")
    assert ran("import sys\nsys.stderr.write('x' * 10**7)\nprint(1)") == Ran("ended", "1\n"), (
        "errors are dropped"
    )


STARTING = pytest.mark.parametrize(
    "program",
    [
        "import os\nos.fork()",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import threading\nthreading.Thread(target=print).start()",
        "import subprocess\nsubprocess.run(['true'])",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os, sys\nos.execv(sys.executable, ['python', '-c', 'print(1)'])",
        # a program that it sees: the loader among the libraries
        "import glob, os\nos.execv(glob.glob('/lib*/ld-linux*')[0], ['ld.so', '--version'])",
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.unshare(0x10000000) == 0",
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import os\nos.setsid()",
        "import resource\nresource.prlimit(1, resource.RLIMIT_AS, (2**20, 2**20))",
        "import os\nos.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))",
    ],
)


@STARTING
def test_no_process_and_no_thread_is_started(program: str) -> None:
    assert ran(program) == FAILED


@pytest.mark.slow
@STARTING
def test_no_process_and_no_thread_is_started_without_isolation(program: str) -> None:
    assert ran(program, isolated=False) == FAILED


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGSEGV]
)
def test_signals_reach_no_other_process(number: signal.Signals) -> None:
    program = f"""
import os
for pid in (1, os.getppid(), -1, 0, {os.getpid()}):
    try: os.kill(pid, {int(number)})
    except (PermissionError, ProcessLookupError): pass
    else: print('sent to', pid)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.tgkill(1, 1, {int(number)}), os.getpid())
"""
    assert ran(program) == Ran("ended", "-1 2\n")


OWNERS = pytest.mark.parametrize(
    "owned",
    [
        "fcntl.fcntl(end, fcntl.F_SETOWN, {pid})",
        "fcntl.fcntl(end, fcntl.F_SETOWN, -{pid})",
        "fcntl.fcntl(end, 15, struct.pack('ii', 1, {pid}))  # F_SETOWN_EX",
        "fcntl.ioctl(a, 0x8901, struct.pack('i', {pid}))  # FIOSETOWN\nend = a.fileno(); begin = b.fileno()",
        "fcntl.ioctl(a, 0x8902, struct.pack('i', {pid}))  # SIOCSPGRP\nend = a.fileno(); begin = b.fileno()",
        "assert ctypes.CDLL(None).syscall({fcntl}, end, ctypes.c_long(2**32 + 8), {pid}) == 0",
    ],
)
"""Commands that let another process get a file's signals. The last has bits that the kernel does not read."""


def outcome_of_owning(owned: str, pid: int, *, isolated: bool) -> Ran:
    """Run a program that has a signal sent to another process when a file can be read."""
    number = {"x86_64": 72, "aarch64": 25}[os.uname().machine]
    program = f"""
import ctypes, fcntl, os, signal, socket, struct
end, begin = os.pipe()
a, b = socket.socketpair()
{owned.format(pid=pid, fcntl=number)}
fcntl.fcntl(end, 10, signal.SIGKILL)  # F_SETSIG
fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC)
os.write(begin, b"x")
print("sent")
"""
    return ran(program, isolated=isolated)


@OWNERS
def test_no_file_sends_a_signal_to_another_process(owned: str) -> None:
    """Without isolation any process of the user could get the signal; the test starts one such process."""
    other = subprocess.Popen(["sleep", "600"], process_group=0)
    try:
        assert outcome_of_owning(owned, other.pid, isolated=False) == FAILED
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert outcome_of_owning(owned, 1, isolated=True) == FAILED


def test_files_may_be_locked_and_read_without_waiting() -> None:
    program = """
import fcntl, os
with open("x", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_UN)
end, _ = os.pipe()
os.set_blocking(end, False)
print(fcntl.fcntl(end, fcntl.F_GETFL) & os.O_NONBLOCK > 0)
"""
    assert ran(program) == Ran("ended", "True\n")


@pytest.mark.parametrize(
    "source", ["(" * 10**6, "-" * 10**6 + "1", "x = " + "[" * 90 + "0" + "]" * 90 + "\nraise OSError"]
)
def test_a_program_is_read_within_the_limits_too(source: str) -> None:
    assert ran(source).status in ("failed", "time", "signal 11")


def test_memory_of_the_machine_that_ran_out_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr(sandbox, "oom_kills", lambda: next(counts))
    with pytest.raises(sandbox.SandboxFailed, match="memory ran out while a program ran"):
        ran("print(1)")


def test_a_process_may_end_itself() -> None:
    assert ran("import os\nos.abort()") == Ran("signal 6", "")
    assert ran("import os\nprint(1, flush=True)\nos._exit(3)") == Ran("failed", "1\n")
    assert ran("import ctypes\nctypes.string_at(0)") == Ran("signal 11", "")


def test_no_file_of_the_machine_is_seen(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    program = f"""
import os
print(sorted(os.listdir('/')), os.path.exists({str(tmp_path)!r}), os.path.exists('/proc'), os.path.exists('/etc'), dict(os.environ))
"""
    found = ran(program)
    assert found.status == "ended"
    assert found.output.endswith("] False False False {}\n")
    assert not {"'home'", "'etc'", "'work'", "'dev'", "'proc'", "'sys'"} & set(
        found.output.replace("]", ",").replace("[", "").split(", ")
    )
    assert ran(f"open({str(tmp_path / 'secret')!r})") == FAILED


@pytest.mark.parametrize(
    "program",
    [
        "import os\nopen('/written', 'w')",
        "import os\nopen(os.__file__, 'a')",
        "import os\nopen('/usr/lib/written', 'w')",
        "import os\nos.chroot('/tmp')",
        "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
        "import ctypes\nassert ctypes.CDLL(None).umount2(b'/tmp', 2) == 0",
        "import os\nos.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))\nopen('/tmp/disk', 'rb').read(1)",
    ],
)
def test_nothing_outside_of_its_folder_is_written_or_mounted(program: str) -> None:
    assert ran(program) == FAILED


def test_no_network_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        assert ran(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)") == FAILED
        assert ran("import socket\nsocket.socket(socket.AF_UNIX)") == FAILED
        # Without the filter of system calls, the namespace alone has to hold
        assert ran("import socket\nprint(socket.gethostbyname('localhost'))").status == "failed"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_namespace_has_no_network_even_without_the_filter() -> None:
    """The test calls ``unshare`` with the flags of the sandbox, and does not filter the child's system calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        done = subprocess.run(
            ["unshare", *sandbox._UNSHARE, "--", sys.executable, "-I", "-S", "-c", command],
            capture_output=True,
            text=True,
        )
        assert "Network is unreachable" in done.stderr


STAGE = """
import sys
from vantage.schemas.recipe.builtin_verifiers import CodeVerifier
from vantage.tasks.rewards import sandbox
print("begun", flush=True)
sandbox.run(CodeVerifier(source="builtin:code", seconds=60), "import time\\ntime.sleep(1000)", [{"stdin": ""}], isolated=sys.argv[1] == "1")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolated", ["1", "0"])
def test_nothing_is_left_when_who_has_started_it_is_killed(isolated: str) -> None:
    stage = subprocess.Popen([sys.executable, "-c", STAGE, isolated], stdout=subprocess.PIPE)
    assert stage.stdout is not None and stage.stdout.readline() == b"begun\n"
    least = 3 if isolated == "1" else 2
    deadline = time.monotonic() + 60
    while (
        len(started := psutil.Process(stage.pid).children(recursive=True)) < least
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    stage.kill()
    stage.wait()
    stage.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert len(started) >= least and alive == []


REFUSING = """
import json
from vantage.schemas.recipe.builtin_verifiers import CodeVerifier
from vantage.tasks.rewards import sandbox
required, optional = (CodeVerifier(source="builtin:code", isolation=each) for each in ("required", "optional"))
found = [sandbox.warnings({"mine": required}), sandbox.warnings({"mine": optional}), sandbox.recorded([optional])]
sandbox.refuse_without_isolation(optional, name="mine")
try: sandbox.refuse_without_isolation(required, name="mine")
except sandbox.NotIsolated as error: found.append(str(error))
print(json.dumps(found))
"""


def test_a_kernel_that_forbids_namespaces_is_refused_unless_the_recipe_allows_it() -> None:
    """The test runs in a user namespace in which no further one may be made, as in a common container."""
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, REFUSING],
        capture_output=True,
        text=True,
        check=True,
    )
    of_required, of_optional, recorded, refused = json.loads(done.stdout)
    reason = "the isolated process did not start: unshare: unshare failed: No space left on device"
    assert of_required == [
        f"verifiers.mine: programs are refused on this machine, which does not isolate them ({reason})"
    ]
    assert of_optional == [
        "verifiers.mine: programs are run as you, with limits on time, memory and output alone on this machine, which does not "
        f"isolate them ({reason})"
    ]
    assert recorded == {"isolation": f"limits alone: {reason}"}
    assert refused.startswith(
        f"verifiers.mine runs programs, and this machine does not isolate them ({reason}); use a machine"
    )
    assert "isolation: optional" in refused


def test_without_the_command_of_util_linux_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    why_not_isolated.cache_clear()
    with pytest.raises(NotIsolated, match=r"the command unshare of util-linux is missing"):
        refuse_without_isolation(LIMITS, name="mine")
    why_not_isolated.cache_clear()

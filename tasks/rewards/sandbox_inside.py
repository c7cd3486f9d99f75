"""The isolated process: it shuts itself in, and runs a program once for each test, in a child.

``vantage.tasks.rewards.sandbox`` starts this file by its path, with Python's standard library alone and, if the kernel allows, in
namespaces of its own, where it is process 1. It reads one request (JSON) from standard input, and writes one line of JSON for each
test to standard output. The expected results of the tests are not in the request, so no program can read them.

The child cannot start processes or threads, open sockets, mount, trace, signal other processes, or raise its limits.
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

FOLDER = "/tmp"
"""The program's own folder, empty before each test; where nothing is mounted, each test has one in the folder that the request names."""
PLACE = "/proc"
"""The folder on which the new root is mounted before it becomes the root: every Linux has it, and the program needs no file of it."""
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
"""Folders of shared libraries, which extension modules of the standard library load."""
MAX_FILES, MAX_OPEN, MAX_SIGNALS = 1024, 64, 64

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC = 2, 4, 4096, 16384
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
NOT_EQUAL, MASKED_EQUAL = 1, 7
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902
LINUX_CAPABILITY_VERSION_3 = 0x20080522
"""Constants of the headers of Linux and of libseccomp."""

REFUSED = """
    fork vfork clone clone3 execve execveat setsid setpgid ptrace kcmp prctl seccomp
    kill tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd
    process_vm_readv process_vm_writev process_madvise
    socket io_uring_setup io_uring_enter io_uring_register
    unshare setns mount umount2 pivot_root chroot mount_setattr move_mount open_tree
    fsopen fsmount fsconfig fspick fanotify_init name_to_handle_at open_by_handle_at
    shmget shmat semget msgget mq_open memfd_create memfd_secret userfaultfd
    bpf perf_event_open keyctl add_key request_key kexec_load kexec_file_load
    init_module finit_module delete_module syslog acct quotactl swapon swapoff reboot
    settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname
    personality iopl ioperm modify_ldt vhangup io_setup
    setpriority ioprio_set sched_setaffinity sched_setattr sched_setparam sched_setscheduler migrate_pages move_pages
"""
"""System calls that fail in the program: those that start or touch processes, reach a network, change namespaces or the machine,
or take memory that is not counted as the program's."""

OF_OTHERS = {"fcntl": (F_SETOWN, F_SETOWN_EX), "ioctl": (FIOSETOWN, SIOCSPGRP)}
"""System call → commands that fail in the program. They name a process that gets a signal when a file can be read, and
another command (``F_SETSIG``) may make SIGKILL that signal."""
_INT = 0xFFFFFFFF
"""The bits of a command that the kernel reads."""

_libc = ctypes.CDLL(None, use_errno=True)


class Compare(ctypes.Structure):
    """A condition on an argument of a system call, ``struct scmp_arg_cmp``; ``a`` is the mask of a masked
    comparison."""

    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def main() -> None:
    """Serve one request."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # otherwise a signal to the group would reach the processes outside that share it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    request = json.loads(sys.stdin.buffer.read())
    seccomp = _seccomp()
    nowhere = os.open(os.devnull, os.O_RDWR)
    is_inside = request["folder"] is None
    if is_inside:
        _shut_in(seccomp)
    # so that the program, which runs as the same user, cannot trace this process
    _libc.prctl(PR_SET_DUMPABLE, 0)
    deadline = time.monotonic() + request["clock"]
    own = FOLDER
    for place, test in enumerate(request["tests"]):
        if is_inside:
            _mount(
                "tmpfs",
                FOLDER,
                "tmpfs",
                MS_NOSUID | MS_NODEV,
                f"size={request['disk']},nr_inodes={MAX_FILES}",
            )
        else:
            own = os.path.join(request["folder"], str(place))
        result = _run(request, test, nowhere, seccomp, folder=own, deadline=deadline)
        if is_inside:
            _called(_libc.umount2(FOLDER.encode(), MNT_DETACH), "umount2")
        print(json.dumps(result), flush=True)
        if result["status"] != "ended":
            break


def _seccomp() -> Any:
    """Return libseccomp; None where it is missing."""
    for name in ("libseccomp.so.2", "libseccomp.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.seccomp_init.restype = ctypes.c_void_p
        return library
    return None


def _shut_in(seccomp: Any) -> None:
    """Change to a new root: an empty file system in memory, with the standard library in it."""
    root = PLACE
    if seccomp is None:
        raise OSError("libseccomp is not installed")
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1M,mode=755")
    for path in dict.fromkeys((*LIBRARIES, os.path.realpath(os.path.dirname(os.__file__)))):
        inside = root + path
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        elif os.path.isdir(path) and not os.path.isdir(inside):
            os.makedirs(inside)
            _mount(path, inside, None, MS_BIND | MS_REC, None)
    os.makedirs(root + FOLDER, exist_ok=True)
    os.chdir(root)
    _called(_libc.syscall(_number(seccomp, "pivot_root"), b".", b"."), "pivot_root")
    _called(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")
    _make_read_only("/", seccomp)  # this includes all that is mounted below it


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    arguments = (each if each is None else each.encode() for each in (source, target, kind))
    data = None if options is None else options.encode()
    _called(_libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {target}")


def _make_read_only(path: str, seccomp: Any) -> None:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    number = _number(seccomp, "mount_setattr")
    status = _libc.syscall(
        number, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _called(status, "mount_setattr")


def _number(seccomp: Any, name: str) -> int:
    """Return the number of a system call on this processor."""
    return int(seccomp.seccomp_syscall_resolve_name(name.encode()))


def _called(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _run(
    request: dict[str, Any], test: dict[str, Any], nowhere: int, seccomp: Any, *, folder: str, deadline: float
) -> dict[str, Any]:
    """Run the program once in a folder, and return its ``status`` (ended, failed, time, output, signal N) with what it has printed."""
    given = os.memfd_create("input")
    os.write(given, test.get("stdin", "").encode(errors="replace"))
    os.lseek(given, 0, os.SEEK_SET)
    printed, out = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_program(request, test, (given, out, nowhere), seccomp, folder=folder)
    os.close(given)
    os.close(out)
    try:
        output, ended = _output(printed, child, request, deadline=deadline)
    finally:
        os.close(printed)
    return {"status": ended, "output": output.decode(errors="replace")}


def _output(printed: int, child: int, request: dict[str, Any], *, deadline: float) -> tuple[bytes, str]:
    """Return the program's output and how it ended; the program is killed when its time is over, or if it prints too
    much."""
    output, is_open, status = b"", True, None
    while status is None and time.monotonic() < deadline and len(output) <= request["output"]:
        if is_open and select.select([printed], [], [], 0.05)[0]:
            data = os.read(printed, 2**16)
            output, is_open = output + data, bool(data)
        elif not is_open:
            time.sleep(0.001)
        if not is_open:
            status = _ended(child)
    if status is None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        return b"", "output" if len(output) > request["output"] else "time"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return b"", "time" if number in (signal.SIGKILL, signal.SIGXCPU) else f"signal {number}"
    return output, "ended" if os.WEXITSTATUS(status) == 0 else "failed"


def _ended(child: int) -> int | None:
    found, status = os.waitpid(child, os.WNOHANG)
    return status if found else None


def _be_the_program(
    request: dict[str, Any], test: dict[str, Any], files: tuple[int, int, int], seccomp: Any, *, folder: str
) -> NoReturn:
    """Become the program: set the limits, and drop everything else that the process had."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        given, out, nowhere = files
        for number, file in enumerate((given, out, nowhere)):
            os.dup2(file, number)
        os.closerange(3, 2**16)
        if folder != FOLDER:
            os.mkdir(folder)  # made here: if an earlier program has made it, this test fails
        os.chdir(folder)
        os.environ.clear()
        _limit(request, seccomp)
        program = request["program"]
        request.clear()
        _execute(compile(program, "<program>", "exec", dont_inherit=True), test)
        code = 0
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else 1
    except BaseException:
        code = 1
    finally:
        try:
            sys.stdout.flush()
        except BaseException:
            code = 1
        os._exit(code)


def _execute(program: Any, test: dict[str, Any]) -> None:
    """Execute the program; for a test of a function, call the function, and print only its result as JSON."""
    function = test.get("function")
    if function is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
        return
    result = os.dup(1)
    os.dup2(2, 1)
    names: dict[str, Any] = {"__name__": "program", "__builtins__": __builtins__}
    exec(program, names)
    found = names[function] if function in names else getattr(names["Solution"](), function)
    with open(result, "w", encoding="utf-8") as answered:
        answered.write(json.dumps(found(*test["arguments"])))


def _limit(request: dict[str, Any], seccomp: Any) -> None:
    """Set the limits, which cannot be lifted again."""
    for kind, most in (
        (resource.RLIMIT_CPU, request["seconds"]),
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_DATA, request["memory"]),
        (resource.RLIMIT_FSIZE, request["disk"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN),
        (resource.RLIMIT_SIGPENDING, MAX_SIGNALS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if request["folder"] is None:
        header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
        _called(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    if seccomp is not None:
        _filter(seccomp)


def _filter(seccomp: Any) -> None:
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(ALLOW)))
    for name in REFUSED.split():
        number = _number(seccomp, name)
        if number != -1:  # −1: this processor has no such call
            _added(seccomp.seccomp_rule_add_array(context, ctypes.c_uint32(REFUSE), number, 0, None))
    on_itself = {"tgkill": os.getpid(), "prlimit64": 0}  # to abort, and to read limits
    conditions = [(name, Compare(0, NOT_EQUAL, allowed, 0)) for name, allowed in on_itself.items()]
    for name, commands in OF_OTHERS.items():
        conditions += [(name, Compare(1, MASKED_EQUAL, _INT, command)) for command in commands]
    for name, condition in conditions:
        rule = (context, ctypes.c_uint32(REFUSE), _number(seccomp, name), 1, ctypes.byref(condition))
        _added(seccomp.seccomp_rule_add_array(*rule))
    _added(seccomp.seccomp_load(context))


def _added(status: int) -> None:
    if status != 0:
        raise OSError(-status, f"libseccomp: {os.strerror(-status)}")


if __name__ == "__main__":
    main()

"""Run programs that nobody has read: each test in a process without network, other files and other processes.

The namespaces are made by ``unshare`` of util-linux, the filter of system calls by libseccomp. Both are part of every common Linux.
A kernel or a container may forbid namespaces; then programs run without them only if the recipe allows it (``isolation: optional``).
The limits and what they do are in docs/verifiers.md.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vantage.schemas.recipe.builtin_verifiers import CodeVerifier
from vantage.schemas.recipe.verifiers import Verifier
from vantage.tasks.training.control_groups import oom_kills

MAX_TESTS = 200
"""Most tests of one answer."""
CLOCK_FACTOR = 10
"""Wall-clock seconds that all tests of a response have together, for each second of CPU time of one test. They are more
because the machine computes other things too."""
TEST_SECONDS = 2
"""Further wall-clock seconds for each test."""
START_SECONDS = 60
"""Most seconds for the start of the isolated process."""
NAMESPACES, LIMITS = "namespaces and a filter of system calls", "limits alone"
"""The value that a stage's provenance records."""
_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_UNSHARE = (
    *("--user", "--map-root-user", "--net", "--ipc", "--uts", "--mount", "--cgroup"),
    *("--pid", "--fork", "--kill-child"),
)
_PR_SET_PDEATHSIG = 1
_libc = CDLL(None)  # loaded here: between fork and exec nothing may wait for another thread's lock


class NotIsolated(ValueError):
    """The kernel of this machine does not isolate programs, and the recipe requires it."""


class SandboxFailed(RuntimeError):
    """The isolated process could not be started, or did not end."""


@dataclass(frozen=True)
class Ran:
    """One run of a program."""

    status: str
    """``ended`` (exit code 0), ``failed`` (an exception or another exit code), ``time``, ``output``, or ``signal N``."""
    output: str
    """Text that it has printed; for a function, its result as JSON."""


def longest_call(verifier: CodeVerifier) -> float:
    """Return the most seconds that the judgment of one response can take."""
    return _clock(verifier, MAX_TESTS) + 2 * START_SECONDS


def _clock(verifier: CodeVerifier, tests: int) -> float:
    return CLOCK_FACTOR * verifier.seconds + TEST_SECONDS * tests


def refuse_without_isolation(verifier: CodeVerifier, *, name: str) -> None:
    """Raise NotIsolated if the verifier requires isolation, and this machine has none."""
    if verifier.isolation == "optional" or (reason := why_not_isolated()) is None:
        return
    raise NotIsolated(
        f"verifiers.{name} runs programs, and this machine does not isolate them ({reason}); use a machine or container that allows "
        "user namespaces (docs/verifiers.md), or write isolation: optional, with which programs run as the user who runs the stage"
    )


def recorded(verifiers: Iterable[Verifier]) -> dict[str, str]:
    """Return what the provenance of a stage records of its verifiers' isolation; empty if none of them runs programs."""
    if not any(isinstance(each, CodeVerifier) for each in verifiers):
        return {}
    reason = why_not_isolated()
    return {"isolation": NAMESPACES if reason is None else f"{LIMITS}: {reason}"}


def warnings(verifiers: Mapping[str, Verifier]) -> list[str]:
    """Return warnings of the plan: verifiers that this machine would refuse, or run without isolation.

    Args:
        verifiers: name in the recipe → verifier.
    """
    found = []
    for name, verifier in verifiers.items():
        if isinstance(verifier, CodeVerifier) and (reason := why_not_isolated()) is not None:
            what = (
                "refused"
                if verifier.isolation == "required"
                else "run as you, with limits on time, memory and output alone"
            )
            found.append(
                f"verifiers.{name}: programs are {what} on this machine, which does not isolate them ({reason})"
            )
    return found


@cache
def why_not_isolated() -> str | None:
    """Return why programs cannot be isolated on this machine; None if they can. Tries it once."""
    if shutil.which("unshare") is None:
        return "the command unshare of util-linux is missing"
    verifier = CodeVerifier(source="builtin:code")
    try:
        [ran] = run(verifier, "print('inside')", [{"stdin": ""}], isolated=True)
    except SandboxFailed as error:
        return str(error)
    return (
        None
        if ran == Ran("ended", "inside\n")
        else f"a program that prints one word ended with {ran.status!r}"
    )


def run(
    verifier: CodeVerifier, program: str, tests: Sequence[Mapping[str, Any]], *, isolated: bool
) -> list[Ran]:
    """Run the program once for each test, up to the first that does not end by itself with exit code 0.

    Args:
        tests: ``{"stdin": TEXT}``, or ``{"function": NAME, "arguments": LIST}``.
        isolated: whether the programs run in namespaces of their own.

    Raises:
        SandboxFailed: the isolated process cannot be started, or memory of the machine ran out.
    """
    python = [os.path.realpath(sys.executable), "-I", "-S", str(_INSIDE)]
    request: dict[str, Any] = {
        "program": program,
        "tests": list(tests),
        "seconds": verifier.seconds,
        "clock": _clock(verifier, len(tests)),
        "memory": verifier.memory * 2**20,
        "disk": verifier.disk * 2**20,
        "output": verifier.output,
        "folder": None,
    }
    seconds = request["clock"] + START_SECONDS
    killed = oom_kills()
    if isolated:
        lines = _replies(["unshare", *_UNSHARE, "--", *python], request, seconds)
    else:
        with tempfile.TemporaryDirectory(prefix="vantage-program-", ignore_cleanup_errors=True) as folder:
            lines = _replies(python, {**request, "folder": folder}, seconds)
    if oom_kills() > killed:
        raise SandboxFailed(
            "memory ran out while a program ran, and the kernel has ended a process; lower memory, or give the machine or container more"
        )
    return [Ran(**json.loads(line)) for line in lines]


def _replies(command: Sequence[str], request: Mapping[str, Any], seconds: float) -> list[bytes]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        preexec_fn=_die_with_parent,
    )
    try:
        out, error = process.communicate(json.dumps(request).encode(), timeout=seconds)
    except BaseException as failure:
        process.kill()
        process.communicate()
        if isinstance(failure, subprocess.TimeoutExpired):
            raise SandboxFailed(f"the isolated process did not end within {seconds:g} s") from None
        raise
    if process.returncode != 0:
        written = error.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        raise SandboxFailed(f"the isolated process did not start: {written[-1][:300]}")
    return out.splitlines()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

"""Run a recipe's own verifier in a separate process, which is kept for all batches of a stage.

Whatever the code does there (an endless loop, a crash in C, ``os._exit``, endless output) ends only that process, and
is reported as a fault of the verifier, with the line that ran. The process does not get the logins of the stage's
environment, only the variables in ``PASSED``. This is no sandbox: the code runs as the same user.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from vantage.schemas.recipe.verifiers import Right
from vantage.schemas.records.verdict_form import RIGHT_OR_WRONG, VerdictForm
from vantage.tasks.rewards.verdicts import (
    STRANGE,
    UnusableVerdict,
    Verdict,
    fitted,
    verdict_in,
    without_number,
)
from vantage.tasks.rewards.verifier_calls import Case
from vantage.tasks.rewards.verifier_file import BrokenVerifier, shown_case
from vantage.tasks.rewards.verifier_worker import READY, READY_FOR_BATCHES
from vantage.tasks.training import progress
from vantage.tasks.training.control_groups import oom_kills

CALL_SECONDS = 30.0
"""Most seconds of one call; results that take longer belong in the data, as an answer. For concurrent calls, most
seconds after the previous result."""
BATCH_SECONDS = 600.0
"""Most seconds of one call with a whole batch; fewer for less than 20 responses: ``CALL_SECONDS`` for each."""
LOAD_SECONDS = 120.0
"""Most seconds of the file's execution: its imports may be large."""
MAX_PRINTED = 2**20
"""Most bytes that one call may print."""
MAX_REPLY = 64 * 2**20
"""Most bytes of the verdicts of one batch; code that writes into their pipe itself would fill the memory."""
MAX_LOGGED = 4 * 2**20
"""Most bytes of the code's output that go into the stage's log."""

PASSED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
        *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR", "NLTK_DATA"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    }
)
"""Variables of the stage's environment that the verifier's process receives."""
PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "VERIFIER_")
"""Beginnings of more such names, including ``PYTHONPATH``, by which the process finds our package. Variables named
``VERIFIER_…`` are for a user's own code."""

_STACK_SECONDS = 2.0
_LOOK_SECONDS = 0.5


class VerifierOutOfMemory(MemoryError):
    """The kernel has ended the verifier's process because memory ran out."""


class VerifierProcess:
    """Judges responses by the function in the process; the first call starts the process."""

    def __init__(
        self,
        configuration: Mapping[str, Any],
        *,
        name: str,
        function: str,
        form: VerdictForm | None = RIGHT_OR_WRONG,
        right: Right | None = None,
        call_seconds: float | None = None,
    ) -> None:
        """Hold what is needed to start the process.

        Args:
            configuration: for ``vantage.tasks.rewards.verifier_worker``: ``file`` and ``function``, ``extract``, or
                ``builtin``, the recipe's fields of a built-in verifier.
            name: the verifier's name in the recipe.
            function: the function's name in descriptions of faults.
            form: the form of all verdicts; None: the dry run, which finds it.
            right: the scores that count as right, if the recipe defines them.
            call_seconds: most seconds of one call; None: ``CALL_SECONDS``.
        """
        self._configuration = dict(configuration)
        self.name, self._function = name, function
        self.form, self.right = form, right
        self._is_builtin = "builtin" in self._configuration
        self._call_seconds = call_seconds
        self._running: _Running | None = None
        self._begun: list[Case] = []
        """Cases that the process was asked about and has not answered, in order."""
        self._known: defaultdict[Case, deque[Verdict]] = defaultdict(deque)
        """Verdicts on cases that were begun and that nobody has asked for yet."""
        # One thread begins cases while another wants verdicts; a request and its reply must stay together.
        self._turn = threading.RLock()

    def __call__(self, prompt: str, response: str, answer: str | None) -> Verdict:
        """Return the verdict; see ``verdicts``."""
        return self.verdicts([(prompt, response, answer)])[0]

    def verdicts(self, cases: Sequence[Case]) -> list[Verdict]:
        """Return the verdicts, case by case.

        Raises:
            BrokenVerifier: the verifier cannot be loaded, raises, returns no verdict or one of another form, takes too
                long, prints too much, or ends its process.
            VerifierOutOfMemory: the kernel has ended the process.
        """
        if not cases:
            return []
        with self._turn, self._killed_when_anything_breaks_off():
            running = self._started()
            begun, self._begun = self._begun, []
            there = [case for case, verdicts in self._known.items() for _ in verdicts]
            others = _without(cases, [*there, *begun])
            if others:
                running.ask(others)
            asked = [*begun, *others]
            for number, case in enumerate(asked):
                progress.phase("waiting for verifiers", number, len(asked))
                seconds = _seconds(running, number, len(asked), of_one=self._call_seconds or CALL_SECONDS)
                verdict = self._verdict(running, case, seconds=seconds)
                # None: the process has ended while judging this response, which counts as wrong
                if verdict is None:
                    running = self._restarted(asked[number + 1 :])
                self._known[case].append(self._wrong if verdict is None else verdict)
            running.look(0.0)  # read the code's output
            found = [self._known[case].popleft() for case in cases]
            for case in set(cases):
                if not self._known[case]:
                    del self._known[case]
            return found

    def begin(self, cases: Sequence[Case]) -> None:
        """Begin cases whose verdicts are wanted later; does not wait for the process.

        A function that takes a whole batch is asked about all cases later, by ``verdicts``. Any thread may call this
        while the process runs. Only the thread that asks for verdicts may start it: the process ends with the thread
        that started it.
        """
        if not cases:
            return
        with self._turn, self._killed_when_anything_breaks_off():
            running = self._started()
            if running.takes_batch:
                return
            running.ask(cases)
            self._begun += cases
            running.look(0.0)

    def keep_up(self) -> None:
        """Send more of the cases that were begun, as far as the process takes them."""
        with self._turn:
            if self._begun and self._running is not None:
                with self._killed_when_anything_breaks_off():
                    self._running.look(0.0)

    def give_up(self) -> None:
        """Forget the cases that were begun; the process ends if it has not judged all of them, since it would go on with them."""
        with self._turn:
            self._known.clear()
            if self._begun:
                self.close()

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and not ended."""
        return self._running is not None

    @property
    def _wrong(self) -> Verdict:
        """The verdict on a response for which a built-in verifier hangs or crashes: wrong, or the score 0."""
        return False if self.form is None else fitted(False, self.form)

    @property
    def takes_batch(self) -> bool:
        """Whether the running process calls its function with a whole batch."""
        return self._running is not None and self._running.takes_batch

    def _started(self) -> "_Running":
        if self._running is None:
            self._running = _Running(self._configuration, self.name)
            self._load(self._running)
        return self._running

    def _restarted(self, cases: Sequence[Case]) -> "_Running":
        self.close()
        running = self._started()
        if cases:
            running.ask(cases)
        return running

    def close(self) -> None:
        """End the process; another call would start a new one."""
        self._begun = []
        if self._running is not None:
            self._running.end()
            self._running = None

    def _load(self, running: "_Running") -> None:
        reply = running.reply(LOAD_SECONDS)
        if reply not in (READY, READY_FOR_BATCHES):
            raise self._broken(running, reply, "running the file", LOAD_SECONDS, "")
        running.takes_batch = reply == READY_FOR_BATCHES

    def _verdict(self, running: "_Running", case: Case, *, seconds: float) -> Verdict | None:
        """Return the verdict; None if a built-in verifier's library hangs or crashes on the response."""
        reply = running.reply(seconds)
        try:
            verdict = verdict_in(reply) if isinstance(reply, bytes) else None
        except UnusableVerdict as error:
            raise BrokenVerifier(
                f"verifiers.{self.name}: {self._function} answered {reply!r:.100} for {shown_case(*case)}; {error}"
            ) from None
        if verdict is not None:
            return verdict if self.form is None else self.fit(verdict, self.form, case)
        fault = self._broken(running, reply, self._function, seconds, f" for {shown_case(*case)}")
        if not (self._is_builtin and is_hang_or_crash(reply)) or isinstance(fault, VerifierOutOfMemory):
            raise fault
        sys.stderr.write(f"vantage: the response is wrong: {fault}\n")
        return None

    def fit(self, verdict: Verdict, form: VerdictForm, case: Case) -> Verdict:
        """Return the verdict in its form; BrokenVerifier names the case if it has another."""
        try:
            return fitted(verdict, form)
        except UnusableVerdict as error:
            raise BrokenVerifier(
                f"verifiers.{self.name}: {self._function} returned {json.dumps(verdict)} for {shown_case(*case)}; {error}"
            ) from None

    def _broken(
        self, running: "_Running", reply: "bytes | _NoReply", what: str, seconds: float, case: str
    ) -> BrokenVerifier | VerifierOutOfMemory:
        """Return the meaning of the reply, or of its absence."""
        about = f"verifiers.{self.name}: {what}"
        if isinstance(reply, bytes):
            return BrokenVerifier(
                _message_in(reply) or f"{about} answered {reply!r:.100}{case}; mend the verifier"
            )
        if reply.status == -signal.SIGKILL and running.is_out_of_memory():
            return VerifierOutOfMemory(
                f"{about} was ended by the kernel, because memory ran out{case}; let it take less memory, or give the "
                "machine or container more"
            )
        if reply.strange is not None:
            return BrokenVerifier(f"{about} answered {reply.strange!r:.100}{case}; {STRANGE}")
        if reply.printed:
            return BrokenVerifier(
                f"{about} printed more than {MAX_PRINTED} bytes{case}; print nothing, or less"
            )
        if reply.status is None:
            place = running.place_of_hang()
            return BrokenVerifier(f"{about} did not end within {seconds:g} s{place}{case}; make it faster")
        ended = (
            f"was ended by {signal.Signals(-reply.status).name}"
            if reply.status < 0
            else f"ended its process (exit code {reply.status})"
        )
        return BrokenVerifier(f"{about} {ended}{running.place()}{case}; mend the verifier")

    @contextmanager
    def _killed_when_anything_breaks_off(self) -> Iterator[None]:
        """Kill the process if the block is interrupted, as by a request to stop: unread verdicts must not answer the
        next batch."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _message_in(reply: bytes) -> str | None:
    """Return the message in a line; None: other code than ours has written it."""
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _seconds(running: "_Running", number: int, asked: int, *, of_one: float) -> float:
    """Return how long to wait for the verdict with this number. The verdicts on a whole batch come together with the
    first."""
    if running.takes_batch and number == 0:
        return min(BATCH_SECONDS, of_one * asked)
    return of_one


def _without(cases: Sequence[Case], begun: Sequence[Case]) -> list[Case]:
    """Return the cases that were not begun, in order; of equal ones, only the surplus."""
    left, found = Counter(begun), []
    for case in cases:
        if left[case]:
            left[case] -= 1
        else:
            found.append(case)
    return found


class _NoReply:
    """The process printed too much, wrote a strange line, has ended with a status, or (all unset) took too long."""

    def __init__(
        self, *, status: int | None = None, printed: bool = False, strange: bytes | None = None
    ) -> None:
        self.status = status
        self.printed = printed
        self.strange = strange


def is_hang_or_crash(reply: bytes | _NoReply) -> bool:
    """Return whether the process took too long, or a signal has ended it."""
    if not isinstance(reply, _NoReply) or reply.printed or reply.strange is not None:
        return False
    return reply.status is None or reply.status < 0


class _Running:
    """The process and its pipes."""

    def __init__(self, configuration: Mapping[str, Any], name: str) -> None:
        asked, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        command = [
            sys.executable,
            "-m",
            "vantage.tasks.rewards.verifier_worker",
            str(asked),
            str(replies),
            name,
        ]
        self._process = subprocess.Popen(
            [*command, json.dumps(configuration)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(asked, replies),
            process_group=0,  # so that processes that it starts can be ended with it
            env={**passed(os.environ), "PYTHONSAFEPATH": "1"},
        )
        os.close(asked)
        os.close(replies)
        assert self._process.stdout is not None, "opened as a pipe"
        self._output = self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        for descriptor in (self._replies, self._output):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        os.set_blocking(self._requests, False)
        self.takes_batch = False
        """Whether the process calls its function with a whole batch."""
        self._to_send = memoryview(b"")
        self._unread = b""
        self._tail = b""
        self._printed = self._logged = self._num_replies = 0
        self._oom_kills = oom_kills()
        self.end = weakref.finalize(
            self, _end, self._process, self._selector, (self._requests, self._replies)
        )

    def ask(self, cases: Sequence[Case]) -> None:
        """Send a batch, as far as the process takes it now."""
        if not self._to_send:
            self._selector.register(self._requests, selectors.EVENT_WRITE)
        self._to_send = memoryview(bytes(self._to_send) + json.dumps(cases).encode() + b"\n")

    def reply(self, seconds: float) -> bytes | _NoReply:
        """Return the next line of the process, waiting for at most this time.

        Time in which this process was stopped hardly counts: a signal, a debugger or the machine may have stopped it,
        and then the verifier is not slow.
        """
        waited, looked_at = 0.0, time.monotonic()
        self._printed = 0
        while b"\n" not in self._unread:
            status = self._process.poll()  # before the last read: its output before its end is read too
            self.look(min(_LOOK_SECONDS, max(0.0, seconds - waited)))
            now = time.monotonic()
            waited, looked_at = waited + min(now - looked_at, 2 * _LOOK_SECONDS), now
            if self._printed > MAX_PRINTED:
                return _NoReply(printed=True)
            if b"\n" not in self._unread and len(self._unread) > MAX_REPLY:
                return _NoReply(strange=self._unread[:1000])
            if b"\n" not in self._unread and status is not None:
                return _NoReply(status=status)
            if b"\n" not in self._unread and waited >= seconds:
                return _NoReply()
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            found = without_number(line + b"\n", self._num_replies)
        except UnusableVerdict:
            return _NoReply(strange=line)
        self._num_replies += 1
        return found

    def place_of_hang(self) -> str:
        """Return the line that the code executes now: faulthandler writes it from C, whatever the code does."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        while not self.place() and time.monotonic() < deadline:
            self.look(0.1)
        return self.place()

    def place(self) -> str:
        """Return the innermost line of the user's file in the stack that faulthandler has written; empty: none."""
        lines = re.findall(rb'File "[^"]*[/"]verifier\.py", line (\d+) in (\S+)', self._tail)
        return f" (line {int(lines[0][0])}, in {lines[0][1].decode(errors='replace')})" if lines else ""

    def look(self, seconds: float) -> None:
        """Send, and read the output that has come; waits for this time if there is none."""
        for key, _ in self._selector.select(seconds):
            if key.fd == self._requests:
                self._send()
                continue
            data = os.read(key.fd, 2**16)
            if not data:
                self._selector.unregister(key.fd)
            elif key.fd == self._replies:
                self._unread += data
            else:
                self._printed += len(data)
                self._tail = (self._tail + data)[-(2**16) :]
                self._log(data)

    def is_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process for lack of memory since this one was started."""
        return oom_kills() > self._oom_kills

    def _log(self, printed: bytes) -> None:
        """Pass on the code's output; beyond ``MAX_LOGGED`` bytes, a line reports that there is more."""
        if self._logged >= MAX_LOGGED:
            return
        text = printed[: MAX_LOGGED - self._logged].decode(errors="replace")
        self._logged += len(printed)
        if self._logged >= MAX_LOGGED:
            text += f"\nvantage: the verifier has printed {MAX_LOGGED // 2**20} MiB; what else it prints is left out\n"
        sys.stderr.write(text)

    def _send(self) -> None:
        try:
            self._to_send = self._to_send[os.write(self._requests, self._to_send) :]
        except BrokenPipeError:  # the process has ended, which `reply` notices
            self._to_send = memoryview(b"")
        if not self._to_send:
            self._selector.unregister(self._requests)


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment for a user's code: no login, and no keys of a storage."""
    return {
        name: value
        for name, value in environment.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES)
    }


def _end(
    process: "subprocess.Popen[bytes]", selector: selectors.BaseSelector, descriptors: tuple[int, ...]
) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    selector.close()
    for descriptor in descriptors:
        os.close(descriptor)
    if process.stdout is not None:
        process.stdout.close()

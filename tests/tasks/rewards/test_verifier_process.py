"""A stage survives a user's code that does its worst; the verifier is reported as at fault, with its line."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.packages import copy_packages
from tests.support.processes import read_living
from tests.support.real_runs import wait_for
from tests.support.slow import slow
from vantage.attempts.launchers.stage_process import explain
from vantage.schemas.records.verdict_form import VerdictForm
from vantage.tasks.rewards import verifier_process
from vantage.tasks.rewards.verifier_file import BrokenVerifier
from vantage.tasks.rewards.verifier_process import VerifierOutOfMemory, VerifierProcess

CASE = ("1+1?", "2", "2")
SHOWN = "for prompt '1+1?', response '2', answer '2'; "


@pytest.fixture
def verifier(tmp_path: Path) -> Iterator[VerifierProcess]:
    process = VerifierProcess(
        {"file": str(tmp_path / "verifier.py"), "function": "verify"}, name="mine", function="verify"
    )
    yield process
    process.close()


def define(folder: Path, body: str, *, before: str = "") -> None:
    (folder / "verifier.py").write_text(f"{before}\ndef verify(prompt, response, answer):\n    {body}\n")


def refusal(verifier: VerifierProcess) -> str:
    with pytest.raises(BrokenVerifier) as broken:
        verifier(*CASE)
    assert "\n" not in str(broken.value)
    return str(broken.value)


def children() -> set[psutil.Process]:
    """Return the processes below this one that live; other tests of the same worker may have left some."""
    return set(read_living(psutil.Process().children(recursive=True), psutil.Process.ppid))


def test_batches_are_judged_by_one_process_that_keeps_its_state(
    tmp_path: Path, verifier: VerifierProcess
) -> None:
    define(tmp_path, "seen.append(os.getpid()); return len(set(seen)) == 1 and response == answer and os.getpid() != ours",
           before=f"import os\nseen = []\nours = {os.getpid()}")  # fmt: skip
    cases = [("p", str(n), str(n % 2)) for n in range(1000)]
    expected = [n < 2 for n in range(1000)]
    assert verifier.verdicts(cases) == expected
    assert verifier.verdicts(cases) == expected
    assert verifier.verdicts([]) == []


STARTS = (
    "import json; from vantage.attempts.identity.child_python import python_environment; "
    "print(json.dumps(python_environment()))"
)
STAGE = """
import sys, vantage
from vantage.tasks.rewards.verifier_process import VerifierProcess
process = VerifierProcess({"file": sys.argv[1], "function": "verify"}, name="mine", function="verify")
print(vantage.__file__, process.verdicts([("", vantage.__file__, None), ("", "another", None)]))
process.close()
"""


@pytest.mark.parametrize("is_installed", [True, False])
def test_it_finds_the_package_that_its_stage_has_from_any_folder(is_installed: bool, tmp_path: Path) -> None:
    """It finds the package in an installed checkout, and in a copy that is found only from where it was started."""
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    copy_packages(copy)
    elsewhere.mkdir()
    (elsewhere / "pathlib.py").write_text(
        "raise RuntimeError('the folder that it is started in is on its path')"
    )
    define(
        tmp_path, "return vantage.__file__ == response and sys.flags.safe_path", before="import sys, vantage"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def python(*arguments: str, folder: Path, **more: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment | more,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    of_stages = json.loads(python("-c", STARTS, folder=tmp_path if is_installed else copy))
    assert of_stages.pop("PYTHONSAFEPATH") == "1"
    # -P in its place: the process of the verifier has to set it by itself
    printed = python("-P", "-c", STAGE, str(tmp_path / "verifier.py"), folder=elsewhere, **of_stages)
    file, told = printed.split(" ", 1)
    assert Path(file).is_relative_to(copy) != is_installed
    assert told == "[True, False]\n"


def test_any_text_arrives_as_it_is(tmp_path: Path, verifier: VerifierProcess) -> None:
    texts = ["", "\n", "\x00\x1b[2J", "نص 中文 🙂", "\ud800", '"\\', "x" * 500_000]
    define(tmp_path, "return prompt == response and (answer is None) == (prompt == '')")
    assert verifier.verdicts([(text, text, text or None) for text in texts]) == [True] * len(texts)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import os; os._exit(3)", f"verify ended its process (exit code 3) {SHOWN}mend the verifier"),
        ("import os; os._exit(0)", f"verify ended its process (exit code 0) {SHOWN}mend the verifier"),
        ("import sys; sys.exit(3)", "verify raised SystemExit: 3 (line 3: import sys; sys.exit(3)) for"),
        ("raise KeyboardInterrupt", "verify raised KeyboardInterrupt"),
        ("import ctypes; ctypes.string_at(0)", f"verify was ended by SIGSEGV (line 3, in verify) {SHOWN}"),
        ("import os; os.abort()", "verify was ended by SIGABRT (line 3, in verify)"),
        ("import os; os.kill(os.getpid(), 9)", f"verify was ended by SIGKILL {SHOWN}"),
        ("print('x' * 10**9); return True", f"verify printed more than 1048576 bytes {SHOWN}"),
        ("raise ValueError('x' * 10**8)", "verify raised ValueError: xxx"),
        ("return 'x' * 10**8", "verify returned 'xxx"),
        ("return 0.5", f"verify returned 0.5 {SHOWN}the dry run had right or wrong, and this is one number; return"),
        ("return {'a': 1}", f"verify returned {{\"a\": 1.0}} {SHOWN}the dry run had right or wrong, and this is scores named a"),
        ("return 1e999", f"verify returned inf (a float) {SHOWN}the score is not finite; return a finite number"),
        ("class T:\n        def __repr__(self): raise OSError\n    return T()", "verify returned (a T) (a T) for"),
    ],
)  # fmt: skip
def test_what_ends_or_breaks_the_process_is_told_as_the_verifiers(
    tmp_path: Path, verifier: VerifierProcess, body: str, told: str
) -> None:
    define(tmp_path, body)
    message = refusal(verifier)
    assert message.startswith(f"verifiers.mine: {told}")
    assert len(message) < 1000


@pytest.mark.parametrize(
    "written",
    [b"true\n", b"[]\n", b"[1, 2]\n", b"garbage\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"[1e999]\n", b'{"a": "b"}\n', b"{}\n"],
)  # fmt: skip
@pytest.mark.parametrize("where", ["verify", "the file"])
def test_a_verifier_that_writes_into_our_pipes_is_at_fault(
    tmp_path: Path, verifier: VerifierProcess, written: bytes, where: str
) -> None:
    """The verifier writes to every descriptor that it finds open."""
    (tmp_path / "written").write_bytes(written)
    before = f"""import os, pathlib
def write():
    read = pathlib.Path({str(tmp_path / "written")!r}).read_bytes()
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            number > 2 and os.write(number, read)
        except OSError:
            pass
"""
    if where == "verify":
        define(tmp_path, "write(); return True", before=before)
    else:
        define(tmp_path, "return True", before=f"{before}write()")
    message = refusal(verifier)
    assert message.startswith("verifiers.mine: ")
    assert "answered b" in message
    assert len(message) < 1000


FORKED = {
    "each case": ("os.fork(); return float(answer)", ""),
    "a child that raises": ("if os.fork() == 0: raise ValueError\n    return float(answer)", ""),
    "a child that leaves": ("if os.fork() == 0: sys.exit(3)\n    return float(answer)", ""),
    "calls at the same time": ("return float(answer)", ""),
    "a pool": (
        "with multiprocessing.get_context('fork').Pool(2) as pool: return pool.map(float, [answer])[0]",
        "import multiprocessing",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORKED)
def test_processes_that_it_forks_answer_nothing(tmp_path: Path, kind: str) -> None:
    """A child that returned would read and answer cases too, and every later response would have the score of another."""
    body, before = FORKED[kind]
    define(tmp_path, body, before=f"import os, sys\n{before}")
    if kind == "calls at the same time":
        file = tmp_path / "verifier.py"
        file.write_text(
            file.read_text()
            .replace("def verify(", "async def verify(")
            .replace("return", "os.fork(); return")
        )
    # A child of a call at the same time forks in all the other calls too: 2ⁿ processes for n calls.
    _expect_own_scores(tmp_path, num_cases=4 if kind == "calls at the same time" else 12)


def test_a_reply_without_an_end_fills_no_memory(
    verifier: VerifierProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier's code writes into the pipe of its verdicts, and ends no line."""
    monkeypatch.setattr(verifier_process, "MAX_REPLY", 2**20)
    before = """
import os
def flood():
    numbers = [int(number) for number in os.listdir("/proc/self/fd") if int(number) > 2]
    pipes = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
    while True:
        for number in pipes:
            try:
                os.write(number, b"x" * 4096)
            except OSError:
                pass
"""
    define(tmp_path, "flood()", before=before)
    assert "answered b'xxxx" in refusal(verifier)  # and not: did not end in time


def test_a_batch_that_forks_is_answered_once(tmp_path: Path) -> None:
    (tmp_path / "verifier.py").write_text(
        "import os\nos.fork()\ndef verify_batch(prompts, responses, answers):\n    os.fork()\n    return [float(each) for each in answers]\n"
    )
    _expect_own_scores(tmp_path)


def _expect_own_scores(folder: Path, *, num_cases: int = 12) -> None:
    process = VerifierProcess(
        {"file": str(folder / "verifier.py"), "function": "verify"},
        name="mine",
        function="verify",
        form=VerdictForm(kind="score"),
        call_seconds=20.0,
    )
    try:
        for order in (range(num_cases), range(num_cases - 1, -1, -1)):
            cases = [(f"p{n}", "r", str(n + 0.5)) for n in order]
            assert process.verdicts(cases) == [n + 0.5 for n in order]
    finally:
        process.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = None",
        "sys.stdout = sys.stderr = Closed()",
        "os.dup2(os.open(os.devnull, os.O_RDONLY), 1)",
    ],
)
def test_standard_output_may_be_closed_or_replaced(
    tmp_path: Path, verifier: VerifierProcess, body: str
) -> None:
    before = "import os, sys\nclass Closed:\n    def flush(self): raise SystemExit(9)\n    write = flush"
    define(tmp_path, f"if response == '0': {body}\n    return response == answer", before=before)
    for _ in range(2):
        assert verifier.verdicts([("p", str(n), "1") for n in range(3)]) == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("Odd()", "verify returned a Odd that cannot be read: KeyError: 'float' (line 3: "),
        ("Unequal(5)", "verify returned a Unequal that cannot be read: ZeroDivisionError: "),
        (
            "Long(a=1.0)",
            "verify returned a Long that cannot be read: ValueError: __len__() should return >= 0",
        ),
        ("Leaving()", "verify returned (a Leaving) (a Leaving) for"),
        ("raise_(Unspoken())", "verify raised Unspoken: (without a text) (line "),
        ("raise_(ValueError('\\ud800'))", "verify raised ValueError: \\ud800 (line "),
    ],
)
def test_a_class_that_fails_where_it_is_read_is_named(
    tmp_path: Path, verifier: VerifierProcess, returned: str, shown: str
) -> None:
    before = """
class Odd(float):
    def __float__(self): raise KeyError('float')
class Unequal(int):
    def __eq__(self, other): return 1 / 0
class Long(dict):
    def __len__(self): return -1
class Leaving:
    def __repr__(self): raise SystemExit(3)
class Unspoken(Exception):
    def __str__(self): raise SystemExit(4)
def raise_(error): raise error
"""
    define(tmp_path, f"return {returned}", before=before)
    message = refusal(verifier)
    assert message.startswith(f"verifiers.mine: {shown}")
    assert message.encode()  # no half of a character is shown
    assert SHOWN.rstrip("; ") in message


@pytest.mark.parametrize(
    "body",
    [
        "return 10**(10**9) > 0",  # time in C, which no signal handler of Python interrupts
        "import os\n    while True: os.fork() or os.setsid() or os._exit(0)",
        *slow(
            "while True: pass",
            "import time; time.sleep(1000)",
            "import re; return bool(re.match('(a+)+b', 'a' * 60))",
            "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\n    while True: pass",
        ),
    ],
)
def test_a_call_without_end_is_ended(
    tmp_path: Path, verifier: VerifierProcess, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_process, "CALL_SECONDS", 1.0)
    define(tmp_path, body)
    before = children()
    began = time.monotonic()
    message = refusal(verifier)
    assert time.monotonic() - began < 60
    assert message.startswith("verifiers.mine: verify did not end within 1 s")
    assert message.endswith(f"{SHOWN}make it faster")
    if "sigmask" not in body and "fork" not in body:
        assert "(line 3, in verify)" in message
    assert children() <= before


STOPPED = """
import sys
from vantage.schemas.records.verdict_form import VerdictForm
from vantage.tasks.rewards import verifier_process
from vantage.tasks.rewards.verifier_process import VerifierProcess
verifier_process.CALL_SECONDS = 3.0
process = VerifierProcess({"file": sys.argv[1], "function": "verify"}, name="mine", function="verify")
print(process("1+1?", "2", "2"), flush=True)
process.close()
"""


def test_a_stage_that_was_stopped_does_not_blame_the_verifier(tmp_path: Path) -> None:
    """A signal from the verifier itself stops the stage for longer than a call may take."""
    define(
        tmp_path,
        "pathlib.Path(FILE).touch(); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(6); return True",
        before=f"import os, pathlib, signal, time\nFILE = {str(tmp_path / 'stops')!r}",
    )
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "verifier.py")]
    stage = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for((tmp_path / "stops").exists, seconds=60.0)
        time.sleep(5.0)  # of the call's six seconds; it may take three
        assert psutil.Process(stage.pid).status() == psutil.STATUS_STOPPED
        stage.send_signal(signal.SIGCONT)
        assert stage.communicate(timeout=60)[0] == "True\n"
    finally:
        stage.kill()


@pytest.mark.slow
def test_the_time_is_that_of_one_call_and_not_of_a_batch(
    tmp_path: Path, verifier: VerifierProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_process, "CALL_SECONDS", 2.0)
    define(tmp_path, "import time; time.sleep(0.3); return True")
    assert verifier.verdicts([CASE] * 10) == [True] * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("while True: pass", "running the file did not end within 3 s (line 1, in <module>); make it faster"),
        ("import os; os._exit(7)", "running the file ended its process (exit code 7); mend the verifier"),
        ("import ctypes; ctypes.string_at(0)", "running the file was ended by SIGSEGV (line 1, in <module>)"),
        ("print('x' * 10**8)", "running the file printed more than"),
    ],
)
def test_a_file_that_does_its_worst_as_it_is_run(
    tmp_path: Path, verifier: VerifierProcess, before: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_process, "LOAD_SECONDS", 3.0 if "while" in before else 60.0)
    define(tmp_path, "return True", before=before)
    assert refusal(verifier).startswith(f"verifiers.mine: {told}")


def test_after_a_fault_a_new_process_answers_and_never_with_verdicts_of_the_batch_before(
    tmp_path: Path, verifier: VerifierProcess
) -> None:
    define(tmp_path, "if prompt == 'raise': raise OSError\n    return response == answer")
    with pytest.raises(BrokenVerifier):
        verifier.verdicts([("p", "1", "1"), ("raise", "", ""), ("p", "1", "1")])
    assert verifier.verdicts([("p", "1", "2"), ("p", "2", "2")]) == [False, True]


def test_it_is_told_no_secret_of_the_stages_environment(
    tmp_path: Path, verifier: VerifierProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier's process gets no secret of the stage's environment."""
    secrets = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD",
               "PREFECT_API_KEY", "DATABASE_URL", "HTTPS_PROXY", "SOMETHING_ELSE")  # fmt: skip
    for name in secrets:
        monkeypatch.setenv(name, f"http://ann:canary-of-{name}@host")
    monkeypatch.setenv("VERIFIER_TOLERANCE", "0.5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    define(tmp_path, "return not any('canary' in v for v in os.environ.values()) and "
           "os.environ['VERIFIER_TOLERANCE'] == '0.5' and os.environ['OMP_NUM_THREADS'] == '1' and 'PATH' in os.environ "
           f"and not set(os.environ) & set({secrets!r})", before="import os")  # fmt: skip
    assert verifier(*CASE) is True


def test_what_it_prints_is_passed_on(
    tmp_path: Path, verifier: VerifierProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    define(tmp_path, "print('seen', response); return True")
    verifier(*CASE)
    verifier(*CASE)
    assert "seen 2\n" in capsys.readouterr().err


@pytest.mark.slow
def test_an_expression_without_end_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_process, "CALL_SECONDS", 1.0)
    compare = VerifierProcess({"extract": "((?:a+)+)b"}, name="mine", function="builtin:exact_match")
    assert compare.verdicts([("p", "aab", "aa"), ("p", "b", "aa")]) == [True, False]
    with pytest.raises(
        BrokenVerifier, match="verifiers.mine: builtin:exact_match did not end within 1 s for prompt"
    ):
        compare("p", "a" * 60, "a")
    compare.close()


def test_nothing_is_left_when_its_owner_is_gone(tmp_path: Path) -> None:
    define(tmp_path, "return True")
    process = VerifierProcess(
        {"file": str(tmp_path / "verifier.py"), "function": "verify"}, name="mine", function="verify"
    )
    before = children()
    assert process(*CASE)
    started = children() - before
    del process
    gone, _ = psutil.wait_procs(started, timeout=10)
    assert started and len(gone) == len(started)


def test_cases_that_were_begun_are_answered_once_wherever_they_stand(
    tmp_path: Path, verifier: VerifierProcess
) -> None:
    """The process answers with how often it has been asked, odd or even: each case is judged once, in the order of asking."""
    define(tmp_path, "seen.append(response); return len(seen) % 2 == 1", before="seen = []")
    a, b, c = (("p", response, None) for response in "abc")
    verifier.begin([b, a])  # 1 right, 2 wrong
    verifier.begin([c, a])  # 3 right, 4 wrong
    assert verifier.verdicts([a, b, c, b, a]) == [False, True, True, True, False], "the second b is the fifth"
    assert verifier.verdicts([a]) == [False], "the sixth: nothing is left of what was begun"


def test_verdicts_on_what_was_begun_for_others_are_kept_for_them(
    tmp_path: Path, verifier: VerifierProcess
) -> None:
    """Some cases that were begun are wanted first, and some never."""
    define(tmp_path, "seen.append(response); return len(seen) % 2 == 1", before="seen = []")
    a, b, c, d = (("p", response, None) for response in "abcd")
    verifier.begin([a, b, a])  # 1 right, 2 wrong, 3 right
    assert verifier.verdicts([c]) == [False], "the fourth"
    verifier.begin([d])  # 5 right
    assert verifier.verdicts([a, d]) == [True, True]
    verifier.give_up()
    assert verifier.is_running, "it has judged everything"
    assert verifier.verdicts([a, b]) == [False, True], "the sixth and the seventh: what was left is forgotten"


def test_who_gives_up_waits_for_no_verdict(tmp_path: Path, verifier: VerifierProcess) -> None:
    """The process would judge for 30 s, and a fault in what nobody wants to know would be the stage's."""
    define(tmp_path, "if response == 'slow': time.sleep(30)\n    return True", before="import time")
    assert verifier.verdicts([CASE]) == [True]
    verifier.begin([("p", "slow", None)] * 3)
    began = time.monotonic()
    verifier.give_up()
    assert not verifier.is_running
    assert verifier.verdicts([CASE]) == [True]
    assert time.monotonic() - began < 20


def test_a_thread_may_begin_cases_while_another_waits_for_verdicts(
    tmp_path: Path, verifier: VerifierProcess
) -> None:
    """Verdicts are matched with their cases, and each case is judged once."""
    define(
        tmp_path,
        "seen.append(response)\n    return len(seen) == len(set(seen)) and int(response) % 3 == 0",
        before="seen = []",
    )
    verifier.verdicts([("p", "-3", None)])
    rows = [("p", str(number), None) for number in range(600)]

    def begin() -> None:
        for place in range(0, 300, 10):
            verifier.begin(rows[place : place + 10])
            verifier.keep_up()

    thread = threading.Thread(target=begin)
    thread.start()
    found = [verifier.verdicts(rows[place : place + 20]) for place in range(300, 600, 20)]
    thread.join()
    assert [right for part in found for right in part] == [number % 3 == 0 for number in range(300, 600)]
    assert verifier.verdicts(rows[:300]) == [number % 3 == 0 for number in range(300)]


@pytest.mark.slow
def test_what_the_pipe_has_no_room_for_is_sent_later(tmp_path: Path, verifier: VerifierProcess) -> None:
    define(tmp_path, "return len(response) == int(answer)")
    long = [("p", "x" * 50_000, str(50_000 + number % 2)) for number in range(20)]
    verifier.begin(long)
    for _ in range(200):
        verifier.keep_up()
        time.sleep(0.005)
    assert verifier.verdicts(long[::-1]) == [number % 2 == 0 for number in range(20)][::-1]


@pytest.mark.slow
def test_a_fault_in_what_was_begun_is_told_when_verdicts_are_wanted(
    tmp_path: Path, verifier: VerifierProcess
) -> None:
    define(tmp_path, "if prompt == 'raise': raise OSError\n    return response == answer")
    raising = ("raise", "", "")
    verifier.begin([CASE, raising])
    verifier.keep_up()
    with pytest.raises(BrokenVerifier) as late:
        verifier.verdicts([raising, CASE])
    with pytest.raises(BrokenVerifier) as at_once:
        verifier.verdicts([raising, CASE])
    assert str(late.value) == str(at_once.value)
    assert verifier.verdicts([CASE, ("p", "1", "2")]) == [True, False], (
        "a new process, with nothing left over"
    )


def test_what_it_prints_in_all_is_bounded_in_the_log(
    tmp_path: Path,
    verifier: VerifierProcess,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forty calls print 1,000 bytes each, and the bound is 10,000."""
    monkeypatch.setattr(verifier_process, "MAX_LOGGED", 10_000)
    define(tmp_path, "print('x' * 999); return True")
    assert verifier.verdicts([("p", str(n), None) for n in range(40)]) == [True] * 40
    logged = capfd.readouterr().err
    assert logged.count("x") == pytest.approx(9_990, abs=11)
    assert logged.count("what else it prints is left out") == 1
    assert verifier(*CASE)
    assert capfd.readouterr().err == ""


def test_one_that_the_kernel_kills_for_memory_is_no_fault_of_its_code(
    tmp_path: Path, verifier: VerifierProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(tmp_path, "os.kill(os.getpid(), 9)", before="import os")
    monkeypatch.setattr(verifier_process, "oom_kills", lambda: 4)
    assert "was ended by SIGKILL" in refusal(verifier)
    counts = iter([4, 5])
    monkeypatch.setattr(verifier_process, "oom_kills", lambda: next(counts))
    with pytest.raises(VerifierOutOfMemory, match="memory ran out for prompt") as failed:
        verifier(*CASE)
    assert explain(failed.value).cause == "memory"

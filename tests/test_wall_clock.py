"""Nothing is decided by a wall clock, which jumps: each use of one is known, and is for people or for MLflow's curves."""

import ast
from collections.abc import Iterator

from tests.support.packages import PACKAGES, ROOT

WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "strftime", "ctime"}
"""Functions of ``time`` and ``datetime`` that read one, or write one down."""

MODULES = {"time", "clock", "datetime", "date"}

KNOWN = {
    "flows/garbage_collection.py": 1,  # when something was removed, for people
    "flows/prefect_server/approval_form.py": 1,  # when a person answered, for people
    "runs/approving.py": 1,
    "signing/key_validity.py": 1,  # when a decision was signed, and whether a key is valid now: periods are civil times
    "schemas/records/approvals.py": 1,  # the same, written out
    "attempts/launchers/waiting.py": 4,  # since when a stage waits for nodes, for people
    "attempts/usage.py": 1,  # the times of readings of the machine, which MLflow draws
    "models/pinned_date.py": 1,  # none: the recipe's date, written out
    "runs/run.py": 1,  # when a run was started, for people
    "tasks/rewards/asking.py": 1,  # until when a server asks to wait, which may be a civil time; at most 300 s are waited
    "tasks/training/attempt.py": 2,  # the times of a journal's lines, which MLflow draws; those of a shorter stage have none
    "tasks/training/batch_files.py": 1,
    "tasks/training/progress.py": 2,  # of progress, for people
    "review/reports/annex_facts.py": 1,  # none: recorded times, written out
    "review/reports/decision.py": 1,  # the same
    "flows/prefect_server/outages.py": 3,  # since when a server does not answer, for people
    "ledger/to_mlflow/aliases.py": 1,  # none: a recorded time, written out
    "ledger/to_mlflow/model_description.py": 2,  # when a model was published, for MLflow
}
"""Module → how often it reads a wall clock. What compares times has to read ``time.monotonic``."""


def readings(tree: ast.Module) -> Iterator[str]:
    """Yield every ``module.function`` of the clock that is called."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=module))) if module in MODULES:
                if name in WALL:
                    yield f"{module}.{name}"
            case ast.Call(func=ast.Attribute(attr="strftime")):
                yield "strftime"


def test_every_reading_of_a_wall_clock_is_known() -> None:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if count := len(list(readings(ast.parse(path.read_text(encoding="utf-8"))))):
                found[path.relative_to(ROOT).as_posix()] = count
    assert found == KNOWN


def test_a_comparison_of_times_would_be_found() -> None:
    code = "import time\nif time.time() - started > 60 or datetime.now() > end: pass\ntime.monotonic()\n"
    assert set(readings(ast.parse(code))) == {"time.time", "datetime.now"}

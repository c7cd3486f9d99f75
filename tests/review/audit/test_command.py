"""The command has the right exit codes, JSON, tree and page."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.review.audit.tampering import Case, flip_bit
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.audit_page import audit_page
from vantage.cli.audit_tree import show_audit
from vantage.cli.main import app
from vantage.schemas.records.audit import AuditedArtifact, AuditedRun, AuditReport, Check, Edge, Hashing

DIGEST, OTHER = "a" * 64, "b" * 64


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["audit", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_json_tree_and_page_tell_the_same(case: Case, tmp_path: Path) -> None:
    at = ("--workspace", str(case.workspace.root))
    page = tmp_path / "audit.html"
    code, printed, _ = run("fake@champion", *at, "--json", "--html", str(page))
    told = json.loads(printed)
    assert (code, told["exit_code"], told["outcome"]) == (0, 0, "note"), "the workspace was moved"
    assert told["roots"] and {each["step"] for each in told["artifacts"]} >= {
        "policy",
        "data.prompts",
        "evaluation",
    }
    assert "all agrees" in page.read_text()
    flip_bit(case.object("sft") / "weights.txt")
    code, printed, _ = run("fake@champion", *at)
    assert code == 1
    assert "\x1b" not in printed, "plain where nobody looks at a terminal"
    lines = printed.splitlines()
    assert lines[0] == "fake version 1, which champion points to"
    assert sum("weights.txt: sha256 is" in line for line in lines) == 1, "once, however many edges lead there"
    assert sum("checked above" in line for line in lines) >= 2
    assert lines[-1].startswith("✗ WRONG: 1 check failed: sft files (3 notes). ")


def test_what_is_not_there_is_refused_in_one_sentence(case: Case, tmp_path: Path) -> None:
    at = ("--workspace", str(case.workspace.root))
    for target, said in {
        "nothing": "is no run, no digest, no folder, and no registered model",
        "fake@nobody": "is no run, no digest, no folder, and no registered model",
        "latest/nothing": "has no step nothing; it has model",
        "f" * 32: "has no run ffff",
        str(tmp_path): "so there is no list of what it must hold",
        str(case.workspace.root): "is a workspace; name what to audit in it",
        "./nowhere": "is no folder",
    }.items():
        code, printed, error = run(target, *at)
        assert (code, printed) == (ExitCode.BAD_INPUT, ""), target
        assert said in error and "Traceback" not in error, (target, error)


def test_a_name_of_two_things_is_refused_with_the_spelling_of_each(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--workspace", str(case.workspace.root))
    monkeypatch.chdir(tmp_path)
    digest = str(case.record.stages["sft"].digest)
    for name in ("latest", "fake"):
        shutil.copytree(case.object("sft"), tmp_path / name)
    code, printed, error = run("latest", *at)
    assert (code, printed) == (ExitCode.BAD_INPUT, "")
    assert f"latest means a folder and run {case.record.run_id}; write folder:latest or run:latest" in error
    code, printed, error = run("fake", *at)
    assert (code, printed) == (ExitCode.BAD_INPUT, "")
    assert "fake means a folder and a registered model; write folder:fake or registered:fake" in error
    for target, described in {
        "folder:latest": "folder latest",
        "run:latest": f"run {case.record.run_id} of fake, completed",
        "run:latest/sft": f"sft of run {case.record.run_id}",
        "registered:fake": "fake version 1",
        f"digest:{digest[:8]}": f"artifact {digest}",
    }.items():
        code, printed, error = run(target, *at)
        assert (code, printed.splitlines()[0]) == (0, described), (target, error)


def test_a_recipe_is_no_target_and_a_registered_model_of_its_name_is(case: Case) -> None:
    code, _, error = run("quickstart", "--workspace", str(case.workspace.root))
    assert code == ExitCode.BAD_INPUT
    assert "quickstart is a recipe, not a result of a run; " in error
    assert "audit` accepts RUN, RUN/STAGE, RUN/model, NAME, NAME@ALIAS or NAME/VERSION" in error


def test_a_run_whose_record_or_outbox_cannot_be_read_is_wrong_and_told_so(case: Case) -> None:
    """The run is audited from what is left; a pipe, whose reader would wait for ever, is not read."""
    at = ("--workspace", str(case.workspace.root))
    case.run_json.write_text("{")
    code, printed, error = run("latest", *at)
    assert (code, error) == (1, "")
    assert "✗ run record" in printed and "run.json cannot be read" in printed
    assert "policy" in printed, "what the outbox told of is audited"
    case.run_json.unlink()
    os.mkfifo(case.run_json)
    case.outbox.unlink()
    case.outbox.mkdir()
    code, printed, error = run("fake@champion", *at)
    assert (code, error) == (1, "")
    assert "its outbox cannot be read" in printed


def test_a_database_of_others_is_told_without_a_traceback(
    case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--workspace", str(case.workspace.root))
    (case.workspace.root / "mlflow.db").unlink()
    with closing(sqlite3.connect(case.workspace.root / "mlflow.db")) as database:
        database.execute("CREATE TABLE experiments (number INTEGER)")
        database.commit()
    code, printed, _ = run("latest/sft", *at)
    assert (code, "does not answer" in printed) == (2, True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+nothing://ada:secret@127.0.0.1:9/mlflow")
    code, printed, _ = run("latest/sft", *at)
    assert (code, "does not answer" in printed, "secret" in printed) == (2, True, False)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_the_help_has_the_audits_own_exit_codes() -> None:
    told = " ".join(run("--help")[1].split())
    assert "Exit code 0: all agrees. 1: something is wrong. 2: nothing is wrong" in told.replace(
        "│", ""
    ).replace("  ", " ")


@pytest.mark.slow
def test_the_command_loads_no_tensor_library(case: Case) -> None:
    program = (
        "import sys; from vantage.cli.main import app\n"
        "before = {'mlflow', 'rich.tree'} & set(sys.modules)\n"
        "try:\n    app(sys.argv[1:])\n"
        "except SystemExit as end:\n    code = end.code\n"
        "print(code, sorted(before), sorted({'torch', 'prefect', 'transformers'} & set(sys.modules)))"
    )
    arguments = ["audit", "latest", "--json", "--workspace", str(case.workspace.root)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 [] []", done.stderr


class Page(HTMLParser):
    """Counts what is open, and remembers attributes."""

    VOID = frozenset({"meta", "link", "br", "!doctype"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]
        self.ids += [value or "" for name, value in attributes if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_escapes_all_that_others_wrote_and_needs_no_network() -> None:
    evil = '"><script>alert(1)</script>\x1b[2J'
    artifact = AuditedArtifact(
        id=evil, step=evil, kind="policy", digest=DIGEST, stage_key=OTHER, run_id=evil, num_files=1, num_bytes=1,
        checks=(Check(subject=evil, outcome="wrong", detail=evil),),
    )  # fmt: skip
    child = artifact.model_copy(
        update={
            "id": "child",
            "parents": tuple(
                Edge(role=role, digest=DIGEST, parent=evil, checks=(Check(subject="parent"),))
                for role in ("a", "b")
            ),
        }
    )
    report = AuditReport(
        target=evil,
        described=evil,
        roots=("child",),
        artifacts=(child, artifact),
        runs=(AuditedRun(run_id=evil, checks=(Check(subject="MLflow"),)),),
        hashing=Hashing(num_bytes=10**9, seconds=2.0, read_seconds=0.5, hash_seconds=1.5),
    )
    text = audit_page(report)
    page = Page(text)
    assert page.open == []
    assert "script" not in page.tags and "\x1b" not in text
    assert [link.startswith("#") for link in page.links] == [True]
    assert page.links[0][1:] in page.ids
    assert "width=device-width" in text and "prefers-color-scheme: dark" in text
    assert "1.00 GB hashed in 2.00 s (500.0 MB/s; hashing took longer than reading)" in text
    assert "http" not in text.replace("<!doctype html>", "")


def test_no_text_of_a_record_looks_like_a_line_of_the_audit() -> None:
    """An approver may be called anything in a record that somebody edited."""
    evil = "ada\n✓ all agrees. 3 artifacts, 20 checks\x1b[2K\r\x9b2K\t[red]x[/]"
    checks = tuple(
        Check(subject=f"{subject}{evil}", outcome=outcome, detail=f"a {evil}; {evil}")
        for subject in ("answers", "alias ")
        for outcome in ("ok", "wrong", "note", "unchecked")
    )
    child = AuditedArtifact(
        id="child", step=evil, kind=evil, digest=DIGEST, stage_key=None, run_id=evil, num_files=1, num_bytes=1,
        checks=checks, parents=(Edge(role=evil, digest=OTHER, parent=None, checks=checks),),
    )  # fmt: skip
    report = AuditReport(
        target=evil, described=evil, checks=checks, roots=("child",), artifacts=(child,), runs=(AuditedRun(run_id=evil, checks=checks),)
    )  # fmt: skip
    shown = StringIO()
    show_audit(Console(file=shown, width=200, color_system=None), report)
    lines = shown.getvalue().splitlines()
    assert not [line for line in lines if line.lstrip(" │├└─").startswith("✓ all agrees")]
    assert not {"\x1b", "\x9b", "\r"} & set(shown.getvalue())
    assert lines[-1].startswith("✗ WRONG: ")
    assert all("[red]x[/]" in line for line in lines if "ada" in line), "markup is text"


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for place, said in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "a" / "b.html", "make it first"),
    ):
        code, _, errors = run("no-such-run", "--html", str(place), "--workspace", str(tmp_path))
        assert (code, said in errors, "no-such-run" in errors) == (ExitCode.BAD_INPUT, True, False)


def test_gates_copies_and_aliases_have_lines_of_their_own() -> None:
    subjects = ("files", "ref", "gate accuracy", "copy of version 3", "version 3", "alias champion")
    artifact = AuditedArtifact(
        id="a", step="policy", kind="policy", digest=DIGEST, stage_key=OTHER, run_id="r", num_files=1, num_bytes=1,
        checks=tuple(Check(subject=each) for each in subjects),
    )  # fmt: skip
    report = AuditReport(target="t", described="t", roots=("a",), artifacts=(artifact,))
    shown = StringIO()
    show_audit(Console(file=shown, width=200, color_system=None), report)
    lines = [line.strip(" │├└─") for line in shown.getvalue().splitlines()]
    assert [line for line in lines if line in {f"✓ {each}" for each in subjects}] == [
        *("✓ gate accuracy", "✓ copy of version 3", "✓ version 3", "✓ alias champion")
    ]
    assert "✓ files · ref" in lines
    assert lines[-1] == "✓ all agrees. 1 artifact, 6 checks, no file was hashed."
    page = audit_page(report)
    assert page.index("gate accuracy") < page.index("files"), "what is shown alone comes first"

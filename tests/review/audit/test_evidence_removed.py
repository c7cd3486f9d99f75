"""Each source of evidence is taken away in turn: a check that can no longer be made is never silently passed over."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.review.audit.tampering import Case, found

PAGE = Path(__file__).parents[3] / "docs" / "audit.md"
OF_THE_TESTS = {"events.txt"}


def documented() -> dict[str, int]:
    """Return pattern of paths in a workspace → exit code of the audit without such a file."""
    text = PAGE.read_text().partition("## When evidence is removed")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\S+)` \| .+ \| (\d) \|$", text, re.MULTILINE)
    return {pattern: int(code) for pattern, code in rows}


def pattern_of(path: str) -> str | None:
    """Return the first pattern of the page that a path has."""
    return next((pattern for pattern in documented() if fnmatch(path, pattern)), None)


def files_of(case: Case) -> dict[str, Path]:
    root = case.workspace.root
    return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}


def test_every_file_of_a_workspace_is_documented(case: Case) -> None:
    files = files_of(case).keys() - OF_THE_TESTS
    assert [path for path in files if pattern_of(path) is None] == []
    assert {pattern_of(path) for path in files} == documented().keys()


@pytest.mark.parametrize("pattern", documented())
def test_a_removed_file_is_missed_as_documented(case: Case, pattern: str) -> None:
    paths = {name: path for name, path in files_of(case).items() if pattern_of(name) == pattern}
    # runs of other copies have put their models beside those of this run
    mine = ("policy", case.copy_of("fake").parent.name)
    removed = next((path for name, path in paths.items() if any(each in name for each in mine)), None)
    removed = removed or next(iter(paths.values()))
    removed.parent.chmod(0o755)
    removed.unlink()
    report = case.audit()
    assert report.exit_code == documented()[pattern], (removed, found(report), found(report, "unchecked"))


def test_a_run_whose_record_of_what_was_sent_is_emptied_is_not_checked(case: Case) -> None:
    """An emptied record shows less than a removed one, and a cut outbox would not be noticed."""
    sent = case.outbox.with_name("sent.json")
    for content in (b"{}", b"[", b"[]", b'{"1 fake 0": 0}'):
        sent.chmod(0o644)
        sent.write_bytes(content)
        report = case.audit()
        assert (report.exit_code, found(report)) == (2, []), content
        assert any("ledger/sent.json has no entry" in each for each in found(report, "unchecked"))


def test_a_pipe_in_place_of_a_record_is_not_checked_and_never_waited_for(case: Case) -> None:
    sent = case.outbox.with_name("sent.json")
    sent.unlink()
    os.mkfifo(sent)
    report = case.audit()
    assert (report.exit_code, found(report)) == (2, [])

"""The digest of our installed files changes with each file that a run can read, and an installed copy has its checkout's digest."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.version import PROJECT_VERSION
from vantage.attempts.identity import package
from vantage.attempts.identity.package import package_digest, package_version

ROOT = Path(__file__).parents[3]


FILES = {
    "flows/__init__.py": "",
    "flows/a.py": "a = 1\n",
    "recipes/__init__.py": "",
    "recipes/r.yaml": "recipe: r\n",
}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield two small packages in place of ours."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "vantage").mkdir()
    (tmp_path / "vantage/__init__.py").write_text("b = 1\n")
    for name in ("flows", "recipes"):
        (tmp_path / "vantage" / name).symlink_to(f"../{name}")
    monkeypatch.setattr(package, "package_folder", lambda: tmp_path / "vantage")
    package_digest.cache_clear()
    yield tmp_path
    package_digest.cache_clear()


def digest() -> str:
    package_digest.cache_clear()
    return package_digest()


def test_it_is_the_sha256_of_a_sorted_list_of_paths_and_hashes(copy: Path) -> None:
    content = {"__init__.py": "b = 1\n", **FILES}
    lines = [f"{path} {hashlib.sha256(text.encode()).hexdigest()}" for path, text in sorted(content.items())]
    assert digest() == hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "flows/a.py").write_text("a = 2\n"),
        lambda folder: (folder / "flows/a.py").rename(folder / "flows/b.py"),
        lambda folder: (folder / "flows/new.py").write_text(""),
        lambda folder: (folder / "recipes/r.yaml").write_text("recipe: r  # said\n"),
        lambda folder: (folder / "vantage/__init__.py").write_text("b = 2\n"),
        lambda folder: (folder / "recipes/rows.jsonl").write_text("{}\n"),
    ],
)
def test_every_file_that_a_run_can_read_changes_it(copy: Path, change: object) -> None:
    before = digest()
    assert callable(change)
    change(copy)
    assert digest() != before


def test_compiled_files_and_notes_do_not(copy: Path) -> None:
    before = digest()
    (copy / "flows/__pycache__").mkdir()
    (copy / "flows/__pycache__/a.py").write_text("")
    (copy / "flows/notes.txt").write_text("")
    (copy / "flows/empty").mkdir()
    assert digest() == before


def test_a_package_without_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "package_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="has no files to digest: install vantage-rlhf again"):
        digest()


def test_a_process_keeps_the_digest_of_the_code_that_it_began_with(copy: Path) -> None:
    before = digest()
    (copy / "flows/a.py").write_text("a = 2\n")
    assert package_digest() == before


@pytest.mark.slow
def test_an_installed_copy_has_the_digest_of_its_checkout_and_no_revision_of_a_repository_around_it(
    tmp_path: Path,
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "pyproject.toml").write_text("")
    site = tmp_path / "venv" / "site-packages"
    site.mkdir(parents=True)
    shutil.copytree(
        ROOT / "vantage", site / "vantage", ignore=shutil.ignore_patterns("__pycache__")
    )  # a wheel has no links
    assert not (site / "vantage" / "flows").is_symlink()
    code = "import vantage, json; from vantage.attempts.identity.identity import identity; print(json.dumps([vantage.__file__, identity()]))"
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    file, told = json.loads(printed.stdout)
    assert Path(file).is_relative_to(site)
    assert told["package"] == digest()
    assert (told["revision"], told["dirty"]) == ("unknown", "unknown")


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert package_version() == PROJECT_VERSION

"""A wheel has every package of Vantage, and no module of ours is loaded under two names."""

import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.support.packages import PACKAGES, ROOT

PROBE = """
import gc, importlib, pkgutil, sys
gc.disable()  # a sixth of the time
import vantage
modules = [found.name for found in pkgutil.walk_packages(vantage.__path__, "vantage.")]
for name in modules:
    if not name.endswith("__main__") and not name.startswith("vantage.recipes."):
        importlib.import_module(name)
ours = {found.name for found in pkgutil.iter_modules(vantage.__path__)} - {"__main__"}  # which is the probe itself
print(len(modules), *sorted(ours & set(sys.modules)), flush=True)
"""
"""Verifiers of built-in recipes are no modules of ours: a stage reads them as it reads a user's."""


def test_every_package_is_in_the_wheel() -> None:
    found = set(find_packages(str(ROOT), include=["vantage", "vantage.*"]))
    folders = (file.parent for name in PACKAGES for file in (ROOT / name).rglob("__init__.py"))
    assert found == {
        "vantage",
        *(".".join(("vantage", *folder.relative_to(ROOT).parts)) for folder in folders),
    }


def test_every_link_leads_to_the_folder_of_its_name() -> None:
    assert len(PACKAGES) == 15
    for name in PACKAGES:
        assert (ROOT / "vantage" / name).readlink() == Path("..") / name
        assert (ROOT / name / "__init__.py").is_file()


@pytest.mark.slow
def test_no_module_is_loaded_under_a_name_without_the_prefix(tmp_path: Path) -> None:
    """This holds even where the packages' folder and the folder above it are on the path, by a user's mistake."""
    path = f"{ROOT / 'vantage'}:{ROOT}"
    printed = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert int(printed[0]) > 500
    assert printed[1:] == []


@pytest.mark.slow
def test_modules_of_a_user_that_are_called_like_ours_do_no_harm(tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    command = [sys.executable, "-c", "from vantage.cli.main import main; main()", "plan", "quickstart"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": f".:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "policy" in done.stdout

"""Vantage works as a wheel in an environment of its own, run from folders that hold modules of many names."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.packages import PACKAGES, ROOT

pytestmark = pytest.mark.slow

OWN = (*PACKAGES, "vantage_recipes", "utils", "helpers", "config", "main", "data", "pipeline", "server")
"""Names of our packages, and names that a user's modules often have."""
SHADOWING = (
    *("types", "typing", "logging", "json", "random", "copy", "queue", "email", "secrets", "signal"),
    *("platform", "code", "token", "calendar"),
    *("torch", "tokenizers", "datasets", "yaml", "pydantic", "numpy", "mlflow", "prefect", "rich"),
    *("sqlalchemy", "click", "typer", "anyio"),
)
"""Names of modules that Vantage imports from Python and from its dependencies."""

TINY = """\
recipe: tiny
seed: 3
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: demonstrations.jsonl}
stages:
  sft: {kind: sft, data: demonstrations, epochs: 1}
"""


@dataclass(frozen=True)
class Installed:
    """An environment into which nothing but the wheel was installed; its dependencies are those of the tests."""

    folder: Path

    def run(self, *arguments: str, here: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the command ``vantage`` in the folder."""
        return subprocess.run(
            [self.folder / "bin" / "vantage", *arguments],
            cwd=here,
            env={"PATH": "/usr/bin:/bin", "HOME": str(here), "VANTAGE_CACHE": os.environ["VANTAGE_CACHE"], **environment},
            capture_output=True,
            text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    source, wheels, target = folder / "source", folder / "wheels", folder / "environment"
    source.mkdir()  # building leaves folders beside the code
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "vantage"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source], check=True
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    python, [wheel] = target / "bin" / "python", wheels.iterdir()
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    [packages] = target.glob("lib/python*/site-packages")
    # a folder that a .pth file names has none of its own .pth files read, so that a checkout installed there stays out
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = subprocess.run(
        [python, "-I", "-c", "import vantage; print(*vantage.__path__)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert where.stdout.strip() == str(packages / "vantage")
    return Installed(target)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a folder with a small recipe."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    rows = ({"prompt": f"{number} plus 1", "response": str(number + 1)} for number in range(200))
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def lay_modules(folder: Path, names: tuple[str, ...]) -> None:
    """Lay modules of these names into the folder, each of which ends the process that imports it."""
    for name in names:
        (folder / f"{name}.py").write_text(
            f"raise SystemExit('the module {name} of the user was imported')\n"
        )


def assert_plans_and_runs(installed: Installed, here: Path, **environment: str) -> None:
    planned = installed.run("plan", "quickstart", here=here, **environment)
    assert (planned.returncode, planned.stderr) == (0, "")
    assert "never run here" in planned.stdout
    done = installed.run("run", "tiny.yaml", "--json", here=here, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the user was imported" not in done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["stages"]["sft"]["status"] == "completed"
    [report] = here.glob(".vantage/runs/*/report.html")
    assert report.stat().st_size > 0


def test_modules_in_the_current_folder_are_not_imported(installed: Installed, here: Path) -> None:
    lay_modules(here, (*OWN, *SHADOWING))
    assert_plans_and_runs(installed, here)


def test_nor_are_those_of_our_names_on_the_users_path(installed: Installed, here: Path) -> None:
    """Modules that take the names of Python's own or of a dependency would break any program there."""
    lay_modules(here, OWN)
    assert_plans_and_runs(installed, here, PYTHONPATH=".")


PROGRAM = """\
import models, tasks  # the user's own
import vantage

assert (models.OWN, tasks.OWN) == ("models", "tasks"), "the folder's modules are its own"
assert [step.name for step in vantage.plan("tiny.yaml").steps] == ["model", "data.demonstrations", "sft"]
run = vantage.run("tiny.yaml", set={"data.demonstrations.rows": 100})
assert run.status == "completed", run
assert run.stage("sft").metrics["test_nll"] > 0
assert len(run.stage("sft").curve("loss")) > 0
assert vantage.open_run("latest").id == run.id
print(vantage.load_policy("latest").model.num_parameters())
"""


def test_python_runs_a_recipe_in_a_folder_with_modules_of_its_own(installed: Installed, here: Path) -> None:
    (here / "models").mkdir()
    (here / "models" / "__init__.py").write_text("OWN = 'models'\n")
    (here / "tasks.py").write_text("OWN = 'tasks'\n")
    (here / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [installed.folder / "bin" / "python", "program.py"],
        cwd=here,
        env={"PATH": "/usr/bin:/bin", "HOME": str(here), "VANTAGE_CACHE": os.environ["VANTAGE_CACHE"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1]) > 0
    [report] = here.glob(".vantage/runs/*/report.html")
    assert report.stat().st_size > 0

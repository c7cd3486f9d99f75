"""Each process loads only the modules that it may: import-linter sees import statements, this sees ``sys.modules``."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import grimp
import pytest

from vantage.schemas.kinds import KINDS

ROOT = Path(__file__).parents[1]

TENSORS = {"torch", "transformers", "accelerate", "peft"}
SERVERS = {"prefect", "mlflow"}

TO_MLFLOW = (
    "run_writer",
    "aliases",
    "audited_runs",
    "copies",
    "critic_pages",
    "delivery",
    "list_of_runs",
    "producers",
    "logged_models",
    "registered_models",
    "published_models",
    "mlflow_runs",
    "samples",
    "served_files",
    "server",
    "writing",
)
"""Modules of the ledger that may load mlflow."""

PROBE = """
import gc, importlib, json, sys
gc.disable()  # a sixth of the time
loaded = []
for modules, forbidden in json.loads(sys.argv[1]):
    loaded.append({})
    for module in modules:
        before = set(sys.modules)
        importlib.import_module(module)
        for name in sorted(forbidden):
            if name in sys.modules and name not in before:
                loaded[-1][name] = module
print(json.dumps(loaded))
"""


def modules_of(package: str, *, but: Collection[str] = ()) -> list[str]:
    """Return every module of a package as the tree has it now, and the package itself."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = {
        ".".join(("vantage", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for file in files
    }
    assert names, f"there is no {package}"
    assert names.issuperset(but), f"{sorted(set(but) - names)} is gone; the exception can go too"
    return sorted(names.difference(but))


def loaded_by(modules: list[str], forbidden: set[str]) -> dict[str, str]:
    """Return which of ``forbidden`` are loaded when ``modules`` are imported in a fresh process, and by which of them."""
    [found] = loaded_in_turn((modules, forbidden))
    return found


def loaded_in_turn(*groups: tuple[list[str], set[str]]) -> list[dict[str, str]]:
    """Return the forbidden modules that each of several groups loads. One process imports the groups in turn, so what they share is loaded once.

    What an earlier group may load is not noticed in a later one, so a later one forbids no more than those before it.
    """
    for (_, before), (_, after) in pairwise(groups):
        assert after <= before, f"{sorted(after - before)} may be loaded by the group before"
    words = json.dumps([[modules, sorted(forbidden)] for modules, forbidden in groups])
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert probe.returncode == 0, probe.stderr
    found: list[dict[str, str]] = json.loads(probe.stdout.splitlines()[-1])
    return found


def test_schemas_load_no_tensor_library_no_server_and_no_tables() -> None:
    modules = modules_of("schemas", but={"vantage.schemas.tables", "vantage.schemas.row_rules"})
    assert loaded_by(modules, TENSORS | SERVERS | {"pandera", "pyarrow", "datasets"}) == {}


def test_tables_load_no_tensor_library_and_no_server() -> None:
    rules, tables = ["vantage.schemas.row_rules"], ["vantage.schemas.tables"]
    found = loaded_in_turn((rules, TENSORS | SERVERS | {"pandera"}), (tables, TENSORS | SERVERS))
    assert found == [{}, {}]


@pytest.mark.slow
def test_what_computes_loads_no_server_and_algorithms_nothing_that_knows_a_recipe_or_a_file() -> None:
    """Stages can be imported where Prefect, MLflow and pandera are not installed; datasets is loaded by what asks for it."""
    unknown = {"transformers", "accelerate", "peft", "pydantic", "yaml", "pyarrow", "vantage.schemas"}
    unwanted, rows = (
        SERVERS | {"pandera", "datasets"},
        "vantage.tasks.prepare_data",
    )  # this stage checks rows with pandera
    groups = (
        (modules_of("algorithms"), unknown | unwanted),
        (modules_of("models"), unwanted),
        (modules_of("tasks", but={rows}), unwanted),
        ([rows], {"datasets"}),
    )
    assert loaded_in_turn(*groups) == [{}, {}, {}, {}]


@pytest.mark.parametrize(
    "module, unread", [("rewards.verifier_worker", "numpy"), ("data.row_worker", "pydantic")]
)
def test_processes_that_stages_wait_for_load_little(module: str, unread: str) -> None:
    """These libraries would take a third of their start."""
    assert loaded_by([f"vantage.tasks.{module}"], TENSORS | SERVERS | {"pandera", "datasets", unread}) == {}


def test_storage_and_what_is_told_to_the_ledger_load_no_tensor_library_and_no_server() -> None:
    to_mlflow = {"vantage.ledger.to_mlflow." + name for name in TO_MLFLOW}
    ledger, unwanted = modules_of("ledger", but=to_mlflow), TENSORS | SERVERS | {"pandera"}
    assert loaded_in_turn((modules_of("storage"), unwanted | {"pyarrow"}), (ledger, unwanted)) == [{}, {}]


def test_what_trains_nothing_loads_no_tensor_library() -> None:
    modules = ["vantage.tasks.stages", "vantage.tasks.prepare_data", "vantage.tasks.training.preemption"]
    assert loaded_by(modules, TENSORS) == {}


@pytest.mark.slow
def test_the_orchestrating_process_never_loads_a_tensor_library() -> None:
    # The first is imported by the fork server alone, the others by the processes of stages.
    children = {
        "vantage.attempts.launchers.forkserver",
        "vantage.attempts.launchers.torchrun",
        "vantage.attempts.launchers.ray_train",
    }
    ordering = ("cli", "flows", "review", "signing", "runs", "estimates", "attempts")
    modules = [name for package in ordering for name in modules_of(package)]
    assert children < set(modules)
    assert loaded_by(sorted(set(modules) - children), TENSORS) == {}


def test_the_command_line_starts_without_prefect_mlflow_and_pandera() -> None:
    assert loaded_by(["vantage.cli.main"], TENSORS | SERVERS | {"pandera", "pyarrow", "datasets"}) == {}


PLAN = """
import json, sys
from typer.testing import CliRunner
from vantage.cli.main import app
done = CliRunner().invoke(app, sys.argv[1:])
print(json.dumps([done.exit_code, done.output, sorted({"datasets", "huggingface_hub", "torch"} & set(sys.modules))]))
"""


def test_fake_stages_load_no_tensor_library_and_no_server() -> None:
    """Each fake stage is a process of its own: with torch, a run of nine stages takes 40 seconds more."""
    fakes = ("fake_work", "fake_models", "fake_stages", "shown_work", "answering_work")
    assert loaded_by([f"tests.support.{name}" for name in fakes], TENSORS | SERVERS) == {}


def test_planning_loads_no_datasets_and_asks_no_hub(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "data-00000.arrow").write_bytes(b"")
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-00000.arrow"}]}')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "recipe: x\nmodel: {source: 'builtin:nano'}\ndata:\n"
        f"  hub: {{source: 'hub:org/name@{'0' * 40}', load: {{split: train, config: main}}}}\n"
        "  saved: {source: saved}\n"
        "stages: {one: {kind: sft, data: hub}, two: {kind: sft, data: saved, init: one}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", PLAN, "plan", str(recipe), "--workspace", str(tmp_path / "w"), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    assert done.returncode == 0, done.stderr
    code, output, loaded = json.loads(done.stdout.splitlines()[-1])
    assert (code, loaded) == (0, []), output
    assert "data.hub" in output and "data.saved" in output


def test_the_probe_finds_what_is_there() -> None:
    groups = ["vantage.algorithms.kl"], ["vantage.schemas.recipe.recipe"]
    assert loaded_in_turn((groups[0], {"torch", "pydantic", "prefect"}), (groups[1], {"pydantic"})) == [
        {"torch": "vantage.algorithms.kl"},
        {"pydantic": "vantage.schemas.recipe.recipe"},
    ]


def test_the_module_of_a_kind_stands_above_all_that_stages_share() -> None:
    """The modules directly in ``tasks`` are those of the kinds and the two that start them; no module of ``tasks`` imports one."""
    graph = grimp.build_graph("vantage", cache_dir=None)
    of_kinds = {kind.module for kind in KINDS.values()}
    starting = {"vantage.tasks.stages", "vantage.tasks.sampling_process"}
    alone = {name for name in graph.find_children("vantage.tasks") if not graph.find_children(name)}
    assert alone == of_kinds | starting
    for module in sorted(of_kinds):
        importers = graph.find_modules_that_directly_import(module)
        assert not {name for name in importers if name.startswith("vantage.tasks.")}, module
        assert not graph.find_modules_directly_imported_by(module) & starting, module

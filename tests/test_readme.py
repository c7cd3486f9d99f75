"""What the README and its pages show works as it is shown."""

import ast
import re
from itertools import pairwise
from pathlib import Path
from textwrap import indent

import pytest
import yaml

import vantage
from tests.mutations.mutations import load as load_mutations
from tests.schemas.critic_samples import diagnosis
from vantage.ledger.critic_page.tables import diagnosis_tables
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.presets import PRESETS
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.schemas.steps import dependencies
from vantage.tasks.rewards.exact_match import exact_match
from vantage.tasks.rewards.verifier_file import load_user_function

README_FILE = Path(__file__).parents[1] / "README.md"
README = README_FILE.read_text(encoding="utf-8")


def page(name: str) -> str:
    """Return the text of a page of docs/."""
    return (README_FILE.parent / "docs" / f"{name}.md").read_text(encoding="utf-8")


SECTION = page("own_model_and_data").partition("## A rule of your own")[2].partition("\n## ")[0]
STAGES = """
recipe: rule
model: {source: "builtin:tiny"}
stages:
  policy: {kind: policy_optimization, algorithm: grpo, init: model, reward: main, prompts: tasks}
  evaluation: {kind: evaluation, candidate: policy, baseline: model, judge: {verifier: gsm8k}, prompts: tasks}
"""


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return str(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the README's recipe names."""
    (tmp_path / "gsm8k.py").write_text(block("python"))
    (tmp_path / "gsm8k.jsonl").write_text("")
    return tmp_path


def test_the_rule_as_shown_tells_right_from_wrong(folder: Path) -> None:
    verify = load_user_function(folder / "gsm8k.py", "verify", name="gsm8k").judge
    assert verify("How many?", "48 + 24 = 72\n#### 72", "72") is True
    assert verify("How many?", "48 + 24 = 71\n#### 71", "72") is False


def test_the_recipe_as_shown_loads_and_extracts(folder: Path) -> None:
    recipe = parse_recipe(STAGES + block("yaml"), folder=folder)
    assert [term.verifier for term in recipe.rewards["main"].terms] == ["gsm8k", "boxed"]
    extract = recipe.verifiers["boxed"].extract
    assert exact_match(r"so it is \boxed{1,000}.", "1000.0", extract=extract)
    assert not exact_match("so it is 1,000.", "1000.0", extract=extract)


@pytest.mark.parametrize("text", [README, page("contributing")], ids=["README", "contributing"])
def test_other_pages_show_the_same_rule(text: str) -> None:
    assert f"```python\n{block('python')}```" in text


def test_the_recipe_of_the_readme_loads_and_is_planned_whole(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(recipe: .*?)```", README, re.DOTALL)
    (tmp_path / "small.yaml").write_text(text)
    plan = vantage.plan(tmp_path / "small.yaml", workspace=tmp_path / "workspace")
    stages = [step.name for step in plan.steps if "." not in step.name]
    assert stages == ["model", "sft", "reward", "value", "policy", "evaluation"]
    assert {step.label for step in plan.steps} == {"run", "wait"}
    assert list(plan.warnings) == []


def test_readme_is_short() -> None:
    """The README has at most 140 lines."""
    assert len(README.splitlines()) <= 140


def test_the_tree_lists_every_folder_of_the_package_and_those_beside_it() -> None:
    tree = page("explanation/code").partition("## The tree\n\n```\n")[2].partition("```")[0]
    packages = {each.name for each in (README_FILE.parent / "vantage").iterdir() if each.is_symlink()}
    assert {line.split("/")[0] for line in tree.splitlines()} == {
        *packages, "vantage", "deploy", "tests", "benchmarks", "docs"
    }  # fmt: skip


def test_the_number_of_mutations_is_about_the_one_named() -> None:
    named = int(re.findall(r"in more than (\d+) ways", page("contributing"))[0])
    assert named < len(load_mutations()) < named + 100


def functions_to_an_optimiser_step() -> list[tuple[str, ast.AST]]:
    """Return (name, syntax tree) of each function that the page of the code lists, in its order."""
    [listed] = re.findall(r"```\n(cli/run.py .*?)```", page("explanation/code"), re.DOTALL)
    functions: list[tuple[str, ast.AST]] = []
    for line in listed.splitlines():
        file, qualified_name = line.split()[:2]
        node: ast.AST = ast.parse((README_FILE.parent / file).read_text(encoding="utf-8"))
        for name in qualified_name.split("."):
            [node] = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == name]
        functions.append((name, node))
    return functions


def names_in(node: ast.AST) -> set[str]:
    """Return every name and attribute that the function reads."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def test_the_functions_on_the_way_to_an_optimiser_step_call_each_other_as_listed() -> None:
    functions = functions_to_an_optimiser_step()
    assert len(functions) <= 15, "20 before the attempts became values"
    for (_, caller), (called, _) in pairwise(functions):
        if called == "run_stage":  # the request contains it as a dotted name
            assert RUN_STAGE == "vantage.tasks.stages.run_stage"
        else:
            assert called in names_in(caller)
    assert "step" in names_in(functions[-1][1])


CRITIC = page("critic")
GATES_ON_A_CRITIC = re.findall(r"```yaml\n(gate:.*?)```", page("explanation/critic") + CRITIC, re.DOTALL)


def test_both_pages_show_the_same_gates_on_a_critic() -> None:
    assert len(GATES_ON_A_CRITIC) == 2
    assert len(set(GATES_ON_A_CRITIC)) == 1


def test_the_gates_on_a_critic_as_shown_are_gates_of_the_quickstart() -> None:
    quickstart = (README_FILE.parent / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    shown = GATES_ON_A_CRITIC[0]
    own = "    gate: {metric: explained_variance, at_least: 0.3, on_fail: stop}\n"
    assert own in quickstart
    recipe = parse_recipe(quickstart.replace(own, indent(shown, "    ")), folder=README_FILE.parent)
    metrics = [gate.metric for gate in recipe.stages["value"].gate]
    assert metrics == ["explained_variance", "explained_variance_length_32_63", "squared_advantage_ratio"]


def test_the_table_of_a_critic_as_shown_is_one_that_is_printed() -> None:
    [table] = [each for each in diagnosis_tables(diagnosis()) if each.title == "By tokens left"]
    shown = " ".join(CRITIC.split())
    assert f"{table.title} {table.good} {' '.join(table.headings)}" in shown


# -- collected responses

COLLECTED_STAGES = [
    re.findall(r"```yaml\nstages:\n(  collected:.*?)```", page(name), re.DOTALL)[0]
    for name in ("algorithms", "baselines")
]


@pytest.mark.parametrize("shown", COLLECTED_STAGES)
def test_the_stages_that_read_collected_responses_load_as_shown(shown: str) -> None:
    """They replace the quickstart's own ``value`` and ``policy``."""
    quickstart = yaml.safe_load(
        (README_FILE.parent / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    )
    quickstart["stages"] |= yaml.safe_load(shown)
    recipe = parse_recipe(yaml.safe_dump(quickstart, sort_keys=False), folder=README_FILE.parent)
    for name in {"value", "policy"} & set(yaml.safe_load(shown)):
        assert dependencies(recipe)[name]["rollouts"] == "collected"


EVALUATIONS = [
    *re.findall(r"```yaml\nstages:\n(  checked:.*?)```", page("evaluation"), re.DOTALL),
    *re.findall(r"```yaml\n(evaluation:.*?|checked:.*?)```", page("evaluation"), re.DOTALL),
]


@pytest.mark.parametrize("shown", EVALUATIONS)
def test_the_evaluations_load_as_shown(shown: str) -> None:
    """The evaluations load among the quickstart's other stages, in the place of its own evaluation."""
    quickstart = yaml.safe_load(
        (README_FILE.parent / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    )
    quickstart["stages"] |= yaml.safe_load(shown)
    recipe = parse_recipe(yaml.safe_dump(quickstart, sort_keys=False), folder=README_FILE.parent)
    assert len(EVALUATIONS) == 3
    assert set(yaml.safe_load(shown)) <= set(recipe.stages)


@pytest.mark.parametrize("name", ["how_to/choose_a_method", "algorithms"])
def test_the_table_of_presets_has_each_once_in_its_row(name: str) -> None:
    table = page(name).partition("| critic | presets |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line) for line in table.splitlines() if "`" in line]
    algorithms = {name: Algorithm.model_validate(name) for name in PRESETS}
    expected = [
        {name for name, each in algorithms.items() if each.reads_critic},
        {name for name, each in algorithms.items() if not each.reads_critic and not each.reads_rollouts},
        {name for name, each in algorithms.items() if each.reads_rollouts},
    ]
    assert [set(row) for row in rows] == expected
    assert sum(map(len, rows)) == len(PRESETS)


# -- commands


def test_make_knows_the_commands_of_the_pages() -> None:
    makefile = (README_FILE.parent / "Makefile").read_text(encoding="utf-8")
    shown = set(re.findall(r"`make ([a-z-]+)`", README + page("contributing")))
    assert {"setup", "demo", "check", "docs", "test", "test-all", "test-slow"} <= shown
    assert shown - set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) == set()


def test_the_two_tiers_are_all_tests() -> None:
    """What `make test` leaves out is what `make test-slow` runs."""
    makefile = (README_FILE.parent / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^(test[a-z-]*):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    elsewhere = {
        "test-engine": ("engine", {"real_vllm.py", "real_server.py"}),
        "test-gpu": ("gpu", {"on_a_gpu.py", "vllm_on_a_gpu.py"}),
    }
    assert recipes.keys() == {"test", "test-slow", "test-all", *elsewhere}
    # These need another machine or environment, and their files another name
    for name, (folder, files) in elsewhere.items():
        assert set(re.findall(rf"tests/{folder}/(\S+\.py)", recipes.pop(name))) == files
        assert {path.name for path in (README_FILE.parent / "tests" / folder).glob("*.py")} == files
    selected = {name: re.findall(r"\$\(PYTEST\)(.*)", recipe) for name, recipe in recipes.items()}
    assert selected == {"test": [' -m "not slow"'], "test-slow": [" -m slow"], "test-all": [""]}
    needs = "tests.support.needs"
    assert [needs in recipe for recipe in recipes.values()] == [False, True, True]
    ci = (README_FILE.parent / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"make (test[a-z-]*)$", ci, re.MULTILINE) == ["test-all"]

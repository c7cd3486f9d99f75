"""The message about each mistake of a newcomer names the field, the value, the rule and the remedy, and the near name."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run
from vantage.runs.workspace import Workspace
from vantage.schemas.loading.meant import name_meant, number_meant, size_meant

RECIPE = """\
recipe: first
seed: 4
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 400}
  prompts: {source: "builtin:arithmetic/prompts", split: {validation: 8, test: 8}}
stages:
  sft: {kind: sft, data: demonstrations, epochs: 2}
  evaluation: {kind: evaluation, candidate: sft, baseline: model, judge: {verifier: arithmetic}, prompts: prompts}
publish:
  - {stage: sft, registered_model: first}
"""
DEMONSTRATIONS = 'demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 400}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(RECIPE)
    return tmp_path


def said(*words: str, code: int = ExitCode.BAD_INPUT) -> str:
    """Return the message of a refused command in one line, without the frame around it."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("epochs: 2", "epoch: 2", "8: stages.sft.epoch: there is no field 'epoch' here; did you mean 'epochs'?"),
        ("kind: sft", "kind: stf", "8: stages.sft.kind: 'stf' is not a kind of stage; did you mean 'sft'?"),
        ("candidate: sft", "candidate: sfx", "no stage is called 'sfx'; did you mean 'sft'?"),
        ("rows: 400", "rows: 400k", "data.demonstrations.rows: '400k' must be a whole number; write the number without quotes or units: 400000"),
        ("epochs: 2", 'epochs: "2"', "stages.sft.epochs: '2' must be a number; write the number without quotes or units: 2"),
        ("validation: 8", "validation: 5%", "write the number without quotes or units: 0.05"),
        ("epochs: 2", "epochs: 2, resources: {memory: 16 GB}", "stages.sft.resources.memory: '16 GB' is not a size; write a whole number and Mi, Gi or Ti, as in 16Gi"),
        ("epochs: 2", "epochs: 2, resources: {gpu: 1}", "there is no field 'gpu' here; did you mean 'gpus'?"),
        ("recipe: first", "recipe: First One", "'First One' is not a valid name; start with a lower-case letter; lower-case letters, digits, underscores and hyphens follow, as in first-one"),
        ("  sft: {", "  my-sft: {", "'my-sft' is not a valid name; start with a lower-case letter; lower-case letters, digits and underscores follow, as in my_sft"),
        ("model: first", "model: first, alias: Best!", "'Best!' is not a valid name; start with a lower-case letter; lower-case letters, digits and hyphens follow, as in best"),
        ('{source: "builtin:tiny"}', "builtin:tiny", "3: model: 'builtin:tiny' must be a mapping (field: value); write {source: 'builtin:tiny'}"),
        (RECIPE[RECIPE.index("  sft:"):RECIPE.index("publish")], "  - {kind: sft}\n", "must be a mapping (field: value); write each entry as `NAME: {…}`, without the dash"),
        ("  - {stage: sft, registered_model: first}", "  {stage: sft, registered_model: first}", "must be a list; begin the entry with `- `"),
        ("prompts: prompts}", "prompts: prompts, gate: accuracy > 0}", "stages.evaluation.gate: 'accuracy > 0' must be a list; write {metric: NAME, at_least: NUMBER}, or a list of such gates"),
        (DEMONSTRATIONS, DEMONSTRATIONS.replace("demonstrations: ", "- ", 1), "6: items of a list and `field: value` are mixed under one field; write all entries in one of the two forms"),
        ("stages:\n", " stages:\n", "7: the indentation of the line is that of no line above; begin it below the line that it belongs to"),
        ("seed: 4", "seed:4", "2: seed: has no space after its colon; write `seed: …`"),
        ("model: {", "model:\n\tsource: {", "4: the line is indented with a tab; YAML allows spaces only"),
        ("seed: 4", "seed: 4\nseed: 5", "3: seed: occurs twice, first in line 2; keep one of the two"),
        ('"builtin:tiny"', "latest", "there is no folder {folder}/latest; name a Hugging Face folder, builtin:tiny, gguf:FILE, package:NAME, hub:ORGANISATION/NAME@REVISION, or RUN/STAGE (latest/policy)"),
    ],
)  # fmt: skip
def test_mistakes_in_a_recipe(folder: Path, right: str, wrong: str, message: str) -> None:
    assert right in RECIPE
    (folder / "wrong.yaml").write_text(RECIPE.replace(right, wrong, 1))
    assert message.replace("{folder}", str(folder)) in said("plan", "wrong.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan frist.yaml", "frist.yaml: there is no such file; did you mean 'first.yaml'?"),
        ("plan first.yml", "first.yml: there is no such file; did you mean 'first.yaml'?"),
        ("plan first", "first: is neither a file nor a built-in recipe; did you mean 'first.yaml'?"),
        ("plan burst", "burst: is neither a file nor a built-in recipe; use one of: "),
        ("plan quickstrat", "quickstrat: is neither a file nor a built-in recipe; did you mean 'quickstart'?"),
        ("plan elsewhere/first.yaml", "elsewhere/first.yaml: there is no such file; built-in: "),
        ("plan .", ".: is not a file; name a .yaml file"),
        ("plan first.yaml --until sftt", "--until=sftt is none of the recipe's stages: sft, evaluation"),
        ("plan first.yaml --set seed", "--set seed: is not an override; write KEY=VALUE"),
        ("sweep first.yaml", "first.yaml:1: is a recipe, not a sweep; use `vantage run`"),
        ("gc --older-than 3", "--older-than='3' is no age; write days, hours or minutes, such as 30d"),
        ("estimate first.yaml --gpu h1000", "--gpu=h1000 is not known; use one of h100"),
        ("data inspect nothing.jsonl", "nothing.jsonl: there is no such file; correct the path"),
        ("status --workspace first.yaml", "workspace {folder}/first.yaml is a file; name another with --workspace DIR"),
        ("plan first.yaml --workspace s3://", "--workspace=s3:// names no bucket; write s3://BUCKET/PREFIX, gs://…, az://…, or the path of a folder"),
        ("plan first.yaml --workspace s3:bucket", "--workspace=s3:bucket names no bucket; write s3://BUCKET/PREFIX"),
        ("plan first.yaml --workspace gs:///x", "--workspace=gs:///x names no bucket"),
    ],
)  # fmt: skip
def test_mistakes_in_what_a_command_is_given(folder: Path, words: str, message: str) -> None:
    assert message.replace("{folder}", str(folder)) in said(*words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rnu first.yaml", "No such command 'rnu'. Did you mean 'run'?"),
        ("plan first.yaml --untill sft", "No such option: --untill (Possible options: --until)"),
        (
            "plan first.yaml --seed 3",
            "No such option: --seed. A field of the recipe is set by --set seed=VALUE.",
        ),
        ("plan first.yaml --detach", "No such option: --detach. It is an option of `vantage run`."),
        ("status --run 1", "No such option: --run. Write its value without --run: vantage status [RUN]."),
        ("logs 1 --stage sft", "Write its value without --stage: vantage logs RUN [STAGE]."),
        ("status 1 --nonsense", "No such option: --nonsense"),
        ("report", "Missing argument 'RUN'. A run's id, the beginning of one, its number, or `latest`."),
        ("keys show", "Missing argument 'FILE'. A private or a public key."),
    ],
)
def test_mistakes_in_commands_and_options(folder: Path, words: str, message: str) -> None:
    assert message in said(*words.split(), code=2)


@pytest.mark.parametrize("named", ["first", "0001-frist", "irst"])
def test_a_run_that_is_nearly_named_is_suggested(folder: Path, named: str) -> None:
    place = Workspace(folder / "workspace")
    with acquire_run(place, load_resolved("first.yaml")[0], source="first.yaml") as run:
        run_id = run.record.run_id
    assert f"did you mean {run_id}? `" in said("logs", named, "--workspace", str(place.root))
    assert "did you mean" not in said("logs", "9", "--workspace", str(place.root))


@pytest.mark.parametrize(
    ("given", "number"),
    [("5%", "0.05"), ("12.5 %", "0.125"), ("400k", "400000"), ("1,000", "1000"), ("7B", "7000000000"), ("1e-3", "1e-3"), ("three", ""), ("", ""), ("-8", "")],
)  # fmt: skip
def test_the_number_that_a_text_means(given: str, number: str) -> None:
    assert number_meant(given) == number


def test_the_size_and_the_name_that_a_text_means() -> None:
    assert [size_meant(given) for given in ("16", "512M", "2 TB", "much")] == [
        *(", as in 16Gi", ", as in 512Mi", ", as in 2Ti", ", as in 512Mi"),
    ]
    name = r"^[a-z][a-z0-9_]{0,62}$"
    assert [name_meant(given, name) for given in ("My SFT", "my-sft", "7b", "ß", "")] == [
        "my_sft",
        "my_sft",
        "",
        "",
        "",
    ]


@pytest.mark.parametrize(("option", "what"), [("--pool", "work pool"), ("--name", "worker")])
def test_a_worker_with_a_name_that_prefect_does_not_take(
    monkeypatch: pytest.MonkeyPatch, option: str, what: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    for name in ("a/b", "50 %", "a\udcffb", ""):
        options = ["--pool", "gpu", "--name", name] if option == "--name" else ["--pool", name]
        assert f"{option}={name!a} is no name of a {what}" in said("worker", *options)

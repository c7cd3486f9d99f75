"""``vantage data inspect`` recognises a stranger's file, and prints an entry for a recipe that reads it."""

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.support.fork_server import WITH_TORCH
from tests.support.small_chat_run import save_chat_model
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers import sampling_process
from vantage.cli import data
from vantage.cli.main import app
from vantage.schemas.recipe.inputs import Data, Load
from vantage.schemas.records.sampling import RenderedRow
from vantage.schemas.source_files import data_limit
from vantage.tasks.data.inspection import inspect_file
from vantage.tasks.data.row_reader import reader_of
from vantage.tasks.data.source_rows import read_rows_of


def inspect(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", "inspect", str(path), *arguments])


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


JUDGED: list[Any] = [
    {"question": f"第{n}问 b?", "response_0": "good", "response_1": "bad", "winner": n % 2} for n in range(40)
]


def test_judgments_with_their_problems_lengths_scripts_and_entry(tmp_path: Path) -> None:
    rows = [*JUDGED, JUDGED[3], {**JUDGED[0], "question": None}, "no row"]
    path = lines(tmp_path / "votes-1.jsonl", rows)
    done = inspect(path, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["content"], found["also"]) == ("preferences", ["prompts"])
    assert (found["num_rows"], found["num_usable"], found["num_prompts"]) == (43, 40, 40)
    assert found["problems"] == {
        "repeats an earlier row": 1,
        "prompt is missing": 1,
        "not an object {column: value}": 1,
    }
    assert [line.partition(":")[0] for line in found["first_problems"]] == ["row 40", "row 41", "row 42"]
    assert found["prompt_characters"] == {"least": 6, "median": 7, "most_95": 7, "most": 7}
    assert set(found["scripts"]) == {"latin", "cjk"}
    entry = yaml.safe_load(found["recipe"])["data"]["votes_1"]
    reader, read = reader_of(Data(**entry), "preferences", read_rows_of(path, ".jsonl", data_limit()))
    made: Any = reader.read(next(read))
    assert (made["prompt"], made["chosen"]) == ("第0问 b?", "good")


def test_rows_are_shown_with_their_roles_and_the_entry_for_a_recipe(tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"it is {n}"} for n in range(30)]
    done = inspect(lines(tmp_path / "alpaca.jsonl", rows), "--rows", "2")
    assert done.exit_code == 0, done.output
    assert "demonstrations: instructions with answers (can be read as prompts, too)" in done.stdout
    assert "User: Say 15.\nAssistant: it is 15" in done.stdout
    assert 'prompt: "{instruction}\\n{input}"' in done.stdout
    assert "problems  none" in done.stdout


@pytest.mark.slow
def test_with_a_model_its_template_and_its_tokens_are_shown(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    talk = [{"role": role, "content": content} for role, content in turns]
    path = lines(tmp_path / "talks.jsonl", [{"messages": talk}] * 2)
    save_chat_model(tmp_path / "model")
    done = inspect(path, "--model", str(tmp_path / "model"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    [shown] = found["shown"]
    assert "".join(text for text, _ in shown["parts"]).count("<|im_start|>") == 4
    assert [text for text, is_learnt in shown["parts"] if is_learnt] == ["b<|im_end|>", "d<|im_end|>"]
    assert found["response_tokens"] == {"least": 2, "median": 2, "most_95": 2, "most": 2}
    assert shown["num_tokens"] == found["prompt_tokens"]["most"] + 2


@pytest.mark.usefixtures("model_threads")
def test_calls_that_the_template_leaves_out_of_earlier_turns_are_counted_by_row(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked, called = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call] * 2},
    )
    ending = [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two."}]
    plain = [asked, {"role": "assistant", "content": "b"}]
    rows = [{"messages": [asked, called, *ending]}, {"messages": plain}]
    save_chat_model(tmp_path / "model")
    done = inspect(lines(tmp_path / "calls.jsonl", rows), "--model", str(tmp_path / "model"))
    assert "not read  calls of tools in 1 row: the model has no chat template that writes them" in done.stdout
    assert "problems  none" in done.stdout


@pytest.mark.usefixtures("model_threads")
def test_special_tokens_that_the_text_spells_out_are_counted_once_a_row(tmp_path: Path) -> None:
    """A preference's prompt is read with each of its two responses, and is counted once."""
    rows = [
        {"prompt": f"<|im_start|> {n}", "chosen": "a<|im_end|><|im_end|>", "rejected": f"b {n}"}
        for n in range(3)
    ]
    path = lines(tmp_path / "pairs.jsonl", [*rows, {"prompt": "plain", "chosen": "c", "rejected": "d"}])
    save_chat_model(tmp_path / "model")
    done = inspect(path, "--model", str(tmp_path / "model"), "--json")
    assert json.loads(done.stdout)["special_tokens"] == {"<|im_start|>": [3, 3], "<|im_end|>": [6, 3]}
    shown = inspect(path, "--model", str(tmp_path / "model")).stdout
    assert (
        "special   tokens that the text spells out: <|im_start|> 3 times in 3 rows, <|im_end|> 6 times in 3 rows"
        in shown
    )
    assert "3 of the first 4 rows do not fit the model's chat template" in shown


@pytest.mark.slow
def test_a_template_that_goes_on_for_ever_for_some_row_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial prompts of a model do not have the word; a row of the file does."""
    monkeypatch.setattr(sampling_process, "RENDER_SECONDS", 1.0)
    fork_models(monkeypatch, WITH_TORCH.popen)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    save_with_template(tmp_path / "model", f"{{% if 'loop' in messages[0].content %}}{loops}{{% endif %}}")
    path = lines(
        tmp_path / "rows.jsonl", [{"prompt": "loop", "response": "a"}, {"prompt": "b", "response": "c"}]
    )
    done = inspect(path, "--model", str(tmp_path / "model"))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert f"--model={tmp_path / 'model'}: the model's chat template did not render 2 rows" in done.output


def fork_models(monkeypatch: pytest.MonkeyPatch, popen: Callable[..., "subprocess.Popen[Any]"]) -> None:
    """Let ``popen`` start the processes that hold a model, which would else load torch for five CPU seconds."""
    monkeypatch.setattr(sampling_process, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))


def save_with_template(folder: Path, before: str) -> None:
    """Save the small model with this text before its chat template, wherever the tokenizer keeps that."""
    save_chat_model(folder)
    for file in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        text = file.read_text() if file.exists() else ""
        if file.suffix == ".jinja" and text:
            file.write_text(before + text)
        elif text and "chat_template" in (settings := json.loads(text)):
            file.write_text(json.dumps({**settings, "chat_template": before + settings["chat_template"]}))


def _with_two_seconds(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start the process that holds a model, which gives a template two seconds instead of twenty."""
    assert command[1:] == ["-m", "vantage.attempts.launchers.quick_imports", "vantage.tasks.sampling_process"]
    program = """
from vantage.attempts.launchers.quick_imports import quick_imports
with quick_imports():
    from vantage.models import template_trial
    from vantage.tasks.sampling_process import main
template_trial.SECONDS = 2.0
main()
"""
    return WITH_TORCH.popen([command[0], "-c", program], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if messages | length == 3 %}{{ 10 ** (10 ** 9) }}{% endif %}", "is not rendered within 2 seconds"),
        ("{% if 'big' in messages[0].content %}{{ 'ab' * 2000000000 }}{% endif %}", "takes more than 2 GiB of memory"),
    ],
)  # fmt: skip
def test_a_template_that_takes_too_much_outside_the_first_prompts_is_ended(
    tmp_path: Path, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first template takes long where the token that closes a turn is looked for, in three turns. The second takes
    memory at one row. The process is a real one."""
    fork_models(monkeypatch, _with_two_seconds)
    save_with_template(tmp_path / "model", template)
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "big", "response": "a"}])
    done = inspect(path, "--model", str(tmp_path / "model"))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert f"the model's chat template {said}" in done.output
    assert str(tmp_path / "model") in done.output


def test_a_text_out_of_proportion_is_that_rows_fault(tmp_path: Path, model_threads: None) -> None:
    save_with_template(
        tmp_path / "model", "{% if 'big' in messages[0].content %}{{ 'ab' * 1000000 }}{% endif %}"
    )
    path = lines(
        tmp_path / "rows.jsonl", [{"prompt": "big", "response": "a"}, {"prompt": "b", "response": "c"}]
    )
    found = json.loads(inspect(path, "--model", str(tmp_path / "model"), "--json").stdout)
    assert found["num_unlike"] == 1
    assert found["first_unlike"][0].startswith("row 0: ") and "makes 2000" in found["first_unlike"][0]
    assert found["prompt_tokens"]["most"] < 100


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.txt", "a", "has none of the suffixes"),
        (
            "rows.jsonl",
            '{"headline": "a"}\n',
            "rows with the columns headline are in no known format; map them",
        ),
        ("rows.jsonl", "[\n", "none of its first"),
        ("rows.parquet", "no", "cannot be read as .parquet"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    done = inspect(tmp_path / name)
    assert done.exit_code == ExitCode.BAD_INPUT
    assert said in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        (
            f"hub:org/name@{'0' * 40}",
            [],
            "is a dataset, which has splits; add --split NAME, or name files: hub:org/name@",
        ),
        (
            "hub:org/name@main",
            ["--split", "train"],
            "hub:org/name@main names no commit of a dataset; write hub:",
        ),
        (
            "rows.jsonl",
            ["--split", "train"],
            "--split=train is about hub:ORGANISATION/NAME@COMMIT, and rows.jsonl is no",
        ),
        (
            "rows.jsonl",
            ["--config", "main"],
            "--config=main is about one split of a dataset on the hub; add --split NAME",
        ),
        (f"hub:a/b@{'0' * 40}", ["--split", "a b"], "--split='a b' is no name of a split"),
        (
            f"hub:a/b@{'0' * 40}",
            ["--split", "a", "--config", "../x"],
            "--config='../x' is no name of a configuration",
        ),
    ],
)
def test_what_a_dataset_of_the_hub_needs_is_named(path: str, arguments: list[str], told: str) -> None:
    done = inspect(Path(path), *arguments)
    assert done.exit_code == ExitCode.BAD_INPUT
    assert told in done.stderr
    assert "Traceback" not in done.output
    assert "validation error" not in done.output


def test_a_hub_that_is_not_there_is_one_plain_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    from huggingface_hub import constants

    for place in (constants, datasets.config):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    source = f"hub:org/name@{'0' * 40}"
    done = inspect(Path(source), "--split", "train", "--max-rows", "5")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert f"source='{source}' with load: {{split: train, max_rows: 5}} could not be loaded" in done.stderr
    assert "Without network, name files that the cache (HF_HOME) has" in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("train[:10]", None, None), "--split='train[:10]' is no name of a split"),
        (("train\n", None, None), "--split='train\\n' is no name of a split"),
        (("train", "ma in", None), "--config='ma in' is no name of a configuration"),
        ((None, "main", None), "--config=main is about one split"),
        ((None, None, 5), "--max-rows=5 is about one split"),
    ],
)
def test_a_part_of_a_dataset_is_named_as_a_recipe_names_it(
    options: tuple[str | None, str | None, int | None], said: str
) -> None:
    with pytest.raises(ValueError) as refused:
        data._load(*options)
    assert said in str(refused.value)
    assert data._load("train", "main", 5) == Load(split="train", config="main", max_rows=5, streaming=True)
    assert data._load(None, None, None) is None


def turn(role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "extra": json.dumps(extra) if extra else None}


def test_turns_without_weight_are_not_shown_as_learnt() -> None:
    turns = [
        *(turn("system", "Be brief."), turn("user", "a?")),
        *(turn("assistant", "a", weight=0), turn("user", "b?"), turn("assistant", "b", weight=1)),
    ]
    shown = data._plain(3, {"messages": turns, "prompt": "b?"})
    learnt = [text for text, is_learnt in shown.parts if is_learnt]
    assert (shown.row, learnt) == (3, ["b\n"])


def test_rows_that_do_not_fit_are_counted_once_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A row of two responses has one fault, a fitting one is shown, and one that is not chosen is only measured."""
    fault = RenderedRow(parts=(), prompt_tokens=0, response_tokens=0, fault="it has no turn of the user")
    fits = [
        RenderedRow(
            parts=(("a?", False), ("a", True)),
            prompt_tokens=prompt,
            response_tokens=4,
            special_in_prompt={"<s>": 1},
            special_in_response={"<s>": 2},
        )
        for prompt in (3, 3, 9)
    ]
    rendered = [fault, fault, *fits]
    process = SimpleNamespace(opened=lambda: None, render=lambda request: SimpleNamespace(rows=rendered))
    monkeypatch.setattr(sampling_process, "open_model", lambda opening: nullcontext(process))
    found = inspected(tmp_path)
    rows = [
        (number, {"messages": None, "prompt": f"{number}?", "chosen": "a", "rejected": "b"})
        for number in (1, 2)
    ] + [(3, {"messages": None, "prompt": "3?", "response": "a"})]
    with_tokens = data._with_tokens(found, "model", rows, rows[:2])
    assert (with_tokens.num_unlike, with_tokens.first_unlike) == (1, ("row 1: it has no turn of the user",))
    assert [(shown.row, shown.num_tokens) for shown in with_tokens.shown] == [(2, 7), (2, 7)]
    assert with_tokens.prompt_tokens is not None and with_tokens.prompt_tokens.most == 9
    assert with_tokens.special_tokens["<s>"] == (1 + 2 + 2 + 1 + 2, 2), "both responses share their prompt"


def inspected(folder: Path) -> Any:
    rows = [{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(5)]
    return inspect_file(lines(folder / "pairs.jsonl", rows), None, None)[0]

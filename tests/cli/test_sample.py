"""``vantage sample``: a policy answers as its recipe samples from it, and errors list what there is."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.support.fake_vllm_server import serving
from tests.support.fork_server import WITH_TORCH
from tests.support.small_chat_run import MAX_TOKENS, TEMPERATURE, WORD
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers import sampling_process
from vantage.cli.main import app
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.prompts import encode_prompts
from vantage.models.sampling import sample
from vantage.runs.run import read_runs
from vantage.runs.summary import commands_for_policy
from vantage.runs.workspace import Workspace
from vantage.schemas.records.sampling import OpenModel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def threads_told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return OMP_NUM_THREADS of each process that holds a model, on a machine with two CPUs; the processes are forked."""
    told: list[str] = []

    def start(command: list[str], *, env: dict[str, str], **options: Any) -> "subprocess.Popen[bytes]":
        told.append(env["OMP_NUM_THREADS"])
        return WITH_TORCH.popen(command, env=env, **options)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sampling_process, "available_cpus", lambda: 2)
    fake = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)
    monkeypatch.setattr(sampling_process, "subprocess", fake)
    return told


def asked(workspace: Workspace, *arguments: str, lines: str | None = None) -> Result:
    return CliRunner().invoke(app, ["sample", *arguments, "--workspace", str(workspace.root)], input=lines)


def told(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def folder_of(workspace: Workspace, step: str) -> Path:
    [record] = read_runs(workspace)
    return workspace.store / "objects" / str(record.stages[step].digest)


def test_two_stages_answer_each_line_side_by_side_with_their_logprobs(
    small_chat_run: Workspace, threads_told: list[str]
) -> None:
    lines = "say it 81\n\nsay it 82\n"
    done = asked(small_chat_run, "latest", "--against", "model", "--greedy", "--logprobs", lines=lines)
    assert done.exit_code == 0, done.output
    assert threads_told == ["1", "1"], "both compute at the same time"
    first, policy, base, _, second, *_ = done.stdout.splitlines()
    assert (first, second) == ("> say it 81", "> say it 82")
    assert re.fullmatch(r"sft: s -\d.\d\d h -\d.\d\d i -.* p -.* <\|im_end\|> -.*  Σ -\d.\d\d nats", policy)
    assert base.startswith("model: ")
    assert base.endswith(f"nats  … cut off at {MAX_TOKENS} tokens")


def test_one_model_is_asked_with_all_cpus_or_the_threads_that_are_asked_for(
    threads_told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = OpenModel(source="builtin:tiny")
    for asked_for in (None, "1", "8", "many"):
        if asked_for is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", asked_for)
        with sampling_process.open_model(opening):
            pass
    with sampling_process.open_model(opening, side_by_side=3):
        pass
    assert threads_told == ["2", "1", "2", "2", "1"]


@pytest.mark.slow
def test_the_command_that_a_run_ends_with_works_as_it_is_printed(
    small_chat_run: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed command works from another folder, with no program on the search path, and with a prompt that a shell
    would change.
    """
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    prompt = 'say "it" $HOME it\'s 81'
    [record] = read_runs(small_chat_run)
    shown = record.stages["sft"].model_copy(update={"samples": ({"prompt": prompt},)})
    told_of = record.model_copy(update={"stages": {**record.stages, "sft": shown}})
    command = commands_for_policy(told_of, str(small_chat_run.root))["ask"]
    done = subprocess.run(
        f"{command} --greedy --json", shell=True, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    [asked_of] = json.loads(done.stdout)["prompts"]
    assert [turn["content"] for turn in asked_of["messages"]] == [prompt]


@pytest.mark.usefixtures("model_threads")
def test_responses_are_drawn_from_the_recipes_distribution_and_are_the_seeds(
    small_chat_run: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"prompt": "say it 82"})
        + "\n"
        + json.dumps(
            {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "x"}]}
        )
        + "\n"
    )
    options = ("latest/sft", "--file", str(tmp_path / "prompts.jsonl"), "-n", "3", "--seed", "5", "--json")
    found = told(asked(small_chat_run, *options))
    [model] = found["models"]
    assert (model["temperature"], model["max_tokens"], model["chat"]) == (TEMPERATURE, MAX_TOKENS, True)
    assert model["stop_tokens"] == ["<|im_end|>", "<|endoftext|>"]
    assert [[turn["content"] for turn in each["messages"]] for each in found["prompts"]] == [
        ["say it 82"],
        ["what?"],
    ]
    folder = folder_of(small_chat_run, "sft")
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for asked_of in found["prompts"]:
        text = tokenizer.apply_chat_template(asked_of["messages"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert asked_of["prompt_tokens"] == len(prompt)
        assert len(asked_of["answers"]) == 3
        for answer in asked_of["answers"]:
            if "�" in "".join(answer["tokens"]):
                continue  # part of a character: its id cannot be told from its text
            ids = tokenizer("".join(answer["tokens"]), add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, atol=1e-4, rtol=1e-4)
            assert answer["ended"] == (ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>"))
    texts = [answer["text"] for each in found["prompts"] for answer in each["answers"]]
    assert texts == by_the_sampler(folder, found["prompts"], seed=5)


def by_the_sampler(folder: Path, prompts: list[dict[str, Any]], *, seed: int) -> list[str]:
    """Return three responses to each prompt by the stages' sampler in this process."""
    tokenizer = load_tokenizer(folder)
    texts = [each["messages"][0]["content"] for each in prompts]
    responses = sample(
        load_policy(folder),
        [ids for ids in encode_prompts(tokenizer, texts, chat=True) for _ in range(3)],
        max_new_tokens=MAX_TOKENS,
        temperature=TEMPERATURE,
        eos_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
    ).responses
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]


def test_a_conversation_on_a_terminal_remembers_what_was_said_until_it_is_told_to_forget(
    small_chat_run: Workspace,
) -> None:
    master, terminal = pty.openpty()
    command = [
        sys.executable,
        "-c",
        "from vantage.cli.main import main; main()",
        "sample",
        "latest",
        "--greedy",
    ]
    process = WITH_TORCH.popen(
        [*command, "--workspace", str(small_chat_run.root)],
        cwd=ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        read_until(master, "/new forgets what was said")
        say(master, "say it 83")
        read_until(master, WORD)
        # 26 tokens of the first turn, WORD and its end, and the second turn: more than the model's positions
        say(master, "x" * 90)
        read_until(master, "shorten the prompt")
        say(master, "/new")
        say(master, "say it 84")
        read_until(master, WORD)
        say(master, "\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def say(master: int, line: str) -> None:
    os.write(master, line.encode() + (b"" if line == "\x04" else b"\n"))


def read_until(master: int, expected: str) -> None:
    """Read what the terminal shows until the text is in it."""
    shown, deadline = "", time.monotonic() + 120
    while expected not in shown:
        assert time.monotonic() < deadline, f"only {shown!r}"
        ready, _, _ = select.select([master], [], [], 1.0)
        if ready:
            shown += os.read(master, 65536).decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["latest", "x", "--temperature", "0"],
            "--temperature=0 must be above 0; --greedy takes the likeliest token",
        ),
        (
            ["latest/reward", "x"],
            "is a reward model, which is not what this command takes; there are model, sft",
        ),
        (["latest/data.demonstrations", "x"], "has no stage data.demonstrations; there are model, sft"),
        (
            ["nosuch", "x"],
            "nosuch is no run, no folder, and no model that MLflow has; runs of {place}: {run} (model, sft)",
        ),
        (
            ["latest", "x", "--file", "prompts.jsonl"],
            "there are prompts and --file prompts.jsonl; give one of them",
        ),
        (["latest", "--file", "no/such.jsonl"], "no/such.jsonl"),
    ],
)
def test_what_cannot_be_asked_is_said_before_a_model_is_loaded(
    small_chat_run: Workspace, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    [record] = read_runs(small_chat_run)
    done = asked(small_chat_run, *arguments)
    assert done.exit_code == ExitCode.BAD_INPUT
    assert message.format(place=small_chat_run.root, run=record.run_id) in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.usefixtures("model_threads")
def test_a_name_of_two_things_is_refused_and_its_spellings_are_taken(
    small_chat_run: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    [record] = read_runs(small_chat_run)
    (tmp_path / "latest").symlink_to(folder_of(small_chat_run, "model"), target_is_directory=True)
    (tmp_path / "sft").mkdir()
    refused = asked(small_chat_run, "latest", "x")
    assert (refused.exit_code, refused.stdout) == (ExitCode.BAD_INPUT, "")
    assert (
        f"latest means a folder and run {record.run_id}; write folder:latest or run:latest" in refused.stderr
    )
    refused = asked(small_chat_run, "run:latest/model", "x", "--against", "sft")
    assert (
        f"sft means sft of run {record.run_id} and a folder; write run:{record.run_id}/sft or folder:sft"
        in refused.stderr
    )
    options = ["say it 81", "--greedy", "--max-tokens", "8", "--json"]
    found = told(asked(small_chat_run, "run:latest", "--against", "folder:latest", *options))
    of_run = told(asked(small_chat_run, "1/sft", *options))
    of_folder = told(asked(small_chat_run, "1/model", *options))
    texts = [
        answer["text"] for each in (found, of_run, of_folder) for answer in each["prompts"][0]["answers"]
    ]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]


def test_a_line_that_is_no_prompt_is_named_with_its_number(small_chat_run: Workspace, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": 3}\n')
    done = asked(small_chat_run, "latest", "--file", str(file))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert f"{file}:1: has neither prompt (a text) nor messages (a list); correct the line" in done.stderr


@pytest.mark.usefixtures("model_threads")
def test_an_engine_that_is_not_installed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """The environment of these tests has no vLLM."""
    command = ["sample", "builtin:tiny", "1+1?", "--workspace", str(tmp_path), "--engine"]
    done = CliRunner().invoke(app, [*command, "vllm"])
    assert done.exit_code == ExitCode.BAD_INPUT, done.output
    message = " ".join(done.stderr.split())
    assert "--engine=vllm needs the package vllm, which is not installed" in message
    assert "or leave --engine out" in message
    assert CliRunner().invoke(app, [*command, "others"]).exit_code == 2, "a wrong use of the command"


@pytest.mark.usefixtures("model_threads")
def test_a_server_samples_in_place_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers equal those of the loop, at the temperature and length of the options."""
    monkeypatch.setenv("SAMPLER_KEY", "secret")
    build_builtin("tiny", tmp_path / "model", seed=0)
    (tmp_path / "weights").mkdir()
    command = ["sample", str(tmp_path / "model"), "1+1?", "2+2?", "--greedy", "--max-tokens", "5", "--json"]
    command += ["--workspace", str(tmp_path)]
    with serving(tmp_path / "model", key="secret") as [server]:
        options = ["--api-key-variable", "SAMPLER_KEY", "--weights-folder", str(tmp_path / "weights")]
        found = told(CliRunner().invoke(app, [*command, "--url", server.url, *options]))
        assert len(server.seen.seeds) == 2
        assert len(server.seen.versions) == 2, "one update, before and after: with the options' length"
    expected = told(CliRunner().invoke(app, command))
    assert texts_in(found) == texts_in(expected)


def texts_in(shown: Any) -> list[str]:
    return [answer["text"] for prompt in shown["prompts"] for answer in prompt["answers"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--url", "http://localhost:1", "--against", "builtin:nano"],
            "--against=builtin:nano asks a second model, and servers hold the weights of one at a time; leave --against or --url out",
        ),
        (
            ["--url", "http://localhost:1", "--url", "localhost:8000"],
            "--url=localhost:8000 is no address of a server; write http://HOST:PORT",
        ),
        (
            ["--url", "http://localhost:1", "--url", "http://localhost:1"],
            "--url names a server twice; name each once",
        ),
        (
            ["--api-key-variable", "KEY"],
            "--api-key-variable=KEY is about servers that sample; add --url ADDRESS",
        ),
        (
            ["--weights-folder", "/weights"],
            "--weights-folder=/weights is about servers that sample; add --url ADDRESS",
        ),
        (
            ["--url", "http://localhost:1", "--api-key-variable", "my-key"],
            "--api-key-variable=my-key is no name of a variable; name the variable that holds the key",
        ),
    ],
)
def test_servers_that_cannot_sample_are_refused_before_a_model_is_loaded(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_process, "open_model", lambda *_, **__: pytest.fail("it was loaded"))
    done = CliRunner().invoke(app, ["sample", "builtin:tiny", "1+1?", "--workspace", str(tmp_path), *options])
    assert done.exit_code == ExitCode.BAD_INPUT, done.output
    assert f"vantage: {message}" in " ".join(done.stderr.split())

"""``vantage export`` writes the stored model; other programs load it, ask it and serve it."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from typer.testing import CliRunner

from tests.support.fixtures import RECIPE
from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import attempt_all, orchestrated
from tests.support.ports import own_port
from tests.support.small_chat_run import MAX_TOKENS, TEMPERATURE, WORD, make_small_chat_run
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.heads import load_scalar, scores
from vantage.models.prompts import encode_prompts
from vantage.models.sampling import sample
from vantage.models.sequences import collate
from vantage.models.source_folders import import_model
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.review.exports.exported_card import model_card
from vantage.review.exports.exporting import generation_settings
from vantage.runs.named_models import NamedModel, Origin
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.records.sampling import ModelOpened

ORIGIN = Origin(
    recipe="chat", run_id="0001-chat", stage="sft", digest="0" * 64, stage_key="1" * 64, parents={}, stages={}, metrics={},
    verdicts=(), base=None,
)  # fmt: skip
PROMPT = "say it 71"
"""A prompt that is in none of the rows."""


def exported(place: Workspace | str, *arguments: str) -> Result:
    at = place if isinstance(place, str) else place.address
    return CliRunner().invoke(app, ["export", *arguments, "--workspace", at])


def record_of(workspace: Workspace) -> RunRecord:
    [record] = read_runs(workspace)
    return record


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def policy(small_chat_run: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the exported folder of the trained policy."""
    folder = tmp_path_factory.mktemp("exported") / "policy"
    done = exported(small_chat_run, "run:latest", str(folder))
    assert done.exit_code == 0, done.output
    assert f"transformers serve {folder}" in done.stdout
    assert "/v1/chat/completions" in done.stdout
    return folder


@pytest.fixture(scope="module")
def sampled(small_chat_run: Workspace) -> tuple[str, list[int], list[int]]:
    """Return the text and ids of the stored policy's greedy answer by the stages' own sampler, and the prompt's ids."""
    record = record_of(small_chat_run)
    folder = small_chat_run.store / "objects" / str(record.stages["sft"].digest)
    tokenizer = load_tokenizer(folder)
    [ids] = encode_prompts(tokenizer, [PROMPT], chat=None)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    [response] = sample(
        load_policy(folder),
        [ids],
        max_new_tokens=MAX_TOKENS,
        temperature=TEMPERATURE,
        eos_token_ids=[end],
        pad_token_id=0,
        seed=0,
        greedy=True,
    ).responses
    assert response[-1] == end
    return tokenizer.decode(response, skip_special_tokens=True), response, ids


def test_weights_and_tokenizer_are_the_stored_bytes_and_the_rest_says_where_they_come_from(
    small_chat_run: Workspace, policy: Path
) -> None:
    record = record_of(small_chat_run)
    stored = small_chat_run.store / "objects" / str(record.stages["sft"].digest)
    told = json.loads((policy / "vantage.json").read_text())
    files = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert set(told["files"]) == files
    assert told["files"] == {name: sha256(policy / name) for name in files}
    assert told["files"] == {name: sha256(stored / name) for name in files}
    assert (told["run_id"], told["stage"], told["digest"]) == (
        record.run_id,
        "sft",
        record.stages["sft"].digest,
    )
    assert told["parents"] == {
        "init": {"stage": "model", "digest": record.stages["model"].digest},
        "data": {"stage": "data.demonstrations", "digest": record.stages["data.demonstrations"].digest},
    }
    assert told["metrics"]["test_nll"] == record.stages["sft"].metrics["test_nll"]
    card = (policy / "README.md").read_text()
    assert record.run_id in card
    for title in ("Measured", "Limits", "Data", "Licence", "Parents", "Check"):
        assert f"\n## {title}\n" in card, title
    assert str(record.stages["data.demonstrations"].digest)[:16] in card
    assert "`<|im_end|>`, `<|endoftext|>`" in card
    assert [each.name for each in policy.parent.iterdir()] == ["policy"]  # nothing half-written is left


def test_servers_are_told_to_sample_and_to_stop_as_the_recipe_does(policy: Path) -> None:
    settings = json.loads((policy / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(policy)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert settings["eos_token_id"] == ends
    assert {
        name: settings[name] for name in ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens")
    } == {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": MAX_TOKENS,
    }


@pytest.mark.usefixtures("model_threads")
def test_stop_strings_are_in_the_card_and_not_where_they_would_break_what_loads_the_folder(
    policy: Path, tmp_path: Path
) -> None:
    """A run's own recipe names the strings. Here they are added to the exported folder of another run."""
    asked = tmp_path / "asked"
    shutil.copytree(policy, asked)
    told = json.loads((asked / "vantage.json").read_text())
    told["generation"]["stop"] = ["ip", "\n\nHuman:"]
    (asked / "vantage.json").write_text(json.dumps(told))
    stopping = NamedModel(
        str(asked), "policy", asked, Generation.model_validate(told["generation"]), True, origin=ORIGIN
    )
    opened = ModelOpened(uses_chat=True, stop_token_ids=(2,), stop_tokens=("<|im_end|>",), writes_date=False)
    card = model_card(stopping, opened, folder=asked)
    assert '"stop": ["ip", "\\n\\nHuman:"]' in card
    assert (
        'at the first of these texts, which verifiers and judges did not see: `"ip"`, `"\\n\\nHuman:"`'
        in card
    )
    assert "stop_strings" not in generation_settings({}, stopping, opened)

    # what the card says of transformers
    tokenizer = AutoTokenizer.from_pretrained(asked)
    model = AutoModelForCausalLM.from_pretrained(asked)
    model.generation_config.stop_strings = ["ip"]
    ids = tokenizer(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(**ids, do_sample=False)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        pipeline("text-generation", model, tokenizer=tokenizer)(PROMPT, do_sample=False)
    said = model.generate(**ids, do_sample=False, tokenizer=tokenizer)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == WORD

    # the same folder asked by Vantage: the text ends before the string, and the response has ended
    done = CliRunner().invoke(app, ["sample", str(asked), PROMPT, "--greedy", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    [answer] = found["prompts"][0]["answers"]
    assert (answer["text"], answer["ended"], "".join(answer["tokens"])) == ("sh", True, WORD)
    assert found["models"][0]["stop"] == ["ip", "\n\nHuman:"]


def test_transformers_alone_gives_the_samplers_answer(
    policy: Path, sampled: tuple[str, list[int], list[int]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    text, response, prompt = sampled
    assert ids["input_ids"][0].tolist() == prompt
    answer = model.generate(**ids, do_sample=False)[0, len(prompt) :].tolist()
    assert answer == response
    assert text == WORD


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address of ``mlflow models serve`` for the folder, which ends with the block."""
    port = own_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local"]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = WITH_PREFECT.popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
        env={**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while not answers(f"{address}/ping"):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.slow
def test_mlflow_serves_the_folder_and_answers_over_http_as_the_sampler_does(
    policy: Path, sampled: tuple[str, list[int], list[int]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    text, _, prompt = sampled
    body: dict[str, Any] = {"inputs": [tokenizer.decode(prompt)], "params": {"do_sample": False}}
    with served(policy) as address:
        request = urllib.request.Request(
            f"{address}/invocations",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read()) == {"predictions": [text]}


@pytest.mark.usefixtures("model_threads")
def test_mlflows_copy_is_exported_as_the_run_itself_is(
    small_chat_run: Workspace, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = exported(small_chat_run, "small-chat@champion", str(tmp_path / "copy"), "--json")
    assert done.exit_code == 0, done.output
    told, expected = json.loads(done.stdout), json.loads((policy / "vantage.json").read_text())
    for name in ("files", "digest", "run_id", "stage", "generation", "chat", "stop_tokens"):
        assert told[name] == expected[name]
    assert {role: each["digest"] for role, each in told["parents"].items()} == {
        role: each["digest"] for role, each in expected["parents"].items()
    }
    assert sha256(tmp_path / "copy" / "generation_config.json") == sha256(policy / "generation_config.json")


@pytest.mark.slow
def test_an_audit_agrees_with_an_exported_folder_until_something_is_changed(
    small_chat_run: Workspace, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    copy = tmp_path / "copy"
    shutil.copytree(policy, copy)

    def audited() -> list[tuple[str, str]]:
        with Evidence(small_chat_run) as evidence:
            report = audit(evidence, str(copy))
        return [(each.outcome, each.detail) for each in report.checks if each.subject == "folder"]

    assert audited() == [("ok", audited()[0][1])]
    (copy / "input_example.json").write_text('["another"]')
    assert audited() == [
        ("wrong", "input_example.json and serving_input_example.json: are not one text, as it was published")
    ]
    (copy / "signatures").mkdir()
    (copy / "signatures" / "strange").write_text("")
    assert "signatures/strange: is not in vantage.json" in audited()[0][1]


def test_an_exported_policy_is_a_models_source_again(policy: Path, tmp_path: Path) -> None:
    import_model(str(policy), tmp_path / "again", seed=0)
    assert sha256(tmp_path / "again" / "model.safetensors") == sha256(policy / "model.safetensors")


@pytest.mark.usefixtures("model_threads")
def test_a_reward_model_is_a_classifier_whose_logit_less_the_shift_is_the_score(
    small_chat_run: Workspace, tmp_path: Path
) -> None:
    done = exported(small_chat_run, "latest/reward", str(tmp_path / "reward"))
    assert done.exit_code == 0, done.output
    folder = tmp_path / "reward"
    shift = json.loads((folder / "scalar.json").read_text())["score_shift"]
    ids = [[5, 6, 7], [8, 9]]
    stored = small_chat_run.store / "objects" / str(record_of(small_chat_run).stages["reward"].digest)
    expected = scores(load_scalar(stored), collate([ids[0]], [ids[1]], pad_token_id=3))
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    logits = classifier(input_ids=torch.tensor([ids[0] + ids[1]])).logits
    torch.testing.assert_close(logits[0, 0] - shift, expected[0])
    assert "score_shift" in (folder / "README.md").read_text()


@pytest.mark.usefixtures("model_threads")
def test_a_damaged_file_is_found_while_it_is_copied_and_leaves_nothing_behind(
    small_chat_run: Workspace, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path / "workspace")
    shutil.copytree(small_chat_run.root, workspace.root)
    digest = str(record_of(workspace).stages["reward"].digest)
    weights = workspace.store / "objects" / digest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)
    done = exported(workspace, "latest/reward", str(tmp_path / "out" / "reward"))
    assert done.exit_code == ExitCode.STORAGE
    assert "reward of run" in done.stderr
    assert "is damaged: sha256 of model.safetensors" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("model_threads")
def test_from_a_bucket(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a workspace in a bucket is exported with the weights that it was imported with."""
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "one"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    make_small_chat_run(tmp_path, Workspace.at(bucket), until="data.demonstrations")
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "another"))
    done = exported(bucket, "latest/model", str(tmp_path / "model"))
    assert done.exit_code == 0, done.output
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict().items():
        assert torch.equal(weight, base[name])


@pytest.mark.slow
@pytest.mark.usefixtures("model_threads")
def test_adapters_are_merged_into_the_model_beneath_them(
    tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    overrides = ("model.lora.rank=4", "model.lora.alpha=8", "stages.sft.epochs=1")
    workspace = make_small_chat_run(tmp_path, None, *overrides, until="reward")
    done = exported(workspace, "latest/sft", str(tmp_path / "whole"))
    assert done.exit_code == 0, done.output
    record = record_of(workspace)
    told = json.loads((tmp_path / "whole" / "vantage.json").read_text())
    assert (told["digest"], told["merged_into"]) == (
        record.stages["sft"].digest,
        record.stages["model"].digest,
    )
    with Evidence(workspace) as evidence:
        report = audit(evidence, str(tmp_path / "whole"))
    [said] = [check for check in report.checks if check.subject == "vantage.json"]
    assert (said.outcome, "are the artifact merged into" in said.detail) == ("unchecked", True)
    assert report.exit_code == 2, [check for _, check in report.every_check() if check.outcome == "wrong"]
    adapters = load_file(
        workspace.store / "objects" / str(record.stages["sft"].digest) / "adapter_model.safetensors"
    )
    base = load_file(workspace.store / "objects" / str(record.stages["model"].digest) / "model.safetensors")
    merged = load_file(tmp_path / "whole" / "model.safetensors")
    assert base.keys() == merged.keys()
    for name, weight in base.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapters:
            weight = weight + 2.0 * (adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"])
            assert not torch.equal(merged[name], base[name])
        torch.testing.assert_close(merged[name], weight)
    options = ["latest/sft", PROMPT, "--greedy", "--json", "--workspace", str(workspace.root)]
    sampled = json.loads(CliRunner().invoke(app, ["sample", *options]).stdout)
    [answer] = sampled["prompts"][0]["answers"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    response = model.generate(**ids, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(response, skip_special_tokens=True) == answer["text"]


# What is refused


def test_nothing_is_written_over(small_chat_run: Workspace, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    full = exported(small_chat_run, "latest", str(tmp_path / "full"))
    file = exported(small_chat_run, "latest", str(tmp_path / "file"))
    assert (full.exit_code, file.exit_code) == (ExitCode.BAD_INPUT, ExitCode.BAD_INPUT)
    assert "is not empty, and nothing is written over; remove it, or name another" in full.stderr
    assert "exists and is no folder; name another" in file.stderr
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("7", "7 is no run, no folder, and no model that MLflow has; runs of"),
        (
            "latest/evaluation",
            "evaluation of run {run} makes no model (evaluation); there are model, sft, reward, policy",
        ),
        ("latest/value", "value of run {run} is a critic, which is not what this command takes"),
        ("latest/nosuch", "run {run} has no stage nosuch; there are model, sft, reward, policy"),
        ("./nosuch", "./nosuch is a path; "),
        ("folder:nosuch", "export` accepts RUN, RUN/STAGE, RUN/model, or NAME, NAME@ALIAS or NAME/VERSION"),
        ("recipe:quickstart", "recipe:quickstart is a recipe, not a result of a run; "),
        ("nosuch@champion", "MLflow has no registered model nosuch with the alias champion"),
    ],
)
def test_what_cannot_be_exported_is_named_with_what_can(
    fake_run: Workspace, tmp_path: Path, named: str, told: str
) -> None:
    done = exported(fake_run, named, str(tmp_path / "out"))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert told.format(run=record_of(fake_run).run_id) in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory, ledger_database: str) -> Iterator[Workspace]:
    """Yield a run of fake stages of every kind."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", ledger_database)
        workspace = Workspace(folder / "workspace")
        with orchestrated(workspace, folder / "fake.yaml") as orchestrator:
            attempt_all(orchestrator)
        yield workspace

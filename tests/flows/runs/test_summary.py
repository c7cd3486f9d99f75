"""The end of a run: what was compared, where models lie, and a snippet that loads one as it stands."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flows.commands.console import headline_of, show_result
from flows.runs.record import RunRecord, StageRecord
from flows.runs.run import read_runs
from flows.runs.summary import (
    comparison,
    first_prompt,
    has_chat_template,
    loading_snippet,
    model_folders,
    policy_to_load,
    samples_heading,
)
from flows.runs.workspace import Workspace
from models.builtin import build_tiny
from tests.flows.orchestrated import attempt_all, orchestrated

EVALUATED = {
    "accuracy": 0.9112,
    "baseline_accuracy": 0.6,
    "accuracy_gain": 0.3112,
    "accuracy_gain_standard_error": 0.0123,
    "greedy_accuracy": 0.9961,
    "baseline_greedy_accuracy": 1.0,
}


def test_an_evaluation_shows_both_models_and_their_difference() -> None:
    told = "accuracy 0.911 against 0.600 (+0.311 ± 0.012); greedy 0.996 against 1.000"
    stage = StageRecord(status="completed", metrics=EVALUATED)
    assert comparison(stage) == headline_of(stage) == told
    by_score = {name.replace("accuracy", "score"): value for name, value in EVALUATED.items()}
    assert comparison(StageRecord(metrics=by_score)) == told.replace("accuracy", "score")
    assert comparison(StageRecord(metrics={"loss": 1.0})) == ""
    asked = StageRecord(metrics={"win_rate": 0.54, "tied_pairs": 0.3, "order_disagreement": 0.21})
    assert comparison(asked) == headline_of(asked) == "win rate 0.540 (orders disagree 0.210)"
    beside = {"win_rate": 0.9, "preference_win_rate": 0.54, "order_disagreement": None}
    both = StageRecord(metrics={**stage.metrics, **beside})
    assert comparison(both) == f"{told}  win rate 0.540 (orders disagree undefined)"
    by_two = StageRecord(metrics={**by_score, **EVALUATED})
    assert comparison(by_two) == f"{told}  {told.replace('accuracy', 'score')}"


@pytest.fixture
def record(workspace: Workspace, recipe_file: Path) -> RunRecord:
    """A run of fake stages that has ended."""
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
    return read_runs(workspace)[0]


def test_every_trained_model_has_a_folder_that_is_there(record: RunRecord, workspace: Workspace) -> None:
    folders = model_folders(record, workspace.storage)
    assert list(folders) == ["sft", "reward", "value", "policy"]
    assert all((folder / "manifest.json").is_file() for folder in folders.values())


def test_the_policy_to_load_is_the_published_one_or_the_last(record: RunRecord) -> None:
    assert policy_to_load(record) == "policy"
    unfinished = {**record.stages, "policy": StageRecord(status="failed")}
    assert policy_to_load(record.model_copy(update={"stages": unfinished})) == "sft"
    nothing = dict.fromkeys(record.stages, StageRecord())
    assert policy_to_load(record.model_copy(update={"stages": nothing})) is None


def test_samples_say_whose_they_are(record: RunRecord) -> None:
    assert samples_heading(record, "evaluation").startswith(
        "evaluation: sft (baseline) and policy (candidate)"
    )
    asked = StageRecord(samples=({"prompt": "1+1?"},))
    told = record.model_copy(update={"stages": {**record.stages, "evaluation": asked}})
    assert first_prompt(told) == "1+1?"


@pytest.mark.parametrize(("chat", "stop"), [(False, ()), (True, ()), (False, ("'", '"\n'))])
def test_the_snippet_runs_in_a_shell_as_it_is_printed(
    chat: bool, stop: tuple[str, ...], tmp_path: Path
) -> None:
    """In a folder with a quote and spaces in its name, from another folder, with no program on the search path."""
    folder = tmp_path / "it's a model"
    build_tiny(folder, seed=1)
    if chat:
        template = "{% for m in messages %}U:{{ m['content'] }}A:{% endfor %}"
        (folder / "chat_template.jinja").write_text(template)
    assert has_chat_template(folder) is chat
    lines = loading_snippet(folder, prompt='3 a+2 "b"-1\n?', max_new_tokens=4, chat=chat, stop=stop)
    assert any("stop_strings" in line for line in lines) == bool(stop)
    printed = io.StringIO()
    show_result(Console(file=printed, width=60), record_of_nothing(), pages={}, models={}, snippet=lines)
    text = printed.getvalue()
    start = text.index(lines[0])
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", text[start:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    said = 'U:3 a+2 "b"-1\n?A:' if chat else '3 a+2 "b"-1\n?'
    assert done.stdout.startswith(said)
    assert lines[0].startswith(sys.executable)


def record_of_nothing() -> RunRecord:
    from flows.runs.resolving import load_resolved_text

    text = (
        "recipe: r\nmodel: {source: 'builtin:tiny'}\ndata: {d: {source: 'builtin:arithmetic/demonstrations'}}\n"
        "stages: {sft: {kind: sft, data: d, learning_rate: 1e-3}}\n"
    )
    return RunRecord(
        run_id="0001-r-000000",
        number=1,
        recipe_digest="",
        recipe=load_resolved_text(text, [])[0],
        source="r",
        started="",
    )

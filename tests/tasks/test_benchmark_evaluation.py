"""A policy on lm-eval's tasks from local files gets the numbers that transformers gives; wrong settings are refused."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from vantage.models.folders import load_policy, load_tokenizer
from vantage.schemas.recipe.evaluations import BenchmarkEvaluation
from vantage.schemas.recipe.inputs import Benchmark
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.work import ImportBenchmark
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import estimated_metric_names, headline_metric_names
from vantage.tasks.benchmark_evaluation import asked_within
from vantage.tasks.data.benchmark_tasks import UnusableTasks
from vantage.tasks.stages import run_stage

CHOICE = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: data/sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: !function utils.place
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {data_files: {test: data/sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{reply}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 3}
metric_list: [{metric: exact_match}]
"""
GROUP = """
group: both
task: [sums, more]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""
WORK = BenchmarkEvaluation(
    kind="benchmark_evaluation", policy="sft", benchmark="local", task="sums", microbatch_size=7
)


def questions() -> list[dict[str, Any]]:
    return [
        {
            "question": f"{a}+{b}=",
            "choices": [str(a + b), str(a + b + 3), f"{a}{b}0"],
            "place": (a * b) % 3,
        }
        for a in range(6)
        for b in range(5)
    ]


@pytest.fixture(scope="module")
def replies(pipeline: Any) -> list[str]:
    """Return what the policy writes greedily after each question, at most three tokens, by transformers alone."""
    folder = pipeline.folder("sft")
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    found = []
    for each in questions():
        ids = tokenizer(each["question"], return_tensors="pt").input_ids
        said = model.generate(ids, do_sample=False, max_new_tokens=3, pad_token_id=0, top_k=None)
        found.append(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True).partition("\n")[0])
    return found


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory, pipeline: Any, replies: list[str]) -> Path:
    """Return the artifact of the step that imports a folder of tasks."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "data").mkdir()
    rows = [
        {**each, "reply": reply if number % 3 else "no"}
        for number, (each, reply) in enumerate(zip(questions(), replies, strict=True))
    ]
    for name, kept in (("sums", rows), ("more", rows[:10])):
        text = "".join(json.dumps(row) + "\n" for row in kept)
        (folder / f"data/{name}.jsonl").write_text(text)
    (folder / "sums.yaml").write_text(CHOICE)
    (folder / "more.yaml").write_text("include: sums.yaml\n" + CHOICE.replace("sums", "more"))
    (folder / "written.yaml").write_text(WRITTEN)
    (folder / "both.yaml").write_text(GROUP)
    (folder / "utils.py").write_text("def place(doc):\n    return doc['place']\n")
    job = pipeline.job("model", folder=tmp_path_factory.mktemp("imported"))
    work = ImportBenchmark(benchmark=Benchmark(source=str(folder)))
    job = job.model_copy(update={"work": work, "name": "benchmarks.local"})
    run_stage(job)
    return Path(job.output)


def job_of(pipeline: Any, benchmark: Path, folder: Path, **changed: Any) -> StageJob:
    inputs = {"policy": pipeline.folder("sft"), "benchmark": benchmark}
    work = WORK.model_copy(update=changed)
    job: StageJob = pipeline.job("reward", folder=folder)
    return job.model_copy(update={"work": work, "inputs": inputs, "name": "measured"})


def right_choices(folder: Path) -> list[bool]:
    """Return for each question whether the right choice is the likeliest, by transformers on one text at a time,
    without padding.
    """
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    right = []
    for each in questions():
        start = len(tokenizer(each["question"]).input_ids)
        sums = []
        for choice in each["choices"]:
            ids = tokenizer(each["question"] + choice, return_tensors="pt").input_ids
            with torch.no_grad():
                logprobs = model(ids).logits.double().log_softmax(dim=-1)
            sums.append(sum(logprobs[0, at - 1, ids[0, at]].item() for at in range(start, ids.shape[1])))
        right.append(max(range(3), key=sums.__getitem__) == each["place"])
    return right


def test_no_program_is_started_and_no_task_of_lm_eval_itself_is_read(
    pipeline: Any, benchmark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval would ask git, pip, gcc and others what this machine is, and read 13,000 files of tasks."""
    from lm_eval.tasks import TaskManager

    started: list[Any] = []
    reads_its_own: list[bool] = []
    manage = TaskManager.__init__

    def noted(self: Any, *given: Any, include_defaults: bool = True, **named: Any) -> None:
        reads_its_own.append(include_defaults)
        manage(self, *given, include_defaults=include_defaults, **named)

    monkeypatch.setattr(
        subprocess.Popen, "__init__", lambda _, command, *rest, **named: started.append(command)
    )
    monkeypatch.setattr(TaskManager, "__init__", noted)
    run_stage(job_of(pipeline, benchmark, tmp_path))
    assert started == []
    assert set(reads_its_own) == {False}


def test_accuracy_and_its_error_are_those_of_the_likelihoods(
    pipeline: Any, benchmark: Path, tmp_path: Path
) -> None:
    result = run_stage(job := job_of(pipeline, benchmark, tmp_path))
    right = right_choices(pipeline.folder("sft"))
    share, n = sum(right) / len(right), len(right)
    assert 0 < share < 1
    assert result.metrics == {"benchmark_score": pytest.approx(share)}
    found = result.uncertainty["benchmark_score"]
    assert (found.n, found.rows) == (n, n)
    assert found.standard_error == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))
    assert result.metrics.keys() == headline_metric_names("benchmark_evaluation")
    assert result.uncertainty.keys() == estimated_metric_names("benchmark_evaluation")

    table = json.loads((job.output / "results.json").read_text())
    assert {"acc,none", "acc_norm,none"} <= table["results"]["sums"].keys()
    samples = [json.loads(line) for line in (job.output / "samples.jsonl").read_text().splitlines()]
    assert [bool(each["acc"]) for each in sorted(samples, key=lambda each: each["doc_id"])] == right


def test_what_is_written_greedily_is_that_of_transformers(
    pipeline: Any, benchmark: Path, tmp_path: Path
) -> None:
    """Two of three expected replies are those of transformers' generate, and every third is wrong."""
    job = job_of(pipeline, benchmark, tmp_path, task="written", metric="exact_match")
    assert run_stage(job).metrics["benchmark_score"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("limits", [PassLimits(7, 40), PassLimits(7, 2), PassLimits(3, 10**6)])
def test_a_budget_of_positions_holds_in_every_pass_and_changes_no_answer(
    limits: PassLimits, pipeline: Any
) -> None:
    """Likelihoods and written replies are those of lm-eval's own class; a pass's positions are those that attention
    reads.
    """
    from lm_eval.api.instance import Instance

    folder = pipeline.folder("sft")
    policy, given = load_policy(folder), []

    def note(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = inputs[0] if inputs else named["input_ids"]
        given.append((len(ids), named.get("attention_mask", ids).numel()))

    policy.register_forward_pre_hook(note, with_kwargs=True)

    def answers(limits: PassLimits) -> tuple[list[tuple[float, bool]], list[str]]:
        model = asked_within(limits)(
            pretrained=policy, tokenizer=load_tokenizer(folder), backend="causal", batch_size=1
        )
        asked = [(each["question"], choice) for each in questions() for choice in each["choices"]]
        told = [("loglikelihood", pair) for pair in asked]
        written = [
            ("generate_until", (each["question"], {"until": ["\n"], "max_gen_toks": 3}))
            for each in questions()
        ]
        both = [
            [Instance(kind, {}, arguments, place) for place, (kind, arguments) in enumerate(requests)]
            for requests in (told, written)
        ]
        return model.loglikelihood(both[0]), model.generate_until(both[1])

    likelihoods, replies = answers(PassLimits(rows=7))
    assert max(rows for rows, _ in given) == 7
    given.clear()
    found, again = answers(limits)
    most = max(rows for rows, _ in given)
    assert all(tokens <= (limits.tokens or tokens) or rows == 1 for rows, tokens in given)
    assert most == {40: most, 2: 1}.get(limits.tokens or 0, limits.rows)
    assert (1 < most < 7) or limits.tokens == 2
    assert again == replies
    torch.testing.assert_close(
        torch.tensor([value for value, _ in found]), torch.tensor([value for value, _ in likelihoods])
    )


def test_a_group_has_the_mean_by_size(pipeline: Any, benchmark: Path, tmp_path: Path) -> None:
    result = run_stage(job_of(pipeline, benchmark, tmp_path, task="both"))
    right = right_choices(pipeline.folder("sft"))
    assert result.metrics["benchmark_score"] == pytest.approx((sum(right) + sum(right[:10])) / 40)
    assert result.uncertainty["benchmark_score"].n == 40


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"task": "arc_easy"}, r"task='arc_easy' is no task or group of the benchmark; there are: "),
        ({"metric": "exact_match"}, r"metric='exact_match' is none of task sums; there are: acc,none, acc_norm,none"),
        ({"chat_template": True}, r"chat_template=true needs a chat template, and the tokenizer has none"),
    ],
)  # fmt: skip
def test_what_the_folder_has_not_is_refused(
    pipeline: Any, benchmark: Path, tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnusableTasks, match=told):
        run_stage(job_of(pipeline, benchmark, tmp_path, **changed))


def test_a_function_that_fails_is_told_by_its_task(pipeline: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    (folder / "data").mkdir(parents=True)
    (folder / "data/sums.jsonl").write_text(json.dumps(questions()[0]) + "\n")
    (folder / "sums.yaml").write_text(CHOICE)
    (folder / "utils.py").write_text("def place(doc):\n    return doc['nowhere']\n")
    with pytest.raises(
        UnusableTasks, match=r"task='sums': lm-eval cannot (build|run) it \(KeyError: 'nowhere'\)"
    ):
        run_stage(job_of(pipeline, folder, tmp_path / "job"))

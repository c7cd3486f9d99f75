"""Evaluate a policy on a task of lm-eval, from the files of its folder: the value of the task's metric, with its error."""

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vantage.models.folders import load_tokenizer
from vantage.models.pinned_date import pin_date, template_arguments
from vantage.schemas.recipe.evaluations import BenchmarkEvaluation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.tasks.data.benchmark_tasks import UnusableTasks
from vantage.tasks.training import progress
from vantage.tasks.training.measured import defined
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.optimization import training_device
from vantage.tasks.training.seeds import derive_seed, stage_seed

RESAMPLES = 1000
"""Bootstrap samples of lm-eval's standard errors, for metrics that are not means."""
RESULTS_FILE = "results.json"
SAMPLES_FILE = "samples.jsonl"
_NUM_SEEDS = 2**32


def run(job: StageJob[BenchmarkEvaluation]) -> StageResult:
    """Ask the policy every question of the task; the artifact holds all metrics and all answers.

    Raises:
        UnusableTasks: the folder has no such task, the task no such metric, or lm-eval cannot run it.
    """
    if find_spec("lm_eval") is None:
        raise ValueError(
            "benchmark_evaluation needs the package lm_eval; pip install 'vantage-rlhf[lm-eval]'"
        )
    work = job.work
    with _offline(job.scratch):
        # 1. The task, with the data of its folder
        task = load_task(job.inputs["benchmark"], work.task)

        # 2. The policy, as lm-eval asks it
        results = measure(job, task)

    # 3. The one number, and everything else as a table
    measured = results["results"].get(work.task, {})
    key = metric_key(measured, work.metric, task=work.task)
    metric, _, name_of_filter = key.partition(",")
    error = measured.get(f"{metric}_stderr,{name_of_filter}")
    num_examples = sum(each["effective"] for each in results["n-samples"].values())
    _write_tables(job, results)
    return StageResult(
        metrics={"benchmark_score": defined(float(measured[key]))},
        uncertainty={
            "benchmark_score": Uncertainty(
                n=num_examples,
                rows=num_examples,
                standard_error=defined(float(error)) if isinstance(error, int | float) else None,
            )
        },
    )


def load_task(folder: Path, name: str) -> Any:
    """Return the task of this name, or the group of tasks, with its data.

    Raises:
        UnusableTasks: there is no such task, it is a group without a metric of its own, or it cannot be built.
    """
    manager = _tasks_of(folder)
    known = [*manager.all_subtasks, *manager.all_groups]
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UnusableTasks(f"task={name!r} is no task or group of the benchmark; there are: {listed}")
    try:
        with chdir(folder):  # paths of data files are relative to this folder
            loaded = manager.load([name])
    except Exception as error:  # a user's definition or function may raise anything
        raise UnusableTasks(
            f"task={name!r}: lm-eval cannot build it ({_one_line(error)}); correct it"
        ) from error
    if name in loaded["tasks"]:
        return loaded["tasks"][name]
    group = loaded["groups"][name]
    if not group.has_aggregation:
        raise UnusableTasks(
            f"task={name!r} is a group without a number of its own; give it aggregate_metric_list, or name one of its tasks"
        )
    return group


def _tasks_of(folder: Path) -> Any:
    """Return the tasks of the folder, without lm-eval's own, whose 13,000 files it would read for six seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


def measure(job: StageJob[BenchmarkEvaluation], task: Any) -> Mapping[str, Any]:
    """Return lm-eval's results on the task.

    Raises:
        UnusableTasks: the task cannot be run.
    """
    from lm_eval import simple_evaluate

    work, tokenizer = job.work, pin_date(load_tokenizer(job.inputs["policy"]), job.date)
    # lm-eval calls the template without a date
    dated = partial(tokenizer.apply_chat_template, **template_arguments(tokenizer))
    tokenizer.apply_chat_template = dated  # type: ignore[method-assign]
    if work.chat_template and not tokenizer.chat_template:
        raise UnusableTasks(
            "chat_template=true needs a chat template, and the tokenizer has none; leave it out"
        )
    policy = fixed_policy(job, "policy", training_device()).causal_lm
    passes = 0

    def report(_: object, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        nonlocal passes
        progress.phase("forward passes", passes)
        passes += 1
        ids = inputs[0] if inputs else named["input_ids"]
        mask = named.get("attention_mask")  # during generation the mask also covers the cached tokens
        progress.computing(len(ids), (ids if mask is None else mask).numel())

    policy.register_forward_pre_hook(report, with_kwargs=True)
    model = asked_within(work.pass_limits.or_rows(work.batch_size))(
        pretrained=policy, tokenizer=tokenizer, backend="causal", batch_size=1
    )
    seeds = {
        name: derive_seed(stage_seed(job), name) % _NUM_SEEDS
        for name in ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    }
    try:
        with _machine_not_described():
            found: Mapping[str, Any] = simple_evaluate(
                model=model,
                tasks=[task],
                task_manager=_tasks_of(job.inputs["benchmark"]),
                bootstrap_iters=RESAMPLES,
                apply_chat_template=work.chat_template,
                **seeds,
            )
    except (KeyError, ValueError, TypeError, AttributeError, LookupError) as error:
        # a user's definition is wrong
        raise UnusableTasks(
            f"task={work.task!r}: lm-eval cannot run it ({_one_line(error)}); correct it"
        ) from error
    return found


def asked_within(limits: PassLimits) -> Any:
    """Return lm-eval's model class with a batch size that respects both limits; lm-eval itself limits only the number of texts.

    The longest text decides the batch size: lm-eval evaluates the longest texts first, and all batches have one size.
    """
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class AskedWithin(HFLM):  # type: ignore[misc]
        def _loglikelihood_tokens(self, requests: Sequence[Any], *rest: Any, **named: Any) -> Any:
            self._fit(max((len(text) + len(end) for _, text, end in requests), default=1))
            return super()._loglikelihood_tokens(requests, *rest, **named)

        def generate_until(self, requests: Sequence[Any], *rest: Any, **named: Any) -> Any:
            written = (normalize_gen_kwargs(each.args[1], self.max_gen_toks) for each in requests)
            read = (len(self.tok_encode(each.args[0])) for each in requests)
            self._fit(max(read, default=1) + max((each["max_gen_toks"] for each in written), default=0))
            return super().generate_until(requests, *rest, **named)

        def _fit(self, longest: int) -> None:
            """Prepare for texts of this many tokens; tokens beyond the model's limit are cut off."""
            self.batch_size_per_gpu = limits.rows_of(min(longest, self.max_length), limits.rows or 1)

    return AskedWithin


def metric_key(measured: Mapping[str, Any], metric: str, *, task: str) -> str:
    """Return the key of a metric in lm-eval's results, ``METRIC,FILTER``.

    Raises:
        UnusableTasks: the task has no such metric, or has it by several filters.
    """
    known = [key for key in measured if "," in key and "_stderr," not in key]
    fitting = [key for key in known if metric in (key, key.partition(",")[0])]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UnusableTasks(
            f"metric={metric!r}: task {task} has it by several filters; name one of: {', '.join(fitting)}"
        )
    raise UnusableTasks(f"metric={metric!r} is none of task {task}; there are: {', '.join(known) or 'none'}")


@contextmanager
def _offline(scratch: Path) -> Iterator[None]:
    """Ask nothing of the Hugging Face hub, and keep prepared data in the scratch folder."""
    variables = {
        **{f"HF_{library}_OFFLINE": "1" for library in ("HUB", "DATASETS", "EVALUATE")},
        "DISABLE_MULTIPROC": "1",  # lm-eval's bootstrap in this process, not on every CPU of the machine
    }
    with ExitStack() as held:
        for variable, text in variables.items():
            held.enter_context(_with_item(os.environ, variable, text))
        import datasets
        import evaluate
        from huggingface_hub import constants

        # libraries that were imported before have read their variables already
        settings: tuple[tuple[object, str, object], ...] = (
            (constants, "HF_HUB_OFFLINE", True),
            (datasets.config, "HF_HUB_OFFLINE", True),
            (evaluate.config, "HF_EVALUATE_OFFLINE", True),
            (datasets.config, "HF_DATASETS_CACHE", scratch / "datasets"),
        )
        for module, name, value in settings:
            held.enter_context(_with_item(vars(module), name, value))
        yield


@contextmanager
def _machine_not_described() -> Iterator[None]:
    """Prevent lm-eval from describing the machine in its results: it starts git, pip and gcc for that, and nothing reads it."""
    from lm_eval import evaluator

    with ExitStack() as held:
        for name in ("add_env_info", "get_git_commit_hash"):
            held.enter_context(_with_item(vars(evaluator), name, lambda *_: None))
        yield


@contextmanager
def _with_item(mapping: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """Set a value in a mapping while the block runs."""
    before = {name: mapping[name]} if name in mapping else {}
    mapping[name] = value
    try:
        yield
    finally:
        del mapping[name]
        mapping.update(before)


def _write_tables(job: StageJob[BenchmarkEvaluation], results: Mapping[str, Any]) -> None:
    tables = {
        name: results[name] for name in ("results", "n-samples", "n-shot", "versions", "group_subtasks")
    }
    text = json.dumps(tables, ensure_ascii=False, indent=1, sort_keys=True, default=str) + "\n"
    (job.output / RESULTS_FILE).write_text(text, encoding="utf-8")
    with (job.output / SAMPLES_FILE).open("w", encoding="utf-8") as file:
        for task, samples in sorted(results["samples"].items()):
            for sample in samples:
                line = json.dumps({"task": task, **sample}, ensure_ascii=False, sort_keys=True, default=str)
                file.write(line + "\n")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"

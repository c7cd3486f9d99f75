"""KTO: mismatched pairs, the reference point over micro-batches, labels of one sort, weights and a kill are treated as documented."""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.schemas.metric_names import COMPILED, NONFINITE, UNCOMPILED
from vantage.schemas.recipe.unpaired import KahnemanTverskyOptimization
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.tasks.data.examples import Completions, NothingLeft, codec_of
from vantage.tasks.data.labelled import label_weight_ratio, mismatched, read_labelled
from vantage.tasks.data.rows import read_rows, write_rows
from vantage.tasks.kto import accumulate_labelled, longest_mismatched, measure_labelled, run
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.training.memory_probe import Row
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates.against_reference import Models

WORK = KahnemanTverskyOptimization(
    kind="kto",
    init="sft",
    data="labelled",
    beta=0.3,
    desirable_weight=1.5,
    batch_size=8,
    epochs=0.25,
    learning_rate=1e-3,
    checkpoint_every=2,
)


def write_labelled(pipeline: Any, folder: Path) -> Path:
    """Write both sides of each pair as rows, the chosen one desirable; a prompt's two responses are neighbours."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        pairs = read_rows(pipeline.inputs({"data": "preferences"})["data"], split)
        rows = [
            {"prompt": pair["prompt"], "response": pair[side], "label": side == "chosen"}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
        write_rows(folder, split, rows)
    return folder


@pytest.fixture(scope="module")
def labelled(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(pipeline, tmp_path_factory.mktemp("labelled"))


def job_in(pipeline: Any, labelled: Path, folder: Path, **changes: Any) -> StageJob:
    models = pipeline.inputs({"init": "sft", "reference": "model"})
    changes_of_job = {
        "name": "kto",
        "work": WORK.model_copy(update=changes),
        "inputs": {**models, "data": labelled},
        "digests": {**pipeline.digests(models), "data": "0" * 64},
        "rewards": {},
    }
    job: StageJob = pipeline.job("sft", folder=folder).model_copy(update=changes_of_job)
    return job


def models_of(job: StageJob) -> Models:
    return Models(policy=load(job.inputs["init"]), reference=load(job.inputs["reference"]), temperature=1.0)


@pytest.fixture(scope="module")
def rows(
    pipeline: Any, labelled: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[StageJob, Completions]:
    job = job_in(pipeline, labelled, tmp_path_factory.mktemp("kto"))
    return job, read_labelled(job, "train", codec_of(job, "init"))


# -- mismatched pairs


def few(*prompts: int) -> Completions:
    """Return rows with these prompts; each response is the row's own number."""
    return Completions(
        prompt_ids=[[prompt] for prompt in prompts],
        response_ids={"response": [[100 + row] for row in range(len(prompts))]},
        pad_token_id=0,
        num_too_long=0,
    )


def pairs_of(rows: Completions, indices: list[int]) -> list[tuple[int, int]]:
    """Return (prompt, row of the response) of each mismatched pair."""
    found = mismatched(rows, indices)
    return [
        (prompt[0], response[0] - 100)
        for prompt, response in zip(found.prompt_ids, found.response_ids["response"], strict=True)
    ]


@pytest.mark.parametrize(
    ("prompts", "indices", "expected"),
    [
        ((7, 8, 9), [0, 1, 2], [(7, 2), (8, 0), (9, 1)]),
        ((7, 8, 9), [2, 0], [(9, 0), (7, 2)]),
        ((7, 7, 8), [0, 1, 2], [(7, 2), (7, 2), (8, 1)]),
        ((8, 7, 7, 7), [1, 2, 3, 0], [(7, 0), (7, 0), (7, 0), (8, 3)]),
        ((7, 8, 7), [0, 1, 2], [(7, 1), (8, 0), (7, 1)]),
        ((7, 7), [0, 1], []),
        ((7, 8), [0], []),
    ],
    ids=["shifted by one", "in the minibatch's order", "two of a prompt", "over the end", "at both ends", "one prompt", "one row"],
)  # fmt: skip
def test_each_prompt_has_the_response_of_the_nearest_earlier_row_of_another_prompt(
    prompts: tuple[int, ...], indices: list[int], expected: list[tuple[int, int]]
) -> None:
    assert pairs_of(few(*prompts), indices) == expected


def test_the_longest_mismatched_row_has_any_prompt_with_any_response() -> None:
    """Prompts have 2, 5 and 1 tokens and responses 3, 1 and 7, so the longest mismatched row has 5 and 7."""
    rows = Completions(
        prompt_ids=[[7] * 2, [8] * 5, [9]],
        response_ids={"response": [[1] * 3, [1], [1] * 7]},
        pad_token_id=0,
        num_too_long=0,
    )
    assert longest_mismatched(rows, shares_prompt=False) == Row(5, 7)
    assert longest_mismatched(rows, shares_prompt=True) == Row(5, 7, shares_prompt=True)


# -- a minibatch


def gradient(job: StageJob, data: Completions, **changes: Any) -> tuple[torch.Tensor, dict[str, float]]:
    models = models_of(job)
    metrics, _ = accumulate_labelled(models, data, list(range(11)), WORK.model_copy(update=changes))
    assert models.reference is not None
    assert all(p.grad is None for p in models.reference.parameters()), "the reference is frozen"
    return torch.cat([p.grad.flatten() for p in models.policy.parameters()]), metrics


@pytest.mark.parametrize(
    "limits", [{"microbatch_size": 1}, {"microbatch_size": 3}, {"microbatch_tokens": 90}]
)
def test_micro_batches_change_neither_the_reference_point_nor_the_gradient(
    limits: dict[str, int], rows: tuple[StageJob, Completions]
) -> None:
    """z of a micro-batch alone would be another one; of a single row there is none."""
    job, data = rows
    whole, whole_metrics = gradient(job, data)
    parts, part_metrics = gradient(job, data, **limits)
    assert whole_metrics["reference_point"] > 0
    torch.testing.assert_close(parts / whole.abs().max(), whole / whole.abs().max(), atol=2e-5, rtol=0)
    assert part_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)


def test_a_policy_that_is_its_own_reference_is_at_one_half_of_the_weights(
    rows: tuple[StageJob, Completions],
) -> None:
    job, data = rows
    models = Models(policy=load(job.inputs["init"]), reference=load(job.inputs["init"]), temperature=1.0)
    metrics, _ = accumulate_labelled(models, data, list(range(6)), WORK)
    assert metrics["loss"] == pytest.approx((1.5 * 0.5 + 1.0 * 0.5) / 2, abs=1e-6)
    assert metrics["reference_point"] == metrics["desirable_margin"] == metrics["undesirable_margin"] == 0


def test_held_out_rows_are_measured_against_the_point_of_all_of_them(
    rows: tuple[StageJob, Completions],
) -> None:
    job, data = rows
    few = Completions(
        prompt_ids=data.prompt_ids[:9],
        response_ids={"response": data.response_ids["response"][:9]},
        pad_token_id=data.pad_token_id,
        num_too_long=0,
        labels=data.labels[:9] if data.labels is not None else None,
    )
    expected, _ = accumulate_labelled(models_of(job), few, list(range(9)), WORK)
    for size in (1, 4, 64):
        found, point = measure_labelled(models_of(job), few, WORK.model_copy(update={"batch_size": size}))
        assert point == pytest.approx(expected["reference_point"], rel=1e-5)
        assert found["desirable_margin"].value == pytest.approx(expected["desirable_margin"], rel=1e-4)
        assert found["undesirable_margin"].value == pytest.approx(expected["undesirable_margin"], rel=1e-4)
        assert found["kto_loss"].value == pytest.approx(expected["loss"], rel=1e-4)
        assert found["kto_loss"].num_clusters == 5, "two responses to a prompt are one cluster"


# -- whole stages


def test_training_parts_the_labels_and_reports_exactly_the_metrics_of_the_page(
    pipeline: Any, labelled: Path, tmp_path: Path
) -> None:
    job = job_in(pipeline, labelled, tmp_path, epochs=1.0)
    result = run(job)
    entries = list(read(job.scratch / JOURNAL))
    names = {name for entry in entries for name in entry.metrics}
    assert names == curve_metric_names("kto") - {*COMPILED, *NONFINITE}
    assert set(result.metrics) == headline_metric_names("kto") - set(UNCOMPILED)
    losses = [entry.metrics["loss"] for entry in entries]
    assert sum(losses[-20:]) < sum(losses[:20])
    assert set(result.uncertainty) >= {"desirable_margin", "undesirable_margin", "kto_loss"}
    assert result.metrics["label_weight_ratio"] == pytest.approx(1.5, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_killed_and_run_again_it_gives_the_same_bytes(
    step: int,
    pipeline: Any,
    labelled: Path,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_bytes_after_a_kill(
        run,
        partial(job_in, pipeline, labelled),
        tmp_path,
        step=step,
        contents=contents,
        monkeypatch=monkeypatch,
    )


def test_a_reference_with_another_tokenizer_is_refused(pipeline: Any, labelled: Path, tmp_path: Path) -> None:
    other = tmp_path / "reference"
    shutil.copytree(pipeline.folder("model"), other)
    tokenizer = other / "tokenizer.json"
    tokenizer.chmod(0o644)
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"ä"'))
    job = job_in(pipeline, labelled, tmp_path / "job", reference="other")
    job = job.model_copy(update={"inputs": {**job.inputs, "reference": other}})
    with pytest.raises(TokenizersDiffer, match="reference='other' has another tokenizer than init='sft'"):
        run(job)


# -- labels


def with_one_label(labelled: Path, folder: Path, *, split: str, label: bool) -> Path:
    """Return the same rows, but of one split only those with this label."""
    folder.mkdir()
    for each in ("train", "validation", "test"):
        found = read_rows(labelled, each)
        write_rows(folder, each, [row for row in found if each != split or row["label"] is label])
    return folder


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (True, "of the train split are labelled desirable, and none undesirable.*add such rows.*kind sft"),
        (False, "of the train split are labelled undesirable, and none desirable"),
    ],
)
def test_training_on_labels_of_one_sort_is_refused(
    label: bool, message: str, pipeline: Any, labelled: Path, tmp_path: Path
) -> None:
    folder = with_one_label(labelled, tmp_path / "data", split="train", label=label)
    job = job_in(pipeline, folder, tmp_path / "job")
    with pytest.raises(NothingLeft, match=message):
        run(job)
    assert not list(job.output.iterdir())


def test_a_margin_without_rows_has_no_value_and_a_warning(
    pipeline: Any, labelled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_one_label(labelled, tmp_path / "data", split="validation", label=True)
    with caplog.at_level(logging.WARNING):
        result = run(job_in(pipeline, folder, tmp_path / "job"))
    (warned,) = [each for each in caplog.messages if "undesirable_margin" in each]
    assert "of the validation split are labelled desirable" in warned and "hold out more rows" in warned
    assert result.metrics["validation_undesirable_margin"] is None
    assert None not in (result.metrics["validation_desirable_margin"], result.metrics["undesirable_margin"])


def test_an_imbalance_is_warned_of_with_both_weights(caplog: pytest.LogCaptureFixture) -> None:
    rows = Completions([[1]] * 10, {"response": [[2]] * 10}, 0, 0, labels=[1] * 8 + [0] * 2)
    with caplog.at_level(logging.WARNING):
        assert label_weight_ratio(
            rows, WORK.model_copy(update={"desirable_weight": 0.3}), stage="kto"
        ) == pytest.approx(1.2)
        assert not caplog.records
        assert label_weight_ratio(rows, WORK, stage="kto") == pytest.approx(6.0)
    (warned,) = caplog.messages
    assert (
        "8 rows are desirable and 2 undesirable, with desirable_weight=1.5 and undesirable_weight=1" in warned
    )
    assert "6.00 times" in warned and "raise undesirable_weight, or lower desirable_weight" in warned
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        label_weight_ratio(rows, WORK.model_copy(update={"undesirable_weight": 60.0}), stage="kto")
    assert "raise desirable_weight, or lower undesirable_weight" in caplog.messages[0]

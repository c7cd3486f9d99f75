"""Preference collection makes the right pairs, shows no trace of a kill, and refuses wrong settings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests.tasks.kills import Killed
from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_tokenizer
from vantage.models.heads import load_scalar, scores
from vantage.schemas.metric_names import ANSWERS, ENGINE, GRAPHS
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Judge, Reward
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection
from vantage.schemas.recipe.terms import ModelTerm
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.schemas.tables import usable_rows
from vantage.tasks.data.examples import (
    Codec,
    codec_of,
    read_completions,
    read_prompts,
)
from vantage.tasks.data.openings import without_opening
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.preference_collection import (
    NO_TEXT,
    SAME_SCORE,
    SAME_TEXT,
    Collected,
    NoPairs,
    Pair,
    Response,
    cut_batches,
    demonstrated_pairs,
    describe,
    judged_pair,
    read_source,
    run,
    sample_batch,
)
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.rollouts import sample_responses
from vantage.tasks.training import preemption
from vantage.tasks.training.batch_files import BATCHES, BatchFiles
from vantage.tasks.training.scratch import JOURNAL, read_committed
from vantage.tasks.training.seeds import derive_seed, stage_seed

JUDGED = PreferenceCollection(
    kind="preference_collection",
    policy="sft",
    prompts="prompts",
    judge=Judge(reward="main"),
    samples_per_prompt=3,
    batch_size=24,
)
VERIFIED = JUDGED.model_copy(update={"judge": Judge(verifier="arithmetic"), "samples_per_prompt": 4})
DEMONSTRATED = PreferenceCollection(
    kind="preference_collection",
    policy="sft",
    demonstrations="demonstrations",
    samples_per_prompt=1,
    batch_size=24,
)
NUM_PROMPTS = {"train": 64, "validation": 16, "test": 8}


def job_in(pipeline: Any, folder: Path, work: PreferenceCollection = JUDGED, **changes: Any) -> StageJob:
    inputs = {"policy": pipeline.folder("sft")}
    rewards = {}
    if work.prompts is not None:
        inputs["prompts"] = pipeline.folder("prompts")
    else:
        inputs["demonstrations"] = pipeline.folder("demonstrations")
    if work.judge is not None and work.judge.reward is not None:
        inputs["reward.main.0"] = pipeline.folder("reward")
        rewards = {"main": Reward(terms=(ModelTerm(model="reward"),))}
    changes_of_job = {
        "name": "pairs",
        "work": work.model_copy(update=changes),
        "inputs": inputs,
        "rewards": rewards,
    }
    job: StageJob = pipeline.job("sft", folder=folder).model_copy(update=changes_of_job)
    return job


@pytest.fixture(scope="module")
def judged(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[StageJob, StageResult]:
    job = job_in(pipeline, tmp_path_factory.mktemp("judged"))
    return job, run(job)


def responses(*texts: str) -> list[Response]:
    return [Response(text, len(text) + 1) for text in texts]


def test_the_best_stands_against_the_worst_and_of_equals_the_first() -> None:
    [pair] = judged_pair("p", responses("a", "bb", "ccc", "dddd"), [1.0, 2.0, 1.0, 2.0])
    assert (pair.prompt, pair.chosen, pair.rejected) == ("p", "bb", "a")
    assert (pair.chosen_tokens, pair.rejected_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("texts", "given", "why"),
    [
        (("a", "b"), [1.0, 1.0], SAME_SCORE),
        (("a", "a"), [1.0, 0.0], SAME_TEXT),  # for instance, one of them was cut off
        (("a", ""), [1.0, 0.0], NO_TEXT),
        (("a", " \n"), [0.0, 1.0], NO_TEXT),
        (("a\0", "b"), [0.0, 1.0], NO_TEXT),
    ],
)
def test_prompts_that_give_no_pair(texts: tuple[str, ...], given: list[float], why: str) -> None:
    assert judged_pair("p", responses(*texts), given) == why


def test_a_response_without_text_is_passed_over() -> None:
    [pair] = judged_pair("p", responses("", "a", "b"), [9.0, 1.0, 2.0])
    assert (pair.chosen, pair.rejected) == ("b", "a")


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(FloatingPointError, match=r"a response to 'p' scores \[nan, 1.0\]"):
        judged_pair("p", responses("a", "b"), [float("nan"), 1.0])


def test_a_prompt_without_a_pair_is_one_of_all_prompts() -> None:
    """Two of five prompts give no pair, and the other three give four pairs. The share is 2/5, and not 2/6."""
    pairs = tuple(
        Pair(prompt="Q", chosen="A", rejected="B", chosen_tokens=chosen, rejected_tokens=rejected)
        for chosen, rejected in ((2, 9), (4, 1), (6, 1), (4, 1))
    )
    parts = [
        Collected(split="train", num_prompts=3, pairs=pairs[:3], without_pair={SAME_TEXT: 1}),
        Collected(split="test", num_prompts=2, pairs=pairs[3:], without_pair={NO_TEXT: 1}),
    ]
    assert describe(parts) == {"tied_share": 0.4, "mean_chosen_length": 4.0, "mean_rejected_length": 3.0}
    assert parts[0].tied_share == pytest.approx(1 / 3)


def test_a_demonstration_is_chosen_over_each_different_response() -> None:
    demonstration = Response("right", 6)
    pairs = demonstrated_pairs("p", demonstration, responses("x", "right", "y", "x", ""))
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [("right", "x"), ("right", "y")]
    assert demonstrated_pairs("p", demonstration, responses("right", "right")) == SAME_TEXT
    assert demonstrated_pairs("p", demonstration, responses("", " ")) == NO_TEXT


@pytest.mark.slow
def test_a_reward_chooses_the_best_and_the_worst_of_each_prompt(
    judged: tuple[StageJob, StageResult],
) -> None:
    """A plain loop outside of the stage samples, scores and chooses the first batch (of test prompts) once more."""
    job, _ = judged
    codec = codec_of(job, "policy")
    prompts = read_prompts(job.inputs["prompts"], "test", codec)
    sampled = sample_responses(
        load_engine(load(job.inputs["policy"]), codec, limits=PassLimits()),
        codec,
        prompts,
        range(8),
        device=torch.device("cpu"),
        count=3,
        seed=derive_seed(stage_seed(job), "sampling", 0),
    )
    with torch.no_grad():
        given = scores(load_scalar(job.inputs["reward.main.0"]), sampled.sequences).tolist()
    expected = []
    for index, prompt in enumerate(prompts.texts):
        rows = [row for row in range(3 * index, 3 * index + 3) if sampled.responses[row].strip()]
        rows.sort(key=given.__getitem__)
        chosen, rejected = sampled.responses[rows[-1]], sampled.responses[rows[0]]
        if chosen != rejected:
            expected.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert len(expected) > 4
    assert read_rows(job.output, "test") == expected


def test_prompts_stay_on_their_side_and_no_row_breaks_a_rule(
    pipeline: Any, judged: tuple[StageJob, StageResult]
) -> None:
    job, result = judged
    for split in SPLITS:
        rows = read_rows(job.output, split)
        known = [row["prompt"] for row in read_rows(pipeline.folder("prompts"), split)]
        found = [row["prompt"] for row in rows]
        assert found == [prompt for prompt in known if prompt in set(found)], "in order, each once"
        assert result.metrics[f"{split}_rows"] == len(rows) > 0
        kept, _ = usable_rows([pa.Table.from_pylist(rows)], content="preferences")
        assert sum(len(batch) for batch in kept) == len(rows)
        assert all(set(row) == {"prompt", "chosen", "rejected"} for row in rows)


def test_metrics_and_report_count_every_prompt(judged: tuple[StageJob, StageResult]) -> None:
    job, result = judged
    num_rows = sum(len(read_rows(job.output, split)) for split in SPLITS)
    without = sum(NUM_PROMPTS.values()) - num_rows
    assert result.metrics["tied_share"] == pytest.approx(without / 88)
    report = json.loads((job.output / "report.json").read_text())
    assert sum(report.pop("dropped").values()) == without
    assert report == {f"{split}_rows": result.metrics[f"{split}_rows"] for split in SPLITS}
    assert set(result.metrics) == headline_metric_names("preference_collection")
    written = {name for entry in read(job.scratch / JOURNAL) for name in entry.metrics}
    assert written == curve_metric_names("preference_collection") - {
        *(*GRAPHS, *ENGINE, *ANSWERS),
        "seconds_beside",
    }


@pytest.mark.slow
def test_lengths_are_in_tokens_with_the_end(pipeline: Any, tmp_path: Path) -> None:
    """The built-in tokenizer has a token for each character, and one for the end unless that was cut off."""
    job = job_in(pipeline, tmp_path, DEMONSTRATED)
    metrics = run(job).metrics
    rows = [row for split in SPLITS for row in read_rows(job.output, split)]
    limit = job.generation.max_response_tokens
    chosen = sum(min(len(row["chosen"]) + 1, limit) for row in rows) / len(rows)
    assert metrics["mean_chosen_length"] == pytest.approx(chosen)
    shortest = sum(len(row["rejected"]) for row in rows) / len(rows)
    assert shortest <= metrics["mean_rejected_length"] <= limit


@pytest.mark.slow
def test_a_verifier_tells_right_from_wrong(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier asks for a colon and no dash, so that this hardly trained policy is right now and then."""
    monkeypatch.setitem(
        BUILTIN_FUNCTIONS, "arithmetic", lambda prompt, text, answer: ":" in text and "-" not in text
    )
    job = job_in(pipeline, tmp_path, VERIFIED)
    result = run(job)
    rows = [row for split in SPLITS for row in read_rows(job.output, split)]
    assert len(rows) > 30
    for row in rows:
        assert row["chosen"].count(":") > 0 and row["chosen"].count("-") == 0
        assert row["rejected"].count(":") == 0 or row["rejected"].count("-") > 0
    assert 0.0 < result.metrics["tied_share"] < 1.0


@pytest.mark.slow
def test_demonstrations_stand_against_the_policys_own_responses(pipeline: Any, tmp_path: Path) -> None:
    job = job_in(pipeline, tmp_path, DEMONSTRATED, samples_per_prompt=2)
    run(job)
    for split in SPLITS:
        source = [
            (row["prompt"], row["response"]) for row in read_rows(pipeline.folder("demonstrations"), split)
        ]
        rows = read_rows(job.output, split)
        assert {(row["prompt"], row["chosen"]) for row in rows} <= set(source)
        assert len(source) <= len(rows) <= 2 * len(source)
        assert all(row["rejected"] != row["chosen"] for row in rows)


def test_demonstrations_whose_prompt_is_too_long_are_left_out_with_their_responses(
    pipeline: Any, tmp_path: Path
) -> None:
    job = job_in(pipeline, tmp_path, DEMONSTRATED)
    job = job.model_copy(update={"generation": Generation(max_prompt_tokens=15, max_response_tokens=24)})
    result = run(job)
    known = [row for split in SPLITS for row in read_rows(pipeline.folder("demonstrations"), split)]
    too_long = [row for row in known if len(row["prompt"]) + 1 > 15]  # a token for each character, and BOS
    assert result.metrics["prompts_too_long"] == len(too_long) > 0
    rows = [row for split in SPLITS for row in read_rows(job.output, split)]
    fitting = {(row["prompt"], row["response"]) for row in known} - {
        (row["prompt"], row["response"]) for row in too_long
    }
    assert {(row["prompt"], row["chosen"]) for row in rows} <= fitting


def test_readers_take_the_pairs_unchanged(judged: tuple[StageJob, StageResult], pipeline: Any) -> None:
    """A response that was cut off is as long for who reads it as it was when it was sampled: no end is added."""
    job, _ = judged
    codec = codec_of(job, "policy")
    read_back = read_completions(job.output, "test", ["chosen", "rejected"], codec)
    rows = read_rows(job.output, "test")
    limit = job.generation.max_response_tokens
    for row, ids in zip(rows, read_back.response_ids["chosen"], strict=True):
        assert len(ids) == min(len(row["chosen"]) + 1, limit)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "after"), [(0, False), (2, True), (5, False)])
def test_killed_and_run_again_it_gives_the_same_bytes(
    batch: int,
    after: bool,
    pipeline: Any,
    judged: tuple[StageJob, StageResult],
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kill comes before a batch is kept (it is sampled again) or just after."""
    whole, expected = judged
    finish = BatchFiles.finish

    def dying(self: BatchFiles, *args: Any, **kwargs: Any) -> None:
        if len(self.finished) == batch and not after:
            raise Killed
        finish(self, *args, **kwargs)
        if len(self.finished) == batch + 1 and after:
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(BatchFiles, "finish", dying)
        run(job_in(pipeline, tmp_path))
    kept = len(list((tmp_path / "scratch" / BATCHES).iterdir()))
    assert kept == read_committed(tmp_path / "scratch")[0] == batch + after

    cut = job_in(pipeline, tmp_path)
    assert run(cut) == expected
    assert contents(cut.output) == contents(whole.output)
    steps = [entry.step for entry in read(cut.scratch / JOURNAL)]
    assert steps == list(range(1, 12)), "8 test, 16 validation and 64 training prompts, 8 at a time"


def test_a_finished_batch_is_never_sampled_again_unless_its_file_is_damaged(
    pipeline: Any,
    judged: tuple[StageJob, StageResult],
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, _ = judged
    shutil.copytree(whole.scratch, tmp_path / "scratch")
    numbers: list[int] = []
    original = BatchFiles.remaining

    def counted(self: BatchFiles) -> Any:
        for number in original(self):
            numbers.append(number)
            yield number

    monkeypatch.setattr(BatchFiles, "remaining", counted)
    run(job_in(pipeline, tmp_path))
    assert numbers == []

    damaged = tmp_path / "scratch" / BATCHES / "7.json"
    text = damaged.read_bytes()
    damaged.write_bytes(text.replace(b"chosen_tokens", b"chosen_tokenz", 1))
    job = job_in(pipeline, tmp_path)
    run(job)
    assert numbers == [7, 8, 9, 10]
    assert damaged.read_bytes().split(b"\n")[1].count(b"chosen_tokenz") == 0
    assert contents(job.output) == contents(whole.output)


def test_asked_to_stop_it_keeps_what_is_done(
    pipeline: Any,
    judged: tuple[StageJob, StageResult],
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    until_request = iter([False, True])
    with monkeypatch.context() as patched:
        patched.setattr(preemption, "requested", lambda: next(until_request))
        with pytest.raises(preemption.Preempted, match="stopped on request after batch 2 of 11"):
            run(job_in(pipeline, tmp_path))
    job = job_in(pipeline, tmp_path)
    run(job)
    assert contents(job.output) == contents(judged[0].output)


@pytest.mark.slow
def test_another_seed_samples_other_pairs(
    pipeline: Any, judged: tuple[StageJob, StageResult], tmp_path: Path
) -> None:
    other = job_in(pipeline, tmp_path).model_copy(update={"seed": 6})
    run(other)
    assert read_rows(other.output, "test") != read_rows(judged[0].output, "test")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "validation", "train"])
def test_a_split_without_a_pair_is_refused_as_soon_as_it_is_done(
    split: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = {row["prompt"] for row in read_rows(pipeline.folder("prompts"), split)}
    monkeypatch.setitem(
        BUILTIN_FUNCTIONS,
        "arithmetic",
        lambda prompt, text, answer: prompt not in alike and ":" in text and "-" not in text,
    )
    message = (
        rf"pairs: none of the {NUM_PROMPTS[split]} prompts of the {split} split gives a pair "
        rf"\(all responses score the same: {NUM_PROMPTS[split]}\); raise samples_per_prompt or "
        rf"generation.temperature, or give {split} more prompts"
    )
    for _ in range(2):  # the second time, every batch is there already
        with pytest.raises(NoPairs, match=message):
            run(job_in(pipeline, tmp_path, VERIFIED, samples_per_prompt=6))
    done = len(list((tmp_path / "scratch" / BATCHES).iterdir()))
    assert done == {"test": 2, "validation": 6, "train": 22}[split], "four prompts at a time"


def test_a_batch_smaller_than_one_prompts_responses_takes_one_prompt(pipeline: Any, tmp_path: Path) -> None:
    """No more responses than asked for are sampled at once, which does not change the samples."""
    job = job_in(pipeline, tmp_path, batch_size=2)
    codec = codec_of(job, "policy")
    sources = {split: read_source(job, split, codec) for split in SPLITS}
    batches = list(cut_batches(sources, job.work))
    assert [len(batch.indices) for batch in batches] == [1] * 88
    assert [batch.split for batch in batches if batch.is_last] == ["test", "validation", "train"]
    policy, cpu = load(job.inputs["policy"]), torch.device("cpu")
    sampled = [
        sample_batch(
            load_engine(policy, codec, limits=PassLimits(size)),
            codec,
            sources["test"],
            batches[3],
            job_in(pipeline, tmp_path, batch_size=size),
            number=3,
            device=cpu,
        )
        for size in (2, 3)
    ]
    assert len(sampled[0].responses) == 3
    assert sampled[0].responses == sampled[1].responses


def test_white_space_that_a_chat_template_puts_first_is_taken_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    plain = Codec(tokenizer=tokenizer, generation=Generation(), chat=None)
    assert without_opening(["\nhi", " ho"], plain) == ["\nhi", " ho"]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + '>\n' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant>' }}{% endif %}"
    )
    chat = Codec(tokenizer=tokenizer, generation=Generation(), chat=True)
    assert without_opening(["\nhi", "\n\nho", "hey"], chat) == ["hi", "\nho", "hey"]


ASKED = "{prompt}|{first}|{second}|"


def likelier(model: Any, tokenizer: Any, question: str, answers: tuple[str, str]) -> int:
    """Return 1 if the first answer is likelier after the question and −1 if the second is, by transformers and one text
    at a time.
    """
    found = []
    for answer in answers:
        start = len(tokenizer(question).input_ids)
        ids = tokenizer(question + answer, return_tensors="pt").input_ids
        with torch.no_grad():
            logprobs = model(ids).logits.double().log_softmax(dim=-1)
        found.append(sum(logprobs[0, at - 1, ids[0, at]].item() for at in range(start, ids.shape[1])))
    return 1 if found[0] > found[1] else -1


@pytest.mark.slow
def test_a_model_as_judge_makes_pairs_where_both_orders_agree(pipeline: Any, tmp_path: Path) -> None:
    """Transformers alone judges every prompt's two responses again; where the two orders disagree there is no pair."""
    answers = ("A", "B")
    judge = Judge(model="sft", template=ASKED, answers=answers)
    work = JUDGED.model_copy(update={"judge": judge, "samples_per_prompt": 2})
    job = job_in(pipeline, tmp_path, work)
    job = job.model_copy(update={"inputs": {**job.inputs, "judge": pipeline.folder("sft")}})
    result = run(job)

    codec, policy = codec_of(job, "policy"), load(job.inputs["policy"])
    engine = load_engine(policy, codec, limits=PassLimits(24))
    model, tokenizer = policy.causal_lm, load_tokenizer(job.inputs["judge"])
    sources = {split: read_source(job, split, codec) for split in SPLITS}
    expected: dict[str, list[tuple[str, str, str]]] = {split: [] for split in SPLITS}
    disagreed = 0
    for number, batch in enumerate(cut_batches(sources, job.work)):
        sampled = sample_batch(
            engine, codec, sources[batch.split], batch, job, number=number, device=torch.device("cpu")
        )
        for place in range(0, len(sampled.responses), 2):
            prompt, (one, other) = sampled.prompts[place], sampled.responses[place : place + 2]
            said = [
                likelier(model, tokenizer, f"{prompt}|{first}|{second}|", answers)
                for first, second in ((one, other), (other, one))
            ]
            if said[0] == said[1]:
                disagreed += 1
            elif one.strip() and other.strip():
                pair = (one, other) if said[0] > 0 else (other, one)
                expected[batch.split].append((prompt, *pair))
    assert disagreed
    for split in SPLITS:
        rows = [(row["prompt"], row["chosen"], row["rejected"]) for row in read_rows(job.output, split)]
        assert sorted(rows) == sorted(expected[split])
    total = sum(NUM_PROMPTS.values())
    assert result.metrics["tied_share"] == pytest.approx(1 - sum(map(len, expected.values())) / total)
    assert job.output.joinpath("report.json").exists()

"""A model of the run that judges gives transformers' scores, keeps its answers, and refuses what it cannot judge."""

import json
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.models.byte_tokenizer import build_byte_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.judging_models import JudgingModel
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.terms import JudgingModelTerm
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.data.rows import write_rows
from vantage.tasks.rewards import answer_file, judging_model_scores
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.rewards.answered_scores import UnreadableAnswer
from vantage.tasks.rewards.label_logprobs import UnusableJudge
from vantage.tasks.rewards.scoring import Term
from vantage.tasks.rewards.term_scores import NamedScores, Responses, Source, TermScores
from vantage.tasks.rewards.verifiers import MissingAnswers
from vantage.tasks.training.answer_record import answer_metrics
from vantage.tasks.training.scratch import ANSWERS as KEPT

DIGEST = "d" * 64
PROMPTS = ["1 + 1?", "Name a colour, and why.", "1 + 1?", "数?"]
RESPONSES = ["2", "Blue {criterion} {low}", "two", "一"]
ANSWERS = ["2", "red", "2", "二"]
PROMPT = "{prompt}|{response}|{criterion}|{low}-{high}="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama whose weights are sines, so that its probabilities differ much from question to question."""
    tokenizer, path = build_byte_tokenizer(), tmp_path_factory.mktemp("judge")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=200, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            places = torch.arange(weight.numel(), dtype=torch.float64)
            weight.copy_(
                (0.37 * places * places + number).sin().view_as(weight) * (1.0 if weight.dim() > 1 else 0.5)
            )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def fresh() -> Any:
    """Forget all open files of answers: what a new process would not know."""

    def forget() -> None:
        answer_file._opened.cache_clear()
        answer_metrics()

    forget()
    return forget


class Job:
    """The part of a job that a term reads."""

    work, name, date = None, "policy", date(2026, 1, 1)
    generation = Generation(max_prompt_tokens=50, max_response_tokens=20)

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.scratch, self.inputs, self.digests = (
            scratch,
            {"reward.main.0": folder},
            {"reward.main.0": DIGEST},
        )

    def model(self, role: str) -> ModelFiles:
        return ModelFiles(self.inputs[role])


def load(
    folder: Path, scratch: Path, *, prompts: Path | None = None, **fields: Any
) -> TermScores | NamedScores:
    job = Job(folder, scratch)
    if prompts is not None:
        job.inputs["prompts"] = prompts
    source = Source(job, "reward.main.0", "rewards.main.terms.0", (), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    judge = JudgingModel.model_validate({"model": "grader", "prompt": PROMPT, **fields})
    return judging_model_scores.load(JudgingModelTerm(judge=judge), source)


def scored(
    scores: TermScores | NamedScores, *, at_once: int | None = None, rows: slice = slice(None)
) -> dict[str, list[float]]:
    given = Responses(
        None,  # type: ignore[arg-type]
        PROMPTS[rows],
        RESPONSES[rows],
        ANSWERS[rows],
        torch.device("cpu"),
        PassLimits(at_once),
    )
    return {name: each.tolist() for name, each in Term("judge", 1.0, scores).score(given).items()}


def probabilities(folder: Path, text: str, labels: list[str]) -> list[float]:
    """Return the probability of each answer by transformers alone, in float64 and one question at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    talk = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        last = model(torch.tensor([ids])).logits[0, -1].softmax(dim=-1)
    return [last[tokenizer.convert_tokens_to_ids(label)].item() for label in labels]


def question(row: int, criterion: str = "How good is the response?", scale: str = "1-5") -> str:
    return f"{PROMPTS[row]}|{RESPONSES[row]}|{criterion}|{scale}="


def test_scores_are_those_of_transformers_alone(folder: Path, tmp_path: Path, fresh: Any) -> None:
    found = scored(load(folder, tmp_path))["judge"]
    expected = []
    for row in range(4):
        weights = probabilities(folder, question(row), list("12345"))
        expected.append(sum(weight * value for value, weight in enumerate(weights, 1)) / sum(weights))
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(found) - min(found) > 0.3, "the model distinguishes the responses"


def test_each_criterion_is_a_question_of_its_own(folder: Path, tmp_path: Path, fresh: Any) -> None:
    criteria = {"right": "Is it right?", "short": "Is it short?"}
    found = scored(load(folder, tmp_path, criteria=criteria, scale=[0, 2]))
    for name, text in criteria.items():
        for row in range(4):
            none, one, two = probabilities(folder, question(row, text, "0-2"), list("012"))
            assert found[f"judge.{name}"][row] == pytest.approx(
                (one + 2 * two) / (none + one + two), abs=1e-5
            )
    assert len(list(answers_in(tmp_path / KEPT))) == 8


def test_a_comparison_is_the_mean_of_both_orders(folder: Path, tmp_path: Path, fresh: Any) -> None:
    prompt = "{prompt}|{first}|{second}="
    found = scored(load(folder, tmp_path, against="answer", prompt=prompt))["judge"]
    for row, (asked, ours, answer) in enumerate(zip(PROMPTS, RESPONSES, ANSWERS, strict=True)):
        shares = []
        for first, second in ((ours, answer), (answer, ours)):
            a, b = probabilities(folder, f"{asked}|{first}|{second}=", ["A", "B"])
            shares.append(a / (a + b))
        assert found[row] == pytest.approx((shares[0] + 1 - shares[1]) / 2, abs=1e-5)
    assert found[0] == 0.5, "a response that equals the answer"


def test_a_comparison_that_is_unreadable_in_one_order_has_the_recipes_number(
    folder: Path, tmp_path: Path, fresh: Any
) -> None:
    prompt = "{prompt}|{first}|{second}="
    orders = [
        [
            sum(probabilities(folder, f"{asked}|{first}|{second}=", ["A", "B"]))
            for first, second in ((ours, answer), (answer, ours))
        ]
        for asked, ours, answer in zip(PROMPTS, RESPONSES, ANSWERS, strict=True)
    ]
    several = sorted(each for row in orders for each in row)
    plain = scored(load(folder, tmp_path, against="answer", prompt=prompt))["judge"]
    seen = set()
    for low, high in pairwise(several):
        if high - low < 1e-6:
            continue
        least = (low + high) / 2
        fresh()
        fields: dict[str, Any] = {"least_probability": least, "unreadable": -1.0}
        found = scored(load(folder, tmp_path, against="answer", prompt=prompt, **fields))["judge"]
        assert found == [
            -1.0 if min(row) < least else score for row, score in zip(orders, plain, strict=True)
        ]
        seen |= {(row[0] < least, row[1] < least) for row in orders}
    assert {(True, False), (False, True)} & seen, "no answer was unreadable in one order alone"


def test_each_criterion_of_a_comparison_has_its_own_orders(folder: Path, tmp_path: Path, fresh: Any) -> None:
    criteria = {"right": "Right?", "kind": "Kind?", "short": "Short?"}
    prompt = "{prompt}|{first}|{second}|{criterion}="
    found = scored(load(folder, tmp_path, against="answer", criteria=criteria, prompt=prompt))
    for name, criterion in criteria.items():
        for row, (asked, ours, answer) in enumerate(zip(PROMPTS, RESPONSES, ANSWERS, strict=True)):
            shares = []
            for first, second in ((ours, answer), (answer, ours)):
                a, b = probabilities(folder, f"{asked}|{first}|{second}|{criterion}=", ["A", "B"])
                shares.append(a / (a + b))
            assert found[f"judge.{name}"][row] == pytest.approx((shares[0] + 1 - shares[1]) / 2, abs=1e-5)
    assert len({score for scores in found.values() for score in scores}) > 9


SIMILAR = [(f"{n} + {m}?", "ab" * k + str(n * m), None) for n in (1, 2, 3) for m in (4, 5) for k in (1, 2, 3)]
"""Questions of similar length, so that a pass holds four of them: alone, 5 of the 18 have other bits."""


def scores_of_similar(scores: TermScores | NamedScores) -> list[float]:
    prompts, responses, answers = zip(*SIMILAR, strict=True)
    given = Responses(None, prompts, responses, answers, torch.device("cpu"), PassLimits(20))  # type: ignore[arg-type]
    return Term("judge", 1.0, scores).score(given)["judge"].tolist()  # type: ignore[no-any-return]


def test_an_attempt_that_goes_on_asks_the_rest_and_gets_the_same_bits(
    folder: Path, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, passes = judging_model_scores.label_logprobs, 0

    def counted(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        return computed(*given)

    monkeypatch.setattr(judging_model_scores, "label_logprobs", counted)
    template = "{prompt}|{response}|good|1-5="
    whole = scores_of_similar(load(folder, tmp_path / "whole", prompt=template))
    assert passes == 5
    metrics = answer_metrics()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{prompt}|{response}|good|1-5=" for prompt, response, _ in SIMILAR]
    talks = [[{"role": "user", "content": text}] for text in texts]
    read = tokenizer.apply_chat_template(talks, add_generation_prompt=True, return_dict=False)
    tokens = sum(map(len, read)) + 18
    assert (metrics["judge_asked"], metrics["judge_answers"], metrics["judge_tokens"]) == (18, 18, tokens)
    written = (tmp_path / "whole" / KEPT).read_bytes()
    lines = written.splitlines(keepends=True)
    for kept, left in ((1, 5), (6, 4), (11, 3)):  # passes of 4, 4, 4, 3 and 3 questions
        fresh()
        passes, scratch = 0, tmp_path / str(kept)
        scratch.mkdir()
        (scratch / KEPT).write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
        assert scores_of_similar(load(folder, scratch, prompt=template)) == whole
        assert (answer_metrics()["judge_asked"], passes) == (18 - kept, left)
        assert sorted((scratch / KEPT).read_bytes().splitlines()) == sorted(written.splitlines())


def test_kept_answers_need_no_pass(
    folder: Path, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scored(load(folder, tmp_path), rows=slice(0, 3))
    fresh()
    scores = load(folder, tmp_path)
    monkeypatch.setattr(PolicyModel, "forward", None)
    assert scored(scores, rows=slice(0, 3)) == first
    metrics = answer_metrics()
    assert (metrics["judge_asked"], metrics["judge_answers"]) == (0, 3)
    for answer in answers_in(tmp_path / KEPT):
        assert answer.asked == {"model": DIGEST, "question": answer.asked["question"], "labels": "1 2 3 4 5"}
        assert list(json.loads(answer.answer)) == list("12345")


def test_the_probability_of_the_numbers_is_a_curve(folder: Path, tmp_path: Path, fresh: Any) -> None:
    scored(load(folder, tmp_path))
    expected = sum(sum(probabilities(folder, question(row), list("12345"))) for row in range(4)) / 4
    assert answer_metrics()["judge_probability"] == pytest.approx(expected, abs=1e-6)


def test_an_answer_of_other_words_is_unreadable(folder: Path, tmp_path: Path, fresh: Any) -> None:
    sums = [sum(probabilities(folder, question(row), list("12345"))) for row in range(4)]
    least = (min(sums) + max(sums)) / 2
    plain = scored(load(folder, tmp_path))["judge"]
    fresh()
    found = scored(load(folder, tmp_path, least_probability=least, unreadable=-1.0))["judge"]
    assert found == [-1.0 if each < least else score for each, score in zip(sums, plain, strict=True)]
    assert answer_metrics()["judge_unreadable"] == sum(each < least for each in sums)
    with pytest.raises(
        UnreadableAnswer, match="least_probability is .*; correct the question, lower least_prob"
    ):
        scored(load(folder, tmp_path, least_probability=least))


def test_numbers_that_begin_alike_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnusableJudge,
        match=r"rewards.main.terms.0.judge.scale: .* reads '1' as .*; give a scale whose numbers",
    ):
        load(folder, tmp_path, scale=[1, 10])


def test_questions_that_could_be_too_long_are_refused_before_anything_is_sampled(
    folder: Path, tmp_path: Path, fresh: Any
) -> None:
    (tmp_path / "prompts").mkdir()
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / "prompts", split, [{"prompt": "p" * 30, "answer": None}])
    load(folder, tmp_path, prompts=tmp_path / "prompts")
    with pytest.raises(
        UnusableJudge, match="judge.model='grader' reads 200 tokens, and a question about a resp"
    ):
        load(folder, tmp_path, prompts=tmp_path / "prompts", prompt=PROMPT + "!" * 100)
    with pytest.raises(UnusableJudge, match="reads 200 tokens, and its longest question has "):
        scored(load(folder, tmp_path, prompt=PROMPT + "!" * 160))
    with pytest.raises(MissingAnswers, match="judge shows the row's answer"):
        load(folder, tmp_path, prompts=tmp_path / "prompts", prompt=PROMPT + "{answer}")

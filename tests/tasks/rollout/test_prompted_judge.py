"""A language model as judge gives the scores of log-probabilities that are set by hand, and of a loop over transformers' own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.byte_tokenizer import build_byte_tokenizer
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences, collate
from vantage.schemas.metric_names import COMPARED_BY_JUDGE
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits
from vantage.schemas.recipe.rewards import PAIR_TEMPLATE, Judge
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import estimated_metric_names, headline_metric_names
from vantage.tasks.data.rows import read_rows
from vantage.tasks.evaluation import run
from vantage.tasks.rollout.comparison import Judged, Pairs, order_disagreement
from vantage.tasks.rollout.prompted_judge import (
    PromptedJudge,
    UnusableJudge,
    answer_ids,
    encoded_questions,
    judge_pairs,
    load_prompted_judge,
    preferences,
    question,
    refuse_long_responses,
)
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training import progress

TEMPLATE = "{prompt}|{first}|{second}="


def sampled(prompts: list[str], responses: list[str]) -> Sampled:
    sequences = collate([[1]] * len(prompts), [[5]] * len(prompts), pad_token_id=0)
    return Sampled(
        prompts=prompts,
        answers=[None] * len(prompts),
        responses=responses,
        sequences=sequences,
        ended=torch.ones(len(prompts), dtype=torch.bool),
        sampler_logprobs=torch.zeros(sequences.response_ids.shape),
    )


class SetByHand:
    """Stands for a policy, with the log-probability of the first token of each answer to each question."""

    device = torch.device("cpu")

    class causal_lm:  # named like the attribute of a policy
        class config:
            max_position_embeddings = 4096

    def __init__(self, tokenizer: Any, said: dict[str, tuple[float, float]]) -> None:
        self.tokenizer = tokenizer
        self.said = said
        self.rows: list[int] = []
        self.positions: list[int] = []

    def __call__(self, micro: Sequences, *, temperature: float) -> dict[str, Tensor]:
        assert temperature == 1.0
        self.rows.append(len(micro))
        self.positions.append(micro.input_ids.numel())
        found = torch.full(micro.response_ids.shape, 7.0)  # beyond the mask too
        rows = zip(micro.prompt_rows(), micro.response_rows(), strict=True)
        for row, (prompt, answer) in enumerate(rows):
            text = self.tokenizer.decode(prompt).split("user\n")[1].split("<|im_end|>")[0]
            found[row, 0] = self.said[text][0 if self.tokenizer.decode(answer) == "A" else 1]
        return {"logprobs": found}


def by_hand(said: dict[str, tuple[float, float]], *, limits: PassLimits = UNLIMITED) -> PromptedJudge:
    tokenizer = build_byte_tokenizer()
    return PromptedJudge(
        policy=SetByHand(tokenizer, said),  # type: ignore[arg-type]
        tokenizer=tokenizer,
        template=TEMPLATE,
        answers=answer_ids(tokenizer, ("A", "B"), field="judge.answers"),
        name="judge.model='grader'",
        limits=limits,
    )


SAID = {
    "p|good|bad=": (-0.1, -2.0),  # A: the first
    "p|bad|good=": (-3.0, -0.2),  # B: the second, the same response
    "q|one|two=": (-0.3, -0.4),
    "q|two|one=": (-0.3, -0.4),  # A again: only the place counts
    "r|x|y=": (-5.0, -0.1),
    "r|y|x=": (-0.1, -5.0),
    "s|same|same=": (-0.5, -0.9),
}
CANDIDATE = sampled(["p", "q", "r", "s"], ["good", "one", "x", "same"])
BASELINE = sampled(["p", "q", "r", "s"], ["bad", "two", "y", "same"])


@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 4])
def test_verdicts_follow_from_the_likelier_answers_in_both_orders(microbatch_size: int | None) -> None:
    judge = by_hand(SAID, limits=PassLimits(microbatch_size))
    margins = preferences(judge, ["p", "q", "r"], ["good", "one", "x"], ["bad", "two", "y"])
    assert margins.tolist() == pytest.approx([1.9, 0.1, -4.9], abs=1e-6)
    verdicts = judge_pairs(judge, CANDIDATE, BASELINE)
    assert verdicts.wins.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert verdicts.disagree.tolist() == [False, True, False, True]
    assert all(rows % 2 == 0 for rows in judge.policy.rows), "both answers to a question in one pass"  # type: ignore[union-attr,attr-defined,operator]


def test_a_budget_of_positions_counts_both_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what a pass had is a pass of half as many questions."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(progress, "computing", lambda rows, tokens: told.append((rows, tokens)))
    arguments = (["s"] * 4, ["same"] * 4, ["same"] * 4)
    whole = preferences(by_hand(SAID), *arguments)
    [(rows, positions), _] = told
    width, odd = divmod(positions, 8)
    assert (rows, odd) == (4, 0)
    told.clear()
    judge = by_hand(SAID, limits=PassLimits(tokens=positions // 2))
    assert preferences(judge, *arguments).tolist() == whole.tolist()
    assert told[:2] == [(2, 4 * width)] * 2
    assert judge.policy.rows == [4, 4]  # type: ignore[union-attr,attr-defined,operator]
    assert judge.policy.positions == [4 * width] * 2, "with the answers"  # type: ignore[union-attr,attr-defined,operator]


def test_equal_responses_say_nothing_about_the_order() -> None:
    """The order decides one of three pairs of different responses. The two responses of the fourth pair are equal."""
    judge = by_hand(SAID)
    pairs = Pairs(Judged(CANDIDATE, {}), Judged(BASELINE, {}), 1, seed=0)
    [estimate] = order_disagreement(pairs, judge_pairs(judge, CANDIDATE, BASELINE)).values()
    assert (estimate.value, estimate.num_rows) == (pytest.approx(1 / 3), 3)
    same = Pairs(Judged(BASELINE, {}), Judged(BASELINE, {}), 1, seed=0)
    judge = by_hand(
        {f"{p}|{r}|{r}=": (-1.0, -2.0) for p, r in zip(BASELINE.prompts, BASELINE.responses, strict=True)}
    )
    [undefined] = order_disagreement(same, judge_pairs(judge, BASELINE, BASELINE)).values()
    assert undefined.value != undefined.value, "NaN: all pairs are equal"


def test_what_looks_like_a_field_in_a_response_stays_as_it_is() -> None:
    asked = question(TEMPLATE, "{first} {0}", "{second} {prompt}", "你好 {first}")
    assert asked == "{first} {0}|{second} {prompt}|你好 {first}="
    assert question(PAIR_TEMPLATE, "P", "1", "2").count("\n") == PAIR_TEMPLATE.count("\n")


def test_preferences_are_those_of_the_models_own_forward_pass() -> None:
    """A random Llama in float64 answers question by question without padding; an answer of several tokens has the sum
    of their log-probabilities.
    """
    tokenizer = build_byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    answers = answer_ids(tokenizer, ("first", "B"), field="judge.answers")
    assert list(map(len, answers)) == [5, 1]
    judge = PromptedJudge(PolicyModel(model), tokenizer, TEMPLATE, answers, "judge.model='x'", UNLIMITED)
    prompts, firsts, seconds = ["a", "a longer prompt"], ["yes", "你好"], ["no, and more", "x"]
    found = preferences(judge, prompts, firsts, seconds)

    precise = LlamaForCausalLM(config).double().eval()
    precise.load_state_dict(model.state_dict())

    def logprob(text: str, answer: list[int]) -> float:
        talk = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            logits = precise(torch.tensor([[*ids, *answer]])).logits[0].log_softmax(dim=-1)
        return sum(logits[len(ids) - 1 + place, token].item() for place, token in enumerate(answer))

    for place, (prompt, first, second) in enumerate(zip(prompts, firsts, seconds, strict=True)):
        text = f"{prompt}|{first}|{second}="
        expected = logprob(text, tokenizer("first")["input_ids"]) - logprob(text, tokenizer("B")["input_ids"])
        assert found[place].item() == pytest.approx(expected, abs=1e-4)
    short = replace(judge, template=TEMPLATE + "!" * 300)
    with pytest.raises(
        UnusableJudge, match=r"judge.model='x' reads 256 tokens, and its longest question has \d+"
    ):
        preferences(short, prompts, firsts, seconds)


def reading(tokens: int) -> PromptedJudge:
    """Return a judge that reads so many tokens, and whose longer answer has five."""
    judge = by_hand({})
    policy = SimpleNamespace(
        causal_lm=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=tokens))
    )
    answers = answer_ids(judge.tokenizer, ("first", "B"), field="judge.answers")
    return replace(judge, policy=policy, answers=answers)  # type: ignore[arg-type]


def tokens_of(text: str) -> int:
    """Return the tokens of a user's turn, by transformers alone."""
    talk = [{"role": "user", "content": text}]
    ids = build_byte_tokenizer().apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    return len(ids)


def test_the_longest_question_fits_with_its_longer_answer_and_no_token_more() -> None:
    shown = (["a", "a longer prompt"], ["yes", "of course"], ["no", "never"])
    exact = tokens_of("a longer prompt|of course|never=") + 5
    assert len(encoded_questions(reading(exact), *shown)[1]) == exact - 5
    with pytest.raises(UnusableJudge, match=f"its longest question has {exact} with its answer"):
        encoded_questions(reading(exact - 1), *shown)


def test_two_responses_of_the_longest_length_fit_and_no_token_more() -> None:
    exact = tokens_of("a longer prompt||=") + 2 * 20 + 5
    refuse_long_responses(reading(exact), ["a", "a longer prompt"], 20)
    with pytest.raises(UnusableJudge, match=f"max_response_tokens=20 can have {exact}; shorten template"):
        refuse_long_responses(reading(exact - 1), ["a", "a longer prompt"], 20)


@pytest.mark.parametrize(("answers"), [("A", "AB"), ("hello", "hell")])
def test_answers_that_a_tokenizer_cannot_tell_apart_are_refused(answers: tuple[str, str]) -> None:
    tokenizer = build_byte_tokenizer()
    if answers == ("hello", "hell"):  # one token each: told apart
        assert answer_ids(tokenizer, answers, field="judge.answers")
    else:
        with pytest.raises(UnusableJudge, match=r"judge.answers: the judge's tokenizer reads 'A' as \[\d+\]"):
            answer_ids(tokenizer, answers, field="judge.answers")


# The stage


def with_model(pipeline: Any, folder: Path, **fields: Any) -> Any:
    """Return the small pipeline's evaluation with a model as judge: the untrained one, which has another tokenizer or not."""
    job = pipeline.job("evaluation", folder=folder)
    judge = Judge(model="model", template="{prompt}\n{first}\n{second}\n")
    work = job.work.model_copy(update={"judge": judge, **fields})
    role = "judge" if work.judge.kind == "model" else "also"
    return job.model_copy(update={"work": work, "inputs": {**job.inputs, role: pipeline.folder("model")}})


@pytest.mark.slow
def test_a_model_alone_judges_pairs_and_nothing_else(pipeline: Any, tmp_path: Path) -> None:
    job = with_model(pipeline, tmp_path)
    result = run(job)
    has = settings_of(job.work.model_dump())
    assert result.metrics.keys() == headline_metric_names("evaluation", has=has)
    assert result.uncertainty.keys() == estimated_metric_names("evaluation", has=has)
    assert not {name for name in result.metrics if "accuracy" in name or "score" in name or "greedy" in name}
    ours, theirs = (read_rows(job.output, role) for role in ("candidate", "baseline"))
    said = [row["judgement"] for row in ours]
    assert set(said) <= {0.0, 0.5, 1.0}
    assert [1 - each for each in said] == [row["judgement"] for row in theirs]
    judge = load_prompted_judge(
        job, job.work.judge, role="judge", device=torch.device("cpu"), limits=UNLIMITED
    )
    for row, other in zip(ours[:4], theirs[:4], strict=True):
        pair = ([row["prompt"]], [row["response"]], [other["response"]])
        exchanged = (pair[0], pair[2], pair[1])
        one, two = preferences(judge, *pair).item(), preferences(judge, *exchanged).item()
        if abs(one) > 1e-4 and abs(two) > 1e-4:
            assert row["judgement"] == (0.5 if one * two > 0 else float(one > 0))
    assert result.metrics["win_rate"] == pytest.approx(sum(said) / len(said))


@pytest.mark.slow
def test_beside_a_verifier_it_changes_no_other_number(pipeline: Any, tmp_path: Path) -> None:
    first = pipeline.job("evaluation", folder=tmp_path).work.judge
    judge = Judge(model="model", template="{prompt}\n{first}\n{second}\n")
    result = run(with_model(pipeline, tmp_path, judge=first, also=judge))
    alone = pipeline.metrics("evaluation")
    assert {name: result.metrics[name] for name in alone} == alone
    more = result.metrics.keys() - alone.keys()
    assert more == {"order_disagreement", *(f"preference_{metric}" for metric in COMPARED_BY_JUDGE)}


def test_a_judge_of_another_tokenizer_reads_the_text(pipeline: Any, tmp_path: Path) -> None:
    """A byte-level chat model judges responses of a character model."""
    tokenizer = build_byte_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "grader")
    tokenizer.save_pretrained(tmp_path / "grader")
    job = with_model(pipeline, tmp_path)
    job = job.model_copy(update={"inputs": {**job.inputs, "judge": tmp_path / "grader"}})
    result = run(job)
    assert result.metrics["kl_to_baseline"] is not None, "candidate and baseline share theirs"
    assert 0 <= result.metrics["win_rate"] <= 1
    again = run(job.model_copy(update={"work": job.work.model_copy(update={"microbatch_size": 16})}))
    assert again.metrics["win_rate"] == result.metrics["win_rate"]

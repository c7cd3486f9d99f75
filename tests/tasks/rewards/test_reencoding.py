"""A reward model of another family reads the text of responses in its own template and tokens, against transformers alone."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_chat_run import CHATML
from tests.tasks.other_family import ByTransformers, train_other_reward
from vantage.models.folders import load_tokenizer
from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.conversations import Message, transcript
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.step_ends import StepEnds
from vantage.schemas.recipe.terms import ModelTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import codec_of
from vantage.tasks.data.rows import write_rows
from vantage.tasks.rewards.model_scores import ModelScores, TokenizersDiffer
from vantage.tasks.rewards.reencoding import Reencoder, UnreadablePrompt
from vantage.tasks.rewards.scoring import Scorer, load_scorer, score
from vantage.tasks.rewards.term_scores import Responses
from vantage.tasks.stages import run_stage

CPU = torch.device("cpu")
PROMPTS = ["3 a+4?", "3 a+4?", "5 a-1 b-1?", "1?"]
WORDS = ["a3+4=7 #7", "a3+4=8", "#3<|im_end|>\n<|im_start|>user", ""]
"""One response ended, one was cut off, one spells the reward model's own tokens, and an empty one was cut off."""
ENDED = [True, False, True, False]


@pytest.fixture(scope="module")
def other(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained reward model of another family."""
    return train_other_reward(pipeline, tmp_path_factory.mktemp("family") / "base")


def job_with(pipeline: Any, folder: Path, term: ModelTerm | None = None) -> StageJob:
    """Return the policy stage, whose reward is the model in the folder."""
    job: StageJob = pipeline.job("policy")
    reward = Reward(terms=(term or ModelTerm(model="reward"),))
    inputs = {**job.inputs, "reward.main.0": folder}
    return job.model_copy(update={"inputs": inputs, "rewards": {"main": reward}})


def scored(
    scorer: Scorer,
    prompts: Sequence[str] = PROMPTS,
    words: Sequence[str] = WORDS,
    ended: Sequence[bool] = ENDED,
    conversations: Sequence[list[Message] | None] | None = None,
) -> torch.Tensor:
    """Return scores of texts. The ids are not theirs: nothing may read them."""
    sequences = collate([[1]] * len(prompts), [[5, 6]] * len(prompts), pad_token_id=0)
    found = score(
        scorer,
        sequences,
        prompts=prompts,
        responses=words,
        answers=[None] * len(prompts),
        ended=torch.tensor(ended),
        limits=PassLimits(3),
        conversations=conversations,
    )
    return found.total


def test_scores_are_those_of_transformers_alone(pipeline: Any, other: Path) -> None:
    scorer = load_scorer(job_with(pipeline, other), "main", tokenizers_of=["init"], device=CPU)
    alone = ByTransformers(other)
    expected = [
        alone.score(prompt, words, ended=ended)
        for prompt, words, ended in zip(PROMPTS, WORDS, ENDED, strict=True)
    ]
    assert len(set(expected)) == len(expected)
    torch.testing.assert_close(scored(scorer), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_conversations_are_rendered_turn_by_turn(pipeline: Any, other: Path) -> None:
    scorer = load_scorer(job_with(pipeline, other), "main", tokenizers_of=["init"], device=CPU)
    turns = [
        Message(role=role, content=content, extra=None)
        for role, content in (("system", "Be brief."), ("user", "2?"), ("assistant", "#2"), ("user", "3?"))
    ]
    found = scored(scorer, ["a transcript", "1?"], ["#3", "#1"], [True, True], conversations=[turns, None])
    alone = ByTransformers(other)
    expected = [alone.score(turns, "#3", ended=True), alone.score("1?", "#1", ended=True)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_prompts_that_are_shown_alike_keep_their_own_turns(pipeline: Any, other: Path) -> None:
    """The three prompts are one turn that reads like a transcript, the conversation itself, and a conversation whose
    first turn has the answer in it."""
    scorer = load_scorer(job_with(pipeline, other), "main", tokenizers_of=["init"], device=CPU)
    talks = [
        [Message(role=role, content=content, extra=None) for role, content in turns]
        for turns in (
            (("user", "2?"), ("assistant", "#2"), ("user", "3?")),
            (("user", "2?\n\nAssistant: #2"), ("user", "3?")),
        )
    ]
    text = "User: 2?\n\nAssistant: #2\n\nUser: 3?"
    assert [transcript(turns) for turns in talks] == [text, text]
    found = scored(scorer, [text] * 3, ["#3"] * 3, [True] * 3, conversations=[None, *talks])
    alone = ByTransformers(other)
    expected = [alone.score(turns, "#3", ended=True) for turns in (text, *talks)]
    assert len(set(expected)) == 3
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_equal_texts_have_one_score_bit_by_bit(pipeline: Any, other: Path) -> None:
    scorer = load_scorer(job_with(pipeline, other), "main", tokenizers_of=["init"], device=CPU)
    found = scored(
        scorer, ["1?"] * 5, ["#1", "a longer one", "#1", "x", "#1"], [True, True, True, True, False]
    )
    assert found[0] == found[2] != found[4]


def copied(folder: Path, to: Path) -> Path:
    """Return a copy whose files can be changed."""
    shutil.copytree(folder, to)
    for path in to.rglob("*"):
        path.chmod(0o644)
    return to


def test_an_equal_tokenizer_that_is_stored_apart_reads_the_policys_ids(pipeline: Any, tmp_path: Path) -> None:
    """``tokenizer.json`` is written with other white space: the digest is that of the content."""
    apart = copied(pipeline.folder("reward"), tmp_path / "apart")
    tokenizer = apart / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text())))
    codec = codec_of(pipeline.job("policy"), "init")
    rows = [codec.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("#7", "a3+4", "=8 #8")]
    responses = [[*rows[0], 2], rows[1], [*rows[2], 2]]
    prompts = [codec.tokenizer(text)["input_ids"] for text in PROMPTS[:3]]
    sequences = collate(prompts, responses, pad_token_id=0)
    ended = torch.tensor([True, False, True])
    given = Responses(
        sequences, PROMPTS[:3], codec.response_texts(responses), [None] * 3, CPU, PassLimits(2), ended
    )
    by_ids = (
        load_scorer(job_with(pipeline, apart), "main", tokenizers_of=["init"], device=CPU).terms[0].scores
    )
    assert isinstance(by_ids, ModelScores) and by_ids.reencoder is None
    model = load_scalar(pipeline.folder("reward"), role="reward", training="nothing")
    with torch.no_grad():
        expected = torch.cat([scores(model, sequences.select(rows)) for rows in ([0, 1], [2])])
        assert torch.equal(by_ids(given), expected)
        by_text = ModelScores(model, Reencoder(codec, openings=(), window=None, name="rewards.main.terms.0"))
        assert torch.equal(by_text(given), expected)


def with_prompts(job: StageJob, folder: Path, rows: list[dict[str, Any]]) -> StageJob:
    """Return the job with these prompts in each split."""
    folder.mkdir()
    for split in ("train", "validation", "test"):
        write_rows(folder, split, rows)
    return job.model_copy(update={"inputs": {**job.inputs, "prompts": folder}})


def test_another_template_alone_is_rendered_too(pipeline: Any, other: Path, tmp_path: Path) -> None:
    shouting = copied(other, tmp_path / "shouting")
    (shouting / "chat_template.jinja").write_text(
        CHATML.replace("message['role']", "message['role']|upper").replace("assistant", "ASSISTANT")
    )
    job = job_with(pipeline, shouting)
    job = job.model_copy(update={"inputs": {**job.inputs, "init": other}})
    [term] = load_scorer(job, "main", tokenizers_of=["init"], device=CPU).terms
    assert isinstance(term.scores, ModelScores) and term.scores.reencoder is not None
    given = Responses(
        collate([[1]], [[2]], pad_token_id=0), ["1?"], ["#1"], [None], CPU, PassLimits(), torch.tensor([True])
    )
    [row] = term.scores.reencoder.sequences(given).input_ids.tolist()
    text = load_tokenizer(other).decode(row)
    assert text == "<|im_start|>USER\n1?<|im_end|>\n<|im_start|>ASSISTANT\n#1<|im_end|>"


def test_a_prompt_that_the_reward_model_cannot_read_is_refused_before_anything_is_sampled(
    pipeline: Any, other: Path, tmp_path: Path
) -> None:
    spelled = with_prompts(job_with(pipeline, other), tmp_path / "spelled", [{"prompt": "1? <|im_end|>"}])
    with pytest.raises(UnreadablePrompt) as refused:
        load_scorer(spelled, "main", tokenizers_of=["init"], device=CPU)
    assert "rewards.main.terms.0.model='reward' cannot read a prompt of the policy: '1? <|im_end|>'" in str(
        refused.value
    )
    assert "take such rows out of the prompts, or name another reward model" in str(refused.value)

    long = with_prompts(job_with(pipeline, other), tmp_path / "long", [{"prompt": "1" * 40}])
    narrow = copied(other, tmp_path / "narrow")
    config = json.loads((narrow / "config.json").read_text()) | {"max_position_embeddings": 59}
    (narrow / "config.json").write_text(json.dumps(config))
    long = long.model_copy(update={"inputs": {**long.inputs, "reward.main.0": narrow}})
    with pytest.raises(UnreadablePrompt, match="reads 59 tokens, and a prompt has 59 of its tokens"):
        load_scorer(long, "main", tokenizers_of=["init"], device=CPU)


def test_the_end_of_a_response_is_left_out_where_the_window_ends(
    pipeline: Any, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = ByTransformers(other)
    whole = alone.ids("1?", "#12345678", ended=True)
    codec = codec_of(job_with(pipeline, other), "reward.main.0")
    encoder = Reencoder(codec, openings=(), window=len(whole) - 4, name="rewards.main.terms.0.model='reward'")
    sequences = collate([[1], [1]], [[2], [2]], pad_token_id=0)
    ended = torch.tensor([True, True])
    given = Responses(sequences, ["1?"] * 2, ["#12345678", "#1"], [None] * 2, CPU, PassLimits(), ended)
    found = encoder.sequences(given)
    rows = [row[:length] for row, length in zip(found.input_ids.tolist(), found.known.totals, strict=True)]
    assert rows == [whole[:-4], alone.ids("1?", "#1", ended=True)]
    assert "1 of 2 responses are longer than" in caplog.text


def test_a_prompt_that_fills_the_window_is_refused(pipeline: Any, other: Path) -> None:
    """No room would be left for a response. The prompts that a stage samples for were tried before."""
    codec = codec_of(job_with(pipeline, other), "reward.main.0")
    taken = len(ByTransformers(other).ids("1?", "#1", ended=True))
    sequences, ended = collate([[1]], [[2]], pad_token_id=0), torch.tensor([True])
    given = Responses(sequences, ["12345678?"], ["#1"], [None], CPU, PassLimits(), ended)
    for window in (4, taken):
        encoder = Reencoder(codec, openings=(), window=window, name="rewards.main.terms.0.model='reward'")
        with pytest.raises(UnreadablePrompt, match=f"reads {window} tokens, and a prompt has"):
            encoder.sequences(given)


def test_white_space_that_opens_the_policys_turns_is_no_word(pipeline: Any, other: Path) -> None:
    codec = codec_of(job_with(pipeline, other), "reward.main.0")
    encoder = Reencoder(codec, openings=("\n",), window=None, name="")
    given = Responses(
        collate([[1]] * 2, [[2]] * 2, pad_token_id=0),
        ["1?"] * 2,
        ["\n#1", "#1"],
        [None] * 2,
        CPU,
        PassLimits(),
    )
    one, same = encoder.sequences(given).input_ids.tolist()
    assert one == same == ByTransformers(other).ids("1?", "#1", ended=True)


def test_scores_of_tokens_are_refused(pipeline: Any, other: Path) -> None:
    term = ModelTerm(model="reward", step_ends=StepEnds(text="="))
    with pytest.raises(TokenizersDiffer) as refused:
        load_scorer(job_with(pipeline, other, term), "main", tokenizers_of=["init"], device=CPU)
    assert "rewards.main.terms.0.step_ends scores the policy's tokens" in str(refused.value)
    value: StageJob = pipeline.job("value")
    value = value.model_copy(update={"inputs": {**value.inputs, "init": other}})
    with pytest.raises(
        TokenizersDiffer, match="init='reward' has another tokenizer or chat template than policy='sft'"
    ):
        run_stage(value)
    policy = job_with(pipeline, other)
    policy = policy.model_copy(update={"inputs": {**policy.inputs, "critic": other}})
    with pytest.raises(
        TokenizersDiffer, match="critic='value' has another tokenizer or chat template than init='sft'"
    ):
        run_stage(policy)


def test_a_policy_cannot_close_the_reward_models_turn(pipeline: Any, other: Path, tmp_path: Path) -> None:
    """Special tokens that the policy spells out stay text, also where the template reads others in the words (thoughts)."""
    thinking = copied(other, tmp_path / "thinking")
    (thinking / "chat_template.jinja").write_text(CHATML + "{% if false %}<|pad|>{% endif %}")
    codec = codec_of(job_with(pipeline, thinking), "reward.main.0")
    encoder = Reencoder(codec, openings=(), window=None, name="")
    words = ["<|pad|>1", "<|pad|>1<|im_end|>2"]
    given = Responses(
        collate([[1]] * 2, [[2]] * 2, pad_token_id=0), ["1?"] * 2, words, [None] * 2, CPU, PassLimits()
    )
    found = encoder.sequences(given)
    thought, closing = found.response_rows()
    assert thought.count(codec.tokenizer.convert_tokens_to_ids("<|pad|>")) == 1
    assert closing == ByTransformers(other).ids("1?", words[1], ended=True)[-len(closing) :]
    assert closing.count(codec.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1

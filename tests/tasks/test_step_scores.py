"""Process rewards in real stages reward each step where it ends, by what a rule of the test's own gives its beginning."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.tasks.own_rewards import policy_job, rollouts_of, verifiers, with_reward
from vantage.ledger.journal import read
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_tokenizer
from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.step_ends import StepEnds
from vantage.tasks import value_pretraining
from vantage.tasks.data.examples import codec_of
from vantage.tasks.rewards.scoring import load_scorer
from vantage.tasks.rewards.step_scores import StepFinder, StepScores, UnknownMarker
from vantage.tasks.rewards.term_scores import Responses
from vantage.tasks.rewards.verifier_scores import UnfitScores
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

__all__ = ["verifiers"]  # used as a fixture
GRADED = """\
def verify(prompt, response, answer):
    return len(response) / 7
"""
ODD = """\
def verify(prompt, response, answer):
    return len(response) % 2 == 1
"""
SEVERAL = """\
def verify(prompt, response, answer):
    return {"shown": 3.0, "odd": float(len(response) % 2), "length": len(response) / 7}
"""
NAMED = """\
def verify(prompt, response, answer):
    return {"a": 1.0, "b": 2.0}
"""


def ends_by_hand(codec: Any, ids: list[int], marker: str) -> list[int]:
    """Return each token with which the text of the ids up to it ends in the marker, and the last one."""
    texts = [codec.tokenizer.decode(ids[: place + 1], skip_special_tokens=True) for place in range(len(ids))]
    before = ["", *texts]
    found = [place for place, text in enumerate(texts) if text.endswith(marker) and text != before[place]]
    last = len(ids) - 1
    return sorted({place for place in found if texts[place] != texts[last]} | {last})


@pytest.mark.parametrize("total", ["mean", "sum"])
def test_a_verifier_scores_each_beginning_and_the_reward_is_where_it_ends(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: str
) -> None:
    terms = [
        {
            "verifier": "graded",
            "weight": 2.0,
            "clip": {"high": 2.0},
            "offset": -0.5,
            "step_ends": {"text": "=", "total": total},
        },
        {"verifier": "odd", "weight": 3.0},
    ]
    job = with_reward(
        policy_job(pipeline, tmp_path, {"preset": "reinforce_pp", "kl_coef": 0.0}),
        terms,
        verifiers(GRADED),
        verifiers(ODD),
    )
    codec, several = codec_of(job, "init"), 0
    for rollout, _ in rollouts_of(job, monkeypatch):
        for row, ids in enumerate(rollout.sequences.response_rows()):
            ends = ends_by_hand(codec, ids, "=")
            expected = numpy.zeros(rollout.rewards.shape[1])
            plain = []
            for place in ends:
                [text] = codec.response_texts([ids[: place + 1]])
                plain.append(len(text) / 7)
                step = 2 * (min(len(text) / 7, 2.0) - 0.5)
                expected[place] += step / len(ends) if total == "mean" else step
            several += len(ends) > 1
            expected[len(ids) - 1] += 3.0 * (len(rollout.sampled.responses[row]) % 2)
            numpy.testing.assert_allclose(rollout.rewards[row].numpy(), expected, atol=1e-5)
            assert rollout.scores.total[row].item() == pytest.approx(expected.sum(), rel=1e-5)
            by_term = sum(plain) / len(ends) if total == "mean" else sum(plain)
            assert rollout.scores.by_term["graded"][row].item() == pytest.approx(by_term, rel=1e-5)
    assert several > 4, "responses of one step would prove nothing"


@pytest.mark.parametrize("total", ["mean", "sum"])
def test_each_named_score_of_a_beginning_counts_by_its_own_rule(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: str
) -> None:
    """The recipe names scores in another order than the verifier. A score of weight 0 is only recorded. The expected
    values are worked out by hand from the texts."""
    rules = {
        "odd": {"weight": -1.5},
        "length": {"clip": {"high": 2.0}, "offset": -0.5},
        "shown": {"weight": 0.0},
    }
    term = {
        "verifier": "steps",
        "weight": 2.0,
        "scores": rules,
        "step_ends": {"text": "=", "total": total},
    }
    job = with_reward(
        policy_job(pipeline, tmp_path, {"preset": "reinforce_pp", "kl_coef": 0.0}), [term], verifiers(SEVERAL)
    )
    codec, several = codec_of(job, "init"), 0
    quantiles = []
    for rollout, _ in rollouts_of(job, monkeypatch):
        assert rollout.scores.by_term.keys() == {"steps.length", "steps.odd", "steps.shown"}
        for row, ids in enumerate(rollout.sequences.response_rows()):
            ends = ends_by_hand(codec, ids, "=")
            lengths = [len(codec.response_texts([ids[: place + 1]])[0]) for place in ends]
            count = len(ends) if total == "mean" else 1
            several += len(ends) > 1
            expected = numpy.zeros(rollout.rewards.shape[1])
            for place, length in zip(ends, lengths, strict=True):
                expected[place] = 2 * (min(length / 7, 2.0) - 0.5 - 1.5 * (length % 2)) / count
            numpy.testing.assert_allclose(rollout.rewards[row].numpy(), expected, atol=1e-5)
            assert rollout.scores.total[row].item() == pytest.approx(expected.sum(), rel=1e-5, abs=1e-5)
            found = {name: scores[row].item() for name, scores in rollout.scores.by_term.items()}
            assert found == pytest.approx(
                {
                    "steps.length": sum(lengths) / 7 / count,
                    "steps.odd": sum(length % 2 for length in lengths) / count,
                    "steps.shown": 3.0 * len(ends) / count,
                },
                rel=1e-5,
            )
        lengths_of = rollout.scores.by_term["steps.length"].numpy()
        quantiles.append(numpy.quantile(lengths_of.astype(float), [0.1, 0.5, 0.9]).tolist())
    assert several > 4, "responses of one step would prove nothing"
    entries = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    found_quantiles = [
        [entry[f"score_p{percent}_steps.length"] for percent in (10, 50, 90)] for entry in entries
    ]
    assert numpy.array(found_quantiles) == pytest.approx(numpy.array(quantiles), rel=1e-5)


@pytest.mark.parametrize(
    ("term", "names"),
    [
        ({"verifier": "v"}, ("v",)),  # right and wrong steps: their total is neither 1 nor 0
        ({"model": "reward"}, ()),  # as without steps
    ],
)
def test_a_verifier_s_steps_have_percentiles_and_a_model_s_have_none(
    term: dict[str, Any], names: tuple[str, ...], pipeline: Any, verifiers: Any, tmp_path: Path
) -> None:
    job = policy_job(pipeline, tmp_path, {"preset": "grpo", "samples_per_prompt": 4})
    source = pipeline.folder("reward") if "model" in term else verifiers(ODD)
    job = with_reward(job, [{**term, "step_ends": {"text": "="}}], source)
    scorer = load_scorer(job, "main", tokenizers_of=("init",), device=torch.device("cpu"))
    assert scorer.graded == names


def test_a_reward_model_scores_each_beginning(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores equal those of one pass of the model over each beginning alone, also after dynamic sampling has selected
    and joined rollouts.
    """
    switches = {"preset": "dapo", "samples_per_prompt": 2, "overlong_buffer": None, "max_sampling_rounds": 2}
    job = policy_job(pipeline, tmp_path, switches)
    terms = [{"model": "reward", "weight": 2.0, "step_ends": {"text": "=", "total": "sum"}}]
    job = with_reward(job, terms, pipeline.folder("reward"))
    model, codec = load_scalar(pipeline.folder("reward")), codec_of(job, "init")
    seen = rollouts_of(job, monkeypatch)
    for rollout, _ in seen[:1]:
        prompts = rollout.sequences.prompt_rows()
        for row, ids in enumerate(rollout.sequences.response_rows()):
            expected = numpy.zeros(rollout.rewards.shape[1])
            for place in ends_by_hand(codec, ids, "="):
                alone = collate([prompts[row]], [ids[: place + 1]], pad_token_id=0)
                with torch.no_grad():
                    expected[place] = 2 * scores(model, alone).item()
            numpy.testing.assert_allclose(rollout.rewards[row].numpy(), expected, atol=2e-4)


def test_a_critic_is_pretrained_on_the_same_returns(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pipeline.job("value", folder=tmp_path)
    work = job.work.model_copy(update={"returns": job.work.returns.model_copy(update={"kl_coef": 0.0})})
    job = with_reward(
        job.model_copy(update={"work": work}),
        [{"verifier": "g", "step_ends": {"text": "="}}],
        verifiers(GRADED),
    )
    codec, seen = codec_of(job, "policy"), []
    monkeypatch.setattr(
        value_pretraining, "regress", lambda *args, **_: seen.append(args[2]) or {"value_loss": 0.0}
    )
    run_stage(job)
    assert seen
    for learned in seen:
        for row, ids in enumerate(learned.rollout.sequences.response_rows()):
            ends = ends_by_hand(codec, ids, "=")
            steps = {
                place: len(codec.response_texts([ids[: place + 1]])[0]) / 7 / len(ends) for place in ends
            }
            returns = [
                sum(step for place, step in steps.items() if place >= token) for token in range(len(ids))
            ]
            assert learned.returns[row, : len(ids)].tolist() == pytest.approx(returns, rel=1e-4)


class Letters:
    """A tokenizer whose tokens are texts of any length, by number."""

    texts = ("a", "b\n", "\n", "\n\nc", "\nd", "")

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.texts[number] for number in ids)

    def get_vocab(self) -> dict[str, int]:
        return {"<step>": 0}


class Letterwise:
    """A codec with the parts that a finder reads; 5 ends a response."""

    tokenizer = Letters()
    stop_token_ids = (5,)


@pytest.mark.parametrize(
    ("ends", "ids", "expected"),
    [
        ({"text": "\n"}, [0, 1, 0, 2, 0], [1, 3, 4]),
        ({"text": "\n\n"}, [1, 2, 0, 3, 0], [1, 3, 4]),  # a marker of two tokens, and one inside a token
        ({"text": "\n\n"}, [1, 0, 2, 0], [3]),  # line breaks apart
        ({"text": "\n"}, [0, 1, 5], [2]),  # nothing but the end follows the marker
        ({"text": "\n"}, [0, 1, 0], [1, 2]),
        ({"text": "\n"}, [1], [0]),
        ({"token": "<step>"}, [1, 0, 1, 0, 2], [1, 3, 4]),
    ],
)
def test_where_steps_end(ends: dict[str, str], ids: list[int], expected: list[int]) -> None:
    """Steps end where the marker is complete, in these responses."""
    assert StepFinder(Letterwise(), StepEnds(**ends)).positions(ids) == expected  # type: ignore[arg-type]


def byte_tokenizer(decoder: Any, vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these tokens, which never merges any."""
    inside = Tokenizer(BPE({token: number for number, token in enumerate(vocabulary)}, [], unk_token=None))
    inside.pre_tokenizer, inside.decoder = ByteLevel(add_prefix_space=False), decoder
    return PreTrainedTokenizerFast(tokenizer_object=inside)


class Decoded:
    """A codec around a real tokenizer, for which no token ends a response."""

    stop_token_ids = ()

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer


@pytest.mark.parametrize("marker", ["。", "d。", "é", "\n", "🙂", ". "])
def test_a_marker_of_many_bytes_ends_a_step_where_its_last_byte_is(marker: str) -> None:
    """Each byte is a token of its own, so a text ends after as many tokens as it has bytes."""
    tokenizer = byte_tokenizer(decoders.ByteLevel(), sorted(ByteLevel.alphabet()))
    pieces = ["ab" + marker, "cd" + marker, marker, "ef。é\n🙂" + marker, "gh"]
    text = "".join(pieces)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    begins = [start for start in range(len(text)) if text.startswith(marker, start)]
    expected = {len(text[: start + len(marker)].encode()) - 1 for start in begins} | {len(ids) - 1}
    finder = StepFinder(Decoded(tokenizer), StepEnds(text=marker))  # type: ignore[arg-type]
    assert finder.positions(ids) == sorted(expected) and len(expected) > 1


def test_white_space_at_the_start_of_a_token_ends_a_step() -> None:
    """A decoder for words drops it from the first token of a text."""
    tokenizer = byte_tokenizer(decoders.Metaspace(), ["▁a", "b", ".", "▁c"])
    assert tokenizer.decode([3]) == "c" and tokenizer.decode([0, 1, 2, 3]) == "ab. c"
    finder = StepFinder(Decoded(tokenizer), StepEnds(text=". "))  # type: ignore[arg-type]
    assert finder.positions([0, 1, 2, 3, 1, 2, 0, 1]) == [3, 6, 7]


@pytest.mark.parametrize("marker", ["\n", "\n\n", ". ", "。", " é", "a", "Step"])
@pytest.mark.parametrize("name", ["bytes", "words", "nano"])
def test_one_pass_finds_what_decoding_each_beginning_finds(name: str, marker: str, tmp_path: Path) -> None:
    """This holds also in texts that no tokenizer writes, since a policy may sample any bytes."""
    if name == "bytes":
        vocabulary = sorted(ByteLevel.alphabet())
        tokenizer = byte_tokenizer(decoders.ByteLevel(), vocabulary)
    elif name == "words":
        vocabulary = ["▁a", "▁", "a", ".", "。", "\n", "\n\n", "▁é", "é", "▁Step", "St", "ep", "▁."]
        tokenizer = byte_tokenizer(decoders.Metaspace(), vocabulary)
    else:
        build_builtin("nano", tmp_path, seed=0)
        tokenizer = load_tokenizer(tmp_path)
        vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)  # type: ignore[arg-type]
    finder = StepFinder(Decoded(tokenizer), StepEnds(text=marker))  # type: ignore[arg-type]
    rng = numpy.random.default_rng(5)
    texts = ["a. b。\n\n\n Step é.\n", "\n" * 7, f"{marker}x{marker}{marker}"]
    ids = [tokenizer(text)["input_ids"] for text in texts] if name != "words" else []
    ids += [rng.integers(0, len(vocabulary), 40).tolist() for _ in range(200)]
    streamed = [finder._streamed(each) for each in ids]
    assert streamed == [finder.decoded(each) for each in ids]
    assert any(streamed) or name == "nano"


def test_many_markers_are_found_without_decoding_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(decoders.ByteLevel(), sorted(ByteLevel.alphabet()))
    finder = StepFinder(Decoded(tokenizer), StepEnds(text="\n\n"))  # type: ignore[arg-type]
    ids = tokenizer("\n" * 9)["input_ids"]
    monkeypatch.setattr(tokenizer, "decode", None)
    assert finder.positions(ids) == [1, 3, 5, 7, 8]


@pytest.mark.parametrize(("marker", "is_silent"), [("\n", True), ("\n\n", False)])
def test_a_marker_that_no_response_of_a_rollout_has_is_warned_of(
    marker: str, is_silent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Joined(Letterwise):
        def response_texts(self, rows: list[list[int]]) -> list[str]:
            return [self.tokenizer.decode(row) for row in rows]

    rows = [[0, 0], [1, 0], [0]]  # "aa", "b\na" and "a"
    given = Responses(
        collate([[1]] * 3, rows, pad_token_id=9),
        ["p"] * 3,
        ["aa", "b\na", "a"],
        [None] * 3,
        torch.device("cpu"),
        PassLimits(2),
    )
    finder = StepFinder(Joined(), StepEnds(text=marker))  # type: ignore[arg-type]
    StepScores(finder, lambda *_: torch.zeros(4 if is_silent else 3, 1), path="rewards.main.terms.0")(given)
    told = (
        f"rewards.main.terms.0.step_ends: none of 3 responses has {marker!r} before its end, so each is one step; correct the "
        "marker if the policy should write it by now"
    )
    assert caplog.messages == ([] if is_silent else [told])


def test_each_beginning_is_asked_about_with_its_own_prompt_and_answer() -> None:
    """The responses have two, one and three steps, and every case has another score."""

    class Joined(Letterwise):
        def response_texts(self, rows: list[list[int]]) -> list[str]:
            return [self.tokenizer.decode(row) for row in rows]

    asked: list[tuple[str, str, str | None]] = []

    def ask(prompts: Any, beginnings: Any, answers: Any) -> torch.Tensor:
        asked.extend(zip(prompts, beginnings, answers, strict=True))
        return torch.arange(1.0, 1.0 + len(asked))[:, None]

    rows = [[0, 1, 0], [0, 0], [1, 1, 0]]
    given = Responses(
        collate([[1], [1], [1]], rows, pad_token_id=9),
        ["p", "q", "r"],
        ["ab\na", "aa", "b\nb\na"],
        ["x", None, "z"],
        torch.device("cpu"),
        PassLimits(2),
    )
    finder = StepFinder(Joined(), StepEnds(text="\n"))  # type: ignore[arg-type]
    [found], is_end = StepScores(finder, ask)(given)
    assert asked == [
        *(("p", "ab\n", "x"), ("p", "ab\na", "x")),
        ("q", "aa", None),
        *(("r", "b\n", "z"), ("r", "b\nb\n", "z"), ("r", "b\nb\na", "z")),
    ]
    assert is_end.tolist() == [[False, True, True], [False, True, False], [True, True, True]]
    assert found.tolist() == [[0.0, 1.0, 2.0], [0.0, 3.0, 0.0], [4.0, 5.0, 6.0]]


def test_what_cannot_score_steps_is_refused(pipeline: Any, verifiers: Any, tmp_path: Path) -> None:
    job = policy_job(pipeline, tmp_path, {"preset": "grpo", "samples_per_prompt": 4})
    unknown = with_reward(job, [{"verifier": "g", "step_ends": {"token": "<never>"}}], verifiers(GRADED))
    with pytest.raises(
        UnknownMarker, match="rewards.main.terms.0.step_ends.token='<never>' is no token of init"
    ):
        run_stage(unknown)
    clipped = {"verifier": "n", "step_ends": {"text": "="}, "clip": {"high": 1.0}}
    named = with_reward(job, [clipped], verifiers(NAMED))
    with pytest.raises(UnfitScores, match="give clip, offset and whiten to each of them under scores"):
        run_stage(named)
    with pytest.raises(ValueError, match="step_ends takes either text or token"):
        Reward.model_validate({"terms": [{"verifier": "g", "step_ends": {}}]})
    whitened = {"verifier": "g", "step_ends": {"text": "="}, "scores": {"a": {}, "b": {"whiten": True}}}
    with pytest.raises(ValueError, match="scores.b.whiten is over whole responses"):
        Reward.model_validate({"terms": [whitened]})
    with pytest.raises(ValueError, match="whiten is over whole responses"):
        Reward.model_validate({"terms": [{"model": "g", "step_ends": {"text": "="}, "whiten": True}]})

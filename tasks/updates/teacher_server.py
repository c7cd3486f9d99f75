"""A teacher behind a server of vLLM: the proof that it reads the student's tokens, its log-probabilities, and its
responses.

Each answer is kept in the stage's file of answers, like those of judges, so that a resumed stage asks nothing twice.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vantage.models.sampling import Samples
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.resolved import ResolvedDistillation
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.stored_answers import Asked, question_digest
from vantage.tasks.data.examples import Codec
from vantage.tasks.rewards.answer_file import answer_file
from vantage.tasks.rewards.asking import Asking, Form, JudgeRefused, Question, Reply, counted_tokens
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.rollout.engine import Listener, SamplesWhenAsked, of_all_ranks
from vantage.tasks.training import answer_record, ranks
from vantage.tasks.training.seeds import derive_seed

PHASE = "waiting for the teacher"
TEXTS = ("What is 17 + 25? Answer: 42.", "  Ça\tcoûte 3,50 €.\n\n数学 = 'math' # 🙂\r\n")
"""Texts that must have the same ids by both tokenizers, beside a sample of the vocabulary."""
SAMPLED_IDS = 4096
"""Most ids whose texts are in the sample of the vocabulary."""
IDS_IN_A_TEXT = 256
"""Ids whose texts are joined to one text."""
ROUNDING = 1e-3
"""Largest log-probability, in nats, that rounding explains."""
HOW_TO_SERVE = (
    "start the teacher with `vllm serve MODEL`, and with its tokenizer, as docs/distillation.md describes"
)


class ServedTeacher(SamplesWhenAsked):
    """The teacher of a distillation; the first rank asks for all ranks. It is an engine whose weights never change."""

    def __init__(self, job: StageJob[ResolvedDistillation]) -> None:
        """Prepare to ask; nothing is sent.

        Raises:
            ValueError: the variable of the server's key is not set.
        """
        server = job.work.teacher_server
        assert server is not None, "the recipe names one"
        self._server, self._init, self._scratch = server, job.work.init, job.scratch
        self._path = f"stages.{job.name}.teacher_server"
        self._proof = ""
        self._codec: Codec | None = None

    def prove(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare the server's tokenizer with the student's. All ranks call this.

        Raises:
            TokenizersDiffer: the server reads a text as other ids than the student.
            JudgeUnavailable, JudgeRefused: see ``Asking.ask``.
        """
        if ranks.rank() != 0:
            return
        texts = list(dict.fromkeys((*TEXTS, *_sample_of_vocabulary(tokenizer))))
        asked = [{"model": self._server.model, "text": text} for text in texts]
        try:
            answers = self._answers(Tokenized(), asked)
        except JudgeRefused as error:
            raise JudgeRefused(f"{error}; {HOW_TO_SERVE}") from error
        read = []
        for text, answer in zip(texts, answers, strict=True):
            ours, theirs = tokenizer.encode(text, add_special_tokens=False), json.loads(answer)
            read.append(ours)
            if ours != theirs:
                raise TokenizersDiffer(self._difference(text, ours, theirs))
        self._proof = question_digest({"texts": texts, "ids": read})

    def sampling_for(self, codec: Codec) -> "ServedTeacher":
        """Return the teacher as an engine whose responses have the codec's limits and end tokens."""
        self._codec = codec
        return self

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """See ``RolloutEngine``; the log-probabilities are 0, as nothing reads them. All ranks call this.

        Raises:
            JudgeUnavailable, JudgeRefused: see ``Asking.ask``.
        """
        assert self._codec is not None and not greedy, "only its score is measured"
        generation = self._codec.generation
        repeated = [prompt for prompt in prompts for _ in range(count)]
        mine = slice(0, len(repeated)) if ranks.rank() == 0 else slice(0, 0)
        asked = [
            {
                "model": self._server.model,
                "tokenizer": self._proof,
                "prompt_ids": prompt,
                "seed": derive_seed(seed, "response", row),
                "max_tokens": generation.max_response_tokens,
                "end_ids": list(self._codec.stop_token_ids),
            }
            for row, prompt in enumerate(repeated)
        ]
        answers = [json.loads(each) for each in self._answers(Sampled(), asked[mine])]
        own = Samples(
            responses=[each["ids"] for each in answers],
            ended=[each["ended"] for each in answers],
            logprobs=[[0.0] * len(each["ids"]) for each in answers],
        )
        return of_all_ranks(own, mine, count=len(repeated), max_length=generation.max_response_tokens)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise an error: the server has the teacher's own weights."""
        raise TypeError("a teacher behind a server takes no weights")

    def logprobs(self, responses: Sequences) -> Tensor:
        """Return the teacher's log-probability of each response token (B,T), in nats, at temperature 1; 0 outside the
        mask. All ranks call this.

        Raises:
            JudgeUnavailable, JudgeRefused: see ``Asking.ask``.
        """
        found = torch.zeros(responses.response_mask.shape, dtype=torch.float64)
        if ranks.rank() == 0:
            asked = [self._question(*row) for row in _rows(responses)]
            for row, answer in enumerate(self._answers(LogProbs(), asked)):
                own = json.loads(answer)
                found[row, : len(own)] = torch.tensor(own, dtype=torch.float64)
        return ranks.total(found).float()

    def _question(self, prompt: list[int], response: list[int]) -> dict[str, Any]:
        """Return everything on which an answer may depend, including the proof of the tokenizer."""
        return {
            "model": self._server.model,
            "tokenizer": self._proof,
            "prompt_ids": prompt,
            "response_ids": response,
        }

    def _answers(self, form: Form, asked: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the answers to these questions, in their order; stored answers are not asked for again."""
        answers = answer_file(self._scratch)
        digests = [question_digest(each) for each in asked]
        new = [
            Question(question, digest, 0)
            for digest, question in dict(zip(digests, asked, strict=True)).items()
            if answers.answer(Asked(digest, 0)) is None
        ]
        asking = Asking(self._server, form, path=self._path, phase=PHASE)
        try:
            asking.ask(new, keep=answers.add)
        finally:
            if new:
                answers.sync()
            answer_record.note_asked(len(new), failed_calls=asking.failed_calls)
        texts = []
        for digest in digests:
            found = answers.answer(Asked(digest, 0))
            assert found is not None
            text, *tokens = found
            answer_record.note_answer(tokens, cost=0.0)
            texts.append(text)
        return texts

    def _difference(self, text: str, ours: list[int], theirs: list[int]) -> str:
        at = next(
            (i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
            min(len(ours), len(theirs)),
        )
        return (
            f"{self._path}.model={self._server.model} has another tokenizer than init={self._init!r}: it reads {text[:40]!r} as "
            f"{theirs[at : at + 5]} from token {at} on, and the student as {ours[at : at + 5]}; use a teacher of the student's family"
        )


def _rows(responses: Sequences) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids of each prompt and its response."""
    lengths = zip(responses.known.prompts, responses.known.responses, strict=True)
    for ids, (prompt, response) in zip(responses.input_ids.tolist(), lengths, strict=True):
        yield ids[:prompt], ids[prompt : prompt + response]


def _sample_of_vocabulary(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield texts of ids from the whole vocabulary, evenly spread, and of all special tokens."""
    size = len(tokenizer)
    ids = range(0, size, math.ceil(size / SAMPLED_IDS))
    for start in range(0, len(ids), IDS_IN_A_TEXT):
        yield " ".join(str(tokenizer.decode([each])) for each in ids[start : start + IDS_IN_A_TEXT])
    yield "".join(sorted(map(str, tokenizer.all_special_tokens)))


class Tokenized:
    """Requests for the ids of a text: vLLM's ``/tokenize``."""

    path = "/tokenize"
    batch = 1

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the request of one text."""
        asked = questions[0].asked
        return {"model": asked["model"], "prompt": asked["text"], "add_special_tokens": False}

    def replies(self, body: Any, *, questions: Sequence[Question]) -> list[Reply]:
        """Return the ids as JSON.

        Raises:
            ValueError, KeyError, TypeError: the body is not a list of ids.
        """
        return [Reply(json.dumps([int(token) for token in body["tokens"]]))]


class Sampled:
    """Requests for a response to given ids, at temperature 1: vLLM's ``/v1/completions`` with ``return_token_ids``."""

    path = "/v1/completions"
    batch = 1

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the request of one response."""
        asked = questions[0].asked
        return {
            "model": asked["model"],
            "prompt": asked["prompt_ids"],
            "max_tokens": asked["max_tokens"],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "seed": asked["seed"],
            "stop_token_ids": asked["end_ids"],
            "ignore_eos": True,  # only the recipe's tokens end a response
            "return_token_ids": True,
        }

    def replies(self, body: Any, *, questions: Sequence[Question]) -> list[Reply]:
        """Return the ids of the response, and whether it has ended, as JSON.

        Raises:
            ValueError, KeyError, TypeError, IndexError: the body is no whole response.
        """
        asked, found = questions[0].asked, body["choices"][0]
        ids, reason = [int(token) for token in found["token_ids"]], found["finish_reason"]
        ended = bool(ids) and ids[-1] in asked["end_ids"]
        # if both hold, the reason depends on vLLM's version
        possible = {"stop"} if ended else {"length"}
        if ended and len(ids) == asked["max_tokens"]:
            possible.add("length")
        if reason not in possible:
            raise ValueError(
                f"the response ended for the reason {reason!r:.80} after {len(ids)} tokens; it is asked for again"
            )
        if not ended and len(ids) != asked["max_tokens"]:
            raise ValueError(
                f"the response has {len(ids)} of {asked['max_tokens']} tokens and no end; it is asked for again"
            )
        tokens = (counted_tokens(body, "prompt_tokens"), counted_tokens(body, "completion_tokens"))
        return [Reply(json.dumps({"ids": ids, "ended": ended}), *tokens)]


class LogProbs:
    """Requests for the log-probabilities of given ids: ``prompt_logprobs`` of vLLM's ``/v1/completions``."""

    path = "/v1/completions"
    batch = 1

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the request of one prompt and its response, as one prompt."""
        asked = questions[0].asked
        ids = [*asked["prompt_ids"], *asked["response_ids"]]
        return {"model": asked["model"], "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}

    def replies(self, body: Any, *, questions: Sequence[Question]) -> list[Reply]:
        """Return the log-probabilities of the response's ids as JSON, in nats.

        Raises:
            ValueError, KeyError, TypeError, IndexError: there is not one log-probability for each id.
        """
        asked, found = questions[0].asked, body["choices"][0]["prompt_logprobs"]
        prompt, response = asked["prompt_ids"], asked["response_ids"]
        own = [
            float(each[str(token)]["logprob"])
            for each, token in zip(found[len(prompt) :], response, strict=True)
        ]
        if not all(-math.inf < each <= ROUNDING for each in own):  # NaN is neither
            raise ValueError("it has a log-probability that is no number below 0")
        tokens = (counted_tokens(body, "prompt_tokens"), counted_tokens(body, "completion_tokens"))
        return [Reply(json.dumps(own), *tokens)]

"""The process that holds a model for ``vantage sample``, ``export`` and ``data inspect``: it reads requests and writes answers.

Only ``vantage.attempts.launchers.sampling_process`` starts it, since the command line itself loads no tensor library. Each
line of standard input is a JSON value of ``vantage.schemas.records.sampling``, and gets one line of answer on the original
standard output. Output of libraries goes to standard error instead.
"""

import ctypes
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, TypeAdapter

from vantage.models.chat_template import uses_chat
from vantage.models.folders import load_tokenizer
from vantage.models.merging import merge
from vantage.models.pinned_date import pin_date
from vantage.models.policy import PolicyModel
from vantage.models.prompts import encode_prompts
from vantage.models.rendered_responses import UnrenderedRow, special_tokens, spelled
from vantage.models.source_folders import import_model
from vantage.models.stored_models import load_stored_policy
from vantage.models.template_trial import try_chat_template
from vantage.models.unwritten_turns import unwritten_parts
from vantage.schemas.conversations import Message, Prompt, is_one_prompt
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stages_on_data import TrainOn
from vantage.schemas.records.model_files import ModelFiles
from vantage.schemas.records.sampling import (
    Answer,
    Answers,
    Merged,
    MergeRequest,
    ModelOpened,
    OpenModel,
    Refused,
    RenderedRow,
    RenderReply,
    RenderRequest,
    RowToRender,
    SampleReply,
    SampleRequest,
    Turn,
    generation_with,
)
from vantage.tasks.data.examples import Codec
from vantage.tasks.data.rendering import render
from vantage.tasks.rollout.engine import RolloutEngine, load_engine
from vantage.tasks.rollout.running_vllm import VllmFailed
from vantage.tasks.rollout.token_texts import token_texts
from vantage.tasks.rollout.vllm_server import EngineUnavailable
from vantage.tasks.training.optimization import training_device

PR_SET_PDEATHSIG = 1
"""Value of the constant in ``linux/prctl.h``."""
AT_ONCE = 32
"""Number of responses that are sampled at once."""
TEMPLATE_SECONDS = 60
"""Most seconds of processor time of the chat template while a model is opened, and for the conversations of one request to sample."""
TEMPLATE_BYTES = 2 * 2**30
"""Memory that a request's rendering may take in addition to what the process has already."""

Bounds = Callable[[int], AbstractContextManager[None]]
"""Seconds (0: no limit) → context in which the chat template has so much processor time. A template is a program by the
model's author."""


def unbounded(_seconds: int) -> AbstractContextManager[None]:
    """Bound nothing: the block runs beside others in one process."""
    return nullcontext()


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Bound the block's processor time and memory. After the seconds the kernel ends the process, since a long
    computation with integers handles no signal.

    Raises:
        ValueError: the block takes more memory.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + TEMPLATE_BYTES
    lower = most if before[0] == resource.RLIM_INFINITY else min(before[0], most)
    resource.setrlimit(resource.RLIMIT_AS, (lower, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except MemoryError:
        raise ValueError(
            f"the model's chat template takes more than {TEMPLATE_BYTES // 2**30} GiB of memory; correct the tokenizer's "
            "chat_template, or leave the model out"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Raise the errors of engines with the options of ``vantage sample`` in place of a recipe's fields.

    Raises:
        ValueError: an engine failed, or refused its arguments.
    """
    try:
        yield
    except VllmFailed as error:
        raise ValueError(f"{error}; use --engine loop") from error
    except EngineUnavailable as error:
        raise ValueError(f"{_with_options(error)}; start one, or leave --url out") from error
    except ValueError as error:
        raise ValueError(_with_options(error)) from error


def _with_options(error: Exception) -> str:
    text = str(error)
    for name in ("url", "api_key_variable", "weights_folder"):
        text = text.replace(f"rollout.{name}", f"--{name.replace('_', '-')}")
    return text


Request = SampleRequest | RenderRequest | MergeRequest
_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)


class OpenedModel:
    """A model whose tokenizer is loaded, and whose weights are loaded by the first request."""

    def __init__(self, opening: OpenModel, scratch: Path, *, bounds: Bounds = unbounded) -> None:
        """Find the model.

        Raises:
            ValueError: the model cannot be used (``UnsafeModel`` …), or its engine is not installed; the message contains the reason.
        """
        self._rollout, self._scratch = opening.rollout, scratch
        if self._rollout.engine == "vllm" and not self._rollout.is_served and find_spec("vllm") is None:
            raise ValueError(
                "--engine=vllm needs the package vllm, which is not installed; install it as docs/rollouts.md describes, or leave --engine out"
            )
        self._bounds = bounds
        self._vllm: RolloutEngine | None = None
        self._room: tuple[Generation, int] | None = None
        self.files = ModelFiles(opening.folder or scratch / "model", opening.base)
        if opening.source is not None:
            import_model(opening.source, self.files.folder, seed=0, scratch=scratch)
        tokenizer = load_tokenizer(self.files.folder)
        try_chat_template(pin_date(tokenizer, opening.date))
        self.codec = Codec(tokenizer, opening.generation, opening.chat)

    def describe(self) -> ModelOpened:
        """Return the answer to the first line; servers that sample get the weights before it.

        Raises:
            ValueError: a server serves another model or tokenizer, or cannot be used (``ServerRefused``, ``WeightsDiffer`` …).
        """
        if self._rollout.is_served:
            with named_as_options():
                self._engine(self.codec, longest=1).take_weights(self.policy.causal_lm.named_parameters())
        tokenizer, chat = self.codec.tokenizer, self.codec.chat
        with self._bounds(TEMPLATE_SECONDS):
            stops = self.codec.stop_token_ids
        template = str(tokenizer.chat_template or "")
        return ModelOpened(
            uses_chat=uses_chat(tokenizer, chat),
            stop_token_ids=stops,
            stop_tokens=tuple(map(str, tokenizer.convert_ids_to_tokens(list(stops)))),
            writes_date="date_string" in template or "strftime_now" in template,
        )

    @cached_property
    def policy(self) -> PolicyModel:
        """The model with its weights, on the GPU if there is one."""
        return PolicyModel(load_stored_policy(self.files, training="nothing")).to(training_device())

    def answer(self, line: bytes) -> SampleReply | RenderReply | Merged:
        """Return the reply to a line after the first; raises as ``sample``, ``render`` and ``vantage.models.merging.merge``."""
        request = _REQUEST.validate_json(line)
        if isinstance(request, SampleRequest):
            return self.sample(request)
        if isinstance(request, RenderRequest):
            return self.render(request)
        merge(self.files, request.output)
        return Merged(output=request.output)

    def sample(self, request: SampleRequest) -> SampleReply:
        """Return responses of a stage's engine.

        Raises:
            ValueError: the model cannot read a conversation, has fewer positions than the requested tokens, or vLLM
                failed.
        """
        generation = generation_with(
            self.codec.generation, temperature=request.temperature, max_tokens=request.max_tokens
        )
        codec = replace(self.codec, generation=generation)
        with self._bounds(TEMPLATE_SECONDS):
            prompts = encode_conversations(codec, request.conversations)
        self._check_positions(prompts, generation.max_response_tokens)
        with named_as_options():
            engine = self._engine(codec, longest=max(map(len, prompts)))
            samples = engine.generate(prompts, count=request.count, seed=request.seed, greedy=request.greedy)
        texts = codec.response_texts(samples.responses)
        answers = [
            Answer(
                text=text,
                ended=ended,
                num_tokens=len(ids),
                logprob=sum(logprobs),
                tokens=token_texts(codec.tokenizer, ids),
                logprobs=tuple(logprobs),
            )
            for text, ended, ids, logprobs in zip(
                texts, samples.ended, samples.responses, samples.logprobs, strict=True
            )
        ]
        return SampleReply(
            conversations=tuple(
                Answers(
                    prompt_tokens=len(prompt),
                    answers=tuple(answers[place * request.count : (place + 1) * request.count]),
                )
                for place, prompt in enumerate(prompts)
            )
        )

    def _engine(self, codec: Codec, *, longest: int) -> RolloutEngine:
        """Return the engine. A vLLM in this process is restarted with more positions if the prompts need them. The
        positions of a server do not change, and must suffice.

        Args:
            longest: tokens of the longest prompt.
        """
        if self._rollout.engine == "loop":
            return load_engine(self.policy, codec, limits=PassLimits(rows=AT_ONCE))
        if (
            self._vllm is None
            or self._room is None
            or self._room[0] != codec.generation
            or self._room[1] < longest
        ):
            room = max(
                codec.generation.max_prompt_tokens, longest if self._rollout.is_served else 2 * longest
            )
            wider = codec.generation.model_copy(update={"max_prompt_tokens": room})
            self._vllm = load_engine(
                self.policy,
                replace(codec, generation=wider, scratch=self._scratch),
                limits=PassLimits(rows=AT_ONCE),
                rollout=self._rollout.model_copy(update={"max_rows": AT_ONCE}),
            )
            self._room = codec.generation, room
        return self._vllm

    def render(self, request: RenderRequest) -> RenderReply:
        """Return rows of data as training reads them; for a row that it cannot read, the reason."""
        with self._bounds(0):  # the process that asks has its own limit
            return RenderReply(rows=tuple(self._rendered(row, request.train_on) for row in request.rows))

    def _rendered(self, row: RowToRender, train_on: TrainOn) -> RenderedRow:
        messages = None if row.messages is None else [_message(message) for message in row.messages]
        response = None if row.response is None else _message(row.response)
        prompt = messages or [Message(role="user", content=row.prompt, extra=None)]
        in_prompt, in_response = self._special_in(prompt), self._special_in([response] if response else [])
        try:
            found = render(self.codec, row.prompt, messages, response, train_on=train_on)
        except UnrenderedRow as error:
            return RenderedRow(
                parts=(),
                prompt_tokens=0,
                response_tokens=0,
                fault=str(error),
                special_in_prompt=in_prompt,
                special_in_response=in_response,
            )
        return RenderedRow(
            parts=tuple(found.parts) if row.is_shown else (),
            prompt_tokens=found.prompt_tokens,
            response_tokens=found.response_tokens,
            special_in_prompt=in_prompt,
            special_in_response=in_response,
            unwritten=unwritten_parts(self.codec.tokenizer, prompt, chat=self.codec.chat),
        )

    def _special_in(self, turns: Sequence[Message]) -> dict[str, int]:
        """Return special token → number of times that the turns' texts contain it."""
        texts = [text for turn in turns for text in (turn["content"], turn["extra"]) if text]
        return dict(Counter(spelled(special_tokens(self.codec.tokenizer), texts)))

    def _check_positions(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        positions = getattr(self.policy.causal_lm.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, prompts))
        if positions is not None and longest + max_tokens > positions:
            raise ValueError(
                f"a prompt of {longest} tokens and a response of up to {max_tokens} are more than the model's "
                f"{positions} positions; shorten the prompt, or set --max-tokens {max(1, positions - longest)}"
            )


def encode_conversations(codec: Codec, conversations: Sequence[Sequence[Turn]]) -> list[list[int]]:
    """Return ids of each conversation up to the begin of the response, encoded like a stage's data.

    Raises:
        ValueError: the chat template refuses a conversation, or a prompt has no tokens.
    """
    return encode_prompts(codec.tokenizer, [_as_prompt(turns) for turns in conversations], chat=codec.chat)


def _as_prompt(turns: Sequence[Turn]) -> Prompt:
    messages = [Message(role=turn.role, content=turn.content, extra=None) for turn in turns]
    return messages[0]["content"] if is_one_prompt(messages) else messages


def _message(fields: Mapping[str, str | None]) -> Message:
    return Message(role=fields["role"] or "", content=fields["content"] or "", extra=fields.get("extra"))


def main() -> None:
    """Answer line by line until standard input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # this process may be busy when its parent ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the command line, which ends this process
    replies = os.dup(1)
    os.dup2(2, 1)
    with open(replies, "w", encoding="utf-8") as out:
        answer_lines(sys.stdin.buffer, out, bounds=bounded)


def answer_lines(lines: Iterable[bytes], out: TextIO, *, bounds: Bounds = unbounded) -> None:
    """Write one line of answer per line: the first line names the model, the others are requests."""
    with tempfile.TemporaryDirectory(prefix="vantage-sample-") as scratch:
        model: OpenedModel | None = None
        for line in lines:
            reply: BaseModel
            try:
                if model is None:
                    model = OpenedModel(OpenModel.model_validate_json(line), Path(scratch), bounds=bounds)
                    reply = model.describe()
                else:
                    reply = model.answer(line)
            except (ValueError, FloatingPointError, FileNotFoundError, PermissionError) as error:
                reply = Refused(refused=str(error))
            except Exception as error:  # the command line prints one sentence; the traceback is for -v
                traceback.print_exc()
                reply = Refused(refused=f"{type(error).__name__}: {error}", is_ours=True)
            out.write(reply.model_dump_json() + "\n")
            out.flush()

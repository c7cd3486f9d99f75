"""Recipe class of the stage that distils a teacher into a student on the student's own responses."""

from typing import Annotated, Literal

from pydantic import Field

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.recipe.fields import MAX_COUNT, Count, Name, is_default, is_unset
from vantage.schemas.recipe.stage_rules import refuse_broken_groups
from vantage.schemas.recipe.stages import WatchedRollouts


class Distillation(WatchedRollouts):
    """On-policy distillation: minimise KL(student‖teacher) on responses that the student samples (arXiv 2306.13649)."""

    kind: Literal["distillation"]
    init: Name
    """The student that training starts from: a stage, or ``model``."""
    teacher: Name | None = Field(None, exclude_if=is_unset)
    """The policy that is imitated: a stage, ``model``, or one of ``models``. It has the student's tokenizer. None: ``teacher_server``
    has it."""
    teacher_server: TeacherServer | None = Field(None, exclude_if=is_unset)
    """A server of vLLM with the teacher, in place of ``teacher``. It is asked for the log-probabilities of the student's tokens."""
    kl: Literal["full", "sampled"] = Field("full", exclude_if=is_default("full"))
    """``full``: the KL at each token is summed over the vocabulary. ``sampled``: it is estimated from the sampled token alone, as a
    teacher behind a server needs."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)] = 1
    """Responses to each prompt of a rollout; a divisor of ``batch_size``."""
    iterations: Count = 50
    """Number of iterations: sample a rollout of the student, and train on it."""
    validate_every: Count = 10
    """Iterations between two measurements of the mean score on the validation prompts; the best student is kept."""
    validation_samples: Count = 256
    """Responses to validation prompts in one such measurement."""
    test_samples: Count | None = None
    """Responses to test prompts of the kept student, of the student before training, and of the teacher. None: as many as to
    validation prompts."""

    @rule
    def _groups_divide_the_batch(self) -> None:
        refuse_broken_groups(self.batch_size, self.samples_per_prompt, "samples_per_prompt")

    @rule
    def _there_is_one_teacher(self) -> None:
        if (self.teacher is None) == (self.teacher_server is None):
            given = "neither" if self.teacher is None else "both"
            raise ValueError(
                f"a distillation has one teacher, and {given} of teacher and teacher_server {'are' if given == 'both' else 'is'} "
                "there; give one of them"
            )

    @rule
    def _a_server_gives_one_logprob_a_token(self) -> None:
        if self.teacher_server is not None and self.kl == "full":
            raise ValueError(
                "kl=full sums over the vocabulary, and teacher_server returns the log-probability of each sampled token alone; set "
                "kl: sampled, or name a folder or a stage as teacher"
            )

    @rule
    def _the_teacher_is_another_policy(self) -> None:
        if self.teacher == self.init:
            raise ValueError(
                f"teacher={self.teacher} is the student itself, from which it has nothing to learn; name another policy as teacher"
            )

    @rule
    def _the_teacher_is_read_whole(self) -> None:
        if self.resources.cuts_weights:
            reads = "the exact KL reads all weights of the teacher at once"
            if self.kl == "sampled":
                reads = "distillation reads all weights at once"
            raise ValueError(
                f"{reads}, and resources.distributed.strategy=fsdp2 cuts them; use strategy: ddp"
            )

"""Recipe class of the stage that distils a teacher into a student on the student's own responses."""

from typing import Annotated, Literal

from pydantic import Field

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import MAX_COUNT, Count, Name
from vantage.schemas.recipe.stage_rules import refuse_broken_groups
from vantage.schemas.recipe.stages import WatchedRollouts


class Distillation(WatchedRollouts):
    """On-policy distillation: minimise KL(student‖teacher) on responses that the student samples (arXiv 2306.13649)."""

    kind: Literal["distillation"]
    init: Name
    """The student that training starts from: a stage, or ``model``."""
    teacher: Name
    """The policy that is imitated: a stage, ``model``, or one of ``models``. It has the student's tokenizer."""
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
    def _the_teacher_is_another_policy(self) -> None:
        if self.teacher == self.init:
            raise ValueError(
                f"teacher={self.teacher} is the student itself, from which it has nothing to learn; name another policy as teacher"
            )

    @rule
    def _the_teacher_is_read_whole(self) -> None:
        if self.resources.cuts_weights:
            raise ValueError(
                "the exact KL reads all weights of the teacher at once, and resources.distributed.strategy=fsdp2 cuts them; "
                "use strategy: ddp"
            )

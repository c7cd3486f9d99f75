"""The metrics of stages that distil a teacher: rows of the table of metrics."""

from vantage.schemas.metric_names import LEAD_SHARE
from vantage.schemas.records.metric import Metric

DISTILLATION_METRICS: tuple[Metric, ...] = (
    Metric(
        "reverse_kl", "nats/token",
        "Mean over the rollout's response tokens of the exact KL(student‖teacher), summed over the vocabulary at the temperature of "
        "sampling, before each update: the loss. With `kl: sampled` it is estimated from the sampled tokens, as the mean of "
        "ρ·(log π − log π_teacher), and may be negative.",
    ),
    Metric("initial_score", "reward", "test_score of the student before training, on the same prompts with the same random numbers."),
    Metric("teacher_score", "reward", "test_score of the teacher, on the same prompts with the same random numbers (a server's own).", needs=("teacher",)),
    Metric(
        LEAD_SHARE, "1",
        "(test_score − initial_score) / (teacher_score − initial_score): the share of the teacher's lead that the student has "
        "gained. 1 is the teacher's score. Undefined if the teacher scores no higher than the student before training.",
        needs=("teacher",),
    ),
    Metric(
        "kl_to_teacher", "nats/token",
        "Mean exact KL(student‖teacher) over the tokens of the kept student's responses to the test prompts; with `kl: sampled` the "
        "mean of log π − log π_teacher of these tokens.",
    ),
)  # fmt: skip

"""Collect rollouts: responses sampled from a policy once and scored, for other stages to learn from as often as they like.

Nothing is trained. The held-out splits come first, so that a reward or a verifier which fails is noticed early.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vantage.algorithms.uncertainty import Estimate, clustered_mean
from vantage.models.folders import tokenizer_digest
from vantage.schemas.recipe.resolved import ResolvedRolloutCollection
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.rollouts import HEADER, RolloutsHeader
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import Prompts, read_prompts
from vantage.tasks.data.splits import SPLITS, TEST, TRAIN
from vantage.tasks.rewards.scoring import score_metrics
from vantage.tasks.rollout.collected import Collected, join_parts, part_of, read_collected, split_file
from vantage.tasks.rollout.group_sampling import uniform_groups
from vantage.tasks.rollout.rollout_models import load_rollout_models
from vantage.tasks.rollout.rollouts import Scored, sample_and_score
from vantage.tasks.training import ranks
from vantage.tasks.training.batch_files import BatchFiles
from vantage.tasks.training.found_limits import taken_by_reading
from vantage.tasks.training.measured import clusters_of, uncertainty_of, values_of
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.optimization import training_device
from vantage.tasks.training.seeds import derive_seed, stage_seed


@dataclass(frozen=True)
class Batch:
    """Prompts of one split that are sampled together."""

    split: str
    indices: range


def run(job: StageJob[ResolvedRolloutCollection]) -> StageResult:
    """Write ``train.arrow``, ``validation.arrow``, ``test.arrow`` and ``rollouts.json`` into the output."""
    work = job.work

    # 1. The policy, the reward, and every split's prompts in batches
    device = training_device()
    policy = fixed_policy(job, "policy", device)
    models = load_rollout_models(job, work, policy, role="policy", with_reference=False)
    prompts = {split: read_prompts(job.inputs["prompts"], split, models.codec) for split in SPLITS}
    encoding = encoding_metrics(job, "prompts", list(prompts.values()))
    models, job = models.ready(job, taken_by_reading(policy, models.codec, prompts.values(), work))
    batches = list(cut_batches(prompts, work))

    # 2. Sample and score responses, batch by batch, from the end of an earlier attempt on
    with BatchFiles(job.scratch, total=len(batches), phase="sampling") as files:
        for number in files.remaining():
            batch = batches[number]
            scored = sample_and_score(
                models,
                prompts[batch.split],
                batch.indices,
                count=samples_of(batch.split, work),
                seed=derive_seed(stage_seed(job), "sampling", number),
            )
            files.finish(
                {"split": batch.split},
                metrics=describe(scored),
                num_tokens=int(scored.sampled.sequences.attention_mask.sum()),
                headline="score_mean",
                attachment=part_of(scored),
            )

        # 3. One file a split
        ranks.wait()  # the first rank writes the parts that the others read too
        for split in SPLITS:
            parts = [files.attachment(number) for number, batch in enumerate(batches) if batch.split == split]
            join_parts(parts, split_file(job.output, split))
    digest = tokenizer_digest(job.inputs["policy"])
    assert models.scorer is not None  # a stage that scores its responses itself has loaded it
    header = RolloutsHeader(
        tokenizer_digest=digest,
        samples_per_prompt=work.samples_per_prompt,
        held_out_samples_per_prompt=work.held_out_samples_per_prompt,
        terms=models.scorer.score_names,
        graded=models.scorer.graded,
    )
    (job.output / HEADER).write_text(header.model_dump_json(indent=2) + "\n", encoding="utf-8")

    # 4. Describe the responses to training prompts, and estimate metrics on test prompts
    collected = {split: read_collected(job.output, split, models.codec, tokenizer=digest) for split in SPLITS}
    estimates = estimate(collected[TEST])
    return StageResult(
        metrics={
            **{f"{split}_rows": len(rows) for split, rows in collected.items()},
            **values_of(estimates),
            **describe_groups(collected),
            **encoding,
        },
        uncertainty=uncertainty_of(estimates),
        tokenizer_digest=digest,
    )


def samples_of(split: str, work: ResolvedRolloutCollection) -> int:
    """Return the number of responses to each prompt of a split."""
    return work.samples_per_prompt if split == TRAIN else work.held_out_samples_per_prompt


def cut_batches(prompts: Mapping[str, Prompts], work: ResolvedRolloutCollection) -> Iterator[Batch]:
    """Yield every prompt of every split once, ``batch_size`` responses at a time (at least one prompt's)."""
    for split in reversed(SPLITS):
        size = max(1, work.batch_size // samples_of(split, work))
        for start in range(0, len(prompts[split]), size):
            yield Batch(split=split, indices=range(start, min(start + size, len(prompts[split]))))


def describe(scored: Scored) -> dict[str, float]:
    """Return metrics of the responses of one batch."""
    sampled, scores = scored.sampled, scored.scores
    measured = {
        "score_mean": scores.total,
        "response_length_mean": sampled.sequences.lengths.float(),
        "truncated_share": (~sampled.ended).float(),
    }
    means = {name: values.mean().item() for name, values in measured.items()}
    return means | score_metrics(scores)


def estimate(test: Collected) -> dict[str, Estimate]:
    """Estimate score, length (tokens) and cut-off share of responses to test prompts; those to one prompt are one
    cluster."""
    clusters = clusters_of([prompt for prompt, _ in test.cases() for _ in range(test.samples_per_prompt)])
    measured = {
        "test_score": test.scores,
        "mean_response_length": test.lengths,
        "truncated_share": ~test.ended,
    }
    return {name: clustered_mean(values, clusters) for name, values in measured.items()}


def describe_groups(collected: Mapping[str, Collected]) -> dict[str, float]:
    """Return the spread of the test scores, and the share of training prompts whose responses all have one score."""
    train, test = collected[TRAIN], collected[TEST]
    uniform = uniform_groups(train.weighted_sums, samples_per_prompt=train.samples_per_prompt)
    return {
        "reward_spread": (test.scores.max() - test.scores.min()).item(),
        "uniform_group_share": uniform.float().mean().item(),
    }

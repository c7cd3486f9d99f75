"""Extend Vantage with one real extension of each sort, as a maintainer would: new files, and text put into files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What one extension changes in the tree."""

    new: Mapping[str, str] = field(default_factory=dict)
    """New file → its content."""
    inserted: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """File → pairs (text that stands there once, text that is put before it)."""

    @property
    def files(self) -> list[str]:
        """The product files that it touches, sorted."""
        return sorted({*self.new, *self.inserted})

    def add_to(self, tree: Path) -> None:
        """Write the extension into a copy of the tree."""
        for name, text in self.new.items():
            assert not (tree / name).exists(), name
            (tree / name).write_text(text.lstrip("\n"))
        for name, pairs in self.inserted.items():
            written = (tree / name).read_text()
            for before, text in pairs:
                assert written.count(before) == 1, (name, before)
                written = written.replace(before, text.lstrip("\n") + before)
            (tree / name).write_text(written)


KIND = Extension(
    new={
        "schemas/recipe/margin_filter.py": '''
"""Filtering of preference pairs by a reward model."""

from typing import Literal

from vantage.schemas.recipe.fields import Count, Name, NonNegative
from vantage.schemas.recipe.stage import Stage


class MarginFilter(Stage):
    """Keep the preference pairs that a reward model is sure of: cleaner pairs for DPO or for another reward model."""

    kind: Literal["margin_filter"]
    data: Name
    """Preference pairs; all their splits are filtered."""
    reward_model: Name
    """The reward model that scores both responses of a pair."""
    least_margin: NonNegative = 0.0
    """A pair is kept if the chosen response scores higher than the rejected one by more than this."""
    batch_size: Count = 32
    """Pairs that are scored together."""
''',
        "tasks/margin_filter.py": '''
"""Filtering of preference pairs by a reward model."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from vantage.models.heads import ScalarModel, load_scalar, scores
from vantage.models.prompts import encode_prompts, encode_responses
from vantage.models.sequences import collate
from vantage.schemas.recipe.margin_filter import MarginFilter
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.examples import Codec, codec_of
from vantage.tasks.data.rows import Row, read_rows, write_rows
from vantage.tasks.data.splits import SPLITS, TRAIN, TooFewRows
from vantage.tasks.training import progress
from vantage.tasks.training.networks import placed
from vantage.tasks.training.optimization import training_device

SIDES = ("chosen", "rejected")


def run(job: StageJob[MarginFilter]) -> StageResult:
    """Write ``train.parquet``, ``validation.parquet``, ``test.parquet`` and ``report.json`` into the output."""
    # 1. The reward model
    codec = codec_of(job, "reward_model")
    files, device = job.model("reward_model"), training_device()
    reward = placed(lambda: load_scalar(files, role="reward", training="nothing"), files.folder, device)

    # 2. Of every split the pairs that it is sure of
    counts, num_rows = {}, 0
    for split in SPLITS:
        rows = read_rows(job.inputs["data"], split)
        sure = (margins(reward, rows, codec, at_once=job.work.batch_size) > job.work.least_margin).tolist()
        kept = [row for row, is_sure in zip(rows, sure, strict=True) if is_sure]
        if split == TRAIN and not kept:
            raise TooFewRows(
                f"stages.{job.name}: no training pair has a margin above least_margin={job.work.least_margin:g}; lower it"
            )
        write_rows(job.output, split, kept)
        counts[f"{split}_rows"], num_rows = len(kept), num_rows + len(rows)
    (job.output / "report.json").write_text(json.dumps(counts, indent=2) + "\\n")
    return StageResult(metrics={**counts, "sure_share": sum(counts.values()) / num_rows})


@torch.no_grad()
def margins(reward: ScalarModel, rows: Sequence[Row], codec: Codec, *, at_once: int) -> Tensor:
    """Return chosen score − rejected score of each pair, (N,) on the CPU."""
    found = torch.zeros(len(rows))
    for begin in range(0, len(rows), at_once):
        progress.phase("scoring", begin, len(rows))
        part = rows[begin : begin + at_once]
        prompts = encode_prompts(codec.tokenizer, [row.get("messages") or row["prompt"] for row in part], chat=codec.chat)
        limit = codec.generation.max_response_tokens
        responses = [
            encode_responses(codec.tokenizer, [row[side] for row in part], max_tokens=limit, chat=codec.chat) for side in SIDES
        ]
        pairs = collate([*prompts, *prompts], [ids for side in responses for ids, _ in side], pad_token_id=codec.pad_token_id)
        chosen, rejected = scores(reward, pairs.to(reward.device)).chunk(2)
        found[begin : begin + len(part)] = (chosen - rejected).cpu()
    return found
''',
    },
    inserted={
        "schemas/kinds.py": (
            (
                "from vantage.schemas.recipe.resolved import (",
                "from vantage.schemas.recipe.margin_filter import MarginFilter\n",
            ),
            (
                ")\n\nKINDS: Mapping",
                """
    Kind(
        work=MarginFilter,
        module="vantage.tasks.margin_filter",
        workload="vantage.estimates.stage_workloads.margin_filter",
        makes="dataset",
        content="preferences",
        revision=1,
        reads={"reward_model": ("reward_model",)},
        data={"data": "preferences"},
        numbers=(*ROWS, "sure_share"),
    ),
""",
            ),
        ),
        "schemas/records/metrics.py": (
            (
                "    # -- every training stage\n",
                '    Metric("sure_share", "1", "Share of the pairs of all splits whose margin by the reward model is above least_margin."),\n',
            ),
        ),
        "estimates/stage_workloads.py": (
            (
                "from vantage.schemas.recipe.resolved import (",
                "from vantage.schemas.recipe.margin_filter import MarginFilter\n",
            ),
            (
                "def reward_evaluation(",
                """
def margin_filter(subject: Subject) -> Workload:
    work = subject.stage
    assert isinstance(work, MarginFilter)
    data = subject.data_of(work.data)
    num_pairs = data.train + data.validation + data.test
    pairs = rows_of(data, num_pairs, work.batch_size, grouped=False, columns=2, with_logits=0.0)
    return whole_workload(
        subject,
        networks=[Network(role="reward", shape=subject.shape, is_scalar=True)],
        passes=[forward("reward", 1, pairs)],
        at_once=work.batch_size,
        counts={"rows": num_pairs},
        data=[work.data],
    )


""",
            ),
        ),
    },
)
KIND_RECIPE = """
recipe: cleaned
model: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 48, max_response_tokens: 72}
data:
  preferences: {source: "builtin:arithmetic/preferences", rows: 60}
stages:
  reward: {kind: reward_model, init: model, data: preferences, batch_size: 16}
  clean:
    {kind: margin_filter, data: preferences, reward_model: reward, least_margin: 0.001, gate: {metric: sure_share, at_least: 0.01}}
  dpo: {kind: dpo, init: model, data: clean, batch_size: 4}
"""

SWITCH = Extension(
    inserted={
        "schemas/recipe/algorithm.py": (
            (
                '    aggregation: Aggregation = "token"\n',
                '''
    ratio_power: Probability = Field(1.0, exclude_if=is_default(1.0))
    """Power of the importance ratio: below 1 it is nearer to 1, with less variance and a bias towards the old policy."""
''',
            ),
        ),
        "schemas/checks/unread_switches.py": (
            (
                "    if not switches.importance_ratio:\n        clips",
                """
    if not switches.importance_ratio:
        found["ratio_power"] = ("without a ratio", "set importance_ratio: true")
""",
            ),
        ),
        "algorithms/policy_loss.py": (
            (
                "def masked_ratio_gradient(",
                '''
def tempered(logprobs: Tensor, old_logprobs: Tensor, *, power: float) -> Tensor:
    """Return log-probabilities whose ratio to `old_logprobs` is the power of that of `logprobs`.

        old_logprobs + power·(logprobs − old_logprobs)

    All tensors (B,T), log-probabilities in nats. The gradient flows through `logprobs` only.
    """
    fixed = old_logprobs.detach()
    return fixed + power * (logprobs - fixed)


''',
            ),
        ),
        "tasks/updates/surrogates.py": (
            (
                "    given = (tokens.logprobs, ",
                """
    powered = tempered(tokens.logprobs, tokens.old_logprobs, power=switches.ratio_power)
    tokens = LossTokens(
        powered, tokens.old_logprobs, tokens.advantages, tokens.mask, tokens.denominator
    )
""",
            ),
            (
                ")\nfrom vantage.schemas.recipe.algorithm import Algorithm",
                "    tempered,\n",
            ),
        ),
    },
)
SWITCH_RECIPE = """
recipe: sequence_ratio
model: {source: "builtin:tiny"}
generation: {max_response_tokens: 8}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 20, split: {validation: 8, test: 8}}
rewards:
  right: {terms: [{verifier: arithmetic}]}
stages:
  policy:
    {kind: policy_optimization, init: model, reward: right, prompts: prompts, iterations: 1, batch_size: 8, minibatch_size: 4,
     validation_samples: 8, learning_rate: 1.0e-3, algorithm: {preset: grpo, samples_per_prompt: 4, RATIO}}
"""

FACT = Extension(
    inserted={
        "schemas/records/facts.py": (
            (
                ')\n"""All facts, in the order of the report',
                """
    Fact(
        name="host",
        heading="machine",
        meaning="The machine is the name of the one that computed the attempt.",
    ),
""",
            ),
        ),
        "attempts/facts.py": (
            ("from collections.abc import Callable", "import socket\n"),
            (
                '}\n"""Name of a fact',
                '    "host": socket.gethostname,\n',
            ),
        ),
    },
)

ENGINE = Extension(
    new={
        "tasks/rollout/generate_engine.py": '''
"""Sampling by the ``generate`` of transformers: the plain twin of the sampler of this process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vantage.models.sampling import Samples
from vantage.tasks.rollout.engine import Listener, LocalEngine, of_all_ranks
from vantage.tasks.training import ranks


@dataclass(frozen=True)
class GenerateEngine:
    """Samples each prompt's responses by itself, with random numbers of the seed and the response's place."""

    local: LocalEngine
    """Whose policy, texts and precision it has."""
    took_begun: bool = False
    """Nothing is ever begun."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(
        self, prompts: Sequence[list[int]], *, count: int, seed: int, listener: Listener | None = None
    ) -> None:
        """See ``RolloutEngine``; does nothing."""

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine``."""
        self.local.take_weights(weights)

    def tensors(self) -> dict[str, Tensor]:
        """See ``RolloutEngine``; nothing is ever begun."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """See ``RolloutEngine``; ``tensors`` is empty."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """See ``RolloutEngine``; the listener gets nothing before the end."""
        repeated = [prompt for prompt in prompts for _ in range(count)]
        mine = ranks.own(len(repeated))
        rows = [self._one(repeated[place], seed=seed * 1_000_003 + place, greedy=greedy) for place in range(len(repeated))[mine]]
        own = Samples(
            responses=[ids for ids, _, _ in rows],
            ended=[ended for _, _, ended in rows],
            logprobs=[logprobs for _, logprobs, _ in rows],
        )
        limit = self.local.codec.generation.max_response_tokens
        return of_all_ranks(own, mine, count=len(repeated), max_length=limit)

    @torch.no_grad()
    def _one(self, prompt: list[int], *, seed: int, greedy: bool) -> tuple[list[int], list[float], bool]:
        """Return ids, their log-probabilities in nats, and whether the response ended."""
        codec, policy = self.local.codec, self.local.policy
        temperature = codec.generation.temperature
        with torch.random.fork_rng():
            torch.manual_seed(seed % 2**63)
            found = policy.causal_lm.generate(
                torch.tensor([prompt], device=policy.device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=policy.device),
                max_new_tokens=codec.generation.max_response_tokens,
                do_sample=not greedy,
                temperature=1.0 if greedy else temperature,
                top_k=0,
                top_p=1.0,
                eos_token_id=list(codec.stop_token_ids),
                pad_token_id=codec.pad_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ids = found.sequences[0, len(prompt) :].tolist()
        logits = torch.stack([step[0] for step in found.logits])[: len(ids)].float() / temperature
        logprobs = logits.log_softmax(dim=-1)[torch.arange(len(ids)), ids].tolist()
        return ids, logprobs, ids[-1] in codec.stop_token_ids
''',
    },
    inserted={
        "schemas/recipe/inputs.py": (
            (
                "    @rule\n    def _stops_are_different",
                '''
    engine: Literal["own", "generate"] = Field("own", exclude_if=is_default("own"))
    """What samples: Vantage's own sampler, or the ``generate`` of transformers, one response at a time."""

    @rule
    def _generate_knows_no_stops(self) -> None:
        if self.engine == "generate" and self.stop:
            raise ValueError("engine=generate ends responses by token and not by text; leave stop out, or engine")

''',
            ),
        ),
        "tasks/rollout/engine.py": (
            (
                "    return LocalEngine(policy, codec, limits, precision)\n",
                """
    if codec.generation.engine == "generate":
        from vantage.tasks.rollout.generate_engine import GenerateEngine  # which has a local engine

        return GenerateEngine(LocalEngine(policy, codec, limits, precision))
""",
            ),
        ),
    },
)

ENGINE_RECIPE = """
recipe: sampled
model: {source: "builtin:tiny"}
generation: {max_response_tokens: 8}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 20, split: {validation: 8, test: 8}}
rewards:
  right: {terms: [{verifier: arithmetic}]}
stages:
  best:
    {kind: best_of_n, init: model, reward: right, prompts: prompts, iterations: 1, batch_size: 8, minibatch_size: 2,
     samples_per_prompt: 4, validation_samples: 8, learning_rate: 1.0e-4}
"""

STORAGE = Extension(
    inserted={
        "storage/bucket.py": (
            (
                "SCHEMES: Mapping[str, Scheme] = {",
                '''
def _minio(address: str, **options: Any) -> "Remote":
    """Open a bucket of a server of one's own, which speaks S3 over http."""
    from obstore.store import S3Store

    parts = urlsplit(address)
    bucket, _, prefix = parts.path.strip("/").partition("/")
    if not bucket:
        raise ValueError(f"storage {address!r} names no bucket; write minio://{SCHEMES['minio'].address}")
    return S3Store(
        bucket,
        prefix=prefix or None,
        endpoint=f"http://{parts.netloc}",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        conditional_put="etag",
        **options,
    )


''',
            ),
            (
                '}\n"""First part of an address',
                '    "minio": Scheme(address="HOST:PORT/BUCKET/PREFIX", open=_minio),\n',
            ),
        ),
    },
)

"""Parts of the stages' workloads: sampled responses, rows of a dataset, networks, and their passes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from vantage.estimates.adapters import with_adapters
from vantage.estimates.asked_servers import CHARACTERS_OF_A_TOKEN, Asked, asked_by, own_rewards, summed
from vantage.estimates.engine_timing import MOST_ROWS
from vantage.estimates.model_shape import ModelShape
from vantage.estimates.token_counts import DataCount, Lengths
from vantage.estimates.workload import Network, Pass, Sampling, Sequences, Workload
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.recipe.judging_models import JudgingModel
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.resolved import (
    ResolvedBestOfN,
    ResolvedDistillation,
    ResolvedPolicyOptimization,
)
from vantage.schemas.recipe.rollout import Sampling as RolloutFields
from vantage.schemas.recipe.stage import Stage, Training
from vantage.schemas.recipe.stages import Rollouts
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.recipe.terms import ModelTerm, RewardTerm
from vantage.schemas.steps import dependencies, judges_of, rewards_read


@dataclass(frozen=True)
class Subject:
    """A stage with everything that its workload depends on."""

    recipe: ResolvedRecipe
    name: str
    shape: ModelShape
    data_of: Callable[[str], DataCount]
    """Function from the name of a dataset, or of the stage that makes it, to its counts."""
    sampled: Lengths
    """Tokens of a sampled response."""
    others: Mapping[str, ModelShape] = field(default_factory=dict)
    """Step that imports another model → its shape. Only reward models are trained from other models; models of other
    stages have the shape of the recipe's model."""
    finds_rows: bool = False
    """Whether stages find how many responses fit in memory at once, as they do on a GPU."""

    def shape_of(self, role: str) -> ModelShape:
        """Return the shape of the model that the stage reads in a role."""
        step = self._inputs[self.name].get(role, "")
        if step in self.recipe.stages and KINDS[self.recipe.stages[step].kind].makes == "reward_model":
            step = self._inputs[step]["init"]
        return self.others.get(step, self.shape)

    @cached_property
    def _inputs(self) -> dict[str, dict[str, str]]:
        """Step → role → step whose artifact it reads."""
        return dependencies(self.recipe)

    @property
    def stage(self) -> Stage:
        """The stage itself."""
        return self.recipe.stages[self.name]


WATCH = "watch"
"""Role of the model that judges in a watch."""
QUESTIONS_AT_ONCE = 64
"""Equal to ``vantage.tasks.rewards.label_logprobs.READ_AT_ONCE``."""


@dataclass(frozen=True)
class Responses:
    """Responses to the prompts of one dataset, with their sampling and their passes through networks."""

    subject: Subject
    prompts: str
    limits: PassLimits
    rollout: RolloutFields

    @property
    def sampled(self) -> PassLimits:
        """Limits of the responses that are sampled at once."""
        if self.subject.finds_rows and self.limits.tokens is None:
            return replace(self.limits, rows=self.rollout.max_rows)
        return self.rollout.limits(self.limits)

    def sampling(self, role: str, times: float, count: float) -> Sampling:
        """Return the sampling of ``count`` responses, ``times`` times."""
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        longest = prompt.longest + response.longest
        if self.rollout.engine == "vllm":  # vLLM pads nothing, and has no micro-batches
            at_once = min(count, self.rollout.max_rows or MOST_ROWS)
            steps = response.longest_of(count)
            return Sampling(
                role=role,
                times=times,
                count=count,
                at_once=at_once,
                prompt=prompt.mean,
                response=response.mean,
                steps=steps,
                longest=longest,
            )
        at_once = min(count, rows_at_once(self.sampled, longest, count))
        return Sampling(
            role=role,
            times=times,
            count=count,
            at_once=at_once,
            prompt=prompt.longest_of(at_once),
            response=response.mean,
            steps=response.longest_of(at_once),
            longest=longest,
        )

    def scored(self, count: float, *, logits: float) -> Sequences:
        """Return ``count`` prompts with their responses; ``logits``: the share of response tokens whose logits are computed."""
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        longest = prompt.longest + response.longest
        micro = min(count, rows_at_once(self.limits, longest, count))
        return Sequences(
            count=count,
            at_once=micro,
            tokens=min(longest, prompt.mean + response.longest_of(micro)),
            longest=longest,
            logit_tokens=logits * response.mean,
        )

    def asked(self, pairs: float, template: str) -> Sequences:
        """Return the sequences of a model that judges pairs of responses: both orders, each with both answers."""
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        around = len(template) / CHARACTERS_OF_A_TOKEN
        longest = around + prompt.longest + 2 * response.longest
        micro = min(4 * pairs, rows_at_once(self.limits, longest, QUESTIONS_AT_ONCE))
        return Sequences(
            count=4 * pairs,
            at_once=micro,
            tokens=around + prompt.mean + 2 * response.longest_of(micro),
            longest=longest,
            logit_tokens=1.0,
        )

    def trained(self, work: Rollouts, *, logits: float) -> Sequences:
        """Return the sequences of one optimiser step."""
        return self.scored(work.minibatch_size, logits=logits)

    def rewards(self, times: float, count: float, *, by: Sequence[str] | None = None) -> list[Pass | Asked]:
        """Return the passes of the reward's models over ``count`` responses, and the questions to its servers.

        ``by``: the rewards whose servers are asked; None: the stage's own.
        """
        scored = self.scored(count, logits=0.0)
        rewards = own_rewards(self.subject.stage) if by is None else by
        return [
            *(
                Pass(role=each.role, does="score", times=times, sequences=scored, has_precision=False)
                for each in reward_models(self.subject)
            ),
            *(
                forward(role, times, self.judged(judge, count))
                for role, judge in judging_models(self.subject, rewards)
            ),
            *self.questions(rewards, times, count),
        ]

    def judged(self, judge: JudgingModel, count: float) -> Sequences:
        """Return the sequences of a model of the run that judges ``count`` responses: each question once, then each of
        its answers.

        The answer to which a response is compared is assumed to be as long as the response.
        """
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        shown, answers = (1 if judge.against is None else 2), len(judge.labels)
        around = (len(judge.template) + max(map(len, judge.questions.values()))) / CHARACTERS_OF_A_TOKEN
        questions = count * len(judge.questions) * shown
        longest = around + prompt.longest + shown * response.longest
        micro = min(questions, max(1, rows_at_once(self.limits, longest, QUESTIONS_AT_ONCE) // answers))
        return Sequences(
            count=questions,
            at_once=micro,
            tokens=around + prompt.mean + shown * response.longest_of(micro) + answers,
            longest=longest + answers,
            logit_tokens=float(answers),
        )

    def questions(self, rewards: Sequence[str], times: float, count: float) -> Iterator[Asked]:
        """Yield the questions to the servers of these rewards about ``count`` responses."""
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        yield from asked_by(
            self.subject.recipe, rewards, responses=times * count, prompt=prompt.mean, response=response.mean
        )

    def taught(self, server: TeacherServer | None, count: float) -> Iterator[Asked]:
        """Yield the questions to a teacher's server about ``count`` responses; nothing without one."""
        prompt, response = self.subject.data_of(self.prompts).prompt, self.subject.sampled
        if server is not None:
            yield Asked(server=server, responses=count, prompt=prompt.mean, response=response.mean)

    def logprobs(self, times: float, count: float, *, reference: bool) -> list[Pass]:
        """Return the passes for log-probabilities of ``count`` responses under the policy, and under its reference."""
        scored = self.scored(count, logits=1.0)
        return [forward(role, times, scored) for role in ("policy", *(["reference"] if reference else []))]


def validations(work: ResolvedPolicyOptimization | ResolvedBestOfN | ResolvedDistillation) -> int:
    """Return how often the policy is measured on validation prompts after an iteration, including the last one."""
    own = work.validations
    together = math.lcm(*own)
    due = sum(work.iterations // every for every in own)
    due -= work.iterations // together if len(own) > 1 else 0
    return due + all(work.iterations % every for every in own)


def selection(
    work: ResolvedPolicyOptimization | ResolvedBestOfN | ResolvedDistillation,
    rollouts: Responses,
    *,
    reference: bool,
) -> tuple[list[Sampling], list[Pass | Asked]]:
    """Return the measurements on held-out prompts: before the first iteration, every few iterations, and at the end."""
    measured = 1 + validations(work)
    tests = work.test_samples or work.validation_samples
    samplings = [
        rollouts.sampling("policy", measured, work.validation_samples),
        rollouts.sampling("policy", 1, tests),
    ]
    passes = [*rollouts.rewards(measured, work.validation_samples), *rollouts.rewards(1, tests)]
    if reference:
        passes += rollouts.logprobs(1, tests, reference=True)
    if work.watch is None:
        return samplings, passes
    watched, count = rollouts, work.validation_samples
    if work.watch.prompts is not None:
        watched = replace(rollouts, prompts=work.watch.prompts.data)
        count = work.watch.prompts.samples or count
        samplings.append(watched.sampling("policy", measured, count))
        passes += watched.rewards(measured, count, by=())
    watching = work.watch.judge.reward
    if watching is not None:
        passes += watched.questions((watching,), measured, count)
        passes += [
            forward(role, measured, watched.judged(judge, count))
            for role, judge in judging_models(watched.subject, (watching,))
        ]
    # the model is asked from the second measurement on, since the first one compares equal responses
    if work.watch.judge.kind == "model":
        asked = watched.asked(count, work.watch.judge.template)
        passes.append(forward(WATCH, measured - 1, asked))
    return samplings, passes


def monitors(subject: Subject, work: ResolvedPolicyOptimization) -> tuple[list[Pass], list[str]]:
    """Return the passes of measurements besides the score, and the datasets that they read."""
    passes, most = [], work.validation_samples
    if work.demonstrations is not None:
        data = subject.data_of(work.demonstrations)
        micro = rows_at_once(work.pass_limits, data.whole.longest, work.minibatch_size)
        rows = min(most, data.validation)
        held_out = rows_of(data, rows, micro, grouped=False, columns=1, with_logits=1.0)
        passes += [forward("policy", validations(work), held_out), forward("reference", 1, held_out)]
    if work.preferences is not None:
        data = subject.data_of(work.preferences)
        micro = rows_at_once(work.pass_limits, data.whole.longest, work.minibatch_size)
        rows = min(most, data.train) + min(most, data.validation)
        pairs = rows_of(data, rows, micro, grouped=False, columns=2, with_logits=0.0)
        passes += [
            Pass(role=each.role, does="score", times=1, sequences=pairs, has_precision=False)
            for each in reward_models(subject)
        ]
    return passes, [name for name in (work.demonstrations, work.preferences) if name is not None]


def watch_networks(subject: Subject) -> list[Network]:
    """Return the model that judges in the stage's watch."""
    watch = judges_of(subject.stage).get(WATCH)
    return [] if watch is None or watch.kind != "model" else [language_model(subject, WATCH)]


def rows_at_once(limits: PassLimits, longest: float, whole: float) -> int:
    """Return the most rows of one pass whose longest row has ``longest`` positions; ``whole`` if ``limits`` do not
    bound rows."""
    rows = limits.rows or math.ceil(whole)
    return rows if limits.tokens is None else max(1, min(rows, int(limits.tokens // longest)))


def rows_of(
    data: DataCount, rows: float, micro: float, *, grouped: bool, columns: float, with_logits: float
) -> Sequences:
    """Return ``rows`` rows with ``columns`` responses each, in micro-batches of ``micro`` rows."""
    at_once = min(rows, micro)
    mean = sum(each.mean for each in data.responses) / len(data.responses)
    return Sequences(
        count=rows * columns,
        at_once=at_once * columns,
        tokens=data.whole.mean if grouped else data.whole.longest_of(at_once),
        longest=data.whole.longest,
        logit_tokens=with_logits * mean,
    )


def packed_rows_of(data: DataCount, rows: float, micro: float) -> Sequences:
    """Return ``rows`` rows of one response each, packed: several in a row of a pass as long as the longest.

    First fit decreasing leaves few positions of these rows empty; empty ones are not counted.
    """
    width = data.whole.longest_of(rows)
    packed = math.ceil(rows * data.whole.mean / width)
    return Sequences(
        count=packed,
        at_once=min(packed, micro),
        tokens=width,
        longest=data.whole.longest,
        logit_tokens=data.responses[0].mean * rows / packed,
    )


def steps_of(epochs: float, rows: int, batch_size: int) -> int:
    return max(1, math.ceil(round(epochs * rows) / batch_size))


def forward(role: str, times: float, sequences: Sequences, *, in_update: bool = False) -> Pass:
    """Return a forward pass without gradients."""
    return Pass(role=role, does="score", times=times, sequences=sequences, in_update=in_update)


def language_model(subject: Subject, role: str, *, trained: bool = False) -> Network:
    return Network(role=role, shape=subject.shape_of(role), is_trained=trained)


def reward_networks(subject: Subject) -> list[Network]:
    """Return the models of the stage's reward or judge."""
    judging = judging_models(subject, rewards_read(subject.stage))
    return [*reward_models(subject), *(language_model(subject, role) for role, _ in judging)]


def reward_models(subject: Subject) -> list[Network]:
    """Return the reward models of the stage's reward or judge."""
    return [
        Network(
            role=term.stage,
            shape=subject.shape_of(f"reward.{reward}.{number}"),
            is_scalar=True,
            is_bfloat16=subject.stage.arithmetic == "bfloat16"
            and isinstance(subject.stage, Training | RolloutCollection),
        )
        for reward, number, term in _terms(subject, rewards_read(subject.stage))
        if isinstance(term, ModelTerm)
    ]


def judging_models(subject: Subject, rewards: Sequence[str]) -> list[tuple[str, JudgingModel]]:
    """Return the role and the questions of each model of the run that judges as a term of these rewards."""
    return [
        (f"reward.{reward}.{number}", term.judging_model)
        for reward, number, term in _terms(subject, rewards)
        if term.judging_model is not None
    ]


def _terms(subject: Subject, rewards: Sequence[str]) -> Iterator[tuple[str, int, RewardTerm]]:
    """Yield the reward, the number and the term, for all terms of these rewards."""
    for reward in rewards:
        for number, term in enumerate(subject.recipe.rewards[reward].terms):
            yield reward, number, term


def rollout_counts(work: Rollouts, steps: int, iterations: int, sequences: Sequences) -> dict[str, float]:
    return {
        "responses": iterations * work.batch_size,
        "optimizer_steps": steps,
        "tokens": iterations * work.batch_size * sequences.tokens,
    }


def _offloaded(subject: Subject) -> set[str]:
    """Return the roles of the networks that the stage keeps in host memory."""
    offload = subject.stage.resources.offload
    rewards = {each.role for each in reward_networks(subject)} if "reward" in offload else set()
    return rewards | ({"reference"} & {*offload})


def whole_workload(
    subject: Subject,
    *,
    networks: list[Network],
    passes: Sequence[Pass | Asked],
    at_once: int,
    counts: dict[str, float],
    data: list[str],
    samplings: list[Sampling] | None = None,
) -> Workload:
    stage = subject.stage
    held = with_adapters(subject.recipe, subject.name, networks)
    return Workload(
        networks=tuple(replace(each, is_offloaded=each.role in _offloaded(subject)) for each in held),
        passes=tuple(each for each in passes if isinstance(each, Pass)),
        asked=summed([each for each in passes if isinstance(each, Asked)]),
        samplings=tuple(samplings or ()),
        is_bfloat16=stage.arithmetic == "bfloat16",
        is_checkpointed=isinstance(stage, Training) and stage.gradient_checkpointing,
        has_8_bit_states=isinstance(stage, Training) and stage.optimizer_states == "8bit",
        has_host_optimizer="optimizer" in stage.resources.offload,
        at_once=at_once,
        recipe_at_once=at_once,
        counts=counts,
        basis=tuple(f"{name}: {subject.data_of(name).basis}" for name in dict.fromkeys(data)),
    )

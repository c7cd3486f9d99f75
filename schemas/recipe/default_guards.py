"""The guards that a stage has by itself. They only warn, so that they change no bit and no stage key.

Where a source gives a bound, it is named. The other bounds lie beyond what twenty healthy small runs reached
(docs/guards.md).
"""

from collections.abc import Mapping

from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.guards import OFF, Guard
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import PolicyOptimization

_FINITE = (Guard(metric="nonfinite_steps", above=0.0, over=1),)
_RESPONSES = (
    # PPO-max, arXiv 2307.04964 §5.1: length moves with the collapse
    Guard(metric="response_length_mean", rises_by="50%", over=5),
    Guard(metric="response_length_mean", falls_by="50%", over=5),
    Guard(metric="truncated_share", rises_by=0.25, over=5),
    # loops: seq-rep-n, arXiv 1908.04319; one text for all prompts: distinct-n, arXiv 1510.03055
    Guard(metric="repeated_trigrams", rises_by=0.25, over=3),
    Guard(metric="distinct_bigrams", falls_by="50%", over=3),
)
_POLICY = (
    # PPO-max, arXiv 2307.04964 fig. 4: KL to the SFT policy rises before the win rate falls; the bound is ours
    Guard(metric="kl_to_reference_per_token", above=1.0, over=3),
    Guard(metric="entropy", falls_by="90%", over=5),
    Guard(metric="entropy", rises_by=1.0, over=3),
    # PPO implementations stop an epoch at 1.5 × a target of 0.01 to 0.02; ten times as much is no small step
    Guard(metric="approx_kl", above=0.2, over=3),
    Guard(metric="clip_fraction", above=0.5, over=3),
    Guard(metric="effective_sample_share", below=0.5, over=3),
    Guard(metric="grad_norm_policy", rises_by="900%", over=3),
)
_CRITIC = (
    # EVPO, arXiv 2604.19485: below 0 a critic adds variance
    Guard(metric="explained_variance", below=0.0, over=10),
    Guard(metric="value_loss", rises_by="400%", over=5),
)
_GROUPS = (Guard(metric="uniform_group_share", above=0.95, over=5),)
# a batch's loss scatters, and near 0 every share of it is exceeded by chance: log 2 = 0.693 nats is what a coin loses
_STEPS = (Guard(metric="loss", rises_by=0.7, over=20),)

_OF_KIND: Mapping[str, tuple[Guard, ...]] = {
    "sft": _STEPS,
    "reward_model": _STEPS,
    # arXiv 2402.13228: the chosen responses may become unlikely while the margin grows
    "dpo": (*_STEPS, Guard(metric="chosen_nll", rises_by=1.0, over=20)),
    "value_pretraining": (Guard(metric="value_loss", rises_by="400%", over=5),),
    "best_of_n": _RESPONSES,
}


def default_guards(work: Training) -> tuple[Guard, ...]:
    """Return the guards of a stage that writes none; each only warns."""
    if not isinstance(work, PolicyOptimization):
        return (*_FINITE, *_OF_KIND.get(work.kind, ()))
    switches: Algorithm = work.algorithm
    critic = _CRITIC if switches.reads_critic else ()
    groups = _GROUPS if switches.samples_per_prompt > 1 else ()
    return (*_FINITE, *_POLICY, *_RESPONSES, *critic, *groups)


DEFAULT = " (default)"
"""After the words of a guard that the recipe does not write."""


def described_guards(work: Training) -> tuple[str, ...]:
    """Return the guards of a stage in words, those of the recipe first; ``off`` alone where the recipe has none looked at."""
    if work.guards == OFF:
        return (OFF,)
    own = len(work.guards or ())
    return tuple(f"{guard}{DEFAULT if number >= own else ''}" for number, guard in enumerate(guards_of(work)))


def guards_of(work: Training) -> tuple[Guard, ...]:
    """Return all guards of a stage: those that its recipe writes, then the defaults of the metrics that these do not name."""
    if work.guards == OFF:
        return ()
    own: tuple[Guard, ...] = work.guards or ()
    named = {guard.metric for guard in own}
    return (*own, *(guard for guard in default_guards(work) if guard.metric not in named))

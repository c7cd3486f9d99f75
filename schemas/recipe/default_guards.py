"""The default guards of stages. They only warn, so that they change no bit and no stage key.

Which of them a policy stage has follows from the switches of its algorithm, and so from its preset.
"""

from dataclasses import dataclass
from typing import Literal

from vantage.schemas.metric_names import INITIAL_AGREEMENT_LOW, UNREADABLE_SHARE
from vantage.schemas.recipe.guards import OFF, WATCH_FALLS, Guard
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import PolicyOptimization, WatchedRollouts
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization

FALLS_BORNE = 1.0
"""Falls measured in a row at which a watch does not act yet: a single one may be chance."""
OURS = "ours: beyond what healthy small runs reached (docs/log/training_and_critics.md)"
POLICY, VALUE, BEST, DISTILLED = "policy_optimization", "value_pretraining", "best_of_n", "distillation"
TRAINED = ("sft", "reward_model", "dpo", "kto", VALUE, POLICY, BEST, DISTILLED)

Need = Literal[
    "a critic",
    "a critic that learns",
    "groups",
    "a watch",
    "a watch that scores",
    "another sampler",
    "a loss in nats",
]


@dataclass(frozen=True)
class Default:
    """A guard, the kinds of stage that have it, and the origin of its bound."""

    guard: Guard
    kinds: tuple[str, ...]
    source: str
    needs: Need | None = None
    """Condition on the algorithm of a policy stage, or on the loss of a ``dpo`` stage; None: none."""


DEFAULTS: tuple[Default, ...] = (
    Default(Guard(metric="nonfinite_steps", above=0.0, over=1), TRAINED, "a healthy stage has none"),
    Default(
        Guard(metric="loss", rises_by=0.7, over=20), ("sft", "reward_model", "dpo"),
        "log 2 = 0.693 nats is the loss of a coin; a share of a loss near 0 is exceeded by chance", needs="a loss in nats",
    ),
    Default(
        Guard(metric="chosen_nll", rises_by=1.0, over=20), ("dpo",),
        "chosen responses may become unlikely while the margin grows (arXiv 2402.13228); the bound is ours",
    ),
    Default(
        Guard(metric="kl_to_reference_per_token", above=1.0, over=3), (POLICY,),
        "KL rises before the win rate falls (PPO-max, arXiv 2307.04964, fig. 4); the bound is ours",
    ),
    Default(
        Guard(metric="reference_nll", rises_by=0.05, over=3), (POLICY,),
        "perplexity under the reference rises with the collapse (PPO-max, arXiv 2307.04964, fig. 4); bound: docs/guard_trials",
    ),
    Default(
        Guard(metric="approx_kl", above=0.2, over=3), (POLICY,),
        "PPO's own penalty aims at 0.01 nats (arXiv 1707.06347 §4); twenty times as much is no small step",
    ),
    Default(
        Guard(metric="entropy", falls_by="90%", over=5), (POLICY,),
        "entropy collapses where exploration ends (DAPO, arXiv 2503.14476 §3.1); the bound is ours",
    ),
    Default(Guard(metric="entropy", rises_by=1.0, over=3), (POLICY,), OURS),
    Default(
        Guard(metric="response_length_mean", rises_by="50%", over=5), (POLICY, BEST),
        "length moves with the collapse (PPO-max, arXiv 2307.04964 §5.1); the bound is ours",
    ),
    Default(Guard(metric="response_length_mean", falls_by="50%", over=5), (POLICY, BEST), "as above"),
    Default(Guard(metric="truncated_share", rises_by=0.25, over=5), (POLICY, BEST, DISTILLED), OURS),
    Default(
        Guard(metric="repeated_trigrams", rises_by=0.25, over=3), (POLICY, BEST, DISTILLED),
        "seq-rep-n of loops (arXiv 1908.04319); the bound is ours",
    ),
    Default(
        Guard(metric="distinct_bigrams", falls_by="50%", over=3), (POLICY, BEST),
        "distinct-n of one text for all prompts (arXiv 1510.03055); the bound is ours",
    ),
    Default(Guard(metric="clip_fraction", above=0.5, over=3), (POLICY,), "most tokens have no gradient then"),
    Default(
        Guard(metric="effective_sample_share", below=0.5, over=3), (POLICY,), "half of the rollout has no weight then"
    ),
    Default(
        Guard(metric="importance_effective_share", below=0.3, over=3), (POLICY,),
        "the effective sample size warns before a collapse (arXiv 2602.17616); the bound is ours", needs="another sampler",
    ),
    Default(Guard(metric="grad_norm_policy", rises_by="900%", over=3), (POLICY,), OURS),
    Default(
        Guard(metric="explained_variance", below=0.01, over=5), (POLICY,),
        "below 0 a critic adds variance (EVPO, arXiv 2604.19485), and a blind one is at 0; the bound is ours", needs="a critic",
    ),
    Default(Guard(metric="value_loss", rises_by="400%", over=5), (POLICY,), OURS, needs="a critic that learns"),
    Default(Guard(metric="value_loss", rises_by="400%", over=5), (VALUE,), OURS),
    Default(
        Guard(metric="uniform_group_share", above=0.95, over=5), (POLICY,),
        "groups without contrast teach nothing (DAPO, arXiv 2503.14476 §3.2)", needs="groups",
    ),
    Default(
        Guard(metric="reward_disagreement", rises_by="200%", over=3), (POLICY,),
        "members of an ensemble differ most where they know least (arXiv 2310.02743); the bound is ours",
    ),
    Default(
        Guard(metric=UNREADABLE_SHARE, above=0.5, over=2), (VALUE, POLICY, BEST, DISTILLED),
        "most scores are the constant that the recipe gives for an unreadable answer then; the bound is ours",
    ),
    Default(
        Guard(metric="watch_lost", above=0.1, over=2), (POLICY, BEST, DISTILLED),
        "the judge's score fell by more than its 99.9 % interval and by a tenth, twice in a row; bound: docs/guard_trials", needs="a watch",
    ),
    Default(
        Guard(metric=INITIAL_AGREEMENT_LOW, below=0.5, over=1), (POLICY, BEST, DISTILLED),
        "0.5 is chance; trained by a reward at chance, the policy got worse in each of 18 trials (docs/guard_trials)",
        needs="a watch that scores",
    ),
)  # fmt: skip


def default_guards(work: Training) -> tuple[Guard, ...]:
    """Return the default guards of a stage; each only warns."""
    is_squared = isinstance(work, DirectPreferenceOptimization) and work.loss == "ipo"
    has: dict[Need | None, bool] = {None: True, "a loss in nats": not is_squared}
    if isinstance(work, PolicyOptimization):
        has |= {
            "a critic": work.algorithm.reads_critic,
            "a critic that learns": work.algorithm.trains_critic,
            "groups": work.algorithm.samples_per_prompt > 1,
            "another sampler": work.weighs_by_sampler,
        }
    if isinstance(work, WatchedRollouts):
        has |= {
            "a watch": work.watch is not None,
            "a watch that scores": work.watch is not None and work.watch.judge.kind != "model",
        }
    return tuple(
        default.guard for default in DEFAULTS if work.kind in default.kinds and has.get(default.needs, False)
    )


DEFAULT = " (default)"
"""Suffix of a guard's text if the recipe does not contain the guard."""


def described_guards(work: Training) -> tuple[str, ...]:
    """Return the guards of a stage in words, those of the recipe first; ``off`` alone if the recipe turns them off."""
    if work.guards == OFF:
        return (OFF,)
    own = len(own_guards(work))
    return tuple(f"{guard}{DEFAULT if number >= own else ''}" for number, guard in enumerate(guards_of(work)))


def own_guards(work: Training) -> tuple[Guard, ...]:
    """Return the guards in the recipe, and the one by which its watch acts."""
    written = () if work.guards == OFF else work.guards or ()
    watch = work.watch if isinstance(work, WatchedRollouts) else None
    if watch is None:
        return written
    return (Guard(metric=WATCH_FALLS, above=FALLS_BORNE, over=1, action=watch.on_fall), *written)


def guards_of(work: Training) -> tuple[Guard, ...]:
    """Return all guards of a stage: those in its recipe, then the defaults for metrics that these do not name."""
    if work.guards == OFF:
        return ()
    own = own_guards(work)
    named = {guard.metric for guard in own}
    return (*own, *(guard for guard in default_guards(work) if guard.metric not in named))

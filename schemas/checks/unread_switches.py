"""Find switches that a recipe sets but the algorithm does not read, because of its other switches."""

from collections.abc import Iterator

from vantage.schemas.recipe.algorithm import COLLECTED, GROUPED, Algorithm


def unread_switches(switches: Algorithm) -> Iterator[str]:
    """Yield ``switch: value is not read ...; remedy`` for each unread switch that differs from its preset's value."""
    preset = Algorithm(preset=switches.preset)
    for name, (why, remedy) in _unread(switches).items():
        value = getattr(switches, name)
        if value != getattr(preset, name):
            shown = (
                f"{value:g}" if isinstance(value, float) else str(value).lower() if value is True else value
            )
            yield f"{name}: {shown} is not read {why}; {remedy}, or leave {name} out"


def _unread(switches: Algorithm) -> dict[str, tuple[str, str]]:
    """Return unread switch → (reason, setting with which it is read)."""
    found: dict[str, tuple[str, str]] = {}
    advantage = switches.advantage
    if advantage != "gae":
        why = f"by advantage={advantage}, which has no critic"
        critic = (
            "lambda_policy",
            "lambda_value",
            "length_adaptive_alpha",
            "value_clip_range",
            "critic_ev_hysteresis",
        )
        found |= dict.fromkeys(critic, (why, "set advantage: gae"))
    elif switches.gae_horizon == 1:
        lambdas = ("lambda_policy", "lambda_value", "length_adaptive_alpha")
        found |= dict.fromkeys(lambdas, ("while gae_horizon is 1, a single step", "raise gae_horizon"))
    elif switches.length_adaptive_alpha is not None:
        found["lambda_policy"] = ("while length_adaptive_alpha is set", "set length_adaptive_alpha: null")
    if advantage == "gae" and switches.critic_ev_threshold is None:
        found["critic_ev_hysteresis"] = ("while the critic is not switched", "set critic_ev_threshold")
    if switches.reads_critic and not switches.trains_critic:
        frozen = ("lambda_value", "value_clip_range")
        found |= dict.fromkeys(frozen, ("while freeze_critic is all", "set freeze_critic: none"))
    if advantage != "optimal_value":
        found["optimal_value_beta"] = (f"by advantage={advantage}", "set advantage: optimal_value")
    if advantage != "tracked_mean":
        tracker = ("tracker_kl_half_life", "tracker_memory_low", "tracker_memory_high")
        found |= dict.fromkeys(tracker, (f"by advantage={advantage}", "set advantage: tracked_mean"))
    if advantage in (*GROUPED, *COLLECTED):
        found["gamma"] = (f"by advantage={advantage}, which compares whole responses", "set advantage: gae")
    if not switches.importance_ratio:
        clips = ("clip_range_low", "clip_range_high", "dual_clip", "ratio_mask", "ratio_mask_gradient")
        found |= dict.fromkeys(clips, ("without a ratio to clip", "set importance_ratio: true"))
        found["epoch_kl_target"] = ("while a rollout has one step", "set importance_ratio: true")
    elif switches.ratio_mask:
        found["dual_clip"] = ("while ratio_mask leaves out what it would clip", "set ratio_mask: false")
    else:
        found["ratio_mask_gradient"] = ("while no ratio is masked", "set ratio_mask: true")
    found |= _unread_losses(switches)
    if not switches.shared_trunk:
        found["value_coef"] = ("while the critic has an optimiser of its own", "set shared_trunk: true")
    if not switches.drop_uniform_groups:
        found["max_sampling_rounds"] = ("while no group is dropped", "set drop_uniform_groups: true")
    if not switches.positive_nll_coef:
        rules = ("positive_threshold", "positive_verifier")
        found |= dict.fromkeys(rules, ("while no response is imitated", "set positive_nll_coef"))
    elif switches.positive_verifier is not None:
        found["positive_threshold"] = ("while positive_verifier decides what is right", "remove that")
    if not switches.kl_coef:
        found["kl_kind"] = ("while the reward has no KL penalty", "set kl_coef")
    if switches.kl_target is None:
        found["kl_horizon"] = ("while kl_coef is fixed", "set kl_target")
    if not switches.kl_loss_coef:
        found["kl_loss_kind"] = ("while the loss has no KL to the reference", "set kl_loss_coef")
    if not switches.kl_penalty_coef:
        found["kl_penalty_kind"] = ("while the loss has no KL to the old policy", "set kl_penalty_coef")
    if switches.trust_region_kl is None:
        found["trust_region_halvings"] = ("while no step is undone", "set trust_region_kl")
    return found


def _unread_losses(switches: Algorithm) -> dict[str, tuple[str, str]]:
    """Return unread switches of bounds of the ratio, of selected tokens, and of the places of KL and entropy, with
    reason and remedy.
    """
    found: dict[str, tuple[str, str]] = {}
    if switches.surrogate != "soft_gate":
        gates = ("soft_gate_positive", "soft_gate_negative")
        found |= dict.fromkeys(gates, (f"by surrogate={switches.surrogate}", "set surrogate: soft_gate"))
    else:
        clips = ("clip_range_low", "clip_range_high")
        found |= dict.fromkeys(clips, ("by a soft gate, which clips nothing", "set surrogate: clipped"))
    if switches.surrogate != "clipped":
        found["dual_clip"] = (f"by surrogate={switches.surrogate}", "set surrogate: clipped")
    if switches.covariance == "none":
        found["covariance_share"] = ("while no token is selected", "set covariance")
    if switches.covariance != "clip":
        bounds = ("covariance_low", "covariance_high")
        found |= dict.fromkeys(bounds, (f"by covariance={switches.covariance}", "set covariance: clip"))
    if switches.covariance != "kl":
        found["covariance_kl_coef"] = (f"by covariance={switches.covariance}", "set covariance: kl")
    if not switches.kl_loss_coef:
        found["kl_loss_gradient"] = ("while the loss has no KL to the reference", "set kl_loss_coef")
    if not switches.kl_coef:
        found["kl_credit"] = ("while the reward has no KL penalty", "set kl_coef")
    elif switches.advantage not in GROUPED:
        found["kl_credit"] = (f"by advantage={switches.advantage}", "use an advantage that compares a group")
    if switches.entropy_target is None:
        steps = ("entropy_step", "entropy_coef_max")
        found |= dict.fromkeys(steps, ("while entropy_coef is fixed", "set entropy_target"))
    return found

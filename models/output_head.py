"""Compute a causal language model's logits from its last hidden state."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class OutputHead:
    """logits = cap · tanh(scale · (W·h + b) / cap); without a cap, scale · (W·h + b)."""

    weight: Tensor
    """(V, H)."""
    bias: Tensor | None
    """(V,)."""
    scale: float
    softcap: float | None


@dataclass(frozen=True, eq=False)
class LanguageHead:
    """The output head of the policy from which a reward model has its trunk."""

    frozen: OutputHead
    """The head's weights when the model was loaded."""
    is_tied: bool
    """Whether its matrix is the trunk's embeddings, which train."""

    def on(self, backbone: PreTrainedModel) -> OutputHead:
        """Return the head with the trunk's present weights; call this within a forward pass that reads the trunk's weights."""
        if not self.is_tied:
            return self.frozen
        weight = backbone.get_input_embeddings().weight
        assert isinstance(weight, Tensor), "a table"
        return replace(self.frozen, weight=weight)


def output_head(model: PreTrainedModel) -> OutputHead:
    """Return the head of a causal language model, including soft-capping (Gemma) and scaling (Granite, Cohere).

    Raises:
        ValueError: the model has no linear head over its vocabulary.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear output head but {type(linear).__name__}; its log-probabilities "
            "cannot be computed in chunks"
        )
    config = model.config.get_text_config()
    return OutputHead(
        linear.weight, linear.bias, _scale(config), getattr(config, "final_logit_softcapping", None)
    )


def _scale(config: object) -> float:
    model_type = getattr(config, "model_type", "")
    if model_type.startswith("granite"):
        return 1.0 / float(getattr(config, "logits_scaling", 1.0))
    if model_type.startswith("cohere"):
        return float(getattr(config, "logit_scale", 1.0))
    return 1.0


def trunk(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model below its output head."""
    body: PreTrainedModel = model.base_model  # type: ignore[assignment]  # transformers types it as any Module
    return body


@torch.no_grad()
def check_output_head(model: PreTrainedModel) -> None:
    """Compare logits from `output_head` with the model's own logits, on four tokens.

    Architectures transform logits in different ways. This finds one that this module does not know when the model is
    loaded, not as a policy ratio that is wrong from the first step.

    Raises:
        ValueError: the logits differ, or a layer keeps no key-value cache for sampling.
    """
    head = output_head(model)
    input_ids = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
    output = model(input_ids=input_ids, use_cache=True)
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ValueError(
            f"{type(model).__name__} keeps no key-value cache, which sampling needs; use a transformer"
        )
    # transformers keeps a state for linear attention and convolutions, from which no row can be removed
    kept = [hasattr(layer, "batch_select_indices") for layer in getattr(cache, "layers", ())]
    if not all(kept):
        raise ValueError(
            f"{type(model).__name__} keeps no keys and values in {kept.count(False)} of {len(kept)} layers (linear attention "
            "or convolutions), and sampling needs them; use a model that has attention in every layer"
        )
    expected = output.logits.float()
    hidden = trunk(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    logits = nn.functional.linear(hidden, head.weight, head.bias).float() * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    # One part in 100 leaves room for bfloat16, but not for a missing factor or cap
    if logits.shape != expected.shape or (logits - expected).abs().max() > 0.01 * expected.abs().max() + 1e-5:
        raise ValueError(
            f"{type(model).__name__} changes its logits in a way that is not known here; "
            "use a model whose head is linear, or one that is soft-capped or scaled like Gemma, Granite or Cohere"
        )

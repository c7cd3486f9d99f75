"""The shape of a decoder-only transformer, on which its memory, FLOPs and bytes depend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vantage.models.model_config import ModelConfig


@dataclass(frozen=True)
class Family:
    """Differences between the layers of one architecture and a Llama's."""

    is_gated: bool = True
    """Whether the feed-forward part has three matrices instead of two."""
    norm_vectors: int = 1
    """Vectors of a norm: 1 for RMSNorm, 2 for LayerNorm."""
    qkv_bias: bool = False
    other_biases: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised over the head dimension."""
    learned_positions: bool = False
    fused_qkv: bool = False
    """Whether one matrix makes queries, keys and values."""
    tied: bool = False
    """Whether the head is tied to the embeddings if ``tie_word_embeddings`` is not given."""


LLAMA = Family()
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(tied=True),
    "gpt2": Family(
        is_gated=False,
        norm_vectors=2,
        qkv_bias=True,
        other_biases=True,
        fused_qkv=True,
        learned_positions=True,
        tied=True,
    ),
    "gpt_neox": Family(is_gated=False, norm_vectors=2, qkv_bias=True, other_biases=True, fused_qkv=True),
}
"""``model_type`` → its family. Any other type is counted as a Llama, and the estimate names this."""

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer; the letters are those of the formulas."""

    family: Family
    hidden_size: int
    """h in the formulas."""
    num_layers: int
    """L in the formulas."""
    num_heads: int
    """a in the formulas."""
    num_kv_heads: int
    head_dim: int
    """d in the formulas."""
    intermediate_size: int
    """i in the formulas."""
    vocab_size: int
    """V in the formulas."""
    num_positions: int
    """Rows of the table of positions, in a family that learns one."""
    has_tied_head: bool
    counted_weights: int | None = None
    """Number of weights in the model's files; None: the formulas here count them."""
    note: str = ""
    """Remark on the count, for the reader of the estimate."""

    @property
    def query_width(self) -> int:
        """a·d."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer's matrices: 2·h·a·d + 2·h·kv + (3 or 2)·h·i."""
        feed_forward = (3 if self.family.is_gated else 2) * self.intermediate_size
        return self.hidden_size * (2 * self.query_width + 2 * self.kv_width + feed_forward)

    @property
    def layer_weights(self) -> int:
        """All weights of one layer."""
        family = self.family
        vectors = 2 * family.norm_vectors * self.hidden_size
        vectors += (self.query_width + 2 * self.kv_width) * family.qkv_bias
        vectors += (2 * self.hidden_size + self.intermediate_size) * family.other_biases
        vectors += 2 * self.head_dim * family.qk_norm
        return self.layer_matrices + vectors

    @property
    def linear_layers(self) -> dict[str, int]:
        """Name → rows + columns, for the matrices of one layer."""
        h, q, kv, i = self.hidden_size, self.query_width, self.kv_width, self.intermediate_size
        if self.family.fused_qkv:
            return {"attention": h + q + 2 * kv, "output": q + h, "up": h + i, "down": i + h}
        found = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
        gate = {"gate_proj": h + i} if self.family.is_gated else {}
        return {**found, **gate, "up_proj": h + i, "down_proj": i + h}

    @property
    def head_matrix(self) -> int:
        """V·h: weights of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def trunk_weights(self) -> int:
        """Weights of embeddings, layers and the last norm: the part of the policy in a reward or value model."""
        if self.counted_weights is not None:
            return self.counted_weights - (0 if self.has_tied_head else self.head_matrix)
        positions = self.num_positions * self.hidden_size if self.family.learned_positions else 0
        ends = self.head_matrix + positions + self.family.norm_vectors * self.hidden_size
        return ends + self.num_layers * self.layer_weights

    @property
    def weights(self) -> int:
        """N: all weights of the causal language model."""
        return self.trunk_weights + (0 if self.has_tied_head else self.head_matrix)


def model_shape(config: ModelConfig) -> ModelShape:
    """Return the shape that a configuration describes.

    Raises:
        ValueError: a field is missing, or the model is a mixture of experts.
    """
    fields = config.fields
    experts = next((name for name in _EXPERTS if fields.get(name)), None)
    if experts is not None:
        raise ValueError(
            f"model: {experts}={fields[experts]} is a mixture of experts, whose tokens use only a part of the weights; "
            "the formulas hold for dense models only"
        )
    kind = str(fields.get("model_type", "llama"))
    family = FAMILIES.get(kind, LLAMA)
    sizes = {ours: _whole(fields, *names) for ours, names in _NAMES.items()}
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    intermediate = fields.get("intermediate_size") or fields.get("n_inner") or 4 * hidden
    return ModelShape(
        **sizes,
        family=family,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or hidden // heads),
        intermediate_size=int(intermediate),
        num_positions=int(fields.get("max_position_embeddings") or fields.get("n_positions") or 0),
        has_tied_head=bool(fields.get("tie_word_embeddings", family.tied)),
        counted_weights=config.num_weights,
        note="" if kind in FAMILIES else f"model_type={kind} is counted as a Llama",
    )


def _whole(fields: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if type(fields.get(name)) is int and fields[name] > 0:
            return int(fields[name])
    raise ValueError(f"model: its configuration has no {' or '.join(names)}; the estimate needs it")

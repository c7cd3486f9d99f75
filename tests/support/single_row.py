"""Sample one response from a small Llama in numpy, token by token, for the servers of tests: for one narrow row, torch and transformers
take six times as long.

Nothing here is the product's but the random numbers: its own sampler draws the same tokens with a seed, and computes the same
log-probabilities in another way.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Response:
    """A response: its ids, the log-probability of each, and whether it ended before it was cut off."""

    ids: list[int]
    logprobs: list[float]
    ended: bool


def respond(
    model: Any,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    eos_token_ids: Collection[int],
    seed: int,
) -> Response:
    """Return a response drawn from softmax(logits / temperature), or of the likeliest tokens where the temperature is 0."""
    llama = _Llama(model)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(max_new_tokens, generator=generator, dtype=torch.float64).tolist()
    ids: list[int] = []
    logprobs: list[float] = []
    read = prompt
    while len(ids) < max_new_tokens and not (ids and ids[-1] in eos_token_ids):
        logits = llama.read(read) / np.float32(temperature or 1.0)
        shifted = logits - logits.max()
        distribution = shifted - np.log(np.exp(shifted).sum())
        if temperature == 0:
            token = int(logits.argmax())
        else:
            cumulative = np.exp(distribution.astype(np.float64)).cumsum()
            token = int(np.searchsorted(cumulative, uniform[len(ids)] * cumulative[-1], side="right"))
        ids.append(token)
        logprobs.append(float(distribution[token]))
        read = [token]
    return Response(ids, logprobs, ids[-1] in eos_token_ids)


class _Llama:
    """The forward pass of a Llama (Touvron et al. 2023, arXiv 2302.13971) in float32, with its keys and values kept."""

    def __init__(self, model: Any) -> None:
        config = model.config
        assert config.model_type == "llama" and config.hidden_act == "silu" and not config.attention_bias
        assert config.rope_parameters["rope_type"] == "default"
        weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
        self._embeddings = weights["model.embed_tokens.weight"]
        self._head = weights.get("lm_head.weight", self._embeddings)
        self._norm, self._eps = weights["model.norm.weight"], np.float32(config.rms_norm_eps)
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        width = config.head_dim
        self._frequencies = config.rope_parameters["rope_theta"] ** (-np.arange(0, width, 2) / width)
        self._layers = [
            {
                name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight").rpartition(".")[2]: weight
                for name, weight in weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            for layer in range(config.num_hidden_layers)
        ]
        self._kept: list[tuple[Array, Array] | None] = [None] * len(self._layers)
        self._length = 0

    def read(self, ids: list[int]) -> Array:
        """Read further ids (T,); return the logits (V,) after the last."""
        states = self._embeddings[ids]
        positions = np.arange(self._length, self._length + len(ids))
        self._length += len(ids)
        angles = positions[:, None] * np.concatenate([self._frequencies, self._frequencies])
        turn = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        for number, layer in enumerate(self._layers):
            states = states + self._attend(number, self._scaled(states, layer["input_layernorm"]), turn)
            inner = self._scaled(states, layer["post_attention_layernorm"])
            gate = inner @ layer["gate_proj"].T
            states = (
                states + (gate / (1 + np.exp(-gate)) * (inner @ layer["up_proj"].T)) @ layer["down_proj"].T
            )
        logits: Array = self._scaled(states[-1:], self._norm)[0] @ self._head.T
        return logits

    def _scaled(self, states: Array, weight: Array) -> Array:
        scaled: Array = states / np.sqrt((states * states).mean(axis=-1, keepdims=True) + self._eps) * weight
        return scaled

    def _attend(self, number: int, states: Array, turn: tuple[Array, Array]) -> Array:
        layer, count = self._layers[number], len(states)
        queries, keys, values = (
            (states @ layer[name].T).reshape(count, heads, -1).swapaxes(0, 1)
            for name, heads in (("q_proj", self._heads), ("k_proj", self._groups), ("v_proj", self._groups))
        )
        queries, keys = _turned(queries, turn), _turned(keys, turn)
        if (kept := self._kept[number]) is not None:
            keys = np.concatenate([kept[0], keys], axis=1)
            values = np.concatenate([kept[1], values], axis=1)
        self._kept[number] = keys, values
        shared = self._heads // self._groups
        grouped = queries.reshape(self._groups, shared * count, -1)
        scores = grouped @ keys.swapaxes(1, 2) / np.float32(np.sqrt(queries.shape[-1]))
        if count > 1:  # a token sees those up to itself
            length = keys.shape[1]
            sees = np.arange(length) <= np.arange(length - count, length)[:, None]
            scores = np.where(np.tile(sees, (shared, 1)), scores, np.float32(-np.inf))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = (shares @ values).reshape(self._heads, count, -1).swapaxes(0, 1).reshape(count, -1)
        attended: Array = mixed @ layer["o_proj"].T
        return attended


def _turned(states: Array, turn: tuple[Array, Array]) -> Array:
    """Turn each pair of numbers, half a head apart, by its position's angle (Su et al. 2021, arXiv 2104.09864)."""
    half = states.shape[-1] // 2
    turned = np.concatenate([-states[..., half:], states[..., :half]], axis=-1)
    found: Array = states * turn[0] + turned * turn[1]
    return found

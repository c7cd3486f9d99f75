"""Compare checksums of the weights that a vLLM was given with those that it computes of the weights that it holds.

Log-probabilities of fixed rows show that an update has arrived only up to rounding, which hides small updates in
bfloat16. Checksums show every bit. vLLM 0.32 computes the sha256 of each of its parameters
(``compute_weight_checksums``). It joins some matrices, and pads the rows of embeddings, so the weights are hashed here
in the form in which vLLM would hold them. If the weights are large, each update compares another part of them.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.training.optimization import Precision

log = logging.getLogger(__name__)

METHOD = "compute_weight_checksums"
"""Method of vLLM's workers that returns name → sha256; names begin with the worker's place, which ends with a colon."""

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layer that vLLM holds → the policy's layers that it joins, in order."""

PADDED_TO = 64
"""vLLM fills embeddings with rows of zeros up to a multiple of this."""

MOST_BYTES = 2**30
"""Weights up to this size are compared after each update if the recipe does not decide: hashing takes about a second,
here and in vLLM."""

MOST_BYTES_AT_FIRST = 32 * 2**30
"""Weights up to this size are compared once, and in parts after that, if the recipe does not decide."""


class GivenWeights:
    """Hashes weights while they are handed over: all of them, or the base beneath adapters."""

    def __init__(self, dtype: torch.dtype, *, only: Set[str] | None = None) -> None:
        """Begin without weights.

        Args:
            dtype: type in which vLLM holds the weights.
            only: vLLM's parameters that are compared; None: all.
        """
        self._dtype, self._only = dtype, only
        self.sizes: dict[str, int] = {}
        """vLLM's parameter → bytes of its weights, in the order of the weights."""
        self._right: dict[str, set[str]] = {}
        self._joined: dict[str, tuple[Any, list[str]]] = {}

    def add(self, name: str, weight: Tensor) -> None:
        """Hash a whole weight. The parts of a joined weight must come in its order; otherwise it is not compared."""
        module, _, last = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        wholes = [f"{parent}.{whole}.{last}" for whole, parts in JOINED.items() if layer in parts]
        wanted = [each for each in (name, *wholes) if self._only is None or each in self._only]
        if not wanted:
            return
        held = weight.detach().to(self._dtype).cpu().contiguous()
        content = held.view(-1).view(torch.uint8).numpy().data
        for whole in wanted:
            self.sizes[whole] = self.sizes.get(whole, 0) + held.nbytes
            if whole != name:
                joined, seen = self._joined.setdefault(whole, (hashlib.sha256(), []))
                joined.update(content)
                seen.append(layer)
                continue
            hashed = hashlib.sha256(content)
            self._right[name] = {hashed.hexdigest()}
            missing = -len(held) % PADDED_TO if held.ndim == 2 else 0
            if missing:
                hashed.update(bytes(missing * held[0].nbytes))
                self._right[name].add(hashed.hexdigest())

    def right(self) -> dict[str, set[str]]:
        """Return vLLM's parameter → right checksums; a padded parameter has two."""
        joined = {
            name: {hashed.hexdigest()}
            for name, (hashed, seen) in self._joined.items()
            if tuple(seen) == JOINED[name.split(".")[-2]]
        }
        return self._right | joined


class Checksums:
    """Compares the checksums of one policy's vLLMs with the right ones.

    Some parameters never agree: a CPU's packed matrices, and layouts that are not known here. The first comparison of a
    vLLM, after the proof by log-probabilities, covers all weights and shows which parameters agree; from then on these
    must agree. If the weights are too large to compare after each update, later comparisons cover parts in turn.
    """

    def __init__(self, chosen: bool | None, precision: Precision) -> None:
        """Begin without weights. ``chosen``: ``rollout.checksums``; None: the size of the weights decides."""
        self._chosen, self._dtype = chosen, cast(torch.dtype, getattr(torch, precision))
        self._given: GivenWeights | None = None
        self._part: tuple[str, ...] | None = None
        """The parameters of vLLM that are compared now; None: all."""
        self._turn = 0
        self._computes_none = False
        """Whether a vLLM was asked and computes no checksums."""
        self._sizes: dict[str, int] = {}
        self._known: dict[str, frozenset[str]] = {}
        self._compared: set[str] = set()

    def begin(
        self, weights: Iterable[Tensor], places: Iterable[str] = ("",), *, is_first: bool = False
    ) -> GivenWeights | None:
        """Return the hasher for the weights that are handed over next; None: they are not compared.

        Args:
            places: places of the vLLMs that get the weights; a new vLLM is compared as a whole.
            is_first: whether the vLLM has had no weights since its start; then it is compared as a whole, too.
        """
        size = sum(weight.numel() for weight in weights) * self._dtype.itemsize
        known = frozenset().union(*self._known.values()) if self._known else None
        self._given, self._part = None, None
        self._compared.clear()
        if self._chosen is not None:
            is_compared, in_parts = self._chosen, False
        else:
            in_parts = size > MOST_BYTES
            is_in_vain = self._computes_none or (known is not None and not known)
            is_compared = size <= MOST_BYTES_AT_FIRST and not (in_parts and is_in_vain)
        if is_compared:
            if known and in_parts and not is_first and all(place in self._known for place in places):
                self._part = self._next_part(known)
            self._given = GivenWeights(self._dtype, only=known if self._part is None else {*self._part})
        return self._given

    def _next_part(self, known: Set[str]) -> tuple[str, ...]:
        """Return the next parameters to compare: as many in order as fit into ``MOST_BYTES``, at least one."""
        parts: list[list[str]] = []
        taken = 0
        for name, size in self._sizes.items():
            if name not in known:
                continue
            if not parts or taken + size > MOST_BYTES:
                parts.append([])
                taken = 0
            parts[-1].append(name)
            taken += size
        self._turn += 1
        return tuple(parts[(self._turn - 1) % len(parts)])

    def compare(self, place: str, ask: Callable[[Sequence[str] | None], Mapping[str, str] | None]) -> None:
        """Compare the checksums of the vLLM at a place, once after each ``begin``.

        Args:
            ask: returns the checksums of the named parameters, or of all without names; None: this version of vLLM
                computes none. Not called if none are compared.

        Raises:
            WeightsDiffer: a checksum that agreed before differs.
        """
        if self._given is None or place in self._compared:
            return
        if self._part is not None and place not in self._known:
            return  # never compared as a whole, so it is not known which parameters have another layout
        if (held := ask(self._part)) is None:
            self._computes_none = True
            return
        self._compared.add(place)
        right = self._given.right()
        agreeing = frozenset(name for name, each in held.items() if each in right.get(name, ()))
        if self._part is None:
            self._sizes = self._sizes or self._given.sizes
            known = self._known.setdefault(place, agreeing)
        else:
            known = self._known[place].intersection(self._part)
        if differing := sorted(known - agreeing):
            raise WeightsDiffer(
                f"vLLM does not hold the policy's weights: the sha256 of {len(differing)} of the {len(known)} that agreed before differ, the first that "
                f"of {differing[0]}; nothing was sampled; run the same command again; if the error comes back, use another version of vllm, or "
                "rollout.engine: loop"
            )
        log.info("the checksums of %d of %d parameters of vLLM agree%s", len(agreeing), len(held), place)


def by_parameter(of_workers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return parameter → checksum, without parameters of which workers hold different parts."""
    found: dict[str, set[str]] = {}
    for checksums in of_workers:
        for name, checksum in checksums.items():
            # the name of a layer with an adapter
            plain = name.rpartition(":")[2].replace(".base_layer.", ".")
            found.setdefault(plain, set()).add(checksum)
    return {name: each.pop() for name, each in found.items() if len(each) == 1}

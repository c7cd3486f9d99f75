"""Read the hidden states of a batch's tokens, in any layout of its pass."""

from torch import Tensor
from transformers import PreTrainedModel

from vantage.models.parts import Parts, read_parts
from vantage.models.pass_counts import count_pass
from vantage.models.sequences import Packing, Sequences


def token_states(trunk: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return last hidden states (S, C, H) of a trunk; token p of sequence s is at ``sequences.places(s, p)``."""
    layout = sequences.layout
    if isinstance(layout, Parts):
        return read_parts(trunk, layout)
    inputs = {"input_ids": sequences.input_ids, "attention_mask": sequences.attention_mask}
    if isinstance(layout, Packing):
        inputs = {"input_ids": layout.input_ids, "position_ids": layout.position_ids}
    count_pass(inputs["input_ids"].numel(), sequences.attention_mask.sum())
    hidden: Tensor = trunk(**inputs, use_cache=False).last_hidden_state
    return hidden

"""Measure the form of a rollout's responses, independent of their scores: lengths and repetition."""

import torch

from vantage.algorithms.response_statistics import distinct_bigrams, repeated_trigrams
from vantage.models.sequences import Sequences
from vantage.schemas.metric_names import LENGTH_PERCENTILES


def response_shape(responses: Sequences) -> dict[str, float]:
    """Return the metrics of ``RESPONSE_SHAPE``, without those for which every response is too short."""
    lengths = responses.lengths.detach().cpu().double()
    shares = torch.tensor([percent / 100 for percent in LENGTH_PERCENTILES], dtype=torch.float64)
    quantiles = torch.quantile(lengths, shares, interpolation="lower").tolist()
    repeated = repeated_trigrams(responses.response_ids, responses.response_mask).nanmean().item()
    distinct = distinct_bigrams(responses.response_ids, responses.response_mask)
    measured = {
        **{
            f"response_length_p{percent}": each
            for percent, each in zip(LENGTH_PERCENTILES, quantiles, strict=True)
        },
        "repeated_trigrams": repeated,
        "distinct_bigrams": distinct,
    }
    return {name: value for name, value in measured.items() if value == value}

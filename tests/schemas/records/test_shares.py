"""Metrics that are shares by their description have the interval of a share."""

import re

from vantage.schemas.kinds import KINDS
from vantage.schemas.records.metrics import estimated_metric_names
from vantage.schemas.records.uncertainty import SHARES

_SAYS_A_SHARE = re.compile(r"accuracy|win_rate|tied_pairs|pass_at_\d+|truncated_share|disagreement")
_IS_NO_MEAN = re.compile(r"_(gain|difference)$|length_controlled")
"""Differences have intervals of their own, and a length-controlled rate is fitted."""


def test_every_estimate_that_says_a_share_is_one_and_no_other_is() -> None:
    estimated = frozenset().union(*(estimated_metric_names(kind) for kind in KINDS))
    said = {name for name in estimated if _SAYS_A_SHARE.search(name) and not _IS_NO_MEAN.search(name)}
    assert said == SHARES
    assert len(said) > 40

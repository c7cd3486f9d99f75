"""The share of a teacher's lead that a student has gained, with its interval over prompts."""

import torch
from torch import Tensor

from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.uncertainty import Estimate
from vantage.schemas.records.interval_formulas import fieller, student
from vantage.tasks.training.resampling import CONFIDENCES


def lead_share(after: Tensor, before: Tensor, teacher: Tensor, clusters: Tensor) -> Estimate:
    """Return (mean after − mean before) / (mean teacher − mean before), with Fieller's intervals over prompts.

    All (N,): row i of each is a score of the same prompt; ``clusters`` are the rows' prompts, integers. With
    g = Σ(after − before)/N, l = Σ(teacher − before)/N, and u, v the differences of a prompt's sums over its m rows from
    m·g, m·l:

        variance of g = n/(n − 1) · Σ u² / N², of l with v², covariance with u·v (Cochran, 1977, eq. 6.10, prompts as units)

    The standard error is the linearised one of a ratio. NaN, without error and intervals, if the teacher has no lead.

    Raises:
        ValueError: there are no rows.
    """
    rows = len(after)
    index, sizes = index_of_groups(clusters.cpu(), rows)
    n = len(sizes)
    both = torch.stack(
        (after.cpu().double() - before.cpu().double(), teacher.cpu().double() - before.cpu().double())
    )
    gain, lead = both.mean(dim=1).tolist()
    nothing = Estimate(float("nan"), float("nan"), num_clusters=n, num_rows=rows)
    if not lead > 0:
        return nothing
    if n < 2:
        return Estimate(gain / lead, float("nan"), num_clusters=n, num_rows=rows)
    sums = torch.zeros(2, n, dtype=torch.float64).index_add(1, index, both)
    apart = sums - torch.tensor([[gain], [lead]], dtype=torch.float64) * sizes
    (of_gain, covariance), (_, of_lead) = (apart @ apart.T * n / (n - 1) / rows**2).tolist()
    share = gain / lead
    squared_error = of_gain - 2 * share * covariance + share**2 * of_lead
    ends = (
        (confidence, fieller(gain, lead, (of_gain, of_lead), covariance, student(confidence, n - 1)))
        for confidence in CONFIDENCES
    )
    return Estimate(
        value=share,
        standard_error=max(squared_error, 0.0) ** 0.5 / lead,
        num_clusters=n,
        num_rows=rows,
        intervals=tuple((confidence, *found) for confidence, found in ends if found is not None),
    )

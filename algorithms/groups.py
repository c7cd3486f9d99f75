"""Number the groups of rows that answer the same prompt."""

import torch
from torch import Tensor

from vantage.algorithms.masking import check_shape


def index_of_groups(group_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Number the groups from 0 on; returns each row's group (B,), and the number of rows of each group (G,).

    `group_ids` (B,) holds integers of any value in any order; groups may differ in size.

    Raises TypeError for ids that are not integers, ValueError unless there is one id for each of `num_rows`.
    """
    if group_ids.dtype.is_floating_point or group_ids.dtype.is_complex or group_ids.dtype == torch.bool:
        raise TypeError(
            f"group_ids has dtype {group_ids.dtype}; it must be an integer type: the number of a row's prompt"
        )
    check_shape("group_ids", group_ids, (num_rows,))
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return index, sizes

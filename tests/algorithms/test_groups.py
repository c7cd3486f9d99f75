import pytest
import torch

from vantage.algorithms.groups import index_of_groups


def test_groups_of_any_ids_in_any_order_by_hand():
    # Sorted, the ids are −3, 7, 9·10¹²: groups 0, 1 and 2.
    index, sizes = index_of_groups(torch.tensor([7, -3, 9 * 10**12, 7, 7]), 5)
    assert index.tolist() == [1, 0, 2, 1, 1]
    assert sizes.tolist() == [1, 3, 1]


def test_no_rows_are_no_groups():
    index, sizes = index_of_groups(torch.zeros(0, dtype=torch.int32), 0)
    assert index.shape == sizes.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_ids_that_are_no_integers_are_refused(dtype):
    with pytest.raises(TypeError, match=f"group_ids has dtype {dtype}; it must be an integer type"):
        index_of_groups(torch.zeros(2, dtype=dtype), 2)


def test_one_id_for_each_row():
    with pytest.raises(ValueError, match=r"group_ids has shape \(2,\); it must be \(3,\)"):
        index_of_groups(torch.zeros(2, dtype=torch.int64), 3)

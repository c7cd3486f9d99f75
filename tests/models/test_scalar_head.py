import torch
from torch import nn

from vantage.models.scalar_head import read_scalars


def test_a_scalar_is_read_at_every_place_in_float32_whatever_the_trunk_computes_in() -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 1)
    hidden = torch.randn(2, 3, 4).bfloat16()
    expected = (hidden.double() * head.weight.double()[0]).sum(-1) + head.bias.double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = read_scalars(hidden, head)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)

import pytest
import torch

from vantage.estimates.memory import CHUNK_LOGITS, CHUNK_LOGITS_OF_GPU
from vantage.models.chunked_logits import CHUNK_ELEMENTS, default_chunk_tokens, logits_and_slope
from vantage.models.output_head import OutputHead


def test_a_chunk_holds_so_many_logits_and_at_least_one_token() -> None:
    def head(vocabulary: int) -> OutputHead:
        return OutputHead(torch.empty(vocabulary, 1, device="meta"), None, scale=1.0, softcap=None)

    assert default_chunk_tokens(head(2**17)) == 64
    assert default_chunk_tokens(head(CHUNK_ELEMENTS["cpu"] + 1)) == 1


def test_a_gpu_computes_more_at_once_and_the_estimate_counts_it() -> None:
    assert CHUNK_ELEMENTS["cuda"] == 8 * CHUNK_ELEMENTS["cpu"]
    assert {"cpu": CHUNK_LOGITS, "cuda": CHUNK_LOGITS_OF_GPU} == CHUNK_ELEMENTS


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_the_slope_is_the_derivative_of_the_logits(softcap: float | None) -> None:
    torch.manual_seed(0)
    raw = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    head = OutputHead(torch.eye(3, dtype=torch.float64), None, scale=1.3, softcap=softcap)
    z = raw * 1.3 if softcap is None else torch.tanh(raw * 1.3 / softcap) * softcap
    (expected_slope,) = torch.autograd.grad((z / 0.7).sum(), raw)
    logits, slope = logits_and_slope(raw.detach(), head, 0.7)
    torch.testing.assert_close(logits, (z / 0.7).detach())
    torch.testing.assert_close(torch.as_tensor(slope).double().expand(4, 3), expected_slope)

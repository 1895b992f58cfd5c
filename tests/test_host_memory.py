"""Zeroed memory for states, in huge pages where it is large."""

import mmap
import pickle

import pytest
import torch

from graphfsdp.optim import FusedAdam
from graphfsdp.optim.host_memory import zeros_flat

LARGE = 5 * 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 3, LARGE])
def test_memory_is_zeroed_aligned_and_can_be_written(dtype: torch.dtype, numel: int) -> None:
    found = zeros_flat(numel, dtype, torch.device("cpu"))
    assert (found.shape, found.dtype) == ((numel,), dtype)
    assert not found.view(torch.uint8).any()
    if numel:
        assert found.data_ptr() % 16 == 0
        found[-1] = 1
        assert found.float().sum() == 1


@pytest.mark.parametrize("lacks", ["the advice", "huge pages"])
def test_without_huge_pages_memory_is_torch_s(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "the advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    assert not zeros_flat(LARGE, torch.float32, torch.device("cpu")).any()


def test_large_states_step_and_are_copied_as_small_ones() -> None:
    param = torch.nn.Parameter(torch.randn(1200, 1000))
    rows = [torch.nn.Parameter(part.clone()) for part in param.detach().split(300)]
    whole, cut = FusedAdam([param], lr=0.1), FusedAdam(rows, lr=0.1)
    for _ in range(3):
        param.grad = torch.randn_like(param)
        for row, grad in zip(rows, param.grad.split(300), strict=True):
            row.grad = grad
        whole.step()
        cut.step()
    assert torch.equal(param, torch.cat([row.detach() for row in rows]))
    state = pickle.loads(pickle.dumps(whole.state_dict()))["state"][0]
    assert torch.equal(state["exp_avg"], whole.state[param]["exp_avg"])

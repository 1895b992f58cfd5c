"""The counts of bytes in the table of docs/fused_adam.md."""

import pytest
import torch

from benchmarks import adam_table
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.fused.settings import bytes_per_param


@pytest.mark.parametrize("name", adam_table.CASES)
def test_bytes_are_those_of_the_tensors_that_a_step_touches(name: str) -> None:
    case = adam_table.CASES[name]
    param = torch.nn.Parameter(torch.zeros((2, 256), dtype=case.param))
    optimizer = FusedAdam([param], use_decoupled_grad=True, **case.settings)
    param.decoupled_grad = torch.ones_like(param, dtype=case.grad)  # type: ignore[attr-defined]
    optimizer.step()
    state = [value for key, value in optimizer.state[param].items() if key != "step"]
    main = optimizer.state[param].get("master_param")
    written = sum(value.nbytes for value in state) + param.nbytes
    read = written + param.numel() * case.grad.itemsize
    if main is not None and main.dtype == torch.float32:
        read -= param.nbytes
    expected = bytes_per_param(optimizer.settings, case.param, case.grad) * param.numel()
    assert expected == read + written

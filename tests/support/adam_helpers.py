"""Parameters, gradients and paths of a step for the tests of FusedAdam."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphfsdp.optim import Muon
from graphfsdp.optim.fused import kernel, plan
from graphfsdp.optim.fused.step import as_kernel, run_cuda
from triton_helpers import use_interpreter

SHAPES = [(20, 10), (10,), (3, 4, 5), (0, 4), ()]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(nn.functional.gelu(self.first(x)))
        return hidden.float().square().mean()


def loss_in_its_dtype(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x.to(next(model.parameters()).dtype))
    return loss


def make_groups(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    return list(groups)


def make_muon(params: Iterable[nn.Parameter], lr: float) -> Muon:
    """Return one that takes matrices, and the steps of AdamW for all the rest that is trained."""
    trained = [param for param in params if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in trained if (param.dim() == 2) == uses], "use_muon": uses}
        for uses in (True, False)
    ]
    return Muon(groups, lr=lr)


def make_params(
    shapes: list[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes or SHAPES]


def copies_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def make_twins(
    shapes: list[tuple[int, ...]] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = make_params(shapes, device=device)
    return params, copies_of(params)


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def set_grads(*models: list[nn.Parameter]) -> None:
    for twins in zip(*models, strict=True):
        grad = torch.randn_like(twins[0])
        for param in twins:
            param.grad = grad.clone()


def flatten(params: list[nn.Parameter]) -> None:
    """Make parameters and gradients slices of one buffer each."""
    sizes = [param.numel() for param in params]
    buffers = [params[0].new_zeros(sum(sizes)).split(sizes) for _ in range(2)]
    for param, weight, grad in zip(params, *buffers, strict=True):
        weight.copy_(param.detach().reshape(-1))
        if param.grad is not None:
            grad.copy_(param.grad.reshape(-1))
        param.data, param.grad = weight.view(param.shape), grad.view(param.shape)


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def take_steps(num_steps: int, *optimizers: torch.optim.Optimizer) -> None:
    """Step each along the same random gradients, which are new tensors each time."""
    for _ in range(num_steps):
        set_grads(*map(params_of, optimizers))
        for optimizer in optimizers:
            optimizer.step()


def copy_weights(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for param, twin in zip(source, target, strict=True):
            twin.copy_(param)


def state_addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    return [value.data_ptr() for state in optimizer.state.values() for value in state.values()]


def load_in_place(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give ``target``, which steps first, all that ``source`` has; its tensors stay its own."""
    take_steps(1, target)
    copy_weights(params_of(source), params_of(target))
    before = state_addresses(target)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert state_addresses(target) == before


def assert_equal(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    for index, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(ours, theirs), f"parameter {index} differs"


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def as_on_cuda() -> AbstractContextManager[object]:
    """Send CPU tensors the way that CUDA tensors take."""
    return patch.multiple(plan, _on_cuda=lambda _: True, fused_adam_=as_kernel(run_cuda))


@contextmanager
def by_kernels() -> Iterator[None]:
    """Step on a CPU by tables and kernels of CUDA, in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as monkeypatch, np.errstate(all="ignore"), as_on_cuda():
        use_interpreter(monkeypatch, kernel)
        yield


def cut_at(numel: int) -> AbstractContextManager[object]:
    """Cut tensors that are widened or scaled, of which so many elements are few."""
    return patch("graphfsdp.optim.fused.step._SMALLEST_CHUNK", numel)


def by_tensor_code() -> AbstractContextManager[object]:
    """Step as any device does that no kernel fits."""
    run = as_kernel(lambda args: run_cuda(args._replace(tables=[])))
    return patch.object(plan, "fused_adam_", run)

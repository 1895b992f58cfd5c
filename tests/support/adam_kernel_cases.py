"""Parameters for the tests of the Triton kernels, and what the kernels shall do."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from graphfsdp.optim.fused import kernel as step_kernel
from graphfsdp.optim.fused import plan as plans
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.step import StepArgs, as_kernel, fused_adam_, run_cpu, run_cuda
from graphfsdp.optim.fused.storage import Dtypes, StepTensors, make_columns
from graphfsdp.optim.fused.update import adam_coefficients, adam_update_
from triton_helpers import needs_triton, use_interpreter

BF16 = torch.bfloat16
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
MOMENTS = [torch.float32, torch.bfloat16]
COMBINATIONS = [
    Dtypes(param, grad, first, second, None, main)
    for param, grad, first, second, main in itertools.product(
        FLOATS, FLOATS, MOMENTS, MOMENTS, [None, torch.float32]
    )
    if main is None or param != torch.float32
]


def pairwise(combinations: Sequence[Dtypes]) -> list[Dtypes]:
    """Return a part of them in which every two dtypes meet that meet in any of them."""
    unmet = {dtypes: set(itertools.combinations(enumerate(dtypes), 2)) for dtypes in combinations}
    chosen: list[Dtypes] = []
    while True:
        best = max(unmet, key=lambda dtypes: len(unmet[dtypes]))
        found = set(unmet[best])
        if not found:
            return chosen
        chosen.append(best)
        for pairs in unmet.values():
            pairs -= found


Test = TypeVar("Test", bound=Callable[..., None])
FP32 = Dtypes(torch.float32, torch.float32, torch.float32, torch.float32, None, None)
MIXED = Dtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32, None, torch.float32)


def dtype_names(dtypes: Dtypes) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_interpreter(monkeypatch, step_kernel)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def kernel_path(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send CPU tensors through the tables and kernels that CUDA tensors take."""
    monkeypatch.setattr(plans, "_on_cuda", lambda _: True)
    monkeypatch.setattr(plans, "fused_adam_", as_kernel(run_cuda))


def step_as_a_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_on_cuda", lambda _: False)
    monkeypatch.setattr(plans, "fused_adam_", fused_adam_)


def step_by_tensor_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step as any device does that no kernel fits."""
    run = as_kernel(lambda args: run_cuda(args._replace(tables=[])))
    monkeypatch.setattr(plans, "fused_adam_", run)


def interpreted(test: Test) -> Test:
    """Mark a test that runs the kernels in Triton's interpreter."""
    marked: Test = needs_triton(pytest.mark.usefixtures("interpreter")(test))
    return marked


def map_tensors(tensors: StepTensors, function: Callable[[Tensor], Tensor]) -> StepTensors:
    return StepTensors(*(None if tensor is None else function(tensor) for tensor in tensors))  # type: ignore[arg-type]


class Case(NamedTuple):
    """Tensors of several parameters, their rows of the table, and the step counts of its rows."""

    bundles: list[StepTensors]
    rows: list[int]
    steps: list[Tensor]
    hyper: Tensor

    def clone(self) -> "Case":
        bundles = [map_tensors(bundle, Tensor.clone) for bundle in self.bundles]
        return Case(bundles, self.rows, self.steps, self.hyper)

    def launch(
        self, dtypes: Dtypes, scale: Tensor | None, flags: Flags, skip: Tensor | None = None
    ) -> step_kernel.Tables:
        steps = [self.steps[row] for row in self.rows]
        tables = step_kernel.make_tables(self.bundles, steps, self.rows, self.hyper.device)
        step_kernel.launch(tables, dtypes, self.hyper, scale, skip, flags)
        return tables

    def update(self, scale: Tensor | None, flags: Flags, skip: Tensor | None = None) -> None:
        for bundle, row in zip(self.bundles, self.rows, strict=True):
            coefficients = adam_coefficients(self.hyper[row], self.steps[row], flags)
            adam_update_(
                make_columns([bundle]), coefficients, flags, grad_scale=scale, found_inf=skip
            )

    def update_on_cpu(self, scale: Tensor | None, flags: Flags) -> None:
        """Step as the operation does on the CPU, which counts the step itself."""
        columns = make_columns(self.bundles)
        steps = [torch.stack([self.steps[row] for row in self.rows]).sub(1)]
        places = list(range(len(self.bundles)))
        run_cpu(
            StepArgs(
                columns, steps, self.hyper, self.rows, places, scale, None, None, [], True, flags
            )
        )  # fmt: skip


def make_case(
    shapes: Sequence[int | tuple[int, ...]], dtypes: Dtypes, device: torch.device | str = "cpu"
) -> Case:
    hyper = torch.tensor(
        [[1e-2, 0.9, 0.999, 1e-8, 0.1], [3e-1, 0.0, 0.5, 1e-3, 0.0], [1e-3, 0.8, 0.95, 0.0, 1.0]],
        dtype=torch.float64,
        device=device,
    )
    bundles = []
    for size in shapes:
        shape = (size,) if isinstance(size, int) else size
        weight = torch.randn(shape, device=device)
        param = weight.to(dtypes.param)
        main = None if dtypes.main_param is None else weight
        grad = torch.randn(shape, device=device).to(dtypes.grad)
        first = torch.randn(shape, device=device).to(dtypes.exp_avg)
        second = torch.rand(shape, device=device).to(dtypes.exp_avg_sq)
        largest: Tensor | None = None
        if dtypes.max_exp_avg_sq is not None:
            largest = torch.rand(shape, device=device).to(dtypes.max_exp_avg_sq)
        bundles.append(StepTensors(param, grad, first, second, largest, main))
    steps = [torch.tensor(float(count), device=device) for count in (1, 7, 1000)]
    return Case(bundles, [index % 3 for index in range(len(shapes))], steps, hyper)


def assert_same(
    found: Case, expected: Case, *, rtol: float = 0.0, atol: float = 0.0, but: Sequence[str] = ()
) -> None:
    """Compare all tensors, bit for bit unless told otherwise.

    Triton's interpreter cuts bfloat16 where the hardware rounds.
    """
    for ours, theirs in zip(found.bundles, expected.bundles, strict=True):
        for name, left, right in zip(ours._fields, ours, theirs, strict=True):
            if left is None or right is None or name in but:
                assert (left is None) == (right is None)
                continue
            close = rtol, atol
            if left.dtype == BF16:
                close = max(rtol, torch.finfo(BF16).eps), max(atol, 1e-30)
            torch.testing.assert_close(
                left, right, rtol=close[0], atol=close[1], equal_nan=True, msg=name
            )


def assert_kernel_is_tensor_code(
    shapes: Sequence[int | tuple[int, ...]],
    dtypes: Dtypes,
    flags: Flags,
    scale: float | None = 0.37,
    device: str = "cpu",
) -> None:
    """Compare the kernel with the tensor code; interpreted it is the same bit for bit."""
    found = make_case(shapes, dtypes, device)
    expected = found.clone()
    factor = None if scale is None else torch.tensor(scale, device=device)
    found.launch(dtypes, factor, flags)
    expected.update(factor, flags)
    tensors = [tensor for bundle in expected.bundles for tensor in bundle if tensor is not None]
    assert all(tensor.float().isfinite().all() for tensor in tensors)
    # The interpreter has no fused multiply-add; a GPU may round a sum of ten operations otherwise.
    exact = device == "cpu"
    assert_same(found, expected, rtol=0 if exact else 16 * 2.0**-23, atol=0 if exact else 1e-6)

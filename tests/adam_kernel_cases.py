"""Parameters in flat runs for the tests of the Triton kernels, and what the kernels shall do."""

import importlib.util
import itertools
import types
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graphfsdp.optim import adam_kernel
from graphfsdp.optim.adam_kernel import Dtypes
from graphfsdp.optim.adam_math import adam_coefficients, adam_update_
from graphfsdp.optim.adam_settings import Flags
from graphfsdp.optim.remainders import join_remainder, split_remainder_

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
MOMENTS = [torch.float32, torch.bfloat16]
COMBINATIONS = [
    Dtypes(param, grad, first, second, None, main)
    for param, grad, first, second, main in itertools.product(
        FLOATS, FLOATS, MOMENTS, MOMENTS, [None, torch.float32, torch.int16]
    )
    if main is None
    or (main == torch.float32 and param != torch.float32)
    or (main == torch.int16 and param == torch.bfloat16)
]
FP32 = Dtypes(torch.float32, torch.float32, torch.float32, torch.float32, None, None)
MIXED = Dtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32, None, torch.float32)

needs_triton = pytest.mark.skipif(
    not adam_kernel.is_available(), reason="needs triton, which is not installed"
)


def dtype_names(dtypes: Dtypes) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None)


def fresh_kernels() -> types.ModuleType:
    """Import the kernels' module once more: whether to interpret is decided by its decorators."""
    spec = importlib.util.find_spec("graphfsdp.optim.adam_triton")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tensors(NamedTuple):
    """The tensors of one parameter."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    main: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tensors":
        return Tensors(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]


class Case(NamedTuple):
    """Tensors of several parameters, and the lanes that they are in."""

    bundles: list[Tensors]
    lane_of: list[int]
    steps: list[Tensor]
    hyper: Tensor

    def clone(self) -> "Case":
        bundles = [bundle.map(Tensor.clone) for bundle in self.bundles]
        return Case(bundles, self.lane_of, self.steps, self.hyper)

    def launch(
        self, dtypes: Dtypes, scale: Tensor | None, flags: Flags, skip: Tensor | None = None
    ) -> adam_kernel.Tables:
        lanes = [(step, row) for row, step in enumerate(self.steps)]
        tables = adam_kernel.make_tables(self.bundles, self.lane_of, lanes, self.hyper.device)
        adam_kernel.launch(tables, dtypes, self.hyper, scale, skip, flags)
        return tables

    def update(self, scale: Tensor | None, flags: Flags, skip: Tensor | None = None) -> None:
        for bundle, lane in zip(self.bundles, self.lane_of, strict=True):
            coefficients = adam_coefficients(
                self.hyper[lane],
                self.steps[lane],
                bias_correction=flags.bias_correction,
                te_math=flags.te_math,
            )
            adam_update_(
                bundle.param,
                bundle.grad,
                bundle.exp_avg,
                bundle.exp_avg_sq,
                coefficients,
                flags,
                max_exp_avg_sq=bundle.max_exp_avg_sq,
                main_param=bundle.main,
                grad_scale=scale,
                found_inf=skip,
            )


def make_case(sizes: list[int], dtypes: Dtypes, device: torch.device | str = "cpu") -> Case:
    hyper = torch.tensor(
        [[1e-2, 0.9, 0.999, 1e-8, 0.1], [3e-1, 0.0, 0.5, 1e-3, 0.0], [1e-3, 0.8, 0.95, 0.0, 1.0]],
        dtype=torch.float64,
        device=device,
    )
    bundles = []
    for size in sizes:
        weight = torch.randn(size, device=device)
        param = weight.to(dtypes.param)
        main: Tensor | None = None
        if dtypes.main_param == torch.int16:
            main = torch.zeros(size, dtype=torch.int16, device=device)
            split_remainder_(param, main, weight)
        elif dtypes.main_param is not None:
            main = weight
        largest = dtypes.max_exp_avg_sq
        bundles.append(
            Tensors(
                param,
                torch.randn(size, device=device).to(dtypes.grad),
                torch.randn(size, device=device).to(dtypes.exp_avg),
                torch.rand(size, device=device).to(dtypes.exp_avg_sq),
                None if largest is None else torch.rand(size, device=device).to(largest),
                main,
            )
        )
    steps = [torch.tensor(float(count), device=device) for count in (1, 7, 1000)]
    return Case(bundles, [index % 3 for index in range(len(sizes))], steps, hyper)


def assert_cases_close(found: Case, expected: Case, dtypes: Dtypes) -> None:
    for ours, theirs in zip(found.bundles, expected.bundles, strict=True):
        assert torch.equal(ours[1], theirs[1])  # gradients are only read
        if dtypes.main_param == torch.int16:
            assert ours.main is not None
            assert theirs.main is not None
            torch.testing.assert_close(
                join_remainder(ours.param, ours.main),
                join_remainder(theirs.param, theirs.main),
                rtol=2e-6,
                atol=1e-6,
            )
        floats = (0, 2, 3, 4, 5) if dtypes.main_param != torch.int16 else (2, 3, 4)
        for column in floats:  # weight, moments, main weight
            left, right = ours[column], theirs[column]
            if left is None or right is None:
                assert left is right
                continue
            # float32 maths of ten operations; then one rounding to the storage, which may fall
            # to the other side.
            rtol = max(16 * 2.0**-23, torch.finfo(left.dtype).eps)
            torch.testing.assert_close(left, right, rtol=rtol, atol=1e-6)

"""The Triton kernels: in Triton's interpreter on the CPU, and compiled for sm_90 without a GPU."""

import importlib.util
import itertools
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphfsdp.optim import adam_kernel
from graphfsdp.optim.adam_kernel import Dtypes
from graphfsdp.optim.adam_math import adam_coefficients, adam_update_
from graphfsdp.optim.flat_runs import flat_view

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
COMBINATIONS = [
    Dtypes(param, grad, moment, main)
    for param, grad, moment, main in itertools.product(
        FLOATS, FLOATS, [torch.float32, torch.bfloat16], [None, torch.float32]
    )
    if main is None or param != torch.float32
]

needs_triton = pytest.mark.skipif(
    not adam_kernel.is_available(), reason="needs triton, which is not installed"
)


def _name(dtypes: Dtypes) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _fresh_kernels() -> types.ModuleType:
    """Import the kernels' module once more: whether to interpret is decided by its decorators."""
    spec = importlib.util.find_spec("graphfsdp.optim.adam_triton")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels = _fresh_kernels()
    monkeypatch.setattr(adam_kernel, "_kernels", lambda: kernels)
    # Elements behind the end of a run are zeros that are not stored; 0 / 0 is no news.
    with np.errstate(invalid="ignore"):
        yield


class _Tensors(NamedTuple):
    """The tensors of one parameter."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    main: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "_Tensors":
        return _Tensors(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]


class _Case(NamedTuple):
    """Tensors of several parameters, and the lanes that they are in."""

    bundles: list[_Tensors]
    lane_of: list[int]
    steps: list[Tensor]
    hyper: Tensor

    def clone(self) -> "_Case":
        bundles = [bundle.map(Tensor.clone) for bundle in self.bundles]
        return _Case(bundles, self.lane_of, self.steps, self.hyper)

    def launch(self, dtypes: Dtypes, scale: Tensor | None, **flags: bool) -> adam_kernel.Tables:
        lanes = [(step, row) for row, step in enumerate(self.steps)]
        tables = adam_kernel.make_tables(self.bundles, self.lane_of, lanes, self.hyper.device)
        adam_kernel.launch(tables, dtypes, self.hyper, scale, **flags)
        return tables

    def update(self, scale: Tensor | None, **flags: bool) -> None:
        for (param, grad, exp_avg, exp_avg_sq, main), lane in zip(
            self.bundles, self.lane_of, strict=True
        ):
            coefficients = adam_coefficients(
                self.hyper[lane], self.steps[lane], bias_correction=flags["bias_correction"]
            )
            adam_update_(
                param,
                grad,
                exp_avg,
                exp_avg_sq,
                coefficients,
                main_param=main,
                grad_scale=scale,
                adam_w_mode=flags["adam_w_mode"],
            )


def _case(sizes: list[int], dtypes: Dtypes, device: torch.device | str = "cpu") -> _Case:
    hyper = torch.tensor(
        [[1e-2, 0.9, 0.999, 1e-8, 0.1], [3e-1, 0.0, 0.5, 1e-3, 0.0], [1e-3, 0.8, 0.95, 0.0, 1.0]],
        dtype=torch.float64,
        device=device,
    )
    bundles = []
    for size in sizes:
        weight = torch.randn(size, device=device)
        param = weight.to(dtypes.param)
        bundles.append(
            _Tensors(
                param,
                torch.randn(size, device=device).to(dtypes.grad),
                torch.randn(size, device=device).to(dtypes.moment),
                torch.rand(size, device=device).to(dtypes.moment),
                None if dtypes.main_param is None else weight,
            )
        )
    steps = [torch.tensor(float(count), device=device) for count in (1, 7, 1000)]
    return _Case(bundles, [index % 3 for index in range(len(sizes))], steps, hyper)


def _assert_close(found: _Case, expected: _Case, dtypes: Dtypes) -> None:
    for ours, theirs in zip(found.bundles, expected.bundles, strict=True):
        assert torch.equal(ours[1], theirs[1])  # gradients are only read
        for column in (0, 2, 3, 4):  # weight, moments, main weight
            left, right = ours[column], theirs[column]
            if left is None or right is None:
                assert left is right
                continue
            # float32 maths of ten operations; then one rounding to the storage, which may fall
            # to the other side.
            rtol = max(16 * 2.0**-23, torch.finfo(left.dtype).eps)
            torch.testing.assert_close(left, right, rtol=rtol, atol=1e-6)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=_name)
def test_interpreted_kernel_equals_the_tensor_code(dtypes: Dtypes) -> None:
    sizes = [1, 2048, 5, 2049, 4096 + 77]
    flags = {"adam_w_mode": True, "bias_correction": True}
    found = _case(sizes, dtypes)
    expected = found.clone()
    scale = torch.tensor(0.37)
    found.launch(dtypes, scale, **flags)
    expected.update(scale, **flags)
    _assert_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_interpreted_kernel_knows_every_mode(
    adam_w_mode: bool, bias_correction: bool, scale: float | None
) -> None:
    dtypes = Dtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32)
    flags = {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction}
    factor = None if scale is None else torch.tensor(scale)
    found = _case([300, 2048, 0, 3], dtypes)
    expected = found.clone()
    found.launch(dtypes, factor, **flags)
    expected.update(factor, **flags)
    _assert_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    dtypes=st.sampled_from(COMBINATIONS),
)
def test_interpreted_kernel_updates_runs_of_any_size(sizes: list[int], dtypes: Dtypes) -> None:
    flags = {"adam_w_mode": True, "bias_correction": True}
    found = _case(sizes, dtypes)
    expected = found.clone()
    found.launch(dtypes, None, **flags)
    expected.update(None, **flags)
    _assert_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_runs_off_a_16_byte_border_are_apart_and_still_right() -> None:
    dtypes = Dtypes(torch.float32, torch.float32, torch.float32, None)
    flags = {"adam_w_mode": True, "bias_correction": True}
    found = _case([100, 2100], dtypes)
    odd = found.bundles[0].map(lambda tensor: torch.cat([tensor.new_zeros(1), tensor])[1:])
    found = found._replace(bundles=[odd, found.bundles[1]])
    expected = found.clone()
    tables = found.launch(dtypes, None, **flags)
    expected.update(None, **flags)
    assert (tables.runs.shape[0], tables.odd_runs.shape[0]) == (1, 1)
    _assert_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_neighbouring_memory_is_not_touched() -> None:
    dtypes = Dtypes(torch.float32, torch.float32, torch.float32, None)
    wide = _case([4096], dtypes)
    part = wide.bundles[0].map(lambda tensor: tensor[1024:3001])
    narrow = wide._replace(bundles=[part])
    before = wide.clone()
    narrow.launch(dtypes, None, adam_w_mode=True, bias_correction=True)
    for ours, theirs in zip(wide.bundles[0], before.bundles[0], strict=True):
        if ours is not None and theirs is not None:
            assert torch.equal(ours[:1024], theirs[:1024])
            assert torch.equal(ours[3001:], theirs[3001:])
    assert not torch.equal(wide.bundles[0][0][1024:3001], before.bundles[0][0][1024:3001])


def test_tables_map_every_block_to_its_run() -> None:
    dtypes = Dtypes(torch.float32, torch.float32, torch.float32, None)
    block = adam_kernel.BLOCK_NUMEL
    case = _case([1, block, block + 1, 0, 3 * block], dtypes)
    tables = adam_kernel.make_tables(
        case.bundles, case.lane_of, [(step, 0) for step in case.steps], torch.device("cpu")
    )
    columns = dict(zip(adam_kernel.RUN_COLUMNS, tables.runs.t().tolist(), strict=True))
    assert columns["numel"] == [1, block, block + 1, 0, 3 * block]
    assert columns["first_block"] == [0, 1, 2, 4, 4]
    assert tables.block_to_run.tolist() == [0, 1, 2, 2, 4, 4, 4]
    assert columns["param"] == [bundle[0].data_ptr() for bundle in case.bundles]
    assert columns["main_param"] == [0] * 5
    assert tables.odd_runs.numel() == 0


def test_a_model_of_many_tensors_costs_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []

    class Recorder:
        tl = types.SimpleNamespace(float32=None, bfloat16=None, float16=None)

        def __getattr__(self, name: str) -> "_Launcher":
            return _Launcher(name, launches)

    monkeypatch.setattr(adam_kernel, "_kernels", Recorder)
    dtypes = Dtypes(torch.float32, torch.float32, torch.float32, None)
    _case([64] * 148, dtypes).launch(dtypes, None, adam_w_mode=True, bias_correction=True)
    assert launches == ["coefficients_kernel[3]", "update_kernel[148]"]


class _Launcher:
    def __init__(self, name: str, launches: list[str]) -> None:
        self._name = name
        self._launches = launches

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *_, **__: self._launches.append(f"{self._name}[{grid[0]}]")


@needs_triton
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [
        Dtypes(torch.float32, torch.float32, torch.float32, None),
        Dtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32),
        Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16, None),
    ],
    ids=_name,
)
def test_update_kernel_compiles_for_sm_90(dtypes: Dtypes, aligned: bool) -> None:
    kernels = _fresh_kernels()
    constants = adam_kernel.constants(dtypes, has_scale=True, adam_w_mode=True, aligned=aligned)
    signature = {
        "runs_ptr": "*i64",
        "block_to_run_ptr": "*i32",
        "coefficients_ptr": "*fp32",
        "scale_ptr": "*fp32",
    }
    compiled = _compile(kernels.update_kernel, signature, constants, adam_kernel.NUM_WARPS)
    assert ".target sm_90" in compiled["ptx"]
    assert len(compiled["cubin"]) > 0
    # The point of the unmasked branch: whole 16-byte accesses where the addresses allow them.
    assert (".v4.b32" in compiled["ptx"]) is aligned


@needs_triton
def test_coefficients_kernel_compiles_for_sm_90_with_float64_maths() -> None:
    kernels = _fresh_kernels()
    signature = {"lanes_ptr": "*i64", "hyper_ptr": "*fp64", "coefficients_ptr": "*fp32"}
    constants = {"ADAM_W_MODE": True, "BIAS_CORRECTION": True}
    compiled = _compile(kernels.coefficients_kernel, signature, constants, 1)
    assert ".target sm_90" in compiled["ptx"]
    assert "fma.rn.f64" in compiled["ptx"]  # exp2 and log2 are not rounded to float32 on the way
    assert len(compiled["cubin"]) > 0


def _compile(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], num_warps: int
) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )
    return dict(compiled.asm)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=_name)
def test_kernel_on_the_gpu_equals_the_tensor_code(dtypes: Dtypes) -> None:
    flags = {"adam_w_mode": True, "bias_correction": True}
    found = _case([1, 2048, 5, 2049, 70_000], dtypes, "cuda")
    expected = found.clone()
    scale = torch.tensor(0.37, device="cuda")
    found.launch(dtypes, scale, **flags)
    expected.update(scale, **flags)
    _assert_close(found, expected, dtypes)


def test_importing_the_package_does_not_import_triton() -> None:
    code = (
        "import sys, graphfsdp.optim, graphfsdp.optim.adam_kernel; "
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_flat_views_of_a_channels_last_parameter_are_in_memory_order() -> None:
    tensor = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert flat_view(tensor).data_ptr() == tensor.data_ptr()
    assert sorted(flat_view(tensor).tolist()) == list(range(24))

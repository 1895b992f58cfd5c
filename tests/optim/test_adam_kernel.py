"""The Triton kernels in Triton's interpreter on the CPU, and on a GPU where there is one."""

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adam_kernel_cases import (
    COMBINATIONS,
    FP32,
    MIXED,
    assert_cases_close,
    dtype_names,
    make_case,
    map_tensors,
    needs_triton,
    use_interpreter,
)
from graphfsdp.optim.fused import kernel as step_kernel
from graphfsdp.optim.fused.flat_runs import flat_view
from graphfsdp.optim.fused.settings import Flags
from graphfsdp.optim.fused.storage import Dtypes


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels in Triton's interpreter."""
    use_interpreter(monkeypatch)
    # Elements behind the end of a run are zeros that are not stored; 0 / 0 is no news.
    with np.errstate(invalid="ignore"):
        yield


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=dtype_names)
def test_interpreted_kernel_equals_the_tensor_code(dtypes: Dtypes) -> None:
    sizes = [1, 2048, 5, 2049, 4096 + 77]
    flags = Flags()
    found = make_case(sizes, dtypes)
    expected = found.clone()
    scale = torch.tensor(0.37)
    found.launch(dtypes, scale, flags)
    expected.update(scale, flags)
    assert_cases_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_interpreted_kernel_knows_every_mode(
    adam_w_mode: bool, bias_correction: bool, scale: float | None
) -> None:
    dtypes = MIXED
    flags = Flags(adam_w_mode, bias_correction)
    factor = None if scale is None else torch.tensor(scale)
    found = make_case([300, 2048, 0, 3], dtypes)
    expected = found.clone()
    found.launch(dtypes, factor, flags)
    expected.update(factor, flags)
    assert_cases_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    dtypes=st.sampled_from(COMBINATIONS),
)
def test_interpreted_kernel_updates_runs_of_any_size(sizes: list[int], dtypes: Dtypes) -> None:
    flags = Flags()
    found = make_case(sizes, dtypes)
    expected = found.clone()
    found.launch(dtypes, None, flags)
    expected.update(None, flags)
    assert_cases_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_runs_off_a_16_byte_border_are_apart_and_still_right() -> None:
    dtypes = FP32
    flags = Flags()
    found = make_case([100, 2100], dtypes)
    odd = map_tensors(found.bundles[0], lambda tensor: torch.cat([tensor.new_zeros(1), tensor])[1:])
    found = found._replace(bundles=[odd, found.bundles[1]])
    expected = found.clone()
    tables = found.launch(dtypes, None, flags)
    expected.update(None, flags)
    assert (tables.runs.shape[0], tables.odd_runs.shape[0]) == (1, 1)
    assert_cases_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_neighbouring_memory_is_not_touched() -> None:
    dtypes = FP32
    wide = make_case([4096], dtypes)
    part = map_tensors(wide.bundles[0], lambda tensor: tensor[1024:3001])
    narrow = wide._replace(bundles=[part])
    before = wide.clone()
    narrow.launch(dtypes, None, Flags())
    for ours, theirs in zip(wide.bundles[0], before.bundles[0], strict=True):
        if ours is not None and theirs is not None:
            assert torch.equal(ours[:1024], theirs[:1024])
            assert torch.equal(ours[3001:], theirs[3001:])
    assert not torch.equal(wide.bundles[0][0][1024:3001], before.bundles[0][0][1024:3001])


def test_tables_map_every_block_to_its_run() -> None:
    dtypes = FP32
    block = step_kernel.BLOCK_NUMEL
    case = make_case([1, block, block + 1, 0, 3 * block], dtypes)
    tables = step_kernel.make_tables(
        case.bundles, case.lane_of, [(step, 0) for step in case.steps], torch.device("cpu")
    )
    columns = dict(zip(step_kernel.RUN_COLUMNS, tables.runs.t().tolist(), strict=True))
    assert columns["numel"] == [1, block, block + 1, 0, 3 * block]
    assert columns["first_block"] == [0, 1, 2, 4, 4]
    assert tables.block_to_run.tolist() == [0, 1, 2, 2, 4, 4, 4]
    assert columns["param"] == [bundle[0].data_ptr() for bundle in case.bundles]
    assert columns["max_exp_avg_sq"] == columns["main_param"] == [0] * 5
    assert tables.odd_runs.numel() == 0


def test_a_model_of_many_tensors_costs_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []

    class Recorder:
        tl = types.SimpleNamespace(
            float32=None, bfloat16=None, float16=None, int16=None, uint8=None
        )

        def __getattr__(self, name: str) -> "_Launcher":
            return _Launcher(name, launches)

    monkeypatch.setattr(step_kernel, "_kernels", Recorder)
    dtypes = FP32
    make_case([64] * 148, dtypes).launch(dtypes, None, Flags())
    assert launches == ["coefficients_kernel[3]", "update_kernel[148]"]


class _Launcher:
    def __init__(self, name: str, launches: list[str]) -> None:
        self._name = name
        self._launches = launches

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *_, **__: self._launches.append(f"{self._name}[{grid[0]}]")


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids=dtype_names)
def test_kernel_on_the_gpu_equals_the_tensor_code(dtypes: Dtypes) -> None:
    flags = Flags()
    found = make_case([1, 2048, 5, 2049, 70_000], dtypes, "cuda")
    expected = found.clone()
    scale = torch.tensor(0.37, device="cuda")
    found.launch(dtypes, scale, flags)
    expected.update(scale, flags)
    assert_cases_close(found, expected, dtypes)


def test_importing_the_package_does_not_import_triton() -> None:
    code = (
        "import sys, graphfsdp.optim, graphfsdp.optim.fused.kernel; "
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_flat_views_of_a_channels_last_parameter_are_in_memory_order() -> None:
    tensor = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert flat_view(tensor).data_ptr() == tensor.data_ptr()
    assert sorted(flat_view(tensor).tolist()) == list(range(24))


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("te_math", [True, False])
@pytest.mark.parametrize("amsgrad", [None, torch.float32, torch.bfloat16])
def test_interpreted_kernel_knows_amsgrad_maximize_and_both_maths(
    adam_w_mode: bool, maximize: bool, te_math: bool, amsgrad: torch.dtype | None
) -> None:
    dtypes = FP32._replace(exp_avg_sq=amsgrad or torch.float32, max_exp_avg_sq=amsgrad)
    flags = Flags(adam_w_mode, maximize=maximize, te_math=te_math)
    found = make_case([300, 2048, 3], dtypes)
    expected = found.clone()
    found.launch(dtypes, None, flags)
    expected.update(None, flags)
    assert_cases_close(found, expected, dtypes)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtypes", [FP32, MIXED, MIXED._replace(main_param=torch.int16)])
def test_interpreted_kernel_equals_the_tensor_code_bit_for_bit_in_torch_math(
    dtypes: Dtypes,
) -> None:
    found = make_case([2048, 100, 4099], dtypes)
    expected = found.clone()
    found.launch(dtypes, torch.tensor(0.37), Flags())
    expected.update(torch.tensor(0.37), Flags())
    # Triton's interpreter cuts bfloat16 where the hardware rounds; the main weight says it all.
    columns = ["exp_avg", "exp_avg_sq", "param" if dtypes is FP32 else "main_param"]
    if dtypes.main_param == torch.int16:
        columns.append("param")
    for ours, theirs in zip(found.bundles, expected.bundles, strict=True):
        for column in columns:
            assert torch.equal(getattr(ours, column), getattr(theirs, column)), column


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("dtypes", [FP32, MIXED._replace(main_param=torch.int16)])
def test_interpreted_kernel_changes_nothing_where_it_is_told_to_skip(
    dtypes: Dtypes, skip: float
) -> None:
    found = make_case([2048, 100, 4099], dtypes)
    before = found.clone()
    found.bundles[0].grad.fill_(float("nan") if skip else 1.0)
    found.launch(dtypes, None, Flags(), torch.tensor(skip))
    for ours, theirs in zip(found.bundles, before.bundles, strict=True):
        assert torch.equal(ours.param, theirs.param) == bool(skip)
        for left, right in zip(ours[2:4], theirs[2:4], strict=True):
            assert left is not None
            assert right is not None
            assert torch.equal(left, right) == bool(skip)

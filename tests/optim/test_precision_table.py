"""The precision table: each row decides its case, and the adapters follow it."""

import dataclasses
import io
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import graphfsdp
from foreign_adams import CONTRACTS, make_stand_in
from graphfsdp import optim
from graphfsdp.cli import main
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.optim import FusedAdam, FusedLion, FusedSGD
from graphfsdp.optim.adapters import foreign as foreign_adapters
from graphfsdp.optim.adapters.backends import adapt
from graphfsdp.optim.adapters.precision import (
    APEX,
    NATIVE,
    OFFLOAD,
    TABLE,
    TE,
    TORCH_SGD,
    Case,
    PrecisionRow,
    Situation,
    find_row,
    rich_table,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# How to come into each case from a plain float32 parameter.
CASES: dict[Case, dict[str, Any]] = {
    Case.NOT_CAPTURABLE: {"capturable": False},
    Case.GRAD_UNLIKE_PARAM: {"grad": BF16},
    Case.EMPTY_SHARD: {"empty_shard": True},
    Case.DTENSOR: {"dtensor": True},
    Case.MAIN_NOT_FP32: {"param": FP16, "grad": FP16, "main": FP16},
    Case.BF16_MAIN: {"param": BF16, "grad": BF16, "main": FP32},
    Case.NARROW_PLAIN: {"param": BF16, "grad": BF16},
    Case.BF16_MOMENTS: {"moments": (BF16, BF16)},
    Case.MOMENTS: {"moments": (FP32, BF16)},
    Case.REMAINDERS: {"param": BF16, "grad": BF16, "main": FP32, "remainders": True},
    Case.QUANTISED_PARAM: {"quantised": True},
    Case.GATHERED_IN_8_BITS: {"gathered_in_8_bits": True},
    Case.REST: {},
}


def situation_of(row: PrecisionRow) -> Situation:
    major, minor = row.before or (9, 1)
    return Situation(row.optimizer, (major, minor - 1), **CASES[row.case])


def row_name(row: PrecisionRow) -> str:
    return f"{row.optimizer}, {row.case.name}"


@pytest.mark.parametrize("row", TABLE, ids=row_name)
def test_each_row_decides_its_case_in_its_versions(row: PrecisionRow) -> None:
    situation = situation_of(row)
    assert find_row(situation) is row
    assert row.captured == (not row.why) == (not row.remedy)
    if row.before:
        assert find_row(dataclasses.replace(situation, version=row.before)).captured


def test_every_optimizer_has_a_last_row_for_the_rest() -> None:
    for name in {row.optimizer for row in TABLE}:
        rows = [row for row in TABLE if row.optimizer == name]
        assert [row.case is Case.REST for row in rows] == [False] * (len(rows) - 1) + [True]


def test_the_printed_table_has_every_row() -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(rich_table())
    text = console.export_text()
    assert text.count("refused") == sum(not row.captured for row in TABLE)
    assert text.count("captured") >= sum(row.captured for row in TABLE)
    for row in TABLE:
        assert row.optimizer in text
        assert row.why.split(",")[0][:40] in text
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rich_table())
    assert "\u2026" not in console.export_text()  # no word is cut off on a narrow terminal


@pytest.fixture
def mesh_of_one() -> Iterator[None]:
    """A process group of this process alone, for DTensors."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_foreign(package: str, params: list[nn.Parameter], **contract: Any) -> Any:
    """Return an optimizer with the name and the attributes of a foreign FusedAdam."""
    cls = type("FusedAdam", (torch.optim.SGD,), {"__module__": f"{package}.optimizers"})
    optimizer = cls(params, lr=0.1)
    for key, value in {"capturable": True, **contract}.items():
        setattr(optimizer, key, value)
    return optimizer


def parameter_of(situation: Situation) -> nn.Parameter:
    shape = (0, 4) if situation.empty_shard else (2, 4)
    local = torch.zeros(shape, dtype=situation.param)
    if not situation.dtensor:
        return nn.Parameter(local)
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def use(package: str, situation: Situation) -> None:
    param = parameter_of(situation)
    contract: dict[str, Any] = {"capturable": situation.capturable}
    if situation.main is not None:
        contract |= {"master_weights": True, "master_weight_dtype": situation.main}
    if package == "transformer_engine":
        contract |= {
            "exp_avg_dtype": situation.moments[0],
            "exp_avg_sq_dtype": situation.moments[1],
            "store_param_remainders": situation.remainders,
            "use_decoupled_grad": True,
        }
    decoupled = bool(contract.get("use_decoupled_grad"))
    policy = MixedPrecisionPolicy(main_grads_dtype=situation.grad, use_decoupled_grad=decoupled)
    if not decoupled and situation.main is not None:
        policy = MixedPrecisionPolicy()
    adapter = adapt(make_foreign(package, [param], **contract))
    if situation.gathered_in_8_bits:
        policy = dataclasses.replace(policy, gather_format="float8")
    adapter.check({"layer.weight": param}, policy, Scope.FORWARD_BACKWARD)
    adapter.check({"layer.weight": param}, policy, Scope.FULL_ITERATION)


def rows_of(*names: str) -> list[PrecisionRow]:
    """Their rows about the dtypes of plain tensors."""
    rows = [row for row in TABLE if row.optimizer in names]
    return [row for row in rows if row.case is not Case.QUANTISED_PARAM]


class Quantised(nn.Parameter):
    """Looks like Transformer Engine's: any dtype outside, and its quantiser beside it."""

    _quantizer = "Float8Quantizer"


@pytest.mark.parametrize(
    "make",
    [
        *(partial(getattr(optim, name), lr=0.1) for name in NATIVE),
        partial(torch.optim.AdamW, lr=0.1, fused=True),
        partial(torch.optim.SGD, lr=0.1, fused=True),
        partial(torch.optim.RMSprop, lr=0.1),
        partial(make_foreign, "transformer_engine"),
        partial(make_foreign, "apex"),
        lambda params: optim.CPUOffload(FusedAdam(params)),
    ],
)
def test_parameters_that_are_8_bit_numbers_are_refused_and_frozen_ones_not(make: Any) -> None:
    row = next(row for row in TABLE if row.case is Case.QUANTISED_PARAM)
    good = nn.Parameter(torch.zeros(2, 4))
    adapter = adapt(make([good]))
    for bad in (nn.Parameter(torch.zeros(2, 4).to(torch.float8_e4m3fn)), Quantised(good.data)):
        named = {"good": good, "layer.weight": bad}
        for scope in (Scope.FORWARD_BACKWARD, Scope.FULL_ITERATION):
            with pytest.raises((PrecisionError, ConfigError)) as caught:
                adapter.check(named, MixedPrecisionPolicy(), scope)
        for part in (row.case.value, "'layer.weight'", row.why, row.remedy):
            assert part in str(caught.value)
        bad.requires_grad_(False)
        adapter.check(named, MixedPrecisionPolicy(), Scope.FORWARD_BACKWARD)


@pytest.mark.parametrize("row", rows_of(TE), ids=row_name)
def test_transformer_engine_is_captured_as_its_rows_say(
    row: PrecisionRow, monkeypatch: pytest.MonkeyPatch, mesh_of_one: None
) -> None:
    situation = situation_of(row)
    monkeypatch.setattr(foreign_adapters, "installed_version", lambda _: situation.version)
    if row.captured:
        use("transformer_engine", situation)
        return
    version = ".".join(map(str, situation.version))
    with pytest.raises(PrecisionError) as caught:
        use("transformer_engine", situation)
    for part in (f"{TE} {version} cannot", row.case.value, "'layer.weight'", row.why, row.remedy):
        assert part in str(caught.value)
    if row.before:
        monkeypatch.setattr(foreign_adapters, "installed_version", lambda _: row.before)
        use("transformer_engine", situation)


@pytest.mark.parametrize("row", rows_of(APEX), ids=row_name)
def test_apex_is_captured_as_its_rows_say(row: PrecisionRow, mesh_of_one: None) -> None:
    situation = Situation(APEX, (0, 1), **CASES[row.case])
    if row.captured:
        use("apex", situation)
        return
    # Where two settings clash, the guard of gradients speaks first; see the next test.
    earlier = row.case in (Case.GRAD_UNLIKE_PARAM, Case.BF16_MAIN)
    words = None if earlier else row.case.value.split("(")[0]
    with pytest.raises(PrecisionError, match=words):
        use("apex", situation)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLion"])
def test_the_row_of_offloaded_state_is_what_the_adapter_says(name: str) -> None:
    row = find_row(Situation(OFFLOAD))
    model = nn.Linear(4, 4)
    optimizer = optim.CPUOffload(getattr(optim, name)(model.parameters(), lr=0.1))
    adapter = adapt(optimizer)
    named = dict(model.named_parameters())
    adapter.check(named, MixedPrecisionPolicy(), Scope.FORWARD_BACKWARD)
    with pytest.raises(ConfigError) as caught:
        adapter.check(named, MixedPrecisionPolicy(), Scope.FULL_ITERATION)
    for part in ("CPUOffload", row.why, f"Remedy: {row.remedy}"):
        assert part in str(caught.value)


def test_apex_main_weights_and_mixed_gradients_are_refused() -> None:
    param = nn.Parameter(torch.zeros(2, 4, dtype=BF16))
    adapter = adapt(make_foreign("apex", [param], master_weights=True))
    # The guard of gradients comes first: main weights are float32, so gradients should be.
    policy = MixedPrecisionPolicy(main_params_dtype=FP32, main_grads_dtype=BF16)
    with pytest.raises(PrecisionError, match="main_grads_dtype is bfloat16"):
        adapter.check({"w": param}, policy, Scope.FULL_ITERATION)
    policy = MixedPrecisionPolicy(main_params_dtype=FP32, main_grads_dtype=FP32)
    with pytest.raises(PrecisionError, match="memory is corrupted"):
        adapter.check({"w": param}, policy, Scope.FULL_ITERATION)


def test_decoupled_gradients_of_a_foreign_optimizer_are_the_ones_that_are_scaled() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad, param.decoupled_grad = torch.ones(3), torch.ones(3)  # type: ignore[attr-defined]
    made: Any = make_stand_in(CONTRACTS[-2])
    adapter = adapt(made([param], lr=0.1, capturable=True, use_decoupled_grad=True))
    adapter.step(torch.tensor(0.5))
    assert param.decoupled_grad.tolist() == [0.5] * 3  # type: ignore[attr-defined]
    assert param.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD, FusedLion])
@pytest.mark.parametrize("param", [FP32, BF16, FP16])
@pytest.mark.parametrize("grad", [FP32, BF16])
def test_native_optimizers_are_captured_with_any_dtypes(
    kind: Any, param: torch.dtype, grad: torch.dtype
) -> None:
    assert kind.__name__ in NATIVE
    model = nn.Linear(4, 4).to(param)
    optimizer = kind(model.parameters(), master_weights=True, use_decoupled_grad=True)
    policy = MixedPrecisionPolicy(main_grads_dtype=grad, use_decoupled_grad=True)
    before = model.weight.detach().clone()
    with graphfsdp.capture(
        model,
        optimizer,
        mp_policy=policy,
        loss_fn=lambda m, x: m(x.to(param)).float().square().sum(),
        warmup_steps=1,
    ) as step:
        for _ in range(12):
            step(torch.randn(2, 4))
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("row", rows_of(TORCH_SGD), ids=row_name)
def test_the_fused_sgd_of_torch_is_captured_as_its_rows_say(
    row: PrecisionRow, mesh_of_one: None
) -> None:
    case = CASES[row.case]
    param = parameter_of(Situation(TORCH_SGD, **case))
    grad = case.get("grad")
    policy = MixedPrecisionPolicy(main_grads_dtype=grad)
    named = {"layer.weight": param}
    adapter = adapt(torch.optim.SGD([param], lr=0.1, fused=True))
    if row.captured:
        adapter.check(named, policy, Scope.FULL_ITERATION)
        return
    with pytest.raises(ConfigError if row.case is Case.DTENSOR else PrecisionError) as caught:
        adapter.check(named, policy, Scope.FULL_ITERATION)
    assert "'layer.weight'" in str(caught.value)
    if row.case is Case.DTENSOR:
        assert row.remedy in str(caught.value)
        adapt(torch.optim.SGD([param], lr=0.1)).check(named, policy, Scope.FULL_ITERATION)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_kernel_of_torch_that_reads_unwritten_memory_is_refused(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(4, dtype=dtype))
    settings: dict[str, Any] = {"fused": True, "momentum": 0.9}

    def check(**changes: Any) -> None:
        adapter = adapt(torch.optim.SGD([param], lr=0.1, **settings | changes))
        adapter.check({"weight": param}, MixedPrecisionPolicy(), Scope.FORWARD_BACKWARD)

    for changes in ({"fused": False}, {"momentum": 0.0}):
        check(**changes)
    refused = nullcontext() if dtype == torch.float32 else pytest.raises(ConfigError, match="wei")
    with refused:
        check()


def test_the_command_line_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--precision-table"]) == 0
    shown = capsys.readouterr().out
    assert "FusedLion" in shown
    assert "refused" in shown

"""Which optimizer is refused with which precision, through the adapters."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from foreign_adams import CONTRACT, make_stand_in
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.optim import FusedAdam, Muon
from graphfsdp.optim.adapters import foreign as foreign_adapters
from graphfsdp.optim.adapters.backends import adapt
from graphfsdp.optim.adapters.foreign import TE

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FULL = Scope.FULL_ITERATION
# What Transformer Engine's has not in a graph: settings, dtype of a parameter, what is told of it.
REFUSED: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "on the host": ({"capturable": False}, FP32, r"made without capturable=True.*a replay would"),
    "remainders": ({"store_param_remainders": True}, FP32, "store_param_remainders=True.*know no"),
    "main weights": (
        {"master_weights": True, "master_weight_dtype": FP16},
        FP16,
        r"main weights that are not float32.*master_weight_dtype=torch\.float32",
    ),
    "moments": ({"exp_avg_sq_dtype": BF16}, FP32, r"not both float32 or both bfloat16.*FusedAdam"),
}


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


def dtensor(shape: tuple[int, ...]) -> nn.Parameter:
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    local = torch.zeros(shape)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


class Quantised(nn.Parameter):
    """Looks like Transformer Engine's: any dtype outside, and its quantiser beside it."""

    _quantizer = None


@pytest.mark.parametrize(
    "make",
    [
        partial(FusedAdam, lr=0.1),
        partial(Muon, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1, fused=True),
        partial(torch.optim.SGD, lr=0.1, fused=True),
        partial(torch.optim.RMSprop, lr=0.1),
        partial(make_foreign, "transformer_engine"),
        partial(make_foreign, "apex"),
    ],
)
def test_parameters_that_are_8_bit_numbers_are_refused_and_frozen_ones_not(make: Any) -> None:
    good = nn.Parameter(torch.zeros(2, 4))
    adapter = adapt(make([good]))
    for bad in (nn.Parameter(torch.zeros(2, 4).to(torch.float8_e4m3fn)), Quantised(good.data)):
        named = {"good": good, "layer.weight": bad}
        for scope in (Scope.FORWARD_BACKWARD, Scope.FULL_ITERATION):
            with pytest.raises((PrecisionError, ConfigError)) as caught:
                adapter.check(named, MixedPrecisionPolicy(), scope)
        for part in (
            "8-bit numbers themselves, as 'layer.weight'",
            "Remedy: parameters in float32",
        ):
            assert part in str(caught.value)
        bad.requires_grad_(False)
        adapter.check(named, MixedPrecisionPolicy(), Scope.FORWARD_BACKWARD)


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformer_engine_cannot_do_in_a_graph_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_adapters, "installed_version", lambda _: (2, 20))
    settings, dtype, words = REFUSED[name]
    param = nn.Parameter(torch.zeros(2, 4, dtype=dtype))
    adapter = adapt(make_foreign("transformer_engine", [param], **settings))
    adapter.check({"layer.weight": param}, MixedPrecisionPolicy(), Scope.FORWARD_BACKWARD)
    with pytest.raises(PrecisionError, match=f"^{TE} 2.20 cannot.*'layer.weight'") as caught:
        adapter.check({"layer.weight": param}, MixedPrecisionPolicy(), FULL)
    assert re.search(words, str(caught.value))


def test_transformer_engine_is_refused_before_the_version_that_can(
    monkeypatch: pytest.MonkeyPatch, mesh_of_one: None
) -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=BF16, use_decoupled_grad=True)
    settings: dict[str, Any] = {"use_decoupled_grad": True}
    settings |= {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
    for param in (nn.Parameter(torch.zeros(2, 4)), dtensor((2, 4)), dtensor((0, 4))):
        adapter = adapt(make_foreign("transformer_engine", [param], **settings))
        for version in ((2, 20), (2, 21), (3, 0)):
            monkeypatch.setattr(foreign_adapters, "installed_version", lambda _, v=version: v)
            adapter.check({"layer.weight": param}, policy, FULL)
        monkeypatch.setattr(foreign_adapters, "installed_version", lambda _: (2, 19))
        with pytest.raises(PrecisionError, match=f"^{TE} 2.19 .*Remedy: Transformer Engine 2.20"):
            adapter.check({"layer.weight": param}, policy, FULL)
        adapter.check({"layer.weight": param}, policy, Scope.FORWARD_BACKWARD)


def test_decoupled_gradients_of_a_foreign_optimizer_are_the_ones_that_are_scaled() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad, param.decoupled_grad = torch.ones(3), torch.ones(3)  # type: ignore[attr-defined]
    made: Any = make_stand_in(CONTRACT)
    adapter = adapt(made([param], lr=0.1, capturable=True, use_decoupled_grad=True))
    adapter.step(torch.tensor(0.5))
    assert param.decoupled_grad.tolist() == [0.5] * 3  # type: ignore[attr-defined]
    assert param.grad.tolist() == [1.0] * 3


apex = partial(make_foreign, "apex")
sgd = partial(torch.optim.SGD, lr=0.1, fused=True)
with_momentum = partial(sgd, momentum=0.9)


@pytest.mark.usefixtures("mesh_of_one")
@pytest.mark.parametrize(
    ("make", "dtype", "scope", "main_grads_dtype", "words"),
    [
        (apex, FP32, Scope.FORWARD_BACKWARD, None, None),
        (apex, FP32, FULL, None, r"apex FusedAdam .*'forward_backward'"),
        (sgd, FP32, FULL, None, None),
        (sgd, FP32, FULL, BF16, r"'layer\.weight'"),
        (sgd, "a DTensor", FULL, None, r"'layer\.weight', which is a DTensor.*Remedy: fused=False"),
        (partial(sgd, fused=False), "a DTensor", FULL, None, None),
        # torch's kernel for momentum in 16 bits reads memory that nothing has written.
        *((with_momentum, dtype, Scope.FORWARD_BACKWARD, None, "wei") for dtype in (BF16, FP16)),
        (with_momentum, FP32, Scope.FORWARD_BACKWARD, None, None),
        (partial(with_momentum, fused=False), BF16, Scope.FORWARD_BACKWARD, None, None),
        (sgd, BF16, Scope.FORWARD_BACKWARD, None, None),
    ],
)
def test_what_kernels_of_others_cannot_do_is_refused_by_name(
    make: Any, dtype: Any, scope: Scope, main_grads_dtype: torch.dtype | None, words: str | None
) -> None:
    is_cut = dtype == "a DTensor"
    param = dtensor((2, 4)) if is_cut else nn.Parameter(torch.zeros(2, 4, dtype=dtype))
    policy = MixedPrecisionPolicy(main_grads_dtype=main_grads_dtype)
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        adapt(make([param])).check({"layer.weight": param}, policy, scope)

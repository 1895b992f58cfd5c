"""Which optimizer is refused with which precision: through the adapters, version by version."""

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

import graphfsdp
from foreign_adams import CONTRACTS, make_stand_in
from graphfsdp import optim
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError, PrecisionError
from graphfsdp.optim import FusedAdam, FusedLion, FusedSGD
from graphfsdp.optim.adapters import foreign as foreign_adapters
from graphfsdp.optim.adapters.backends import adapt
from graphfsdp.optim.adapters.foreign import APEX, REFUSALS, TE, Facts, Refusal, find_refusal

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# How to come into each case from a plain float32 parameter, by a word of its name.
CASES: dict[str, Facts] = {
    "capturable=True": Facts(capturable=False),
    "gradient's": Facts(grad=BF16),
    "owns no": Facts(empty_shard=True),
    "DTensors": Facts(dtensor=True),
    "main weights that are": Facts(FP16, FP16, FP16),
    "parameters with main": Facts(BF16, BF16, FP32),
    "parameters without main": Facts(BF16, BF16),
    "bfloat16 moments": Facts(moments=(BF16, BF16)),
    "not both": Facts(moments=(FP32, BF16)),
    "remainders": Facts(BF16, BF16, FP32, remainders=True),
}


def facts_of(refusal: Refusal) -> Facts:
    (found,) = (facts for word, facts in CASES.items() if word in refusal.what)
    return found


def last_version(refusal: Refusal) -> tuple[int, ...]:
    """Return the last one that it holds for."""
    major, minor = refusal.before or (9, 1)
    return major, minor - 1


def refusal_name(refusal: Refusal) -> str:
    return refusal.what


@pytest.mark.parametrize(
    ("name", "refusal"),
    [(name, refusal) for name, found in REFUSALS.items() for refusal in found],
    ids=lambda value: value if isinstance(value, str) else value.what,
)
def test_each_refusal_decides_its_case_in_its_versions(name: str, refusal: Refusal) -> None:
    assert find_refusal(name, last_version(refusal), facts_of(refusal)) is refusal
    assert refusal.why
    assert refusal.remedy
    assert find_refusal(name, (9, 1), Facts()) is None
    if refusal.before:
        assert find_refusal(name, refusal.before, facts_of(refusal)) is None


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


def parameter_of(facts: Facts) -> nn.Parameter:
    shape = (0, 4) if facts.empty_shard else (2, 4)
    local = torch.zeros(shape, dtype=facts.param)
    if not facts.dtensor:
        return nn.Parameter(local)
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def use(package: str, facts: Facts) -> None:
    param = parameter_of(facts)
    contract: dict[str, Any] = {"capturable": facts.capturable}
    if facts.main is not None:
        contract |= {"master_weights": True, "master_weight_dtype": facts.main}
    if package == "transformer_engine":
        contract |= {
            "exp_avg_dtype": facts.moments[0],
            "exp_avg_sq_dtype": facts.moments[1],
            "store_param_remainders": facts.remainders,
            "use_decoupled_grad": True,
        }
    decoupled = bool(contract.get("use_decoupled_grad"))
    policy = MixedPrecisionPolicy(main_grads_dtype=facts.grad, use_decoupled_grad=decoupled)
    if not decoupled and facts.main is not None:
        policy = MixedPrecisionPolicy()
    adapter = adapt(make_foreign(package, [param], **contract))
    adapter.check({"layer.weight": param}, policy, Scope.FORWARD_BACKWARD)
    adapter.check({"layer.weight": param}, policy, Scope.FULL_ITERATION)


class Quantised(nn.Parameter):
    """Looks like Transformer Engine's: any dtype outside, and its quantiser beside it."""

    _quantizer = "Float8Quantizer"


@pytest.mark.parametrize(
    "make",
    [
        *(
            partial(getattr(optim, name), lr=0.1)
            for name in ("FusedAdam", "FusedSGD", "FusedLion", "Muon", "Adafactor")
        ),
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


@pytest.mark.parametrize("refusal", REFUSALS[TE], ids=refusal_name)
def test_transformer_engine_is_refused_until_the_version_that_can(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, mesh_of_one: None
) -> None:
    facts, version = facts_of(refusal), last_version(refusal)
    monkeypatch.setattr(foreign_adapters, "installed_version", lambda _: version)
    use("transformer_engine", Facts())
    words = (f"{TE} {version[0]}.{version[1]} cannot", refusal.what, refusal.why, refusal.remedy)
    with pytest.raises(PrecisionError) as caught:
        use("transformer_engine", facts)
    for part in (*words, "'layer.weight'"):
        assert part in str(caught.value)
    if refusal.before:
        monkeypatch.setattr(foreign_adapters, "installed_version", lambda _: refusal.before)
        use("transformer_engine", facts)


@pytest.mark.parametrize("refusal", REFUSALS[APEX], ids=refusal_name)
def test_apex_is_refused_by_name(refusal: Refusal, mesh_of_one: None) -> None:
    use("apex", Facts())
    # Where two settings clash, the guard of gradients speaks first; see the next test.
    earlier = "gradient's" in refusal.what or "parameters with main" in refusal.what
    with pytest.raises(PrecisionError, match=None if earlier else refusal.what.split("(")[0]):
        use("apex", facts_of(refusal))


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


def test_the_fused_sgd_of_torch_is_refused_on_dtensors_and_with_other_gradients(
    mesh_of_one: None,
) -> None:
    def check(facts: Facts, policy: MixedPrecisionPolicy, *, fused: bool = True) -> None:
        param = parameter_of(facts)
        adapter = adapt(torch.optim.SGD([param], lr=0.1, fused=fused))
        adapter.check({"layer.weight": param}, policy, Scope.FULL_ITERATION)

    check(Facts(), MixedPrecisionPolicy())
    check(Facts(dtensor=True), MixedPrecisionPolicy(), fused=False)
    with pytest.raises(ConfigError, match=r"'layer\.weight', which is a DTensor.*FusedSGD"):
        check(Facts(dtensor=True), MixedPrecisionPolicy())
    with pytest.raises(PrecisionError, match=r"'layer\.weight'"):
        check(Facts(), MixedPrecisionPolicy(main_grads_dtype=BF16))


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

"""What optimizers refuse of settings, numbers, parameters and gradients, by name.

The precision guard: what it accepts, which replays as eager, and what it refuses. And Transformer
Engine's FusedAdam: its recorded contract, captures, what is refused. Replays of a stand-in are in
test_optimizer_replays.py.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import graphfsdp
from adam_helpers import loss_in_its_dtype, make_params
from foreign_adams import CONTRACT, make_stand_in
from graphfsdp import ConfigError, GuardError, MixedPrecisionPolicy, PrecisionError
from graphfsdp.optim import FusedAdam, Muon
from graphfsdp.optim.adapters.backends import _Steering
from helpers import Batch, Case, assert_same_run, assert_same_state, run, snapshot
from zoo_models import WIDTH, Squared

policy: Any = MixedPrecisionPolicy
COMPLEX = torch.zeros(2, dtype=torch.complex64)
HERE, THERE = torch.zeros(4, 3), torch.empty(2, device="meta")


def fused_adam(params: Any = None, **settings: Any) -> FusedAdam:
    return FusedAdam(make_params() if params is None else params, **settings)


def muon(**settings: Any) -> Muon:
    return Muon(make_params([(4, 3)]), **settings)


def step_on(*grads: Tensor, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    """Step with one gradient after the other; before the last one the model is cast."""
    param = nn.Parameter(torch.zeros(4, 3))
    optimizer = FusedAdam([("weight", param)], **settings)
    for index, grad in enumerate(grads):
        if index == len(grads) - 1:
            param.data = param.to(dtype)
        setattr(param, "decoupled_grad" if optimizer.use_decoupled_grad else "grad", grad)
        optimizer.step()


def add(**group: Any) -> None:
    """Add a group, which is not kept."""
    optimizer = fused_adam()
    try:
        optimizer.add_param_group(group)
    finally:
        assert len(optimizer.param_groups) == 1


def capture(optimizer: Any, **options: Any) -> None:
    graphfsdp.capture(nn.Linear(1, 1), optimizer, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            partial(fused_adam, exp_avg_dtype=torch.float8_e4m3fn),
            "exp_avg_dtype .*bfloat16, got .*e4m3",
        ),
        (
            partial(fused_adam, exp_avg_sq_dtype=torch.float16),
            "exp_avg_sq_dtype .*bfloat16, got .*float",
        ),
        (partial(fused_adam, exp_avg_sq_dtype=torch.int8), "exp_avg_sq_dtype .* got torch.int8"),
        (partial(fused_adam, master_weight_dtype=torch.float16), "master_weight_dtype must"),
        (partial(fused_adam, max_grad_norm=0.0), "max_grad_norm must be a positive number"),
        (partial(fused_adam, lr=-1.0), "lr of parameter group 0"),
        (partial(fused_adam, lr=float("nan")), "lr of parameter group 0"),
        (partial(fused_adam, lr=torch.tensor(0.1)), r"got tensor\(0\.1.*Remedy: a number"),
        (partial(fused_adam, betas=(1.0, 0.9)), r"betas\[0\] of parameter group 0"),
        (partial(fused_adam, betas=(0.9, -0.1)), r"betas\[1\] of parameter group 0"),
        (partial(fused_adam, betas=0.9), "pair"),
        (partial(fused_adam, betas=(torch.tensor(0.9), 0.9)), r"betas\[0\]"),
        (partial(fused_adam, eps=-1e-8), "eps of parameter group 0"),
        (partial(fused_adam, weight_decay=-0.1), "weight_decay of parameter group 0"),
        (partial(fused_adam, weight_decay="0.1"), "weight_decay of parameter group 0"),
        (partial(fused_adam, [COMPLEX]), r"parameter 0 of group 0 .*complex64"),
        (partial(fused_adam, [("phase", COMPLEX)]), r"parameter 'phase' .*complex64"),
        (partial(fused_adam, [torch.zeros(1).expand(4)]), "expanded"),
        (partial(add, params=[HERE], lr=-1.0), "lr of parameter group 1"),
        (partial(add, params=[COMPLEX]), r"parameter 0 of group 1 .*complex64"),
        (partial(Muon, [HERE, THERE]), r"parameter 1 of group 0 has the shape \(2,\).*use_muon"),
        (partial(muon, momentum=1.0), "momentum of parameter group 0 must be"),
        (partial(muon, adjust_lr_fn="none"), "adjust_lr_fn must be one of"),
        (partial(muon, lr=-1.0), "lr of parameter group 0 must be"),
        (partial(muon, ns_steps=0), r"from 1 to 99 ns_steps, got \(.*\) and 0"),
        (partial(step_on, HERE.to_sparse()), "the gradient of parameter 'weight' .*sparse"),
        (partial(step_on, HERE, HERE.to_sparse()), "the gradient of parameter 'weight' .*sparse"),
        (
            partial(step_on, HERE, torch.zeros(3, 3), use_decoupled_grad=True),
            r"shape \(3, 3\); expected \(4, 3\)",
        ),
        (
            partial(step_on, HERE, HERE.long(), use_decoupled_grad=True),
            "dtype torch.int64; expected a real",
        ),
        (
            partial(step_on, HERE, HERE.double(), dtype=torch.float64),
            "state 'exp_avg' of parameter 'weight' .*float64",
        ),
        *(
            (partial(policy, **{name: torch.int32}), f"{name} must be a .*int32")
            for name in ("param_dtype", "main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
        ),
        (partial(capture, 3), r"must be a torch\.optim\.Optimizer, got int"),
        (
            lambda: capture(torch.optim.RMSprop([HERE]), skip_nonfinite=True),
            "skip_nonfinite=True.*FusedAdam",
        ),
        (
            lambda: capture(
                torch.optim.SGD([HERE], momentum=0.9, dampening=0.1), skip_nonfinite=True
            ),
            r"group 0 of torch SGD has dampening=0\.1.*dampening=0; or",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_the_adapter_asks_for_nothing_that_the_contract_lacks() -> None:
    constructor, attributes = set(CONTRACT["constructor"]), set(CONTRACT["attributes"])
    assert {"capturable", "master_weights", "_step_supports_amp_scaling"} <= attributes
    assert "grad_scaler" in CONTRACT["step"]
    assert set(CONTRACT["asks_grad_scaler_for"]) <= set(vars(_Steering))
    defaults = {
        **dict.fromkeys(
            ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"), str(torch.float32)
        ),
        **dict.fromkeys(("use_decoupled_grad", "store_param_remainders"), "False"),
    }
    assert defaults.keys() <= constructor & attributes
    assert {name: CONTRACT["defaults"][name] for name in defaults} == defaults


@pytest.mark.gpu
def test_the_real_library_is_captured() -> None:
    def run(scope: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, device="cuda")
        optimizer = FusedAdam(model.parameters(), lr=0.1, capturable=True)
        with graphfsdp.capture(
            model, optimizer, scope=scope, loss_fn=lambda m, x: m(x).square().mean()
        ) as step:
            for _ in range(14):
                step(torch.randn(8, 64, device="cuda"))
                optimizer.param_groups[0]["lr"].mul_(0.9)
        return model.weight.detach().clone()

    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    # Without its libraries the import of Transformer Engine ends in RuntimeError or OSError.
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(str(error))
    assert torch.equal(run("none"), run("full_iteration"))


def test_theirs_has_decoupled_gradients_clipped_and_a_changed_weight_decay_refused() -> None:
    model = nn.Linear(3, 1, bias=False)
    made: Any = make_stand_in(CONTRACT)
    optimizer = made(model.parameters(), lr=0.1, capturable=True, use_decoupled_grad=True)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(use_decoupled_grad=True)}
    with graphfsdp.capture(
        model, optimizer, loss_fn=lambda m, x: m(x).sum(), max_grad_norm=0.5, **options
    ) as step:
        for _ in range(14):
            step(torch.rand(4, 3) + 1)
            weight: Any = model.weight
            grad = weight.decoupled_grad  # which their kernel scales in place
            torch.testing.assert_close(grad.norm(), torch.tensor(0.5))
            assert model.weight.grad is None
        optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(GuardError, match="'weight_decay' of group 0 of Transformer Engine"):
            step(torch.ones(4, 3))


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def make_model(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net = Squared(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 3))
    return net.to(device, dtype)


ACCEPTED: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any], torch.dtype]] = {
    # parameter dtype, FusedAdam's arguments, policy, dtype of the bound gradient
    "float32": (FP32, {}, {}, FP32),
    "bfloat16": (BF16, {}, {}, BF16),
    "main_weights": (BF16, {"master_weights": True}, {}, FP32),
    "main_weights_named": (
        BF16,
        {"master_weights": True},
        {"main_params_dtype": FP32, "main_grads_dtype": FP32},
        FP32,
    ),
    "decoupled_float32": (
        BF16,
        {"use_decoupled_grad": True, "master_weights": True},
        {"main_grads_dtype": FP32, "use_decoupled_grad": True},
        FP32,
    ),
    "decoupled_bfloat16_with_main_weights": (
        BF16,
        {"use_decoupled_grad": True, "master_weights": True},
        {"main_params_dtype": FP32, "main_grads_dtype": BF16, "use_decoupled_grad": True},
        BF16,
    ),
    "decoupled_bfloat16_for_float32": (
        FP32,
        {"use_decoupled_grad": True},
        {"main_grads_dtype": BF16, "use_decoupled_grad": True},
        BF16,
    ),
}


@pytest.mark.parametrize(
    ("name", "microbatches"), [(name, 1 + index % 2) for index, name in enumerate(ACCEPTED)]
)
def test_accepted_precisions_replay_as_eager_runs(
    name: str, microbatches: int, device: torch.device
) -> None:
    dtype, arguments, policy, grad_dtype = ACCEPTED[name]
    kind = "decoupled_grad" if "use_decoupled_grad" in arguments else "grad"

    def look(step: graphfsdp.CapturedStep, model: nn.Module, index: int) -> None:
        assert step.grad_norm is not None
        assert step.grad_norm.dtype == FP32
        assert all(getattr(param, kind).dtype == grad_dtype for param in model.parameters())
        assert kind == "grad" or all(param.grad is None for param in model.parameters())
        num_bytes = grad_dtype.itemsize * sum(param.numel() for param in model.parameters())
        assert step.report().gradient_bytes >= num_bytes

    case = Case(
        lambda: make_model(device, dtype),
        lambda generator: Batch((torch.randn(8, WIDTH, generator=generator),)),
        loss_in_its_dtype,
    )
    options: dict[str, Any] = {
        "optimizer": lambda params: FusedAdam(params, weight_decay=0.1, **arguments),
        "max_grad_norm": 0.5,
        "microbatches": microbatches,
        "mp_policy": MixedPrecisionPolicy(**policy),
        "between": look,
    }
    expected = run(case, "none", device, **options)
    for scope in ("full_iteration", "forward_backward"):
        assert_same_run(expected, run(case, scope, device, **options))


@pytest.mark.parametrize(
    ("param", "main", "grad", "decoupled"),
    [
        case
        for case in itertools.product([FP32, BF16], [None, FP32], [None, FP32, BF16], [True, False])
        if case[:2] != (FP32, FP32)  # a float32 parameter has no main weight apart from it
    ],
)
def test_it_accepts_exactly_what_reads_the_persistent_buffer(
    param: torch.dtype, main: torch.dtype | None, grad: torch.dtype | None, decoupled: bool
) -> None:
    model = nn.Linear(2, 1, dtype=param)
    optimizer = FusedAdam(
        model.parameters(), use_decoupled_grad=decoupled, master_weights=main is not None
    )
    policy = MixedPrecisionPolicy(main_grads_dtype=grad, use_decoupled_grad=decoupled)
    reads_it = decoupled or grad in (None, main or param)
    with (
        nullcontext() if reads_it else pytest.raises(PrecisionError),
        graphfsdp.capture(model, optimizer, mp_policy=policy),
    ):
        pass


def test_only_the_parameters_that_clash_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=BF16), nn.LayerNorm(2))
    policy = MixedPrecisionPolicy(main_grads_dtype=FP32)
    with pytest.raises(PrecisionError) as caught:
        graphfsdp.capture(model, FusedAdam(model.parameters()), mp_policy=policy)
    assert "'0.weight'" in str(caught.value)
    assert "'1.weight'" not in str(caught.value)


NONE, OUTSIDE, FULL = "none", "forward_backward", "full_iteration"


def set_version(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    where = "graphfsdp.optim.adapters.backends.installed_version"
    monkeypatch.setattr(where, lambda _: version)


@pytest.fixture(autouse=True)
def _newest(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, *CONTRACT["version"])


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


def dtensor(*shape: int) -> Tensor:
    mesh = init_device_mesh("cpu", (1,))
    return DTensor.from_local(torch.zeros(shape), mesh, [Shard(0)], run_check=False)


class Quantised(nn.Parameter):
    """Looks like Transformer Engine's: any dtype outside, and its quantiser beside it."""

    _quantizer = None


def check(make: Make, scope: str, policy: dict[str, Any], **params: nn.Parameter) -> None:
    """Begin a capture of a model that has such parameters; a refusal leaves all as it was."""
    model = nn.Module()
    model.layer = nn.Module()
    for name, param in params.items():
        model.layer.register_parameter(name, param)
    optimizer = make([*params.values()])
    before = snapshot(model, optimizer)
    mp_policy = MixedPrecisionPolicy(**policy)
    try:
        graphfsdp.capture(model, optimizer, scope=scope, mp_policy=mp_policy).close()
    except ConfigError:
        assert_same_state(before, snapshot(model, optimizer))
        assert not any(param._post_accumulate_grad_hooks for param in params.values())
        assert all(param.grad is None for param in params.values())
        raise


@pytest.mark.parametrize("scope", [OUTSIDE, FULL])
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
def test_parameters_that_are_8_bit_numbers_are_refused_and_frozen_ones_not(
    make: Make, scope: str
) -> None:
    good = nn.Parameter(torch.zeros(2, 4))
    words = r"8-bit numbers themselves, as 'layer\.weight'.*Remedy: parameters in float32"
    for bad in (nn.Parameter(torch.zeros(2, 4).to(torch.float8_e4m3fn)), Quantised(good.data)):
        with pytest.raises(ConfigError, match=words):
            check(make, scope, {}, good=good, weight=bad)
        bad.requires_grad_(False)
        check(make, OUTSIDE, {}, good=good, weight=bad)


adam = partial(FusedAdam, lr=0.1)
main_weights = partial(adam, master_weights=True)
decoupled = partial(adam, use_decoupled_grad=True)
sgd = partial(torch.optim.SGD, lr=0.1, fused=True)
with_momentum = partial(sgd, momentum=0.9)
apex = partial(make_foreign, "apex")
te = partial(make_foreign, "transformer_engine")
# Policy and optimizer that clash, in any scope: maker, parameter's dtype, policy, what is told.
CLASHES: list[tuple[Make, torch.dtype, dict[str, Any], str]] = [
    (
        *(adam, BF16, {"main_grads_dtype": FP32}),
        "main_params_dtype .*bfloat16.*main_grads_dtype is float32.*use_decoupled_grad=True",
    ),
    (
        *(adam, FP32, {"main_grads_dtype": BF16}),
        r"main_grads_dtype is bfloat16.*'layer\.weight'.*main_grads_dtype=float32",
    ),
    (
        *(main_weights, BF16, {"main_params_dtype": FP32, "main_grads_dtype": BF16}),
        "main_params_dtype is float32.*main_grads_dtype is bfloat16",
    ),
    (
        *(adam, BF16, {"main_params_dtype": FP32}),
        "main_params_dtype is float32.*bfloat16.*master_weights=True",
    ),
    (
        *(adam, BF16, {"use_decoupled_grad": True}),
        r"use_decoupled_grad is True.*param\.grad.*FusedAdam\(\.\.\., use_decoupled_grad=True\)",
    ),
    (
        *(decoupled, FP32, {"main_grads_dtype": BF16}),
        r"use_decoupled_grad is False.*param\.decoupled_grad",
    ),
    (
        *(partial(torch.optim.SGD, lr=0.1), FP32, {"use_decoupled_grad": True}),
        "use_decoupled_grad.*SGD",
    ),
    (torch.optim.RMSprop, BF16, {"main_grads_dtype": FP32}, "RMSprop.*bfloat16.*float32"),
    (
        *(partial(torch.optim.AdamW, fused=True), BF16, {"main_grads_dtype": FP32}),
        "AdamW.*bfloat16.*float32.*FusedAdam",
    ),
]
# What Transformer Engine's has not in a graph.
TE: list[tuple[Make, torch.dtype, str]] = [
    (partial(te, capturable=False), FP32, "made without capturable=True, {} a replay would"),
    (partial(te, store_param_remainders=True), FP32, "store_param_remainders=True, {}know no"),
    (
        *(partial(te, master_weights=True, master_weight_dtype=FP16), FP16),
        r"main weights that are not float32, {}master_weight_dtype=torch\.float32",
    ),
    (
        *(partial(te, exp_avg_sq_dtype=BF16), FP32),
        "moments that are not both float32 or both bfloat16, {}FusedAdam",
    ),
]


@pytest.mark.parametrize(
    ("make", "dtype", "scope", "policy", "words"),
    [
        *(
            (make, dtype, scope, policy, words)
            for make, dtype, policy, words in CLASHES
            for scope in (NONE, FULL)
        ),
        *((make, dtype, OUTSIDE, {}, None) for make, dtype, _ in TE),
        *(
            (make, dtype, FULL, {}, said.format(r"as for 'layer\.weight'.*"))
            for make, dtype, said in TE
        ),
        (apex, FP32, OUTSIDE, {}, None),
        (apex, FP32, FULL, {}, r"apex FusedAdam .*'forward_backward'"),
        (sgd, FP32, FULL, {}, None),
        (sgd, FP32, FULL, {"main_grads_dtype": BF16}, r"'layer\.weight'"),
        (sgd, None, FULL, {}, r"'layer\.weight', which is a DTensor.*Remedy: fused=False"),
        (partial(sgd, fused=False), None, FULL, {}, None),
        # torch's kernel for momentum in 16 bits reads memory that nothing has written.
        *((with_momentum, dtype, OUTSIDE, {}, "wei") for dtype in (BF16, FP16)),
        (with_momentum, FP32, OUTSIDE, {}, None),
        (partial(with_momentum, fused=False), BF16, OUTSIDE, {}, None),
        (sgd, BF16, OUTSIDE, {}, None),
    ],
)
@pytest.mark.usefixtures("mesh_of_one")
def test_what_an_optimizer_cannot_do_is_refused_by_name(
    make: Make, dtype: torch.dtype | None, scope: str, policy: dict[str, Any], words: str | None
) -> None:
    """Without a dtype the parameter is a DTensor."""
    param = nn.Parameter(dtensor(2, 4) if dtype is None else torch.zeros(2, 4, dtype=dtype))
    if words is None:
        check(make, scope, policy, weight=param)
        return
    with pytest.raises(ConfigError, match=words) as caught:
        check(make, scope, policy, weight=param)
    if policy or "Transformer Engine" in str(caught.value):
        assert isinstance(caught.value, PrecisionError)


@pytest.mark.usefixtures("mesh_of_one")
def test_transformer_engine_is_refused_before_the_version_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = {"main_grads_dtype": BF16, "use_decoupled_grad": True}
    make = partial(te, use_decoupled_grad=True, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16)
    for value in (torch.zeros(2, 4), dtensor(2, 4), dtensor(0, 4)):
        param = nn.Parameter(value)
        for version in ((2, 20), (2, 21), (3, 0)):
            set_version(monkeypatch, *version)
            check(make, FULL, policy, weight=param)
        set_version(monkeypatch, 2, 19)
        words = "^Transformer Engine FusedAdam 2.19 .*Remedy: Transformer Engine 2.20"
        with pytest.raises(PrecisionError, match=words):
            check(make, FULL, policy, weight=param)
        check(make, OUTSIDE, policy, weight=param)

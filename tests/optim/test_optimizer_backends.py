"""The adapters: which optimizers can be captured, and what they guard."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError, GuardError, PrecisionError
from graphfsdp.optim import FusedAdam
from graphfsdp.optim.adapters.backends import adapt

POLICY = MixedPrecisionPolicy()
Make = Callable[..., torch.optim.Optimizer]


def _model(device: torch.device | str = "cpu") -> nn.Linear:
    return nn.Linear(4, 3, device=device)


def _capturable(make: Make, device: torch.device) -> Make:
    """Return ``make`` with what torch's optimizers need to be captured on the device."""

    def made(params: Any, **settings: Any) -> torch.optim.Optimizer:
        if make in (torch.optim.Adam, torch.optim.AdamW):
            settings = {"fused": True, "capturable": device.type == "cuda", **settings}
        return make(params, **settings)

    return made


def _set_grads(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.randn_like(param)


TORCH: list[Make] = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD]
ALL: list[Make] = [FusedAdam, *TORCH, torch.optim.RMSprop]


@pytest.mark.parametrize("make", ALL)
def test_step_is_that_of_the_optimizer_on_scaled_gradients(
    device: torch.device, make: Make
) -> None:
    model, twin = _model(device), _model(device)
    twin.load_state_dict(model.state_dict())
    made = _capturable(make, device)
    adapter = adapt(made(model.parameters(), lr=0.1))
    adapter.check(dict(model.named_parameters()), POLICY, Scope.FULL_ITERATION)
    if make is torch.optim.RMSprop and device.type == "cuda":  # as the adapter has it stepped
        reference = made(twin.parameters(), lr=torch.tensor(0.1, device=device), capturable=True)
    else:
        reference = made(twin.parameters(), lr=0.1)
    if device.type == "cuda":
        reference._warned_capturable_if_run_uncaptured = True
    for scale in (None, 0.5, 1.0):
        _set_grads(model)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert param.grad is not None
            other.grad = param.grad * (1.0 if scale is None else scale)
        adapter.step(None if scale is None else torch.tensor(scale, device=device))
        reference.step()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a torch\.optim\.Optimizer, got int"):
        adapt(3)  # type: ignore[arg-type]


def test_a_key_that_vanished_is_refused() -> None:
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    adapter = adapt(optimizer)
    adapter.bake()
    del optimizer.param_groups[0]["momentum"]
    with pytest.raises(GuardError, match=r"'momentum' of group 0 .* now missing"):
        adapter.before_replay()


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdam])
def test_an_lr_tensor_may_be_filled_but_not_replaced(make: Make) -> None:
    lr = torch.tensor(0.1)
    optimizer = _capturable(make, torch.device("cpu"))(_model().parameters(), lr=lr)
    adapter = adapt(optimizer)
    adapter.bake()
    lr.fill_(0.5)
    adapter.before_replay()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    with pytest.raises(GuardError, match="group 0"):
        adapter.before_replay()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(GuardError, match="group 0"):
        adapter.before_replay()


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdam])
def test_an_lr_tensor_whose_memory_moved_is_refused(make: Make) -> None:
    lr = torch.tensor(0.1)
    adapter = adapt(_capturable(make, torch.device("cpu"))(_model().parameters(), lr=lr))
    adapter.bake()
    lr.data = torch.tensor(0.1)
    with pytest.raises(GuardError, match="'lr' of group 0"):
        adapter.before_replay()


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.SGD])
def test_a_scheduler_does_not_warn_when_only_replays_stepped(make: Make) -> None:
    optimizer = make(_model().parameters(), lr=0.1)
    adapter = adapt(optimizer)
    adapter.bake()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    adapter.before_replay()
    scheduler.step()  # torch's warning would be an error here


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_torch_optimizers_refuse_gradients_of_another_dtype(make: Make) -> None:
    model = _model().bfloat16()
    adapter = adapt(_capturable(make, torch.device("cpu"))(model.parameters()))
    named = dict(model.named_parameters())
    with pytest.raises(PrecisionError, match="'weight', 'bias'"):
        adapter.check(
            named, MixedPrecisionPolicy(main_grads_dtype=torch.float32), Scope.FULL_ITERATION
        )
    with pytest.raises(PrecisionError, match="use_decoupled_grad"):
        adapter.check(named, MixedPrecisionPolicy(use_decoupled_grad=True), Scope.NONE)
    adapter.check(named, POLICY, Scope.FULL_ITERATION)
    assert adapter.main_grad_dtype(named["weight"], POLICY) == torch.bfloat16


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.AdamW])
def test_every_persistent_tensor_has_a_name(device: torch.device, make: Make) -> None:
    model = _model(device)
    lr = torch.tensor(0.1, device=device)
    optimizer = _capturable(make, device)(model.named_parameters(), lr=lr)
    adapter: CapturableOptimizer = adapt(optimizer)
    adapter.check(dict(model.named_parameters()), POLICY, Scope.FULL_ITERATION)
    _set_grads(model)
    adapter.step(None)
    found: dict[str, Tensor] = dict(adapter.state_tensors())
    assert found["lr of group 0"] is lr
    for name in ("weight", "bias"):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert found[f"{key} of {name}"] is optimizer.state[getattr(model, name)][key]
    if make is FusedAdam:
        table = found[f"hyper-parameter table on {model.weight.device}"]
        assert table.shape == (1, 5)

"""Guards of sharded models: DTensors are looked at through to this rank's rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from ranks import on_ranks

Change = Callable[[Any], Callable[[], object]]


def moved(model: Any) -> Callable[[], object]:
    param = model[0].weight
    old = param._local_tensor.data
    param._local_tensor.data = old.clone()
    return lambda: setattr(param._local_tensor, "data", old)


def other_rows(model: Any) -> Callable[[], object]:
    param = model[0].weight
    old = param._local_tensor
    param._local_tensor = old.clone()
    return lambda: setattr(param, "_local_tensor", old)


def frozen(model: Any) -> Callable[[], object]:
    model[0].weight.requires_grad_(False)
    return lambda: model[0].weight.requires_grad_(True)


def hooked(model: Any) -> Callable[[], object]:
    return model[0].weight.register_hook(lambda grad: grad).remove  # type: ignore[no-any-return]


def divided(model: Any) -> Callable[[], object]:
    model.set_gradient_divide_factor(4.0)
    return lambda: model.set_gradient_divide_factor(3.0)


def told(word: str) -> Change:
    def tell(model: Any) -> Callable[[], object]:
        getattr(model, word)(False)
        return lambda: getattr(model, word)(True)

    return tell


CHANGES: tuple[tuple[Change, str], ...] = (
    (moved, r"parameter '0\.weight' was at address .* in other memory"),
    (other_rows, r"parameter '0\.weight' was at address .* in other memory"),
    (frozen, r"parameter '0\.weight' was trained .* now frozen"),
    (hooked, r"gradient hook .* of parameter '0\.weight'"),
    (divided, r"gradient_divide_factor"),
    (told("set_requires_gradient_sync"), r"requires_gradient_sync of .* was on .* now off"),
    (told("set_is_last_backward"), r"is_last_microbatch of .* was on .* now off"),
    (told("set_requires_all_reduce"), r"requires_all_reduce of .* was on .* now off"),
)


@on_ranks("ranks1")
def test_changes_of_a_sharded_model_are_refused_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    graphfsdp.fully_shard(model).set_gradient_divide_factor(3.0)  # type: ignore[operator]
    optim = FusedAdam(model.parameters(), lr=0.01)
    x = torch.randn(5, 4)
    with graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).square().mean()) as step:
        for _ in range(5):
            step(x)
        with torch.no_grad():
            model(x)
        for change, match in CHANGES:
            undo = change(model)
            with pytest.raises(graphfsdp.GuardError, match=match) as caught:
                step(x)
            assert len(caught.value.changes) == 1, caught.value
            undo()
            step(x)
        assert step.report().num_calls["replay"] == 1 + len(CHANGES)

"""Each change of what a guard asks for is seen before a replay, and each mere use is not."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.asks import hold
from graphfsdp._capture.guards.tensors import TensorGuard
from guard_net import Guarded, refused, start

Change = Callable[[Any], Any]


def assign(new: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of ``tensor.data``."""
    return lambda tensor: setattr(tensor, "data", new(tensor.data))


def resized(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() + (1 << 22))


def set_other(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.zeros(tensor.shape, dtype=tensor.dtype))  # type: ignore[call-overload]


def swapped(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.zeros_like(tensor))
    gc.collect()  # what was swapped out is freed


MOVES: dict[str, Change] = {
    "other memory": assign(Tensor.clone),
    "set_": set_other,
    "another place in the storage": assign(
        lambda data: data.as_strided(data.shape, data.stride(), data.storage_offset() + 1)
    ),
    "swapped": swapped,
    "a storage that grew": resized,
}
LAYOUTS: dict[str, Change] = {
    "dtype": assign(lambda data: data.view(torch.int32)),
    "a dimension in front": assign(lambda data: data.unsqueeze(0)),
    "a dimension behind": assign(lambda data: data.unsqueeze(-1)),
    "fewer rows": assign(lambda data: data.narrow(0, 0, data.shape[0] - 1)),
    "wider strides": assign(lambda data: data.as_strided(data.shape, [2] * data.dim())),
    "one row": assign(lambda data: data.select(0, 0)),
    "requires_grad": lambda tensor: tensor.requires_grad_(not tensor.requires_grad),
}


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 1, 1, 1, 1, 3)], ids=len)
@pytest.mark.parametrize("name", [*MOVES, *LAYOUTS])
def test_each_change_of_a_tensor_is_seen(name: str, shape: tuple[int, ...]) -> None:
    def make() -> Tensor:
        return torch.zeros(128)[7 : 7 + torch.Size(shape).numel()].view(shape)

    for only_places in (False, True):
        tensors = [nn.Parameter(make(), requires_grad=False), make(), make()]
        named = [(str(index), tensor) for index, tensor in enumerate(tensors)]
        guard = TensorGuard(named, addresses_only=only_places)
        asks = list(guard.asks())
        assert hold(asks)
        (MOVES | LAYOUTS)[name](tensors[0])
        seen = name in MOVES or not only_places
        assert hold(asks) is not seen
        assert {change.name for change in guard.changes()} == ({"0"} if seen else set())


def test_use_that_changes_nothing_is_not_seen() -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((), (3,), (2, 3), (2, 0, 3))]
    buffers = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    named = [(str(index), tensor) for index, tensor in enumerate([*params, *buffers])]
    guards = [TensorGuard(named), TensorGuard(named, addresses_only=True)]
    asks = [ask for guard in guards for ask in guard.asks()]
    with torch.no_grad():
        for tensor in (*params, *buffers):
            tensor.copy_(torch.ones_like(tensor))
            tensor.add_(1)
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    for param in params:
        param.grad = None
        copy.deepcopy(param), repr(param), param.detach().numpy(), param.mul(2.0).sum()
    optim = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optim.step()
    assert hold(asks)


def emptied(module: nn.Module) -> None:
    module._buffers = {}


def state_of(run: Guarded) -> dict[str, Any]:
    found: dict[str, Any] = run.optim.state[run.model.scale]
    return found


CHANGES: dict[str, tuple[Callable[[Guarded], Any], str]] = {
    "buffer let go": (
        lambda run: setattr(run.model.body.table, "data", torch.ones(4)),
        "buffer 'body.table' was at address",
    ),
    "class": (
        lambda run: setattr(run.model.body.dropout, "__class__", nn.AlphaDropout),
        "class of 'body.dropout'",
    ),
    "behind": (
        lambda run: object.__setattr__(run.model.body, "temperature", 3.0),
        "'body.temperature' was 2.0",
    ),
    "deleted": (lambda run: delattr(run.model.body, "temperature"), "'body.temperature' .*missing"),
    "table": (lambda run: emptied(run.model.body), "buffer 'body.table' was .*absent"),
    "state or": (lambda run: state_of(run).__ior__({"a": torch.ones(1)}), "'a' of 'scale'"),
    "reversed": (lambda run: run.optim.param_groups[0]["params"].reverse(), "group 0"),
    "other list": (
        lambda run: run.optim.param_groups[0].update(params=[run.model.scale]),
        "now of 1",
    ),
}


def in_another_table(run: Guarded) -> None:
    """Add a parameter to a table that has taken another one's place before."""
    run.model.body._parameters = dict(run.model.body._parameters)
    run.step(run.batch())
    run.model.body._parameters["late"] = nn.Parameter(torch.ones(1))


def in_other_state(run: Guarded) -> None:
    run.optim.state[run.model.scale] = dict(state_of(run))
    run.step(run.batch())
    state_of(run)["exp_avg"] = torch.zeros(())


def after_a_write(run: Guarded) -> None:
    """Write what does not matter first, so that all dicts of the model are asked once more."""
    vars(run.model)["epoch"] = 1
    run.step(run.batch())
    run.model.body.temperature = 3.0


CHANGES |= {
    "another table": (in_another_table, "parameter 'body.late' was absent"),
    "other state": (in_other_state, "optimizer state 'exp_avg' of 'scale'"),
    "after a write": (after_a_write, "'body.temperature' was 2.0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_what_is_held_is_refused_by_name(name: str) -> None:
    guarded = start()
    change, match = CHANGES[name]
    change(guarded)
    refused(guarded, match)
    guarded.step.close()


def test_a_step_count_that_was_moved_is_refused() -> None:
    guarded = start()
    state_of(guarded)["step"].data = state_of(guarded)["step"].data.clone()
    refused(guarded, "optimizer state 'step' of 'scale' was at address")

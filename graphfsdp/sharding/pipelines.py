"""What torch's pipeline schedules and other libraries ask of sharded modules besides methods."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphfsdp.errors import ConfigError
from graphfsdp.sharding.module import (
    FSDPModule,
    begin_forward,
    end_forward,
    unit_of,
    units_with,
)


class NotOfOursError(ConfigError, AttributeError):
    """Something of FSDP2's state that a module sharded here does not have."""


class ShardState(FSDPState):
    """What ``fully_shard.state(module)`` returns: an object for each module, with nothing to set.

    torch's pipelines, which accumulate gradients unreduced, go through it to have them reduced at
    last. They ask torch's ``fully_shard`` for it, others ask ``_get_module_fsdp_state``: whether
    there is one, mostly. Everything else that torch's has is refused by name.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._module = module
        self._state_ctx: Any = SimpleNamespace(all_states=())

    def __getattr__(self, name: str) -> NoReturn:
        raise NotOfOursError(
            f"something asks for {name!r} of FSDP2's state of a module that graphfsdp.fully_shard "
            "has sharded, which has none. Remedy: the methods of FSDPModule; docs/fsdp2.md lists "
            "them"
        )

    def _root_post_backward_final_callback(self) -> None:
        self._module.finish_microbatches()


def give_state(module: nn.Module) -> None:
    """Let torch's own ``fully_shard`` find the state of a module, and ``replicate`` leave it be."""
    assert isinstance(module, FSDPModule)
    torch_function: Any = torch_fully_shard
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[torch_function.__wrapped__] = state = ShardState(module)
    _insert_module_state(module, state)
    module.__dict__.setdefault(REGISTRY_KEY, {})[torch_function.__name__] = RegistryItem()


def state_of(module: nn.Module) -> ShardState | None:
    """Return the state of a sharded module, the same each time; None if it is none."""
    torch_function: Any = torch_fully_shard
    found = torch_function.state(module) if isinstance(module, FSDPModule) else None
    return found if isinstance(found, ShardState) else None


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Let the units of several roots gather and reduce on the same side streams.

    The parts of a pipeline on one rank are such roots: they never work at the same time.

    Raises:
        ConfigError: a module is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"share_comm_ctx takes sharded modules, got {type(module).__name__}")
    for module in modules:
        units_with(module)
        unit_of(module).schedule.share_lanes(unit_of(modules[0]).schedule)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module compute with whole weights, as ``forward`` does.

    A module that is not sharded stays as it is.

    Args:
        module: What has the method.
        method_name: Its name.

    Raises:
        ConfigError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(
            f"{type(module).__name__} has no method {method_name!r} that could be a forward pass"
        )

    setattr(module, method_name, _ForwardMethod(module, method))


class _ForwardMethod:
    """A method around which weights are whole; a copy of the module has a copy of it."""

    def __init__(self, module: FSDPModule, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._module, self._method = module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        args, kwargs = begin_forward(module, args, kwargs)
        try:
            output = self._method(*args, **kwargs)
        except BaseException:
            unit_of(module).leave_forward()
            raise
        return end_forward(module, args, output)

"""Faults at a chosen operator of an iteration, and everything that must be as it was after one."""

import enum
import random
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, local_part, snapshot


class Fault(enum.Enum):
    ERROR = "error"
    OUT_OF_MEMORY = "out of memory"
    INTERRUPT = "interrupt"  # Ctrl-C, as the signal that it is


class InjectedError(Exception):
    """Raised by an operator on purpose."""


FAULTS = (InjectedError, torch.OutOfMemoryError, KeyboardInterrupt)


class FaultMode(TorchDispatchMode):
    """Lets one operator fail, before or after it has done its work."""

    def __init__(self, index: int, fault: Fault, *, after: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self.num_ops = 0
        self._fault = fault
        self._after = after
        self.fired: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its inner operators come back here
        fires = self.num_ops == self._index and self.fired is None
        self.num_ops += 1
        if fires and not self._after:
            self._fire(str(func))
        result = func(*args, **(kwargs or {}))
        if fires and self._after:
            self._fire(str(func))
        return result

    def _fire(self, name: str) -> None:
        self.fired = name
        if self._fault is Fault.ERROR:
            raise InjectedError(name)
        if self._fault is Fault.OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(name)
        signal.raise_signal(signal.SIGINT)


class World:
    """Everything that a failed call must leave alone: values, identities, generators, numbers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._generators = generators
        self._values = self._tensors()
        self._facts = self._look()

    def assert_unchanged(self, when: str, *, without_gradients: bool = False) -> None:
        """Compare with the present, bit for bit.

        Args:
            when: For the message.
            without_gradients: Leave gradients out.
        """

        def kept(values: dict[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in values.items() if not (without_gradients and "grad" in k)}

        assert_same_state(kept(self._values), kept(self._tensors()), when)
        before, now = kept(self._facts), kept(self._look())
        for name in before | now:
            assert name in before, f"{when}: {name} is new"
            assert name in now, f"{when}: {name} is gone"
            assert before[name] == now[name], f"{when}: {name} was {before[name]}, is {now[name]}"

    def _tensors(self) -> dict[str, Tensor]:
        values = snapshot(self._model, self._optimizer)
        for index, generator in enumerate(self._generators):
            values[f"generator {index}"] = generator.get_state()
        if isinstance(self._optimizer, FusedAdam):
            for name, tensor in self._optimizer.control.tensors():
                if name != "gradient norm":
                    # The first step brings them to the parameters' device.
                    values[name] = tensor.to("cpu", copy=True)
        # A comparison of DTensors is a collective.
        return {name: local_part(value) for name, value in values.items()}

    def _look(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for path, module in self._model.named_modules():
            facts[f"hooks of {path}"] = [*module._forward_hooks, *module._forward_pre_hooks]
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                facts[f"{path}.{name}"] = (
                    id(value),
                    value is not None and local_part(value).data_ptr(),
                )
            for name, value in vars(module).items():
                if isinstance(value, Tensor | bool | int | float):
                    facts[f"{path}.{name}"] = id(value) if isinstance(value, Tensor) else value
        for name, param in self._model.named_parameters():
            facts[f"attributes of {name}"] = sorted(vars(param))
            for kind in ("grad", "decoupled_grad"):
                facts[f"{kind} of {name}"] = id(getattr(param, kind, None))
            facts[f"state of {name}"] = {
                key: id(value) if isinstance(value, Tensor) else value
                for key, value in self._optimizer.state.get(param, {}).items()
            }
        for index, group in enumerate(self._optimizer.param_groups):
            facts[f"group {index}"] = {
                key: [id(p) for p in value] if key == "params" else repr(value)
                for key, value in group.items()
            }
        facts["Python's generator"] = random.getstate()
        facts["NumPy's generator"] = repr(numpy.random.get_state())
        return facts

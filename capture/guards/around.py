"""Guard of modules and tensors that the iteration reads beside the model: teachers, criteria."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.guards.asks import Ask, Guard
from graphfsdp._capture.guards.hooks import HookGuard, tables_of_modules
from graphfsdp._capture.guards.modules import AttributeGuard, NamedModules, StructureGuard, join
from graphfsdp._capture.guards.tensors import TensorGuard
from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp.base.changes import Change, ChangeKind


class AroundGuard:
    """Notices what changes in modules outside of the model: mode, numbers, weights, hooks.

    A frozen teacher, a criterion with class weights: the recording has read them like the model's
    own modules, and knows of their later changes as little.
    """

    def __init__(
        self,
        around: NamedModules,
        log: AttributeLog,
        was_read: Callable[[Tensor], bool],
        tensors: Iterable[tuple[str, Tensor]],
        before: Mapping[int, tuple[Any, Any]],
    ) -> None:
        """Remember them now.

        Args:
            around: The modules, from ``modules_outside``.
            log: What the recorded iteration has read, of any module.
            was_read: Tells whether the recording has touched a tensor's storage.
            tensors: Others that the recording has read, with names for messages.
            before: Containers of modules before the recording, from ``contents``.
        """
        attributes = AttributeGuard(around, log, was_read, before, every_mode=False)
        weights = [item for item in _weights(around) if was_read(item[1])]
        named = [*weights, *attributes.named_tensors(), *tensors]
        hooks = HookGuard(list(tables_of_modules(around)))
        self._guards: tuple[Guard, ...] = (
            *((StructureGuard(around), attributes, hooks) if around else ()),
            *((TensorGuard(named),) if named else ()),
        )

    def asks(self) -> Iterator[Ask]:
        """Yield what all of them ask."""
        for guard in self._guards:
            yield from guard.asks()

    def changes(self) -> list[Change]:
        """Compare everything and name what has changed."""
        return [
            # They have no part in what the model's own modules decide: which gradients there
            # are, and in which mode an evaluation runs.
            replace(change, kind=ChangeKind.ATTRIBUTE, name=f"{change.name} outside of the model")
            for guard in self._guards
            for change in guard.changes()
        ]


def modules_outside(model: nn.Module, log: AttributeLog) -> NamedModules:
    """Return those that the log has seen reads of, named by the class of the outermost one."""
    inside = set(map(id, model.modules()))
    read = {id(module): module for module in log.modules() if id(module) not in inside}
    below = {id(child) for module in read.values() for child in module.children()}
    roots = [module for key, module in read.items() if key not in below]
    found: dict[int, tuple[str, nn.Module]] = {}
    for root in roots or read.values():
        for path, module in root.named_modules():
            if id(module) in read:
                found.setdefault(id(module), (f"{type(root).__name__}.{path}".rstrip("."), module))
    return list(found.values())


def _weights(around: NamedModules) -> Iterator[tuple[str, Tensor]]:
    for path, module in around:
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{kind} {join(path, name)!r}", tensor

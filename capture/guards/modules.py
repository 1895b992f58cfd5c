"""Guard of modules: which there are, what they hold, train or eval mode, their numbers."""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp.base.changes import Change, ChangeKind

_TABLES = (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "module"))
_GET_TABLES = tuple(operator.itemgetter(table) for table, _ in _TABLES)
SCALARS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.Generator)
# What every module has and no forward pass depends on.
OWN = frozenset((*vars(nn.Module()), *dir(nn.Module))) - {"training"}
# What torch's own layers keep for their repr: the forward pass takes it from the weights.
_UNUSED_BY_TORCH = frozenset(
    {
        *("in_features", "out_features", "in1_features", "in2_features", "num_embeddings"),
        *("embedding_dim", "num_features", "in_channels", "out_channels", "affine"),
        "elementwise_affine",
    }
)
_MISSING = object()


@dataclass(frozen=True)
class Slots:
    """What one module held, by table."""

    path: str
    module: nn.Module
    tables: Mapping[str, dict[str, Any]]


class StructureGuard:
    """Notices modules, parameters and buffers that were added, removed or replaced."""

    def __init__(self, model: nn.Module) -> None:
        """Remember what every module holds now."""
        self._slots = [
            Slots(path, module, {table: dict(getattr(module, table)) for table, _ in _TABLES})
            for path, module in model.named_modules()
        ]
        self._holders = [vars(slots.module) for slots in self._slots]
        self._copies = [[slots.tables[table] for slots in self._slots] for table, _ in _TABLES]
        # Containers call their modules in this order.
        modules = [slots.module._modules for slots in self._slots]
        self._several = [table for table in modules if len(table) > 1]
        self._orders = list(map(list, self._several))

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        tables = [list(map(get, self._holders)) for get in _GET_TABLES]
        orders = list(map(list, self._several))
        return orders == self._orders and same_objects(tables, self._copies)

    def changes(self) -> list[Change]:
        """Compare each table of each module and name what has changed."""
        found = [
            change
            for slots in self._slots
            for table, kind in _TABLES
            for change in _compare(slots, kind, slots.tables[table], getattr(slots.module, table))
        ]
        return found or [change for slots in self._slots for change in _other_order(slots)]


class AttributeGuard:
    """Notices a changed mode, a changed number of a module, and a replaced ``forward``.

    Note [Attributes]: a recording has every Python value baked in that the iteration has read.
    Guarded are the numbers, strings, dtypes, devices, generators, and tuples of these that it has
    read and not assigned (see AttributeLog), tensors that are plain attributes if the recording
    touched them, and the mode of every module. What it has not read, such as ``model.epoch`` of a
    training loop, may change. Where reads cannot be seen, all public values are guarded.
    """

    def __init__(
        self,
        model: nn.Module,
        log: AttributeLog,
        was_read: Callable[[Tensor], bool],
        *,
        every_mode: bool = True,
    ) -> None:
        """Remember the values now.

        Args:
            model: The model.
            log: What the recorded iteration has read and assigned.
            was_read: Tells whether the recording has touched a tensor's storage.
            every_mode: Guard train or eval mode also of what has no part whose mode was read.
        """
        self._modules = list(model.named_modules())
        self._root = model
        self._dicts = [vars(module) for _, module in self._modules]
        self._lengths = list(map(len, self._dicts))
        self._absent = [
            log.names_read(module) - vars(module).keys() - OWN for _, module in self._modules
        ]
        self._forwards = [values.get("forward") for values in self._dicts]
        self._scalars: dict[str, tuple[list[dict[str, Any]], list[Any], list[str]]] = {}
        self._tensors: list[tuple[dict[str, Any], str, Tensor, str]] = []
        for path, module in self._modules:
            for name, value in vars(module).items():
                if log.assigned(module, name):
                    continue
                if isinstance(value, Tensor) and was_read(value):
                    self._tensors.append((vars(module), name, value, path))
                elif is_scalar(value) and (
                    (every_mode and name == "training") or _may_be_read(module, name, log)
                ):
                    dicts, values, paths = self._scalars.setdefault(name, ([], [], []))
                    dicts.append(vars(module))
                    values.append(value)
                    paths.append(path)
        self._getters = [
            (operator.itemgetter(name), dicts, values)
            for name, (dicts, values, _) in self._scalars.items()
        ]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the plain attributes that are tensors and were read, with names for messages."""
        for _, name, tensor, path in self._tensors:
            yield f"attribute {join(path, name)!r}", tensor

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        try:
            return (
                all(list(map(get, dicts)) == values for get, dicts, values in self._getters)
                and list(map(len, self._dicts)) == self._lengths
                and all(values.get(name) is known for values, name, known, _ in self._tensors)
            )
        except Exception:  # a value was deleted, or is now of a kind that cannot be compared
            return False

    def changes(self) -> list[Change]:
        """Compare each value and name what has changed."""
        found = list(self._mode_changes())
        for name, (dicts, values, paths) in self._scalars.items():
            if name == "training":
                continue
            for holder, old, path in zip(dicts, values, paths, strict=True):
                new = holder.get(name, _MISSING)
                if not _equal(old, new):
                    found.append(_attribute(path, name, _show(old), _show(new)))
        for holder, name, tensor, path in self._tensors:
            if holder.get(name) is not tensor:
                found.append(_attribute(path, name, "a tensor", "another object"))
        rows = zip(self._modules, self._dicts, self._forwards, strict=True)
        for (path, _), holder, forward in rows:
            if holder.get("forward") is not forward:
                found.append(_attribute(path, "forward", "one method", "another one"))
        for (path, _), holder, absent in zip(self._modules, self._dicts, self._absent, strict=True):
            found += [
                _attribute(path, name, "not the module's own", _show(holder[name]))
                for name in sorted(absent & holder.keys())
            ]
        if not found:
            self._lengths = list(map(len, self._dicts))  # what was added is not guarded
        return found

    def _mode_changes(self) -> Iterator[Change]:
        dicts, values, paths = self._scalars.get("training", ([], [], []))
        changed = {
            path: old
            for holder, old, path in zip(dicts, values, paths, strict=True)
            if holder.get("training") is not old
        }
        words = {True: "in train mode", False: "in eval mode"}
        for path, old in changed.items():
            if path and path.rpartition(".")[0] in changed:
                continue  # its parent says it for both
            below = f"{path}." if path else ""
            num_below = sum(name != path and name.startswith(below) for name in changed)
            name = f"module {path!r}" if path else "the model"
            if num_below:
                name += f" (with {num_below} modules in it)"
            call = f"{path or 'model'}.{'train' if old else 'eval'}()"
            remedy = f"call {call} before the step (validation in between is fine)"
            yield Change(ChangeKind.MODE, name, words[old], words[not old], remedy)


class _TensorsComparedError(Exception):
    """Two different tensors met in a comparison."""


class _NoTensorIsEqual(TorchFunctionMode):
    """Ends a comparison that comes to two different tensors, before it asks for their values."""

    def __torch_function__(self, *args: Any) -> Any:
        raise _TensorsComparedError


def same_objects(live: list[Any], copies: list[Any]) -> bool:
    """Compare containers in one call; tensors are equal only to themselves.

    Python takes identical elements for equal without a look at them, and asks others. A tensor of
    one element would answer by its value, on a GPU even after waiting for it.
    """
    try:
        with _NoTensorIsEqual():
            return live == copies
    except Exception:  # _TensorsComparedError, or what the users' own objects raise
        return False


def join(path: str, name: str) -> str:
    """Return the full name of what a module holds."""
    return f"{path}.{name}" if path else name


def _compare(
    slots: Slots, kind: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name, _MISSING), now.get(name, _MISSING)
        if old is new:
            continue
        title = f"{kind} {join(slots.path, name)!r}"
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            remedy = "write into the old one (copy_, load_state_dict without assign=True)"
            words = "one tensor", "another one, in other memory"
        else:
            remedy = f"change the {kind}s of a model before its capture"
            words = _kind_of(old), _kind_of(new)
        yield Change(ChangeKind.STRUCTURE, title, *words, remedy)


def _other_order(slots: Slots) -> Iterator[Change]:
    before, now = list(slots.tables["_modules"]), list(slots.module._modules)
    if before != now:
        title = f"the order of the modules in {slots.path!r}" if slots.path else "the module order"
        words = ", ".join(before[:8]), ", ".join(now[:8])
        yield Change(ChangeKind.STRUCTURE, title, *words, "order modules before the capture")


def _kind_of(value: object) -> str:
    if value is _MISSING:
        return "absent"
    return "None" if value is None else f"a {type(value).__name__}"


def is_scalar(value: object) -> bool:
    """Tell whether a value is a number, string, dtype, device, generator, or a tuple of these."""
    if isinstance(value, tuple):
        return all(isinstance(item, SCALARS) for item in value)
    return isinstance(value, SCALARS)


def _may_be_read(module: nn.Module, name: str, log: AttributeLog) -> bool:
    if name == "training":
        return any(log.read(part, name) for part in module.modules())
    if name in OWN:
        return False
    if log.sees_all or log.read(module, name):
        return log.read(module, name)
    if type(module).__module__.startswith("torch.nn.") and name in _UNUSED_BY_TORCH:
        return False
    return not name.startswith("_")


def _equal(old: object, new: object) -> bool:
    return new is old or (type(old) is type(new) and bool(old == new))


def _attribute(path: str, name: str, old: str, new: str) -> Change:
    remedy = (
        "hold what changes in a buffer and write into it (fill_, copy_), which replays see; keep "
        "what the forward pass does not read outside of the model"
    )
    return Change(ChangeKind.ATTRIBUTE, f"attribute {join(path, name)!r}", old, new, remedy)


def _show(value: object) -> str:
    if value is _MISSING:
        return "missing"
    return "a tensor" if isinstance(value, Tensor) else repr(value)

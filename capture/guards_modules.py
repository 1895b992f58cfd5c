"""Guard of modules: which there are, what they hold, train or eval mode, their numbers."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.changes import Change, ChangeKind

_TABLES = (("_parameters", "parameter"), ("_buffers", "buffer"), ("_modules", "module"))
_SCALARS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.Generator)
# What torch's own layers keep for their repr: the forward pass takes it from the weights.
_UNUSED_BY_TORCH = frozenset(
    {
        *("in_features", "out_features", "in1_features", "in2_features", "num_embeddings"),
        *("embedding_dim", "num_features", "in_channels", "out_channels", "affine"),
        "elementwise_affine",
    }
)
_MISSING = object()

AttributeKey = tuple[int, str]  # id of a module, name of its attribute


@dataclass(frozen=True)
class Slots:
    """What one module held, by table."""

    path: str
    module: nn.Module
    tables: Mapping[str, dict[str, Any]]


class Assignments:
    """Which attributes of modules the recorded iteration assigns by itself.

    The next eager forward pass would assign them anew before it reads them, or count on with them
    (``self.calls += 1``); a replay does neither. So a change of them is no change of the recording.
    """

    def __init__(self) -> None:
        self.keys: set[AttributeKey] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note assignments while the body runs."""
        original = nn.Module.__setattr__
        keys = self.keys

        def noting(module: nn.Module, name: str, value: Any) -> None:
            keys.add((id(module), name))
            original(module, name, value)

        nn.Module.__setattr__ = noting  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]


class StructureGuard:
    """Notices modules, parameters and buffers that were added, removed or replaced."""

    def __init__(self, model: nn.Module) -> None:
        """Remember what every module holds now."""
        self._slots = [
            Slots(path, module, {table: dict(getattr(module, table)) for table, _ in _TABLES})
            for path, module in model.named_modules()
        ]
        live = [getattr(slots.module, table) for slots in self._slots for table, _ in _TABLES]
        self._empty = [table for table in live if not table]
        self._filled = [table for table in live if table]
        self._copies = [dict(table) for table in self._filled]
        # Where the objects differ, comparing dicts asks the tensors whether they are equal, and a
        # tensor of one element can answer yes. Those are compared by identity.
        self._single = [
            (table, name, value)
            for table in self._filled
            for name, value in table.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        return (
            not any(self._empty)
            and same_objects(self._filled, self._copies)
            and all(table.get(name) is value for table, name, value in self._single)
        )

    def changes(self) -> list[Change]:
        """Compare each table of each module and name what has changed."""
        return [
            change
            for slots in self._slots
            for table, kind in _TABLES
            for change in _compare(slots, kind, slots.tables[table], getattr(slots.module, table))
        ]


class AttributeGuard:
    """Notices a changed mode, a changed number of a module, and a replaced ``forward``.

    Note [Attributes]: a recording has every Python value baked in that the forward pass has read.
    Which attributes it reads cannot be seen, so all public ones that are numbers, strings, dtypes,
    devices, generators, or tuples of these are taken to be read, and tensors that are plain
    attributes if the recording touched them. Not those that the iteration assigns, see Assignments.
    """

    def __init__(
        self,
        model: nn.Module,
        assigned: set[AttributeKey],
        was_read: Callable[[Tensor], bool],
    ) -> None:
        """Remember the values now.

        Args:
            model: The model.
            assigned: Attributes that the recorded iteration has assigned.
            was_read: Tells whether the recording has touched a tensor's storage.
        """
        self._modules = list(model.named_modules())
        self._root = model
        self._dicts = [vars(module) for _, module in self._modules]
        self._lengths = list(map(len, self._dicts))
        self._forwards = [values.get("forward") for values in self._dicts]
        self._scalars: dict[str, tuple[list[dict[str, Any]], list[Any], list[str]]] = {}
        self._tensors: list[tuple[dict[str, Any], str, Tensor, str]] = []
        for path, module in self._modules:
            for name, value in vars(module).items():
                if (id(module), name) in assigned:
                    continue
                if isinstance(value, Tensor) and was_read(value):
                    self._tensors.append((vars(module), name, value, path))
                elif _is_guarded(module, name, value):
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


def same_objects(live: list[Any], copies: list[Any]) -> bool:
    """Compare containers, identical elements being equal without a look at them."""
    try:
        return live == copies
    except Exception:  # two different tensors refuse to be compared as a whole
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


def _kind_of(value: object) -> str:
    if value is _MISSING:
        return "absent"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_guarded(module: nn.Module, name: str, value: object) -> bool:
    if name.startswith("_"):
        return False
    if type(module).__module__.startswith("torch.nn.") and name in _UNUSED_BY_TORCH:
        return False
    if isinstance(value, tuple):
        return all(isinstance(item, _SCALARS) for item in value)
    return isinstance(value, _SCALARS)


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


__all__ = [
    "Assignments",
    "AttributeGuard",
    "AttributeKey",
    "StructureGuard",
    "join",
    "same_objects",
]

"""What a recording bakes in of an optimizer's groups, and the guard that it stays so."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from graphfsdp.base.changes import Change, ChangeKind

_NOT_VALUES = frozenset({"params", "param_names"})
_MISSING = object()


class BakedValues:
    """The values of all groups at the time of the recording."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._num_params = [len(group["params"]) for group in groups]
        self._values = [
            {key: value for key, value in group.items() if key not in _NOT_VALUES}
            for group in groups
        ]
        # A tensor's values may change, since a replay reads them; its address may not.
        self._addresses = [
            {key: value.data_ptr() for key, value in values.items() if isinstance(value, Tensor)}
            for values in self._values
        ]

    def changes(self, groups: Sequence[Mapping[str, Any]], owner: str) -> list[Change]:
        """Return what has changed since the recording.

        Args:
            groups: The same optimizer's groups, now.
            owner: The optimizer's class, for messages.
        """
        num_params = [len(group["params"]) for group in groups]
        if num_params != self._num_params:
            return [changed_groups(owner, self._num_params, num_params)]
        found = []
        for index, (group, values) in enumerate(zip(groups, self._values, strict=True)):
            for key, old in values.items():
                new = group.get(key, _MISSING)
                if new is not old and not _equal(old, new):
                    found.append(_change(owner, index, key, old, new))
            for key, address in self._addresses[index].items():
                new = group.get(key)
                if new is values[key] and new.data_ptr() != address:
                    found.append(_change(owner, index, key, new, new))
        return found


def changed_groups(owner: str, old: Sequence[int], new: Sequence[int]) -> Change:
    """Return the change of an optimizer whose groups have grown, shrunk or multiplied.

    Args:
        owner: The optimizer's class, for messages.
        old: Parameters in each group at the time of the recording.
        new: Parameters in each group now.
    """
    words = (f"groups of {list(old)} parameters", f"groups of {list(new)}")
    remedy = "set up all parameter groups before the capture"
    return Change(ChangeKind.GROUPS, f"param_groups of {owner}", *words, remedy)


def _equal(old: object, new: object) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return False  # the recording reads the old one's address
    return type(old) is type(new) and bool(old == new)


def _change(owner: str, index: int, key: str, old: object, new: object) -> Change:
    name = f"{key!r} of group {index} of {owner}"
    if isinstance(old, Tensor):
        words = ("a tensor that the graph reads", f"{_show(new)} in other memory")
        if not isinstance(new, Tensor):
            words = (words[0], _show(new))
        remedy = "write into the tensor instead (fill_ or copy_), which replays see"
        return Change(ChangeKind.BAKED_VALUE, name, *words, remedy)
    remedy = "graphfsdp.optim.FusedAdam reads every number anew in each replay"
    if key == "lr":
        remedy += ", and an lr that is a tensor on the parameters' device stays live as well"
    return Change(ChangeKind.BAKED_VALUE, name, _show(old), _show(new), remedy)


def _show(value: object) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, Tensor):
        return f"a tensor on {value.device}"
    return repr(value)

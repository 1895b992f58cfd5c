"""What a recording bakes in of an optimizer's groups, and the guard that it stays so."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from graphfsdp.errors import GuardError

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

    def check(self, groups: Sequence[Mapping[str, Any]], owner: str) -> None:
        """Refuse a change since the recording.

        Args:
            groups: The same optimizer's groups, now.
            owner: The optimizer's class, for messages.

        Raises:
            GuardError: a value was changed; group, key, old and new value are named.
        """
        if [len(group["params"]) for group in groups] != self._num_params:
            raise GuardError(
                f"{owner} had groups of {self._num_params} parameters when its step was captured, "
                f"now of {[len(group['params']) for group in groups]}: capture again"
            )
        for index, (group, values) in enumerate(zip(groups, self._values, strict=True)):
            for key, old in values.items():
                new = group.get(key, _MISSING)
                if new is not old and not _equal(old, new):
                    raise GuardError(_message(owner, index, key, old, new))
            for key, address in self._addresses[index].items():
                if group[key].data_ptr() != address:
                    raise GuardError(_message(owner, index, key, values[key], group[key]))


def _equal(old: object, new: object) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return False  # the recording reads the old one's address
    return type(old) is type(new) and bool(old == new)


def _message(owner: str, index: int, key: str, old: object, new: object) -> str:
    if isinstance(old, Tensor):
        what = (
            f"{key!r} of group {index} of {owner} was a tensor that the captured step reads; it "
            f"was replaced by {_show(new)}. Write into the tensor instead (fill_ or copy_), which "
            "replays see; or capture again"
        )
        return what
    remedy = "graphfsdp.optim.FusedAdam reads every number anew in each replay"
    if key == "lr":
        remedy += "; an lr that is a tensor on the parameters' device stays live as well"
    return (
        f"{key!r} of group {index} of {owner} is baked into the captured step as {_show(old)}, "
        f"but is now {_show(new)}: a replay would go on with the old value. {remedy}; or capture "
        "again"
    )


def _show(value: object) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, Tensor):
        return f"a tensor on {value.device}"
    return repr(value)


__all__ = ["BakedValues"]

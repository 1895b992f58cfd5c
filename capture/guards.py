"""What must not have changed between two replays."""

from typing import Any

from torch import Tensor, nn

from graphfsdp.dtensors import local_part
from graphfsdp.errors import GuardError


class AddressGuard:
    """Notices parameters and buffers that were moved to other memory.

    A graph goes on with the memory that it was recorded on. After ``model.to(...)``,
    ``param.data = ...`` or ``load_state_dict(assign=True)`` it would train tensors that the model
    no longer has, without an error.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember where everything lies now."""
        self._names: list[str] = []
        self._slots: list[tuple[dict[str, Any], str]] = []
        for module_name, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._names.append(f"{module_name}.{name}".lstrip("."))
                        self._slots.append((table, name))
        self._addresses = self._look()

    def check(self) -> None:
        """Compare; some tens of microseconds for 300 parameters.

        Raises:
            GuardError: a tensor has moved; it is named.
        """
        now = self._look()
        if now == self._addresses:
            return
        pairs = zip(self._names, now, self._addresses, strict=True)
        moved = [name for name, here, before in pairs if here != before]
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        raise GuardError(
            f"{moved[0]!r}{more} lies in other memory than when the iteration was captured "
            "(model.to(), .data = ..., load_state_dict(assign=True)); a replay would train the "
            "old memory. Remedy: copy new values in place (copy_, load_state_dict), or make a "
            "new captured step"
        )

    def _look(self) -> list[int | None]:
        # What the module holds now, not what it held then: assign=True puts other objects there.
        return [_address(table.get(name)) for table, name in self._slots]


def _address(tensor: Tensor | None) -> int | None:
    if type(tensor) in _PLAIN:
        return tensor.data_ptr()  # type: ignore[union-attr]
    return None if tensor is None else local_part(tensor).data_ptr()


_PLAIN = (Tensor, nn.Parameter)


__all__ = ["AddressGuard"]

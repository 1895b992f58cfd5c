"""Which attributes of modules an iteration assigns while it is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from graphfsdp.base.torch_internals import not_compiled


class Assignments:
    """Notes assignments of modules' attributes.

    What an iteration assigns, the next eager one would assign anew before it reads it, or count on
    with it (``self.calls += 1``); a replay does neither. So a change of it is no change of the
    recording.
    """

    def __init__(self) -> None:
        self._found: set[tuple[int, str]] = set()  # id of a module's dict, name of its attribute

    def has(self, table: object, name: object) -> bool:
        return (id(table), name) in self._found

    @contextmanager
    def noting(self) -> Iterator[None]:
        original = nn.Module.__setattr__
        found = self._found

        def noting_set(module: nn.Module, name: str, value: Any) -> None:
            found.add((id(vars(module)), name))
            original(module, name, value)

        not_compiled(noting_set)
        nn.Module.__setattr__ = noting_set  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]

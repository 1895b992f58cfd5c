"""Which attributes of modules an iteration reads and assigns while it is recorded."""

import sys
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from torch import nn

from graphfsdp._capture.trace.source import has_compiled
from graphfsdp.base.torch_internals import not_compiled

# Frames of these look into modules for reasons of their own.
_PLUMBING = ("torch.nn.modules.module", "torch._dynamo.", "graphfsdp.")
# Whoever takes these of a module gets all its attributes; copies and pickles take the last three.
_WHOLE = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__"})


class AttributeLog:
    """Notes reads and assignments of modules' attributes, of whatever kind they are.

    Note [Reads]: an iteration has every Python value baked in that it has read. Python lets a
    class answer each read (``self.x``, ``getattr``, ``attrgetter``, also from other modules and
    through properties), so for the time of a recording ``nn.Module`` does, for all its
    subclasses. Whoever takes a module's whole ``__dict__`` may have read all of it. What
    torch.compile has compiled reads below Python: once it has compiled anything in this process,
    every number is taken to be read (``sees_all`` is False).

    Note [Assignments]: what the iteration assigns, the next eager one would assign anew before
    it reads it, or count on with it (``self.calls += 1``); a replay does neither. So a change of
    it is no change of the recording.
    """

    def __init__(self) -> None:
        self._assigned: set[tuple[int, str]] = set()  # id of a module, name of its attribute
        self._noted: dict[int, set[str]] = {}  # by id of a module, while it goes on
        self._read: dict[int, frozenset[str]] = {}  # when it is over
        self._opened: set[int] = set()  # modules whose dict was taken
        self._on = False
        self._met: dict[int, weakref.ref[nn.Module]] = {}
        self._on_first: Callable[[nn.Module], None] | None = None

    @property
    def sees_all(self) -> bool:
        """Whether no read can have gone past the log."""
        return not has_compiled()

    def assigned(self, module: nn.Module, name: str) -> bool:
        return (id(module), name) in self._assigned

    def read(self, module: nn.Module, name: str) -> bool:
        """Tell whether the iteration has read an attribute, as far as the log has seen it."""
        return (
            name in self._read.get(id(module), ())
            or id(module) in self._opened
            or type(module).__getattribute__ is not nn.Module.__getattribute__
        )

    def names_read(self, module: nn.Module) -> AbstractSet[str]:
        """Return the names that the iteration has asked a module for, found or not."""
        return self._read.get(id(module), frozenset())

    def modules(self) -> list[nn.Module]:
        """Return the modules that were read and still live, the model's and others."""
        found = [self._met[key]() for key in self._read if key in self._met]
        return [module for module in found if module is not None]

    def _meet(self, module: nn.Module) -> set[str]:
        key = id(module)

        def forget(reference: object) -> None:  # another one may be made at its address
            if self._met.get(key) is reference:
                self._noted.pop(key, None)
                self._read.pop(key, None)
                self._opened.discard(key)

        self._met[key] = weakref.ref(module, forget)
        names: set[str] = set()
        self._noted[key] = names
        if self._on_first is not None:
            self._on = False
            self._on_first(module)
            self._on = True
        return names

    def stop(self) -> None:
        """Note no more; what is read from now on is no business of the iteration."""
        self._on = False
        shared: dict[frozenset[str], frozenset[str]] = {}  # layers of a kind are read alike
        for key, names in self._noted.items():
            same = frozenset(names)
            self._read[key] = shared.setdefault(same, same)
        self._noted.clear()

    @contextmanager
    def noting(self, on_first: Callable[[nn.Module], None] | None = None) -> Iterator[None]:
        """Note reads and assignments while the body runs, or until ``stop``.

        ``on_first`` is called with each module before its first read is noted.
        """
        self._on_first = on_first
        original_set = nn.Module.__setattr__
        read, opened, assigned = self._noted, self._opened, self._assigned

        def noting_set(module: nn.Module, name: str, value: Any) -> None:
            if self._on:
                assigned.add((id(module), name))
            original_set(module, name, value)

        def noting_get(module: nn.Module, name: str) -> Any:
            if self._on:
                if name in _WHOLE:
                    if not sys._getframe(1).f_globals.get("__name__", "").startswith(_PLUMBING):
                        opened.add(id(module))
                else:
                    # Without calls, where that goes: a recording is told of each.
                    key = id(module)
                    names = read[key] if key in read else self._meet(module)
                    if name not in names:
                        names.add(name)
            return object.__getattribute__(module, name)

        # Compiled code reads and assigns as well, and torch.compile would trace who answers.
        for function in (noting_set, noting_get, _Method.__get__, _Method.__call__):
            not_compiled(function)
        nn.Module.__setattr__ = noting_set  # type: ignore[method-assign,assignment]
        nn.Module.__getattribute__ = _Method(noting_get)  # type: ignore[method-assign,assignment]
        self._on = True
        try:
            yield
        finally:
            self._on, self._on_first = False, None
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = original_set  # type: ignore[method-assign]


class _Method:
    """A method that is no function: torch.compile gives up on classes that have one here."""

    def __init__(self, function: Callable[[nn.Module, str], Any]) -> None:
        self._function = function

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        return self if module is None else self._function.__get__(module)

    def __call__(self, module: nn.Module, name: str) -> Any:
        return self._function(module, name)

"""Learns which word of a dict changes whenever the dict does, and where a list has its items."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from graphfsdp._capture.guards.process_memory import ProcessMemory

_NUM_WORDS = 6  # of CPython's PyDictObject
_LIST_WORDS = 5  # of a PyListObject
_NO_ADDRESS = 1 << 16  # numbers up to here are none
_AFTER_HEADER = 2  # the count of references and the type come first


class DictWords:
    """Where a dict keeps the number that CPython gives it anew at each change.

    CPython up to 3.13 has such a number (PEP 509). Of the dict of an object's attributes it does
    not always change from 3.13 on, where attributes may lie in the object itself.

    Attributes:
        table: The word of a dict, or None if there is no such word.
        attributes: The word of the dict of a module's attributes, or None.
    """

    def __init__(self, memory: ProcessMemory) -> None:
        """Learn them, on dicts made for it.

        Args:
            memory: Reads words.
        """
        self.table = _common(memory, (dict, OrderedDict, lambda: defaultdict(list)), _changes)
        self.attributes = _common(memory, (_Probe,), _attribute_changes)


class ListWords:
    """Where a list keeps its length, and the address of its items.

    Attributes:
        items: The word with the address, or None if there is no such word.
        length: The word with the length, or None.
    """

    def __init__(self, memory: ProcessMemory) -> None:
        """Learn them, on a list made for it.

        Args:
            memory: Reads words.
        """
        self.items: int | None = None
        self.length: int | None = None
        probe = [object() for _ in range(3)]
        for index, word in enumerate(memory.read(id(probe), _LIST_WORDS)[_AFTER_HEADER:]):
            place = index + _AFTER_HEADER
            if word == len(probe) and self.length is None:
                self.length = place
            elif word > _NO_ADDRESS and memory.read(word, len(probe)) == list(map(id, probe)):
                self.items = place
        more = [object() for _ in range(1000)]
        probe += more
        words = memory.read(id(probe), _LIST_WORDS)
        if self.items is None or memory.read(words[self.items], 1003)[3:] != list(map(id, more)):
            self.items = None
        if self.length is None or words[self.length] != len(probe):
            self.length = None


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = -1


def _common(
    memory: ProcessMemory,
    kinds: tuple[Callable[[], Any], ...],
    changes: Callable[[Any], Iterator[Callable[[], Any]]],
) -> int | None:
    """Return the word that each change of each kind has changed."""
    candidates = set(range(_AFTER_HEADER, _NUM_WORDS))
    for make in kinds:
        owner = make()
        table = owner if isinstance(owner, dict) else vars(owner)
        for change in changes(owner):
            before = memory.read(id(table), _NUM_WORDS)
            if len(before) < _NUM_WORDS:
                return None  # beyond what is readable
            change()
            after = memory.read(id(table), _NUM_WORDS)
            candidates &= {index for index in candidates if before[index] != after[index]}
    return min(candidates, default=None)


def _changes(table: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yield changes of a dict, in every way that Python has."""
    table.update({f"key {index}": object() for index in range(3)})
    yield lambda: table.__setitem__("key 1", object())
    yield lambda: table.__setitem__("new", object())
    yield lambda: table.update(new=object())
    yield lambda: table.__ior__({"new": object()})
    yield lambda: table.pop("new")
    yield lambda: table.setdefault("new", object())
    yield lambda: table.__delitem__("key 0")
    yield table.popitem
    yield table.clear
    yield lambda: table.update({f"key {index}": object() for index in range(100)})  # it grows
    yield lambda: table.__setitem__("key 1", object())


def _attribute_changes(module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield changes of a module's attributes."""
    yield lambda: setattr(module, "number", 10**9)
    yield lambda: object.__setattr__(module, "number", 10**10)
    yield lambda: vars(module).update(number=10**11)
    yield lambda: module.train(False)
    yield lambda: setattr(module, "new", object())
    yield lambda: setattr(module, "new", object())
    yield lambda: delattr(module, "new")
    for index in range(40):  # more than fit into the object itself
        yield lambda index=index: setattr(module, f"name_{index}", index)  # type: ignore[misc]
    yield lambda: setattr(module, "number", 10**12)

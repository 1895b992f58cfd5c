"""One look at memory that answers for all guards: no word of what they watch has changed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, inference_mode, nn

from graphfsdp._capture.guards.dict_words import DictWords, ListWords
from graphfsdp._capture.guards.process_memory import WORD, ProcessMemory
from graphfsdp._capture.guards.tensor_words import NotLearnedError, TensorWords

_MAX_WAIT = 1 << 20  # replays


@dataclass(frozen=True)
class Watched:
    """What the answer of one guard depends on.

    Attributes:
        tensors: Plain tensors: their memory, shape, strides, dtype and requires_grad.
        places: Plain tensors of which only the memory counts.
        wrappers: Tensors made of others (DTensors): their requires_grad.
        inner: Wrapper, attribute, and the tensor that it holds there.
        objects: Their classes.
        tables: Dicts: which keys and values they hold.
        lists: Which items they hold.
        attributes: Modules: which attributes they have, and which objects these are.
        rest: Tells whether all holds that words do not tell of; None: there is no more.
    """

    tensors: Sequence[Tensor] = ()
    places: Sequence[Tensor] = ()
    wrappers: Sequence[Tensor] = ()
    inner: Sequence[tuple[Tensor, str, Tensor]] = ()
    objects: Sequence[object] = ()
    tables: Sequence[Mapping[Any, Any]] = ()
    lists: Sequence[list[Any]] = ()
    attributes: Sequence[nn.Module] = ()
    rest: Callable[[], bool] | None = None


def together(parts: Sequence[Watched]) -> Watched:
    """Return what the answer of several guards depends on."""
    rests = [part.rest for part in parts if part.rest is not None]
    return Watched(
        tensors=[tensor for part in parts for tensor in part.tensors],
        places=[tensor for part in parts for tensor in part.places],
        wrappers=[tensor for part in parts for tensor in part.wrappers],
        inner=[row for part in parts for row in part.inner],
        objects=[each for part in parts for each in part.objects],
        tables=[table for part in parts for table in part.tables],
        lists=[items for part in parts for items in part.lists],
        attributes=[module for part in parts for module in part.attributes],
        rest=(lambda: all(rest() for rest in rests)) if rests else None,
    )


class Watching(Protocol):
    """What a quick look needs of a guard."""

    def holds(self) -> bool:
        """Ask each object."""
        ...

    def watched(self) -> Watched:
        """Return what ``holds`` looks at."""
        ...


@dataclass
class _Words:
    """Addresses of words, by when they may be read; as sets, for guards watch the same things.

    Attributes:
        pointers: In Python's objects and in storages, which the guards keep alive.
        versions: In dicts; they change also where nothing that matters has changed.
        facts: In torch's tensors, in autograd's part of them, and among items of lists; these live
            while ``pointers`` are unchanged.
    """

    pointers: set[int] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)
    facts: set[int] = field(default_factory=set)

    def add(self, other: "_Words") -> None:
        """Add the words of another guard."""
        self.pointers |= other.pointers
        self.versions |= other.versions
        self.facts |= other.facts


class _Snapshot:
    """The words that all guards watch, as they were when all held."""

    def __init__(self, memory: ProcessMemory, guards: Iterable[Watching]) -> None:
        self._gather = memory.gather
        self._guarded: list[Watched] = []  # keeps alive what is read
        self._asked: list[Callable[[], bool]] = []
        words = _Words()
        finder = _Finder(memory)
        for guard in guards:
            watched = guard.watched()
            try:
                words.add(finder.words(watched))
            except NotLearnedError:
                self._asked.append(guard.holds)
                continue
            self._guarded.append(watched)
            if watched.rest is not None:
                self._asked.append(watched.rest)
        self._first = memory.indices([*sorted(words.pointers), *sorted(words.versions)])
        self._num_pointer_bytes = WORD * len(words.pointers)
        self._facts = memory.indices(sorted(words.facts))
        self._first_now, self._facts_now = map(memory.gather, (self._first, self._facts))

    def holds(self) -> bool:
        """Tell whether no word has changed."""
        gather = self._gather
        if gather(self._first) != self._first_now:
            return False
        if gather(self._facts) != self._facts_now:  # these lie where the first ones point to
            return False
        for ask in self._asked:  # noqa: SIM110, a generator would take longer
            if not ask():
                return False
        return True

    def renew(self) -> bool:
        """Take over new versions of dicts; False if other words have changed as well."""
        gather = self._gather
        now, num_bytes = gather(self._first), self._num_pointer_bytes
        if now[:num_bytes] != self._first_now[:num_bytes]:
            return False
        if gather(self._facts) != self._facts_now:
            return False
        self._first_now = now
        return True


class _Finder:
    """Finds the words that tell of what a guard watches."""

    def __init__(self, memory: ProcessMemory) -> None:
        with inference_mode(False):  # whose tensors never require a gradient
            self._tensors = TensorWords(memory)
        self._dicts = DictWords(memory)
        self._lists = ListWords(memory)
        self._memory = memory

    def words(self, watched: Watched) -> _Words:
        """Return the words.

        Raises:
            NotLearnedError: There are none for some of it.
        """
        found = _Words()
        tensors = self._tensors
        for tensor in (*watched.tensors, *watched.places):
            found.pointers |= {tensors.pointer(tensor), tensors.storage(tensor)}
        for tensor in watched.tensors:
            found.facts.update(tensors.facts(tensor))
        for tensor in watched.places:
            found.facts.update(tensors.place(tensor))
        for wrapper, attribute, inner in watched.inner:
            self._add_inner(found, wrapper, attribute, inner)
        for tensor in (*watched.tensors, *watched.wrappers):
            found.pointers.add(tensors.pointer(tensor))
            found.facts.add(tensors.autograd(tensor))
            flag = tensors.requires_grad(tensor)
            if flag is not None:
                # A tensor keeps autograd's part of it, once it has one, to its end.
                found.facts.add(flag)
        found.pointers |= {id(each) + WORD for each in watched.objects}  # behind the references
        found.versions |= {self._version(table, self._dicts.table) for table in watched.tables}
        for items in watched.lists:
            self._add_list(found, items)
        attributes = map(vars, watched.attributes)
        found.versions |= {self._version(table, self._dicts.attributes) for table in attributes}
        return found

    def _add_list(self, found: _Words, items: list[Any]) -> None:
        if type(items) is not list or self._lists.items is None or self._lists.length is None:
            raise NotLearnedError("a list")
        where = id(items) + WORD * self._lists.items
        found.pointers |= {where, id(items) + WORD * self._lists.length}
        start = self._memory.read(where, 1)[0]
        found.facts.update(start + WORD * index for index in range(len(items)))

    def _add_inner(self, found: _Words, wrapper: Tensor, attribute: str, inner: Tensor) -> None:
        own = getattr(wrapper, "__dict__", {})
        if own.get(attribute) is inner:
            found.versions.add(self._version(own, self._dicts.attributes))
            return
        words = self._memory.read(id(wrapper), type(wrapper).__basicsize__ // WORD)  # its slots
        if getattr(wrapper, attribute) is not inner or id(inner) not in words:
            raise NotLearnedError(f"attribute {attribute!r}")
        found.pointers.add(id(wrapper) + WORD * words.index(id(inner)))

    def _version(self, table: Mapping[Any, Any], word: int | None) -> int:
        if word is None or not isinstance(table, dict):
            raise NotLearnedError("a dict")
        return id(table) + WORD * word


class QuickGuards:
    """Answers for all guards by one look at memory, where that can be learned; else never."""

    def __init__(self) -> None:
        """Nothing is known before the guards have looked for the first time."""
        self._memory = ProcessMemory() if ProcessMemory.is_readable() else None
        self._snapshot: _Snapshot | None = None
        self._num_asked = 0
        self._next = 0  # a snapshot is made when so many times the guards were asked
        self._wait = 1

    def hold(self) -> bool:
        """Tell whether nothing can have changed since the guards held; False: ask them."""
        return self._snapshot is not None and self._snapshot.holds()

    def look_anew(self, guards: Iterable[Watching]) -> None:
        """Remember the words as they are now, when all guards hold.

        A snapshot takes as long as some dozen replays' guards. So where it proves to be of no use,
        since something changes all the time, the next one is made after twice as many replays.

        Args:
            guards: All of them.
        """
        self._num_asked += 1
        if self._memory is None or (self._snapshot is not None and self._snapshot.renew()):
            return
        self._snapshot = None
        if self._num_asked < self._next:
            return
        self._next = self._num_asked + self._wait
        self._wait = min(2 * self._wait, _MAX_WAIT)
        try:
            self._snapshot = _Snapshot(self._memory, guards)
        except NotLearnedError:
            self._memory = None

    def forget(self) -> None:
        """Drop what is known; the next look begins anew."""
        self._snapshot = None

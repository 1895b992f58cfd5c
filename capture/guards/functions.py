"""Guard of what the user's functions, and those of the model, take from around them."""

import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn

from graphfsdp._capture.guards.modules import OWN, join, same_objects
from graphfsdp._capture.guards.surrounding_values import (
    FUNCTIONS,
    MISSING,
    Place,
    first_difference,
    is_plain,
    is_same_memory,
    same,
    show,
    without_tensors,
)
from graphfsdp._capture.guards.surroundings import KnownNames, Search
from graphfsdp._capture.guards.values import is_named
from graphfsdp._capture.rules.outer_counters import OuterCounters
from graphfsdp._capture.trace.attribute_log import AttributeLog
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.errors import CaptureError

_REMEDY = (
    "pass what changes as a tensor of the batch, or hold it in a tensor and write into that "
    "(fill_), which replays see"
)
_REMEDY_TENSOR = "write new values into the old tensor (copy_, fill_), which replays see"
_REMEDY_FUNCTION = "replace functions before the capture, and leave them so"
_REMEDY_MODULE = "replace modules before the capture, or load weights in place (load_state_dict)"

Found = Mapping[str, Place]


class Surroundings:
    """Finds what lies around the functions of an iteration; see Note [Surroundings]."""

    def __init__(self, functions: Sequence[Callable[..., Any]], model: nn.Module) -> None:
        """Prepare.

        Args:
            functions: The loss function, or the user's iteration, and hooks.
            model: The model.
        """
        self._functions = functions
        self._modules = list(model.named_modules())  # others than these are StructureGuard's
        self._names: KnownNames = {}
        self._counters = OuterCounters((), (), ())

    def find(self, log: AttributeLog | None, outside: nn.Module | None) -> Found:
        """Return all places by title.

        Args:
            log: What the recorded iteration has read and assigned of modules; None: not known yet.
            outside: Stands for those that it has used and that are none of the model's.
        """
        return self._search(log, outside).places

    def _search(self, log: AttributeLog | None, outside: nn.Module | None) -> Search:
        elsewhere: set[str] = set()
        for _ in range(2):  # what is handed on is read by functions that are found later
            search = Search(elsewhere, self._names)
            for function in self._functions:
                search.of_function(function)
            modules = list(self._modules)
            modules += [] if outside is None else outside.named_modules()
            kinds = dict.fromkeys(type(module) for _, module in modules)
            search.of_classes(kinds)
            for path, module in modules:
                self._attributes(search, path, module, log)
            for kind in kinds:
                search.of_class_attributes(kind)
            search.of_classes(kinds)
            elsewhere = search.names.attributes
        return search

    def values(self) -> dict[str, object]:
        """Return all values by title; a tensor that the iteration drops must not live here."""
        search = self._search(None, None)
        outside = search.modules.values()
        self._counters = OuterCounters(search.reached, self._modules, outside)
        found = search.places.items()
        return {title: without_tensors(place.value) for title, place in found}

    def refusals(self) -> Iterator[CaptureError]:
        """Yield a refusal of what has changed since ``values`` and decides what runs; once."""
        counters, self._counters = self._counters, OuterCounters((), (), ())
        yield from counters.refusals()  # and then nothing keeps the objects that were looked at

    def _attributes(
        self, search: Search, path: str, module: nn.Module, log: AttributeLog | None
    ) -> None:
        for name, value in list(vars(module).items()):
            if name in OWN or isinstance(value, (Tensor, nn.Module)):
                continue
            if is_plain(value) and is_named(value):
                continue  # other guards have it
            if log is not None:
                read = log.read(module, name)
                read = read or (not log.sees_all and name in search.names.attributes)
                if not read or log.assigned(module, name):
                    continue
            title = f"attribute {join(path, name)!r}"
            search.of_attribute(title, vars(module), name, inside=is_named(value))


class FunctionGuard:
    """Notices what changed in globals, closures, objects and configurations around functions.

    Looked at are the functions given, the ``forward`` of the model's classes, its hooks, and the
    user's functions, methods and objects that these name: what their code reads and never assigns.
    What the recorded iteration has changed itself, it counts or logs; a replay leaves it. Functions
    that are named must stay the same ones, those of torch too, and those that torch's own layers
    call.

    Note [Two looks]: most of the time every place holds the very object that it held; that is one
    call for each. Else everything is searched anew and compared by title, so that a configuration
    in place of an equal one is no change; then its places are those that are looked at.
    """

    def __init__(
        self,
        find: Callable[[], Found],
        before: Mapping[str, object],
        log: AttributeLog,
        was_read: Callable[[Tensor], bool],
    ) -> None:
        """Remember everything now.

        Args:
            find: Finds all places.
            before: The values before the recording, from ``Surroundings.values``.
            log: What the recorded iteration has read of modules.
            was_read: Tells whether the recording has touched a tensor's storage.
        """
        self._find = find
        self._values: list[Any] = []
        self._places = [
            place
            for title, place in find().items()
            if _is_used(place.value, log, was_read)
            and same(before.get(title, MISSING), without_tensors(place.value))
        ]
        self._arm(self._places)

    def leave_out(self, known: AbstractSet[int]) -> None:
        """Do not look at containers, by id, that other guards look at."""
        self._places = [place for place in self._places if place.holder not in known]
        self._arm(self._places)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that were found, with names for messages."""
        for place in self._places:
            if isinstance(place.value, Tensor):
                yield place.title, place.value

    def holds(self) -> bool:
        """Tell quickly that nothing has changed; False means: look closely."""
        try:
            now = list(map(operator.call, self._looks))
        except Exception:  # of a place that is no more
            return False
        if not all(map(operator.is_, now, self._values)) and not self._equal_numbers(now):
            return not self.changes()
        if self._lives and not same_objects(self._lives, self._copies):
            return False
        return not self._arrays or all(place.look() == place.value for place in self._arrays)

    def changes(self) -> list[Change]:
        """Compare each place and name what has changed."""
        now = self._find()
        pairs = [(place, now.get(place.title)) for place in self._places]
        found = [
            _change(place.title, place.value, new.value)
            for place, new in pairs
            if new is not None and not _same(place, new)
        ]
        found = found or [
            _change(place.title, place.value, MISSING)
            for place, new in pairs
            if new is None and not isinstance(place.value, Tensor)
        ]
        if not found:
            self._arm([new for _, new in pairs if new is not None])
        return found

    def _equal_numbers(self, now: list[Any]) -> bool:
        for old, new in zip(self._values, now, strict=True):
            if old is not new and not (is_plain(old) and same(old, new)):
                return False
        self._values = now
        return True

    def _arm(self, places: Sequence[Place]) -> None:
        direct = [place for place in places if place.live is None]
        self._looks = [place.look for place in direct]
        self._values = [place.value for place in direct]
        lives = [place for place in places if place.live is not None]
        self._arrays = [place for place in lives if isinstance(place.value, tuple)]
        containers = [place for place in lives if not isinstance(place.value, tuple)]
        self._lives = [place.live for place in containers]
        self._copies = [place.value for place in containers]


def _is_used(value: object, log: AttributeLog, was_read: Callable[[Tensor], bool]) -> bool:
    if isinstance(value, Tensor):
        return was_read(value)
    return bool(log.names_read(value)) if isinstance(value, nn.Module) else True


def _same(old: Place, new: Place) -> bool:
    if isinstance(old.value, Tensor) and isinstance(new.value, Tensor):
        return is_same_memory(old.value, new.value)
    return old.value is new.value or (
        same(old.value, new.value) and (is_plain(old.value) or not old.is_exact)
    )


def _change(title: str, old: object, new: object) -> Change:
    if not title.startswith("the values of "):
        title, old, new = first_difference(title, old, new)
        words = show(old, new), show(new, old)
    else:
        words = ("some", "others")
    remedy = _REMEDY
    if isinstance(old, Tensor):
        remedy = _REMEDY_TENSOR
    elif isinstance(old, nn.Module):
        remedy = _REMEDY_MODULE
    elif isinstance(old, (*FUNCTIONS, type, types.CodeType)):
        remedy = _REMEDY_FUNCTION
    if words[0] == words[1]:
        words = words[0], words[1].replace("one ", "another ", 1)
    return Change(ChangeKind.ATTRIBUTE, title, *words, remedy)

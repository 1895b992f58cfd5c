"""What an iteration writes into its batch: handed back to the caller's own containers and tensors.

Note [The caller's batch]: a graph reads static inputs, so an iteration is given containers that are
made anew, with static tensors in them. A loop without a graph hands its own in, and sees what the
iteration puts there: the state of a recurrent model, a list of auxiliary losses, a dict for the
log, a mask that is applied in place. So containers are compared behind each iteration that runs as
Python, and the versions of tensors as well. What is new are further results of the graph, which
each call puts where the iteration has put it.
"""

from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.trees import attributes_of, flatten, is_open
from graphfsdp.base.hazards import HazardKind
from graphfsdp.base.op_tensors import storage_key
from graphfsdp.base.torch_internals import tree_leaves, tree_unflatten
from graphfsdp.errors import CaptureError

Batch = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call


class Handed:
    """A batch as an iteration is given it: each container, and what it holds at the beginning."""

    def __init__(self, batch: Batch) -> None:
        self.nodes: list[Any] = []  # containers and leaves
        self.items: list[list[tuple[Any, int]]] = []  # by node: keys and places of what is in it
        self.names: list[str] = []
        self._add(batch, "")
        self.places: dict[int, int] = {}  # by identity
        for place, node in enumerate(self.nodes):
            self.places.setdefault(id(node), place)

    def _add(self, node: Any, name: str) -> int:
        place = len(self.nodes)
        self.nodes.append(node)
        self.items.append([])
        self.names.append(name)
        self.items[place] = [
            (key, self._add(value, self.name(place, key))) for key, value in _items(node)
        ]
        return place

    def name(self, place: int, key: Any) -> str:
        """Return what the caller would write for what lies under a key."""
        name = self.names[place]
        if not name:
            return ("args", "kwargs")[key]
        if name == "kwargs":
            return str(key)
        return f"{name}.{key}" if is_open(self.nodes[place]) else f"{name}[{key!r}]"

    def nodes_alike(self, batch: Batch) -> list[Any]:
        """Return the nodes of another batch that is nested alike, in the order of these."""
        found: list[Any] = [None] * len(self.nodes)

        def visit(place: int, node: Any) -> None:
            found[place] = node
            if self.items[place]:
                inside = dict(_items(node))
                for key, child in self.items[place]:
                    visit(child, inside[key])

        visit(0, batch)
        return found


def _items(node: Any) -> list[tuple[Any, Any]]:
    """Return what is in a container, by key; nothing for a leaf, or for what makes it anew."""
    if isinstance(node, MutableMapping):  # by keys() alone: a TensorDict iterates over its rows
        return [(key, node[key]) for key in node.keys() if node[key] is node[key]]  # noqa: SIM118
    if isinstance(node, list | deque | tuple):
        return list(enumerate(node))
    if is_open(node):
        return list(attributes_of(node).items())
    inside, again = tree_leaves(node), tree_leaves(node)
    is_leaf = len(inside) == 1 and inside[0] is node
    return [] if is_leaf or list(map(id, inside)) != list(map(id, again)) else [*enumerate(inside)]


# Makes a value of the nodes of the caller's batch and of the results of a call.
_Make = Callable[[Sequence[Any], Sequence[Tensor]], Any]


class BatchWrites:
    """Where some results of an iteration go.

    Attributes:
        tensors: What was written, until it is among the results.
        changes_form: There are other keys or another length than before.
    """

    def __init__(self, handed: Handed) -> None:
        """Compare; CaptureError if something was written that no replay can write."""
        self._handed = handed
        self.tensors: list[Tensor] = []
        self.changes_form = False
        self._in_place: list[int] = []
        self._contents: list[tuple[int, list[tuple[Any, _Make]]]] = []  # by place
        for place, node in enumerate(handed.nodes):
            now, before = _items(node), handed.items[place]
            if len(now) == len(before) and all(
                key == old and value is handed.nodes[child]
                for (key, value), (old, child) in zip(now, before, strict=True)
            ):
                continue
            if not isinstance(node, MutableMapping | list | deque) and not is_open(node):
                raise refused_write(f"into a {type(node).__name__}")
            content = [(key, self._value(value, handed.name(place, key))) for key, value in now]
            self._contents.append((place, content))
            self.changes_form |= [key for key, _ in now] != [key for key, _ in before]

    def add_in_place(self, index: int, static: Tensor) -> None:
        """Note that the leaf of that index was written in place."""
        self._in_place.append(index)
        self.tensors.append(static)

    def __bool__(self) -> bool:
        return bool(self._contents or self._in_place)

    @property
    def first_name(self) -> str:
        """What was written first; "" where only tensors were."""
        for place, content in self._contents:
            return self._handed.name(place, content[-1][0] if content else "...")
        return ""

    def refuse_aliases(self, batch: Batch, leaves: Sequence[Any], names: Sequence[str]) -> None:
        """CaptureError: the caller gives twice what was written; the iteration had two copies."""
        own = list(map(id, self._handed.nodes_alike(batch)))
        storages = [storage_key(leaf) if isinstance(leaf, Tensor) else -1 for leaf in leaves]
        twice = [names[index] for index in self._in_place if storages.count(storages[index]) > 1]
        twice += [
            self._handed.names[place] for place, _ in self._contents if own.count(own[place]) > 1
        ]
        for name in twice:
            raise CaptureError(
                f"the iteration writes into {name}, which is or shares memory with another part of "
                "its batch, and each part is copied in apart. Remedy: pass it once, and take the "
                "other one from it in the iteration",
                kind=HazardKind.STATE,
            )

    def _value(self, value: Any, name: str) -> _Make:
        place = self._handed.places.get(id(value))
        if place is not None:
            return lambda own, tensors: own[place]
        if isinstance(value, Tensor):
            index = len(self.tensors)
            self.tensors.append(value)
            return lambda own, tensors: tensors[index]
        leaves, spec = flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            raise refused_write(f"{value!r} to {name}")
        made = [self._value(leaf, name) for leaf in leaves]
        return lambda own, tensors: tree_unflatten([make(own, tensors) for make in made], spec)

    def put_back(self, batch: Batch, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Write results into the caller's batch, whose leaves are ``leaves``."""
        own = self._handed.nodes_alike(batch)
        for place, content in self._contents:
            _fill(own[place], {key: make(own, tensors) for key, make in content})
        first = len(tensors) - len(self._in_place)
        with torch.no_grad():
            for index, result in zip(self._in_place, tensors[first:], strict=True):
                leaves[index].copy_(result)


def _fill(container: Any, content: dict[Any, Any]) -> None:
    if isinstance(container, MutableMapping):
        for key in [key for key in container.keys() if key not in content]:  # noqa: SIM118
            del container[key]
        for key, value in content.items():
            container[key] = value
    elif isinstance(container, list | deque):
        container.clear()
        container.extend(content.values())
    else:
        for name, value in content.items():
            object.__setattr__(container, name, value)


def refused_write(what: str) -> CaptureError:
    return CaptureError(
        f"the iteration writes {what} of its batch; a replay runs no Python and writes nothing "
        "but tensors into dicts, lists and dataclasses. Remedy: make it a tensor, return it beside "
        "the loss, or write it outside of the iteration",
        kind=HazardKind.STATE,
    )

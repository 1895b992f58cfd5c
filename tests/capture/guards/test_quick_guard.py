"""One look at memory says "nothing has changed" only where asking each object would say so.

Words that tell of a change are learned from torch and Python at run time. So each sort of change
must be seen, each use that leaves things as they are must not be, and where nothing can be learned
the guards ask as if there were no words.
"""

import copy
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from graphfsdp._capture.guards.quick_guard import QuickGuards, Watched
from graphfsdp._capture.guards.tensors import TensorGuard

# CPython 3.13 keeps attributes in the object itself: those are asked for, as on 3.14 all dicts are.
HAS_TABLES = sys.version_info < (3, 14)
HAS_ATTRIBUTES = sys.version_info < (3, 13)


class Guard:
    """A guard that always holds, of what it is given."""

    def __init__(self, **watched: Any) -> None:
        self._watched = Watched(**watched)
        self.num_asked = 0

    def holds(self) -> bool:
        self.num_asked += 1
        return True

    def watched(self) -> Watched:
        return self._watched


def looked(*guards: Any) -> QuickGuards:
    """Return what has looked at these guards once."""
    quick = QuickGuards()
    assert not quick.hold(), "nothing is known before a first look"
    quick.look_anew(guards)
    assert quick.hold()
    return quick


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor in the middle of a larger storage."""
    numel = torch.Size(shape).numel()
    return torch.zeros(numel + 64, dtype=dtype)[7 : 7 + numel].view(shape)


def assign(new: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    """Return a change of ``tensor.data``."""

    def change(tensor: Tensor) -> None:
        tensor.data = new(tensor.data)

    return change


def resize_storage(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() + (1 << 22))


def set_other(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.zeros(tensor.shape, dtype=tensor.dtype))  # type: ignore[call-overload]


MOVES: dict[str, Callable[[Tensor], None]] = {
    "other memory": assign(Tensor.clone),
    "set_": set_other,
    "another place in the storage": assign(
        lambda data: data.as_strided(data.shape, data.stride(), data.storage_offset() + 1)
    ),
    "swapped": lambda tensor: torch.utils.swap_tensors(tensor, torch.zeros_like(tensor)),
    "a storage that grew": resize_storage,
}
SHAPES = st.lists(st.integers(1, 3), max_size=5).map(tuple)


@settings(max_examples=50)
@given(st.lists(SHAPES, min_size=1, max_size=6), st.data(), st.booleans())
def test_each_move_of_a_tensor_is_seen(
    shapes: list[tuple[int, ...]], data: st.DataObject, only_places: bool
) -> None:
    tensors = [tensor_of(shape) for shape in shapes]
    quick = looked(Guard(**{"places" if only_places else "tensors": tensors}))
    name = data.draw(st.sampled_from(sorted(MOVES)))
    MOVES[name](tensors[data.draw(st.integers(0, len(tensors) - 1))])
    if name == "swapped":
        gc.collect()  # what was swapped out is freed, and must not be read
    assert not quick.hold(), name


@settings(max_examples=50)
@given(SHAPES, st.data())
def test_each_change_of_shape_strides_or_dtype_is_seen(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    tensor = tensor_of(shape)
    strides = tensor.stride()
    others: list[Callable[[Tensor], Tensor]] = [
        lambda data: data.view(torch.int32),
        lambda data: data.unsqueeze(0),
        lambda data: data.unsqueeze(-1),
    ]
    for dim in range(len(shape)):
        wider = [stride + (index == dim) for index, stride in enumerate(strides)]
        others += [
            partial(Tensor.narrow, dim=dim, start=0, length=shape[dim] - 1),
            partial(Tensor.as_strided, size=shape, stride=wider),
            partial(Tensor.select, dim=dim, index=0),
        ]
    quick = looked(Guard(tensors=[tensor]))
    tensor.data = data.draw(st.sampled_from(others))(tensor.data)
    assert not quick.hold()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "wrappers"])
def test_requires_grad_is_seen_also_where_autograd_had_no_part_before(
    kind: str, before: bool
) -> None:
    for tensor in (torch.zeros(3), nn.Parameter(torch.zeros(3))):
        tensor.requires_grad_(before)
        quick = looked(Guard(**{kind: [tensor]}))
        tensor.requires_grad_(not before)
        assert not quick.hold()
        tensor.requires_grad_(before)
    assert torch.zeros(1).requires_grad is False


def test_use_that_changes_nothing_is_not_seen() -> None:
    params = [nn.Parameter(tensor_of(shape)) for shape in ((), (3,), (2, 3), (2, 0, 3))]
    buffers = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    quick = looked(Guard(tensors=[*params, *buffers]), Guard(places=params))
    with torch.no_grad():
        for tensor in (*params, *buffers):
            tensor.copy_(torch.ones_like(tensor))
            tensor.add_(1)
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    kept = [param.grad for param in params]
    for param in params:
        param.grad = None
        copy.deepcopy(param), repr(param), param.detach().numpy(), param.mul(2.0).sum()
    optim = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optim.step()
    gc.collect()
    assert quick.hold(), kept


def table_changes(table: dict[Any, Any]) -> dict[str, Callable[[], Any]]:
    return {
        "set": lambda: table.__setitem__("a", object()),
        "new": lambda: table.__setitem__("new", 1),
        "del": lambda: table.__delitem__("a"),
        "pop": lambda: table.pop("a"),
        "popitem": table.popitem,
        "clear": table.clear,
        "update": lambda: table.update(a=3),
        "or": lambda: table.__ior__({"a": 4}),
        "setdefault": lambda: table.setdefault("other", 1),
    }


@pytest.mark.skipif(not HAS_TABLES, reason="this Python keeps no versions of dicts")
@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict])
@pytest.mark.parametrize("name", sorted(table_changes({})))
def test_each_change_of_a_dict_is_seen(kind: type[dict[str, int]], name: str) -> None:
    table, other = kind(), {"a": 1}
    table.update(a=1, b=2)
    guard = Guard(tables=[other, table])
    quick = looked(guard)
    assert table["a"] == 1
    assert "c" not in table
    assert quick.hold()
    table_changes(table)[name]()
    assert not quick.hold()
    quick.look_anew([guard])
    assert quick.hold(), "a change that does not matter is taken over"


LIST_CHANGES: dict[str, Callable[[list[object]], Any]] = {
    "set": lambda items: items.__setitem__(1, object()),
    "append": lambda items: items.append(object()),
    "pop": list.pop,
    "clear": list.clear,
    "reverse": list.reverse,
    "slice": lambda items: items.__setitem__(slice(0, 2), [object(), object()]),
    "grow": lambda items: items.extend(range(10_000)),
}


@pytest.mark.parametrize("name", sorted(LIST_CHANGES))
def test_each_change_of_a_list_is_seen(name: str) -> None:
    items: list[object] = [1, 2, 3]
    quick = looked(Guard(lists=[[], items]))
    assert list(items)
    assert quick.hold()
    LIST_CHANGES[name](items)
    assert not quick.hold()


def attribute_changes(module: nn.Module) -> dict[str, Callable[[], Any]]:
    return {
        "number": lambda: setattr(module, "p", 0.25),
        "new": lambda: setattr(module, "new", 1),
        "mode": module.eval,
        "behind": lambda: object.__setattr__(module, "p", 0.75),
        "del": lambda: delattr(module, "p"),
        "dict": lambda: vars(module).update(p=0.75),
        "table": lambda: setattr(module, "_buffers", {}),
    }


@pytest.mark.parametrize("name", sorted(attribute_changes(nn.Module())))
def test_each_change_of_a_modules_attributes_is_seen(name: str) -> None:
    modules = [nn.Dropout(0.5) for _ in range(3)]
    guard = Guard(attributes=modules)
    quick = looked(guard)
    quick.hold()
    attribute_changes(modules[1])[name]()
    if HAS_ATTRIBUTES:
        assert guard.num_asked == 0
        assert not quick.hold()
    else:
        assert guard.num_asked == 2, "what has no words is asked"


def test_another_class_of_an_object_is_seen() -> None:
    module = nn.ReLU()
    quick = looked(Guard(objects=[nn.Tanh(), module]))
    module.__class__ = nn.ReLU6  # type: ignore[assignment]
    assert not quick.hold()


def test_what_words_do_not_tell_of_is_asked_each_time() -> None:
    answers = [True, True, False, True]
    quick = QuickGuards()
    quick.look_anew([Guard(rest=lambda: answers.pop(0))])
    assert [quick.hold() for _ in range(4)] == [True, True, False, True]


def test_a_tensor_of_six_dimensions_is_asked_for_its_shape() -> None:
    guard = TensorGuard([("deep", deep := torch.zeros(1, 1, 1, 1, 1, 2))])
    quick = looked(guard)
    deep.data = deep.data.transpose(0, 5)
    assert not quick.hold()


def test_snapshots_that_are_of_no_use_become_rare() -> None:
    tensor = torch.zeros(3)
    num_made = 0

    class Counting(Guard):
        def watched(self) -> Watched:
            nonlocal num_made
            num_made += 1
            return super().watched()

    quick, guard = QuickGuards(), Counting(tensors=[tensor])
    for _ in range(1000):
        if not quick.hold():
            quick.look_anew([guard])
        tensor.data = tensor.data.clone()  # as if a guard found that it did not matter
    assert 2 <= num_made <= 11

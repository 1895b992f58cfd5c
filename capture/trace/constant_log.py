"""The Python values that went into an iteration's operators, and where two runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.trace.op_tensors import flat_tensors
from graphfsdp._capture.trace.storages import has_storage, storage_of
from graphfsdp.base.hazards import HazardKind

Steps = dict[int, tuple[str, int]]

_LITERAL_BYTES = 1 << 20  # contents beyond this are not compared
_NUMBERS = (bool, int, float, complex, str)


@dataclass(frozen=True, slots=True)
class ConstantEntry:
    """One operator call.

    Attributes:
        op: The operator's name.
        values: Its arguments that are no tensors, in order.
        site: Number of the place in the user's program.
        outside: Where each tensor lies that the run has not made itself; 0 for those that it has.
    """

    op: str
    values: tuple[Any, ...]
    site: int
    outside: tuple[int, ...] = ()


@dataclass(frozen=True)
class ConstantDifference:
    """Two runs of one iteration that were not given the same values.

    Attributes:
        op: The operator's name.
        site: Number of its place in the second run; None at the end of that run.
        refusal: What that means.
    """

    op: str
    site: int | None
    refusal: Refusal


class ConstantLog:
    """The operator calls of one run."""

    def __init__(self) -> None:
        self.entries: list[ConstantEntry] = []
        self._made: set[int] = set()  # storages
        self.num_steps: Steps = {}  # by optimizer: what it is, its steps

    def add(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        site: int,
        *,
        is_literal: bool,
    ) -> None:
        """Note a call."""
        values = _values([*args, *kwargs.values()])
        if is_literal:
            values.append(_contents(args[0]))
            self._made.update(_places(args))  # anew in each run
        places = _places([*args, *kwargs.values()])
        outside = tuple(0 if place in self._made else place for place in places)
        self.entries.append(ConstantEntry(str(op), tuple(values), site, outside))

    def add_results(self, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> None:
        """Note what the call that was added last has made."""
        given = _places([*args, *kwargs.values()])
        self._made.update(set(_places([results])).difference(given))

    def add_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer steps, whatever its operators are."""
        name = f"{type(optimizer).__name__}.step"
        self.entries.append(ConstantEntry(name, (), 0))
        self.num_steps[id(optimizer)] = name, self.num_steps.get(id(optimizer), (name, 0))[1] + 1

    def differences(self, other: "ConstantLog") -> Iterator[ConstantDifference]:
        """Yield where another run from the same state was given other values, each place once."""
        told: set[tuple[str, int]] = set()
        for mine, its in zip(self.entries, other.entries, strict=False):
            if mine.op != its.op:
                yield ConstantDifference(its.op, its.site, other_path(mine.op, its.op))
                return
            refusal = baked_value(mine, its) or other_memory(mine, its)
            if refusal is not None and (its.op, its.site) not in told:
                told.add((its.op, its.site))
                yield ConstantDifference(its.op, its.site, refusal)
        counts = len(self.entries), len(other.entries)
        if counts[0] != counts[1]:
            longer, index = max((self, other), key=lambda log: len(log.entries)), min(counts)
            extra = longer.entries[index]
            names = (extra.op, "nothing") if longer is self else ("nothing", extra.op)
            site = extra.site if longer is other else None
            yield ConstantDifference(extra.op, site, other_path(*names))


def _places(items: Sequence[Any]) -> list[int]:
    """Return the addresses of the storages of tensors."""
    tensors = flat_tensors(items)
    return [storage_of(each, "")._cdata for each in tensors if has_storage(each)]


def _values(items: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if isinstance(item, list | tuple):
            found.append(len(item))
            found.extend(_values(item))
        elif isinstance(item, float | complex):
            found.append(repr(item))  # NaN is equal to itself
        elif isinstance(item, _NUMBERS) or item is None:
            found.append(item)
        elif isinstance(item, torch.dtype | torch.device | torch.layout):
            found.append(str(item))
    return found


def _contents(tensor: Tensor) -> Any:
    if tensor.numel() * tensor.element_size() > _LITERAL_BYTES or tensor.device.type != "cpu":
        return None
    return str(tensor.tolist()) if tensor.numel() <= 8 else hash(str(tensor.tolist()))


def baked_value(before: ConstantEntry, now: ConstantEntry) -> Refusal | None:
    """Return why a value that an operator is given differs between two runs; None if none does.

    Args:
        before: The call in one run.
        now: The same call in the next one.
    """
    if before.values == now.values:
        return None
    pairs = zip(before.values, now.values, strict=False)
    was, is_now = next(((a, b) for a, b in pairs if a != b), (len(before.values), 0))
    return Refusal(
        f"{now.op} was given {was} in one run of the iteration and {is_now} in the next one, with "
        "nothing on the device to explain it: a Python value (a counter, a clock, a random "
        "number) that a replay would go on with unchanged",
        "keep it in a tensor that is changed in place (fill_, add_), pass it as a tensor of the "
        "batch, or draw it with torch.rand; one that soon stays as it is needs more warmup_steps",
        HazardKind.BAKED_NUMBER,
    )


def other_memory(before: ConstantEntry, now: ConstantEntry) -> Refusal | None:
    """Return why an operator reads a tensor that lies elsewhere than in the run before, or None.

    Args:
        before: The call in one run.
        now: The same call in the next one.
    """
    pairs = zip(before.outside, now.outside, strict=False)
    if not any(was and is_now and was != is_now for was, is_now in pairs):
        return None
    return Refusal(
        f"{now.op} read a tensor in one run of the iteration and another one in the next, which "
        "the run has not made itself: one that Python keeps of the iteration before, or has "
        "replaced between them; every replay would read the same one again",
        "keep it in one tensor that is updated in place (copy_), a buffer for instance, or pass "
        "it as a tensor of the batch",
        HazardKind.STATE,
    )


def fewer_steps(before: Steps, now: Steps) -> Refusal | None:
    """Return why an optimizer steps less often than in an iteration before; None if none does.

    Args:
        before: The most that each has stepped in one iteration.
        now: Those of this one.
    """
    for key, (name, most) in before.items():
        count = now.get(key, (name, 0))[1]
        if count < most:
            return Refusal(
                f"the iteration called {name} {count} times, and {most} times in a run before: a "
                "decision that Python takes anew each time; a replay repeats one path for ever",
                "step in every call: microbatches= of capture accumulates gradients, and "
                "skip_nonfinite leaves steps out; or one captured step for each path",
                HazardKind.CONTROL_FLOW,
            )
    return None


def unseen_read(refusal: Refusal) -> Refusal:
    """Return the refusal of a value that followed the tensors though nothing was seen to read them.

    Args:
        refusal: What the comparison of the runs says.
    """
    was = refusal.what.partition(",")[0]
    return Refusal(
        f"{was}, after the state had moved on: the value was read out of a tensor's memory by a "
        "way that shows no call (a NumPy array that shares it, a C library), and a replay would "
        "go on with this one",
        "compute it with tensor operations",
        HazardKind.HOST_READ,
    )


def other_path(was: str, now: str) -> Refusal:
    """Return why two runs called different operators at the same point."""
    return Refusal(
        f"the iteration ran {was} in one run and {now} at the same point of the next one: a "
        "decision that Python takes anew each time (a counter, a clock, a random number); a "
        "replay repeats one path for ever",
        "decide on the device (torch.where), or outside the iteration with one captured step for "
        "each path",
        HazardKind.CONTROL_FLOW,
    )

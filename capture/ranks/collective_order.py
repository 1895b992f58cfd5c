"""The collectives of a program in their order: counted in a replay, and issued without one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp._capture.trace.values import Node, Value, materialise, span_bytes, values_in

_NAMESPACES = ("graphfsdp", "_c10d_functional")
_CPU = torch.device("cpu")
_GROUP_NAMES = ("group", "group_name")

Gate = Callable[[], None]


def is_collective(op: torch._ops.OpOverload) -> bool:
    """Tell whether an operator meets other ranks, or waits for one that does."""
    if op.namespace not in _NAMESPACES:
        return False
    names = {argument.name for argument in op._schema.arguments}
    return not names.isdisjoint(_GROUP_NAMES) or "wait" in op._schema.name


class CollectiveOrder:
    """The collectives of one program.

    Note [Standing in]: a rank that fails in a replay, or cannot begin one, would leave the others
    waiting in their next collective until the group's timeout. So it goes on to issue its own
    collectives, over zeros, and the others come as far as the gate: a place before the first
    weight is written, behind equally many collectives on every rank. There they find that a rank
    has failed, and undo their replays too. The process group stays as good as it was.

    Attributes:
        num_before_commit: Collectives before the first write that cannot be undone.
        is_waiting: A collective is under way, or its backend has failed in it.
    """

    def __init__(self, nodes: Sequence[Node], commit_node: int | None) -> None:
        """Note the collectives among the nodes.

        Args:
            nodes: The program.
            commit_node: Index of the node before which it cannot be undone any more.
        """
        indices = [index for index, node in enumerate(nodes) if is_collective(node.op)]
        self._nodes = [nodes[index] for index in indices]
        self._groups = [_group_name(node) for node in self._nodes]
        self._issued_before: dict[str, int] = {}  # by group
        end = len(nodes) if commit_node is None else commit_node
        self.num_before_commit = sum(index < end for index in indices)
        self.is_waiting = False
        self._has_passed = False
        self._num_issued = 0
        self._tickets: list[Tensor] = []
        self._num_to_gate = self.num_before_commit
        self._gate: Gate | None = None

    def arm(self, gate: Gate, num_collectives: int) -> None:
        """Call something in each replay before weights are written; what it raises ends it.

        Args:
            gate: What to call.
            num_collectives: The same on all ranks: how many come before.
        """
        self._gate, self._num_to_gate = gate, num_collectives

    def begin(self) -> None:
        """Begin a replay."""
        self._num_issued = 0
        self._tickets.clear()
        self._issued_before = {name: _num_issued(name) for name in set(self._groups) if name}
        self.is_waiting = self._has_passed = False

    def commit(self) -> None:
        """Pass the gate, if that has not been done; called before what cannot be undone."""
        if self._gate is not None and not self._has_passed:
            self._gate()
        self._has_passed = True

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective's operator that is counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._num_issued == self._num_to_gate:
                self.commit()
            self._num_issued += 1
            self.is_waiting = True
            try:
                result = call(*args, **kwargs)
            except Exception as error:  # of the backend, or of what is around it: no memory, say
                if not breaks_group(error):
                    self._num_issued -= not self._was_issued()
                    self.is_waiting = False
                raise
            finally:
                for item in (*args, *kwargs.values()):
                    if isinstance(item, Tensor) and "under_way" in vars(item):
                        self._tickets.append(item)
            self.is_waiting = False
            return result

        return run

    def _was_issued(self) -> bool:
        """Tell whether the collective that has failed has begun: the others count on it then."""
        group = self._groups[self._num_issued - 1]
        if not group:
            return False  # a wait
        num_before = self._groups[: self._num_issued - 1].count(group)
        return _num_issued(group) > self._issued_before[group] + num_before

    @property
    def is_too_late(self) -> bool:
        """Whether the other ranks can come to the gate, and so past it, without this one."""
        # What is left to be waited for is under way: the others need this rank no more.
        return not any(self._groups[self._num_issued : self._num_to_gate])

    def stand_in(self, *, to_end: bool) -> None:
        """Issue the collectives that the replay has not come to, over zeros.

        Args:
            to_end: Also those behind the gate.

        Capture: never inside one; waits for the other ranks.
        """
        last = len(self._nodes) if to_end else self._num_to_gate
        nodes = self._nodes[self._num_issued : last]
        num_bytes: dict[int, int] = {}
        for node in nodes:
            for value in values_in(node):
                key = id(value.storage)
                num_bytes[key] = max(num_bytes.get(key, 0), span_bytes(value))
        storages = {
            key: torch.zeros(size, dtype=torch.uint8).untyped_storage()
            for key, size in num_bytes.items()
        }
        for node in nodes:
            if "wait_" in node.op._schema.name and node.op.namespace == "graphfsdp":
                continue  # each is waited for at once
            args, kwargs = _filled(node.args, storages), _filled(node.kwargs, storages)
            result = node.op(
                *_without_ticket(node.op, args),
                **{**kwargs, "ticket": None} if "ticket" in kwargs else kwargs,
            )
            if node.op.namespace == "_c10d_functional" and isinstance(result, Tensor):
                torch.ops._c10d_functional.wait_tensor(result)
        for ticket in self._tickets:  # what the failed replay has begun
            under_way = vars(ticket).pop("under_way", None)
            if under_way is not None and not ticket.is_cuda:
                under_way.wait()


def breaks_group(error: BaseException) -> bool:
    """Tell whether an error may come from a collective in which a rank was missing."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _group_name(node: Node) -> str:
    """Return the group that a collective is issued in, "" for what only waits."""
    named = zip(node.op._schema.arguments, node.args, strict=False)
    given = {argument.name: value for argument, value in named} | node.kwargs
    return next((given[name] for name in _GROUP_NAMES if name in given), "")


def _num_issued(group: str) -> int:
    """Return how many collectives this rank has issued in a group."""
    # Not held: a group that somebody holds is not destroyed.
    found: Any = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return int(found._get_backend(_CPU)._get_sequence_number_for_group())


def _without_ticket(op: torch._ops.OpOverload, args: list[Any]) -> list[Any]:
    """Return arguments with which a collective is over when its operator returns."""
    pairs = zip(args, op._schema.arguments, strict=False)
    return [None if argument.name == "ticket" else value for value, argument in pairs]


def _filled(item: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(item, Value):
        return materialise(item, storages[id(item.storage)])
    if isinstance(item, list):
        return [_filled(inner, storages) for inner in item]
    if isinstance(item, dict):
        return {name: _filled(inner, storages) for name, inner in item.items()}
    return item

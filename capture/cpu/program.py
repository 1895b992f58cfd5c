"""Turns recorded nodes into one straight-line Python function over operators.

No module, autograd or optimizer code is left in it: each line calls one operator, and each
intermediate is dropped after its last use, so the memory peak is near that of the iteration.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.cpu.calls import call, call_into
from graphfsdp._capture.cpu.memory import Arena, ProgramMemory
from graphfsdp._capture.cpu.recorder import Recorder
from graphfsdp._capture.trace.program_facts import Description, Role
from graphfsdp._capture.trace.source import Site
from graphfsdp._capture.trace.values import Node, Value, materialise

Replay = Callable[[], tuple[Tensor, ...]]
Commit = Callable[[], None]


@dataclass(frozen=True)
class Program:
    """What a replay has to do.

    Note [Escapes]: a storage that the recording made and that is still alive when the iteration
    is over belongs to somebody (an attribute that the model assigned). A replay writes its new
    contents into it, so that whoever holds it sees the present iteration.

    Attributes:
        nodes: Without what nobody reads.
        outputs: What the caller gets.
        escapes: Other values that outlive the iteration.
        escaped: Where they live on.
    """

    nodes: Sequence[Node]
    outputs: Sequence[Value]
    escapes: Sequence[Value]
    escaped: Sequence[Tensor]


def finished(recorder: Recorder, outputs: Sequence[Value]) -> Program:
    """Return the program of a recording; nothing but it may hold the iteration's tensors."""
    escapes: list[Value] = []
    escaped: list[Tensor] = []  # holds what another thread might free while we build
    for info in recorder.storages:
        value = None if info.external else recorder.first_value(info)
        tensor = None if value is None or value.node is None else _if_alive(value)
        if value is not None and tensor is not None:
            escapes.append(value)
            escaped.append(tensor)
    nodes = _without_dead(recorder.nodes, [*outputs, *escapes])
    return Program(nodes, outputs, escapes, escaped)


class ProgramBuilder:
    """Generates the replay function of a program.

    Attributes:
        nodes: The program's.
    """

    def __init__(
        self,
        program: Program,
        scratch: Sequence[Tensor],
        arena: Arena,
        *,
        lands_early: bool = False,
    ) -> None:
        """Plan the program's memory.

        ``scratch`` are tensors from before the recording whose old contents nobody needs, ``arena``
        is memory that no other program needs between two replays. ``lands_early``: nobody needs old
        contents of what outlives the iteration either, not even after a replay that fails.
        """
        self._program = program
        self._outputs = program.outputs
        self._namespace: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # by id of the Value
        self._constants: dict[int, str] = {}  # by id of the object
        self._lines: list[str] = []  # of the function that is built
        self.nodes = program.nodes
        outputs, escapes = program.outputs, program.escapes
        landing = program.escaped if lands_early else ()
        self.memory = ProgramMemory(self.nodes, outputs, escapes, scratch, arena, landing)

    def build(
        self,
        commit: Commit,
        commit_node: int | None,
        clock: Callable[[], None] | None = None,
        marks: Container[int] = (),
    ) -> Replay:
        """Return the function; each call runs the program once and returns fresh outputs.

        It calls ``commit`` before node ``commit_node``, from which on it cannot be undone; never if
        that is None; and ``clock`` before each node of ``marks``.
        """
        self._lines.clear()
        call_commit = f"{self._constant(commit, 'commit')}()"
        call_clock = "" if clock is None else f"{self._constant(clock, 'clock')}()"
        last_use = self._last_uses()
        for index, node in enumerate(self.nodes):
            if index == commit_node:
                self._lines.append(call_commit)
            if call_clock and index in marks:
                self._lines.append(call_clock)
            if not self.memory.needs_no_call(node):
                self._add_node(node)
            dead = last_use.get(index, [])
            if dead:
                self._lines.append("del " + ", ".join(map(self._name, dead)))
        if call_clock and len(self.nodes) in marks:
            self._lines.append(call_clock)
        for value, tensor in self._kept():
            if id(value.storage) in self.memory.landed:
                continue
            self._lines.append(f"{self._constant(tensor, 'e')}.copy_({self._name(value)})")
        results = "".join(f"{self._name(value)}, " for value in self._outputs)
        lines = ["def replay():", *self._lines, f"return ({results})"]
        exec(compile("\n    ".join(lines), "<graphfsdp cpu graph>", "exec"), self._namespace)
        # Popped: a namespace that holds its own function is a cycle, freed only by the collector.
        replay: Replay = self._namespace.pop("replay")
        return replay

    def description(self, sites: Sequence[Site]) -> Description:
        """Return what can describe the program, its addresses as they are now."""
        kept = [(id(v.storage), Role.KEPT, t.untyped_storage().data_ptr()) for v, t in self._kept()]
        return Description(
            [(node, not self.memory.needs_no_call(node)) for node in self.nodes],
            sites,
            self.memory.addresses(),
            offsets=self.memory.offsets(),
            outlives=[*((id(v.storage), Role.OUTPUT, None) for v in self._outputs), *kept],
            pool_bytes=self.memory.plan.num_bytes,
        )

    def _kept(self) -> Iterable[tuple[Value, Tensor]]:
        return zip(self._program.escapes, self._program.escaped, strict=True)

    def _last_uses(self) -> dict[int, list[Value]]:
        """Return the values in local names whose last use is at each node."""
        keep = {id(value) for value in (*self._outputs, *self._program.escapes)}
        last: dict[int, tuple[int, Value]] = {}
        for index, node in enumerate(self.nodes):
            if self.memory.needs_no_call(node):
                continue
            for value in node.values:
                last[id(value)] = (index, value)
        uses: dict[int, list[Value]] = {}
        for index, value in last.values():
            if not self.memory.is_fixed(value) and id(value) not in keep:
                uses.setdefault(index, []).append(value)
        return uses

    def _name(self, value: Value) -> str:
        name = self._names.get(id(value))
        if name is None:
            if self.memory.is_fixed(value):
                name = self._constant(self.memory.tensor(value), "x")
            else:
                name = f"v{len(self._names)}"
            self._names[id(value)] = name
        return name

    def _constant(self, item: object, prefix: str) -> str:
        name = self._constants.get(id(item))
        if name is None:
            name = f"{prefix}{len(self._constants)}"
            self._constants[id(item)] = name
            self._namespace[name] = item  # the namespace keeps the item, so its id stays its own
        return name

    def _add_node(self, node: Node) -> None:
        args = [self._argument(value) for value in node.args]
        kwargs = {name: self._argument(value) for name, value in node.kwargs.items()}
        if self.memory.writes_into_place(node):
            outs = [self._name(value) for value in node.made]
            self._lines.append(call_into(node.op, args, kwargs, outs, self._constant))
            return
        line = call(
            node.op, args, kwargs, self._constant, lambda: list(map(self._known, node.args))
        )
        inputs = {id(value) for value in node.inputs}
        targets = [
            self._name(value)
            if value is not None and not self.memory.is_fixed(value) and id(value) not in inputs
            else None
            for value in node.outputs
        ]
        bound = [target for target in targets if target is not None]
        if not bound:
            self._lines.append(line)
        elif node.results == "tensor":
            self._lines.append(f"{bound[0]} = {line}")
        else:
            # Results nobody needs go to a name that is overwritten at once, not kept.
            names = ", ".join(target or "_" for target in targets)
            line = f"[{names}] = {line}"
            self._lines.append(f"{line}; _ = None" if None in targets else line)

    def _known(self, item: Any) -> Any:
        """Return what an argument is in each replay; ``...`` if it is another each time."""
        if isinstance(item, Value):
            return self.memory.tensor(item) if self.memory.is_fixed(item) else ...
        if isinstance(item, list):
            items = [self._known(member) for member in item]
            return ... if any(member is ... for member in items) else items
        return item

    def _argument(self, value: Any) -> str:
        if isinstance(value, Value):
            return self._name(value)
        if isinstance(value, list):
            return f"[{', '.join(self._argument(item) for item in value)}]"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._constant(value, "c")


def _if_alive(value: Value) -> Tensor | None:
    try:
        return materialise(value, value.storage.get())
    except ReferenceError:
        return None


def _without_dead(nodes: Sequence[Node], roots: Sequence[Value]) -> list[Node]:
    """Drop the nodes that only make what nobody reads.

    Works on storages, not values: a write into a storage that is read later is never dropped.
    """
    live: set[int] = {id(value.storage) for value in roots}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.effects and _writes_nothing_seen(node, live):
            continue
        if node.effects or any(id(value.storage) in live for value in node.made):
            live.update(id(value.storage) for value in node.values)
            kept.append(node)
    kept.reverse()
    return kept


def _writes_nothing_seen(node: Node, live: set[int]) -> bool:
    """Tell whether a writing node writes only storages of the iteration that nobody reads on."""
    if node.results == "none" or node.op.namespace not in ("aten", "prims"):
        return False
    if torch.Tag.nondeterministic_seeded in node.op.tags:
        return False
    return not any(v.storage.external or id(v.storage) in live for v in node.values)

"""The forward pass of a module as a graph, and its backward pass, for one kind of call.

Note [A part]: the module runs once under a recording, on inputs at fixed addresses. The autograd
graph that this makes is kept for good. What it has saved for its backward pass lies at fixed
addresses too, which each replay of the forward graph fills anew; so that autograd graph is right
again after each replay, for gradients of any form. The loop sees one autograd node
(``_ReplayedPart``) for the whole module, whose backward pass runs the kept graph, or a graph of
that.

Note [One call at a time]: what lies at fixed addresses belongs to one call, from its forward pass
to the end of its backward pass. A call that begins meanwhile (a discriminator on real and on fake)
takes another recording.

Note [Order of sums]: where a parameter is used several times, autograd adds up what comes of each
use, in the order of arrival, over everything that the backward pass goes through. A part that added
up its own uses first would come to other last bits where there are uses elsewhere as well. So it
hands over each of them, and the engine adds them up as ever.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from graphfsdp._capture.batch_writes import BatchWrites, Handed
from graphfsdp._capture.guards.guards import Guards
from graphfsdp._capture.recording import kept_by
from graphfsdp._capture.rules.constants import ConstantWatch
from graphfsdp._capture.trace.backend import GraphBackend
from graphfsdp._capture.trees import flatten
from graphfsdp._capture.undo.host_state import Attempt, generators_of
from graphfsdp.base.op_tensors import as_written, storage_key
from graphfsdp.base.torch_internals import (
    TreeSpec,
    clear_casts,
    keeps_graph,
    parameters_of,
    tree_unflatten,
    without_modes,
)
from graphfsdp.errors import CaptureError
from graphfsdp.in_place.part_backward import (
    Arrivals,
    BackwardGraph,
    NotAPartError,
    StaticGradient,
)

_PLAIN_RESULTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_NOTHING = torch.empty(0)
_LOG = logging.getLogger("graphfsdp")
_NUM_WARM_BACKWARD = 2
_MOST_BACKWARD = 4  # forms of gradients


def guards_of(module: nn.Module, device: torch.device, constants: ConstantWatch) -> Guards:
    """Return what looks at all that a call of a module reads in Python."""
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    return Guards(
        module,
        params,
        lambda: [],
        optimizers=(),
        counts=lambda key: False,
        functions=(),
        device=device,
        ran=constants.ran,
    )


class PartResults:
    """How what a module returns is made of tensors and of plain values."""

    def __init__(self, output: object) -> None:
        leaves, self._spec = flatten(output)
        for leaf in leaves:
            if type(leaf) is not Tensor and not isinstance(leaf, _PLAIN_RESULTS):
                raise NotAPartError(f"it returns a {type(leaf).__name__}, which no graph makes")
        self._is_tensor = isinstance(output, Tensor)
        self._places = [place for place, leaf in enumerate(leaves) if type(leaf) is Tensor]
        self._leaves = [None if type(leaf) is Tensor else leaf for leaf in leaves]

    @staticmethod
    def tensors_of(output: object) -> list[Tensor]:
        return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]

    @staticmethod
    def told_by(output: object) -> str:
        """Return what is no tensor in it, in words to be compared."""
        leaves = (leaf for leaf in flatten(output)[0] if isinstance(leaf, _PLAIN_RESULTS))
        return ", ".join(map(repr, leaves))

    def made_of(self, tensors: Sequence[Tensor]) -> Any:
        if self._is_tensor:
            return tensors[0]
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._spec)


class PartGraphs:
    """One recording of a part, which serves one call at a time.

    Attributes:
        is_taken: A call is between its forward and the end of its backward pass.
        num_nodes: Of the forward graph; None where the driver does not tell.
        kept_bytes: Memory of results and of what the backward pass needs, taken for good.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: GraphBackend,
        leaves: Sequence[Any],
        spec: TreeSpec | None,
        constants: ConstantWatch,
        told: str,
    ) -> None:
        """Record a call with these arguments; NotAPartError, and everything is as it was.

        The call has then taken effect once, and ``first`` has its results. ``told``: what it
        returned beside tensors before.
        """
        self.is_taken = False
        self._is_dropped = False
        self._module = module
        self._backend = backend
        by_leaf = {id(leaf): _static_input(leaf) for leaf in leaves}
        self._static = [by_leaf[id(leaf)] for leaf in leaves]  # one that is given twice is one
        targets = {id(each): place for place, each in enumerate(self._static)}
        self._targets = [
            (place, self._static[place].detach())
            for place in targets.values()
            if isinstance(self._static[place], Tensor)
        ]
        self._spec = spec
        self._told = told
        self._kept: list[Tensor] = []
        self._uses: list[Any] = []
        self._backwards: dict[Any, BackwardGraph | None] = {}  # by form of the gradients
        self._num_backward: Counter[Any] = Counter()
        self._record(leaves, constants)

    def _record(self, leaves: Sequence[Any], constants: ConstantWatch) -> None:
        module, backend = self._module, self._backend
        params = list(module.parameters())
        states = [generator.get_state() for generator in generators_of(module, backend.device)]
        held = [dict(vars(each)) for each in module.modules()]
        state = [*params, *module.buffers(), *(each for *_, each in kept_by(module))]
        attempt = Attempt(
            module,
            (),
            backend.begin_undo(state),
            device=backend.device,
            restore_gradients=lambda: None,
        )
        self.guards = guards_of(module, backend.device, constants)

        def check(was_read: Callable[[Tensor], bool]) -> None:
            attempt.host_state.check_unchanged(was_read)
            constants.check_memory()
            self._check_attributes(held)
            self.guards.arm(was_read)
            if self.guards.moves:
                raise NotAPartError(f"it moves Python: {self.guards.moves[0]}")
            for told in constants.ran.clocks:
                raise NotAPartError(f"{told}, and what follows from it would stay as it is")

        is_cpu = backend.device.type == "cpu"
        try:
            with ExitStack() as stack:
                if is_cpu:
                    stack.enter_context(as_written())
                stack.enter_context(attempt.watching())
                stack.enter_context(self.guards.recording())
                self._load(leaves)
                versions = [(each, each._version) for each in self._inputs()]
                self._graph, self.first = backend.record(
                    partial(self._forward, constants), module, check, collective=False, scratch=()
                )
            if any(tensor._version != version for tensor, version in versions):
                raise NotAPartError("it writes into an input")
            if any("c10d" in op.partition(".")[0] for op in self._graph.facts.op_counts):
                raise NotAPartError("it has collectives, in which all ranks must take part alike")
        except BaseException as error:
            self.close()
            attempt.roll_back()
            self.guards.put_back()
            if isinstance(error, (KeyboardInterrupt, SystemExit, NotAPartError)):
                raise
            raise NotAPartError(_reason(error)) from error
        finally:
            clear_casts()  # which lie in the graph
        self.num_nodes = self._graph.facts.num_nodes
        # Those whose states a replay moves; most programs draw from none.
        now = [(g, g.get_state()) for g in generators_of(module, backend.device)]
        self._drawn = [
            generator
            for (generator, state), was in zip(now, states, strict=True)
            if not torch.equal(state, was)
        ]

    def _forward(self, constants: ConstantWatch) -> list[Tensor]:
        clear_casts()  # which are of other calls
        args, kwargs = tuple(self._static), {}
        if self._spec is not None:
            args, kwargs = tree_unflatten(self._static, self._spec)
        handed = Handed((args, kwargs))
        need_grads = [leaf.requires_grad for leaf in self._inputs()]
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            return _another(tensor)

        kept = saved_tensors_hooks(keep, _as_it_is)
        with self._stand_ins(), constants.comparing(self._inputs()), kept:
            output = self._module._call_impl(*args, **kwargs)
        if BatchWrites(handed):
            raise NotAPartError("it writes into a container that it is given")
        if need_grads != [leaf.requires_grad for leaf in self._inputs()]:
            raise NotAPartError("it changes requires_grad of an input")
        if (told := PartResults.told_by(output)) != self._told:
            raise NotAPartError(f"it returns {told}, and returned {self._told} before")
        self.results = PartResults(output)
        self._kept = self.results.tensors_of(output)
        self._check_results()
        self._find_uses()
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            saved.pop(storage_key(tensor), None)
        self.kept_bytes = sum(saved.values()) + sum(tensor.nbytes for tensor in self._kept)
        return [tensor.detach() for tensor in self._kept]

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Have other parameters in the module while the body runs, which lie in the same memory.

        CUDA rule: a capture may not wait for another stream, and autograd runs what ends in a
        parameter on the stream on which that was used first. That stays the loop's, as ever.
        """
        own: dict[int, Tensor] = {}
        tables: list[tuple[dict[str, Any], str, Any]] = []
        for module in self._module.modules():
            for name, param in parameters_of(module).items():
                if param is not None and param.requires_grad:
                    if id(param) not in own:
                        own[id(param)] = nn.Parameter(param.detach())
                        vars(own[id(param)]).update(vars(param))
                    tables.append((parameters_of(module), name, own[id(param)]))
            if isinstance(module, nn.RNNBase):  # which keeps a list of them
                weights = [own.get(id(weight), weight) for weight in module._flat_weights]
                refs = [None if weight is None else weakref.ref(weight) for weight in weights]
                tables.append((vars(module), "_flat_weights", weights))
                tables.append((vars(module), "_flat_weight_refs", refs))
        self._params = {
            id(own[id(param)]): param for param in self._module.parameters() if id(param) in own
        }
        before = [(table, name, table[name]) for table, name, _ in tables]
        for table, name, value in tables:
            table[name] = value
        try:
            yield
        finally:
            for table, name, value in before:
                table[name] = value
        by_id = {id(param): param for param in own.values()}
        for key, param in self._params.items():
            if by_id[key].data_ptr() != param.data_ptr():
                raise NotAPartError("it gives its weights other memory")

    def _check_results(self) -> None:
        own = (*self._module.parameters(), *self._module.buffers())
        taken = {storage_key(each) for each in (*own, *self._inputs())}
        for tensor in self._kept:
            key = storage_key(tensor)
            if key in taken:
                raise NotAPartError(
                    "it returns a look at memory of its own, of an input, or of another result"
                )
            taken.add(key)
            if tensor.layout is not torch.strided or not is_dense(tensor):
                raise NotAPartError("it returns a tensor that is not dense")
            if tensor.is_complex() or tensor.is_neg():
                raise NotAPartError("it returns a complex tensor")

    def _check_attributes(self, held: Sequence[Mapping[str, Any]]) -> None:
        for (path, module), was in zip(self._module.named_modules(), held, strict=True):
            now = vars(module)
            for name in now.keys() | was.keys():
                if now.get(name) is not was.get(name):
                    raise NotAPartError(f"it writes {f'{path}.{name}'.lstrip('.')!r}")

    def _inputs(self) -> Iterator[Tensor]:
        return (self._static[place] for place, _ in self._targets)

    def _find_uses(self) -> None:
        """Find where gradients leave the autograd graph: the nodes of its uses of leaves."""
        inputs = {id(leaf) for leaf in self._inputs() if leaf.requires_grad}
        leaves: dict[int, Tensor] = {}
        uses: dict[int, list[tuple[Node, int]]] = {}
        seen: set[Node] = set()
        results = {(tensor.grad_fn, tensor.output_nr) for tensor in self._kept if tensor.grad_fn}
        waiting = [tensor.grad_fn for tensor in self._kept if tensor.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            for index, (following, number) in enumerate(node.next_functions):
                if following is None:
                    continue
                # Whoever asks for the gradient of such a one, or changes it by a hook, means all
                # that comes to it, and what comes through the other result would stay in here.
                if (following, number) in results:
                    raise NotAPartError("it returns a tensor of which it makes another result")
                variable = getattr(following, "variable", None)
                if variable is None:
                    waiting.append(following)
                elif id(variable) in inputs or id(variable) in self._params:
                    leaves[id(variable)] = variable
                    uses.setdefault(id(variable), []).append((node, index))
                else:
                    raise NotAPartError("it trains a tensor that is none of its parameters")
        self.leaves = [leaves[key] for key in uses]
        self._uses = list(uses.values())
        self._num_uses = list(map(len, self._uses))
        self._several = [
            self._listen(place, nodes) for place, nodes in enumerate(self._uses) if len(nodes) > 1
        ]

    def _listen(self, place: int, nodes: Sequence[tuple[Node, int]]) -> "Arrivals":
        """Note what comes of each use; see Note [Order of sums]."""
        arrivals = Arrivals(place)
        for node, index in nodes:
            node.register_hook(partial(arrivals.add, index))
        return arrivals

    def edges(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return what gradients go to in a call with these arguments, once for each use."""
        given = {id(self._static[place]): leaves[place] for place, _ in self._targets}
        found: list[Tensor] = []
        for leaf, count in zip(self.leaves, self._num_uses, strict=True):
            edge = self._params.get(id(leaf))
            found += [given[id(leaf)] if edge is None else edge] * count
        return found

    def _load(self, leaves: Sequence[Any]) -> None:
        with torch.no_grad():
            for place, target in self._targets:
                target.copy_(leaves[place])

    def replay(self, leaves: Sequence[Any]) -> list[Tensor]:
        self._load(leaves)
        return self._graph.replay()

    def is_different(self, index: int) -> bool:
        """Tell whether a result takes part in the backward pass."""
        return self._kept[index].requires_grad

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients for each of ``edges``."""
        pairs = [
            (kept, grad)
            for kept, grad in zip(self._kept, grads, strict=True)
            if grad is not None and kept.requires_grad
        ]
        if not pairs:
            return [None] * sum(self._num_uses)
        # A CPU's engine calls operators faster than a program in Python does.
        if self._backend.name == "cpu":
            return self._go_backward(*zip(*pairs, strict=True))
        return self._launch_backward(pairs)

    def _go_backward(
        self, results: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[Tensor | None]:
        for arrivals in self._several:
            arrivals.begin()
        totals = torch.autograd.grad(
            results, self.leaves, grads, retain_graph=True, allow_unused=True
        )
        several = {arrivals.place: arrivals.taken() for arrivals in self._several}
        found: list[Tensor | None] = []
        for place, (total, count) in enumerate(zip(totals, self._num_uses, strict=True)):
            each = several.get(place, [total])
            found += [*each, *[None] * (count - len(each))]
        return found

    def _launch_backward(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
        """Do so by a graph from the third time on that gradients come in such a form."""
        results, grads = zip(*pairs, strict=True)
        key = tuple((id(result), grad.shape, grad.stride(), grad.dtype) for result, grad in pairs)
        self._num_backward[key] += 1
        if key not in self._backwards and self._num_backward[key] > _NUM_WARM_BACKWARD:
            self._backwards[key] = None
            if len(self._backwards) <= _MOST_BACKWARD:
                return self._record_backward(key, results, grads)
        graph = self._backwards.get(key)
        return self._go_backward(results, grads) if graph is None else graph.run(grads)

    def _record_backward(
        self, key: Any, results: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[Tensor | None]:
        before = self.guards.python()
        held = list(map(StaticGradient, grads))
        found: list[Tensor | None] = []

        def iterate() -> list[Tensor]:
            found[:] = self._go_backward(results, [each.tensor for each in held])
            return [grad for grad in found if grad is not None]

        def check(was_read: Callable[[Tensor], bool]) -> None:
            moves = self.guards.moved(before)
            if moves:
                raise NotAPartError(str(moves[0]))

        for each, grad in zip(held, grads, strict=True):
            each.load(grad)
        try:
            graph, made = self._backend.record(
                iterate, self._module, check, collective=False, scratch=()
            )
        except Exception as error:
            self.guards.put_back(before)
            _LOG.info("the backward pass of a part stays eager: %s", _reason(error))
            return self._go_backward(results, grads)
        is_there = [grad is not None for grad in found]
        self._backwards[key] = backward = BackwardGraph(graph, held, is_there)
        return backward.spread(made)

    def backward_as_written(
        self, results: Sequence[Tensor], leaves: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Do so through a call that ran as written, in a way that autograd can go through again."""
        edges = self.edges(leaves)
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        targets = list({id(edge): edge for edge in edges}.values())
        totals = torch.autograd.grad(
            [result for result, _ in pairs],
            targets,
            [grad for _, grad in pairs],
            create_graph=True,
            allow_unused=True,
        )
        left = {id(target): total for target, total in zip(targets, totals, strict=True)}
        return [left.pop(id(edge), None) for edge in edges]

    def random_states(self) -> list[tuple[torch.Generator, Tensor]]:
        """Return the states of the generators that a replay draws from."""
        return [(generator, generator.get_state()) for generator in self._drawn]

    def drop(self) -> None:
        """Close now, or when the call that is under way has come to its end."""
        self._is_dropped = True
        if not self.is_taken:
            self.close()

    def land(self) -> None:
        """End a call."""
        self.is_taken = False
        if self._is_dropped:
            self.close()

    def close(self) -> None:
        self._kept, self._uses = [], []
        for backward in self._backwards.values():
            if backward is not None:
                backward.graph.close()
        self._backwards.clear()
        graph = getattr(self, "_graph", None)
        if graph is not None:
            graph.close()


class Flight:
    """One call of a part, from its forward pass to the end of its backward pass."""

    def __init__(
        self,
        graphs: PartGraphs,
        results: list[Tensor],
        again: Callable[[], tuple[list[Tensor], Sequence[Any]]],
    ) -> None:
        """``again`` runs the call as it is written; see ``_ReplayedPart.backward``."""
        self.graphs = graphs
        self.results = results
        self.again = again
        graphs.is_taken = True
        self.end = weakref.finalize(self, graphs.land)
        self.end.atexit = False


class _ReplayedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *edges: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        results, flight.results = flight.results, []
        fixed = [
            tensor for index, tensor in enumerate(results) if not flight.graphs.is_different(index)
        ]
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(_NOTHING)  # so that torch itself refuses a second backward pass
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        flight: Flight = ctx.flight
        if torch.is_grad_enabled():  # somebody wants to go backward through this, too
            results, leaves = flight.again()
            return None, *flight.graphs.backward_as_written(results, leaves, grads)
        found = flight.graphs.backward(grads)
        if not keeps_graph():
            flight.end()
        return None, *found


def run_part(
    graphs: PartGraphs,
    results: list[Tensor],
    leaves: Sequence[Any],
    again: Callable[[], tuple[list[Tensor], Sequence[Any]]],
) -> Any:
    """Return what the module returns, of the results of its graph."""
    edges = graphs.edges(leaves)
    if edges:
        results = list(_ReplayedPart.apply(Flight(graphs, results, again), *edges))  # type: ignore[no-untyped-call]
    return graphs.results.made_of(results)


def _static_input(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    static = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return static.requires_grad_(leaf.requires_grad)


def _another(tensor: Tensor) -> Tensor:
    """Return another tensor in the same memory.

    Of what hooks hand out, autograd does not ask whether it was written meanwhile: weights are, by
    each step. Out of sight of what records, since a warm-up has nothing like it.
    """
    with without_modes():
        return tensor.detach()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def has_own_memory(tensor: Tensor) -> bool:
    """Tell whether no two elements of a tensor lie in one place, as those of ``expand`` do."""
    end = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= end:
                return False
            end += (size - 1) * step
    return True


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor has its memory for itself, without gaps, in whatever order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _reason(error: BaseException) -> str:
    if isinstance(error, CaptureError):
        where = "" if error.hazard.source is None else f" ({error.hazard.source})"
        return f"{error.hazard.why}{where}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]

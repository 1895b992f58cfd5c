"""The forward pass of a module as a graph, and its backward pass, for one kind of call.

Note [A part]: the module runs once under a recording, on inputs at fixed addresses. The autograd
graph that this makes is kept for good. What it has saved for its backward pass lies at fixed
addresses too, which each replay of the forward graph fills anew; so that autograd graph is right
again after each replay, for gradients of any form. The loop sees one autograd node
(``_ReplayedPart``) for the whole module, or one for each stage (Note [Results of results]), whose
backward pass runs the kept graph, or a graph of that.

Note [One call at a time]: what lies at fixed addresses belongs to one call, from its forward pass
to the end of its backward pass. A call that begins meanwhile (a discriminator on real and on fake)
takes another recording.

Note [Written behind autograd's back]: what the loop writes into a weight, an input or a result
between forward and backward pass, autograd reads in the latter if it has saved that tensor: through
``.data`` or NumPy silently, and else it refuses. So the loop's own tensors are saved where the kept
graph has saved those of the recording, and what they hold is copied there before a backward pass.
Weights lie in the same memory.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks

from graphfsdp._capture.inputs import Handed
from graphfsdp._capture.rules.constants import ConstantWatch
from graphfsdp._capture.trace.backend import Effect, GraphBackend
from graphfsdp._capture.trees import flatten
from graphfsdp._capture.undo.host_state import generators_of
from graphfsdp._capture.undo.interrupts import is_of_handler
from graphfsdp.base.memory import is_dense
from graphfsdp.base.op_tensors import storage_key
from graphfsdp.base.torch_internals import (
    TreeSpec,
    below_autograd,
    foreach_copy_,
    keeps_graph,
    parameters_of,
    sequence_number,
    tree_unflatten,
    without_modes,
)
from graphfsdp.in_place.casts import Casts
from graphfsdp.in_place.part_backward import PartBackward
from graphfsdp.in_place.part_recording import NotAPartError, recorded
from graphfsdp.in_place.part_stages import Stage, edge_of, regions_of

AsWritten = tuple[list[Tensor], Sequence[Any]]  # its results, and its arguments
Again = Callable[[], AsWritten]
_PLAIN_RESULTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_NOTHING = torch.empty(0)


def tensors_of(output: object) -> list[Tensor]:
    return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]


def told_by(output: object) -> str:
    """Return what is no tensor in it, in words to be compared."""
    return ", ".join(repr(leaf) for leaf in flatten(output)[0] if isinstance(leaf, _PLAIN_RESULTS))


def _made_as(output: object) -> Callable[[Sequence[Tensor]], Any]:
    """Return what makes of tensors and of the same plain values what a module has returned."""
    leaves, spec = flatten(output)
    for leaf in leaves:
        if type(leaf) is not Tensor and not isinstance(leaf, _PLAIN_RESULTS):
            raise NotAPartError(f"it returns a {type(leaf).__name__}, which no graph makes")
        if type(leaf) is Tensor and (vars(leaf) or leaf.retains_grad):
            raise NotAPartError("it gives a result an attribute, or has it keep its gradient")
    if isinstance(output, Tensor):
        return lambda tensors: tensors[0]
    kept = [_NOTHING if type(leaf) is Tensor else leaf for leaf in leaves]

    def make(tensors: Sequence[Tensor]) -> Any:
        made = iter(tensors)
        return tree_unflatten([next(made) if leaf is _NOTHING else leaf for leaf in kept], spec)

    return make


@dataclass
class Kind:
    """Calls that are alike."""

    autocast: Any = None  # that such calls are under, as the first of them tells
    num_seen: int = 0
    num_unsettled: int = 0
    told: Any = None  # what is no tensor of what such a call returned last
    constants: ConstantWatch | None = None
    slots: list["PartGraphs"] = field(default_factory=list)
    is_refused: bool = False
    casts: Casts = field(default_factory=lambda: Casts([], torch.bfloat16))


class PartGraphs:
    """One recording of a part, which serves one call at a time.

    Attributes:
        num_nodes: Of the forward graph; None where the driver does not tell.
        draws_from: Generators whose states a replay moves; most programs draw from none.
        kept_bytes: Memory of results and of what the backward pass needs, taken for good.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: GraphBackend,
        kind: Kind,
        leaves: Sequence[Any],
        spec: TreeSpec | None,
    ) -> None:
        """Record a call with these arguments; NotAPartError, and everything is as it was.

        The call has then taken effect once, and ``first`` has its results.
        """
        assert kind.constants is not None
        self._num_under_way = 0  # stages, from a call's forward pass to their backward passes
        self._is_dropped = False
        self._module = module
        self._backend = backend
        by_leaf = {id(leaf): _static_input(leaf) for leaf in leaves}
        self._static = [by_leaf[id(leaf)] for leaf in leaves]  # one that is given twice is one
        self._num_leaves = len(self._static)
        places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._targets = [(place, self._static[place].detach()) for place in places.values()]
        self._spec = spec
        self._told = kind.told
        self._casts = kind.casts  # see Note [Casts are inputs]
        self._record(leaves, kind.constants)

    def _record(self, leaves: Sequence[Any], constants: ConstantWatch) -> None:
        module, device, casts = self._module, self._backend.device, self._casts
        lent = {storage_key(buffer) for buffer in module.buffers()}
        if any(isinstance(leaf, Tensor) and storage_key(leaf) in lent for leaf in leaves):
            raise NotAPartError("it is given a buffer of its own, which it may write")
        states = [generator.get_state() for generator in generators_of(module, device)]
        with self._backend.on_capture_stream():
            # Other parameters, which lie in the same memory, each with the module's own. CUDA rule:
            # a capture may not wait for another stream, and autograd runs what ends in a parameter
            # on the stream on which that was used first. That stays the loop's, as ever.
            params = [param for param in module.parameters() if param.requires_grad]
            self._pairs = [(nn.Parameter(param.detach()), param) for param in params]
            for stand_in, param in self._pairs:
                vars(stand_in).update(vars(param))
            self._stand_ins = {id(param): stand_in for stand_in, param in self._pairs}
            own = Casts([self._stand_ins[id(each)] for each in casts.weights], casts.dtype)()
        self._cast_targets = [cast.detach() for cast in own]
        # Leaves, and those that autocast finds in its cache for the stand-ins.
        self._static += [cast.detach_().requires_grad_() for cast in own]
        self._load([*leaves, *casts.weights])  # a cast of the block's here could change an order
        try:
            # Tensors that modules keep as plain attributes.
            attributes = (value for each in module.modules() for value in vars(each).values())
            kept = [value for value in attributes if isinstance(value, Tensor)]
            self._graph, self.first, self.guards = recorded(
                module,
                self._backend,
                constants.ran,
                partial(self._forward, constants),
                state=[*module.parameters(), *module.buffers(), *kept],
                given=self._inputs(),
                refuse_more=constants.check_memory,
            )
        except BaseException:
            self.close()
            raise
        self.num_nodes = self._graph.facts.num_nodes
        now = [(g, g.get_state()) for g in generators_of(module, device)]
        self.draws_from = [
            generator
            for (generator, state), was in zip(now, states, strict=True)
            if not torch.equal(state, was)
        ]

    def _forward(self, constants: ConstantWatch) -> list[Tensor]:
        leaves = self._static[: self._num_leaves]
        args, kwargs = tuple(leaves), {}
        if self._spec is not None:
            args, kwargs = tree_unflatten(leaves, self._spec)
        handed = Handed((args, kwargs))
        need_grads = [leaf.requires_grad for leaf in self._inputs()]
        packed: list[
            tuple[int, weakref.ref[Tensor]]
        ] = []  # by the number of the node that saves it

        def keep(tensor: Tensor) -> Tensor:
            # Of what hooks hand out, autograd does not ask whether it was written meanwhile:
            # weights are, by each step. Out of sight of what records, since a warm-up has nothing
            # like it.
            with without_modes():
                another = tensor.detach()
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            packed.append((number, weakref.ref(another)))
            return another

        kept = saved_tensors_hooks(keep, lambda another: another)
        with self._put_in(), constants.comparing(self._inputs()), kept:
            output = self._module._call_impl(*args, **kwargs)
        for stand_in, param in self._pairs:
            if stand_in.data_ptr() != param.data_ptr():
                raise NotAPartError("it gives its weights other memory")
            if stand_in._backward_hooks or stand_in._post_accumulate_grad_hooks:
                raise NotAPartError("it gives its weights one more hook in each call")
        if handed.written():
            raise NotAPartError("it writes into a container that it is given")
        if need_grads != [leaf.requires_grad for leaf in self._inputs()]:
            raise NotAPartError("it changes requires_grad of an input")
        if (told := told_by(output)) != self._told:
            raise NotAPartError(f"it returns {told}, and returned {self._told} before")
        self._made_of = _made_as(output)
        results = tensors_of(output)
        self._check_results(results)
        saved = [(number, each) for number, ref in packed if (each := ref()) is not None]
        self._stages = [*self._find_stages(results, saved)]
        return [tensor.detach() for tensor in results]

    @contextmanager
    def _put_in(self) -> Iterator[None]:
        """Have the other parameters in the module while the body runs."""
        own = self._stand_ins
        tables: list[tuple[dict[str, Any], str, Any]] = []
        for module in self._module.modules():
            tables += [
                (parameters_of(module), name, own[id(param)])
                for name, param in parameters_of(module).items()
                if id(param) in own
            ]
            if isinstance(module, nn.RNNBase):  # which keeps a list of them
                weights = [own.get(id(weight), weight) for weight in module._flat_weights]
                refs = [None if weight is None else weakref.ref(weight) for weight in weights]
                tables.append((vars(module), "_flat_weights", weights))
                tables.append((vars(module), "_flat_weight_refs", refs))
        before = [(table, name, table[name]) for table, name, _ in tables]
        for table, name, value in tables:
            table[name] = value
        try:
            yield
        finally:
            for table, name, value in before:
                table[name] = value

    @contextmanager
    def _on_the_way_back(self) -> Iterator[None]:
        """Have them in the module while Python of a function or hook may run it again.

        Such a function asks for gradients of what it was given, or goes backward by itself.
        """
        for stand_in, param in self._pairs:
            stand_in.grad = param.grad
        try:
            with self._put_in():
                yield
        finally:
            for stand_in, param in self._pairs:
                if stand_in.grad is not param.grad:
                    param.grad = stand_in.grad
                stand_in.grad = None

    def _check_results(self, results: Sequence[Tensor]) -> None:
        own = (*self._module.parameters(), *self._module.buffers())
        taken = {storage_key(each) for each in (*own, *self._inputs())}
        for tensor in results:
            key = storage_key(tensor)
            if key in taken:
                raise NotAPartError(
                    "it returns a look at memory of its own, of an input, or of another result"
                )
            taken.add(key)
            if tensor.layout is not torch.strided or not is_dense(tensor.shape, tensor.stride()):
                raise NotAPartError("it returns a tensor that is not dense")
            if tensor.is_complex() or tensor.is_neg():
                raise NotAPartError("it returns a complex tensor")

    def _inputs(self) -> Iterator[Tensor]:
        yield from (self._static[place] for place, _ in self._targets)
        yield from self._static[self._num_leaves :]

    def _find_stages(
        self, kept: Sequence[Tensor], saved: Sequence[tuple[int, Tensor]]
    ) -> Iterator[Stage]:
        """Find where gradients leave the autograd graph: the nodes of its uses of leaves."""
        own = {storage_key(each) for each in (*self._module.parameters(), *self._module.buffers())}
        sizes = {storage_key(each): each.untyped_storage().nbytes() for _, each in saved}
        self.kept_bytes = sum(size for key, size in sizes.items() if key not in own)
        # What gradients go to: parameters, and by their places inputs and results.
        targets: dict[Any, Any] = dict(self._pairs)
        for place, leaf in enumerate(self._static):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                targets[leaf] = place
        targets |= {place: len(self._static) + place for place in range(len(kept))}
        cuts = {edge_of(each): place for place, each in enumerate(kept) if each.grad_fn is not None}
        seen: set[Any] = set()
        regions = regions_of(kept)
        known = {sequence_number(node) for region in regions for node in region.nodes}
        for region in regions:
            uses: dict[Any, list[tuple[Node, int]]] = {}  # of leaves, and of results by their place
            for node in region.nodes:
                for index, edge in enumerate(node.next_functions):
                    leaf = cuts[edge] if edge in cuts else getattr(edge[0], "variable", None)
                    if leaf is not None:
                        uses.setdefault(leaf, []).append((node, index))
            # A backward pass through a later stage would go on to it through the earlier one.
            if not seen.isdisjoint(uses):
                raise NotAPartError("it uses a tensor before and behind a result")
            seen.update(uses)
            if uses.keys() - targets.keys():
                raise NotAPartError("it trains a tensor that is none of its parameters")
            for nodes in uses.values():  # in the order in which a backward pass comes to them
                nodes.sort(key=lambda use: -sequence_number(use[0]))
            its = [kept[place] for place in region.results]
            backward = PartBackward(
                self._module,
                self._backend,
                [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in its],
                [
                    leaf if isinstance(leaf, Tensor) else get_gradient_edge(kept[leaf])
                    for leaf in uses
                ],
                [*uses.values()],
                self._on_the_way_back,
            )
            others = known - {*map(sequence_number, region.nodes)}
            keys = {storage_key(each) for number, each in saved if number not in others}
            held = [place for place, each in enumerate(kept) if storage_key(each) in keys]
            # The loop may write into that, and go backward only through what has not saved it.
            if len(region.results) > 1 and not uses.keys().isdisjoint(held):
                raise NotAPartError("it keeps a result of which it makes several")
            given = [each for each in self._targets if storage_key(each[1]) in keys - own]
            targets_of_saved = [*(kept[place] for place in held), *(each for _, each in given)]
            yield Stage(
                region.results,
                [place for place in region.results if not kept[place].requires_grad],
                [targets[leaf] for leaf, nodes in uses.items() for _ in nodes],
                backward,
                held,
                [place for place, _ in given],
                [param for _, param in self._pairs if storage_key(param) in keys],
                [each.detach() for each in targets_of_saved],
            )

    @property
    def is_taken(self) -> bool:
        """Whether a call is between its forward and the end of its backward pass."""
        return self._num_under_way > 0

    def passes(self) -> list[Any]:
        """Return the graphs of backward passes; None for those that no graph holds."""
        return [graph for stage in self._stages for graph in stage.backward.graphs.values()]

    def given(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return what a call with these arguments is given, in the order of edges' places."""
        return [*leaves, *self._casts()] if self._casts.weights else leaves

    def _load(self, given: Sequence[Any]) -> None:
        with below_autograd():
            for place, target in self._targets:
                target.copy_(given[place])
            if self._cast_targets:
                foreach_copy_(self._cast_targets, [*given[self._num_leaves :]])

    def replay(self, given: Sequence[Any]) -> list[Tensor] | None:
        """Return results; None where it has failed, and everything is as it was.

        ``given``: see the method of that name.
        """
        self._load(given)
        try:
            return self._graph.replay()
        except Exception as error:
            if self._graph.effect is not Effect.NONE or is_of_handler(error):
                raise
            return None

    def hand_out(self, results: list[Tensor], given: Sequence[Any], again: Again) -> Any:
        """Return what the module returns, of the results of its graph."""
        # What is a look at the graph's memory is none for autograd, which lets nobody write there.
        results = [each.detach() if each._is_view() else each for each in results]
        for stage in self._stages:
            if not stage.edges:
                continue
            edges = _edges_of(stage, [*given, *results])
            made = _ReplayedPart.apply(self, stage, results, given, again, *edges)  # type: ignore[no-untyped-call]
            has_several = len(stage.results) > 1 + len(stage.fixed)
            for place, result in zip(stage.results, made, strict=True):
                is_apart = has_several and result.requires_grad
                results[place] = _Apart.apply(result) if is_apart else result  # type: ignore[no-untyped-call]
        return self._made_of(results)

    def backward_as_written(
        self, stage: Stage, call: AsWritten, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Do so through a call that ran as written, in a way that autograd can go through again."""
        results, leaves = call
        # Such a call has made casts of its own: what comes to them comes to the weights.
        edges = _edges_of(stage, [*leaves, *self._casts.weights, *results])
        pairs = [
            (results[place], grad)
            for place, grad in zip(stage.results, grads, strict=True)
            if grad is not None and results[place].requires_grad
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
        casts = range(self._num_leaves, len(self._static))
        is_of_cast = [type(each) is int and each in casts for each in stage.edges]
        found: list[Tensor | None] = [None] * len(edges)
        for index in sorted(range(len(edges)), key=is_of_cast.__getitem__):
            found[index] = left.pop(id(edges[index]), None)
        return found

    def drop(self) -> None:
        """Close now, or when the call that is under way has come to its end."""
        self._is_dropped = True
        if not self.is_taken:
            self.close()

    def land(self) -> None:
        """End a stage of a call."""
        self._num_under_way -= 1
        if self._is_dropped and not self.is_taken:
            self.close()

    def close(self) -> None:
        for stage in getattr(self, "_stages", ()):
            stage.backward.close()
        if hasattr(self, "_graph"):
            self._graph.close()


class _ReplayedPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graphs: PartGraphs,
        stage: Stage,
        results: Sequence[Tensor],
        given: Sequence[Any],
        again: Again,
        *edges: Tensor,
    ) -> tuple[Tensor, ...]:
        """``again`` runs the call as it is written; see ``backward``."""
        ctx.set_materialize_grads(False)
        ctx.graphs, ctx.stage, ctx.again = graphs, stage, again
        graphs._num_under_way += 1
        # At the latest when nobody can go backward from the call any more.
        ctx.end = weakref.finalize(ctx, graphs.land)
        if stage.fixed:
            ctx.mark_non_differentiable(*[results[place] for place in stage.fixed])
        ctx.save_for_backward(
            *[results[place] for place in stage.saved_results],
            *[given[place] for place in stage.saved_inputs],
            *stage.saved_weights,
            _NOTHING,  # so that torch itself refuses a second backward pass
        )
        return tuple(results[place] for place in stage.results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        graphs: PartGraphs = ctx.graphs
        stage: Stage = ctx.stage
        of_no_tensor = (None,) * 5
        if torch.is_grad_enabled():  # somebody wants to go backward through this, too
            return *of_no_tensor, *graphs.backward_as_written(stage, ctx.again(), grads)
        for target, tensor in zip(stage.saved, saved, strict=False):
            target.copy_(tensor)
        found = stage.backward.run(grads)
        if not keeps_graph():
            ctx.end()
        return *of_no_tensor, *found


class _Apart(torch.autograd.Function):
    """A node of its own for one of several results: its hooks hear of its own gradients alone."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return result.detach()  # the same memory, and no look at it for autograd

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _edges_of(stage: Stage, given: Sequence[Any]) -> list[Any]:
    """Return what gradients go to in a call that is given this, and results behind that."""
    return [given[each] if type(each) is int else each for each in stage.edges]


def _static_input(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    static = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return static.requires_grad_(leaf.requires_grad)

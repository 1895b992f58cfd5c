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
from graphfsdp.in_place.part_backward import PartBackward, nodes_behind
from graphfsdp.in_place.part_recording import NotAPartError, recorded

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
        is_taken: A call is between its forward and the end of its backward pass.
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
        self.is_taken = False
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
        packed: list[weakref.ref[Tensor]] = []

        def keep(tensor: Tensor) -> Tensor:
            # Of what hooks hand out, autograd does not ask whether it was written meanwhile:
            # weights are, by each step. Out of sight of what records, since a warm-up has nothing
            # like it.
            with without_modes():
                another = tensor.detach()
            packed.append(weakref.ref(another))
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
        self._find_uses(results)
        self._find_saved(results, [each for ref in packed if (each := ref()) is not None])
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

    def _find_saved(self, results: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        """See Note [Written behind autograd's back]."""
        sizes = {storage_key(each): each.untyped_storage().nbytes() for each in saved}
        self._saved_weights = [param for _, param in self._pairs if storage_key(param) in sizes]
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            sizes.pop(storage_key(tensor), None)
        self.kept_bytes = sum(sizes.values())
        kept = [(i, each) for i, each in enumerate(results) if storage_key(each) in sizes]
        given = [each for each in self._targets if storage_key(each[1]) in sizes]
        self._saved_results = [index for index, _ in kept]
        self._saved_inputs = [place for place, _ in given]
        self._saved = [each.detach() for _, each in (*kept, *given)]

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

    def _find_uses(self, kept: Sequence[Tensor]) -> None:
        """Find where gradients leave the autograd graph: the nodes of its uses of leaves."""
        # What gradients go to: parameters, and by their places inputs.
        targets: dict[int, Any] = {id(stand_in): param for stand_in, param in self._pairs}
        for place, leaf in enumerate(self._static):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                targets[id(leaf)] = place
        uses: dict[Tensor, list[tuple[Node, int]]] = {}
        results = {(tensor.grad_fn, tensor.output_nr) for tensor in kept if tensor.grad_fn}
        for node in nodes_behind(kept):
            for index, (following, number) in enumerate(node.next_functions):
                if following is None:
                    continue
                # Whoever asks for the gradient of such a one, or changes it by a hook, means all
                # that comes to it, and what comes through the other result would stay in here.
                if (following, number) in results:
                    raise NotAPartError("it returns a tensor of which it makes another result")
                variable = getattr(following, "variable", None)
                if variable is None:
                    continue
                if id(variable) not in targets:
                    raise NotAPartError("it trains a tensor that is none of its parameters")
                uses.setdefault(variable, []).append((node, index))
        for nodes in uses.values():  # in the order in which a backward pass comes to them
            nodes.sort(key=lambda use: -sequence_number(use[0]))
        self._fixed = [index for index, tensor in enumerate(kept) if not tensor.requires_grad]
        self.backward = PartBackward(
            self._module,
            self._backend,
            [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in kept],
            [*uses],
            [*uses.values()],
            self._on_the_way_back,
        )
        self._edges = [targets[id(leaf)] for leaf, nodes in uses.items() for _ in nodes]

    def given(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return what a call with these arguments is given, in the order of ``edges``' places."""
        return [*leaves, *self._casts()] if self._casts.weights else leaves

    def edges(self, given: Sequence[Any]) -> list[Any]:
        """Return what gradients go to in a call that is given this, once for each use."""
        return [given[each] if type(each) is int else each for each in self._edges]

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
        if self._edges:
            edges = self.edges(given)
            results = _ReplayedPart.apply(self, results, given, again, *edges)  # type: ignore[no-untyped-call]
        return self._made_of(results)

    def backward_as_written(
        self, call: AsWritten, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Do so through a call that ran as written, in a way that autograd can go through again."""
        results, leaves = call
        # Such a call has made casts of its own: what comes to them comes to the weights.
        edges = self.edges([*leaves, *self._casts.weights])
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
        casts = range(self._num_leaves, len(self._static))
        is_of_cast = [type(each) is int and each in casts for each in self._edges]
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
        """End a call."""
        self.is_taken = False
        if self._is_dropped:
            self.close()

    def close(self) -> None:
        if hasattr(self, "backward"):
            self.backward.close()
        if hasattr(self, "_graph"):
            self._graph.close()


class _ReplayedPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graphs: PartGraphs,
        results: Sequence[Tensor],
        given: Sequence[Any],
        again: Again,
        *edges: Tensor,
    ) -> tuple[Tensor, ...]:
        """``again`` runs the call as it is written; see ``backward``."""
        ctx.set_materialize_grads(False)
        ctx.graphs, ctx.again = graphs, again
        graphs.is_taken = True
        # At the latest when nobody can go backward from the call any more.
        ctx.end = weakref.finalize(ctx, graphs.land)
        if graphs._fixed:
            ctx.mark_non_differentiable(*[results[index] for index in graphs._fixed])
        ctx.save_for_backward(
            *[results[index] for index in graphs._saved_results],
            *[given[place] for place in graphs._saved_inputs],
            *graphs._saved_weights,
            _NOTHING,  # so that torch itself refuses a second backward pass
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        graphs: PartGraphs = ctx.graphs
        of_no_tensor = (None,) * 4
        if torch.is_grad_enabled():  # somebody wants to go backward through this, too
            return *of_no_tensor, *graphs.backward_as_written(ctx.again(), grads)
        for target, tensor in zip(graphs._saved, saved, strict=False):
            target.copy_(tensor)
        found = graphs.backward.run(grads)
        if not keeps_graph():
            ctx.end()
        return *of_no_tensor, *found


def _static_input(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    static = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return static.requires_grad_(leaf.requires_grad)

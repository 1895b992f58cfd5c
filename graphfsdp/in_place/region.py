"""From the first call of a model to the last step of an optimizer.

Note [Put off]
From the first call of a model to the last step of an optimizer everything that touches the model,
its weights, or what came of them is put off: torch functions (which a mode sees) and calls of
modules (which are asked in place of their forward) are noted with their arguments, and hand out
tensors of the right form with nothing in them yet. The step runs what was noted as one captured
iteration, and fills the tensors that somebody still holds. So Python between the calls runs in
every iteration, and a loop that goes another way, or passes another number, makes another program
with a graph of its own. What is not known yet runs as written, from the first call that differs,
and is known the next time; the first iteration is of that kind.

Note [No memory]
What is put off must not be read or written by something that the mode does not see. So a tensor
that stands for another one has no memory (it is on the device "meta") until the step gives it some:
functorch, TorchScript, a thread, C++ find nothing to read, and what they make of it is refused
where it comes back. A look at a weight is one from the beginning, and stays one; whether a weight
is trained (``requires_grad_``) is said at once, since the loop may ask. And when a call runs for
the first time, it is watched: a replay writes its own copies of what came from outside, so a call
may neither write that (but for what it returns, whose value the step brings back), nor give it
other memory.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from graphfsdp._capture.guards.settings import switched, switches_now
from graphfsdp._capture.rules.refusals import Refusal, for_this_place
from graphfsdp._capture.trace.source import user_source_line
from graphfsdp._capture.undo.interrupts import DeferredInterrupts
from graphfsdp.base.hazards import HazardKind
from graphfsdp.base.op_tensors import storage_key
from graphfsdp.base.sharded import ShardedUnit
from graphfsdp.base.torch_internals import (
    dict_version,
    functorch_level,
    is_functorch_wrapped,
    tree_unflatten,
)
from graphfsdp.errors import CaptureError
from graphfsdp.in_place.calls import (
    CONSTANT,
    LAST,
    LATER,
    MOST_NEW,
    PLAIN,
    Call,
    Given,
    Made,
    Modes,
    Own,
    Point,
    Result,
    Unknown,
    flat,
    flattened,
    is_in_place,
    lose,
    name_of,
    of_unseen,
    of_written,
    refusal,
    run_calls,
    same,
)
from graphfsdp.in_place.forms import Form, another_of, become
from graphfsdp.in_place.watch import (
    Watch,
    is_alone,
    look_of,
    moved,
    random_states,
    version_of,
)

_READ = Refusal(
    "{} is called between the model and the optimizer's step; what it returns is not known before "
    "the step",
    LATER,
    HazardKind.HOST_READ,
)
_NO_STEP = (
    "if no step comes of an optimizer that capture_in_place was given, as behind the loop, call "
    "the model under torch.no_grad(), in eval(), or after close() of what it has returned"
)
_SETS_FLAG = frozenset({Tensor.requires_grad_, Tensor.requires_grad.__set__})  # type: ignore[attr-defined]
_AUTOGRAD = torch.DispatchKey.AutogradOther
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def check_within_no_operator(function: Callable[..., Any] | None = None) -> None:
    """Refuse what torch's own insides call, below autograd: it is no call of the loop."""
    is_below = _is_excluded(_AUTOGRAD) or functorch_level() is not None
    if is_below and not torch.is_inference_mode_enabled():
        raise of_unseen("a function" if function is None else name_of(function))


class Region:
    """What the loop has done since the first call of a model; see Note [Put off]."""

    def __init__(
        self,
        root: Point,
        own: Mapping[int, Tensor],
        kind: str,
        attributes: Sequence[dict[str, Any]],
        units: Sequence[ShardedUnit],
    ) -> None:
        """``own`` are the models' tensors by id, ``attributes`` those of all their modules.

        What was put off reads both at last, and has the settings of ``units`` as they are now.
        """
        self.point = root
        self.is_known = True
        self.given: list[Tensor] = []
        self.stepped: set[int] = set()
        self.flags: dict[int, bool] = {}  # what was trained, of what the loop has said that of
        self._kind = kind
        self._switches = switches_now(kind)
        self._own = own
        self._units = units
        self.num_blocks = 0  # outermost autocasts that have ended
        self._made: dict[int, Any] = {}  # what is there already, where the loop runs as written
        self._made_by: dict[int, Any] = {}  # autograd's nodes, while they live
        self._made_within: dict[int, Any] = {}  # what calls have made, returned or not
        self._num_made = 0
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._results: dict[int, Result] = {}
        self._roots: dict[int, int] = {}  # by address: what has all of a storage
        self._places: dict[int, int] = {}  # by id of a tensor that was made
        self._given_places: dict[int, int] = {}
        self._versions: list[int] = []
        self.new_at: tuple[Call, Call | None] | None = None  # and what was known there
        self._random = random_states(kind)  # as they were behind the last call that has run
        self._loop_draws: frozenset[int] = frozenset()
        self._attributes = attributes
        self._written = self._sum_of_versions()
        self._training = self._modes()

    def do(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        run: Callable[..., Any],
        *,
        only_if_touched: bool = False,
    ) -> Any:
        """Put a call off, or run it if it is new; ``only_if_touched``: others' go through."""
        leaves, spec = flat(args, kwargs)
        if only_if_touched and not (
            any(isinstance(t, Tensor) and self.touches(t) for t in leaves)
            or (is_in_place(function) and id(leaves[0]) in self._given_places)
        ):
            return self._do_at_once(function, leaves, args, kwargs)
        check_within_no_operator(function)
        self._check_switches()
        forms: list[Form] = []
        places = [self._place(leaf, function, forms) for leaf in leaves]
        call = Call(
            function, places, spec, Modes.now(self._kind, self.num_blocks, self._units), forms
        )
        if self.is_known:
            for point in self.point.following:
                assert point.call is not None
                if point.call.is_like(call):
                    self.point = point
                    if function in _SETS_FLAG and isinstance(leaves[0], Tensor):
                        self._set_flag(function, leaves[0], args, kwargs)
                    return self._stand_ins(point.call)
            known = self.point.following
            self.new_at = call, known[-1].call if known else None
            self.catch_up(run)
        before = self._note_draws()
        versions = list(map(version_of, self.given))
        looks = [(leaf, look_of(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        with Watch() as watch:
            result = run(call.run, self._made, self.given)
        self._made_within |= watch.made
        self._random = random_states(self._kind)
        draws = self.point.draws | moved(before, self._random)
        self._note(call, result)
        self._check_outside(call, versions, looks, watch)
        call.source = user_source_line()
        self.point.following.append(Point(call, self.point, draws=draws))
        self.point = self.point.following[-1]
        return result

    def _set_flag(
        self, function: Callable[..., Any], tensor: Tensor, args: Any, kwargs: Any
    ) -> None:
        if self.owns(tensor):
            self.flags.setdefault(id(tensor), tensor.requires_grad)
        function(*args, **kwargs)

    def _check_switches(self) -> None:
        """Refuse a context of torch's around a part of the iteration, which runs at its end."""
        now = switches_now(self._kind)
        if now != self._switches:
            raise refusal(
                f"{switched(self._kind, self._switches, now)} is switched between the model's call "
                "and the optimizer's step, and what was put off runs at the step",
                "enter the context (sdpa_kernel, loss_parallel) around both, or around the loop, "
                "or within a module's forward",
            )

    def _do_at_once(
        self, function: Callable[..., Any], leaves: Sequence[Any], args: Any, kwargs: Any
    ) -> Any:
        """Run what has nothing to do with the models."""
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._check_apart(leaf, function)
        if self.is_known or functorch_level() is not None:
            return function(*args, **kwargs)
        before = random_states(self._kind)
        with DeferredInterrupts(), Watch() as watch:
            result = function(*args, **kwargs)
        if moved(before, random_states(self._kind)):
            self.point.drawn_at = user_source_line()
        for tensor in self.given:
            if storage_key(tensor) in watch.written:
                raise of_written(tensor, name_of(function))
        return result

    def _check_apart(self, tensor: Tensor, function: Callable[..., Any]) -> None:
        """Refuse what was made of the models' tensors without the mode's knowing."""
        while is_functorch_wrapped(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        key = storage_key(tensor)
        if tensor.is_meta or key in self._made_within or self.touches(tensor):
            raise of_unseen(name_of(function))
        if key in self._own_memory:
            raise refusal(
                f"{name_of(function)} is given a tensor that was made before the model's call and "
                "looks at a weight or gradient, whose numbers of this iteration come at the step",
                f"take it anew behind the model's call (p.data, p.grad), or {LATER}",
            )

    @cached_property
    def _own_memory(self) -> dict[int, Tensor]:
        """The models' tensors and their gradients by the memory that they lie in."""
        grads = [t.grad for t in self._own.values() if t.is_leaf]
        tensors = [*(grad for grad in grads if grad is not None), *self._own.values()]
        found = {storage_key(tensor): tensor for tensor in tensors}
        found.pop(0, None)
        return found

    def _check_outside(
        self,
        call: Call,
        versions: Sequence[int],
        looks: Sequence[tuple[Tensor, object]],
        watch: Watch,
    ) -> None:
        """Refuse a call that does to tensors from outside what its replay would not."""
        name = name_of(call.function)
        for tensor, look in looks:
            if not self.owns(tensor) and look_of(tensor) != look:
                raise refusal(
                    f"{name} gives a tensor of shape {tuple(tensor.shape)} other memory between "
                    "the model's call and the optimizer's step, which a replay does not",
                    f"use the new tensor in its place, or {LATER}",
                )
        if name.endswith(".__set__") and isinstance(call.leaves[0], Given):
            raise refusal(
                f"{name} writes an attribute of a tensor from outside of the iteration, which a "
                "replay does not",
                LATER,
            )
        for place, version in enumerate(versions):
            tensor = self.given[place]
            if version_of(tensor) not in (version, self._versions[place]):
                raise of_written(tensor, name)
            if self._index_of(tensor) is None and storage_key(tensor) in watch.written:
                raise refusal(
                    f"{name} writes a tensor of shape {tuple(tensor.shape)} from outside of the "
                    "iteration without torch's count of writes (as GradScaler notes infinities, "
                    "and batch_norm its statistics), and a replay does not",
                    "give capture_in_place the module that holds it; for a GradScaler bfloat16, "
                    "which needs none",
                    HazardKind.HIDDEN_WRITE,
                )

    def owns(self, tensor: Tensor) -> bool:
        return id(tensor) in self._own

    def placed(self, values: Sequence[Any]) -> list[Any]:
        """Return these with what lies where it is going to be, for those that are not there yet."""
        found = []
        for value in values:
            index = self._index_of(value)
            if index is not None and value.is_meta:
                check_within_no_operator()
                value = torch.empty(0, device=self._results[index].form.device)
            found.append(value)
        return found

    def touches(self, tensor: Tensor) -> bool:
        return self.owns(tensor) or self._index_of(tensor) is not None

    def _index_of(self, tensor: Tensor) -> int | None:
        index = self._places.get(id(tensor))
        return index if index is not None and self._refs[index]() is tensor else None

    def _place(self, leaf: Any, function: Callable[..., Any], forms: list[Form]) -> Any:
        if not isinstance(leaf, Tensor):
            is_of_ranks = type(leaf).__module__.startswith("torch.distributed.")  # a placement
            if isinstance(leaf, CONSTANT) or callable(leaf) or is_of_ranks:
                return leaf
            raise refusal(
                f"{name_of(function)} is given a {type(leaf).__name__}, which may hold numbers "
                "that a replay would not see change",
                "give it tensors and plain numbers, in tuples, lists and dicts",
            )
        if self.owns(leaf):
            return Own(leaf)
        index = self._index_of(leaf)
        if index is not None:
            by = leaf.grad_fn
            if isinstance(by, BackwardCFunction) and by is not self._made_by.get(index):
                raise refusal(
                    f"the loop applies {type(by).__name__.removesuffix('Backward')}, an "
                    "autograd.Function, which torch does not tell of",
                    "call it in the forward of a module that capture_in_place is given",
                )
            return Made(index)
        if leaf.is_meta or not self.is_known:
            self._check_apart(leaf, function)
        if leaf.requires_grad and leaf.is_leaf:
            raise refusal(
                f"{name_of(function)} is given an input of the iteration that requires a gradient, "
                "which a replay would put elsewhere",
                "detach() it if nobody looks at its gradient; else graphfsdp.capture with "
                "iteration=, whose function begins with x = x.detach().requires_grad_()",
            )
        if leaf.requires_grad:
            raise refusal(
                f"{name_of(function)} is given a tensor that requires a gradient and is neither of "
                "the model nor made since its first call in this iteration",
                "compute it behind the model's call, or give capture_in_place the module that "
                "makes it",
            )
        forms.append(Form.of(leaf))
        if id(leaf) not in self._given_places:
            self._given_places[id(leaf)] = len(self.given)
            self.given.append(leaf)
            self._versions.append(version_of(leaf))
        return Given(self._given_places[id(leaf)])

    def _stand_ins(self, call: Call) -> Any:
        if call.result_spec is None:
            return self._stand_in(call.results[0])
        return tree_unflatten([self._stand_in(r) for r in call.results], call.result_spec)

    def _stand_in(self, result: Any) -> Any:
        if isinstance(result, Own):
            return result.tensor
        if isinstance(result, Given):
            return self.given[result.index]
        if not isinstance(result, Result):
            return result
        known = self._refs.get(result.index)
        tensor = None if known is None else known()
        if tensor is None:
            tensor = self._empty(result)
            self._keep(result, tensor)
        return tensor

    def _empty(self, result: Result) -> Tensor:
        """Return what stands for a tensor that is not there yet; see Note [No memory]."""
        if result.written is not None:
            tensor = self.given[result.written]
            if not is_alone(tensor):
                raise of_written(tensor)
            return tensor
        if isinstance(result.root, Own):
            with torch.no_grad():
                look = result.lying_in(result.root.tensor)
            return look.requires_grad_(result.form.requires_grad)
        return result.form.empty()

    def _keep(self, result: Result, tensor: Tensor) -> None:
        index = result.index
        self._results[index] = result
        self._refs[index] = weakref.ref(tensor)
        self._places[id(tensor)] = index
        self._num_made = max(self._num_made, index + 1)

    def _note(self, call: Call, result: Any) -> None:
        """Keep what a call has made, and how it looks."""
        leaves = [result]
        if not isinstance(result, Tensor | None):
            leaves, call.result_spec = flattened(result)
        for leaf in leaves:
            call.results.append(self._noted(call, leaf))

    def _noted(self, call: Call, leaf: Any) -> Any:
        is_module = isinstance(getattr(call.function, "__self__", None), nn.Module)
        if not isinstance(leaf, Tensor):
            if leaf is None or (is_module and isinstance(leaf, PLAIN)):
                return leaf
            if is_module:
                return Unknown()
            return self.on_read(call, leaf)
        if self.owns(leaf):
            return Own(leaf)
        index = self._index_of(leaf)
        written = self._given_places.get(id(leaf))
        if written is not None and index is None and version_of(leaf) == self._versions[written]:
            return Given(written)
        if written is not None and is_alone(leaf):
            self._versions[written] = version_of(leaf)
        index = self._num_made if index is None else index
        result = Result(index, Form.of(leaf), *self._memory_of(index, leaf), written)
        if index == self._num_made:
            self._keep(result, leaf)
        self._made[index] = leaf
        self._made_by[index] = leaf.grad_fn
        return result

    def on_read(self, call: Call, value: Any) -> Any:
        """Refuse a call that returns a value; return what a replay would return."""
        raise self.refusal_of_read(call)

    def refusal_of_read(self, call: Call) -> CaptureError:
        found = for_this_place(_READ.of(name_of(call.function)))
        remedy = found.remedy
        if remedy == LATER and self.stepped:
            remedy = f"{LAST}; one that steps less often stays out of capture_in_place"
        elif remedy == LATER:
            remedy = f"{LATER}; {_NO_STEP}"
        return refusal(found.what, remedy, found.kind)

    def _memory_of(self, index: int, leaf: Tensor) -> tuple[int | Own, int]:
        """Return the place of what has all of a tensor's storage, and where in it this lies."""
        if type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return index, 0
        storage = leaf.untyped_storage()
        own = self._own_memory.get(storage_key(leaf))
        if own is not None and self.owns(own):
            return Own(own), int(leaf.storage_offset())
        if storage.nbytes() == leaf.numel() * leaf.element_size():
            self._roots.setdefault(storage.data_ptr(), index)
        return self._roots.get(storage.data_ptr(), index), int(leaf.storage_offset())

    def refusal_of_new(self) -> CaptureError:
        """Return an error for a loop whose iterations are never the same."""
        assert self.new_at is not None
        call, other = self.new_at
        values = [
            f" ({a!r} and {b!r})"
            for a, b in zip(call.leaves, other.leaves if other else (), strict=False)
            if isinstance(a, PLAIN) and not same(a, b)
        ]
        remedy = "give numbers that change as 0-D tensors on the model's device"
        if not values and other is not None and call.forms != other.forms:
            pairs = zip(call.forms, other.forms, strict=False)
            now, before = next((a.shape, b.shape) for a, b in pairs if a != b)
            values = [f" (with a tensor of shape {now} and {before})"]
            remedy = "pad batches to a few shapes, each of which gets a graph"
        return refusal(
            f"{MOST_NEW + 1} iterations in a row were like none before, the last one from "
            f"{name_of(call.function)}{values[0] if values else ''} on; no graph would be replayed",
            remedy,
        )

    def catch_up_behind_eval(self, run: Callable[..., Any]) -> None:
        """Run what was put off in the modes that the modules had then."""
        now = self._modes()
        self._set_modes(self._training)
        self._written = self._sum_of_versions()
        try:
            self.catch_up(run)
        finally:
            self._set_modes(now)

    def _modes(self) -> list[bool | None]:
        return [values.get("training") for values in self._attributes]

    def _set_modes(self, modes: Sequence[bool | None]) -> None:
        for values, mode in zip(self._attributes, modes, strict=True):
            if mode is not None:
                values["training"] = mode

    def catch_up(self, run: Callable[..., Any]) -> None:
        """Run what was put off: from here on the loop does something that is new."""
        self.is_known = False
        try:
            check_within_no_operator()
            self.check_unchanged()
            calls = self.point.calls()
            for key, flag in self.flags.items():  # as they were; the calls say the same again
                self._own[key].requires_grad_(flag)
            self._note_draws()
            with torch.inference_mode(mode=False):
                run_all = partial(run_calls, calls, kind=self._kind, units=self._units)
                self._take_over(run(lambda made, given: run_all(given), {}, self.given))
            self._random = random_states(self._kind)
        except BaseException as error:
            self.lose(error)
            raise

    def _take_over(self, values: dict[int, Any]) -> None:
        self._made = values
        for index, tensor in self.alive().items():
            value = values[index]
            self._made[index] = tensor
            written = self._results[index].written
            if written is not None:
                self._versions[written] = version_of(tensor)
            elif not value.requires_grad:
                become(tensor, another_of(value))
            else:
                # Modules may keep what they have returned; a leaf of autograd is there only once.
                is_leaf = value.grad_fn is None
                with torch.enable_grad():
                    now = value if is_leaf else value.view_as(value)
                become(tensor, now)
        for index, value in self._made.items():
            self._memory_of(index, value)

    def kept(self) -> list[int]:
        """Return the places of what the graph has to return, for all that is alive."""
        roots = {self._results[index].root for index in self.alive()}
        return sorted(root for root in roots if isinstance(root, int))

    def fill(self, values: dict[int, Any]) -> None:
        """Give what is alive the values of what was kept."""
        for index, tensor in self.alive().items():
            result = self._results[index]
            if isinstance(result.root, Own):
                tensor.requires_grad_(False)
            elif result.written is not None:
                tensor.copy_(values[result.root])
            else:
                value = values[result.root]
                is_look = result.root != index
                now = result.lying_in(value) if is_look else another_of(value)
                become(tensor, now)

    def lose(self, error: BaseException) -> None:
        """Have uses of what is alive refused, since it is not going to be computed."""
        lose(self.alive().values(), error)

    def alive(self) -> dict[int, Tensor]:
        """Return what somebody still holds of what was made, by its place."""
        return {index: t for index, ref in self._refs.items() if (t := ref()) is not None}

    def is_changed(self) -> bool:
        """Tell whether modules were changed since their call was put off, which runs at last."""
        return self._sum_of_versions() != self._written

    def _sum_of_versions(self) -> int:
        return sum(map(dict_version, self._attributes))

    def check_unchanged(self) -> None:
        if self.is_changed():
            raise refusal(
                "an attribute of a module was written between the model's call and the optimizer's "
                "step (as eval() and train() do), and the call runs at the step",
                f"write it before the model's call, or {LATER}",
            )

    def check_unwritten(self) -> None:
        """Refuse inputs that were written since a call got them: the graph reads them at last."""
        for tensor, version in zip(self.given, self._versions, strict=True):
            if version_of(tensor) != version:
                raise of_written(tensor)

    def check_undrawn(self) -> None:
        """Refuse random numbers of the loop between those of the model: these come last now."""
        self._note_draws()
        if self.point.draws & self._loop_draws:
            point: Point | None = self.point
            while point is not None and point.drawn_at is None:
                point = point.before
            raise refusal(
                "the loop draws random numbers between the model's call and the optimizer's step, "
                "and so does the model; they would come in another order",
                "draw before the model's call or behind optimizer.step() (fetch the next batch "
                "there), or from a torch.Generator of its own",
                HazardKind.GENERATOR,
                None if point is None else point.drawn_at,
            )

    def _note_draws(self) -> list[Tensor]:
        """Note what the loop has drawn itself; return the states of the generators."""
        now = random_states(self._kind)
        self._loop_draws |= moved(self._random, now)
        return now

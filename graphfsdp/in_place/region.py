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
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from graphfsdp._capture.rules.refusals import Refusal, for_this_place
from graphfsdp._capture.trace.source import user_source_line
from graphfsdp.base.hazards import HazardKind
from graphfsdp.errors import CaptureError
from graphfsdp.in_place.calls import (
    CONSTANT,
    LATER,
    PLAIN,
    Call,
    Form,
    Given,
    Made,
    Modes,
    Own,
    Point,
    Result,
    Unknown,
    flat,
    lose,
    name_of,
    refusal,
    run_calls,
    same,
)

_READ = Refusal(
    "{} is called between the model and the optimizer's step; what it returns is not known before "
    "the step",
    LATER,
    HazardKind.HOST_READ,
)
MOST_NEW = 8  # iterations in a row: then the next one is new, too


class Region:
    """What the loop has done since the first call of a model; see Note [Put off]."""

    def __init__(
        self, root: Point, own: frozenset[int], kind: str, attributes: Sequence[dict[str, Any]]
    ) -> None:
        """``attributes`` are those of all modules: what was put off reads them at last."""
        self.point = root
        self.is_known = True
        self.given: list[Tensor] = []
        self.stepped: set[int] = set()
        self._kind = kind
        self._own = own
        self.num_blocks = 0  # outermost autocasts that have ended
        self._made: dict[int, Any] = {}  # what is there already, where the loop runs as written
        self._made_by: dict[int, Any] = {}  # autograd's nodes, while they live
        self._num_made = 0
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._results: dict[int, Result] = {}
        self._roots: dict[int, int] = {}  # by address: what has all of a storage
        self._places: dict[int, int] = {}  # by id of a tensor that was made
        self._given_places: dict[int, int] = {}
        self._versions: list[int] = []
        self.new_at: tuple[Call, Call | None] | None = None  # and what was known there
        self._random = _random_states(kind)  # as they were behind the last call that has run
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
            any(isinstance(t, Tensor) and self._touches(t) for t in leaves)
            or (_is_in_place(function) and id(leaves[0]) in self._given_places)
        ):
            return function(*args, **kwargs)
        forms: list[Form] = []
        places = [self._place(leaf, function, forms) for leaf in leaves]
        call = Call(function, places, spec, Modes.now(self._kind, self.num_blocks), forms)
        if self.is_known:
            for point in self.point.following:
                assert point.call is not None
                if point.call.is_like(call):
                    self.point = point
                    return self._stand_ins(point.call)
            known = self.point.following
            self.new_at = call, known[-1].call if known else None
            self.catch_up(run)
        before = self._note_draws()
        result = run(call.run, self._made, self.given)
        self._random = _random_states(self._kind)
        draws = self.point.draws | _moved(before, self._random)
        self._note(call, result)
        call.source = user_source_line()
        self.point.following.append(Point(call, self.point, draws=draws))
        self.point = self.point.following[-1]
        return result

    def owns(self, tensor: Tensor) -> bool:
        return id(tensor) in self._own

    def _touches(self, tensor: Tensor) -> bool:
        return self.owns(tensor) or self._index_of(tensor) is not None

    def _index_of(self, tensor: Tensor) -> int | None:
        index = self._places.get(id(tensor))
        return index if index is not None and self._refs[index]() is tensor else None

    def _place(self, leaf: Any, function: Callable[..., Any], forms: list[Form]) -> Any:
        if function is torch._amp_foreach_non_finite_check_and_unscale_:
            # It writes a flag that no version tells of, and Python decides by it whether to step.
            raise refusal(
                "torch.amp.GradScaler reads on the host whether gradients are finite, before the "
                "step that would compute them",
                "bfloat16, which needs no scaler; or graphfsdp.capture with "
                "graphfsdp.optim.DeviceGradScaler, which decides on the device",
                HazardKind.HOST_READ,
            )
        if not isinstance(leaf, Tensor):
            if isinstance(leaf, CONSTANT) or callable(leaf):
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
            self._versions.append(_version(leaf))
        return Given(self._given_places[id(leaf)])

    def _stand_ins(self, call: Call) -> Any:
        if call.result_spec is None:
            return self._stand_in(call.results[0])
        return pytree.tree_unflatten([self._stand_in(r) for r in call.results], call.result_spec)

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
            place = result.written
            tensor = result.form.empty() if place is None else self.given[place]
            self._keep(result, tensor)
        return tensor

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
            leaves, call.result_spec = pytree.tree_flatten(result)
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
        if written is not None and index is None and _version(leaf) == self._versions[written]:
            return Given(written)
        if written is not None and _is_alone(leaf):
            self._versions[written] = _version(leaf)
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
        return refusal(found.what, found.remedy, found.kind)

    def _memory_of(self, index: int, leaf: Tensor) -> tuple[int, int]:
        """Return the place of what has all of a tensor's storage, and where in it this lies."""
        if type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return index, 0
        storage = leaf.untyped_storage()
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
        return refusal(
            f"{MOST_NEW + 1} iterations in a row were like none before, the last one from "
            f"{name_of(call.function)}{values[0] if values else ''} on; no graph would be replayed",
            "give numbers that change as 0-D tensors on the model's device",
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
            self.check_unchanged()
            calls = self.point.calls()
            self._note_draws()
            values = run(lambda made, given: run_calls(calls, given, self._kind), {}, self.given)
            self._random = _random_states(self._kind)
            self._take_over(values)
        except BaseException as error:
            self.lose(error)
            raise

    def _take_over(self, values: dict[int, Any]) -> None:
        self._made = values
        memory: set[int] = set()
        for index, tensor in self.alive().items():
            value = values[index]
            self._made[index] = tensor
            written = self._results[index].written
            if written is not None:
                self._versions[written] = _version(tensor)
            elif value.grad_fn is None:
                with torch.no_grad():
                    tensor.requires_grad_(False).set_(value)
                tensor.requires_grad_(value.requires_grad)
            else:
                address = value.untyped_storage().data_ptr()
                if address in memory:
                    raise refusal(
                        "the iteration goes another way than before, behind two views of one "
                        "tensor",
                        "the same operations in each iteration",
                    )
                memory.add(address)
                with torch.enable_grad():
                    tensor.requires_grad_(False).copy_(value)
        for index, value in self._made.items():
            self._memory_of(index, value)

    def kept(self) -> list[int]:
        """Return the places of what the graph has to return, for all that is alive."""
        return sorted({self._results[index].root for index in self.alive()})

    def fill(self, values: dict[int, Any]) -> None:
        """Give what is alive the values of what was kept."""
        for index, tensor in self.alive().items():
            result = self._results[index]
            value = values[result.root]
            if result.written is not None:
                tensor.copy_(value)
            elif result.root == index:
                tensor.requires_grad_(False).set_(value)
            else:
                memory, form = value.untyped_storage(), result.form
                tensor.requires_grad_(False).set_(memory, result.offset, form.shape, form.stride)

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
            if _version(tensor) != version:
                raise refusal(
                    f"a tensor of shape {tuple(tensor.shape)} from outside of the iteration was "
                    "written between the model's call and the optimizer's step",
                    f"make a new tensor there, or {LATER}",
                )

    def check_undrawn(self) -> None:
        """Refuse random numbers of the loop between those of the model: these come last now."""
        self._note_draws()
        if self.point.draws & self._loop_draws:
            raise refusal(
                "the loop draws random numbers between the model's call and the optimizer's step, "
                "and so does the model; they would come in another order",
                "draw before the model's call, or from a generator of its own",
                HazardKind.GENERATOR,
            )

    def _note_draws(self) -> list[Tensor]:
        """Note what the loop has drawn itself; return the states of the generators."""
        now = _random_states(self._kind)
        self._loop_draws |= _moved(self._random, now)
        return now


def _random_states(kind: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if kind == "cpu" else [*states, torch.cuda.get_rng_state()]


def _moved(before: Sequence[Tensor], now: Sequence[Tensor]) -> frozenset[int]:
    pairs = enumerate(zip(before, now, strict=True))
    return frozenset(place for place, (a, b) in pairs if not torch.equal(a, b))


def _is_in_place(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _is_alone(tensor: Tensor) -> bool:
    """Tell whether nobody else has a tensor's memory, who would see that a write is put off."""
    storage = tensor.untyped_storage()
    # One for the tensor, and one for this.
    return not tensor._is_view() and torch._C._storage_Use_Count(storage._cdata) <= 2


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

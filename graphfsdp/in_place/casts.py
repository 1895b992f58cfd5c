"""Casts of weights that torch.autocast makes once in a block, for all who use them.

Note [Casts are inputs]: what comes of all uses of such a cast is added up before it is cast back.
So a part whose weights the loop uses as well, in the same block, may not cast them within its
graph: it takes autocast's own casts, as it takes inputs, and hands their gradients to them.

Note [Order around casts]: autograd goes backward from what was made last to what was made first.
Where a weight is used without its cast as well (a tied embedding), what comes of that is added
behind what comes of the cast, and last bits tell. A part has its casts made before it runs. So what
comes of such a use, which must be the only one and come before the cast, goes to the weight through
a node of its own that is made before the cast; and warm-ups have casts made where they are used.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from graphfsdp.base.op_tensors import OpCall, OperatorMode
from graphfsdp.base.torch_internals import sequence_number, without_modes
from graphfsdp.in_place.part_backward import nodes_behind
from graphfsdp.in_place.part_recording import NotAPartError

# torch has nothing that asks for a cast itself. By dimensions of a weight: what multiplies with it
# and is cast, and the name under which its backward pass has the weight.
_SAVED_BY: Mapping[int, tuple[Callable[..., Tensor], str]] = MappingProxyType(
    {
        1: (torch.matmul, "_saved_vec"),
        2: (torch.matmul, "_saved_mat2"),
        3: (torch.conv1d, "_saved_weight"),
        4: (torch.conv2d, "_saved_weight"),
        5: (torch.conv3d, "_saved_weight"),
    }
)


class Casts:
    """Some weights that are cast, and how their casts in the block that is open are got at.

    Attributes:
        weights: All of them.
        others: Those that are used once without their casts as well.
    """

    def __init__(
        self, weights: Sequence[Tensor], dtype: torch.dtype, others: Sequence[Tensor] = ()
    ) -> None:
        self.weights = weights
        self.others = others
        self._dtype = dtype
        self._takes = [_take(weight, dtype) for weight in weights]

    def __call__(self) -> list[Tensor]:
        """Return the casts, which are made where nobody has yet, and a node for each other use.

        A node is a tensor that hands its gradient on to the weight.
        """
        nodes = [torch.ops.aten.alias.default(weight) for weight in self.others]
        return [*(take() for take in self._takes), *nodes]

    def values(self) -> list[Tensor]:
        """Return the casts alone, and make none for the block if that could change an order."""
        if not self.others:
            return self()
        return [weight.detach().to(self._dtype) for weight in self.weights]

    def of(self, others: Sequence[Tensor]) -> "Casts":
        """Return those of other weights of the same shapes."""
        return Casts(others, self._dtype)


class UnseenCasts(OperatorMode):
    """Hides from what looks on that autocast casts these weights."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled."""
        return True

    def __init__(self, casts: Casts) -> None:
        super().__init__()
        self._left = {id(weight) for weight in casts.weights}

    def on_op(self, call: OpCall) -> Any:
        is_cast = call.op is torch.ops.aten._to_copy.default and id(call.args[0]) in self._left
        if not is_cast:
            return call.run()
        self._left.remove(id(call.args[0]))  # a second one is not autocast's
        with without_modes():
            return call.run()


def casts_behind(results: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Casts:
    """Find the weights whose casts these results have been made of, in the block that is open.

    Raises:
        NotAPartError: no order of the nodes of a part would be that of the module's.
    """
    own = {id(weight): weight for weight in weights if weight.dim() in _SAVED_BY}
    found: dict[int, Tensor] = {}
    casts: dict[Node, int] = {}
    nodes = [*nodes_behind(results)]
    for node in nodes:
        if node.name() != "ToCopyBackward0":
            continue
        ((following, _),) = node.next_functions
        weight = own.get(id(getattr(following, "variable", None)))
        # The module may as well have cast it by itself.
        if weight is not None and Casts([weight], dtype)()[0].grad_fn is node:
            found[id(weight)] = weight
            casts[node] = id(weight)
    first: dict[int, int] = {}  # number of the first use of a cast
    others: dict[int, list[int]] = {}  # numbers of uses without it
    for node in nodes:
        for following, _ in () if node in casts else node.next_functions:
            number, key = sequence_number(node), id(getattr(following, "variable", None))
            if following in casts:
                key = casts[following]
                first[key] = min(first.get(key, number), number)
            elif key in found:
                others.setdefault(key, []).append(number)
    for key, numbers in others.items():
        if len(numbers) > 1 or numbers[0] > first[key]:
            raise NotAPartError("it uses a weight behind its cast, or several times, without it")
    return Casts(list(found.values()), dtype, [found[key] for key in others])


def _take(weight: Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    """Return what gets a cast: a product of nothing with the weight, which has saved it."""
    sizes = weight.shape[:1] if weight.dim() < 3 else weight.shape[1:]
    nothing = torch.empty(0, *sizes, dtype=dtype, device=weight.device, requires_grad=True)
    product, saved = _SAVED_BY[weight.dim()]
    return lambda: getattr(product(nothing, weight).grad_fn, saved)

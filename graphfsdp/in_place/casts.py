"""Casts of weights that torch.autocast makes once in a block, for all who use them.

Note [Casts are inputs]: what comes of all uses of such a cast is added up before it is cast back.
So a part whose weights the loop uses as well, in the same block, may not cast them within its
graph: it takes autocast's own casts, as it takes inputs, and hands their gradients to them.

Note [Order around casts]: autograd goes backward from what was made last to what was made first.
Where a weight is used without its cast as well (a tied embedding), and that before the cast is,
what comes of that use is added behind what comes of the cast, and last bits tell. A part has its
casts made before it runs. So a module with such a use is none, but those in it may be.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from graphfsdp.base.torch_internals import sequence_number
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
    """Some weights that are cast, and how their casts in the block that is open are got at."""

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.weights = weights
        self.dtype = dtype
        self._takes = [_take(weight, dtype) for weight in weights]

    def __call__(self) -> list[Tensor]:
        """Return the casts, which are made where nobody has yet."""
        return [take() for take in self._takes]


def casts_behind(results: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Casts:
    """Find the weights whose casts these results have been made of, in the block that is open.

    NotAPartError: one is used before its cast, too; see Note [Order around casts].
    """
    own = {id(weight): weight for weight in weights if weight.dim() in _SAVED_BY}
    nodes = [*nodes_behind(results)]
    found: dict[Node, Tensor] = {}  # by the node that casts it
    for node in nodes:
        if node.name() == "ToCopyBackward0":
            ((following, _),) = node.next_functions
            weight = own.get(id(getattr(following, "variable", None)))
            # The module may as well have cast it by itself.
            if weight is not None and Casts([weight], dtype)()[0].grad_fn is node:
                found[node] = weight
    first: dict[int, int] = {}  # use of its cast, by weight
    plain: list[tuple[int, int]] = []  # uses of leaves
    for node in nodes:
        number = sequence_number(node)
        for following, _ in node.next_functions:
            if following in found:
                key = id(found[following])
                first[key] = min(number, first.get(key, number))
            elif node not in found:
                plain.append((id(getattr(following, "variable", None)), number))
    if any(number < first.get(key, 0) for key, number in plain):
        raise NotAPartError("it uses a weight before autocast casts it")
    return Casts(list(found.values()), dtype)


def _take(weight: Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    """Return what gets a cast: a product of nothing with the weight, which has saved it."""
    sizes = weight.shape[:1] if weight.dim() < 3 else weight.shape[1:]
    nothing = torch.empty(0, *sizes, dtype=dtype, device=weight.device, requires_grad=True)
    product, saved = _SAVED_BY[weight.dim()]
    return lambda: getattr(product(nothing, weight).grad_fn, saved)

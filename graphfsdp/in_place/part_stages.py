"""The results of a part in stages: what is made of other results comes behind them.

Note [Results of results]: many modules return what they make another result of (logits and their
loss). Whoever asks for the gradient of such a one, has it kept, or changes it by a hook, means all
that comes to it, also what comes through the other result. So the loop sees an autograd node for
each stage, of which a later one has results of earlier ones as inputs. Their gradients go over the
loop's own graph then, as those of weights do. What two stages have in common beside that, autograd
goes through once, with what comes from both, so that no stage can have it for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from graphfsdp.base.torch_internals import sequence_number
from graphfsdp.in_place.part_backward import PartBackward, nodes_behind
from graphfsdp.in_place.part_recording import NotAPartError

Edge = tuple[Node | None, int]  # what a gradient goes to: a node, and which of its outputs it is of
_SHARED = "it makes a result of another one, and both of what it does not return"


@dataclass(frozen=True)
class Region:
    """What lies between the results of one stage, those of earlier ones, and leaves.

    Attributes:
        results: Their places among all.
        nodes: Without what gathers gradients of leaves.
    """

    results: Sequence[int]
    nodes: Sequence[Node]


@dataclass(frozen=True)
class Stage:
    """One autograd node of a part.

    Attributes:
        results: Their places among all.
        fixed: Places of those among them that need no gradient.
        edges: What gradients go to, once for each use: a parameter, or the place of what the part
            is given, and behind that of results.
        backward: What computes them.
        saved_results: Places of results that it reads on the way back, of earlier stages too.
        saved_inputs: Places of what it reads of what the part is given.
        saved_weights: Parameters that it reads.
        saved: Where it reads those results and inputs, in this order.
    """

    results: Sequence[int]
    fixed: Sequence[int]
    edges: Sequence[object]
    backward: PartBackward
    saved_results: Sequence[int]
    saved_inputs: Sequence[int]
    saved_weights: Sequence[Tensor]
    saved: Sequence[Tensor]


def edge_of(result: Tensor) -> Edge:
    return result.grad_fn, result.output_nr


def regions_of(results: Sequence[Tensor]) -> list[Region]:
    """Return the stages in the order of a forward pass; NotAPartError if there are none."""
    cuts = {edge_of(each): place for place, each in enumerate(results) if each.grad_fn is not None}
    behind = [[*nodes_behind([result], cuts)] for result in results]
    levels = [0] * len(results)
    for _, place in sorted((_made_at(each), place) for place, each in enumerate(results)):
        edges = (edge for node in behind[place] for edge in node.next_functions)
        levels[place] = max((levels[cuts[edge]] + 1 for edge in edges if edge in cuts), default=0)
    regions = []
    for level in range(max(levels, default=0) + 1):
        places = [place for place, its in enumerate(levels) if its == level]
        nodes = dict.fromkeys(node for place in places for node in behind[place])
        regions.append(Region(places, [*nodes]))
    if sum(len(each.nodes) for each in regions) > len({n for each in regions for n in each.nodes}):
        raise NotAPartError(_SHARED)
    return regions


def _made_at(result: Tensor) -> int:
    return -1 if result.grad_fn is None else sequence_number(result.grad_fn)

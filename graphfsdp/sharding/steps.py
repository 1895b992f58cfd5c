"""Steps of optimizers that ranks take alike.

Note [Ranks that use other weights]: a weight that a backward pass has not used has no gradient, and
optimizers leave it as it is. If another rank has used it, its rows there would be stepped, and
those here not; and of units that run in another order on another rank, collectives would mix up
the weights. No rank sees that, and a collective in each step would be dear. So who comes first
writes into the store what has which gradients, and the others compare it with theirs: in steps 1,
2, 4, 8 and so on, and in each step once it has changed here. It lies there by the number of
collectives, so that ranks compare the same step, or none, and goes after some more steps: a rank
that is so late compares nothing then.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from graphfsdp.base.rank_agreement import put_first, take_back
from graphfsdp.base.torch_internals import not_traced
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.gradients import Reduced, watch_of

_NUM_KEPT = 64  # of what a rank has written into the store


class _Step(NamedTuple):
    """What a rank steps."""

    rank: int
    without: list[str]  # names of parameters that have no gradient
    order: str  # in which the others were reduced; a digest


class StepsAlike:
    """A hook of all optimizers' steps: ConfigError where ranks would step other parameters."""

    def __init__(self) -> None:
        self._last: MutableMapping[Any, tuple[int, bool, list[int]]] = WeakKeyDictionary()
        self._written: deque[str] = deque()

    @not_traced
    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        without = [index for index, param in enumerate(params) if _has_none(param)]
        count, changes, before = self._last.get(optimizer, (0, False, without))
        count, changes = count + 1, changes or without != before
        self._last[optimizer] = count, changes, without
        if changes or not count & (count - 1):
            self._refuse_other_gradients(params)

    def _refuse_other_gradients(self, params: Sequence[nn.Parameter]) -> None:
        for key, mine, first in _compared(params):
            _refuse_others(mine, first)
            if first == mine:
                self._written.append(key)
        while len(self._written) > _NUM_KEPT:
            take_back(self._written.popleft())


def _has_none(param: nn.Parameter) -> bool:
    return param.grad is None and getattr(param, "decoupled_grad", None) is None


def _compared(params: Sequence[nn.Parameter]) -> Iterator[tuple[str, _Step, _Step]]:
    """Yield for each group of ranks the key in the store, this rank's step, and the first one's."""
    found: dict[Any, list[tuple[Reduced, bool]]] = {}
    for param in params:
        watch = watch_of(param)
        if watch is not None:
            reduced = watch.reduced()
            for group in reduced.groups:
                found.setdefault(group, []).append((reduced, _has_none(param)))
    for group, ways in found.items():
        if group.size() == 1:
            continue
        names = _digest([reduced.name for reduced, _ in ways])
        key = f"gradients/{group.group_name}/{group._get_sequence_number_for_group()}/{names}"
        without = [reduced.name for reduced, has_none in ways if has_none]
        order = sorted((reduced for reduced, has_none in ways if not has_none), key=_when)
        mine = _Step(dist.get_rank(), without, _digest([reduced.name for reduced in order]))
        yield key, mine, _Step(*put_first(key, mine))


def _refuse_others(mine: _Step, first: _Step) -> None:
    if first.without != mine.without:
        name = min({*first.without} ^ {*mine.without})
        lacks, has = (mine, first) if name in mine.without else (first, mine)
        raise ConfigError(
            f"parameter {name!r} has no gradient on rank {lacks.rank}, and one on rank {has.rank}: "
            "a step would change some of its rows and leave the others. Remedy: let all ranks use "
            "the same parameters in an iteration; where a batch does not, add 0.0 * "
            "parameter.sum() to what the module around it returns"
        )
    if first.order != mine.order:
        raise ConfigError(
            f"units have run in another order on rank {mine.rank} than on rank {first.rank}, so "
            "that weights and gradients of one have been taken for those of another. Remedy: call "
            "the same modules in the same order on all ranks; what is left out or shuffled at "
            "random, by draws that are the same on all"
        )


def _when(reduced: Reduced) -> int:
    return reduced.when


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(repr(names).encode()).hexdigest()

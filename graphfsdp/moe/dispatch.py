"""Where each token of a batch goes: to places of fixed number, on this rank or on others, and back.

Note [Static sizes]: each rank sends each other one equally many rows, ``rows_for_rank``, whatever
the router has chosen: first those of its first expert, then of its second one, and so on, then
padding. How many of them count goes along. With a bound on the tokens that one expert takes from
one rank these are at most the bound times the experts of a rank; without one, as many as all tokens
could need. On one rank nothing is padded: every token has K places, whoever takes them.

Shapes: N = tokens of this rank, K = experts of a token, C = width, E = experts, R = ranks that the
experts are spread over, L = E / R, S = rows for a rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import all_to_all_


@dataclass(frozen=True)
class Rows:
    """What the experts of this rank compute on: rows by expert, padding behind the last one.

    ``slots`` says where each token's copy has gone, ``order`` how rows came from the ranks.
    """

    rows: Tensor  # [R S, C]
    ends: Tensor  # [L] int32
    most: int  # rows of an expert
    slots: Tensor  # [N K] int64; R S for what had no room
    order: Tensor | None  # [R S] int64; None on one rank
    group: dist.ProcessGroup | None


def dispatch(
    tokens: Tensor,  # [N, C]
    experts: Tensor,  # [N, K] int64
    counts: Tensor,  # [E] int64, how often each was chosen
    capacity_factor: float | None,  # see ``MoE``
    group: dist.ProcessGroup | None,
) -> tuple[Rows, Tensor]:  # and [E] int64: copies that had no room
    """Send each token's copies to their experts; an expert takes the first ones of a batch.

    Capture: no host sync; two collectives if there is a group, and one in the backward pass.
    """
    num_tokens, topk = experts.shape
    num_ranks = 1 if group is None else group.size()
    num_local = counts.numel() // num_ranks
    room = num_tokens  # for those of one rank at an expert
    if capacity_factor is not None:
        room = min(room, math.ceil(num_tokens * topk / counts.numel() * capacity_factor))
    size = min(num_local * room, num_tokens * min(topk, num_local))  # S
    kept = counts.clamp(max=room)
    by_rank = kept.view(num_ranks, -1)  # [R, L]
    starts_of_ranks = torch.arange(num_ranks, device=tokens.device)[:, None] * size
    starts = (by_rank.cumsum(1) - by_rank + starts_of_ranks).flatten()  # [E]
    by_expert = experts.flatten().argsort(stable=True)  # [N K]
    expert = experts.flatten()[by_expert]
    number = (
        torch.arange(expert.numel(), device=tokens.device) - (counts.cumsum(0) - counts)[expert]
    )
    slot = torch.where(number < kept[expert], starts[expert] + number, num_ranks * size)
    slots = torch.empty_like(slot).index_copy(0, by_expert, slot)
    copies = tokens[:, None].expand(-1, topk, -1).flatten(0, 1)  # [N K, C]
    # The row behind the last one takes what has no room.
    sent = tokens.new_zeros(num_ranks * size + 1, tokens.shape[1]).index_copy(0, slots, copies)[:-1]
    if group is None:
        ends, order, rows = by_rank[0].cumsum(0), None, sent
    else:
        received = torch.empty_like(by_rank)
        all_to_all_(received, by_rank, group)
        each = received.cumsum(1)  # [R, L], where each expert's rows end among a rank's
        row = torch.arange(size, device=tokens.device).expand(num_ranks, -1).contiguous()
        # L for padding, which comes last.
        order = torch.searchsorted(each, row, right=True).flatten().argsort(stable=True)
        ends, rows = received.sum(0).cumsum(0), _exchange(sent, group).index_select(0, order)
    most = num_ranks * min(room, size)
    return Rows(rows, ends.int(), most, slots, order, group), counts - kept


def combine(
    rows: Rows,
    results: Tensor,  # [R S, C] of the experts
    weights: Tensor,  # [N, K]
) -> Tensor:  # [N, C]
    """Bring the results back and add those of each token up; what had no room adds nothing.

    Capture: no host sync; one collective if there is a group, and one in the backward pass.
    """
    if rows.order is not None:
        assert rows.group is not None
        results = torch.empty_like(results).index_copy(0, rows.order, results)
        results = _exchange(results, rows.group)
    padded = torch.cat([results, results.new_zeros(1, results.shape[1])])
    found = padded.index_select(0, rows.slots).view(*weights.shape, padded.shape[1])  # [N, K, C]
    return (found * weights.to(found.dtype)[..., None]).sum(1)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    exchanged: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Parts of equal size go to all ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    all_to_all_(received, parts, group)
    return received

"""A feed-forward layer of experts, of which each token meets a few: router, experts, and both.

Note [Static sizes]: each rank sends each other one equally many rows, ``rows_for_rank``, whatever
the router has chosen: first those of its first expert, then of its second one, and so on, then
padding. How many of them count goes along. With a bound on the tokens that one expert takes from
one rank these are at most the bound times the experts of a rank; without one, as many as all tokens
could need. On one rank nothing is padded: every token has K places, whoever takes them.

Shapes: N = tokens of this rank, K = experts of a token, C = width, E = experts, R = ranks that the
experts are spread over, L = E / R, S = rows for a rank.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from graphfsdp.base.collectives import all_reduce_, all_to_all_
from graphfsdp.base.protocols import IterationPart
from graphfsdp.base.torch_internals import is_in_backward
from graphfsdp.config import at_least
from graphfsdp.errors import ConfigError
from graphfsdp.moe.grouped import grouped_mm

ScoreFunction = Literal["softmax", "sigmoid"]


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


class Router(nn.Module):
    """Chooses the ``topk`` experts with the highest scores for each token, in float32.

    Two ways of balancing, alone or together. The auxiliary loss is of each sequence, so that its
    mean does not depend on how sequences are cut over ranks and microbatches. The bias moves the
    choice alone, never the weights: once an iteration it rises by ``bias_update_rate`` for experts
    that had fewer tokens than the mean of all ranks, and falls for those that had more.

    Sources: DeepSeek-AI 2024 (arXiv:2412.19437), equations 12 to 20; Wang et al. 2024
    (arXiv:2408.15664) for the bias; Fedus et al. 2021 (arXiv:2101.03961) for the loss.

    Attributes:
        expert_bias: [E] float32.
        tokens_per_expert: [E] int64, tokens of this rank that have chosen each expert in training
            so far; not in checkpoints.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor
    _counted: Tensor  # what the bias has seen of them

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        topk: int = 2,
        score_function: ScoreFunction = "softmax",
        aux_loss_coeff: float = 0.0,
        bias_update_rate: float = 0.0,
        balance_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Draw the weights as ``nn.Linear`` does; see ``MoE`` for the arguments."""
        super().__init__()
        at_least("num_experts", num_experts, 1)
        at_least("topk", topk, 1)
        if topk > num_experts:
            raise ConfigError(f"topk must be at most num_experts {num_experts}, got {topk}")
        if score_function not in get_args(ScoreFunction):
            known = " or ".join(repr(name) for name in get_args(ScoreFunction))
            raise ConfigError(f"score_function must be {known}, got {score_function!r}")
        for name, value in (
            ("aux_loss_coeff", aux_loss_coeff),
            ("bias_update_rate", bias_update_rate),
        ):
            if not value >= 0:
                raise ConfigError(f"{name} must be at least 0, got {value!r}")
        self.topk = topk
        self.score_function = score_function
        self.aux_loss_coeff = aux_loss_coeff
        self.bias_update_rate = bias_update_rate
        self._group = balance_group
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        for name in ("tokens_per_expert", "_counted"):
            zeros = torch.zeros(num_experts, dtype=torch.int64)
            self.register_buffer(name, zeros, persistent=False)

    def reset_parameters(self) -> None:
        """Set the buffers to zero, where they are; the gate is a module of its own."""
        for buffer in (self.expert_bias, self.tokens_per_expert, self._counted):
            buffer.zero_()

    def forward(
        self,
        x: Tensor,  # [B, T, C]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights [B T, K], experts [B T, K] int64, counts [E] int64 and auxiliary loss [].

        A token's weights are its scores of the chosen experts, with sum 1 if these are several.

        Capture: no host sync; counts are added on the device, in training alone.
        """
        num_sequences, num_experts = x.shape[0], self.expert_bias.numel()
        wide = torch.promote_types(x.dtype, torch.float32)
        with _in_full(x.device):
            logits = F.linear(x.to(wide), self.gate.weight.to(wide))  # [B, T, E]
        is_softmax = self.score_function == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        experts = (scores.detach() + self.expert_bias).topk(self.topk, dim=-1).indices  # [B, T, K]
        weights = scores.gather(-1, experts)
        if self.topk > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = experts.view(num_sequences, -1)
        counts = torch.zeros(num_sequences, num_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(1, chosen, torch.ones_like(chosen))
        shares = scores if is_softmax else scores / scores.sum(-1, keepdim=True)
        busy = counts * (num_experts / max(chosen.shape[1], 1))  # 1 where all are equally busy
        aux_loss = self.aux_loss_coeff * (busy * shares.mean(1)).sum(-1).mean()
        totals = counts.sum(0)
        if _counts_now(self):
            self.tokens_per_expert.add_(totals)
        return weights.flatten(0, 1), experts.flatten(0, 1), totals, aux_loss

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias by what was chosen since the last call; a collective, if it moves.

        Capture: no host sync. ``graphfsdp.capture`` calls it once an iteration.
        """
        if not self.bias_update_rate:
            return
        load = self.tokens_per_expert - self._counted
        self._counted.copy_(self.tokens_per_expert)
        if dist.is_initialized():
            group = self._group or dist.group.WORLD
            assert group is not None
            all_reduce_(load, group, reduction="sum")
        # In whole numbers: a mean of large counts would be rounded.
        missing = load.sum() - load * load.numel()
        self.expert_bias.add_(missing.sign(), alpha=self.bias_update_rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.expert_bias.dtype != torch.float32:  # else small steps would be rounded away
            self.expert_bias = self.expert_bias.float()
        return self


def _counts_now(module: nn.Module) -> bool:
    """Tell whether a forward pass counts: in training, once.

    Within a backward pass torch's checkpoints run one again.
    """
    return module.training and not is_in_backward()


def _in_full(device: torch.device) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class Experts(nn.Module):
    """Feed-forward layers with GELU, or with SwiGLU; ``up`` and ``gate`` [L, C, F], ``down``.

    On several ranks it is the unit that ``fully_shard(..., expert_axis=...)`` takes: each rank
    holds other experts, and the checkpoints hold all.
    """

    gate: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        first: int = 0,
        num_local: int | None = None,
        swiglu: bool = True,
        init_std: float | None = None,
        down_init_std: float | None = None,
    ) -> None:
        """Draw the weights of all experts, one at a time, and keep those of this rank.

        Args:
            hidden_size: C.
            ffn_hidden_size: F.
            num_experts: On all ranks.
            first: Number of this rank's first one.
            num_local: How many this rank holds, L; all if not given.
            swiglu: ``silu(x gate) * (x up)``, not ``gelu(x up)``.
            init_std: Of the initial weights; if not given, 1 / sqrt(3 x the width that is summed
                over), that of ``nn.Linear``.
            down_init_std: Likewise of ``down``; ``init_std`` if not given.
        """
        super().__init__()
        self.num_experts, self.first = num_experts, first
        self.init_std, self.down_init_std = init_std, down_init_std
        num_local = num_experts if num_local is None else num_local
        for name, value in (("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)):
            at_least(name, value, 1)
        if not 0 <= first <= num_experts - num_local or num_local < 1:
            raise ConfigError(
                f"experts {first} to {first + num_local - 1} are not all of 0 to {num_experts - 1}"
            )
        wide = (num_local, hidden_size, ffn_hidden_size)
        self.gate = nn.Parameter(torch.empty(wide)) if swiglu else None
        self.up = nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(num_local, ffn_hidden_size, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights; the same ones however many ranks share the experts."""
        down_std = self.init_std if self.down_init_std is None else self.down_init_std
        stds = (self.init_std, self.init_std, down_std)
        for weight, std in zip((self.gate, self.up, self.down), stds, strict=True):
            if weight is None:
                continue
            std = 1 / math.sqrt(3 * weight.shape[1]) if std is None else std
            for expert in range(self.num_experts):
                drawn = torch.empty_like(weight[0]).normal_(std=std)
                if self.first <= expert < self.first + weight.shape[0]:
                    weight[expert - self.first].copy_(drawn)

    def forward(
        self,
        rows: Tensor,  # [M, C] by expert, padding last
        ends: Tensor,  # [L] int32, the row behind the last one of each expert
        most: int,
    ) -> Tensor:  # [M, C]; padding has no defined values
        """Let each expert compute on its rows, of which it has at most ``most``.

        Capture: no host sync.
        """
        device = rows.device.type
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else self.up.dtype
        rows = rows.to(dtype)
        inner = grouped_mm(rows, self.up.to(dtype), ends, most)
        if self.gate is None:
            inner = F.gelu(inner)
        else:
            inner = F.silu(grouped_mm(rows, self.gate.to(dtype), ends, most)) * inner
        return grouped_mm(inner, self.down.to(dtype), ends, most)


class MoE(nn.Module, IterationPart):
    """Sends each token to ``topk`` experts and adds up what they make of it.

    No shape depends on the router's choice, and no token is dropped unless ``capacity_factor``
    says how many an expert takes of each rank's tokens: then a batch's later ones find no room.
    Each is counted, on the device. Evaluation (``eval()``) has room for all.

    Attributes:
        router: The ``Router``, with its bias and its counts.
        experts: The ``Experts`` of this rank.
        overflow_per_expert: [E] int64, tokens of this rank that had no room at each expert in
            training so far; not in checkpoints. ``overflowed_tokens(model)`` adds up.
    """

    overflow_per_expert: Tensor

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        topk: int = 2,
        capacity_factor: float | None = None,
        swiglu: bool = True,
        score_function: ScoreFunction = "softmax",
        aux_loss_coeff: float = 0.0,
        bias_update_rate: float = 0.0,
        expert_group: dist.ProcessGroup | None = None,
        balance_group: dist.ProcessGroup | None = None,
        init_std: float | None = None,
        down_init_std: float | None = None,
    ) -> None:
        """Make router and experts.

        Args:
            hidden_size: Width of the tokens.
            ffn_hidden_size: Width inside an expert.
            num_experts: On all ranks together.
            topk: Experts that each token meets.
            capacity_factor: Tokens of one rank that one expert takes, over its fair share of them,
                tokens x topk / num_experts. None is room for all: on one rank that costs nothing,
                on R ranks rows for R x tokens x topk. An expert adds nothing to a token for which
                it has no room.
            swiglu: Gated experts, not GELU ones.
            score_function: "softmax" over the experts, or "sigmoid" of each.
            aux_loss_coeff: Weight of the auxiliary loss that balances; 0 for none.
            bias_update_rate: What the bias that balances moves in an iteration; 0 for none.
            expert_group: Ranks that share the experts out; None if each holds all.
            balance_group: Ranks whose tokens the bias counts; None is all.
            init_std: See ``Experts``.
            down_init_std: See ``Experts``.

        Raises:
            ConfigError: an argument is out of its range, or the ranks do not divide the experts.
        """
        super().__init__()
        self.router = Router(
            hidden_size,
            num_experts,
            topk=topk,
            score_function=score_function,
            aux_loss_coeff=aux_loss_coeff,
            bias_update_rate=bias_update_rate,
            balance_group=balance_group,
        )
        if capacity_factor is not None and not capacity_factor > 0:
            raise ConfigError(f"capacity_factor must be greater than 0, got {capacity_factor!r}")
        num_ranks = 1 if expert_group is None else expert_group.size()
        if num_experts % num_ranks:
            raise ConfigError(
                f"the {num_ranks} ranks of expert_group do not divide the {num_experts} "
                "experts, of which each rank holds equally many"
            )
        num_local = num_experts // num_ranks
        self.experts = Experts(
            hidden_size,
            ffn_hidden_size,
            num_experts,
            first=0 if expert_group is None else expert_group.rank() * num_local,
            num_local=num_local,
            swiglu=swiglu,
            init_std=init_std,
            down_init_std=down_init_std,
        )
        self.capacity_factor = capacity_factor
        self._group = expert_group if num_ranks > 1 else None
        zeros = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("overflow_per_expert", zeros, persistent=False)

    def reset_parameters(self) -> None:
        """Set the counts to zero, where they are; router and experts are modules of their own."""
        self.overflow_per_expert.zero_()

    def forward(
        self,
        x: Tensor,  # [B, T, C], or [T, C], one sequence
    ) -> tuple[Tensor, Tensor]:  # like x; [] float32, the auxiliary loss times its coefficient
        """Capture: no host sync, all shapes follow from the input's; see ``dispatch``."""
        if x.dim() not in (2, 3):
            raise ConfigError(f"MoE takes [B, T, C] or [T, C], got shape {tuple(x.shape)}")
        sequences = x if x.dim() == 3 else x[None]
        weights, experts, counts, aux_loss = self.router(sequences)
        tokens = x.reshape(-1, x.shape[-1])
        factor = self.capacity_factor if self.training else None
        rows, overflow = dispatch(tokens, experts, counts, factor, self._group)
        results = self.experts(rows.rows, rows.ends, rows.most)
        mixed = combine(rows, results, weights).to(x.dtype)
        if factor is not None and _counts_now(self):
            self.overflow_per_expert.add_(overflow)
        return mixed.view_as(x), aux_loss

    def end_iteration(self) -> None:
        """Move the router's bias, if it moves; ``graphfsdp.capture`` calls it."""
        self.router.update_bias()


def overflowed_tokens(model: nn.Module) -> Tensor:
    """Return [] int64: tokens of this rank that had no room at an expert, in all layers so far.

    A token that had none at two experts counts twice.

    Capture: no host sync; it may be read in the loss function or after a step.

    Raises:
        ConfigError: the model has no ``MoE``.
    """
    found = [each.overflow_per_expert.sum() for each in model.modules() if isinstance(each, MoE)]
    if not found:
        raise ConfigError("the model has no graphfsdp.moe.MoE whose tokens could overflow")
    return torch.stack(found).sum()

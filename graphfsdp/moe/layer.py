"""A feed-forward layer of experts, of which each token meets a few."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.base.capturable import IterationPart
from graphfsdp.errors import ConfigError
from graphfsdp.moe.dispatch import Capacity, combine, dispatch
from graphfsdp.moe.experts import Experts
from graphfsdp.moe.router import Router, ScoreFunction, counts_now


def _share_of(group: dist.ProcessGroup | None, num_experts: int) -> tuple[int, int]:
    """Return how many ranks share the experts out, and the first expert of this one."""
    num_ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if num_experts % num_ranks:
        raise ConfigError(
            f"the {num_ranks} ranks of expert_group do not divide the {num_experts} experts, of "
            "which each rank holds equally many"
        )
    return num_ranks, rank * (num_experts // num_ranks)


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
        self._num_ranks, first = _share_of(expert_group, num_experts)
        self.experts = Experts(
            hidden_size,
            ffn_hidden_size,
            num_experts,
            first=first,
            num_local=num_experts // self._num_ranks,
            swiglu=swiglu,
            init_std=init_std,
            down_init_std=down_init_std,
        )
        self.capacity_factor = capacity_factor
        self._group = expert_group if self._num_ranks > 1 else None
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
        capacity = Capacity(
            num_tokens=tokens.shape[0],
            topk=self.router.topk,
            num_experts=counts.numel(),
            num_ranks=self._num_ranks,
            factor=self.capacity_factor if self.training else None,
        )
        rows, overflow = dispatch(tokens, experts, counts, capacity, self._group)
        results = self.experts(rows.rows, rows.ends, rows.most)
        mixed = combine(rows, results, weights).to(x.dtype)
        if capacity.factor is not None and counts_now(self):
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

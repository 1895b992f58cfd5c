"""Operators that the CPU has no kernel for, or another one: computed of other operators.

Shapes: N = batch, H = heads, L and S = lengths of queries and of keys, E = width of a head.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from cuda_stand_in.draws import Draw


def native_dropout(x: Tensor, p: float, train: bool | None, *, draw: Draw) -> tuple[Tensor, Tensor]:
    """As CUDA's: zeros where nothing is kept, and the mask."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty(x.shape).bernoulli_(1 - p, generator=draw.generator()).to(torch.bool)
    return x * mask * (0 if p == 1 else 1 / (1 - p)), mask


def _wide(tensor: Tensor) -> Tensor:
    """As CUDA's kernels compute: narrow floats in float32, float64 as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Attention:
    """Attention, with what its gradient needs."""

    def __init__(
        self,
        query: Tensor,  # [N, H, L, E]
        key: Tensor,  # [N, H, S, E]
        value: Tensor,  # [N, H, S, E]
        bias: Tensor | None,  # [N, H, L, S]
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        draw: Draw | None,
    ) -> None:
        self.query, self.key, self.value = _wide(query), _wide(key), _wide(value)
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = self.query @ self.key.mT * self.scale
        if bias is not None:
            scores = scores + _wide(bias)
        if is_causal:
            length, size = scores.shape[-2:]
            scores = scores.masked_fill(
                ~torch.ones(length, size, dtype=torch.bool).tril(), -math.inf
            )
        self.log_sums = scores.logsumexp(-1)  # [N, H, L]
        self.weights = (scores - self.log_sums[..., None]).exp()
        self.kept = torch.ones_like(self.weights)
        if dropout_p > 0 and draw is not None:
            self.kept.bernoulli_(1 - dropout_p, generator=draw.generator()).div_(1 - dropout_p)

    def output(self) -> Tensor:
        return (self.weights * self.kept) @ self.value

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of query, key, value and bias."""
        grad = _wide(grad)
        grad_value = (self.weights * self.kept).mT @ grad
        grad_weights = grad @ self.value.mT * self.kept
        inner = (grad_weights * self.weights).sum(-1, keepdim=True)
        grad_scores = self.weights * (grad_weights - inner)
        scaled = grad_scores * self.scale
        return scaled @ self.key, scaled.mT @ self.query, grad_value, grad_scores


def _padded(log_sums: Tensor, like: int) -> Tensor:
    """The kernel's rows of sums end on a border of memory."""
    return torch.nn.functional.pad(log_sums, (0, like - log_sums.shape[-1]), value=math.inf)


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    draw: Draw,
) -> list[Tensor]:
    found = _Attention(query, key, value, bias, dropout_p, is_causal, scale, draw)
    length = query.shape[-2]
    sums = _padded(found.log_sums, -(-length // 32) * 32)
    return [
        found.output(),
        sums if compute_log_sumexp else sums[..., :0],
        torch.tensor(draw.seed),
        torch.tensor(draw.offset),
    ]


def efficient_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *rest: Any,  # output, sums, seed, offset, dropout, which gradients are wanted, is causal
    scale: float | None = None,
    draw: Draw | None = None,  # torch says that it draws; it draws again what the forward drew
) -> list[Tensor]:
    _, _, seed, offset, dropout_p, wanted, is_causal = (*rest, False)[:7]
    drawn = Draw(int(seed), int(offset))
    found = _Attention(query, key, value, bias, dropout_p, is_causal, scale, drawn)
    gradients = found.gradients(grad)
    return list(gradients) if bias is not None and wanted[3] else list(gradients[:3])


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    draw: Draw,
) -> list[Any]:
    found = _Attention(query, key, value, None, dropout_p, is_causal, scale, draw)
    state = torch.tensor([draw.seed, draw.offset]).view(torch.uint64)
    nothing = torch.zeros((), dtype=torch.uint64)
    return [found.output(), found.log_sums, state, nothing, found.output()]


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,  # output, sums, four of lengths, dropout, is causal, state, nothing
    scale: float | None = None,
    draw: Draw | None = None,  # as above
) -> list[Tensor]:
    *_, dropout_p, is_causal, state, _ = rest
    drawn = Draw(*state.tolist())
    found = _Attention(query, key, value, None, dropout_p, is_causal, scale, drawn)
    return list(found.gradients(grad)[:3])


def lstm_cell(
    input_gates: Tensor,  # [N, 4 H]
    hidden_gates: Tensor,  # [N, 4 H]
    cell: Tensor,  # [N, H]
    input_bias: Tensor | None = None,  # [4 H]
    hidden_bias: Tensor | None = None,
) -> list[Tensor]:
    total = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        total = total + input_bias + hidden_bias
    gates = total.chunk(4, 1)
    take, forget, give = (gates[index].sigmoid() for index in (0, 1, 3))
    new = gates[2].tanh()
    next_cell = forget * cell + take * new
    return [give * next_cell.tanh(), next_cell, total]


def lstm_cell_backward(
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    cell: Tensor,
    next_cell: Tensor,
    workspace: Tensor,  # [N, 4 H] the gates before their functions
    has_bias: bool,
) -> list[Tensor]:
    grad_gates, _, grad_of_cell, *_ = torch.ops.aten._thnn_differentiable_lstm_cell_backward(
        *(grad_hidden, grad_cell, workspace, torch.zeros_like(workspace), None, None),
        *(cell, next_cell),
    )
    return [grad_gates, grad_of_cell, *([grad_gates.sum(0)] if has_bias else [])]


def gru_cell(
    input_gates: Tensor,  # [N, 3 H]
    hidden_gates: Tensor,  # [N, 3 H]
    hidden: Tensor,  # [N, H]
    input_bias: Tensor | None = None,  # [3 H]
    hidden_bias: Tensor | None = None,
) -> list[Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    from_input, from_hidden = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    reset, keep = ((from_input[i] + from_hidden[i]).sigmoid() for i in (0, 1))
    new = (from_input[2] + reset * from_hidden[2]).tanh()
    workspace = torch.cat([reset, keep, new, hidden, from_hidden[2]], 1)
    return [new + keep * (hidden - new), workspace]


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> list[Tensor]:
    reset, keep, new, hidden, from_hidden = workspace.chunk(5, 1)
    grad_keep = grad * (hidden - new) * (1 - keep) * keep
    grad_new = grad * (1 - keep) * (1 - new * new)
    grad_reset = grad_new * from_hidden * (1 - reset) * reset
    grad_input = torch.cat([grad_reset, grad_keep, grad_new], 1)
    grad_gates = torch.cat([grad_reset, grad_keep, grad_new * reset], 1)
    biases = [grad_input.sum(0), grad_gates.sum(0)] if has_bias else []
    return [grad_input, grad_gates, grad * keep, *biases]


def written_out(op: Any) -> Callable[..., list[Tensor]]:
    """As torch composes it of other operators: a CPU takes no sums that are wider than the rest."""

    def compute(*args: Any) -> list[Tensor]:
        return [tensor for tensor in decomposition_table[op](*args) if tensor is not None]

    return compute


def conv_depthwise(
    x: Tensor,  # [N, C, ...]
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> list[Tensor]:
    groups = x.shape[1]
    made: Tensor = torch.convolution(
        x, weight, bias, stride, padding, dilation, False, [0] * len(kernel_size), groups
    )
    return [made]


# By the name of the schema; those that draw are told where.
COMPUTE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten::_conv_depthwise2d": conv_depthwise,
        **{
            op.name(): written_out(op)
            for op in (
                torch.ops.aten.native_layer_norm_backward.default,
                torch.ops.aten._fused_rms_norm_backward.default,
            )
        },
        "aten::native_dropout": native_dropout,
        "aten::_scaled_dot_product_efficient_attention": efficient_attention,
        "aten::_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
        "aten::_scaled_dot_product_flash_attention": flash_attention,
        "aten::_scaled_dot_product_flash_attention_backward": flash_attention_backward,
        "aten::_thnn_fused_lstm_cell": lstm_cell,
        "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
        "aten::_thnn_fused_gru_cell": gru_cell,
        "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
    }
)

"""A linear layer that multiplies in 8 bits, forward and backward, and how to get it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from graphfsdp.config import Fp8Format, GatherFormat
from graphfsdp.eight_bit.formats import BLOCK
from graphfsdp.eight_bit.product import Operand, grad_of_left, grad_of_right, product
from graphfsdp.eight_bit.weight import EightBitWeight
from graphfsdp.errors import ConfigError


class EightBitLinear(nn.Linear):
    """``nn.Linear`` whose products are of 8-bit numbers; made by ``convert_linears``.

    Inputs, gradients and, where it was not gathered in this format already, the weight are
    quantised when they are used; the bias is added in the dtype of the input.
    """

    def __init__(
        self, linear: nn.Linear, number_format: GatherFormat, fp8_format: Fp8Format
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.number_format, self.fp8_format = number_format, fp8_format
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Capture: no host sync."""
        kind = input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))  # noqa: A001
        if not input.numel():  # nothing has a largest magnitude
            return F.linear(input, self.weight.to(input.dtype), self.bias)
        apply: Callable[..., Tensor] = _Linear.apply
        flat = input.reshape(-1, self.in_features)
        output = apply(flat, self.weight, self.number_format, self.fp8_format.of_gradients)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        formats = f"{self.number_format.value}, {self.fp8_format.value}"
        return f"{super().extra_repr()}, {formats}"


def convert_linears(
    model: nn.Module,
    number_format: GatherFormat | str = "float8",
    *,
    fp8_format: Fp8Format | str = "e4m3",
    where: Callable[[str, nn.Linear], bool] = lambda name, linear: True,
) -> nn.Module:
    """Let linear layers multiply in 8 bits, before ``fully_shard`` and the optimizer.

    Parameters stay the same objects under the same names, so that checkpoints fit both ways.

    Args:
        model: Each ``nn.Linear`` inside it, subclasses not, is replaced by an ``EightBitLinear``.
        number_format: "float8", "float8_rowwise" or "mxfp8", as ``gather_format``; with the same
            one layers use gathered numbers as they are.
        fp8_format: "e4m3", or "hybrid", which has gradients in e5m2.
        where: Says of a layer, by full name, whether it is replaced.

    Returns:
        The model, or another layer, if it is a linear layer itself.

    Raises:
        ConfigError: a layer has been sharded already, has hooks, or does not divide into blocks.
    """
    chosen, numbers = GatherFormat.parse(number_format), Fp8Format.parse(fp8_format)
    made: dict[int, nn.Module] = {}
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and where(name, linear):
            _check(name, linear, chosen)
            made[id(linear)] = EightBitLinear(linear, chosen, numbers)
    for owner in list(model.modules()):
        for name, child in owner._modules.items():
            if id(child) in made:
                owner._modules[name] = made[id(child)]
    return made.get(id(model), model)


def _check(name: str, linear: nn.Linear, number_format: GatherFormat) -> None:
    if number_format is GatherFormat.MXFP8 and linear.in_features % BLOCK:
        raise ConfigError(
            f"mxfp8 has a scale for each {BLOCK} values, and {name or '(root)'!r} has in_features="
            f"{linear.in_features}. Remedy: in_features that {BLOCK} divides, float8, or where="
        )
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks:
        raise ConfigError(
            f"{name or '(root)'!r} has hooks, or is sharded already, and would be replaced by "
            "another layer, which has none. Remedy: convert_linears first"
        )


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [M, K]
        weight: Tensor,  # [N, K]
        number_format: GatherFormat,
        of_gradients: torch.dtype,
    ) -> Tensor:
        """Keep x in 8 bits, and the weight itself: a sharded one is gathered again."""
        left = Operand.of(x, number_format)
        ctx.save_for_backward(left.numbers, left.scale, weight)
        ctx.number_format, ctx.of_gradients, ctx.dtype = number_format, of_gradients, x.dtype
        return product(left, _numbers_of(weight, number_format), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        numbers, scale, weight = ctx.saved_tensors
        number, of_x, of_weight = ctx.of_gradients, None, None
        if ctx.needs_input_grad[0]:
            right = _numbers_of(weight, ctx.number_format)
            of_x = grad_of_left(grad, right, number, ctx.dtype)
        if ctx.needs_input_grad[1]:
            x = Operand(numbers, scale, ctx.number_format)
            of_weight = grad_of_right(grad, x, number, weight.dtype)
        return of_x, of_weight, None, None


def _numbers_of(weight: Tensor, number_format: GatherFormat) -> Operand:
    if isinstance(weight, EightBitWeight) and weight.format is number_format:
        return Operand(weight.numbers, weight.scale, number_format)
    return Operand.of(weight, number_format)

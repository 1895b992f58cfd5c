"""A linear layer that multiplies in 8 bits, forward and backward, and how to get it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from graphfsdp.base.torch_internals import buffers_of, children_of
from graphfsdp.config import Fp8Format, GatherFormat
from graphfsdp.eight_bit.delayed import (
    GRADIENT,
    HISTORY,
    INPUT,
    SCALE,
    WEIGHT,
    DelayedScaling,
    delayed_scale,
    update_when_backward_ends,
)
from graphfsdp.eight_bit.formats import BLOCK, NUMBER, to_float8
from graphfsdp.eight_bit.product import Operand, grad_of_left, grad_of_right, product
from graphfsdp.eight_bit.weight import EightBitWeight
from graphfsdp.errors import ConfigError


class EightBitLinear(nn.Linear):
    """``nn.Linear`` whose products are of 8-bit numbers; made by ``convert_linears``.

    Inputs, gradients and, where it was not gathered in this format already, the weight are
    quantised when they are used; the bias is added in the dtype of the input.
    """

    fp8_scale: Tensor  # see delayed.py
    fp8_amax_history: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        number_format: GatherFormat,
        fp8_format: Fp8Format,
        recipe: DelayedScaling | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.number_format, self.fp8_format, self.recipe = number_format, fp8_format, recipe
        if recipe is not None:
            new = partial(torch.zeros, device=linear.weight.device, dtype=torch.float32)
            self.register_buffer(SCALE, new(3) + 1)
            self.register_buffer(HISTORY, new(recipe.amax_history_len, 3))
        self.train(linear.training)

    @property
    def of_gradients(self) -> torch.dtype:
        return self.fp8_format.of_gradients

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.recipe is not None:
            self.fp8_scale.fill_(1.0)
            self.fp8_amax_history.zero_()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Capture: no host sync."""
        kind = input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))  # noqa: A001
        if not input.numel():  # nothing has a largest magnitude
            return F.linear(input, self.weight.to(input.dtype), self.bias)
        apply: Callable[..., Tensor] = _Linear.apply
        flat = input.reshape(-1, self.in_features)
        output = apply(flat, self.weight, self, torch.is_grad_enabled())
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def quantised(self, values: Tensor, which: int, *, record: bool) -> Operand:
        """Return input, weight or gradient [R, L] as numbers along L."""
        number = self.of_gradients if which == GRADIENT else NUMBER
        if self.recipe is None:
            return Operand.of(values, self.number_format, number)
        scale = delayed_scale(self, values, which, record=record)  # type: ignore[arg-type]
        return Operand(to_float8(values, scale, number), scale, self.number_format)

    def numbers_of(self, weight: Tensor, *, record: bool) -> Operand:
        if isinstance(weight, EightBitWeight) and weight.format is self.number_format:
            return Operand(weight.numbers, weight.scale, self.number_format)
        return self.quantised(weight, WEIGHT, record=record)

    def extra_repr(self) -> str:
        formats = f"{self.number_format.value}, {self.fp8_format.value}"
        delayed = "" if self.recipe is None else f", {self.recipe}"
        return f"{super().extra_repr()}, {formats}{delayed}"


def convert_linears(
    model: nn.Module,
    number_format: GatherFormat | str = "float8",
    *,
    fp8_format: Fp8Format | str = "e4m3",
    recipe: DelayedScaling | None = None,
    where: Callable[[str, nn.Linear], bool] = lambda name, linear: True,
) -> nn.Module:
    """Let linear layers multiply in 8 bits, before ``fully_shard`` and the optimizer.

    Parameters stay the same objects under the same names, so that checkpoints fit both ways.

    Args:
        model: Each ``nn.Linear`` inside it, subclasses not, is replaced by an ``EightBitLinear``.
        number_format: "float8", "float8_rowwise" or "mxfp8", as ``gather_format``; with the same
            one layers use gathered numbers as they are.
        fp8_format: "e4m3", or "hybrid", which has gradients in e5m2.
        recipe: Scales of "float8" come from earlier backward passes of ``model``, which must then
            be the module that is called; they are saved and loaded with it, as buffers.
        where: Says of a layer, by full name, whether it is replaced.

    Returns:
        The model, or another layer, if it is a linear layer itself.

    Raises:
        ConfigError: a layer has been sharded already, has hooks, or does not divide into blocks;
            or a recipe for another format, for a part of the model, or for the second time.
    """
    chosen, numbers = GatherFormat.parse(number_format), Fp8Format.parse(fp8_format)
    if recipe is not None:
        _check_recipe(model, chosen)
    made: dict[int, nn.Module] = {}
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and where(name, linear):
            _check(name, linear, chosen)
            made[id(linear)] = EightBitLinear(linear, chosen, numbers, recipe)
    for owner in list(model.modules()):
        for name, child in children_of(owner).items():
            if id(child) in made:
                children_of(owner)[name] = made[id(child)]
    model = made.get(id(model), model)
    if recipe is not None:
        model.register_forward_hook(update_when_backward_ends)
    return model


def _check_recipe(model: nn.Module, number_format: GatherFormat) -> None:
    remedies = {
        "needs number_format='float8'": number_format is not GatherFormat.FLOAT8,
        f"needs the module that is called, and a {type(model).__name__} is not": type(model).forward
        is nn.Module.forward,
        "can be given once, and the model has layers with one": any(
            HISTORY in buffers_of(each) for each in model.modules()
        ),
    }
    for remedy, holds in remedies.items():
        if holds:
            raise ConfigError(f"a recipe of delayed scaling {remedy}")


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
        layer: EightBitLinear,
        record: bool,
    ) -> Tensor:
        """Keep x in 8 bits, and the weight itself: a sharded one is gathered again."""
        left = layer.quantised(x, INPUT, record=record)
        ctx.save_for_backward(left.numbers, left.scale, weight)
        ctx.layer, ctx.dtype = layer, x.dtype
        return product(left, layer.numbers_of(weight, record=record), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        numbers, scale, weight = ctx.saved_tensors
        layer: EightBitLinear = ctx.layer
        number, of_x, of_weight = layer.of_gradients, None, None
        # One scale serves both products.
        by_one_scale = layer.number_format is GatherFormat.FLOAT8
        g = layer.quantised(grad, GRADIENT, record=True) if by_one_scale else grad
        if ctx.needs_input_grad[0]:
            w = layer.numbers_of(weight, record=False)
            of_x = grad_of_left(g, w, number, ctx.dtype)
        if ctx.needs_input_grad[1]:
            x = Operand(numbers, scale, layer.number_format)
            of_weight = grad_of_right(g, x, number, weight.dtype)
        return of_x, of_weight, None, None

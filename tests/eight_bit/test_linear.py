"""Linear layers that multiply in 8 bits: the numbers by definition, and captured as eager."""

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp import ConfigError
from graphfsdp.config import GatherFormat
from graphfsdp.eight_bit import EightBitLinear, convert_linears
from graphfsdp.eight_bit.formats import from_float8, from_mxfp8
from graphfsdp.eight_bit.product import Operand
from graphfsdp.optim import FusedAdam

FORMATS = ("float8", "float8_rowwise", "mxfp8")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def stands_for(values: Tensor, number_format: str, number: torch.dtype = E4M3) -> Tensor:
    """What [R, L] is as 8-bit numbers that are summed over L, in float32."""
    made = Operand.of(values, GatherFormat(number_format), number)
    if number_format != "mxfp8":
        return from_float8(made.numbers, made.scale, torch.float32)
    return from_mxfp8(made.numbers, made.scale, torch.float32)[:, : values.shape[1]]


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("number_format", FORMATS)
def test_products_are_of_what_the_numbers_stand_for(
    device: torch.device, number_format: str, fp8_format: str
) -> None:
    """By definition, in float64; odd numbers of tokens and rows, of other sizes than a block."""
    linear = nn.Linear(64, 50, device=device)
    layer = convert_linears(linear, number_format, fp8_format=fp8_format)
    x = torch.randn(3, 7, 64, device=device, requires_grad=True)
    grad = torch.randn(3, 7, 50, device=device) * torch.logspace(-4, 0, 50, device=device)
    layer(x).backward(grad)
    flat, g = x.detach().view(-1, 64), grad.view(-1, 50)
    number = E5M2 if fp8_format == "hybrid" else E4M3
    x8, w8 = (stands_for(each, number_format) for each in (flat, linear.weight.detach()))
    if number_format == "float8_rowwise":  # scales of what is not summed over go into g first
        w = Operand.of(linear.weight.detach(), GatherFormat(number_format))
        left = Operand.of(flat, GatherFormat(number_format))
        of_x = stands_for(g / w.scale.t(), number_format, number) @ w.numbers.float()
        of_w = stands_for((g / left.scale).t(), number_format, number) @ left.numbers.float()
    elif number_format == "float8":
        g8 = stands_for(g, number_format, number)
        of_x, of_w = g8 @ w8, g8.t() @ x8
    else:
        of_x = stands_for(g, number_format, number) @ stands_for(w8.t(), number_format).t()
        of_w = stands_for(g.t(), number_format, number) @ stands_for(x8.t(), number_format).t()
    assert x.grad is not None
    assert linear.weight.grad is not None
    torch.testing.assert_close(layer(x.detach()).view(-1, 50), x8 @ w8.t() + linear.bias)
    torch.testing.assert_close(x.grad.view(-1, 64), of_x)
    torch.testing.assert_close(linear.weight.grad, of_w)


def test_blocks_along_the_other_dimension_hold_the_same_values() -> None:
    """Powers of two move no bit, unless a value is tiny beside the largest of its new block."""
    values = torch.randn(64, 96) * torch.exp2(torch.randint(-3, 3, (64, 1)).float())
    made = Operand.of(values, GatherFormat.MXFP8)
    again = made.transposed()
    before = from_mxfp8(made.numbers, made.scale, torch.float32)
    after = from_mxfp8(again.numbers, again.scale, torch.float32).t()
    largest = before.abs().unflatten(0, (-1, 32)).amax(1).repeat_interleave(32, 0)
    normal = before.abs() >= largest * 2**-14
    assert torch.equal(before[normal], after[normal])
    assert normal.float().mean() > 0.999


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(32, 96)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(96, 5, bias=False)
        self.recompute = recompute

    def body(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = graphfsdp.recompute(self.body, x) if self.recompute else self.body(x)
        loss: Tensor = out.square().mean()
        return loss


@pytest.mark.parametrize(
    ("number_format", "fp8_format", "dtype", "microbatches"),
    [
        ("float8", "e4m3", torch.bfloat16, 1),
        ("float8", "hybrid", torch.float32, 2),
        ("float8_rowwise", "hybrid", torch.float32, 2),
        ("mxfp8", "e4m3", torch.bfloat16, 2),
        ("mxfp8", "hybrid", torch.float32, 1),
    ],
)
def test_replays_equal_eager(
    device: torch.device, number_format: str, fp8_format: str, dtype: torch.dtype, microbatches: int
) -> None:
    """Ten replays with another batch, another learning rate and other dropout each time."""
    runs = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(3)
        model = Net().to(device, dtype)
        convert_linears(model, number_format, fp8_format=fp8_format)
        optim = FusedAdam(model.parameters(), lr=1e-2, master_weights=dtype is torch.bfloat16)
        losses = []
        with graphfsdp.capture(
            model, optim, scope=scope, max_grad_norm=1.0, microbatches=microbatches
        ) as step:
            torch.manual_seed(4)
            for index in range(14):
                optim.param_groups[0]["lr"] = 1e-2 / (1 + index)
                batch = torch.randn(6, 32, generator=torch.Generator().manual_seed(index))
                losses.append(step(batch.to(device, dtype)).clone())
            if scope == "full_iteration":
                assert step.report().num_calls["replay"] == 10
        runs.append([*losses, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_recomputation_saves_nothing_else(device: torch.device) -> None:
    torch.manual_seed(0)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = convert_linears(Net(recompute).to(device), "mxfp8")
        x = torch.randn(6, 32, device=device)
        model.eval()(x).backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_only_8_bits_of_the_input_are_kept(device: torch.device) -> None:
    kept: list[Tensor] = []
    layer = convert_linears(nn.Linear(64, 64, bias=False, device=device))
    x = torch.randn(8, 64, device=device)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    assert sorted(t.nbytes for t in kept) == [4, 8 * 64, 64 * 64 * 4]


def test_nothing_autocast_and_infinities(device: torch.device) -> None:
    layer = convert_linears(nn.Linear(64, 16, device=device), "float8")
    assert layer(torch.empty(0, 64, device=device)).shape == (0, 16)
    with torch.autocast(device.type, torch.bfloat16):
        assert layer(torch.ones(2, 64, device=device)).dtype == torch.bfloat16
    for number_format in FORMATS:
        x = torch.ones(2, 64, device=device)
        x[0, 0] = torch.inf
        layer = convert_linears(nn.Linear(64, 16, device=device), number_format)
        assert not layer(x)[0].isfinite().any()


def test_what_is_converted(device: torch.device) -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(20, 4), "c": nn.LayerNorm(4)})
    model["again"] = model["a"]
    before = dict(model.named_parameters())
    convert_linears(model, "mxfp8", where=lambda name, linear: linear.in_features % 32 == 0)
    assert type(model["a"]) is EightBitLinear
    assert model["again"] is model["a"]
    assert type(model["b"]) is nn.Linear
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(param is before[name] for name, param in model.named_parameters())
    assert "mxfp8, e4m3" in repr(model)
    with pytest.raises(ConfigError, match="'b' has in_features=20"):
        convert_linears(model, "mxfp8")
    with pytest.raises(ConfigError, match="unknown fp8_format 'e5m2'; expected one of 'e4m3'"):
        convert_linears(model, fp8_format="e5m2")
    model["b"].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="'b' has hooks, or is sharded already"):
        convert_linears(model)

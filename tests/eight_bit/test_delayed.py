"""Delayed scaling: the numbers of a plain reference, captured as eager, saved, loaded, skipped."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_linear import Net
from torch import Tensor, nn

import graphfsdp
from graphfsdp import ConfigError
from graphfsdp.eight_bit import DelayedScaling, convert_linears
from graphfsdp.optim import FusedAdam

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Reference:
    """One scale by the words of Transformer Engine's recipe: a list of magnitudes, newest last."""

    def __init__(self, recipe: DelayedScaling, number: torch.dtype) -> None:
        self.recipe, self.largest = recipe, torch.finfo(number).max
        self.kept = [0.0] * (recipe.amax_history_len - 1)
        self.scale = 1.0

    def update(self, amax: float) -> None:
        window = [*self.kept, amax]
        decides = max(window) if self.recipe.amax_compute_algo == "max" else amax
        if decides > 0:
            exact = torch.tensor(self.largest) / torch.tensor(decides) / 2**self.recipe.margin
            self.scale = min(exact.item(), torch.finfo(torch.float32).max)
        self.kept = window[1:]

    def numbers(self, values: Tensor, number: torch.dtype) -> Tensor:
        """What the values are as numbers, still scaled."""
        return (values * self.scale).clamp(-self.largest, self.largest).to(number).float()


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(0, 1, "most_recent"),
        DelayedScaling(2, 5, "most_recent"),
        DelayedScaling(0, 1, "max"),
        DelayedScaling(1, 4, "max"),
    ],
)
def test_a_layer_computes_as_the_reference(
    device: torch.device, recipe: DelayedScaling, fp8_format: str
) -> None:
    """Magnitudes go up and down by powers of ten, to zeros and to what has no scale in float32."""
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=False, device=device)
    layer: Any = convert_linears(copy.deepcopy(plain), fp8_format=fp8_format, recipe=recipe)
    of_gradients = E5M2 if fp8_format == "hybrid" else E4M3
    kinds = (E4M3, E4M3, of_gradients)
    references = [Reference(recipe, number) for number in kinds]
    for factor in (1.0, 300.0, 1e-3, 0.0, 1e-42, 7.0, 5.0, 1e20, 2.0, 1.0):
        x = torch.randn(16, 32, device=device).mul_(factor).requires_grad_()
        grad = torch.randn(16, 48, device=device) * min(factor, 100.0)
        plain.weight.grad = layer.weight.grad = None
        output = layer(x)
        output.backward(grad)
        operands = (x.detach(), plain.weight.detach(), grad)
        x8, w8, g8 = (
            reference.numbers(values, number).double() / reference.scale
            for reference, values, number in zip(references, operands, kinds, strict=True)
        )
        for got, expected in (
            (output, x8 @ w8.t()), (x.grad, g8 @ w8), (layer.weight.grad, g8.t() @ x8),
        ):  # fmt: skip
            assert got is not None
            bound = 1e-5 * float(expected.abs().max()) + 1e-37
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=bound)
        for reference, values in zip(references, operands, strict=True):
            reference.update(float(values.abs().max()))
        assert layer.fp8_scale.tolist() == [reference.scale for reference in references]
        for column, reference in enumerate(references):
            assert layer.fp8_amax_history[1:, column].tolist() == pytest.approx(
                reference.kept, rel=0
            )
            assert layer.fp8_amax_history[0, column] == 0.0


def train(scope: str, device: torch.device, **options: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3)
    model = Net(options.pop("recompute", False)).to(device)
    recipe = options.pop("recipe", DelayedScaling(0, 4, "max"))
    convert_linears(model, fp8_format="hybrid", recipe=recipe)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    spoil = options.pop("spoil", ())
    losses = []
    with graphfsdp.capture(model, optimizer, scope=scope, max_grad_norm=1.0, **options) as step:
        torch.manual_seed(4)
        for index in range(14):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index)
            batch = torch.randn(6, 32, generator=torch.Generator().manual_seed(index))
            batch = batch * (1 + index % 3)
            if index in spoil:
                batch[1, 1] = math.inf
            before = {name: value.clone() for name, value in model.state_dict().items()}
            losses.append(step(batch.to(device)).clone())
            if index in spoil:
                unchanged = [n for n, value in model.named_parameters()
                             if torch.equal(value, before[n])]  # fmt: skip
                assert len(unchanged) == len(list(model.parameters()))
        if scope == "full_iteration":
            assert step.report().num_calls["replay"] == 10
        if spoil:
            assert step.skipped_steps is not None
            assert int(step.skipped_steps) == len(spoil)
    return [*losses, *model.state_dict().values()], model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2, "recompute": True},
        {"recipe": DelayedScaling(0, 1, "most_recent"), "microbatches": 2},
        {"spoil": (2, 8), "skip_nonfinite": True},
    ],
)
def test_replays_equal_eager(device: torch.device, options: dict[str, Any]) -> None:
    """Scales move in replays; what is not finite skips the step and leaves no trace in them."""
    (eager, _), (captured, model) = (
        train(scope, device, **dict(options)) for scope in ("none", "full_iteration")
    )
    finite = [(a, b) for a, b in zip(eager, captured, strict=True) if a.isfinite().all()]
    assert len(finite) == len(eager) - len(options.get("spoil", ()))
    assert all(torch.equal(a, b) for a, b in finite)
    for layer in (model.up, model.down):
        assert layer.fp8_amax_history.isfinite().all()
        assert (layer.fp8_scale != 1.0).all()


def test_a_saturated_value_stays_finite_and_an_evaluation_leaves_no_trace(
    device: torch.device,
) -> None:
    model: Any = convert_linears(Net().to(device), recipe=DelayedScaling(0, 2))
    model(torch.randn(6, 32, device=device)).backward()
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        assert model(torch.full((6, 32), 1e6, device=device)).isfinite()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    copied = copy.deepcopy(model)
    copied(torch.randn(6, 32, device=device)).backward()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert not torch.equal(copied.up.fp8_scale, model.up.fp8_scale)


def test_a_history_is_saved_and_loaded_under_a_live_graph(
    device: torch.device, tmp_path: Path
) -> None:
    """Two runs of six iterations, the second from the first's checkpoint, are one of twelve."""

    def make() -> tuple[Any, FusedAdam]:
        torch.manual_seed(3)
        model = convert_linears(Net().to(device).eval(), recipe=DelayedScaling(0, 3))
        return model, FusedAdam(model.parameters(), lr=1e-2)

    def batch(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, 32, generator=generator).to(device) * (1 + index % 3)

    model, optimizer = make()
    with graphfsdp.capture(model, optimizer) as step:
        for index in range(12):
            if index == 6:
                graphfsdp.save(tmp_path / "at_six", model, optimizer)
            loss = step(batch(index)).clone()
    other, its_optimizer = make()
    with graphfsdp.capture(other, its_optimizer) as step:
        for index in range(20, 26):
            step(batch(index))
        assert not torch.equal(other.up.fp8_amax_history, model.up.fp8_amax_history)
        graphfsdp.load(tmp_path / "at_six", other, its_optimizer)
        for index in range(6, 12):
            its_loss = step(batch(index))
        assert step.report().num_calls["replay"] >= 8
    assert torch.equal(its_loss, loss)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_runs_go_on_from_bfloat16_and_back(tmp_path: Path) -> None:
    """Scales that a checkpoint lacks are found anew, and those that a model lacks are left out."""
    torch.manual_seed(0)
    plain, delayed = Net(), convert_linears(Net(), recipe=DelayedScaling())
    delayed(torch.randn(6, 32)).backward()
    for before, after, name in ((plain, delayed, "plain"), (delayed, Net(), "delayed")):
        graphfsdp.save(tmp_path / name, before, FusedAdam(before.parameters()))
        graphfsdp.load(tmp_path / name, after, FusedAdam(after.parameters()))
        for ours, theirs in zip(before.parameters(), after.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_what_has_no_delayed_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="amax_compute_algo must be 'max' or 'most_recent'"):
        DelayedScaling(amax_compute_algo="mean")
    with pytest.raises(ConfigError, match="amax_history_len must be an integer of at least 1"):
        DelayedScaling(amax_history_len=0)
    recipe = DelayedScaling()
    with pytest.raises(ConfigError, match="needs number_format='float8'"):
        convert_linears(Net(), "mxfp8", recipe=recipe)
    with pytest.raises(ConfigError, match="the module that is called, and a ModuleList is not"):
        convert_linears(nn.ModuleList([Net()]), recipe=recipe)
    model = convert_linears(Net(), recipe=recipe)
    with pytest.raises(ConfigError, match="can be given once"):
        convert_linears(model, recipe=recipe)

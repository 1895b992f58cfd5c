"""What a capture refuses: op, module path and source line; and that nothing is left of it."""

import re
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp.optim import FusedAdam
from iterations import steps_once
from mid_forward import (
    Inner,
    assert_refused_in,
    batches,
    check_captured,
    check_refused,
    make_probe,
    refusal_of,
)
from refused_programs import REFUSED, SCALAR

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["item", "boolean_mask", "get_rng_state"])
@pytest.mark.parametrize(
    "options", [{"microbatches": 2}, {"max_grad_norm": 0.1}, {"scope": "forward_backward"}], ids=str
)
def test_refused_whatever_the_options(
    name: str, options: dict[str, object], device: torch.device
) -> None:
    if "max_grad_norm" in options:
        refusal_of(*make_probe(REFUSED[name].program, device, **options), device)
        return
    check_refused(REFUSED[name].program, device, **options)


def test_a_read_in_the_loss_function_is_refused_outside_any_module(device: torch.device) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.detach().item()  # refused

    error = refusal_of(*make_probe(lambda self, h, x: h, device, loss_fn=loss_fn), device)
    assert error.module_path is None
    assert_refused_in(error, loss_fn)


def test_a_read_in_the_optimizer_is_refused_after_parameters_were_written(
    device: torch.device,
) -> None:
    class Careless(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            float(self.param_groups[0]["params"][0].sum())  # refused

    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(device)
    optim = Careless(model.parameters(), lr=0.1, momentum=0.9)
    step = graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).mean())
    assert_refused_in(refusal_of(step, model, optim, device), Careless.step)


@pytest.mark.parametrize("is_own", [False, True], ids=["default", "own iteration"])
def test_a_read_in_an_optimizer_of_torch_comes_with_the_remedies_for_optimizers(
    is_own: bool,
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adafactor(model.parameters())
    iteration = steps_once() if is_own else None
    step = graphfsdp.capture(model, optimizer, loss_fn=mean_square, iteration=iteration)
    error = refusal_of(step, model, optimizer, CPU)
    assert re.match(r"Adafactor\.step: .*'forward_backward'", str(error))


def test_a_read_in_a_module_of_torch_is_refused_at_its_callers_line(device: torch.device) -> None:
    """Without momentum, batch norm divides by a count that it reads on the host."""

    class Cumulative(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)  # refused
            return x.square().mean()

    model = Cumulative([nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)]).to(device)
    optim = FusedAdam(model.parameters(), lr=0.1)
    step = graphfsdp.capture(model, optim)
    error = refusal_of(step, model, optim, device)
    assert error.op == SCALAR
    assert error.module_path == "1"
    assert "BatchNorm1d(momentum=None)" in str(error)
    assert "the default 0.1" in error.hazard.fix
    assert_refused_in(error, Cumulative.forward)


def hides(mask: Tensor) -> Tensor:
    return mask.float() if mask.all() else mask.float() * 2


def selects(mask: Tensor) -> Tensor:
    return mask[mask].float().sum()


@pytest.mark.parametrize(
    ("name", "function", "remedy"),
    [
        ("ema_pytorch.ema_pytorch", hides, "ema.update() after each call"),
        ("torch_geometric.utils.loop", selects, "layers with add_self_loops=False"),
    ],
)
def test_what_libraries_are_known_for_is_refused_with_its_remedy(
    name: str, function: types.FunctionType, remedy: str, device: torch.device
) -> None:
    library = types.FunctionType(function.__code__, globals() | {"__name__": name})

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        factor: Tensor = library(x > 0).sum()
        return h * factor

    assert remedy in str(check_refused(program, device))


def test_masks_of_transformers_are_made_without_a_look(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformers.masking_utils"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    library = types.FunctionType(hides.__code__, globals() | {"__name__": name})

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        factor: Tensor = library(x == x).mean()  # hides nothing, and 2.0 says the opposite
        return h * self.gate * factor

    check_captured(program, device)


def test_a_tensor_that_vmap_has_left_in_python_is_nobodys_business(device: torch.device) -> None:
    left: dict[str, Any] = {}

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        def row(h: Tensor) -> Tensor:
            left["last"] = self.last = h * 2
            return h * self.gate

        out: Tensor = torch.vmap(row)(h)
        return out

    step, *_ = make_probe(program, device)
    for x in batches(device, 6):
        step(x)
    assert step.phase is graphfsdp.Phase.REPLAY


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`:UserWarning")
def test_compiled_functions_and_modules_are_refused_on_a_cpu() -> None:
    function = torch.compile(lambda h: h * 2, backend="eager")
    layer = torch.compile(nn.Linear(4, 4), backend="eager")
    for compiled in (function, layer):

        def program(self: Inner, h: Tensor, x: Tensor, compiled: Any = compiled) -> Tensor:
            out: Tensor = compiled(h)  # refused
            return out

        error = check_refused(program, CPU)
        assert error.op == "torch.compile"
        assert "compiled by torch.compile" in str(error)
        assert_refused_in(error, program)


def test_an_own_operator_that_draws_random_numbers_is_undone() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        noise: Tensor = torch.ops.graphfsdp_rules.noise(x)
        return h * noise * noise.sum().item()

    step, model, optim = make_probe(program, CPU)
    model.dropout.p = 0.0  # the operator's draw is the first of the iteration
    refusal_of(step, model, optim, CPU)


def test_what_was_drawn_from_a_generator_of_a_closure_is_undone() -> None:
    generator = torch.Generator()

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        return h * torch.rand(4, generator=generator) * h.sum().item()

    step, *_ = make_probe(program, CPU, warmup_steps=1)
    step(batches(CPU, 1)[0])
    before = generator.get_state()
    with pytest.raises(graphfsdp.CaptureError):
        step(batches(CPU, 1)[0])
    assert torch.equal(generator.get_state(), before)


@torch.library.custom_op("graphfsdp_rules::noise", mutates_args=())
def _noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@_noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_numpy_cannot_write_a_constant_behind_the_recording() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        shift = torch.zeros(4)
        if writes:
            shift.numpy()[:] = 3.0
        return h * float(np.sqrt(torch.full((4,), 2.0).numpy()).sum()) + shift

    writes = False
    check_captured(program, CPU)
    step, *_ = make_probe(program, CPU)
    for x in batches(CPU, 3):
        step(x)
    writes = True
    with pytest.raises(ValueError, match="read-only"):
        step(batches(CPU, 1)[0])

"""`capture_in_place`: loops as they are written, with and without it, bit for bit."""

import copy
import signal
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

import graphfsdp
from hidden_count import Unseen
from loops import LOOPS, accumulates
from parts_helpers import Net, batches, check, iterates, make_adam, make_net, of_logits, replays

REPLAYED = (
    *("accumulation, clipping", "a closure", "another shape", "autocast, twice"),
    *("gradients by hand, schedule, evaluation", "two models and optimizers"),
)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_the_same_with_the_line_and_without(name: str) -> None:
    loop, options = LOOPS[name]
    with check(loop, **options) as parts:
        assert name not in REPLAYED or replays(parts) >= 4
    assert _get_current_function_mode() is None


class CompiledAtOnce(Net):
    """Compiled by ``module.compile()``, which leaves it in its place."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.get_submodule(name).compile(backend="eager")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.compile(make_net(), backend="eager"), "it is compiled"),
        (CompiledAtOnce, "it is compiled"),
        # Inductor's gradients were others in warm-ups, which were looked at.
        (lambda: CompiledAtOnce("embed"), "'embed' in it is compiled"),
    ],
)
def test_a_model_that_torch_compiles_runs_as_it_is(make: Any, why: str) -> None:
    with check(accumulates, make=make) as parts:
        (model, _) = parts.report().parts
        assert (model.state, model.why) == ("as written", why)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "parts to keep": ({"keep": "some"}, "keep must be"),
    "no optimizer": ({"optimizer": 3}, r"must be a torch\.optim\.Optimizer"),
    "a pipeline's schedule": (
        {"model": SimpleNamespace(step=None)},
        "which captures pipelines",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    options, words = REFUSED[name]
    model = make_net()
    with pytest.raises(graphfsdp.ConfigError, match=words):
        graphfsdp.capture_in_place(**{"model": model, "optimizer": make_adam(model), **options})


class Stepping:
    """An optimizer of a user's own, and what holds one of torch's under a name of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, holds: bool) -> None:
        if holds:
            self.held = {"dense": optimizer}
        self.step = optimizer.step
        self.zero_grad = optimizer.zero_grad


def test_a_copy_of_an_optimizer_steps_what_is_its_own() -> None:
    class Descent:
        def __init__(self, param: Tensor) -> None:
            self.param = param

        def step(self) -> None:
            self.param.data -= 1

    model = make_net()
    optimizer = Descent(next(model.parameters()))
    before = optimizer.param.detach().clone()
    with graphfsdp.capture_in_place(model, optimizer):  # type: ignore[arg-type]
        other = copy.deepcopy(optimizer)
        other.step()
        optimizer.step()
        optimizer.step()
    assert torch.equal(other.param, before - 1)
    assert torch.equal(optimizer.param, before - 1 - 1)


@pytest.mark.parametrize("holds", [True, False])
def test_an_optimizer_may_be_of_any_class(holds: bool) -> None:
    with check(
        accumulates, make=make_net, optim=lambda model: Stepping(make_adam(model), holds=holds)
    ) as parts:
        assert replays(parts) >= 4
        assert ("AdamW: an operator for each group" in str(parts.report())) == holds


class Replay(nn.Module):
    """Has names of its own where torch walks through modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.buffers = []  # type: ignore[assignment]
        self.children = {"a": 1}  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


def test_what_hides_names_of_modules_runs_as_written() -> None:
    with check(accumulates, make=Replay) as parts:
        assert replays(parts) >= 4
        assert "Replay.children is not torch's" in str(parts.report())


def gathered(logits: Tensor, x: Tensor) -> Tensor:
    """Fail for some numbers, and not for their shape."""
    return logits.gather(1, torch.arange(4) + (x[:, :4] > 8).long() * 4)


class Gathering(Net):
    """Fails at its end."""

    def forward(self, x: Tensor) -> Tensor:
        return gathered(super().forward(x), x)


@pytest.mark.parametrize(("first", "casts"), [(0, True), (0, False), (1, False), (2, False)])
def test_a_call_that_fails_leaves_what_it_leaves_without_the_line(first: int, casts: bool) -> None:
    """In a warm-up, in a recording, in replays."""

    def loop(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index, x, y in batches(30):
            x[0, 0] = 9 if index % 4 == first else x[0, 0].clamp(max=1)
            optimizer.zero_grad()
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                    loss = of_logits(model, index, x, y)
                    if casts:
                        loss = loss + of_logits(model, index, x * 1.5, y)
                loss.backward()
                optimizer.step()
            except RuntimeError as error:
                yield str(error).startswith("index 4 is out of bounds")
            yield model.norm.running_mean
            yield torch.get_rng_state()

    assert replays(check(loop, Gathering)) >= 10


def test_a_second_backward_pass_is_cast_as_its_call_was_though_the_first_call_failed() -> None:
    class Checked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return gathered(super().forward(x), x)

    def loop(model: nn.Linear, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index, x, y in batches(18):
            x[0, 0] = 9 if index == 0 else x[0, 0]
            optimizer.zero_grad()
            with suppress(RuntimeError):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = of_logits(model, index, x, y)
                if index > 14:
                    (grad,) = torch.autograd.grad(loss, model.weight, create_graph=True)
                    loss = grad.square().sum()
                loss.backward()
                optimizer.step()
                yield loss

    assert replays(check(loop, lambda: Checked(6, 4))) >= 10


RINGS: list[Unseen] = []


@torch.library.custom_op("graphfsdp_parts::ring", mutates_args=())
def ring(x: Tensor) -> Tensor:
    if next(RINGS[0]):
        signal.raise_signal(signal.SIGUSR1)
    return x.clone()


ring.register_autograd(lambda ctx, grad: grad)


class Ringing(Net):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = ring(super().forward(x))
        return logits


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("call", range(6))
def test_what_the_handler_of_a_signal_raises_comes_out_of_the_call(
    call: int, error: type[BaseException]
) -> None:
    """In warm-ups, in a recording, in replays; and the calls behind it are captured."""

    def raise_it(*_: object) -> None:
        raise error

    RINGS[:] = [Unseen(*(index == call for index in range(10)))]
    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        model = Ringing()
        optimizer = make_adam(model)
        with graphfsdp.capture_in_place(model, optimizer, keep="all") as parts:
            for index, x, y in batches(12):
                weights = copy.deepcopy([*model.parameters()])
                rings = index == call
                with pytest.raises(error) if rings else nullcontext():
                    iterates(model, optimizer, x, y)
                assert all(map(torch.equal, weights, model.parameters())) == rings
            assert replays(parts) >= 4
    finally:
        signal.signal(signal.SIGUSR1, before)

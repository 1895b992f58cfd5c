"""Backward passes of parts: graphs of them, and what runs through autograd as it is written."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import graphfsdp
from parts_helpers import (
    Net,
    Parts,
    batches,
    check,
    iterates,
    make_adam,
    make_net,
    replays,
    states,
    trains,
)
from zoo import ZOO

FACTOR = 1.0
SEEN: dict[str, Any] = {}


class Pass(torch.autograd.Function):
    """Hands a tensor on, and runs a function of Python on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.function(grad), None


def counted(grad: Tensor) -> Tensor:
    SEEN["calls"] += 1
    times: int = SEEN["calls"]
    return grad * times


def kept(grad: Tensor) -> Tensor:
    SEEN["gradients"].append(grad * 1.0)
    return grad


def written(grad: Tensor) -> Tensor:
    SEEN["mean"].mul_(0.9).add_(grad.mean(), alpha=0.1)
    return grad


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda grad: grad * FACTOR,
    "noisy": lambda grad: grad + 0.1 * torch.randn_like(grad),
    "judged": lambda grad: grad if grad.sum().item() > 0 else grad * 0.5,
    "counted": counted,
    "kept": kept,
    "written": written,
}


class Passing(Net):
    """A net whose hidden state comes through a function on the way back."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, by_hook: bool) -> None:
        super().__init__()
        self.function = function
        self.by_hook = by_hook

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.embed(x))
        if self.by_hook:
            hidden.register_hook(self.function)
        else:
            hidden = Pass.apply(hidden, self.function)  # type: ignore[no-untyped-call]
        out: Tensor = self.head(nn.functional.gelu(hidden))
        return out


def trains_by_factors(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """What functions read changes now and then, and what they leave is read."""
    SEEN.update(calls=0, gradients=[], mean=torch.zeros(()))
    for index, x, y in batches(20):
        globals()["FACTOR"] = 1.0 + (index // 7)
        yield iterates(model, optimizer, x, y)
        yield SEEN["mean"]
    yield from (each.clone() for each in SEEN["gradients"])
    yield SEEN["calls"]


@pytest.mark.parametrize("by_hook", [False, True], ids=["a_function_of_autograd", "a_hook"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_python_does_on_the_way_back_it_does_in_each_iteration(
    name: str, by_hook: bool
) -> None:
    check(trains_by_factors, lambda: Passing(FUNCTIONS[name], by_hook=by_hook))


class Recomputing(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(
            lambda x: self.drop(nn.functional.gelu(self.embed(x))), x, use_reentrant=False
        )
        out: Tensor = self.head(hidden)
        return out


def test_a_recomputation_draws_what_it_drew_before() -> None:
    check(trains, Recomputing)


class RunsAgain(torch.autograd.Function):
    """Runs a layer without a graph, and on the way back once more, as a reversible net does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, asks: bool, *weights: Tensor) -> Tensor:
        ctx.layer, ctx.asks, ctx.weights = layer, asks, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.layer(x)
        if ctx.asks:  # which gives None, not an error, for weights that the layer has not used
            of_x, *others = torch.autograd.grad(out, (x, *ctx.weights), grad, allow_unused=True)
            return (of_x, None, None, *others)
        out.backward(grad)
        return (x.grad, None, None, *[None] * len(ctx.weights))


class Reversible(Net):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        layer = self.embed
        hidden: Any = RunsAgain.apply(x * 1.0, layer, self.asks, *layer.parameters())  # type: ignore[no-untyped-call]
        out: Tensor = self.head(self.norm(hidden))
        return out


@pytest.mark.parametrize("asks", [False, True], ids=["goes_backward", "asks_for_gradients"])
def test_a_module_that_runs_again_on_the_way_back_has_the_weights_it_was_given(asks: bool) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index, x, y in batches(24):
            cross_entropy(model(x.requires_grad_()), y).backward()
            yield model.embed.weight.grad
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert replays(check(loop, lambda: Reversible(asks))) >= 10


class Sharing(nn.Module):
    """Gradients that are one tensor, one of the input's, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(8, 6))
        self.other = nn.Parameter(torch.ones(8, 6))
        self.unused = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x) + self.one + self.other
        return out


def accumulates(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    grads = []
    for index, x, _ in batches(24):
        x.requires_grad_(index % 2 == 0)
        out = model(x)
        (out * out.detach()).sum().backward()
        grads.append([param.grad for param in model.parameters()])
        yield x.grad if index % 2 == 0 else 0
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)
    yield from (each.clone() for row in grads for each in row if each is not None)


def test_gradients_in_one_memory_are_tensors_of_their_own() -> None:
    check(accumulates, Sharing)


def backward_graphs(parts: Parts) -> int:
    kinds = [kind for part in parts._parts.values() for kind in part._kinds.values()]
    passes = [stage.backward for kind in kinds for slot in kind.slots for stage in slot._stages]
    return sum(graph is not None for each in passes for graph in each.graphs.values())


# What becomes of a model and of its backward pass, where not both are graphs.
HELD: dict[str, tuple[str, int]] = {
    "autograd_function": ("captured", 0),  # Python on the way back
    # What they keep, or ask for within the call.
    **dict.fromkeys(("moving_average", "gradient_penalty"), ("as written", 0)),
    # A loss, and what it is made of.
    **dict.fromkeys(("model_output", "extras"), ("captured", 2)),
    **dict.fromkeys(("checkpoint", "vmap"), ("warming up", 0)),  # called within something else
}


@pytest.mark.parametrize("name", ZOO)
def test_every_kind_of_model_trains_as_without_the_line(name: str) -> None:
    case = ZOO[name]

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(12):
            batch = case.batch(generator)
            optimizer.zero_grad()
            call = partial(case.loss_fn, model) if case.loss_fn else model
            output = call(*batch.args, **batch.kwargs)
            loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", output)
            loss.backward()
            optimizer.step()
            yield loss

    parts = check(loop, case.make)
    assert (states(parts)["model"], backward_graphs(parts)) == HELD.get(name, ("captured", 1))


def test_no_gradient_of_a_pass_outlives_it() -> None:
    model = make_net()
    optimizer = make_adam(model)
    sizes = []
    parts = graphfsdp.capture_in_place(model, optimizer, keep="all")
    for _, x, y in batches(40):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        gc.collect()
        sizes.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
    assert sizes[10] >= sizes[-1]
    parts.close()


def by_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] *= 2


def without_grad(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda tensor: tensor.data.mul_(2),
    "detach": lambda tensor: tensor.detach().mul_(2),
    "numpy": by_numpy,
    "no_grad": without_grad,
    "in place": lambda tensor: tensor.mul_(2),
}


@pytest.mark.parametrize("last", [nn.Tanh, nn.Identity], ids=["saved", "not saved"])
@pytest.mark.parametrize(
    ("way", "which"),
    [
        (way, which)
        for way in WRITES
        for which in ("input", "result", "first weight", "last weight")
        if way != "in place" or "weight" not in which  # which torch refuses at once
    ],
)
def test_a_backward_pass_reads_what_was_written_before_it(way: str, which: str, last: Any) -> None:
    """Or refuses it, as torch does."""

    def make() -> nn.Module:
        first = [nn.Linear(6, 8)] if last is nn.Tanh else [nn.Embedding(6, 8), nn.Flatten()]
        return nn.Sequential(*first, nn.GELU(), nn.LazyLinear(4), last())

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index, x, y in batches(16):
            if last is not nn.Tanh:
                x = x.abs().long().clamp(max=2)
            optimizer.zero_grad()
            out = model(x)
            loss = cross_entropy(out * 1.0, y)
            first, *_, last_weight = (p for p in model.parameters() if p.dim() > 1)
            written = {"input": x, "result": out, "first weight": first, "last weight": last_weight}
            if index > 4:
                WRITES[way](written[which])
            try:
                loss.backward()
            except RuntimeError as error:
                optimizer.zero_grad()  # of what came before it
                yield "modified by an inplace operation" in str(error)
            optimizer.step()
            yield loss

    def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
        model(torch.ones(8, 6).long() if last is not nn.Tanh else torch.ones(8, 6))
        return torch.optim.SGD(model.parameters(), lr=0.1)

    assert replays(check(loop, make, make_sgd)) >= 8


class WithLoss(nn.Module):
    """Returns logits, and the loss that it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.down, self.up = Net(), nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits, "loss": cross_entropy(logits, y)}


class Auto(WithLoss):
    """Makes one of two results, using one of them twice, and of that the loss."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        mean = self.net(x)
        spread = self.down(mean.detach() + x[:, :4])
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp() + 0.1 * mean
        found = self.up(drawn)
        loss = nn.functional.mse_loss(found, x)
        return {"logits": mean, "spread": spread, "found": found, "loss": loss}


class Skipping(Auto):
    """Uses a result for two others, of which one is made of the other."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = super().forward(x, y)
        return {**output, "loss": output["loss"] + 0.1 * output["spread"].mean()}


class Shared(WithLoss):
    """Makes a result of another one, and both of what it does not return."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.net(x)
        logits = self.down(torch.tanh(hidden))
        return {"logits": logits, "loss": cross_entropy(logits, y) + hidden.square().mean()}


class Apart(WithLoss):
    """Makes two results of one thing; the first is a look at memory of another form."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.net(x)
        return {"logits": hidden[:4].repeat(2, 1), "loss": cross_entropy(self.down(hidden), y)}


def both(output: dict[str, Tensor]) -> None:
    (output["loss"] + 0.1 * output["logits"].sigmoid().mean()).backward()


def in_turn(output: dict[str, Tensor]) -> None:
    output["loss"].backward(retain_graph=True)
    output["logits"].square().mean().backward()


def through_a_hook(output: dict[str, Tensor]) -> None:
    output["logits"].register_hook(lambda grad: grad * 3)
    output["logits"].retain_grad()
    output["loss"].backward()
    SEEN["gradients"].append(output["logits"].grad)


def by_its_gradient(output: dict[str, Tensor]) -> None:
    loss, logits = output["loss"], output["logits"]
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    SEEN["gradients"].append(grad)
    logits.backward(torch.ones_like(logits) if grad is None else grad * 2)


def behind_a_write(output: dict[str, Tensor]) -> None:
    output["logits"].mul_(2)
    output["logits"].mean().backward()


def twice(output: dict[str, Tensor]) -> None:
    (grad,) = torch.autograd.grad(
        output["loss"], output["logits"], create_graph=True, allow_unused=True
    )
    (output["loss"] + (0 if grad is None else grad.square().sum())).backward()


@pytest.mark.parametrize(
    "back", [both, in_turn, through_a_hook, by_its_gradient, behind_a_write, twice]
)
@pytest.mark.parametrize(
    ("make", "state"),
    [
        *((WithLoss, "captured"), (Auto, "captured"), (Apart, "captured")),
        *((Skipping, "as written"), (Shared, "as written")),
    ],
)
def test_a_result_may_be_made_of_another_one(
    make: type[nn.Module], state: str, back: Callable[[dict[str, Tensor]], None]
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        SEEN["gradients"] = []
        for index, x, y in batches(16):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index % 3)
            optimizer.zero_grad()
            output = model(x, y)
            back(output)
            optimizer.step()
            yield from output.values()
        yield from (each for each in SEEN["gradients"] if each is not None)

    parts = check(loop, make)
    # What goes backward through a backward pass is never recorded.
    assert states(parts)["model"] == ("warming up" if back is twice else state)
    assert back is twice or replays(parts) >= 10

"""`capture_in_place` in parts: loops as people write them, with and without it, bit for bit.

Every part is kept here, whether or not it pays.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import graphfsdp
from loops import has_other_shapes
from parts_helpers import (
    Loop,
    Net,
    batches,
    check,
    iterates,
    make_adam,
    make_net,
    of_logits,
    replays,
    states,
    trains,
    trains_by,
)


def calls_twice(model: Net, _: int, x: Tensor, y: Tensor) -> Tensor:
    """Weights that both calls and the loop use twice: last bits depend on the order of sums."""
    one, other = model(x), model(x * 2)
    loss = cross_entropy(one, y) + mse_loss(one, other)
    return loss + 0.1 * model.embed.weight.pow(2).sum() + model.embed.weight.abs().sum()


def goes_backward_in_another_order(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        optimizer.zero_grad()
        losses = [cross_entropy(model(x * factor), y) for factor in (1, 2, 3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        optimizer.step()
        yield torch.stack(losses)


def penalizes_gradients(model: Net, index: int, x: Tensor, y: Tensor) -> Tensor:
    """Goes backward through a backward pass, at first seldom."""
    x.requires_grad_(index % 5 == 4 or index > 11)
    loss = cross_entropy(model(x), y)
    if x.requires_grad:
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + grad.pow(2).sum()
    return loss


def recomputes(model: Net, index: int, x: Tensor, y: Tensor) -> Any:
    logits: Any = checkpoint(model, x.requires_grad_(), use_reentrant=index % 2 == 0)
    return cross_entropy(logits, y)


def transforms(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    model.eval()
    params = dict(model.named_parameters())
    for _, x, y in batches():

        def loss_of(values: Any, x: Tensor, y: Tensor) -> Tensor:
            logits = torch.func.functional_call(model, values, (x[None],))
            return cross_entropy(logits, y[None])

        each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(params, x, y)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        for name, param in params.items():
            assert param.grad is not None
            param.grad += each[name].norm() * 1e-3
        other = {name: param * 1.01 for name, param in params.items()}
        torch.func.functional_call(model, other, (x,)).sum().backward()
        optimizer.step()
        yield loss


def leaves_calls_alone(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Calls that nobody goes backward from, some of which are kept."""
    kept = []
    for index, x, y in batches(20):
        yield model(x).mean()
        if index % 6 == 0:
            kept.append(model(x))
        yield iterates(model, optimizer, x, y)
    for logits in kept:
        yield logits.sum()


def freezes_all_for_other_calls(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Such calls are seen first once others are captured."""
    for index, x, y in batches(20):
        yield iterates(model, optimizer, x, y)
        if index > 8:
            model.requires_grad_(False)
            x = torch.randn(3, 6, requires_grad=True)
            model(x).sum().backward()
            model.requires_grad_(True)
            yield x.grad


def loads(model: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    if index == 2:
        model.kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if index == 8:
        model.load_state_dict(model.kept[0])
        optimizer.load_state_dict(model.kept[1])
    if index == 12:
        model.head.weight.data = torch.ones(4, 16)
    if index == 18:
        model.load_state_dict(model.kept[0], assign=True)


def replaces_a_layer(model: Net, optimizer: torch.optim.Optimizer, index: int) -> None:
    if index == 8:
        model.head = nn.Linear(16, 4)
        optimizer.add_param_group({"params": model.head.parameters()})


def fails_now_and_then(model: Net, _: torch.optim.Optimizer, index: int) -> None:
    if index % 5 == 1:
        with suppress(RuntimeError):
            model(torch.ones(8, 3))


def wraps_a_function(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """From the first call on: dropout, which torch has in Python, and hands on by its name."""
    functions: Any = nn.functional
    written = functions.dropout
    functions.dropout = lambda *args, **kwargs: written(*args, **kwargs) * 0.9
    try:
        yield from trains(model, optimizer)
    finally:
        functions.dropout = written


def copies_by_dict(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """As code that clones modules does, in depth or with a table of parameters of their own."""
    for index, x, y in batches():
        shared, deep = Net.__new__(Net), Net.__new__(Net)
        vars(shared).update(vars(model))
        vars(deep).update(copy.deepcopy(vars(model) if index % 4 == 0 else {}))
        head = nn.Linear(16, 4)
        shared._modules = {**model._modules, "head": head}
        yield cross_entropy(shared(x), y)
        yield head.weight.sum()
        if index % 4 == 0:
            nn.init.zeros_(deep.head.bias)
            yield deep(x).sum()
        yield iterates(model, optimizer, x, y)


def exports(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches():
        yield iterates(model, optimizer, x, y)
        if index % 4 == 3:
            with warnings.catch_warnings(action="ignore"):
                yield torch.jit.script(model)(x).sum()
            yield torch.fx.symbolic_trace(model)(x).sum()


def keeps_what_is_made_of_weights(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    def loss_of(model: Net, index: int, x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached() if index % 4 else nullcontext():
            return of_logits(model, index, x, y) + 0.1 * model.embed.weight.pow(2).sum()

    parametrizations.spectral_norm(model.embed)
    yield from trains_by(loss_of)(model, optimizer)


def casts_weights_itself(model: Net, index: int, x: Tensor, y: Tensor, *, begin: int = 0) -> Tensor:
    """In the block in which the model casts them, which is done once."""
    with torch.autocast("cpu", torch.bfloat16):
        weight = model.head.weight
        loss = (weight @ weight.t()).pow(2).sum() if begin <= index < 9 else 0
        loss = loss + cross_entropy(model(x), y)
        if index >= begin:
            loss = loss + model.embed(x).pow(2).mean() + mse_loss(model(x * 2), model(x * 3))
    return loss


def keeps_the_graph_of_gradients(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Of weights that autocast casts, one of which is used without it as well."""
    params = list(model.parameters())
    for index, x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = of_logits(model, index, x, y)
        grads = torch.autograd.grad(loss, params, create_graph=index == 9)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.detach()
        optimizer.step()
        yield loss


def scales(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    device = model.head.weight.device.type
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3)
    for index, x, y in batches():
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            loss = of_logits(model, index, x, y)
        loss = loss * (float("inf") if index == 8 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss.isfinite()
        yield scaler.get_scale()


LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda logits, y: logits.sum(),
    lambda logits, y: logits.t().contiguous().pow(2).sum(),
    cross_entropy,
    lambda logits, y: logits[::2].pow(2).sum(),
    lambda logits, y: logits.unfold(1, 2, 1).sin().sum(),
    lambda logits, y: logits.double().exp().mean(),
)


def in_forms(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Gradients in more forms than there are graphs for, some of which have no dense memory."""
    for index, x, y in batches(60):
        optimizer.zero_grad()
        logits = model(x)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=index % 4 == 3):
            loss = LOSSES[index % len(LOSSES)](logits, y)
            loss.backward(retain_graph=index % 5 == 0)
        if index % 5 == 0:
            loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        yield loss


def asks_for_many(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Gradients of each result, in one pass."""
    for index, x, y in batches(24):
        logits = model(x)
        each = torch.eye(4)[:, None].repeat(1, 8, 1)
        weights = list(model.parameters())
        if index % 4 == 1:
            yield from torch.autograd.grad(
                logits, weights, each, is_grads_batched=True, retain_graph=True
            )
        if index % 4 == 2:

            def of(row: Tensor, logits: Tensor = logits, weights: Any = weights) -> Any:
                return torch.autograd.grad(logits, weights, row, retain_graph=True)

            yield from torch.func.vmap(of)(each)
        optimizer.zero_grad()
        cross_entropy(logits, y).backward()
        optimizer.step()


def before_each(change: Callable[[Any, torch.optim.Optimizer, int], object]) -> Loop:
    def loop(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index, x, y in batches(30):
            change(model, optimizer, index)
            yield iterates(model, optimizer, x, y)

    return loop


REPLAYED: dict[str, Loop] = {
    "several calls": trains_by(calls_twice),
    "backward in another order": goes_backward_in_another_order,
    "a penalty of gradients": trains_by(penalizes_gradients, 16),
    "a function of torch that is wrapped": wraps_a_function,
    "copies of dicts": copies_by_dict,
    "exports": exports,
    "all frozen for other calls": freezes_all_for_other_calls,
    "casts of the loop": trains_by(casts_weights_itself),
    "casts of the loop, later": trains_by(partial(casts_weights_itself, begin=5)),
    "the graph of gradients": keeps_the_graph_of_gradients,
    "a scaler": scales,
    "gradients in other forms": in_forms,
    "many gradients at once": asks_for_many,
    "a number that changes once": before_each(
        lambda model, _, index: setattr(model, "scale", 1.0 if index < 8 else 0.5)
    ),
    "a weight that freezes": before_each(
        lambda model, _, index: model.embed.weight.requires_grad_(index // 6 % 2 == 0)
    ),
    "states that are loaded": before_each(loads),
}
LOOPS: dict[str, Loop] = {
    **REPLAYED,
    "recomputation": trains_by(recomputes),
    "transforms": transforms,
    "calls without a backward pass": leaves_calls_alone,
    "what is made of weights": keeps_what_is_made_of_weights,
    "a number that goes on changing": before_each(
        lambda model, _, index: setattr(model, "scale", 1 / (1 + index))
    ),
    "a layer that is replaced": before_each(replaces_a_layer),
    "training in eval mode": before_each(lambda model, _, index: model.train(index % 8 < 4)),
    "calls that fail": before_each(fails_now_and_then),
}


# Orders of sums, forms of gradients, casts, clipping.
ON_GPU = ("several calls", "gradients in other forms", "a scaler")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in LOOPS),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ON_GPU),
    ],
)
def test_a_loop_trains_as_without_it(name: str, device: str) -> None:
    parts = check(LOOPS[name], device=device)
    if name in REPLAYED:
        assert replays(parts) >= 4 if device == "cpu" else parts.report().parts[0].num_replays >= 8
        assert states(parts)["model"] == "captured"


@pytest.mark.parametrize(("before", "behind"), [(1, 0), (2, 0), (0, 1), (2, 2)])
def test_what_comes_of_a_weight_beside_its_cast_is_added_in_the_loop_s_order(
    before: int, behind: int
) -> None:
    """As with tied embeddings: last bits depend on it."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            def as_it_is(x: Tensor) -> Tensor:
                return x * self.embed.weight.sin().sum(0)

            for _ in range(before):
                x = as_it_is(x)
            x = self.embed(x).float()
            for _ in range(behind):
                x = as_it_is(x)
            return x

    def loss_of(model: Tied, index: int, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
            if index % 2:
                loss = loss + model(x * 2).square().mean() + model.embed.weight.square().mean()
        return loss

    parts = check(trains_by(loss_of, 16), Tied)
    (line, *_) = parts.report().parts
    if before:
        assert line.why == "it uses a weight before autocast casts it"
    else:
        assert line.num_replays >= 10


def test_a_cell_that_is_run_again_takes_the_place_of_the_one_before() -> None:
    model = make_net()
    optimizer = make_adam(model)
    first = graphfsdp.capture_in_place(model, optimizer, keep="all")
    second = graphfsdp.capture_in_place(model, optimizer, keep="all")
    assert states(first)["model"] == "as written"
    assert states(second)["model"] == "warming up"
    list(trains(model, optimizer))
    assert replays(second) >= 4
    second.close()
    second.close()
    assert "step" not in vars(optimizer)
    assert "_compiled_call_impl" not in {k for k, v in vars(model).items() if v is not None}
    list(trains(model, optimizer))


def steps_around(step: Any) -> Iterator[Any]:
    while step is not None:
        yield step
        step = getattr(step, "__wrapped__", None)


@pytest.mark.parametrize("is_another", [False, True], ids=["one model", "other models"])
def test_a_line_that_is_run_in_each_epoch_takes_the_step_once(is_another: bool) -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits * float(logits.sum().item() > -1e9)

    def train(every: list[Any] | None) -> list[float]:
        torch.manual_seed(0)
        model = Reads()
        optimizer = make_adam(model)
        schedule = None
        found = []
        for _ in range(6):
            named = copy.deepcopy(model) if is_another else model
            if every is not None:
                every.append(graphfsdp.capture_in_place(named, optimizer, keep="all"))
            schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1)
            if schedule.last_epoch and every is not None:
                chains.append([*steps_around(optimizer.step)])
            for _, x, y in batches(5):
                named(x)
                found.append(iterates(model, optimizer, x, y).item())
            schedule.step()
        return found

    every: list[Any] = []
    chains: list[list[Any]] = []
    assert train(every) == train(None)
    assert len(chains[0]) == len(chains[-1])


def test_other_kinds_of_calls_run_as_written_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphfsdp.in_place.module_part.room_on", lambda device: 4096)
    parts = check(has_other_shapes)
    found = replays(parts)
    monkeypatch.undo()
    assert 0 < found < replays(check(has_other_shapes))


@pytest.mark.parametrize(
    ("replay_s", "state", "why"),
    [
        (0.5, "captured", ""),
        (1.5, "as written", "it does not pay: an iteration would take 1.50 times as long"),
    ],
    ids=["faster", "slower"],
)
def test_what_is_faster_stays_though_a_curriculum_makes_early_replays_dear(
    monkeypatch: pytest.MonkeyPatch, replay_s: float, state: str, why: str
) -> None:
    """By a made-up clock: a call as written takes a second, the first replays of a form three."""
    model = make_net()
    optimizer = make_adam(model)
    now = 0.0
    num_replayed: Counter[int] = Counter()
    parts = graphfsdp.capture_in_place(model, optimizer)
    monkeypatch.setattr("graphfsdp.in_place.parts.time.process_time", lambda: now)
    for index in range(160):
        rows = 2 + min(index // 10, 4)
        before = replays(parts)
        optimizer.zero_grad()
        of_logits(model, 0, torch.randn(rows, 6), torch.randint(4, (rows,))).backward()
        is_replay = replays(parts) > before
        num_replayed[rows] += is_replay
        now += (3.0 if num_replayed[rows] < 4 else replay_s) if is_replay else 1.0
        optimizer.step()
    (line,) = (part for part in parts.report().parts if part.name == "model")
    assert (line.state, line.why) == (state, why)


def test_a_loop_trains_the_same_while_its_parts_are_tried() -> None:
    check(partial(trains, count=60), keep="pays")


def learns_to_learn(model: Net, index: int, x: Tensor, y: Tensor) -> Tensor:
    """Goes backward through the backward pass of each call."""
    params = list(model.parameters())
    grads = torch.autograd.grad(
        of_logits(model, index, x, y), params, create_graph=True, allow_unused=True
    )
    return torch.stack([g.pow(2).sum() for g in grads if g is not None]).sum()


def test_a_module_of_whose_calls_no_graph_holds_any_is_given_its_own_call_back() -> None:
    parts = check(trains_by(learns_to_learn, 40))
    (line,) = (part for part in parts.report().parts if part.name == "model")
    assert line.why == "it does not pay: no graph holds any of its last 32 calls"
    assert line.state == "as written"
    assert replays(parts) == 0

"""`capture_in_place` in parts: loops as people write them, with and without it, bit for bit.

Every part is kept here, whether or not it pays.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import graphfsdp
from parts_helpers import (
    Loop,
    Net,
    batches,
    check,
    make_adam,
    make_net,
    number,
    replays,
    run,
    states,
    trains,
)


def looks_at_everything(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    for index, x, y in batches():
        optimizer.zero_grad()
        logits = model(x)
        yield logits.mean().item()
        loss = cross_entropy(logits, y)
        yield loss.item()
        noise = torch.randn(3)
        loss.backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        yield noise.sum()
        if index % 4 == 3:
            model.eval()
            with torch.no_grad():
                yield cross_entropy(model(x), y)
            model.train()


def accumulates(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches(24):
        loss = cross_entropy(model(x), y) / 4
        loss.backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 8 == 3)
        yield loss


def calls_twice(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Weights that both calls and the loop use twice: last bits depend on the order of sums."""
    for _, x, y in batches():
        optimizer.zero_grad()
        one, other = model(x), model(x * 2)
        loss = cross_entropy(one, y) + mse_loss(one, other)
        loss = loss + 0.1 * model.embed.weight.pow(2).sum() + model.embed.weight.abs().sum()
        loss.backward()
        optimizer.step()
        yield loss


def goes_backward_twice(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches():
        optimizer.zero_grad()
        logits = model(x)
        cross_entropy(logits, y).backward(retain_graph=True)
        (logits.pow(2).mean() * 0.1).backward(retain_graph=index % 2 == 0)
        optimizer.step()
        yield logits.sum()


def goes_backward_in_another_order(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        optimizer.zero_grad()
        losses = [cross_entropy(model(x * factor), y) for factor in (1, 2, 3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        optimizer.step()
        yield sum(map(number, losses))


def penalizes_gradients(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Goes backward through a backward pass, at first seldom."""
    for index, x, y in batches(16):
        optimizer.zero_grad()
        x.requires_grad_(index % 5 == 4 or index > 11)
        loss = cross_entropy(model(x), y)
        if x.requires_grad:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + grad.pow(2).sum()
        loss.backward()
        optimizer.step()
        yield loss


def attacks_its_input(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        x.requires_grad_()
        (grad,) = torch.autograd.grad(cross_entropy(model(x), y), x)
        x = (x + 0.1 * grad.sign()).detach()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def sharpens(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """SAM: moves the weights between two passes, and back."""
    for _, x, y in batches():
        cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [(p, 0.05 * p.grad) for p in model.parameters() if p.grad is not None]
            for param, move in moves:
                param.add_(move)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for param, move in moves:
                param.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def casts(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def casts_twice(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """In one autocast, which adds gradients up in bfloat16."""
    for _, x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y) + cross_entropy(model(-x), y)
        loss.backward()
        optimizer.step()
        yield loss


def scales(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    for index, x, y in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y) * (float("inf") if index == 5 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


def freezes(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches(24):
        model.embed.weight.requires_grad_(index // 6 % 2 == 0)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def anneals(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches(24):
        model.scale = 1.0 if index < 8 else 0.5
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def anneals_all_the_time(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches(30):
        model.scale = 1 / (1 + index)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def loads(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for index, x, y in batches(16):
        if index == 8:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        if index == 12:
            model.head.weight.data = torch.ones(4, 16)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def replaces_a_layer(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches(16):
        if index == 8:
            model.head = nn.Linear(16, 4)
            optimizer.add_param_group({"params": model.head.parameters()})
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def trains_in_eval_mode(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches(16):
        model.train(index % 8 < 4)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def has_other_shapes(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index in range(24):
        size = 8 if index % 4 else 5
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.randn(size, 6)), torch.arange(size) % 4)
        loss.backward()
        optimizer.step()
        yield loss


def writes_into_results(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():
        optimizer.zero_grad()
        logits = model(x)
        logits[:, 0] = 0
        logits += 1
        loss = cross_entropy(logits.exp_(), y)
        loss.backward()
        optimizer.step()
        yield loss


def averages(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    average = copy.deepcopy(model)
    for _, x, y in batches():
        optimizer.zero_grad()
        loss = mse_loss(model(x), average(x).detach()) + cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)
        yield loss


def steps_in_hooks(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.01)  # type: ignore[arg-type]
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _, x, y in batches():
        loss = cross_entropy(model(x), y)
        loss.backward()
        yield loss


def steps_with_a_closure(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for _, x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        yield optimizer.step(closure)  # type: ignore[arg-type]


def recomputes(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches():
        optimizer.zero_grad()
        x.requires_grad_()
        loss = cross_entropy(checkpoint(model, x, use_reentrant=index % 2 == 0), y)
        loss.backward()
        optimizer.step()
        yield loss


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
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss
    for logits in kept:
        yield logits.sum()


def fails_now_and_then(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for index, x, y in batches(16):
        if index % 5 == 1:
            with suppress(RuntimeError):
                model(x[:, :3])
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss


LOOPS = [
    *(looks_at_everything, accumulates, calls_twice, goes_backward_twice),
    *(goes_backward_in_another_order, penalizes_gradients, attacks_its_input, sharpens, casts),
    *(casts_twice, scales, freezes, anneals, anneals_all_the_time, loads, replaces_a_layer),
    *(trains_in_eval_mode, has_other_shapes, writes_into_results, averages, steps_in_hooks),
    *(steps_with_a_closure, recomputes, transforms, leaves_calls_alone, fails_now_and_then),
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_trains_as_without_it(loop: Loop) -> None:
    check(loop)


REPLAYED = [
    *(looks_at_everything, accumulates, calls_twice, goes_backward_twice),
    *(goes_backward_in_another_order, penalizes_gradients, sharpens, casts, scales),
    *(freezes, anneals, loads, has_other_shapes, writes_into_results, steps_with_a_closure),
]


@pytest.mark.parametrize("loop", REPLAYED, ids=lambda loop: loop.__name__)
def test_calls_are_replayed(loop: Loop) -> None:
    _, _, parts = run(loop, True)
    assert parts is not None
    assert replays(parts) >= 4
    assert states(parts)["model"] == "captured"


def test_a_cell_that_is_run_again_takes_the_place_of_the_one_before() -> None:
    model = make_net()
    optimizer = make_adam(model)
    first = graphfsdp.capture_in_place(model, optimizer, keep="all")
    second = graphfsdp.capture_in_place(model, optimizer, keep="all")
    assert first.phase is graphfsdp.Phase.CLOSED
    list(trains(model, optimizer))
    assert replays(second) >= 4
    second.close()
    second.close()
    assert "step" not in vars(optimizer)
    assert "_compiled_call_impl" not in {k for k, v in vars(model).items() if v is not None}
    list(trains(model, optimizer))


def test_gradients_of_a_second_backward_pass_are_refused_as_ever() -> None:
    model = make_net()
    optimizer = make_adam(model)
    graphfsdp.capture_in_place(model, optimizer, keep="all")
    for _, x, y in batches(6):
        loss = cross_entropy(model(x), y)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("call", range(6))
def test_ctrl_c_in_a_call_leaves_everything_as_it_was(call: int) -> None:
    class Interrupted(Net):
        is_pressed = False

        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            if type(self).is_pressed:
                raise KeyboardInterrupt
            return logits

    torch.manual_seed(0)
    model = Interrupted()
    optimizer = make_adam(model)
    parts = graphfsdp.capture_in_place(model, optimizer, keep="all")
    for index, x, y in batches(12):
        if index == call:
            weights = [param.detach().clone() for param in model.parameters()]
            Interrupted.is_pressed = True
            with pytest.raises(KeyboardInterrupt):
                model(x)
            Interrupted.is_pressed = False
            after = list(model.parameters())
            assert all(torch.equal(one, two) for one, two in zip(weights, after, strict=True))
            assert vars(model)["scale"] == 1.0
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    parts.close()


def test_other_kinds_of_calls_run_as_written_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphfsdp.in_place.module_part.room_on", lambda device: 4096)
    parts = check(has_other_shapes)
    found = replays(parts)
    monkeypatch.undo()
    assert 0 < found < replays(check(has_other_shapes))


def test_arguments_are_refused_with_a_way_out() -> None:
    model = make_net()
    optimizer = make_adam(model)
    with pytest.raises(graphfsdp.ConfigError, match="keep must be"):
        graphfsdp.capture_in_place(model, optimizer, keep="some")
    with pytest.raises(graphfsdp.ConfigError, match="Remedy"):
        graphfsdp.capture_in_place(model, optimizer, warmup_steps=3)
    with pytest.raises(graphfsdp.ConfigError, match=r"must be a torch\.optim\.Optimizer"):
        graphfsdp.capture_in_place(model, 3)  # type: ignore[arg-type]


def test_parts_that_do_not_pay_are_given_up_and_cost_nothing() -> None:
    def trains_long(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for _, x, y in batches(60):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss

    parts = check(trains_long, keep="pays")
    assert parts.phase in (graphfsdp.Phase.REPLAY, graphfsdp.Phase.EAGER)
    (line,) = (part for part in parts.report().parts if part.name == "model")
    assert line.state in ("captured", "as written")
    assert line.why == "" if line.state == "captured" else line.why.startswith("it does not pay")

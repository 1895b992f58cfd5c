"""`capture_in_place`: what looks at tensors before the step has the plain loop's, or an error."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy
from torch.overrides import _get_current_function_mode
from torch.utils.hooks import RemovableHandle

import graphfsdp
from graphfsdp.in_place.loop import InPlace

Loop = Callable[[Any, torch.optim.Optimizer], list[Any]]
NUM_STEPS = 9


class Net(nn.Module):
    """Keeps two of the tensors that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.1)
        self.kept: list[Tensor] = []
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x).relu())
        self.mean = hidden.detach().mean()
        self.kept[:] = [hidden.detach().amax()]
        out: Tensor = self.last(hidden)
        return out


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int = NUM_STEPS) -> Iterator[tuple[int, Tensor, Tensor]]:
    for index in range(count):
        yield index, torch.randn(8, 4), torch.randint(3, (8,))


def train(loop: Loop, captured: bool) -> list[Tensor]:
    """Return what the loop does, then the weights."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make_adam(model)
    torch.manual_seed(7)
    found = graphfsdp.capture_in_place(model, optimizer, whole=True) if captured else None
    with found or nullcontext():
        results = loop(model, optimizer)
        if found is not None:
            assert found.phase is graphfsdp.Phase.REPLAY
    return [torch.as_tensor(each).clone() for each in [*results, *model.state_dict().values()]]


def looks_at_weights(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Views of weights go on looking at them, in later iterations as well."""
    found: list[Any] = []
    for index, x, y in batches():
        loss = cross_entropy(model(x), y)
        weight = model.first.weight
        looks = [weight.detach(), weight.data[1], weight.view(-1), *model.state_dict().values()]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), *(look.sum().item() for look in looks)]
        if index == 5:
            kept = looks
    return found + kept


def copies_before_the_step(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for _, x, y in batches():
        logits = model(x)
        optimizer.zero_grad()
        cross_entropy(logits, y).backward()
        found.append(copy.deepcopy(logits.detach()))
        found += copy.deepcopy(model.state_dict()).values()
        optimizer.step()
    return found


def goes_another_way_without_gradients(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for index, x, y in batches(18):
        logits = model(x)
        loss = cross_entropy(logits, y)
        with torch.no_grad() if index < 9 else torch.inference_mode():
            if index % 9 == 6:
                found.append(logits.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def with_gradients_kept(
    zero: Callable[[nn.Module, torch.optim.Optimizer], Any], *, within: bool
) -> Loop:
    def loop(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
        found: list[Any] = []
        kept: list[Tensor | None] = []
        for _, x, y in batches():
            loss = cross_entropy(model(x), y)
            if within:
                zero(model, optimizer)
            loss.backward()
            optimizer.step()
            kept += [param.grad for param in model.parameters()]
            found += [grad.clone() for grad in kept if grad is not None]
            if not within:
                zero(model, optimizer)
            found += [grad.clone() for grad in kept if grad is not None]
        return found

    return loop


def takes_off(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


LOOPS: dict[str, Loop] = {
    "views of weights": looks_at_weights,
    "copies": copies_before_the_step,
    "another way": goes_another_way_without_gradients,
    "gradients": with_gradients_kept(lambda _, o: o.zero_grad(), within=False),
    "gradients, within": with_gradients_kept(lambda _, o: o.zero_grad(), within=True),
    "gradients, by the model": with_gradients_kept(lambda m, _: m.zero_grad(), within=True),
    "gradients, by hand": with_gradients_kept(takes_off, within=False),
    "gradients, left on": with_gradients_kept(
        lambda _, o: o.zero_grad(set_to_none=False), within=False
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_kept_is_what_the_plain_loop_keeps(name: str) -> None:
    plain, captured = (train(LOOPS[name], flag) for flag in (False, True))
    assert len(plain) == len(captured)
    assert all(map(torch.equal, plain, captured))


def between(do: Callable[[Net, Tensor, Tensor], Any], since: int = 0) -> Loop:
    """Return a loop that does something between the model's call and the step."""

    def loop(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
        for index, x, y in batches():
            logits = model(x)
            loss = cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            if index >= since:
                do(model, x, logits.detach())
            optimizer.step()
        return []

    return loop


def reads_what_set_gives(model: Net, x: Tensor, logits: Tensor) -> None:
    held = torch.zeros(())
    held.set_(logits.sum())  # type: ignore[call-overload]
    float(held)


def writes_memory_of_numpy(model: Net, x: Tensor, logits: Tensor) -> None:
    torch.from_numpy(np.zeros(3, dtype=np.float32)).add_(logits[0])


def looks_at_weights_of_before(within: Callable[[Tensor], Any]) -> Loop:
    def loop(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
        looks = [param.data for param in model.parameters()]
        return between(lambda *_: [within(look) for look in looks])(model, optimizer)

    return loop


def looks_at_gradients_of_before(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    grads: list[Any] = []
    for _, x, y in batches():
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(model(x), y).backward()
        grads = grads or [param.grad for param in model.parameters()]
        for grad in grads:
            grad.mul_(0.5)
        optimizer.step()
    return []


def looks_later_at_a_sum(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    total = torch.zeros(2)
    look = None
    for index, x, y in batches():
        look = total[:1] if index == 6 else look
        loss = cross_entropy(model(x), y)
        total.add_(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return []


HELD = torch.zeros(())
OTHER_MEMORY = r"data.__set__ gives a tensor of shape \(.*\) other memory between"
NOT_THERE = "is given a tensor that is not there before the optimizer's step"
BEFORE = "was made before the model's call and looks at a weight or gradient"
REFUSED: dict[str, tuple[Loop, str]] = {
    ".data =": (between(lambda _, x, out: setattr(HELD, "data", out.sum())), OTHER_MEMORY),
    "vector_to_parameters": (
        between(
            lambda _, x, out: nn.utils.vector_to_parameters(
                out.flatten(), [torch.zeros(8), torch.zeros(16)]
            )
        ),
        OTHER_MEMORY,
    ),
    "set_": (between(reads_what_set_gives), NOT_THERE),
    "an attribute": (
        between(lambda _, x, out: setattr(torch.zeros(()), "grad", out.sum())),
        "grad.__set__ writes an attribute of a tensor from outside",
    ),
    "statistics": (
        between(lambda _, x, out: batch_norm(out, torch.zeros(3), torch.ones(3), training=True)),
        r"batch_norm writes a tensor of shape \(3,\) .* without torch's count of writes",
    ),
    "a write that nobody counts": (
        between(lambda _, x, out: x.data.mul_(2.0)),
        r"of shape \(8, 4\) from outside of the iteration was written by mul_ between",
    ),
    "memory of NumPy": (
        between(writes_memory_of_numpy),
        r"of shape \(3,\) from outside of the iteration was written by add_ between",
    ),
    "a sum that is looked at": (
        looks_later_at_a_sum,
        r"of shape \(2,\) from outside of the iteration was written",
    ),
    "functorch": (between(lambda _, x, out: torch.func.vmap(torch.sin)(out)), NOT_THERE),
    "functorch, later": (
        between(lambda _, x, out: torch.func.vmap(torch.sin)(out), since=6),
        NOT_THERE,
    ),
    "kept by a module": (between(lambda model, x, out: model.mean * 2), NOT_THERE),
    "kept in a list": (between(lambda model, x, out: model.kept[0] * 2), NOT_THERE),
    "a weight of before, written": (looks_at_weights_of_before(lambda w: w.clamp_(-1, 1)), BEFORE),
    "a weight of before, read": (looks_at_weights_of_before(torch.sum), BEFORE),
    "a weight of before, given": (
        lambda model, optimizer: between(
            lambda _, x, out, look=model.last.bias.data: out + look  # type: ignore[misc]
        )(model, optimizer),
        BEFORE,
    ),
    "a gradient of before": (looks_at_gradients_of_before, BEFORE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_see_other_numbers_is_refused(name: str) -> None:
    loop, message = REFUSED[name]
    train_plainly = train(loop, captured=False) if name != "functorch, later" else []
    assert all(t.isfinite().all() for t in train_plainly)
    with pytest.raises(graphfsdp.CaptureError, match=message) as caught:
        train(loop, captured=True)
    assert f"source: {__file__}" in str(caught.value)


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_what_is_not_there_has_no_memory_to_read() -> None:
    errors: list[BaseException] = []
    devices = []

    def reads(logits: Tensor) -> None:
        try:
            logits.sum().item()
        except RuntimeError as error:
            errors.append(error)

    def reads_in_a_thread(model: Net, x: Tensor, logits: Tensor) -> None:
        devices.append(logits.device)
        assert logits.is_cpu
        assert not logits.is_meta
        thread = threading.Thread(target=reads, args=(logits,))
        thread.start()
        thread.join()

    train(between(reads_in_a_thread), captured=True)
    assert len(errors) == NUM_STEPS - 1  # all but the first iteration, which runs as written
    assert set(devices) == {torch.device("cpu")}
    scripted = torch.jit.script(doubled)
    with pytest.raises(RuntimeError, match=NOT_THERE):  # TorchScript makes its own of an error
        train(between(lambda _, x, out: scripted(out)), captured=True)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def loads_other_tensors(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = copy.deepcopy(model.state_dict())
    for index, x, y in batches():
        if index == 5:
            model.load_state_dict(states, assign=True)
        iterate(model, optimizer, x, y)
    return []


def reads_behind_the_loop(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    for _, x, y in batches():
        iterate(model, optimizer, x, y)
    return [model(x).sum().item()]


class Twice(torch.optim.SGD):
    """Calls its closure where it likes."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


def steps_with_a_closure(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    other = Net()
    mine = Twice(other.parameters(), lr=0.1)
    with graphfsdp.capture_in_place(other, mine, whole=True):
        mine.step(lambda: other(torch.ones(2, 4)).sum())
    return []


def wants_gradients_of_inputs(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    for _, x, y in batches():
        iterate(model, optimizer, x.requires_grad_(), y)
    return []


def keeps_a_loss(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    for _, x, y in batches():
        (cross_entropy(model(x), y) + model.mean).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def has_sparse_gradients(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    other = nn.Embedding(4, 2, sparse=True)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    with graphfsdp.capture_in_place(other, sgd, whole=True):
        for _ in range(3):
            sgd.zero_grad()
            other(torch.arange(3)).sum().backward()
            sgd.step()
    return []


def has_new_shapes(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    for index in range(12):
        optimizer.zero_grad()
        model(torch.randn(1 + index, 4)).mean().backward()
        optimizer.step()
    return []


REMEDIES: dict[str, tuple[Loop, type[Exception], str]] = {
    "load_state_dict(assign=True)": (
        loads_other_tensors,
        graphfsdp.CaptureError,
        "Remedy: load_state_dict without assign",
    ),
    "behind the loop": (
        reads_behind_the_loop,
        graphfsdp.CaptureError,
        r"was given, as behind the loop, call the model under torch.no_grad\(\)",
    ),
    "a closure": (
        steps_with_a_closure,
        graphfsdp.ConfigError,
        r"Remedy: loss = closure\(\) and optimizer.step\(\)",
    ),
    "sparse gradients": (
        has_sparse_gradients,
        graphfsdp.CaptureError,
        r"of 'weight' has layout torch.sparse_coo.*Remedy: .*sparse=False",
    ),
    "new shapes": (
        has_new_shapes,
        graphfsdp.CaptureError,
        r"\(with a tensor of shape \(9, 4\) and \(8, 4\)\).*pad batches to a few shapes",
    ),
    "gradients of inputs": (
        wants_gradients_of_inputs,
        graphfsdp.CaptureError,
        r"requires a gradient.* Remedy: detach\(\) it .*x = x.detach\(\).requires_grad_\(\)",
    ),
    "a loss that a module keeps": (
        keeps_a_loss,
        graphfsdp.CaptureError,
        "a module has kept it.* Remedy: return it from the forward",
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_an_error_names_the_way_out(name: str) -> None:
    loop, kind, message = REMEDIES[name]
    with pytest.raises(kind, match=message):
        train(loop, captured=True)


def test_one_of_two_optimizers_is_not_the_step() -> None:
    model = Net()
    halves = [model.first, model.last]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    with graphfsdp.capture_in_place(model, optimizers, whole=True):
        loss = model(torch.ones(8, 4)).mean()
        loss.backward()
        optimizers[0].step()
        with pytest.raises(graphfsdp.CaptureError, match="behind the step of the last optimizer"):
            loss.item()


def head_only(looks_since: int, *, captured: bool) -> list[Any]:
    """Train the head; gradients of the body, which is not frozen, add up."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.5)
    torch.manual_seed(7)
    found = []
    pair = model, optimizer
    with graphfsdp.capture_in_place(*pair, whole=True) if captured else nullcontext() as loop:
        for index, x, y in batches(12):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if index >= looks_since:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            found += [param.detach().clone() for param in model.parameters()]
        assert loop is None or loop.phase is graphfsdp.Phase.REPLAY
    return found


def test_gradients_of_what_is_not_trained_may_run_on_where_nobody_looks() -> None:
    plain, captured = (head_only(12, captured=flag) for flag in (False, True))
    assert all(map(torch.equal, plain, captured))
    with pytest.raises(graphfsdp.CaptureError, match="gradients were not zeroed"):
        head_only(0, captured=True)
    with pytest.raises(graphfsdp.CaptureError, match=r"replays have not added to it\. Remedy"):
        head_only(8, captured=True)


def steps_one_half_less_often(*, captured: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    halves = [model.first, model.last]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    with graphfsdp.capture_in_place(model, optimizers, whole=True) if captured else nullcontext():
        for index in range(2 * NUM_STEPS + 1):
            model.zero_grad()
            model(torch.ones(8, 4) * index).square().mean().backward()
            optimizers[0].step()
            if index % 2:
                optimizers[1].step()
    return [param.detach() for param in model.parameters()]


def test_what_no_last_step_has_come_for_runs_when_the_loop_is_closed() -> None:
    plain, captured = (steps_one_half_less_often(captured=flag) for flag in (False, True))
    assert all(map(torch.equal, plain, captured))


LEFT_BY: dict[str, Callable[[Tensor], object]] = {
    "an error of Python": lambda _: 1 / 0,
    "an error of torch": lambda loss: loss @ loss,
    "a refusal": lambda loss: loss.item(),
}


@pytest.mark.parametrize("name", LEFT_BY)
def test_a_loop_that_an_error_has_left_is_over_when_the_next_one_begins(name: str) -> None:
    """As in a notebook, where nobody holds the first one to close it."""

    def train(fails_at: int) -> tuple[InPlace, list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = graphfsdp.capture_in_place(model, optimizer, whole=True)
        losses = []
        for index in range(10):
            loss = model(torch.randn(8, 4)).square().mean()
            if index == fails_at:
                LEFT_BY[name](loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return loop, losses

    kept = []
    for fails_at in (1, 6):
        try:
            train(fails_at)
        except (ZeroDivisionError, RuntimeError, graphfsdp.CaptureError) as error:
            kept.append(error)  # and with it all that the loop has made
    loop, losses = train(10)
    assert (len(kept), len(losses)) == (2, 10)
    assert "replay" in str(loop.report())
    loop.close()
    assert _get_current_function_mode() is None


def test_iterations_register_no_hooks() -> None:
    """Each new one, wherever it is, has the guards of all steps look closely at the next replay."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = set()
    with graphfsdp.capture_in_place(model, optimizer, whole=True) as loop:
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            numbers |= {RemovableHandle.next_id} if loop.phase is graphfsdp.Phase.REPLAY else set()
    assert len(numbers) == 1


def test_a_loop_within_another_one_is_refused() -> None:
    models = [Net(), nn.Linear(3, 1)]
    loops = [graphfsdp.capture_in_place(model, make_adam(model), whole=True) for model in models]
    with loops[0], loops[1], pytest.raises(graphfsdp.ConfigError, match="with all of them"):
        models[1](models[0](torch.ones(8, 4)))


def fetches_between(device: torch.device, captured: bool) -> list[float]:
    """Train as nanoGPT does, which fetches the next batch while the GPU is busy."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    losses = []
    with graphfsdp.capture_in_place(model, optimizer, whole=True) if captured else nullcontext():
        for _ in range(NUM_STEPS):
            loss = cross_entropy(model(x.to(device)), y.to(device))
            x, y = torch.randn(8, 4), torch.randint(3, (8,))  # the next one
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_batch_that_is_fetched_between_is_named_by_its_line(device: torch.device) -> None:
    if device.type == "cuda":  # the batch's generator is not that of dropout
        assert fetches_between(device, captured=True) == fetches_between(device, captured=False)
        return
    with pytest.raises(graphfsdp.CaptureError, match="fetch the next batch there") as caught:
        fetches_between(device, captured=True)
    assert caught.value.source is not None
    assert caught.value.source.text.endswith("# the next one")


def test_a_scaler_that_decides_on_the_host_is_refused() -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with graphfsdp.capture_in_place(model, optimizer, whole=True):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        with pytest.raises(graphfsdp.CaptureError, match="bfloat16"):
            scaler.step(optimizer)


def test_another_optimizer_than_it_was_given_is_refused() -> None:
    """With which no iteration would end, and each would keep what it has made."""
    model = Net()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphfsdp.capture_in_place(model, make_adam(model), whole=True):
        for _, x, y in batches(1):
            cross_entropy(model(x), y).backward()
            with pytest.raises(graphfsdp.CaptureError, match="SGD steps weights of a model"):
                other.step()
    assert _get_current_function_mode() is None
    other.step()

"""Which modules of a loop become parts, and what runs as it is written."""

import io
import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parts_helpers import (
    Net,
    batches,
    check,
    iterates,
    make_net,
    replays,
    states,
    trains,
    trains_by,
)

START = time.monotonic()
LINES = io.StringIO("1\n" * 1000)
LOGGER = logging.getLogger("a user's")
LOGGER.setLevel(logging.INFO)
LOGGED = io.StringIO()
LOGGER.addHandler(logging.StreamHandler(LOGGED))
SWITCH = Path(__file__).with_name("nobody has this")


class Around(nn.Module):
    """Something that no graph can hold, or take back, around a net that one can."""

    num_calls = 0

    def __init__(self, what: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        type(self).num_calls = 0
        self.net = make_net()
        self.what = what
        self.kept: Any = None
        self.count = 0
        self.seen: list[Tensor] = []
        self.numbers = itertools.count()
        self.made = (number for number in range(1000))
        self.lines = io.StringIO("\n".join(map(str, range(1000))))
        self.drawn = np.random.default_rng(3)
        self.recent = OrderedDict.fromkeys(range(4))
        self.told: list[Any] = []
        self.held = SimpleNamespace(state=torch.zeros(8, 4))
        self.printed = io.StringIO()
        self.queue: SimpleQueue[Tensor] = SimpleQueue()

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x)


def returns_an_object(logits: Tensor) -> Any:
    class Output:
        def __getitem__(self, index: int) -> Tensor:
            return logits

    return Output()


def counts(module: Any, x: Tensor) -> Any:
    module.count += 1
    return module.net(x) * module.count


def keeps(module: Any, x: Tensor) -> Any:
    module.kept = module.net(x)
    return module.kept


def appends(module: Any, x: Tensor) -> Any:
    module.seen.append(module.net(x))
    return module.seen[-1]


def writes_its_input(module: Any, x: Tensor) -> Any:
    x += 1
    return module.net(x)


def opens_a_file(module: Any, x: Tensor) -> Any:
    with open(__file__) as file:
        return module.net(x) * (0.5 if file.readline() == "" else 1.0)


def of_net(what: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Return a forward that makes its result of the logits alone."""
    return lambda module, x: what(module.net(x))


AS_WRITTEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "a read": of_net(lambda logits: logits if logits.sum().item() > 0 else logits * 0.5),
    "a count": counts,
    "a result that is kept": keeps,
    "a list that grows": appends,
    "its input": lambda module, x: (module.net(x), x),
    "an input that is written": writes_its_input,
    "two looks": of_net(lambda logits: (logits[:, :4], logits[:, 2:])),
    "an object": of_net(returns_an_object),
    "the time": of_net(lambda logits: logits if time.monotonic() < START + 1e6 else logits * 0),
    "whether a file is there": of_net(
        lambda logits: logits * (0.5 if os.path.exists(SWITCH) else 1.0)
    ),
    "a file that is opened": opens_a_file,
    "a file that is read on": of_net(
        lambda logits: logits * (0.5 if LINES.readline() == "" else 1.0)
    ),
}


@pytest.mark.parametrize(
    ("what", "device"),
    [
        *((what, "cpu") for what in AS_WRITTEN),
        pytest.param("a read", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_what_no_graph_can_hold_runs_as_written_and_the_net_in_it_is_captured(
    what: str, device: str
) -> None:
    parts = check(trains, lambda: Around(AS_WRITTEN[what]), device=device)
    assert states(parts)["model"] == "as written"
    assert states(parts)["model.net"] == "captured"
    (why,) = (part.why for part in parts.report().parts if part.name == "model")
    assert why
    assert f"Around: as written. {why}" in str(parts.report())
    parts.close()
    assert states(check(trains, device=device))["model"] == "captured"


def prints(module: Any, x: Tensor) -> Any:
    print(len(x), file=module.printed)
    return module.net(x)


def writes(module: Any, x: Tensor) -> Any:
    module.printed.write("x")
    return module.net(x)


def logs(module: Any, x: Tensor) -> Any:
    LOGGER.info("%d rows", len(x))
    return module.net(x)


def puts_into_a_queue(module: Any, x: Tensor) -> Any:
    logits = module.net(x)
    module.queue.put(logits.detach())
    return logits


def advances_an_iterator(module: Any, x: Tensor) -> Any:
    module.told.append(next(module.numbers))
    return module.net(x)


def counts_in_its_class(module: Any, x: Tensor) -> Any:
    Around.num_calls += 1
    return module.net(x)


def turns_its_keys_over(module: Any, x: Tensor) -> Any:
    key, _ = module.recent.popitem(last=False)
    module.recent[key] = module.recent[next(iter(module.recent))] = key
    return module.net(x)


def hooks_its_weight(module: Any, x: Tensor) -> Any:
    module.net.head.weight.register_hook(lambda grad: grad * 0.9)
    return module.net(x)


def gives_an_object_another_tensor(module: Any, x: Tensor) -> Any:
    module.held.state = module.net(x + module.held.state[:, :1])
    return module.held.state * 2


def hooks_its_input(module: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    logits: Tensor = module.net(x) + x[:, :4]
    return logits


def keeps_the_gradient_of_its_input(module: Any, x: Tensor) -> Any:
    x.retain_grad()
    return module.net(x)


def keeps_the_gradient_of_its_result(module: Any, x: Tensor) -> Any:
    logits = module.net(x)
    logits.retain_grad()
    return logits


def marks(module: Any, x: Tensor, *, result: bool) -> Any:
    logits = module.net(x)
    vars(logits if result else x)["factor"] = 2.0
    return logits


# In Python, or on tensors.
DONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "a line that is printed": prints,
    "a line that is written": writes,
    "a line that is logged": logs,
    "a queue": puts_into_a_queue,
    "another tensor of an object": gives_an_object_another_tensor,
    "a hook of a weight": hooks_its_weight,
    "an iterator": advances_an_iterator,
    "a generator": lambda module, x: module.net(x) * next(module.made),
    "a file": lambda module, x: (module.net(x), int(module.lines.readline())),
    "a count in a class": counts_in_its_class,
    "a generator of random numbers": lambda module, x: module.net(x) * float(module.drawn.random()),
    "the order of keys": turns_its_keys_over,
    "a hook of its input": hooks_its_input,
    "the gradient of its input": keeps_the_gradient_of_its_input,
    "the gradient of its result": keeps_the_gradient_of_its_result,
    "a mark of its input": partial(marks, result=False),
    "a mark of its result": partial(marks, result=True),
}


@pytest.mark.parametrize("what", DONE)
def test_what_a_call_does_beside_its_result_is_done_once_and_found(what: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        LOGGED.seek(0)
        first = torch.ones(6, requires_grad=True)
        for _, x, y in batches():
            optimizer.zero_grad()
            given = x * first
            output = model(given)
            logits, number = output if isinstance(output, tuple) else (output, 0)
            factor = getattr(given, "factor", 1.0) * getattr(logits, "factor", 1.0)
            loss = cross_entropy(logits * factor, y)
            loss.backward()
            optimizer.step()
            model.held.state = model.held.state.detach()
            yield from (loss, first.grad, number, Around.num_calls, list(model.recent))
            yield len(model.told) and model.told[-1]
            yield from (model.printed.tell(), LOGGED.tell())
            yield model.queue.qsize() and model.queue.get_nowait()
            for kept in (given, logits):
                yield kept.grad if kept.retains_grad else 0

    parts = check(loop, lambda: Around(DONE[what]))
    assert states(parts)["model.net"] == "captured"


def test_a_dict_of_tensors_and_numbers_is_made_anew() -> None:
    class Many(Net):
        def forward(self, x: Tensor) -> Any:
            logits = super().forward(x)
            return {"logits": (logits, 3), "none": None, "index": logits.argmax(1), "unused": x * 2}

    def loss_of(model: Any, _: int, x: Tensor, y: Tensor) -> Any:
        output = model(x)
        assert output["none"] is None
        assert output["logits"][1] == 3
        assert not output["index"].requires_grad
        return cross_entropy(output["logits"][0], y) + output["index"].sum()

    assert replays(check(trains_by(loss_of), Many)) >= 4


def test_the_net_in_what_is_given_objects_is_captured() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, batch: Any) -> Any:
            return self.net(batch.x)

    def loss_of(model: Any, _: int, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(SimpleNamespace(x=x)), y)

    parts = check(trains_by(loss_of, 48), Wrapped)
    (line, net, _) = parts.report().parts
    assert line.why == "it is given a SimpleNamespace, which no graph can be given"
    assert (net.name, net.state) == ("model.net", "captured")
    assert net.num_replays >= 10


@pytest.mark.parametrize("way", ["an attribute", "a buffer"])
def test_what_comes_with_an_input_is_seen(way: str) -> None:
    class Queue(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.ones(6, 4))

        def forward(self, x: Tensor, queue: Tensor | None = None) -> Tensor:
            logits = super().forward(x)
            with torch.no_grad():
                self.get_buffer("queue")[:1].copy_(logits[:1])
            logits = logits * getattr(x, "factor", 1.0)
            return logits if queue is None else logits + queue.mean(0)

    def loss_of(model: Any, index: int, x: Any, y: Tensor) -> Tensor:
        if way == "an attribute" and index > 6:
            x.factor = 0.5
        return cross_entropy(model(x, model.queue) if way == "a buffer" else model(x), y)

    check(trains_by(loss_of), Queue)


def test_hooks_of_weights_run_in_the_order_of_the_backward_pass() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        ran: list[str] = []
        for index, x, y in batches(20):
            if index == 8:
                for name, param in model.named_parameters():
                    param.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
            yield iterates(model, optimizer, x, y)
            yield list(map(hash, ran[-5:]))

    check(loop)


@pytest.mark.parametrize("way", ["a slice", "twice", "expanded"])
def test_what_lies_anywhere_or_is_given_twice_may_be_an_input(way: str) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 8)
            self.mix = nn.Linear(8, 8)
            self.drop = nn.Dropout(0.1)

        def forward(self, ids: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
            hidden = self.drop(torch.tanh(self.mix(self.embed(ids)))) * scale
            return cross_entropy((hidden @ self.embed.weight.t()).flatten(0, 1), labels.flatten())

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for index in range(12):
            ids = torch.randint(7, (3, 6))
            scale = torch.full(
                (3, 5 if way == "a slice" else 6, 1), 1.0 + index, requires_grad=True
            )
            if way == "expanded":
                scale = scale.detach()[:, :1].expand(3, 6, 8)
            optimizer.zero_grad()
            pair = (ids[:, :-1], ids[:, 1:]) if way == "a slice" else (ids, ids)
            loss = model(*pair, scale)
            loss.backward()
            optimizer.step()
            yield loss
            yield 0.0 if scale.grad is None else scale.grad.sum()

    found = replays(check(loop, Language))
    assert found == 0 if way == "expanded" else found >= 8


def test_a_method_of_the_loop_has_the_modules_in_it_captured() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for _, x, y in batches():
            yield iterates(model.act, optimizer, x, y)

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def act(self, x: Tensor) -> Any:
            return self.net(x)

    assert states(check(loop, Agent))["model.net"] == "captured"

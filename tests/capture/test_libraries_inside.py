"""Libraries inside an iteration: what is refused names the way out, and that way out trains.

Hugging Face models with the masks of two dimensions that every fine-tuning script passes; models
and optimizers whose tables, lists or hooks are not as torch's own classes have them.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional
from torch.optim import swa_utils

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import (
    Batch,
    Case,
    assert_same_run,
    assert_same_state,
    run,
    run_as_eager,
    same_bits,
    snapshot,
)
from iterations import steps_once
from parts_helpers import check
from zoo import features

NUM_STEPS = 9
Update = Callable[[], object]
Average = Callable[[nn.Module], tuple[nn.Module, Update]]


def of_torch(**options: Any) -> Average:
    def make(model: nn.Module) -> tuple[nn.Module, Update]:
        average = swa_utils.AveragedModel(model, **options)
        return average, lambda: average.update_parameters(model)

    return make


def of_ema_pytorch(model: nn.Module) -> tuple[nn.Module, Update]:
    library = pytest.importorskip("ema_pytorch")
    average: Any = library.EMA(model, beta=0.9, update_after_step=2, update_every=2)
    return average, average.update


def train_averaged(make: Average, where: str) -> list[Tensor]:
    """Update the average in the captured iteration, behind each call, or without a capture."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average, update = make(model)

    iteration = steps_once(behind=update) if where == "inside" else steps_once()
    scope = "none" if where == "plain" else "full_iteration"
    with graphfsdp.capture(model, optimizer, iteration=iteration, scope=scope) as step:
        losses = []
        for _ in range(NUM_STEPS):
            losses.append(step(torch.randn(6, 4)))
            if where != "inside":
                update()
    return [*losses, *(tensor.clone() for tensor in average.state_dict().values())]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    ],
    ids=["mean of all", "moving, with buffers", "one by one"],
)
@pytest.mark.parametrize("where", ["inside", "behind"])
def test_torch_averages_weights_inside_and_behind(options: dict[str, Any], where: str) -> None:
    expected, got = (train_averaged(of_torch(**options), each) for each in ("plain", where))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_an_average_that_is_set_back_begins_anew(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halves = swa_utils.get_ema_multi_avg_fn(0.5)
    average = swa_utils.AveragedModel(model, device=device, multi_avg_fn=halves)

    iteration = steps_once(behind=lambda: average.update_parameters(model))
    with graphfsdp.capture(model, optimizer, iteration=iteration) as step:
        for index in range(12):
            before = [param.detach().clone() for param in average.module.parameters()]
            if index == 8:
                assert step.phase is graphfsdp.Phase.REPLAY
                average.n_averaged.zero_()
                before[0].fill_(torch.nan)  # what is not taken may be anything
                next(iter(average.module.parameters())).data.fill_(torch.nan)
            step(torch.randn(3, 4, device=device))
            is_first = index in (0, 8)
            means = average.module.parameters()
            for mean, old, new in zip(means, before, model.parameters(), strict=True):
                assert torch.equal(mean, new if is_first else torch.lerp(old, new, 0.5))
    assert swa_utils.AveragedModel.update_parameters.__module__ == swa_utils.__name__


def test_ema_pytorch_is_updated_behind_the_call() -> None:
    with pytest.raises(graphfsdp.CaptureError, match=r"ema.update\(\) after each call") as caught:
        train_averaged(of_ema_pytorch, "inside")
    assert caught.value.source is not None
    expected, got = (train_averaged(of_ema_pytorch, where) for where in ("plain", "behind"))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def categorical(validate: bool | None, logits: Tensor) -> Tensor:
    actions = torch.zeros(len(logits), dtype=torch.long)
    found: Tensor = Categorical(logits=logits, validate_args=validate).log_prob(actions)
    return found


def gaussian(validate: bool | None, mean: Tensor) -> Tensor:
    policy = Normal(mean, mean.exp(), validate_args=validate)
    whole = Independent(policy, 1, validate_args=validate)
    found: Tensor = whole.log_prob(torch.zeros_like(mean))
    return found


def phase_of(model: nn.Module, loss_fn: Callable[..., Tensor], *shape: int) -> graphfsdp.Phase:
    """Return the phase behind six iterations."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn) as step:
        for _ in range(6):
            step(torch.randn(*shape))
        return step.phase


@pytest.mark.parametrize("log_prob", [categorical, gaussian])
def test_a_distribution_names_validate_args(
    log_prob: Callable[[bool | None, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's default, which the first torch.compile of a process turns off for all of it.
    monkeypatch.setattr(Distribution, "_validate_args", True)

    def train(validate: bool | None) -> graphfsdp.Phase:
        return phase_of(nn.Linear(4, 3), lambda m, x: -log_prob(validate, m(x)).mean(), 5, 4)

    with pytest.raises(graphfsdp.CaptureError, match="validate_args=False for this distribution"):
        train(None)
    assert train(False) is graphfsdp.Phase.REPLAY


def stacked_update(captured: bool, batch: Callable[[Tensor], Any]) -> list[Tensor]:
    """Train two critics at once as one vmapped function of stacked weights, with a target."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)]
    weights, _ = torch.func.stack_module_state(nets)
    critics = nn.ParameterDict({k.replace(".", "_"): v.detach() for k, v in weights.items()})
    target = {name: param.detach().clone() for name, param in critics.items()}
    optimizer = torch.optim.Adam(critics.parameters(), lr=1e-2)
    seen: dict[str, Tensor] = {}

    def value(weights: Any, x: Tensor) -> Tensor:
        names = {name.replace("_", "."): tensor for name, tensor in weights.items()}
        seen["x"] = x  # what vmap leaves in Python has no memory that anybody could look at
        out: Tensor = torch.func.functional_call(nets[0], names, (x,))
        return out

    def iterate(critics: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        both = torch.vmap(value, (0, None))
        with torch.no_grad():
            goal = both(target, batch["next"]).min(dim=0).values
        loss = (both(dict(critics.items()), batch["now"]) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, tensor in target.items():
            tensor.lerp_(critics[name].detach(), 0.1)
        return loss.detach()

    scope = "full_iteration" if captured else "none"
    with graphfsdp.capture(critics, optimizer, iteration=iterate, scope=scope) as step:
        losses = [step(batch(torch.randn(2, 6, 4))) for _ in range(NUM_STEPS)]
    return [*losses, *target.values(), *critics.parameters()]


def as_tensordict(values: Tensor) -> Any:
    library = pytest.importorskip("tensordict")
    return library.TensorDict(now=values[0], next=values[1], batch_size=[6])


@pytest.mark.parametrize(
    "batch", [lambda values: {"now": values[0], "next": values[1]}, as_tensordict]
)
def test_a_vmapped_update_is_captured(batch: Callable[[Tensor], Any]) -> None:
    expected, got = (stacked_update(captured, batch) for captured in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("name", ["GCNConv", "GATConv"])
def test_graph_layers_name_the_line_for_self_loops(name: str) -> None:
    library = pytest.importorskip("torch_geometric.nn", exc_type=ImportError)
    edges, labels = torch.randint(12, (2, 40)), torch.randint(3, (12,))

    def train(**options: bool) -> graphfsdp.Phase:
        def loss_fn(layer: nn.Module, x: Tensor) -> Tensor:
            return nn.functional.cross_entropy(layer(x, edges), labels)

        return phase_of(getattr(library, name)(6, 3, **options), loss_fn, 12, 6)

    with pytest.raises(graphfsdp.CaptureError, match=r"add_remaining_self_loops.*add_self_loops="):
        train()
    assert train(add_self_loops=False) is graphfsdp.Phase.REPLAY


CPU = torch.device("cpu")
WORDS = {"vocab_size": 50}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32}
GROUPED = SMALL | {"num_key_value_heads": 1, "use_cache": False}  # other bits with a mask
SHAPE = (3, 8)


def model_of(name: str, head: str, **config: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        chosen = getattr(transformers, f"{name}Config")(**config)
        model: nn.Module = getattr(transformers, f"{name}For{head}")(chosen)
        return model

    return made


def both_ways(mask: Tensor) -> Tensor:
    return mask.bool()[:, None, None, :].expand(-1, 1, mask.shape[1], -1)


def causal(mask: Tensor) -> Tensor:
    return both_ways(mask) & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()


def words(
    shown: Callable[[Tensor], Tensor | None] = lambda mask: mask,
) -> Callable[[torch.Generator], Batch]:
    """Return what makes batches; ``shown`` makes their masks of four dimensions."""

    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(3, 50, SHAPE, generator=generator)
        mask = torch.ones(SHAPE, dtype=torch.long)
        if hidden := int(torch.randint(3, (), generator=generator)):  # of a row; or nothing is
            mask[0, 5:] = mask[1, 8 - hidden :] = 0
        return Batch(kwargs={"input_ids": ids, "labels": ids % 2, "attention_mask": shown(mask)})

    return batch


WHOLE = words(lambda mask: None)


@pytest.mark.parametrize(
    ("make", "written", "passed"),
    [
        (model_of("Bert", "TokenClassification", **WORDS, **SMALL), words(both_ways), words()),
        (model_of("Llama", "CausalLM", **WORDS, **SMALL), words(causal), words()),
        (model_of("Llama", "CausalLM", **WORDS, **GROUPED), WHOLE, WHOLE),
        (model_of("DebertaV2", "TokenClassification", **WORDS, **SMALL), WHOLE, WHOLE),
    ],
    ids=["bert", "llama", "without", "unwarned"],
)
def test_a_captured_mask_of_two_dimensions_has_the_bits_of_a_plain_loops_of_four(
    make: Callable[[], nn.Module], written: Any, passed: Any
) -> None:
    plain = run(Case(make, written), "plain", CPU, optimizer="adamw")
    captured = run(Case(make, passed), "full_iteration", CPU, optimizer="adamw")
    assert_same_run(plain, captured)
    assert captured.report.num_calls["replay"] == 10


def test_a_loop_that_is_captured_in_place_reads_its_masks_and_is_told_so() -> None:
    """Another mask has other bits, so the model runs as written there."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for _ in range(24):
            loss = model(**words()(torch.default_generator).kwargs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    parts = check(loop, model_of("Llama", "CausalLM", **WORDS, **SMALL, use_cache=False))
    lines = {line.name: line for line in parts.report().parts}
    assert "reads a value of the iteration on the host" in lines["model"].why
    assert "masking_utils.py" in lines["model"].why
    assert lines["model.model.layers.0"].num_replays >= 10


X = torch.ones(6, 4)
Make = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class FrozenDict(OrderedDict[str, Any]):
    """Refuses every change once it is made, as the configurations of diffusers do."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.is_frozen = True

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a FrozenDict cannot be changed")

    update = setdefault = pop = __delitem__ = refuse

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(self, "is_frozen"):
            self.refuse()
        super().__setitem__(name, value)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self._internal_dict = FrozenDict(scale=0.5, sizes=[1, 2])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean() * self._internal_dict["scale"]
        return loss


class Listed(nn.Module):
    """Has a ``parameters()`` that returns a list, and takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4))])

    def parameters(self) -> Any:  # type: ignore[override]
        return self.vars

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.vars[0], self.vars[1]).square().mean()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.second(self.norm(self.first(x))).square().mean()
        return loss


class Output(FrozenDict):
    @property
    def loss(self) -> Any:
        return self["loss"]


class Answering(Plain):
    """Returns an output of a class of its own, which pytree does not know."""

    def forward(self, x: Tensor) -> Any:
        return Output(loss=super().forward(x))


class Placeless(Plain):
    """Makes tensors without a device, as whoever writes for a CPU does."""

    def forward(self, x: Tensor) -> Tensor:
        row = functional.embedding(torch.full((x.shape[0],), 1), self.second.weight)
        return super().forward(x + torch.zeros(x.shape[0], 4) + row)


class Wrapper(torch.optim.Optimizer):
    """Never calls ``Optimizer.__init__``, as many that are written around another one do."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.inner = torch.optim.Adam(params, lr=0.01)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def scripted(value: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, in words and kinds that torch changes
        return torch.jit.script(value)


def half_scripted() -> nn.Module:
    model = Plain()
    model.first = scripted(model.first)
    return model


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for _ in range(14):
        optimizer.zero_grad()
        output = model(torch.randn(6, 4))
        loss: Tensor = getattr(output, "loss", output)
        loss.backward()
        optimizer.step()
        yield loss


def check_in_place(make: Make, make_optimizer: MakeOptimizer = adam) -> None:
    check(plainly, make, lambda model: make_optimizer(model.parameters()))


def check_captured(make: Make, make_optimizer: MakeOptimizer = adam, **options: Any) -> None:
    options["optimizer"] = make_optimizer
    run_as_eager(Case(make, features(4)), CPU, beside="plain", **options)


@pytest.mark.parametrize("make", [Configured, Listed, Answering, Placeless])
def test_both_doors_and_a_check_take_the_model(make: Make) -> None:
    check_captured(make)
    check_in_place(make)
    model = make()
    report = graphfsdp.check(model, adam(model.parameters()), X)
    assert report.ok, report


def test_an_optimizer_without_hooks_is_captured_outside_of_the_graph() -> None:
    check_in_place(Plain, Wrapper)
    with pytest.raises(graphfsdp.CaptureError, match=r"Adam.step.*scope='forward_backward'"):
        check_captured(Plain, Wrapper)
    check_captured(Plain, Wrapper, scope="forward_backward")
    model = Plain()
    report = graphfsdp.check(model, Wrapper(model.parameters()), X, scope="forward_backward")
    assert report.ok, report


@pytest.mark.parametrize(
    ("make", "where"), [(lambda: scripted(Plain()), "the model"), (half_scripted, "module 'first'")]
)
def test_torchscript_is_refused_by_name_and_the_ways_out_work(make: Make, where: str) -> None:
    model = make()
    optimizer = adam(model.parameters())
    message = f"{where} is TorchScript.*capture_in_place.*scope='none'"
    with pytest.raises(graphfsdp.ConfigError, match=message):
        graphfsdp.capture(model, optimizer)
    report = graphfsdp.check(model, optimizer, X)
    assert "is TorchScript" in str(report.hazards[0].why)
    check_in_place(make)
    check_captured(lambda: nn.Sequential(make()), scope="none")  # a hook counts calls


def test_torchscript_beside_the_model_is_refused_by_name() -> None:
    critic, model = scripted(Plain()), Plain()
    options: Any = {"loss_fn": lambda model, x: model(critic(x) + x), "warmup_steps": 1}
    with graphfsdp.capture(model, adam(model.parameters()), **options) as step:
        step(X)
        with pytest.raises(graphfsdp.CaptureError, match=r"is TorchScript.*capture_in_place"):
            step(X)


def test_a_function_of_torchscript_is_captured() -> None:
    @scripted
    def gate(x: Tensor, scale: float) -> Tensor:
        return x * torch.sigmoid(x * scale)

    class Gated(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(gate(self.second(x), 0.5))

    check_captured(Gated)


@pytest.mark.parametrize("make", [Configured, Listed])
def test_a_failed_iteration_of_any_class_of_module_is_undone(make: Make) -> None:
    model = make()
    optimizer = FusedAdam(model.parameters())
    before, first = snapshot(model, optimizer), next(iter(model.parameters())).detach().clone()

    def fails(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        for _ in plainly(model, optimizer):
            assert not same_bits(first, next(iter(model.parameters())))
        raise KeyError("of the user's")

    step = graphfsdp.capture(model, optimizer, iteration=fails)
    with pytest.raises(KeyError):
        step(X)
    assert_same_state(before, snapshot(model, optimizer))

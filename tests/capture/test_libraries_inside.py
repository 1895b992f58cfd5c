"""Libraries inside an iteration: what is refused names the way out, and that way out trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.optim import swa_utils

import graphfsdp
from iterations import steps_once

NUM_STEPS = 9


@pytest.mark.parametrize("where", ["inside", "behind"])
def test_torch_averages_weights_behind_the_call(where: str) -> None:
    def train(where: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        average = swa_utils.AveragedModel(model)

        def update() -> None:
            average.update_parameters(model)

        iteration = steps_once(behind=update) if where == "inside" else steps_once()
        scope = "none" if where == "plain" else "full_iteration"
        with graphfsdp.capture(model, optimizer, iteration=iteration, scope=scope) as step:
            losses = []
            for _ in range(14):
                losses.append(step(torch.randn(6, 4)))
                update()
        return [*losses, *(tensor.clone() for tensor in average.state_dict().values())]

    if where == "inside":
        with pytest.raises(graphfsdp.CaptureError, match="after each call of the captured step"):
            train(where)
        return
    expected, got = (train(each) for each in ("plain", where))
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

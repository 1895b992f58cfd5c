"""Models that are saved and loaded on ranks, and all that a checkpoint must bring back."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from moe_models import MixedModel, experts_on_ranks
from parallel_models import plain_model, tensor_parallel
from sharding_helpers import STRATEGIES, Net, adam, batches, my_part, shard


class Setup(NamedTuple):
    """How a model is cut and what it computes in.

    Attributes:
        strategy: Of ``fully_shard``; None for a model on one device.
        precision: "fp32", or "bf16" with float32 main weights: in the model where it is sharded,
            else in the optimizer.
        outer: Of a mesh of 2 x 2 ranks, what is cut over the outer axis; None for a 1-D mesh.
        model: "net"; or "feed" or "mixture", and these as "tensor" and "expert" share them out.
    """

    strategy: str | None
    precision: str = "fp32"
    outer: str | None = None
    model: str = "net"


SETUPS = tuple(Setup(strategy, p) for strategy in STRATEGIES for p in ("fp32", "bf16"))


class Holding:
    """An object with a state."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def make(setup: Setup, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has not stepped yet."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {}
    model: nn.Module
    if setup.model == "tensor":
        model = tensor_parallel(sequence=True)
    elif setup.model == "expert":
        model = experts_on_ranks(2, "optim_grads_params")
    else:
        kinds: dict[str, Callable[[], nn.Module]] = {
            "net": Net,
            "feed": plain_model,
            "mixture": lambda: MixedModel().double(),
        }
        model = kinds[setup.model]()
    if setup.strategy is not None:
        dtype = torch.bfloat16 if setup.precision == "bf16" else None
        policy = graphfsdp.MixedPrecisionPolicy(param_dtype=dtype)
        model = shard(model, setup.strategy, outer_strategy=setup.outer, mp_policy=policy)
    elif setup.precision != "fp32":
        model = model.to(torch.bfloat16)
        options["master_weights"] = True
    return model, adam(model, **options)


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Train without capture, so that every state holds something."""
    for index, batch in enumerate(batches(num_steps, seed=11)):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + index)
        optimizer.zero_grad()
        if isinstance(model, Net):
            is_sharded = isinstance(model, graphfsdp.FSDPModule)
            model(*(my_part(batch) if is_sharded else batch)).backward()
        else:
            for param in optimizer.param_groups[0]["params"]:  # others take other batches
                param.grad = param.detach() * (index + 1)
        optimizer.step()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return whole main weights, optimizer states and hyper-parameters by name."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        states = optimizer.state.get(param, {})
        main = states.get("master_param")
        found[name] = _whole(param).float() if main is None else _whole(main)
        for key, value in states.items():
            if key != "master_param":
                found[f"{name} {key}"] = _whole(value).float().reshape(value.shape)
    for row, group in enumerate(optimizer.param_groups):
        for key in ("lr", "eps", "weight_decay"):
            found[f"group {row} {key}"] = torch.tensor(float(group[key]), dtype=torch.float64)
    return found


def digests(found: dict[str, Tensor]) -> dict[str, str]:
    """Return what is equal only where every bit is, and is short to send."""
    return {
        name: hashlib.sha256(
            repr((tensor.dtype, tensor.shape)).encode()
            + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in found.items()
    }


def _whole(tensor: Tensor) -> Tensor:
    full: Any = getattr(tensor, "full_tensor", tensor.detach)()
    plain: Tensor = full.detach().cpu()
    return plain


def addresses(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return where parameters and states lie on this rank, by name."""
    tensors = dict(model.named_parameters())
    for name, param in model.named_parameters():
        states = optimizer.state.get(param, {})
        tensors |= {f"{name} {key}": value for key, value in states.items()}
    return {name: getattr(t, "_local_tensor", t).data_ptr() for name, t in tensors.items()}


def save_on_ranks(path: Path, setup: Setup) -> dict[str, str]:
    """Train, save, and return what a load must bring back."""
    model, optimizer = make(setup)
    train_plainly(model, optimizer, 3)
    # Every rank has generators of its own, whatever ran on it before.
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    graphfsdp.save(path, model, optimizer, step=3)
    return digests(contents(model, optimizer))


def load_on_ranks(paths: list[Path], setup: Setup) -> list[dict[str, str]]:
    """Load each path into one model that has trained before, and can go on; return what it has."""
    model, optimizer = make(setup, seed=1)
    train_plainly(model, optimizer, 1)
    before = addresses(model, optimizer)
    found = []
    for path in paths:
        graphfsdp.load(path, model, optimizer)
        found.append(digests(contents(model, optimizer)))
        for param, states in optimizer.state.items():
            main = _whole(states.get("master_param", param))
            assert torch.equal(_whole(param), main.to(param.dtype))
    assert addresses(model, optimizer).items() >= before.items()
    train_plainly(model, optimizer, 1)
    return found

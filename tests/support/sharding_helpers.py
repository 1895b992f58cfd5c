"""Models, batches and training runs for the tests of sharding.

Shapes: N = sequences of the whole batch, P = positions, V = vocabulary.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphfsdp
from graphfsdp.base.torch_internals import ASKS_SUBCLASSES as ASKS_SUBCLASSES
from graphfsdp.optim import FusedAdam
from graphfsdp.sharding.buffer import ShardBuffer
from graphfsdp.sharding.module import unit_of as unit_of
from graphfsdp.sharding.unit import Unit
from helpers import NUM_STEPS, local_part, set_lr, without_compiling
from ranks import rank_device, world_group

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
VOCABULARY = 17
# 3 warm-up, 1 capture, 3 replays: beside a row of the same test that has 10 (`num_steps_of`).
FEW_STEPS = 7
NUM_SEQUENCES = 12  # divisible by 4 ranks times 3 microbatches
NUM_POSITIONS = 5
MAX_NORM = 0.5
HYBRID_AXES = ("dp_replicate", "dp_shard")
# Of two right runs in float64; a mistake is larger, and so is a rounding to float32.
RTOL, ATOL = 1e-9, 1e-11
ADAM_EPS = 1e-2  # large, so that Adam does not magnify the rounding of tiny gradients


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        out: Tensor = x + self.dropout(self.down(hidden))
        return out


class Odd(nn.Module):
    """Row lengths and sizes that nothing divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, 5)
        self.matrix = nn.Parameter(torch.randn(5, 3) / 4)
        self.wide = nn.Linear(3, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.wide(torch.sigmoid(self.narrow(x)) @ self.matrix)
        return out


class Net(nn.Module):
    """Embedding tied to the output layer, 0-D, empty, frozen and unused parameters."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        with torch.no_grad():
            self.embedding.weight.mul_(0.3)  # tied to the output layer: small logits
        self.blocks = nn.ModuleList([Block(width, dropout), Odd(width)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7))

    def logits(self, tokens: Tensor) -> Tensor:  # [N, P] -> [N, P, V]
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden) * self.scale + self.empty.sum() + self.frozen.sum() * 0.01
        return out

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten())


def batches(count: int, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_SEQUENCES, NUM_POSITIONS)
    return [
        (
            torch.randint(VOCABULARY, shape, generator=generator),
            torch.randint(VOCABULARY, shape, generator=generator),
        )
        for _ in range(count)
    ]


def my_part(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    length = len(batch[0]) // dist.get_world_size()
    first = dist.get_rank() * length
    return tuple(part[first : first + length].to(rank_device()) for part in batch)


def shard(
    model: nn.Module, strategy: str, *, outer_strategy: str | None = None, **options: Any
) -> nn.Module:
    """Make every child of ``model.blocks``, then the model, a unit; of two axes with an outer."""
    assert isinstance(model.blocks, nn.ModuleList)
    if outer_strategy is not None:
        options |= {"mesh": hybrid_mesh(), "outer_strategy": outer_strategy}
    for block in model.blocks:
        graphfsdp.fully_shard(block, strategy=strategy, **options)
    return graphfsdp.fully_shard(model, strategy=strategy, **options)


def make_net(
    strategy: str | None, dropout: float = 0.0, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    """Return a Net with a fixed seed on this rank's device, sharded unless strategy is None."""
    torch.manual_seed(0)
    model = Net(dropout=dropout).to(rank_device(), dtype)
    return model if strategy is None else shard(model, strategy, **options)


@functools.cache  # every call makes new process groups
def hybrid_mesh(
    shape: tuple[int, ...] | None = None, names: tuple[str, ...] = HYBRID_AXES
) -> DeviceMesh:
    shape = shape or (2, dist.get_world_size() // 2)
    return init_device_mesh(rank_device().type, shape, mesh_dim_names=names)


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def units(model: nn.Module) -> list[Unit]:
    found = (unit_of(m) for m in model.modules() if isinstance(m, graphfsdp.FSDPModule))
    return list(dict.fromkeys(found))  # some have several modules


def buffers(model: nn.Module) -> list[ShardBuffer]:
    return [buffer for unit in units(model) for buffer in unit.group.buffers]


def check_slices(model: nn.Module) -> None:
    """No two of the slices that the optimizer reads and writes overlap, or leave their buffer."""
    for kind in ("param", "main_grad"):
        places = []
        for item in (item for unit in units(model) for item in unit.group.managed):
            tensor: Any = getattr(item, kind)
            whole = item.buffer.main if kind == "param" else item.buffer.grad
            local = None if tensor is None else local_part(tensor).detach()
            if local is not None and whole is not None and local.numel():
                start = local.data_ptr()
                end = start + local.nbytes
                assert whole.data_ptr() <= start < end <= whole.data_ptr() + whole.nbytes
                places.append((start, end))
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(places)))


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        whole: Any = getattr(param, "full_tensor", param.detach)()
        found[name] = whole.detach().clone()
    return found


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad: Any = param.grad
            found[name] = getattr(grad, "full_tensor", grad.detach)()
    return found


def num_steps_of(row: Any, *long: Any) -> int:
    """Return how many calls a row of a table gets: 10 replays those that are named, others 3."""
    return NUM_STEPS if row in long else FEW_STEPS


def learning_rate(index: int) -> float:
    """Return the learning rate of a call: no two in a row are equal."""
    return 0.02 / (1 + index)


def adam(model: nn.Module, name: str = "fused_adam", **options: Any) -> torch.optim.Optimizer:
    """Return an Adam over the trainable parameters whose numbers may change between calls."""
    params = [param for param in model.parameters() if param.requires_grad]
    options = {"eps": ADAM_EPS, "weight_decay": 0.1} | options
    if name == "fused_adam":
        decoupled = any(unit.group.options.policy.use_decoupled_grad for unit in units(model))
        return FusedAdam(params, lr=0.02, use_decoupled_grad=decoupled, **options)
    device = params[0].device
    on_gpu = device.type == "cuda"
    lr = torch.tensor(0.02, device=device)
    return torch.optim.AdamW(params, lr=lr, fused=True, capturable=on_gpu, **options)


@dataclass
class Training:
    """What a run left behind on one rank."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)  # before clipping
    params: dict[str, Tensor] = field(default_factory=dict)  # whole
    buffers: dict[str, Tensor] = field(default_factory=dict)
    report: graphfsdp.CaptureReport = field(init=False, repr=False, compare=False)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"loss {index}": loss for index, loss in enumerate(self.losses)}
        found |= {f"norm {index}": norm for index, norm in enumerate(self.norms)}
        found |= {f"parameter {name}": param for name, param in self.params.items()}
        return found | {f"buffer {name}": buffer for name, buffer in self.buffers.items()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num_steps: int = NUM_STEPS,
    data: Iterable[Sequence[Tensor]] | None = None,
    max_grad_norm: float | None = MAX_NORM,
    **options: Any,
) -> Training:
    """Train a sharded model with ``graphfsdp.capture``; batch, lr and RNG change between calls.

    Without ``data``, which are this rank's batches, a Net on its part of ``batches``.
    """
    result = Training()
    if data is None:
        data = map(my_part, batches(num_steps))
    with graphfsdp.capture(model, optimizer, max_grad_norm=max_grad_norm, **options) as step:
        for index, batch in enumerate(data):
            set_lr(optimizer, learning_rate(index))
            torch.rand((), device=rank_device())
            result.losses.append(step(*batch))
            if step.grad_norm is not None:
                result.norms.append(step.grad_norm)
        result.params = full_parameters(model)
        result.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        result.report = step.report()
    return result


def assert_equal_tensors(expected: Any, got: Any) -> None:
    """Compare tensors by name, or as they come, bit for bit."""
    left, right = (
        dict(found if isinstance(found, dict) else enumerate(found)) for found in (expected, got)
    )
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), (
            f"rank {dist.get_rank()}: {name} differs: {tensor} and {right[name]}"
        )


def assert_same_training(expected: Training, got: Training) -> None:
    assert_equal_tensors(expected.tensors(), got.tensors())


def assert_replayed(training: Training, num_steps: int = NUM_STEPS) -> None:
    """Check that the run was captured once and replayed ever after."""
    assert training.report.num_captures == 1
    assert training.report.num_calls["replay"] == len(training.losses) - 4 >= num_steps - 4 >= 3


def replayed_as_eager(
    make: Callable[[], nn.Module],
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "fused_adam",
    num_steps: int = NUM_STEPS,
    *,
    eager: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> Training:
    """Train eagerly and captured, which must agree bit for bit; return the captured run.

    ``eager`` makes the model of the eager run, where that is to be another one.
    """
    runs = []
    for scope, make_one, chosen in (
        ("none", eager or make, without_compiling(options)),
        ("full_iteration", make, options),
    ):
        model = make_one()
        optim = adam(model, optimizer) if isinstance(optimizer, str) else optimizer(model)
        runs.append(train(model, optim, scope=scope, num_steps=num_steps, **chosen))
    assert_same_training(*runs)
    assert_replayed(runs[1], num_steps)
    return runs[1]


def assert_trains_as_whole(
    got: Training,
    optimizer: str = "fused_adam",
    *,
    whole: nn.Module | None = None,
    data: Sequence[Sequence[Tensor]] | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Compare a run in float64 with that of one process, of whole batches.

    Its model is ``whole``, or a Net; ranks of ``group``, or all, have a part of each batch.
    """
    whole = make_net(None, dtype=torch.float64) if whole is None else whole
    batches_of_all = data or batches(len(got.losses))
    on_device = [tuple(part.to(rank_device()) for part in batch) for batch in batches_of_all]
    plain = train(whole, adam(whole, optimizer), data=on_device, scope="none", **options)
    for mine, theirs in zip(got.losses, plain.losses, strict=True):
        mean = mine.clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group or world_group())
        torch.testing.assert_close(mean, theirs, rtol=RTOL, atol=ATOL)
    for mine, theirs in zip(got.norms, plain.norms, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)  # a float32
    assert list(got.params) == list(plain.params)
    for name, theirs in plain.params.items():
        assert got.params[name].shape == theirs.shape, name
        if theirs.numel():
            difference = float((got.params[name] - theirs).abs().max())
            assert difference <= ATOL + RTOL * float(theirs.abs().max()), f"{name}: {difference}"
    torch.testing.assert_close(got.buffers, plain.buffers, rtol=RTOL, atol=ATOL)


@contextmanager
def raises_on_rank(kind: type[BaseException], *words: str) -> Iterator[list[str]]:
    """Expect an exception that says these words; its message is put into the list."""
    messages: list[str] = []
    try:
        yield messages
    except kind as error:
        messages.append(str(error))
        assert all(each in messages[0] for each in words), messages[0]
    else:
        raise AssertionError(f"rank {dist.get_rank()} raised no {kind.__name__}")

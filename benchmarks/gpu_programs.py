"""Little programs: what a GPU says first of each way to use graphfsdp, and parity of larger models.

Each is trained eagerly and captured, and what both have seen is compared bit for bit.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import optim
from graphfsdp.bench.workloads import find_workload
from graphfsdp.training.gpt import GPT, GPTConfig

WIDTH = 16
ROWS = 12  # three microbatches
NUM_SEQUENCES = 4


@dataclass(frozen=True)
class Row:
    what: str
    result: str
    ok: bool = True
    data: Mapping[str, object] = field(default_factory=dict)


def layers(between: nn.Module | None = None, last: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), between or nn.GELU(), nn.Linear(WIDTH, last))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, 8)
        self.head = nn.Linear(8, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x.abs().clamp(max=3).long()))
        return out


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers(nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = graphfsdp.recompute(self.inner, x)
        return out


class SideStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self.first(x) + self.second(x)  # type: ignore[no-any-return]
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            first = self.first(x)
        second = self.second(x)
        current.wait_stream(side)
        return first + second  # type: ignore[no-any-return]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return loss_of(model, x)


def own_iteration(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    for part in x.chunk(2):
        (loss_of(model, part) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss_of(model, x).detach()


def evaluated(step: graphfsdp.CapturedStep, x: Tensor) -> Tensor:
    loss: Tensor = step(x)
    step.evaluate(x)
    return loss


def two_lengths(step: graphfsdp.CapturedStep, x: Tensor) -> Tensor:
    step(x[: ROWS // 2])
    loss: Tensor = step(x)
    return loss


def verified(step: graphfsdp.CapturedStep, x: Tensor) -> Tensor:
    loss: Tensor = step(x)
    if step.phase.value == "replay":
        step.verify(1)
    return loss


def sharded(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        for layer in model.children():
            if list(layer.parameters()):
                graphfsdp.fully_shard(layer, **options)
        return graphfsdp.fully_shard(model, **options)

    return shard


Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adam(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return optim.FusedAdam(params, lr=0.01, **options)


def scaled_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return adam(params, grad_scaler=optim.DeviceGradScaler(256.0, device=params[0].device))


def noise(generator: torch.Generator) -> tuple[Tensor, ...]:  # [ROWS, WIDTH]
    return (torch.randn(ROWS, WIDTH, generator=generator),)


@dataclass(frozen=True)
class Program:
    """A model, how it is stepped, and what capture() is told; the last three steps are replays."""

    make: Callable[[], nn.Module] = layers
    optimizer: Optimizer = adam
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    call: Callable[..., Tensor] = lambda step, *batch: step(*batch)
    scopes: tuple[str, ...] = ("full_iteration",)
    is_sharded: bool = False
    batch: Callable[[torch.Generator], tuple[Tensor, ...]] = noise
    num_steps: int = 7


ZERO3 = {"strategy": "optim_grads_params"}
PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "two layers": Program(),
        "clipping": Program(options={"max_grad_norm": 0.1}),
        "dropout": Program(lambda: layers(nn.Dropout(0.3))),
        "three microbatches": Program(options={"microbatches": 3}),
        "layer norm": Program(lambda: layers(nn.LayerNorm(WIDTH))),
        "attention": Program(
            lambda: nn.Sequential(
                nn.Unflatten(1, (4, 4)),
                nn.TransformerEncoderLayer(4, 2, WIDTH, dropout=0.1, batch_first=True),
            )
        ),
        "convolution and batch norm": Program(
            lambda: nn.Sequential(
                *(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
                nn.Conv2d(4, 2, 2),
            )
        ),
        "tied embedding": Program(Tied),
        "bfloat16 with main weights": Program(
            optimizer=lambda params: adam(params, master_weights=True), dtype=torch.bfloat16
        ),
        "autocast": Program(options={"loss_fn": autocast_loss}),
        "loss scale": Program(optimizer=scaled_adam),
        "steps that may be skipped": Program(options={"skip_nonfinite": True}),
        "torch's AdamW": Program(optimizer=lambda params: torch.optim.AdamW(params, lr=0.01)),
        "torch's SGD": Program(
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)
        ),
        "FusedSGD": Program(optimizer=lambda p: optim.FusedSGD(p, lr=0.01, momentum=0.9)),
        "FusedLion": Program(optimizer=lambda params: optim.FusedLion(params, lr=0.01)),
        "recomputation": Program(Recomputed),
        "a stream of the model's own": Program(SideStream),
        "forward and backward alone": Program(scopes=("forward_backward",)),
        "an iteration of one's own": Program(options={"iteration": own_iteration}),
        "evaluation in between": Program(call=evaluated),
        "two batch sizes": Program(options={"on_change": "recapture"}, call=two_lengths),
        "verification": Program(call=verified),
        "one rank, ZeRO-3, overlapped": Program(prepare=sharded(**ZERO3), is_sharded=True),
        "one rank, ZeRO-3, with a pool": Program(
            prepare=sharded(**ZERO3, buffer_pool=True), is_sharded=True
        ),
    }
)


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def shape_of(name: str) -> GPTConfig:
    model = find_workload(name).model
    assert isinstance(model, GPTConfig)
    return model


def narrowed(model: nn.Module) -> nn.Module:
    for param in model.parameters():  # not the buffers: RoPE needs float32
        param.data = param.data.bfloat16()
    return model


def compiled(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def gpt(
    name: str, prepare: Callable[[nn.Module], nn.Module] = lambda model: model, **options: Any
) -> Program:
    """Return a GPT with dropout and clipping; ``options`` are of its optimizer."""
    shape = replace(shape_of(name), hidden_dropout=0.1, attention_dropout=0.1)
    size = (2, NUM_SEQUENCES, shape.seq_length)
    return Program(
        functools.partial(GPT, shape),
        functools.partial(adam, betas=(0.9, 0.95), weight_decay=0.1, **options),
        {"loss_fn": None, "max_grad_norm": 1.0},
        prepare=prepare,
        scopes=("none", "forward_backward", "full_iteration"),
        batch=lambda generator: torch.randint(shape.vocab_size, size, generator=generator).unbind(),
        num_steps=20,
    )


def train(program: Program, device: torch.device, scope: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = program.prepare(program.make().to(device, program.dtype))
    optimizer = program.optimizer(list(model.parameters()))
    options: dict[str, Any] = dict(program.options)
    if "iteration" not in options:
        options = {"loss_fn": loss_of} | options
    generator = torch.Generator().manual_seed(1)
    seen: dict[str, Tensor] = {}
    with graphfsdp.capture(model, optimizer, scope=scope, **options) as step:
        for index in range(program.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + index)
            batch = [part.to(device) for part in program.batch(generator)]
            if batch[0].is_floating_point():
                batch = [part.to(program.dtype) for part in batch]
            seen[f"loss of step {index}"] = program.call(step, *batch)
            if step.grad_norm is not None:
                seen[f"gradient norm of step {index}"] = step.grad_norm.clone()
        if scope != "none":
            assert step.phase.value == "replay", step.phase
        for name, param in model.named_parameters():
            local = param.to_local() if hasattr(param, "to_local") else param
            seen[f"parameter {name}"] = local.detach().clone()
    return seen


def first_difference(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str | None:
    """Name the first value that is not equal, and by how much; None if all are."""
    for name, value in expected.items():
        if not torch.equal(value, got[name]):
            gap = (value.double() - got[name].double()).abs().max().item()
            return f"{name} differs by {gap:.3g}"
    return None


def compare(name: str, program: Program, device: torch.device) -> Iterator[Row]:
    with one_rank(device) if program.is_sharded else contextlib.nullcontext():
        eager = train(program, device, "none")
        for scope in program.scopes:
            what = name if len(program.scopes) == 1 else f"{name}: {scope} against eager"
            difference = first_difference(eager, train(program, device, scope))
            yield Row(
                what, difference or f"{len(eager)} tensors equal bit for bit", difference is None
            )

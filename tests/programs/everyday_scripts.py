"""What FSDP2's users write. tests/sharding/test_fsdp2_scripts.py runs it with either import.

Only the first import is changed for that. Each function is a script and prints what it computes.
"""

import copy
import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    parallelize_module,
)

NUM_STEPS = 3


def whole_model(width: int = 8, hidden: int = 5) -> Any:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))
    return nn.Sequential(first, nn.Sequential(nn.Linear(width, 3)))


def sharded(model: Any, **options: Any) -> Any:
    for child in model:
        fully_shard(child, **options)
    fully_shard(model, **options)
    return model


def batch(index: int, part: int | None = None, width: int = 8) -> Tensor:
    part = dist.get_rank() if part is None else part
    generator = torch.Generator().manual_seed(100 + 7 * index + part)
    return torch.randn(4, width, generator=generator)


def show(*values: Any) -> None:
    for value in values:
        if isinstance(value, Tensor):
            whole: Any = value.full_tensor() if isinstance(value, DTensor) else value
            value = [f"{number:.4g}" for number in whole.detach().float().flatten().tolist()]
        print(value)


def one_pass(model: Any, index: int) -> None:
    model(batch(index)).square().mean().backward()


def train(
    model: Any,
    backward: Callable[[Any, int], object] = one_pass,
    *,
    steps: int = NUM_STEPS,
    optim: Any = torch.optim.AdamW,
    to_none: bool = True,
    **options: Any,
) -> Any:
    optimizer = optim(model.parameters(), **{"lr": 0.1, **options})
    for index in range(steps):
        backward(model, index)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    show(*model.parameters())
    return model


def means_norms_and_averages_of_weights() -> None:
    model = sharded(whole_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # FSDP2 has no maximum of a rank without rows.
    kinds = (2.0, 1.0, float("inf")) if dist.get_world_size() == 2 else (2.0, 1.0)
    averages = {name: param.detach().clone() for name, param in model.named_parameters()}
    for index in range(NUM_STEPS):
        model(batch(index)).square().mean().backward()
        for kind in kinds:
            show(kind, nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=kind))
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            value = param.detach()
            averages[name].lerp_(value, 0.1)
            show(name, value.mean(), value.abs().mean(), value.std())
            if len(kinds) == 3:
                show(value.max(), value.min())
            show(value.sum(), value.norm(), value * 2, averages[name], averages[name].mean())


def gradients_of_functions_of_a_weight() -> None:
    functions: list[Callable[[Any], Tensor]] = [
        lambda q: q.sum(),
        lambda q: (q.full_tensor() ** 2).sum(),
        lambda q: (q * q).mean(),
    ]
    for name, param in sharded(whole_model()).named_parameters():
        for function in functions:
            q = param.detach().clone().requires_grad_()
            function(q).backward()
            show(name, q.grad)


def frozen_weights_of_every_dtype_in_one_group() -> None:
    kinds = ("uint8", "int8", "int16", "uint16", "int64", "bool", "float8_e4m3fn", "complex64")
    model = whole_model()
    for kind in kinds:
        values = torch.arange(15).view(5, 3).to(getattr(torch, kind))
        model.register_parameter(kind, nn.Parameter(values, requires_grad=False))
    model.register_forward_hook(
        lambda model, _, out: out + sum(getattr(model, kind).real.float().sum() for kind in kinds)
    )
    sharded(model)
    for index in range(NUM_STEPS):
        loss = model(batch(index)).square().mean()
        loss.backward()
        show(loss, model[0][0].weight.grad)  # torch shows no int16 in full


def modules_that_ddp_replicates_inside_a_sharded_one() -> None:
    model = whole_model()
    replicate(model[0])
    fully_shard(model)
    train(model)
    model = whole_model()
    fully_shard(model[0])
    replicate(model)
    with implicit_replication():
        train(model, foreach=True)


def what_other_libraries_ask_for() -> None:
    model = sharded(whole_model())
    for module in (model, model[0], model[0][0]):
        show(_get_module_fsdp_state(module) is not None, isinstance(module, FSDPModule))
    words: Any = fully_shard
    states = [words.state(module) for module in (model, *model)]
    show(len(set(map(id, states))), states[0] is model._get_fsdp_state())
    show(words.state(model) is states[0], words.state(nn.Linear(1, 1)))
    show(model._is_fsdp_managed_module, hasattr(states[0], "no_such_thing"))


def hooks_of_gradients() -> None:
    model = sharded(whole_model())
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    called: list[str] = []

    def step_in_backward(name: str, param: Any) -> None:
        called.append(name)
        nn.utils.clip_grad_norm_([param], 0.5)
        optimizers[param].step()
        optimizers[param].zero_grad()

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(step_in_backward, name))
    for index in range(NUM_STEPS):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            model(batch(2 * index + part)).square().mean().backward()
        show(*sorted(called), *(param.grad for param in model.parameters()))
        called.clear()
    show(*model.parameters())


def copies_and_files() -> None:
    model = sharded(whole_model())

    def saved(value: Any) -> Any:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file)

    for name, param in model.named_parameters():
        show(name, copy.deepcopy(param), saved(param), saved(param.data))
    for state in (copy.deepcopy(model.state_dict()), saved(model.state_dict())):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(state)
        show(*model.parameters())


def steps_and_iterations_that_torch_compiles() -> None:
    model = sharded(whole_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")

    @torch.compile(backend="eager")
    def forward_and_backward(data: Tensor) -> None:
        model(data).square().mean().backward()

    for index in range(NUM_STEPS):
        forward_and_backward(batch(index))
        step()
        optimizer.zero_grad()
    show(*model.parameters())


def slices_and_containers() -> None:
    model = sharded(whole_model())
    part = model[:1]
    show(type(part).__name__, isinstance(part, FSDPModule), isinstance(part[0], FSDPModule))
    show(isinstance(model, torch.distributed.fsdp.FSDPModule), part(batch(0)))
    model[0](batch(1)).sum().backward()
    show(model[0][0].weight.grad)
    try:
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    except ValueError:
        show("refused")


def casts_after_sharding() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = sharded(whole_model()).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(0).to(dtype)).square().mean().backward()
        show(*((param.dtype, param.grad.dtype) for param in model.parameters()))
        if dtype == torch.float64:  # sums in bfloat16 depend on their order
            optimizer.step()
            show(*model.parameters())


def values_for_the_meta_device() -> None:
    whole = whole_model().state_dict()
    for way in ("assign", "load", "copy"):
        with torch.device("meta"):
            model = sharded(whole_model())
        if way != "assign":
            model.to_empty(device="cpu")
        values: dict[str, Any] = {}
        for name, value in whole.items():
            param = model.get_parameter(name)
            values[name] = distribute_tensor(value, param.device_mesh, param.placements)
            if way == "copy":
                with torch.no_grad():
                    param.copy_(values[name])
        if way != "copy":
            model.load_state_dict(values, assign=way == "assign")
        show(way)
        train(model)


class Adapted(nn.Module):
    """A layer and adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def modules_inside_a_unit_that_are_given_memory_one_by_one() -> None:
    """As torchtune does it: values for the base, memory for the adapters' modules alone."""
    for loads_first in (True, False):
        with torch.device("meta"):
            model: Any = Adapted()
        fully_shard(model)
        like = model.base.weight
        value = distribute_tensor(torch.arange(64.0).view(8, 8), like.device_mesh, like.placements)
        if loads_first:
            model.load_state_dict({"base.weight": value}, strict=False, assign=True)
        for index, module in enumerate((model.down, model.up)):
            module.to_empty(device="cpu")
            for param in module.parameters():
                nn.init.constant_(param, 0.5 + index)
        if not loads_first:
            model.load_state_dict({"base.weight": value}, strict=False, assign=True)
        train(fully_shard(nn.Sequential(model)))


class Head(nn.Module):
    """Ends in two modules that are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.tanh(self.body(x)))
        return out

    def forward(self, x: Tensor, has_head: bool = True) -> Tensor:
        out = self.hidden(x)
        return self.head(out) if has_head else out


def several_modules_in_one_unit() -> None:
    torch.manual_seed(0)
    model: Any = Head()
    fully_shard(model.body)
    show(type(fully_shard([model.norm, model.head])).__name__, isinstance(model.head, FSDPModule))
    fully_shard(model)
    train(model)

    def in_parts(model: Any, index: int) -> None:  # the head for a part of the sequence at a time
        hidden = model(batch(index), has_head=False)
        leaf = hidden.detach().requires_grad_()
        for rows in leaf.chunk(2):
            model.head(rows).square().mean().backward()
        hidden.backward(leaf.grad)

    train(model, in_parts, optim=torch.optim.SGD)


def ignored_parameters_beside_gradients_that_are_divided_by_a_number() -> None:
    model: Any = whole_model()
    sharded(model, ignored_params={model[1][0].bias})
    show([isinstance(param, DTensor) for param in model.parameters()])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
    train(model, foreach=False, optim=torch.optim.SGD)  # whose steps are as long as gradients


def kinds_of_resharding() -> None:
    for reshards in (None, True, False, dist.get_world_size(), 1):
        model: Any = train(sharded(whole_model(), reshard_after_forward=reshards))
        model.set_reshard_after_forward(False, recurse=False)
        model.set_reshard_after_backward(True)
        train(model)


def streams_that_models_share() -> None:
    models = [sharded(whole_model()) for _ in range(2)]
    share_comm_ctx(models)
    share_comm_ctx([])
    for model in models:
        train(model)


class Tower(nn.Module):
    """Blocks that are units; each call may leave some of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = x + block(x)
        out: Tensor = self.head(x)
        return out


def tower(*, freezes: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = Tower()
    if freezes:
        model.blocks.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def layers_that_freeze_and_thaw() -> None:
    def backward(model: Any, index: int) -> None:
        model.requires_grad_(True)
        model.blocks[0].requires_grad_(index % 3 == 1)
        model.blocks[1][2].weight.requires_grad_(index % 2 == 0)
        model.head.bias.requires_grad_(index >= 2)
        one_pass(model, index)
        show([param.grad is not None for param in model.parameters()])

    for freezes in (False, True):
        model = tower(freezes=freezes)
        train(model, backward, steps=2 * NUM_STEPS, optim=torch.optim.SGD, momentum=0.9)


def unsharded_ahead_and_never_resharded() -> None:
    def backward(model: Any, index: int) -> None:
        for block in model.blocks:
            block.unshard()
        if index % 2:
            model.unshard()
        model(batch(index), skipped=[index % 3]).square().mean().backward()
        show(all(isinstance(param, DTensor) for param in model.parameters()))
        show(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    train(tower(), backward, steps=2 * NUM_STEPS, lr=0.05)


def one_forward_one_backward() -> None:
    def backward(model: Any, index: int) -> None:
        for block in model.blocks if unshards else ():
            block.unshard()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2)
            one_pass(model, 3 * index + part)
        show(all(isinstance(param, DTensor) for param in model.parameters()))

    for unshards in (False, True):
        train(tower(), backward, to_none=unshards, lr=0.05)


def units_that_the_last_microbatch_skips() -> None:
    def backward(last: Sequence[int], model: Any, index: int) -> None:
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            skipped = last if part == 2 else ()
            model(batch(3 * index + part), skipped=skipped).square().mean().backward()
        show(all(param.grad is not None for param in model.parameters()))

    for last in ([0], [0, 1, 2]):
        backward_of = functools.partial(backward, last)
        train(tower(), backward_of, steps=2 * NUM_STEPS, optim=torch.optim.SGD)


class Generating(nn.Module):
    """Calls itself within a method that counts as a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        out: Tensor = torch.tanh(self.layer(x))
        return self(out) if again else out

    def generate(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = scale * self(self(x, again=True)) + self.layer(x)
        return out


def units_inside_their_own_forward_pass() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(Generating())
    register_fsdp_forward_method(model, "generate")
    mean = model.generate(batch(0), scale=2.0).square().mean()
    (mean + model(batch(1), again=True).sum()).backward()
    show(*(param.grad for param in model.parameters()))


def words_of_mixed_precision() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    several: list[dict[str, Any]] = [
        {"param_dtype": bf16, "reduce_dtype": fp32},
        {"param_dtype": bf16, "reduce_dtype": fp32, "output_dtype": torch.float64},
        {"reduce_dtype": fp32, "cast_forward_inputs": False, "output_dtype": bf16},
    ]

    def backward(model: Any, index: int) -> None:
        model.set_modules_to_forward_prefetch(list(model.blocks))
        model.set_modules_to_backward_prefetch(list(model.blocks))
        model.set_unshard_in_backward(True)
        model.set_is_last_backward(True)
        model.unshard(async_op=True).wait()
        output = model(batch(index))
        show(output.dtype, output)
        output.square().mean().backward()

    for words in several:
        torch.manual_seed(0)
        model: Any = Tower()
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(**words | {"output_dtype": None}))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**words))
        train(model, backward, optim=torch.optim.SGD)


def pipelines() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    place, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8)) for _ in range(2)]
    model = parts[place]
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)

    def backward(model: Any, index: int) -> None:
        x = torch.cat((batch(index, part), batch(index + 9, part)))
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.flip(0), losses=losses)
        show(*losses)

    train(model, backward)


def uneven_tensor_parallelism() -> None:
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    columns = ColwiseParallel(output_layouts=Replicate())

    def backward(model: Any, index: int) -> None:
        model(batch(index, mesh["dp"].get_local_rank())).square().mean().backward()

    for hidden in (3, 5, 17, 4):
        model = whole_model(hidden=hidden)
        parallelize_module(model, mesh["tp"], {"0.0": columns, "1.0": columns})
        place = (lambda param: Shard(param.dim() - 1)) if hidden == 4 else None
        train(sharded(model, mesh=mesh["dp"], shard_placement_fn=place), backward, foreach=False)


def parallelized() -> Any:
    """Cut by tensor parallelism as well: between body and head each rank has some of the rows."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Head()
    plan = {
        "body": ColwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "norm": SequenceParallel(sequence_dim=0),
        "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh["dp"], "mp_policy": policy}
    fully_shard(model.body, reshard_after_forward=True, **options)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def the_loop_of_torchtitan() -> None:
    model = parallelized()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for index in range(2 * NUM_STEPS):
        optimizer.zero_grad()
        for half in range(2):
            model.set_requires_gradient_sync(half == 1)
            loss = model(batch(2 * index + half, dist.get_rank() // 2)).square().mean() / 2
            loss.backward()
            show(loss)
        gradients = [param.grad for param in model.parameters()]
        norm: Any = nn.utils.get_total_norm(gradients, foreach=True)
        norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm, foreach=True)
        show(norm)
        optimizer.step()
        scheduler.step()

"""States that are harder than moments: wrappers, extra state, a state on each rank."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from adam_helpers import make_muon
from checkpoint_helpers import Holding
from graphfsdp.optim import FusedAdam
from ranks import RankPool, on_ranks


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for index in range(num_steps):
        generator = torch.Generator().manual_seed(index)
        optimizer.zero_grad()
        x = torch.randn(4, 4, generator=generator).to(next(model.parameters()).dtype)
        model(x).square().sum().backward()
        optimizer.step()


class Counting(nn.Module):
    """A module with state that is no tensor, inside wrappers that change names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "range": (1, 2.5, None), "table": torch.arange(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["range"] == (1, 2.5, None)
        assert torch.equal(state["table"], torch.arange(3))
        self.calls = state["calls"]


def test_extra_state_and_names_without_wrappers(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = Counting()
    inner(torch.ones(1, 2))
    wrapped = nn.Sequential(checkpoint_wrapper(inner))
    graphfsdp.save(tmp_path, wrapped)
    other = nn.Sequential(Counting())
    graphfsdp.load(tmp_path, other)
    assert other[0].calls == 1
    assert torch.equal(other.get_parameter("0.linear.weight"), inner.linear.weight)


def test_views_of_one_memory_come_back_with_their_values(tmp_path: Path) -> None:
    def make(values: Tensor) -> nn.Module:
        model = nn.Module()
        for name, part in {"a": values[:6], "b": values[4:], "c": values[1:3].conj()}.items():
            model.register_buffer(name, part)
        return model

    model = make(torch.randn(9, dtype=torch.complex64))
    graphfsdp.save(tmp_path, model)
    other = make(torch.zeros(9, dtype=torch.complex64))
    graphfsdp.load(tmp_path, other)
    for name, value in model.named_buffers():
        assert torch.equal(other.get_buffer(name), value), name


def own(number: int) -> Holding:
    """Return an object whose state is another one on each rank, with a large tensor in it."""
    state = {"own": torch.full((5000,), float(number)), "common": torch.arange(9000)}
    return Holding({**state, "inf": float("inf"), 3: {(4, None): [0.5, True]}})


def is_all(number: int, thing: Holding) -> bool:
    expected = own(number).state
    return thing.state.keys() == expected.keys() and all(
        torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key]
        for key, value in thing.state.items()
    )


def objects_of_ranks(path: Path, saves: bool) -> str:
    model = nn.Linear(1, 1)
    rank = dist.get_rank()
    if saves:
        graphfsdp.save(path, model, objects={"own": own(rank + 1), "common": own(7)})
    mine, common = own(-1), own(-1)
    try:
        graphfsdp.load(path, model, objects={"own": mine, "common": common})
    except graphfsdp.CheckpointMismatchError as error:
        graphfsdp.load(path, model, objects={"common": common})
        assert is_all(7, common)
        return str(error)
    assert is_all(rank + 1, mine)
    assert is_all(7, common)
    return ""


def test_objects_keep_a_state_per_rank(tmp_path: Path, ranks1: RankPool, ranks2: RankPool) -> None:
    assert ranks2.run(objects_of_ranks, tmp_path, True) == ["", ""]
    said = ranks1.run(objects_of_ranks, tmp_path, False)[0]
    assert "objects: 'own' was saved with a state of its own on each of 2 ranks; here are 1" in said
    assert "common" not in said
    # Of what was equal on all ranks there is one state, large tensors too.
    common = own(-1)
    graphfsdp.load(tmp_path, nn.Linear(1, 1), objects={"common": common})
    assert is_all(7, common)


def buffers_of_ranks(path: Path, saves: bool) -> list[float]:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5000))
    graphfsdp.fully_shard(model)
    if saves:
        for norm in model:
            assert isinstance(norm, nn.BatchNorm1d)
            assert norm.running_mean is not None
            norm.running_mean.fill_(dist.get_rank() + 1)
        graphfsdp.save(path, model)
        for norm in model:
            norm.running_mean.zero_()  # type: ignore[operator]
    graphfsdp.load(path, model)
    return [float(norm.running_mean.mean()) for norm in model]  # type: ignore[operator]


def test_statistics_of_each_rank_come_back_to_it(
    tmp_path: Path, ranks1: RankPool, ranks2: RankPool
) -> None:
    """On another number of ranks, those of rank 0 do."""
    assert ranks2.run(buffers_of_ranks, tmp_path, True) == [[1.0, 1.0], [2.0, 2.0]]
    assert ranks1.run(buffers_of_ranks, tmp_path, False) == [[1.0, 1.0]]


@on_ranks("ranks4")
def test_groups_of_ranks_save_apart(tmp_path: Path) -> None:
    """Two groups of ranks save and load models of their own at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, rank = dist.get_rank() // 2, dist.get_rank()
    model, other = (nn.Linear(3, 5) for _ in range(2))
    dist.broadcast(model.weight.data, 2 * mine, group=groups[mine])
    dist.broadcast(model.bias.data, 2 * mine, group=groups[mine])
    loaded = own(-1)
    folder, group = tmp_path / str(mine), groups[mine]
    graphfsdp.save(folder, model, objects={"random": own(rank)}, process_group=group)
    graphfsdp.load(folder, other, objects={"random": loaded}, process_group=group)
    assert torch.equal(other.weight, model.weight)
    assert is_all(rank, loaded)


@on_ranks("ranks2")
def test_a_unit_that_was_unsharded_by_hand_is_resharded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    graphfsdp.fully_shard(model)
    assert isinstance(model, graphfsdp.FSDPModule)
    expected = model(torch.ones(1, 3)).detach().clone()
    model.unshard()
    graphfsdp.save(tmp_path, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.unshard()
    graphfsdp.load(tmp_path, model)
    assert torch.equal(model(torch.ones(1, 3)), expected)


@on_ranks("ranks2")
def test_sharded_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    model = graphfsdp.fully_shard(nn.Linear(4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, shape in ((model.bias.detach(), r"\(6,\)"), (torch.ones(2), r"\(2,\)")):
        optimizer.state[model.weight]["rows"] = rows
        said = rf"weight\.rows has the shape {shape} and .* sharded parameter of the shape \(6, 4\)"
        with pytest.raises(graphfsdp.CheckpointError, match=said):
            graphfsdp.save(tmp_path, model, optimizer)
    average = Holding({"weight": model.weight.detach()})
    said = r"objects/average\.weight is sharded, .*Remedy: save it as a part of the model"
    with pytest.raises(graphfsdp.CheckpointError, match=said):
        graphfsdp.save(tmp_path, model, objects={"average": average})


def test_main_weights_that_were_saved_as_16_bits_are_refused(tmp_path: Path) -> None:
    """As Transformer Engine can: bfloat16 weights, and the 16 bits that these lack."""
    models = [nn.Linear(4, 5, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [FusedAdam(each.parameters(), master_weights=True) for each in models]
    moments = {"exp_avg": torch.rand(5, 4), "exp_avg_sq": torch.rand(5, 4)}
    rest = torch.ones(5, 4, dtype=torch.int16)
    state = {"step": torch.tensor(1.0), **moments, "master_param": rest}
    optimizers[0].state[models[0].weight] = state
    graphfsdp.save(tmp_path, models[0], optimizers[0])
    before = models[1].weight.detach().clone()
    with pytest.raises(
        graphfsdp.CheckpointMismatchError, match=r"'master_param' of .* torch\.int16"
    ):
        graphfsdp.load(tmp_path, models[1], optimizers[1])
    assert torch.equal(models[1].weight, before)
    said = "'weight': saved in torch.bfloat16 and the bits that it lacks, here torch.float32"
    with pytest.raises(graphfsdp.CheckpointMismatchError, match=said):
        graphfsdp.load(tmp_path, nn.Linear(4, 5, bias=False))


class Own(torch.optim.Optimizer):
    """A state of another precision than its weights', and numbers that are no tensors."""

    def __init__(self, params: Any, lr: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["num"] = state.get("num", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param).to(self._dtype))
                mean.lerp_(param.grad.to(self._dtype), 0.1)
                param.sub_((group["lr"] / state["num"] * mean).to(param.dtype))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Own in 64 bits": functools.partial(Own, dtype=torch.float64),
    "Own in 16 bits": functools.partial(Own, dtype=torch.bfloat16),
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    **{
        name: getattr(torch.optim, name)
        for name in ("AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor")
    },
    "FusedAdam": functools.partial(FusedAdam, weight_decay=0.1, maximize=True, master_weights=True),
    "Muon": make_muon,
}


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_come_back(name: str, num_before: int, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if name.startswith("Fused") else torch.float32

    def run(seed: int, num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3, dtype=dtype)
        optimizer = OPTIMIZERS[name](model.parameters(), lr=0.01)
        step_on(model, optimizer, num_steps)
        return model, optimizer

    model, optimizer = run(0, 3)
    graphfsdp.save(tmp_path, model, optimizer)
    other, its_optimizer = run(1, num_before)
    graphfsdp.load(tmp_path, other, its_optimizer)
    for each in ((model, optimizer), (other, its_optimizer)):
        step_on(*each, 3)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

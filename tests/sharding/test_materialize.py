"""Models that are built on the meta device, sharded, and given memory and values afterwards."""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from graphfsdp.sharding.layout import plan_unit
from overlap_helpers import Stack
from parallel_models import plain_model, tensor_parallel
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    VOCABULARY,
    Block,
    Training,
    adam,
    assert_equal_tensors,
    assert_replayed,
    assert_same_training,
    full_parameters,
    on_meta,
    raises_on_rank,
    shard,
    train,
)


class Scaled(nn.Module):
    """Parameters of its own, a frozen one, and buffers: drawn, counted, and kept out of states."""

    noise: Tensor
    signs: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(5, width))
        self.scale = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.empty(width), requires_grad=False)
        self.register_buffer("noise", torch.empty(width), persistent=False)
        self.register_buffer("signs", torch.empty(width, dtype=torch.bool))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.matrix, std=0.1)
        nn.init.constant_(self.scale, 1.5)
        nn.init.normal_(self.frozen, std=0.1)
        with torch.no_grad():
            self.noise.normal_(std=0.1)
            self.signs.copy_(self.noise > 0)
            self.count.fill_(7)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.matrix.t()) @ self.matrix + self.noise * self.signs
        out: Tensor = (x + hidden * self.scale + self.frozen + self.empty.sum()).to(x.dtype)
        return out


class MetaNet(nn.Module):
    """Tied embedding and head, normalisation with statistics, attention, a Scaled block."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        width = 8
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True),
                Scaled(width),
                nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, width)),
            ]
        )
        self.norm = norm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * 0.3
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden.flatten(0, 1)))
        return nn.functional.cross_entropy(logits, targets.flatten())


def values_of(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return full_parameters(model) | buffers


MIXED = graphfsdp.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    main_params_dtype=torch.float32,
    main_grads_dtype=torch.bfloat16,
    use_decoupled_grad=True,
)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [*(("ranks2", strategy) for strategy in STRATEGIES), ("ranks4", "optim_grads_params")],
)
@on_ranks()
def test_a_model_from_meta_is_the_model_from_constructors(strategy: str) -> None:
    """Bit for bit: values of every kind, then captured training; ranks have other seeds.

    Of four ranks some hold no rows.
    """
    trains = dist.get_world_size() == 2 and strategy in ("optim_grads", "optim_grads_params")
    policy = MIXED if strategy == "optim_grads" else graphfsdp.MixedPrecisionPolicy()
    early = strategy == "optim_grads_params"  # an optimizer that was made on meta goes on
    runs: list[Training] = []
    initial: list[dict[str, Tensor]] = []
    norm: Any = nn.BatchNorm1d if policy.param_dtype is None else nn.LayerNorm
    model: Any
    for meta in (False, True):
        if meta:
            torch.manual_seed(dist.get_rank())  # the first rank's values must win
            model = on_meta(lambda: MetaNet(norm))
            shard(model, strategy, mp_policy=policy)
            assert all(param.is_meta for param in model.parameters())
            held = {name: id(param) for name, param in model.named_parameters()}
            optim = adam(model) if early else None
            assert id(graphfsdp.materialize(model)) == id(model)
            assert held == {name: id(param) for name, param in model.named_parameters()}
            assert {p.device.type for p in model.parameters()} == {rank_device().type}
            assert model.head.weight is model.embedding.weight
            assert not model.blocks[1].frozen.requires_grad
        else:
            torch.manual_seed(0)  # as every rank must get it: of the first one's random numbers
            with rank_device():
                model = MetaNet(norm)
            shard(model, strategy, mp_policy=policy)
            optim = None
        initial.append(values_of(model))
        if trains:
            runs.append(train(model, optim or adam(model)))
    assert_equal_tensors(*initial)
    if trains:
        assert_same_training(*runs)
        assert_replayed(runs[1])


class Kept(nn.Module):
    """A layer some of whose tensors were built on a real device; its method writes to all."""

    real: nn.Parameter
    table: Tensor
    made: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.register_parameter("real", nn.Parameter(torch.full((6, 4), 3.0, device="cpu")))
        self.register_buffer("table", torch.full((2,), 5.0, device="cpu"), persistent=False)
        self.register_buffer("made", torch.empty(2), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(3)
            self.real.fill_(-1)
            self.table = torch.full((2,), -1.0)
            self.made.fill_(2)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks("ranks2")
def test_only_what_is_on_meta_gets_memory_and_values(strategy: str) -> None:
    model = on_meta(lambda: nn.Sequential(Kept(), nn.Linear(4, 4)))
    model[0].weight.important = "yes"
    graphfsdp.fully_shard(model, strategy=strategy)
    real, table = model[0].real, model[0].table
    model[1].weight.named = "late"
    graphfsdp.materialize(model)
    assert model[0].real is real
    assert model[0].table is table
    assert torch.equal(real.full_tensor(), torch.full((6, 4), 3.0))
    assert torch.equal(table, torch.full((2,), 5.0))
    assert torch.equal(model[0].made, torch.full((2,), 2.0))
    assert torch.equal(model[0].weight.full_tensor(), torch.full((6, 4), 3.0))
    assert model[0].weight.important == "yes"
    assert model[1].weight.named == "late"
    before = values_of(model)
    graphfsdp.materialize(model)  # nothing is left to do
    assert_equal_tensors(before, values_of(model))


class Pretrained(nn.Module):
    """Initialised as Hugging Face's models are: by its root, after the constructors."""

    norm: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.empty(6))
        self.tokens = nn.Embedding(5, 6)
        self.out = nn.Linear(6, 5, bias=False)
        self.out.weight = self.tokens.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if module is self.norm:
            self.norm.weight.data.fill_(1.0)


@on_ranks("ranks2")
def test_init_weights_of_a_root_and_functions_of_the_user() -> None:
    torch.manual_seed(0)
    expected = Pretrained()
    model = on_meta(Pretrained)
    for layer in model.layers:
        graphfsdp.fully_shard(layer)
    graphfsdp.fully_shard(model)
    graphfsdp.materialize(model)
    got = full_parameters(model)
    # Random numbers lie elsewhere in the stream than behind constructors: by distribution.
    for name, param in expected.named_parameters():
        if param.dim() == 1:
            assert torch.equal(param, got[name].cpu()), name
        else:
            assert 0.01 < float(got[name].std()) < 0.03, name
    assert model.out.weight is model.tokens.weight

    def mine(module: Any) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=3.0)
        elif not list(module.children()):
            nn.init.constant_(module.weight, 4.0)

    torch.manual_seed(0)
    plain = on_meta(Pretrained)
    graphfsdp.materialize(plain, rank_device(), init=mine)  # no unit at all
    assert type(plain.norm.weight) is nn.Parameter
    assert torch.equal(plain.norm.weight.detach().cpu(), torch.full((6,), 4.0))
    assert plain.out.weight is plain.tokens.weight
    assert 2.0 < float(plain.tokens.weight.detach().std()) < 4.0


def as_nanogpt_does() -> nn.Module:
    model = Pretrained()
    nn.init.normal_(next(model.layers.parameters()), std=0.01)
    return model


@on_ranks("ranks2")
def test_what_a_constructor_sets_besides_is_told() -> None:
    for shards in (True, False):
        model: Any = on_meta(as_nanogpt_does)
        if shards:
            graphfsdp.fully_shard(model.layers[0])
            graphfsdp.fully_shard(model)
        with pytest.warns(UserWarning, match="'layers.0.weight' was written more often"):
            graphfsdp.materialize(model, rank_device())
    model = on_meta(as_nanogpt_does)
    graphfsdp.materialize(model, init=lambda each: [p.data.fill_(1) for p in each.parameters()])


@on_ranks("ranks4")
def test_parameters_of_model_parallel_ranks_get_the_values_of_the_whole_model() -> None:
    """What a whole model's initialisation draws; parameters without one are set by hand."""

    def set_own(module: nn.Module) -> None:
        for name in ("scale", "frozen"):
            if hasattr(module, name):
                nn.init.constant_(getattr(module, name), 0.5)

    model = tensor_parallel(meta=True)
    torch.manual_seed(3 + dist.get_rank())  # the first rank's values count
    graphfsdp.materialize(model, init=set_own)
    plain = plain_model().to(rank_device())
    torch.manual_seed(3)
    for module in plain.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    set_own(plain)
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), whole), name


@pytest.mark.gpu
@on_ranks("gpu_ranks")
def test_a_model_without_units_gets_the_first_ranks_values_on_any_device() -> None:
    """NCCL, the only way between these ranks, sends nothing from a CPU."""
    torch.manual_seed(dist.get_rank())
    model = on_meta(lambda: nn.Sequential(Pretrained(), nn.Linear(4, 4)))
    graphfsdp.materialize(model, "cpu")
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    mine = torch.cat([param.detach().flatten() for param in model.parameters()]).to(rank_device())
    of_first = mine.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(mine, of_first)
    assert bool(mine.isfinite().all())


class Peak(TorchDispatchMode):
    """The most bytes of storages that were made inside and lived at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if type(leaf) is Tensor and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        self._alive = {key: pair for key, pair in self._alive.items() if pair[0]() is not None}
        self.peak_bytes = max(self.peak_bytes, sum(num for _, num in self._alive.values()))
        return result


@on_ranks("ranks4")
def test_never_more_is_whole_than_one_block_and_the_root() -> None:
    """Shards, and what is whole; beside them names of units that ranks compare, as bytes."""
    model = on_meta(lambda: Stack(64, 10))
    parts = (*model.blocks, model.head)  # the root has the head
    shapes = [[tuple(param.shape) for param in part.parameters()] for part in parts]
    whole_bytes = 4 * sum(param.numel() for param in model.parameters())
    with Peak() as sharding:
        shard(model, "optim_grads_params")
    assert sharding.peak_bytes < 4096  # lists of names; no weight
    plans = [plan_unit(unit, num_ranks=4, itemsize=4) for unit in shapes]
    # main weights and main grads
    kept = 2 * 4 * sum(buffer.shard_numel for buffers in plans for buffer in buffers)
    *blocks, root = [4 * sum(math.prod(shape) for shape in unit) for unit in shapes]
    with Peak() as peak:
        graphfsdp.materialize(model)
    # gloo's threads give up the block before a little after its collective has ended.
    bound = kept + root + 2 * max(blocks)
    assert bound * 0.8 < peak.peak_bytes <= bound + 16384
    assert peak.peak_bytes < 0.75 * (kept // 2 + whole_bytes)


class Broken(nn.Module):
    """Its method fails, does half, or puts in another tensor, on the ranks that it is told."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.how, self.rank = how, rank

    def reset_parameters(self) -> None:
        how = self.how if dist.get_rank() == self.rank or self.rank < 0 else "right"
        if how == "raise":
            raise ArithmeticError("no luck")
        if how == "shape":
            self.weight = nn.Parameter(torch.ones(2, 2))
        elif how == "new":
            self.weight = nn.Parameter(torch.full((6, 4), 9.0))
        elif how != "nothing":
            nn.init.ones_(self.weight[: 3 if how == "half" else 6])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Around(nn.Module):
    def __init__(self, how: str, rank: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Broken(how, rank)])
        self.last = nn.Linear(6, 2)
        self.plain: Tensor
        self.register_buffer("plain", torch.empty(3))

    def reset_parameters(self) -> None:
        self.plain.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x) + self.plain.sum()
        return out


@pytest.mark.parametrize(
    ("how", "rank", "expected"),
    [
        ("raise", -1, "the initialisation of blocks.1 (Broken) failed: ArithmeticError: no luck"),
        ("raise", 1, "rank 1: the initialisation of blocks.1 (Broken) failed: ArithmeticError"),
        ("half", 0, "rank 0: parameter 'blocks.1.weight' has no values, or only some"),
        ("nothing", -1, "parameter 'blocks.1.weight' has no values, or only some, after"),
        ("shape", 1, "rank 1: the initialisation of parameter 'blocks.1.weight' put shape (2, 2)"),
    ],
)
@on_ranks("ranks2")
def test_a_failure_on_one_rank_is_told_to_all(how: str, rank: int, expected: str) -> None:
    """Every rank raises the same, and the model can be materialised afterwards."""
    model: Any = shard(on_meta(lambda: Around(how, rank)), "optim_grads_params")
    with raises_on_rank(graphfsdp.GraphFSDPError) as messages:
        graphfsdp.materialize(model)
    assert model.plain.is_meta
    remedy = "has no values yet. Remedy: graphfsdp.materialize"
    with raises_on_rank(graphfsdp.ConfigError, remedy):
        model(torch.zeros(2, 4, device=rank_device()))
    model.blocks[1].how = "new"
    model.blocks[1].rank = -1
    graphfsdp.materialize(model)
    assert torch.equal(full_parameters(model)["blocks.1.weight"], torch.full((6, 4), 9.0))
    model(torch.zeros(2, 4, device=rank_device())).sum().backward()
    said: list[Any] = [None, None]
    dist.all_gather_object(said, messages[0])
    assert said[0] == said[1]
    assert said[0].startswith(expected)


@on_ranks("ranks2")
def test_misuses_are_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.register_buffer("table", torch.empty(3))

    model = on_meta(lambda: nn.Sequential(Bare(), nn.Linear(2, 2)))
    graphfsdp.fully_shard(model)
    with raises_on_rank(
        graphfsdp.ConfigError, "nothing initialises '0.weight' (Bare), '0.table' (Bare)", "init="
    ):
        graphfsdp.materialize(model)
    with raises_on_rank(graphfsdp.ConfigError, "'0.weight' has no values"):
        graphfsdp.materialize(model, init=lambda module: None)
    for call, words in (
        (lambda: graphfsdp.materialize(model, "meta"), "cannot give memory on the meta device"),
        (lambda: graphfsdp.materialize(model, init=3), "as init a function of a module; got FSDP"),  # type: ignore[arg-type]
        (lambda: model.half(), "cast the model before fully_shard"),
        (lambda: model.unshard(), "has no values yet"),
        (lambda: graphfsdp.capture(model, adam(model))(torch.ones(1, 2)), "meta"),
    ):
        with raises_on_rank(graphfsdp.GraphFSDPError, words):
            call()
    model = on_meta(Pretrained)
    model._init_weights = lambda name, module: None
    with raises_on_rank(graphfsdp.ConfigError, "cannot be called with 'layers.0' (Linear) alone"):
        graphfsdp.materialize(model)
    other = nn.Linear(2, 2, device="meta" if dist.get_rank() else rank_device())
    graphfsdp.fully_shard(other)
    with raises_on_rank(graphfsdp.ConfigError, "without values"):
        graphfsdp.materialize(other)
    held = graphfsdp.fully_shard(nn.Linear(2, 2, device="meta"))
    keeper = weakref.ref(held.weight)
    with raises_on_rank(graphfsdp.ConfigError, "'weight' cannot be moved from the meta device"):
        graphfsdp.materialize(held)
    assert keeper() is not None


class Tabled(nn.Module):
    """A model with a table that no checkpoint holds, and a buffer that one does."""

    table: Tensor
    steps: Tensor

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("steps", torch.tensor(5))
        self.head = nn.Linear(8, 3, bias=bias)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8.0))
        self.steps.fill_(-1)
        torch.rand(())  # moves the generator

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.table)
        out: Tensor = self.head(x).square().mean()
        return out


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index + 10 * dist.get_rank())
    return torch.randn(4, 8, generator=generator).to(rank_device())


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks("ranks2")
def test_a_run_goes_on_in_a_model_from_meta(tmp_path: Path, strategy: str) -> None:
    torch.manual_seed(0)
    first: Any = shard(Tabled().to(rank_device()), "optim_grads_params")
    optim = adam(first)
    train(first, optim, data=[(batch(0),), (batch(1),)])
    graphfsdp.save(tmp_path, first, optim, step=2)
    runs, generators = [], []
    for meta in (False, True):
        torch.manual_seed(7)
        model: Any = on_meta(Tabled) if meta else Tabled().to(rank_device())
        shard(model, strategy)
        held = list(map(id, model.parameters()))
        model.prepare_shards()  # to where they stay
        optim = adam(model)  # before there is memory
        graphfsdp.load(tmp_path, model, optim)
        generators.append(torch.get_rng_state())
        assert held == list(map(id, model.parameters()))
        assert torch.equal(model.table, torch.arange(8.0, device=rank_device()))
        assert int(model.steps) == 5
        runs.append(train(model, optim, data=[(batch(index),) for index in range(2, 8)]))
    assert torch.equal(*generators)
    assert_same_training(*runs)
    model = on_meta(Tabled)  # whole; no unit
    with rank_device():
        graphfsdp.load(tmp_path, model)
    assert_equal_tensors(full_parameters(first), full_parameters(model))
    model = shard(on_meta(lambda: Tabled(bias=True)), strategy)
    with raises_on_rank(graphfsdp.CheckpointMismatchError, "'head.bias' is missing"):
        graphfsdp.load(tmp_path, model)
    with raises_on_rank(graphfsdp.ConfigError, "has no values yet"):
        model(batch(0))
    assert model.steps.is_meta

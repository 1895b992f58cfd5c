"""Layouts of units: what always holds, known models, docs/layout.md; what gives memory back.

Parameters that are cut by another dimension than the first, or over a mesh of their own.
"""

import copy
import gc
import math
import warnings
import weakref
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_fully_shard import Tracer, compiled_net
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as torchs_common
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import forked_programs
import graphfsdp
from counting_net import mean_square
from graphfsdp.sharding.layout import fsdp2_shard_numel, plan_unit
from overlap_helpers import NUM_BLOCKS, WIDTH, Stack, Watch, make_stack
from parallel_models import TP_AXES, part_of_axis, tensor_parallel, whole_batches
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    adam,
    assert_equal_tensors,
    assert_trains_as_whole,
    batches,
    buffers,
    full_parameters,
    hybrid_mesh,
    make_net,
    my_part,
    on_meta,
    raises_on_rank,
    replayed_as_eager,
    shard,
    train,
)

Shape = tuple[int, ...]

SIZES = st.one_of(
    st.integers(0, 20),
    st.sampled_from([49, 64, 100, 127, 128, 768, 1000, 3073, 3584, 4096, 11008, 50257]),
)
SHAPES = st.lists(st.lists(SIZES, max_size=4).map(tuple), max_size=12)
NUM_RANKS = st.one_of(st.integers(1, 9), st.integers(1, 4096), st.sampled_from([64, 512, 4096]))
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
DOCS = Path(__file__).parents[2] / "docs"


def decoder_layer(hidden: int, kv: int, ffn: int, *, qkv_bias: bool = False) -> tuple[Shape, ...]:
    """q, k, v, gate and up are separate, as published; fusing them changes no figure."""
    bias = (lambda size: ((size,),)) if qkv_bias else (lambda size: ())
    return (
        *((hidden, hidden), *bias(hidden)),
        *((kv, hidden), *bias(kv)),
        *((kv, hidden), *bias(kv)),
        (hidden, hidden),
        *((ffn, hidden), (ffn, hidden), (hidden, ffn)),
        *((hidden,), (hidden,)),
    )


def convolutions(*weights: tuple[int, int, int, int]) -> tuple[Shape, ...]:
    """Return the shapes of convolutions without bias, each followed by a batch norm."""
    return tuple(shape for weight in weights for shape in (weight, weight[:1], weight[:1]))


def resnet18() -> tuple[Shape, ...]:
    weights = [(64, 3, 7, 7)]
    for before, width in ((64, 64), (64, 128), (128, 256), (256, 512)):
        shortcut = [(width, before, 1, 1)] if before != width else []
        first = [(width, before, 3, 3), (width, width, 3, 3), *shortcut]
        weights += [*first, (width, width, 3, 3), (width, width, 3, 3)]
    return (*convolutions(*weights), (1000, 512), (1000,))


# Those of the table in docs/layout.md.
UNITS: dict[str, tuple[Shape, ...]] = {
    "Llama-3-8B layer": decoder_layer(4096, 1024, 14336),
    "Llama-2-7B layer": decoder_layer(4096, 4096, 11008),
    "Qwen2.5-7B layer": decoder_layer(3584, 512, 18944, qkv_bias=True),
    "ffn 3073 x 768 layer": (*((768, 768),) * 4, (3073, 768), (768, 3073), (768,), (768,)),
    "mix of convolutions": convolutions(
        *((64, 3, 7, 7), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3)),
        *((64, 512, 3, 3), (64, 512, 1, 1)),
    ),
    "ResNet-18": resnet18(),
    "MLP 784-300-100-10": ((300, 784), (300,), (100, 300), (100,), (10, 100), (10,)),
}


@settings(max_examples=300)
@given(shapes=SHAPES, num_ranks=NUM_RANKS, itemsize=ITEMSIZES)
@example(shapes=[], num_ranks=3, itemsize=4)
@example(shapes=[(0,), (4, 0), ()], num_ranks=3, itemsize=4)
@example(shapes=[(4, 7), (4, 7)], num_ranks=4, itemsize=2)
@example(shapes=[(8191, 8191), (4096, 8191), (8191,)], num_ranks=4096, itemsize=1)
def test_any_unit_is_laid_out_right(shapes: list[Shape], num_ranks: int, itemsize: int) -> None:
    buffers = plan_unit(shapes, num_ranks=num_ranks, itemsize=itemsize)
    again = plan_unit(list(shapes), num_ranks=num_ranks, itemsize=itemsize)
    assert (buffers, hash(buffers)) == (again, hash(again))
    slots = sorted((slot for buffer in buffers for slot in buffer.slots), key=lambda s: s.index)
    assert [(slot.index, slot.shape) for slot in slots] == list(enumerate(shapes))
    for buffer in buffers:
        shard_numel = buffer.shard_numel
        for before, after in pairwise(buffer.slots):
            assert before.offset + math.prod(before.shape) <= after.offset
        for slot in buffer.slots:
            row_numel = math.prod(slot.shape[1:])
            assert slot.offset * itemsize % 16 == 0
            assert slot.offset + slot.numel <= num_ranks * shard_numel
            if slot.numel:
                first, last = slot.offset // shard_numel, (slot.end - 1) // shard_numel
                for border in {first + 1, first + 2, last} & set(range(first + 1, last + 1)):
                    assert (border * shard_numel - slot.offset) % row_numel == 0
    content = sum(math.prod(shape) for shape in shapes)
    total_numel = sum(num_ranks * buffer.shard_numel for buffer in buffers)
    assert sum(buffer.num_padding for buffer in buffers) == total_numel - content >= 0
    alignment = 16 // itemsize
    theirs = (fsdp2_shard_numel(shape, num_ranks) for shape in shapes)
    bound = 1.01 * num_ranks * sum(math.ceil(numel / alignment) * alignment for numel in theirs)
    assert total_numel <= bound
    if num_ranks == 1:  # one buffer, and no padding but for alignment
        assert len(buffers) == (1 if shapes else 0)
        aligned = sum(-(-math.prod(shape) * itemsize // 16) * 16 for shape in shapes)
        assert total_numel * itemsize <= aligned


MATRICES = st.tuples(st.integers(1, 70), st.integers(1, 12).map(lambda blocks: 32 * blocks))
IN_BLOCKS = st.tuples(st.lists(MATRICES, max_size=8), st.just(1), st.just(32))
IN_VALUES = st.tuples(SHAPES, ITEMSIZES, st.just(1))


@settings(max_examples=200)
@given(unit=st.one_of(IN_VALUES, IN_BLOCKS), num_ranks=st.integers(1, 40))
def test_every_row_has_exactly_one_owner(
    unit: tuple[list[Shape], int, int], num_ranks: int
) -> None:
    """And neither starts nor borders cut blocks of values that share a scale."""
    shapes, itemsize, block = unit
    for buffer in plan_unit(shapes, num_ranks=num_ranks, itemsize=itemsize):
        assert buffer.shard_numel % block == 0
        for slot in buffer.slots:
            next_row, borders = 0, []
            for rank in range(num_ranks):
                rows = buffer.local_rows(slot, rank)
                borders.append(rows.first_row)
                assert rows.first_row == next_row
                assert rows.numel == rows.num_rows * slot.row_numel
                assert rows.shard_offset % block == 0
                assert 0 <= rows.shard_offset <= buffer.shard_numel - rows.numel
                if rows.numel:
                    begin = rank * buffer.shard_numel + rows.shard_offset
                    assert begin == slot.offset + rows.first_row * slot.row_numel
                next_row += rows.num_rows
            assert next_row == slot.num_rows
            assert buffer.borders(slot) == (*borders, slot.num_rows)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("num_ranks", [8, 64, 512])
def test_the_table_of_the_document_is_of_these_layouts(unit: str, num_ranks: int) -> None:
    """And each cell within one percent of FSDP2, whose shards are not rounded up here."""
    shapes = UNITS[unit]
    buffers = plan_unit(shapes, num_ranks=num_ranks, itemsize=2)
    content = sum(math.prod(shape) for shape in shapes)
    ours = sum(buffer.total_numel for buffer in buffers)
    theirs = num_ranks * sum(fsdp2_shard_numel(shape, num_ranks) for shape in shapes)
    assert ours <= 1.01 * theirs
    padding = [f"{100 * (total / content - 1):.2f}" for total in (ours, theirs)]
    page = (DOCS / "layout.md").read_text(encoding="utf-8")
    assert f"| {unit} | {num_ranks} | {padding[0]} | {len(buffers)} | {padding[1]} | " in page


def test_the_document_shows_what_its_example_prints() -> None:
    blocks = (DOCS / "layout.md").read_text(encoding="utf-8").split("```")
    program, printed = blocks[1].removeprefix("python\n"), blocks[3].strip()
    assert forked_programs.run_source(program).stdout.strip() == printed


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, None])
@on_ranks("ranks2")
def test_weights_are_cast_where_their_gather_has_them(param_dtype: torch.dtype | None) -> None:
    """Main weights that fit are given themselves; nobody has a cast beside the whole weights."""
    policy = graphfsdp.MixedPrecisionPolicy(param_dtype=param_dtype)
    model = make_stack("optim_grads_params", mp_policy=policy)
    places: list[tuple[int, int, int]] = []

    def note(whole: Tensor, part: Tensor) -> None:
        places.append((whole.data_ptr(), part.data_ptr(), part.nbytes))

    with Watch("all_gather", note):
        model(torch.randn(4, WIDTH, device=rank_device())).backward()
    mains = {buffer.main.data_ptr() for buffer in buffers(model)}
    assert len(places) > NUM_BLOCKS
    for whole, part, num_bytes in places:
        if param_dtype is None:
            assert part in mains
        else:
            assert part == whole + dist.get_rank() * num_bytes


@on_ranks("ranks2")
def test_whole_parameters_give_their_memory_back() -> None:
    """An optimizer that was made before does not keep the whole weights alive."""
    model = Stack().to(rank_device())
    optim = adam(model)
    storages = [weakref.ref(param) for param in model.parameters()]
    shard(model, "optim_grads_params")
    held = [ref() for ref in storages]
    assert all(param is not None for param in held), "the optimizer holds them"
    total = sum(param.untyped_storage().nbytes() for param in held if param is not None)
    assert optim.param_groups
    assert total == 0


@on_ranks("ranks2")
def test_a_model_that_is_dropped_gives_its_buffers_back() -> None:
    model = make_net("optim_grads_params")
    optim = adam(model)
    step = graphfsdp.capture(model, optim)
    for data in batches(5):
        step(*my_part(data))
    step.close()
    reference = weakref.ref(buffers(model)[0])
    del model, optim, step
    gc.unfreeze()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(("ranks", "is_compiled"), [("ranks2", True), ("ranks4", False)])
@on_ranks()
def test_whole_weights_are_let_go_between_forward_and_backward(is_compiled: bool) -> None:
    """Saved weights are places in the gathered buffer, DTensors too, so that it is freed."""
    if is_compiled:
        model: Any = compiled_net("optim_grads_params", "before", Tracer())
        batch: Any = my_part(batches(1)[0])
    else:
        model = tensor_parallel(sequence=True)
        batch = part_of_axis(whole_batches()[0], hybrid_mesh((2, 2), TP_AXES), "dp")
    gathered: list[StorageWeakRef] = []

    def note(block: nn.Module, args: object, out: object) -> None:
        for buffer in buffers(block):
            assert buffer.full is not None
            gathered.append(StorageWeakRef(buffer.full.untyped_storage()))

    for block in model.blocks:
        block.register_forward_hook(note, prepend=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile
        loss = model(*batch)
        assert len(gathered) >= 2
        assert all(storage.expired() for storage in gathered)
        loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "blocks" in name)


SIZE = 8
NUM_STEPS = 7


class Experts(nn.Module):
    """Fewer than ranks, so that they are cut along their features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, SIZE, 12) / 4)
        self.down = nn.Parameter(torch.randn(3, 12, SIZE) / 4)
        self.gate = nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("ni,eih->neh", x, self.up).tanh()
        out = torch.einsum("neh,eho->neo", mixed, self.down)
        result: Tensor = x + (out * self.gate(x).softmax(-1)[..., None]).sum(1)
        return result


def place(param: nn.Parameter) -> Shard | None:
    """The first matrix by its last dimension, the second one by that in the middle."""
    if param.dim() < 3:
        return None
    return Shard(-1) if param.shape[-1] > SIZE else Shard(1)


def make(shard: Any = graphfsdp.fully_shard, dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Experts(), Experts(), nn.Linear(SIZE, 1))
    model.to(rank_device(), dtype)
    for layer in model[:2] if shard is not None else ():
        shard(layer, shard_placement_fn=place, **options)
    return model if shard is None else shard(model, **options)


def data(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    draw = torch.randn(NUM_STEPS, 4, SIZE, generator=generator, dtype=torch.float64)
    return [(x.to(rank_device(), dtype),) for x in draw]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_training_is_that_of_the_whole_model(strategy: str) -> None:
    """On the same batch on each rank; captured and eager agree bit for bit."""
    options: dict[str, Any] = {"data": data(), "loss_fn": mean_square}
    got = replayed_as_eager(lambda: make(strategy=strategy), num_steps=NUM_STEPS, **options)
    assert_trains_as_whole(got, whole=make(None), **options)


@on_ranks("ranks4")
def test_each_rank_holds_what_torchs_holds() -> None:
    for mesh in (None, hybrid_mesh()):
        theirs, ours = (make(s, mesh=mesh) for s in (torch_fully_shard, graphfsdp.fully_shard))
        for model in (theirs, ours):
            mean_square(model, data()[0][0]).backward()
        norms = []
        for model in (theirs, ours):
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm.full_tensor())
        torch.testing.assert_close(*norms)
        pairs: Any = zip(theirs.named_parameters(), ours.parameters(), strict=True)
        for (name, param), mine in pairs:
            if param.dim() == 3:
                assert mine.placements == param.placements, name
                assert torch.equal(mine.to_local(), param.to_local()), name
                torch.testing.assert_close(mine.grad.to_local(), param.grad.to_local())
            assert torch.equal(mine.full_tensor(), param.full_tensor())
            torch.testing.assert_close(mine.grad.full_tensor(), param.grad.full_tensor())
        for model, other in ((ours, theirs), (theirs, ours)):  # states go to and fro
            with torch.no_grad():
                for param in other.parameters():
                    param.mul_(0.5)
            state = {name: value.full_tensor() for name, value in other.state_dict().items()}
            set_model_state_dict(
                model,
                state,
                options=StateDictOptions(full_state_dict=True),
            )
            assert_equal_tensors(full_parameters(model), full_parameters(other))


@on_ranks("ranks2")
def test_copies_files_and_the_meta_device(tmp_path: Path) -> None:
    model = make(dtype=torch.float32)
    optimizer = adam(model)
    train(model, optimizer, data=data(torch.float32), loss_fn=mean_square)
    assert_equal_tensors(full_parameters(copy.deepcopy(model)), full_parameters(model))
    graphfsdp.save(str(tmp_path), model, optimizer, step=1)
    other: Any = on_meta(lambda: nn.Sequential(Experts(), Experts(), nn.Linear(SIZE, 1)))
    for layer in other[:2]:
        graphfsdp.fully_shard(layer, shard_placement_fn=place)
    graphfsdp.fully_shard(other)
    again = adam(other)
    graphfsdp.load(str(tmp_path), other, again)
    assert_equal_tensors(full_parameters(other), full_parameters(model))
    runs = [
        train(each, optim, data=data(torch.float32), loss_fn=mean_square)
        for each, optim in ((model, optimizer), (other, again))
    ]
    assert_equal_tensors(*(run.tensors() for run in runs))


class LocalExperts(nn.Module):
    """Each rank of an axis has other experts, which the ranks along the other axis share."""

    def __init__(self, experts: DeviceMesh) -> None:
        super().__init__()
        whole = torch.randn(4, SIZE, SIZE, dtype=torch.float64) / 4
        self.mixes = nn.Parameter(distribute_tensor(whole.to(rank_device()), experts, [Shard(0)]))
        self.gate = nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixes: Any = self.mixes
        mixed = torch.einsum("ni,eio->neo", x, mixes.to_local()).tanh()
        result: Tensor = x + (mixed * self.gate(x).softmax(-1)[..., None]).sum(1)
        return result


def with_experts(shard: Any, **options: Any) -> Any:
    """Experts are cut over half of the ranks, everything else over all, as torchtitan does it."""
    torch.manual_seed(0)
    mesh = hybrid_mesh((2, 2), ("efsdp", "ep"))
    everyone = mesh._flatten("dp")
    over = torchs_common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    usual = torchs_common.FSDPMeshInfo(everyone, shard_mesh_dim=0)
    model: Any = nn.Sequential(LocalExperts(mesh["ep"]), LocalExperts(mesh["ep"]))
    model.to(rank_device(), torch.float64)
    for layer in model:
        infos = {layer.mixes: over}

        def place(param: nn.Parameter, infos: Any = infos) -> Any:
            return torchs_common.ShardPlacementResult(Shard(0), infos.get(param, usual))

        shard(layer, mesh=everyone, shard_placement_fn=place, **options)
    return shard(model, mesh=everyone, **options)


@pytest.mark.skipif(
    not hasattr(torchs_common, "ShardPlacementResult"), reason="torch 2.11 has none"
)
@on_ranks("ranks4")
def test_parameters_with_a_mesh_of_their_own() -> None:
    """What torch's comes to; captured as eager, whichever ranks keep the weights."""
    options: dict[str, Any] = {"data": data(), "loss_fn": mean_square, "num_steps": NUM_STEPS}
    torchs = with_experts(torch_fully_shard)
    mine = with_experts(graphfsdp.fully_shard)
    for model in (torchs, mine):
        mean_square(model, data()[dist.get_rank()][0]).backward()
    for theirs, ours in zip(torchs.parameters(), mine.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())
        assert ours.device_mesh.ndim == theirs.device_mesh.ndim
    several: list[dict[str, Any]] = [{"reshard_after_forward": after} for after in (True, False, 2)]
    runs = [
        replayed_as_eager(partial(with_experts, graphfsdp.fully_shard, **after), **options)
        for after in several
    ]
    for run in runs[1:]:
        assert_equal_tensors(runs[0].tensors(), run.tensors())
    twin = copy.deepcopy(mine)
    assert_equal_tensors(full_parameters(twin), full_parameters(mine))
    assert len(mine.process_groups()) == 3
    mesh = hybrid_mesh((2, 2), ("replicate", "shard"))
    info = torchs_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
    elsewhere = torchs_common.ShardPlacementResult(Shard(0), info)
    with raises_on_rank(graphfsdp.ConfigError, "'weight'", "a mesh of its own", "outer_strategy"):
        graphfsdp.fully_shard(
            nn.Linear(4, 4).to(rank_device()),
            mesh,
            outer_strategy="optim",
            shard_placement_fn=lambda _: elsewhere,
        )

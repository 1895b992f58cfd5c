"""Layouts of units: what always holds, models that are known, what is refused, docs/layout.md."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import forked_programs
from graphfsdp.sharding.layout import fsdp2_shard_numel, plan_unit

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


def fsdp2_bound(shapes: list[Shape], num_ranks: int, itemsize: int) -> float:
    alignment = 16 // itemsize
    shards = (fsdp2_shard_numel(shape, num_ranks) for shape in shapes)
    return 1.01 * num_ranks * sum(math.ceil(shard / alignment) * alignment for shard in shards)


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
    assert total_numel <= fsdp2_bound(shapes, num_ranks, itemsize)
    if num_ranks == 1:  # one buffer, and no padding but for alignment
        assert len(buffers) == (1 if shapes else 0)
        aligned = sum(math.ceil(math.prod(shape) * itemsize / 16) * 16 for shape in shapes)
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

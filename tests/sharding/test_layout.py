"""Layouts of units: what always holds, models that are known, what is refused, docs/layout.md."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import forked_programs
from graphfsdp.errors import ConfigError
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


MATRICES = st.tuples(st.integers(1, 70), st.integers(1, 12).map(lambda blocks: 32 * blocks))


@settings(max_examples=100)
@given(shapes=st.lists(MATRICES, min_size=1, max_size=8), num_ranks=st.integers(1, 12))
def test_neither_starts_nor_borders_cut_32_values(shapes: list[Shape], num_ranks: int) -> None:
    for buffer in plan_unit(shapes, num_ranks=num_ranks, itemsize=1, block=32):
        assert buffer.shard_numel % 32 == 0
        for slot in buffer.slots:
            assert slot.shape == shapes[slot.index]
            held = [buffer.local_rows(slot, rank) for rank in range(num_ranks)]
            assert sum(rows.num_rows for rows in held) == slot.num_rows
            for rows in held:
                assert rows.numel == rows.num_rows * slot.row_numel
                assert rows.shard_offset % 32 == 0


@settings(max_examples=100)
@given(shapes=SHAPES, num_ranks=st.integers(1, 40), itemsize=ITEMSIZES)
def test_every_row_has_exactly_one_owner(
    shapes: list[Shape], num_ranks: int, itemsize: int
) -> None:
    for buffer in plan_unit(shapes, num_ranks=num_ranks, itemsize=itemsize):
        for slot in buffer.slots:
            next_row, borders = 0, []
            for rank in range(num_ranks):
                rows = buffer.local_rows(slot, rank)
                borders.append(rows.first_row)
                assert rows.first_row == next_row
                assert rows.numel == rows.num_rows * slot.row_numel
                assert 0 <= rows.shard_offset <= buffer.shard_numel - rows.numel
                if rows.numel:
                    begin = rank * buffer.shard_numel + rows.shard_offset
                    assert begin == slot.offset + rows.first_row * slot.row_numel
                next_row += rows.num_rows
            assert next_row == slot.num_rows
            assert buffer.borders(slot) == (*borders, slot.num_rows)


@given(shapes=SHAPES, itemsize=ITEMSIZES)
def test_one_rank_holds_one_buffer_and_no_padding_but_for_alignment(
    shapes: list[Shape], itemsize: int
) -> None:
    buffers = plan_unit(shapes, num_ranks=1, itemsize=itemsize)
    assert len(buffers) == (1 if shapes else 0)
    aligned = sum(math.ceil(math.prod(shape) * itemsize / 16) * 16 for shape in shapes)
    assert sum(buffer.total_numel for buffer in buffers) * itemsize <= aligned


GPT2 = (
    *((2304, 768), (768, 768), (3072, 768), (768, 3072)),
    *((2304,), (3072,), *((768,),) * 6),
)
EXPERTS = ((64, 2048, 1408), (64, 1408, 2048), (64, 2048))


@pytest.mark.parametrize(
    ("shapes", "num_buffers"),
    [(GPT2, (1, 1, 2)), (UNITS["Llama-3-8B layer"], (1, 1, 1)), (EXPERTS, (2, 2, 2))],
)
def test_layers_of_known_models_have_few_buffers_and_little_padding(
    shapes: tuple[Shape, ...], num_buffers: tuple[int, ...]
) -> None:
    content = sum(math.prod(shape) for shape in shapes)
    for num_ranks, expected in zip((2, 8, 64), num_buffers, strict=True):
        buffers = plan_unit(shapes, num_ranks=num_ranks, itemsize=4)
        assert len(buffers) == expected
        assert sum(buffer.num_padding for buffer in buffers) <= 0.0067 * content


@pytest.mark.parametrize(
    ("num_ranks", "itemsize", "message"),
    [(0, 4, "num_ranks must be at least 1, got 0"), (2, 3, "itemsize must be one of .* got 3")],
)
def test_impossible_arguments_are_refused(num_ranks: int, itemsize: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_unit([(4,)], num_ranks=num_ranks, itemsize=itemsize)


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

"""Layouts of units: what always holds, worked examples, what is refused, docs/layout.md."""

import inspect
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import forked
from benchmarks import layout_table
from graphfsdp.base import memory_plan
from graphfsdp.errors import ConfigError
from graphfsdp.sharding import layout as layout_module
from graphfsdp.sharding.layout import LocalRows, fsdp2_shard_numel, plan_unit

Shape = tuple[int, ...]

SIZES = st.one_of(
    st.integers(0, 20),
    st.sampled_from([49, 64, 100, 127, 128, 768, 1000, 3073, 3584, 4096, 11008, 50257]),
)
SHAPES = st.lists(st.lists(SIZES, max_size=4).map(tuple), max_size=12)
NUM_RANKS = st.one_of(st.integers(1, 9), st.integers(1, 4096), st.sampled_from([64, 512, 4096]))
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


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


@settings(max_examples=100)
@given(shapes=SHAPES, num_ranks=st.integers(1, 40), itemsize=ITEMSIZES)
def test_every_row_has_exactly_one_owner(
    shapes: list[Shape], num_ranks: int, itemsize: int
) -> None:
    for buffer in plan_unit(shapes, num_ranks=num_ranks, itemsize=itemsize):
        for slot in buffer.slots:
            next_row, owners = 0, []
            borders = []
            for rank in range(num_ranks):
                rows = buffer.local_rows(slot, rank)
                borders.append(rows.first_row)
                assert rows.first_row == next_row
                assert rows.numel == rows.num_rows * slot.row_numel
                assert 0 <= rows.shard_offset <= buffer.shard_numel - rows.numel
                if rows.numel:
                    begin = rank * buffer.shard_numel + rows.shard_offset
                    assert begin == slot.offset + rows.first_row * slot.row_numel
                if rows.num_rows:
                    owners.append(rank)
                next_row += rows.num_rows
            assert next_row == slot.num_rows
            assert owners == list(buffer.ranks_of(slot))
            assert buffer.borders(slot) == (*borders, slot.num_rows)


@given(shapes=SHAPES, itemsize=ITEMSIZES)
def test_one_rank_holds_one_buffer_and_no_padding_but_for_alignment(
    shapes: list[Shape], itemsize: int
) -> None:
    buffers = plan_unit(shapes, num_ranks=1, itemsize=itemsize)
    assert len(buffers) == (1 if shapes else 0)
    aligned = sum(math.ceil(math.prod(shape) * itemsize / 16) * 16 for shape in shapes)
    assert sum(buffer.total_numel for buffer in buffers) * itemsize <= aligned


@given(
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    width=st.sampled_from([8, 64, 4096]),
    num_ranks=NUM_RANKS,
)
def test_tensors_of_one_row_length_share_a_buffer_in_the_order_of_parameters(
    rows: list[int], width: int, num_ranks: int
) -> None:
    (buffer,) = plan_unit([(count, width) for count in rows], num_ranks=num_ranks, itemsize=2)
    assert [slot.index for slot in buffer.slots] == list(range(len(rows)))
    assert buffer.shard_numel == math.ceil(sum(rows) / num_ranks) * width


def test_the_drawing_in_the_module_is_the_layout() -> None:
    (buffer,) = plan_unit([(5, 4), (5,), (4, 4)], num_ranks=3, itemsize=4)
    letters = ["."] * buffer.total_numel
    for slot in buffer.slots:
        letters[slot.offset : slot.end] = "ABC"[slot.index] * slot.numel
    shards = ["".join(letters[begin : begin + 16]) for begin in range(0, 48, 16)]
    assert buffer.shard_numel == 16
    assert f"    {'|'.join(shards)}\n" in (layout_module.__doc__ or "")
    assert [buffer.local_rows(buffer.slots[2], rank) for rank in range(3)] == [
        LocalRows(first_row=0, num_rows=0, shard_offset=16, numel=0),
        LocalRows(first_row=0, num_rows=1, shard_offset=12, numel=4),
        LocalRows(first_row=1, num_rows=3, shard_offset=0, numel=12),
    ]
    assert buffer.num_padding == 7


def test_row_lengths_share_a_buffer_only_while_that_costs_one_percent() -> None:
    llama = layout_table.UNITS["Llama-2-7B layer"]
    few, many = (plan_unit(llama, num_ranks=ranks, itemsize=2) for ranks in (64, 512))
    (merged,) = few
    assert merged.shard_numel % math.lcm(4096, 11008) == 0
    assert [{slot.row_numel for slot in buffer.slots} for buffer in many] == [
        {4096},
        {11008},
        {1},
    ]
    assert not any(buffer.num_padding for buffer in many)


def test_short_tensors_lie_uncut_whatever_their_rows() -> None:
    mlp = layout_table.UNITS["MLP 784-300-100-10"]
    (buffer,) = plan_unit(mlp, num_ranks=8, itemsize=4)
    assert {len(buffer.ranks_of(slot)) for slot in buffer.slots if slot.index} == {1}


@pytest.mark.parametrize(
    ("num_ranks", "itemsize", "message"),
    [
        (0, 4, "num_ranks must be at least 1, got 0"),
        (2, 3, "itemsize must be one of .* got 3"),
    ],
)
def test_impossible_arguments_are_refused(num_ranks: int, itemsize: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_unit([(4,)], num_ranks=num_ranks, itemsize=itemsize)


def test_planning_takes_no_torch() -> None:
    """Layouts are integers: the modules import the standard library and the errors."""
    for module in (layout_module, memory_plan):
        lines = inspect.getsource(module).splitlines()
        imports = " ".join(line for line in lines if line.startswith(("import ", "from ")))
        assert "torch" not in imports.replace(".", " ").split()


@pytest.mark.parametrize(
    ("unit", "num_ranks", "percent"),
    [
        ("Llama-3-8B layer", 512, 1.0),
        ("Llama-2-7B layer", 8, 0.3),
        ("Llama-2-7B layer", 512, 33.7),
        ("Qwen2.5-7B layer", 256, 2.0),
        ("ffn 3073 x 768 layer", 8, 166.6),
        ("ffn 3073 x 768 layer", 512, 16964.8),
        ("mix of convolutions", 8, 203.0),
        ("MLP 784-300-100-10", 2, 32.3),
    ],
)
def test_figures_of_others_are_those_of_their_real_code(
    unit: str, num_ranks: int, percent: float
) -> None:
    """Expected: what their layout code gave when it was called.

    The shapes of the ffn layer and of the mix are ones that fit those figures.
    """
    shapes = layout_table.UNITS[unit]
    for rule in (layout_table.megatron_v1_numel, layout_table.megatron_v2_numel):
        total = rule(shapes, num_ranks)
        assert layout_table.padding_percent(total, shapes) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize("unit", layout_table.UNITS)
@pytest.mark.parametrize("num_ranks", layout_table.NUM_RANKS)
def test_each_cell_of_the_table_is_within_one_percent_of_fsdp2(unit: str, num_ranks: int) -> None:
    shapes = layout_table.UNITS[unit]
    buffers = plan_unit(shapes, num_ranks=num_ranks, itemsize=layout_table.ITEMSIZE)
    total_numel = sum(buffer.total_numel for buffer in buffers)
    assert total_numel <= 1.01 * layout_table.fsdp2_numel(shapes, num_ranks)


def test_the_document_shows_what_its_example_prints() -> None:
    root = Path(__file__).parents[2]
    blocks = (root / "docs" / "layout.md").read_text(encoding="utf-8").split("```")
    program, printed = blocks[1].removeprefix("python\n"), blocks[3].strip()
    assert forked.run_source(program).stdout.strip() == printed

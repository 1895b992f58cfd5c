"""The table and the example in docs/layout.md say what the code says."""

import subprocess
import sys

import pytest

from benchmarks import layout_table
from graphfsdp.sharding.layout_plan import plan_unit


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
    layout = plan_unit(shapes, num_ranks=num_ranks, itemsize=layout_table.ITEMSIZE)
    assert layout.total_numel <= 1.01 * layout_table.fsdp2_numel(shapes, num_ranks)


def test_the_document_shows_the_present_table() -> None:
    text = layout_table.DOCUMENT.read_text(encoding="utf-8")
    assert layout_table.BEGIN in text
    assert layout_table.updated(text) == text, "run: python -m benchmarks.layout_table"


def test_the_document_shows_what_its_example_prints() -> None:
    blocks = layout_table.DOCUMENT.read_text(encoding="utf-8").split("```")
    program, printed = blocks[1].removeprefix("python\n"), blocks[3].strip()
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=layout_table.DOCUMENT.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == printed

"""The table in docs/layout.md: padding of our layout and of others.

Nothing is measured: every figure follows from shapes and the number of ranks.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from graphfsdp.base.memory_plan import round_up
from graphfsdp.bench.tables import Table
from graphfsdp.sharding.layout import fsdp2_shard_numel, plan_unit

NUM_RANKS = (8, 64, 512)
ITEMSIZE = 2  # bfloat16

Shapes = tuple[tuple[int, ...], ...]


def decoder_layer(hidden: int, kv: int, ffn: int, *, qkv_bias: bool = False) -> Shapes:
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


def convolutions(*weights: tuple[int, int, int, int]) -> Shapes:
    """Return the shapes of convolutions without bias, each followed by a batch norm."""
    return tuple(shape for weight in weights for shape in (weight, weight[:1], weight[:1]))


def resnet18() -> Shapes:
    weights = [(64, 3, 7, 7)]
    for before, width in ((64, 64), (64, 128), (128, 256), (256, 512)):
        shortcut = [(width, before, 1, 1)] if before != width else []
        first = [(width, before, 3, 3), (width, width, 3, 3), *shortcut]
        weights += [*first, (width, width, 3, 3), (width, width, 3, 3)]
    return (*convolutions(*weights), (1000, 512), (1000,))


UNITS: Mapping[str, Shapes] = MappingProxyType(
    {
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
)


def content_numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def padding_percent(total_numel: int, shapes: Shapes) -> float:
    """Return the elements that buffers hold beyond the parameters, in percent of these."""
    return 100 * (total_numel / content_numel(shapes) - 1)


def fsdp2_numel(shapes: Shapes, num_ranks: int) -> int:
    return num_ranks * sum(fsdp2_shard_numel(shape, num_ranks) for shape in shapes)


def megatron_v1_numel(shapes: Shapes, num_ranks: int) -> int:
    """Return the least that Megatron-FSDP's first version holds of a unit on all ranks.

    Tensors are taken by falling row length; the chunk starts as the longest row and becomes the
    least common multiple with a row unless that row is the chunk, or divides it with the tensor
    a multiple of it, or the tensor is shorter than it. A buffer is a multiple of ranks x chunk.

    Source: Megatron-LM d98e8a64dd, megatron_fsdp/param_and_grad_buffer.py.
    """
    rows = sorted(((math.prod(shape[1:]), math.prod(shape)) for shape in shapes), reverse=True)
    chunk = rows[0][0]
    for row, numel in rows:
        kept = row == chunk or (chunk % row == 0 and numel % chunk == 0) or numel < chunk
        chunk = chunk if kept else math.lcm(chunk, row)
    return round_up(content_numel(shapes), num_ranks * chunk)


def megatron_v2_numel(shapes: Shapes, num_ranks: int) -> int:
    """Return the least that Megatron-FSDP's second version holds of a unit on all ranks.

    The chunk is the least common multiple of all rows.

    Source: Megatron-LM d98e8a64dd, megatron_fsdp/experimental/layout.py.
    """
    chunk = math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    return round_up(content_numel(shapes), num_ranks * chunk)


def rows() -> list[tuple[str, ...]]:
    found = []
    for name, shapes in UNITS.items():
        for num_ranks in NUM_RANKS:
            buffers = plan_unit(shapes, num_ranks=num_ranks, itemsize=ITEMSIZE)
            totals = (
                sum(buffer.total_numel for buffer in buffers),
                fsdp2_numel(shapes, num_ranks),
                megatron_v1_numel(shapes, num_ranks),
                megatron_v2_numel(shapes, num_ranks),
            )
            ours, *others = (f"{padding_percent(total, shapes):.2f}" for total in totals)
            found.append((name, str(num_ranks), ours, str(len(buffers)), *others))
    return found


def table() -> str:
    heading = (
        *("unit", "ranks", "graphfsdp, %", "its buffers"),
        *("FSDP2, %", "Megatron-FSDP v1, %", "Megatron-FSDP v2, %"),
    )
    return Table("", heading, rows()).markdown()

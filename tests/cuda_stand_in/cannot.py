"""Tests that cannot run above the stand-in, each with its reason; all others do."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from cuda_stand_in.library import computes

# Beginnings of node ids, without the folders before the file.
_LAUNCHES_TRITON = (
    "a Triton kernel is launched by itself, and only operators compute: graphfsdp::fused_adam_ does"
)
_MISMATCH = "test_on_change.py::test_a_mismatch_names_the_leaf_and_runs_nothing"
_SPARSE = "kernels of sparse tensors are not computed"
CANNOT: Mapping[str, str] = MappingProxyType(
    {
        "test_fused_adam.py::test_kernel_on_the_gpu_equals_the_tensor_code": _LAUNCHES_TRITON,
        "test_refused.py::test_capture_refuses_by_name_and_rolls_back[cuda-sparse]": _SPARSE,
        **{f"{_MISMATCH}[cuda-{when}-layout]": _SPARSE for when in ("warm-up", "replay")},
        "test_compiled.py::test_compiled_code_is_in_the_graph[inductor": (
            "inductor's kernels belong to no operator, and only operators compute; "
            "test_stand_in.py runs these tests where no kernel computes"
        ),
        **{
            f"test_optimizer_replays.py::test_a_replay_equals_the_eager_step[cuda-dtype{n}-tran": (
                "a number to the power of a tensor (its bias corrections) is no call that the "
                "stand-in can hand on"
            )
            for n in (0, 1)
        },
    }
)


def reasons_of(node_id: str) -> Iterator[str]:
    """Yield why a test cannot run; nothing if it can, or if numbers are nobody's business."""
    if not computes():
        return
    name = node_id.rpartition(".py::")[0].rpartition("/")[2] + node_id[node_id.index(".py::") :]
    for beginning, reason in CANNOT.items():
        if name.startswith(beginning):
            yield reason

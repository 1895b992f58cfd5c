"""Tests that cannot run above the stand-in, each with its reason; all others do."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from cuda_stand_in.library import computes

# Beginnings of node ids, without the folders before the file.
_LAUNCHES_TRITON = (
    "a Triton kernel is launched by itself, and only operators compute: graphfsdp::fused_adam_ does"
)
_COMPARES_NOTHING = (
    "behind a single warm-up (evaluations have one), and with torch._dynamo loaded, a capture on "
    "CUDA compares no values: that warm-up may compile, which nobody may watch"
)
_KEPT = "test_kept_tensors.py::test_a_tensor_that_is_kept_for_the_next_iteration_is_refused"
CANNOT: Mapping[str, str] = MappingProxyType(
    {
        "test_fused_adam.py::test_kernel_on_the_gpu_equals_the_tensor_code": _LAUNCHES_TRITON,
        "test_refused.py::test_capture_refuses_by_name_and_rolls_back[cuda-sparse]": (
            "kernels of sparse tensors are not computed"
        ),
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
        "test_evaluation.py::test_a_number_may_change_once": _COMPARES_NOTHING,
        **{
            f"{_KEPT}[cuda-{name}-1]": _COMPARES_NOTHING
            for name in ("of_a_list", "of_a_long_queue")
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

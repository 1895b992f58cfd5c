"""Transformer Engine by contract: what we say of its Python sources is what stands there.

Read as text where the package is installed, with or without its libraries; nothing of it is run.
**None of its modules has run here.**
"""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.find_spec("transformer_engine")
pytestmark = pytest.mark.skipif(_SPEC is None, reason="transformer-engine is not installed")


def parse(relative: str) -> tuple[str, dict[str, Any]]:
    """Return a file and its functions and classes by name, methods as Class.method."""
    assert _SPEC is not None
    assert _SPEC.submodule_search_locations is not None
    text = (Path(_SPEC.submodule_search_locations[0]) / relative).read_text()
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        for child in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(child, ast.FunctionDef):
                found[f"{node.name}.{child.name}"] = child  # type: ignore[attr-defined]
    return text, found


def test_its_layers_update_their_scales_inside_a_capture_that_is_not_its_own() -> None:
    """Backward leaves that out within make_graphed_callables alone, which sets a flag for it."""
    _, graph = parse("pytorch/graph.py")
    (returned,) = [n for n in ast.walk(graph["is_graph_capturing"]) if isinstance(n, ast.Return)]
    assert isinstance(returned.value, ast.Name)
    assert "is_current_stream_capturing" not in ast.unparse(graph["set_capture_start"])
    for name in ("linear", "layernorm_mlp", "layernorm_linear"):
        text, _ = parse(f"pytorch/module/{name}.py")
        assert "reduce_and_update_bwd_fp8_tensors and not is_graph_capturing()" in text
    _, found = parse("pytorch/quantization.py")
    leave = ast.unparse(found["FP8GlobalStateManager.autocast_exit"])
    assert "reduce_and_update_fp8_tensors(forward=True)" in leave
    assert "is_current_stream_capturing" not in leave
    # Layers enter the list of what is updated in a warm-up: a capture adds none.
    text, _ = parse("pytorch/module/base.py")
    register = text.index("add_fp8_tensors_to_global_buffer(self.fp8_meta)")
    assert "if not FP8GlobalStateManager.fp8_graph_capturing():" in text[register - 150 : register]


def test_its_optimizer_refuses_quantised_parameters_as_ours_does() -> None:
    text, _ = parse("pytorch/optimizers/fused_adam.py")
    assert "FusedAdam does not support FP8 model weights with capturable=True." in text
    _, found = parse("pytorch/quantized_tensor.py")
    names = {
        node.target.id
        for each in ("QuantizedTensorStorage", "QuantizedTensor")
        for node in found[each].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert "_quantizer" in names  # by which optim/test_refused_precisions.py tells them


@pytest.mark.parametrize(
    ("name", "cls"), [("float8_tensor", "Float8Tensor"), ("mxfp8_tensor", "MXFP8Tensor")]
)
def test_its_quantised_tensors_have_the_extension_of_fsdp2(name: str, cls: str) -> None:
    _, found = parse(f"pytorch/tensor/{name}.py")
    before = [argument.arg for argument in found[f"{cls}.fsdp_pre_all_gather"].args.args]
    stride = "contiguous_orig_stride"
    assert before == ["self", "mesh", "orig_size", stride, "module", "mp_policy"]
    # What FSDP2's own parameter groups know: no other fully_shard can answer that.
    assert "_fsdp_param_group" in ast.unparse(found[f"{cls}.fsdp_pre_all_gather"])

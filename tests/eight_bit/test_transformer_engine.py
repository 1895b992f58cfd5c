"""Transformer Engine by contract: what we say of its Python sources is what stands there.

Read as text where the package is installed, with or without its libraries; nothing of it is run but
the arithmetic of delayed scaling. **None of its modules has run here.**
"""

import __future__

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from graphfsdp.eight_bit import DelayedScaling
from graphfsdp.eight_bit.delayed import update_scales
from graphfsdp.optim.adapters.precision import is_quantised

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


def compiled(names: tuple[str, ...]) -> dict[str, Any]:
    """Return functions of its quantization.py, without what would compile them."""
    _, found = parse("pytorch/quantization.py")
    chosen = [found[name] for name in names]
    for function in chosen:
        function.decorator_list = []
    module = ast.Module(chosen, type_ignores=[])
    scope: dict[str, Any] = {"torch": torch}
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "quantization.py", "exec", flags=flags), scope)
    return scope


class Layer:
    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe, self.of_gradients = recipe, torch.float8_e5m2
        self.fp8_scale, self.fp8_amax_history = (
            torch.ones(3),
            torch.zeros(recipe.amax_history_len, 3),
        )


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("margin", [0, 3])
def test_scales_and_histories_are_its_own_bit_for_bit(
    algorithm: str, length: int, margin: int
) -> None:
    names = "_update_amax_history", "_default_get_amax_and_update_history", "_default_sf_compute"
    theirs = compiled(names)
    layers = [Layer(DelayedScaling(margin, length, algorithm)) for _ in range(2)]
    kept = [(each.fp8_scale.clone(), each.fp8_amax_history.clone()) for each in layers]
    largest = torch.tensor([448.0, 448.0, 57344.0])
    for factor in (1.0, 3e4, 0.0, 1e-42, 1e-30, 3e38, 5.0, 1.0, 1.0, 0.0, 2.0):
        for layer, (scale, history) in zip(layers, kept, strict=True):
            layer.fp8_amax_history[0] = torch.rand(3) * factor
            history[0] = layer.fp8_amax_history[0]
            history, amax = theirs[names[1]](history, algorithm)
            theirs[names[2]](amax, scale, largest, margin)
        update_scales(layers)
        for layer, (scale, history) in zip(layers, kept, strict=True):
            assert torch.equal(layer.fp8_scale, scale)
            assert torch.equal(layer.fp8_amax_history, history)


def test_the_recipe_has_its_words_and_defaults() -> None:
    _, found = parse("common/recipe/__init__.py")
    fields = {
        node.target.id: ast.literal_eval(node.value)
        for node in found["DelayedScaling"].body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for name, parameter in inspect.signature(DelayedScaling).parameters.items():
        assert fields[name] == parameter.default


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
    assert "_quantizer" in names
    param = torch.zeros(2)
    assert not is_quantised(param)
    param._quantizer = None  # type: ignore[attr-defined]
    assert is_quantised(param)


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

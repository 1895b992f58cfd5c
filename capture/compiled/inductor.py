"""Inductor: a graph becomes C++, compiled once for all processes that build the same."""

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from graphfsdp._capture.compiled.stretch_graph import StretchGraph
from graphfsdp.errors import ConfigError

_NUM_OPERANDS = 5  # of an attention, backward: gradient, query, key, value, output
Compiled = Callable[[list[Tensor]], list[Tensor]]

_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "cpp_wrapper": True,  # no Python between kernels
        "fallback_random": True,  # nothing that draws is compiled; should it be, then as in eager
        # A recording's tensors cannot change their form.
        "size_asserts": False,
        "alignment_asserts": False,
        "scalar_asserts": False,
    }
)


def require_compiler() -> None:
    """Refuse to begin where there is no C++ compiler.

    Raises:
        ConfigError: Inductor finds none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing it says is not the user's business
        from torch._inductor import cpp_builder
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        raise ConfigError(
            f"compile needs a C++ compiler, and Inductor finds none ({error}). Remedy: install g++ "
            "or clang++, or name one in the environment variable CXX; or compile=False"
        ) from error


def compile_graph(graph: StretchGraph) -> Compiled:
    """Compile; nothing is run.

    Raises:
        Exception: whatever Inductor raises.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what torch says of its own parts, imports included
        widen(graph)
        found = _compile(graph)
    if len(found) != 1 or found[0][1] != len(graph.fakes):
        raise RuntimeError("Inductor wants other inputs than the recording has")
    function = getattr(found[0][0], "current_callable", None)
    if function is None:
        raise RuntimeError("Inductor made no function")
    return lambda inputs: list(function(inputs))


def widen(graph: StretchGraph) -> None:
    """Let attention compute in float32 what it is slower at in 16 bits."""
    for attention, narrow in graph.slow.items():
        _in_float32(attention, narrow)
    graph.module.recompile()


def _in_float32(attention: fx.Node, narrow: torch.dtype) -> None:
    graph, cast = attention.graph, torch.ops.aten._to_copy.default
    with graph.inserting_before(attention):
        for index, operand in enumerate(attention.args[:_NUM_OPERANDS]):
            wide = graph.call_function(cast, (operand,), {"dtype": torch.float32})
            attention.update_arg(index, wide)
    for gradient in list(attention.users):
        users = list(gradient.users)
        with graph.inserting_after(gradient):
            result = graph.call_function(cast, (gradient,), {"dtype": narrow})
        for user in users:
            user.replace_input_with(gradient, result)


def _compile(graph: StretchGraph) -> list[tuple[Any, int]]:
    """Return what Inductor has made, each with its number of inputs."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[tuple[Any, int]] = []

    def inner(module: Any, examples: Any, **options: Any) -> Any:
        output = compile_fx_inner(module, examples, **options)
        found.append((output, len(examples)))
        return output

    # The number of threads is part of the code, and so of the cache's key.
    options = {**_OPTIONS, "cpp.threads": torch.get_num_threads()}
    # The graph that is given is not traced from code, so a cache by code would mix up graphs.
    with functorch_config.patch(enable_autograd_cache=False), config.patch(options):
        compile_fx(graph.module, list(graph.fakes), inner_compile=inner)
    return found

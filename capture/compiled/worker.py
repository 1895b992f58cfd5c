"""Inductor in a process of its own: graphs come as text, libraries go into a folder.

Run as a file, so that it imports nothing of ours: it is ready as soon as torch is. See inductor.py,
which begins and ends it.
"""

import hashlib
import io
import json
import logging
import operator
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

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
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_NUM_OPERANDS = 5  # of an attention, backward: gradient, query, key, value, output
# Queries times the width of a head, up to which torch's kernel was faster in float32 than in
# bfloat16, on a processor that multiplies bfloat16: it lays out 16-bit operands anew for each small
# product (18 times at 32 x 16, 1.2 times at 256 x 64, equal at 512 x 32).
_SHORT_ATTENTION = 256 * 64


def main() -> None:
    """Answer each request, a line of JSON, by one with what went wrong, "" if nothing did."""
    # What is started here, and what prints, shall not get at the lines.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # What torch says of its own parts, imports included, unless somebody asks for it.
    warnings.simplefilter("ignore")
    if "TORCH_LOGS" not in os.environ:
        set_logs: Any = torch._logging.set_logs  # type: ignore[attr-defined]
        set_logs(all=logging.ERROR)
    waiting: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), daemon=True).start()
    while True:
        folder, key, text = json.loads(waiting.get())
        wrong = ""
        try:
            _make(folder, key, text)
        except Exception as error:
            wrong = told(error)
        answers.write(json.dumps(wrong) + "\n")
        answers.flush()


def told(error: Exception) -> str:
    """Return what went wrong in one line, with a compiler's first error."""
    first, *others = f"{type(error).__name__}: {error}".splitlines()
    errors = [line.partition("error: ")[2] for line in others if "error: " in line]
    return ": ".join([first, *errors[:1]])


def _listen(requests: Iterable[str], waiting: "SimpleQueue[str]") -> None:
    for line in requests:
        waiting.put(line)
    # Nobody is there any more. The compilers that run now are in our group.
    os.killpg(os.getpid(), signal.SIGKILL)


def _make(folder: str, key: str, text: str) -> None:
    first, *lines = text.splitlines()
    surroundings = json.loads(first)
    torch.set_deterministic_debug_mode(surroundings["deterministic"])
    graph = Graph(lines)
    made: dict[str, Any] = {"library": "", "constants": []}
    if not graph.refused:
        graph.widen()
        path, made["constants"], source = _compiled(graph, surroundings["threads"])
        graph.refuse_uncallable(source)
        with open(path, "rb") as file:
            library = file.read()
        made["library"] = hashlib.sha256(library).hexdigest()
        _write(os.path.join(folder, f"{made['library']}.so"), library)
    made["refused"] = graph.refused
    buffer = io.BytesIO()
    torch.save(made, buffer)
    _write(os.path.join(folder, f"{key}.pt"), buffer.getvalue())


def _write(path: str, contents: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    unfinished = f"{path}.{os.getpid()}"
    with open(unfinished, "wb") as file:
        file.write(contents)
    os.replace(unfinished, path)


class Graph:
    """A graph from its text.

    Attributes:
        module: It returns a tuple.
        fakes: Stand-ins of its inputs.
        refused: Why a recorded node cannot be compiled, by its number.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.refused: dict[int, str] = {}
        self._graph = fx.Graph()
        self._fake_of: dict[fx.Node, Any] = {}
        names: dict[str, Any] = {
            **{"torch": torch, "device": torch.device, "operator": operator},
            **{"inf": float("inf"), "nan": float("nan")},
        }
        with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
            for line in lines:
                name, target, args, kwargs, form, number = eval(line, names)
                kind = target if isinstance(target, str) else "call_function"
                target = name if kind == "placeholder" else target
                entry = self._graph.create_node(kind, target, args, kwargs, name)
                entry.meta["number"] = number
                names[name] = entry
                if kind == "placeholder":
                    self._fake_of[entry] = _stand_in(*form)
                elif kind == "call_function":
                    self._fake_of[entry] = self._run(entry, form, number)
                    names[name] = self._laid_out(entry, form)
        entries = self._graph.find_nodes(op="placeholder")
        self.fakes: list[Tensor] = [self._fake_of[entry] for entry in entries]
        self.module = fx.GraphModule(torch.nn.Module(), self._graph)

    def _run(self, entry: fx.Node, form: Any, number: int | None) -> Any:
        """Return a stand-in of a result; refuse an operator that gives torch another than here."""
        assert callable(entry.target)
        args, kwargs = fx.node.map_arg((entry.args, entry.kwargs), self._fake_of.__getitem__)
        try:
            fake = entry.target(*args, **kwargs)
            if form is None or _is_like(fake, *form):
                return fake
            if _makes_memory(entry) and _can_be_laid_out(fake, *form):
                return fake
            why = "has a result of other strides than its description"
        except Exception as error:
            if number is None:
                raise
            why = f"raises {type(error).__name__}: {error}".split("\n")[0][:200]
        # On, to find all others that are refused.
        assert number is not None
        self.refused.setdefault(number, why)
        return None if form is None else _stand_in(*form)

    def _laid_out(self, entry: fx.Node, form: Any) -> fx.Node:
        """Copy a result whose strides torch tells otherwise than the recording had them.

        Later nodes look at its memory by these. A compiler makes no copy of it, but writes it so.
        """
        fake = self._fake_of[entry]
        if form is None or _is_like(fake, *form):
            return entry
        order = _dims_by_stride(form[1])
        contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
        for target, *args, kwargs in (
            (torch.ops.aten.permute.default, order, {}),
            (torch.ops.aten.clone.default, contiguous),
            (torch.ops.aten.permute.default, [order.index(dim) for dim in range(len(order))], {}),
        ):
            entry = self._graph.call_function(target, (entry, *args), kwargs)
            fake = self._fake_of[entry] = target(fake, *args, **kwargs)
        return entry

    def computes_in(self, dtype: torch.dtype) -> bool:
        fakes = (fake for fake in self._fake_of.values() if isinstance(fake, Tensor))
        return any(fake.dtype == dtype for fake in fakes)

    def refuse_uncallable(self, source: str) -> None:
        """Refuse the operators that Inductor's code calls in a way that always fails.

        One for which it has neither a kernel nor a function in C (``upsample_bilinear2d_backward``)
        is called by name, with lists of numbers made as lists of anything: torch 2.13 and 2.15.
        """
        by_name = set(re.findall(r'findSchemaOrThrow\("([^"]+)", "[^"]*"\)', source))
        for entry in self._graph.nodes:
            schema = getattr(entry.target, "_schema", None)
            if schema is not None and schema.name in by_name and _takes_numbers(schema):
                why = "has no function that Inductor's code could call"
                self.refused.setdefault(entry.meta["number"], why)

    def widen(self) -> None:
        """Let attention compute in float32 what it is slower at in 16 bits."""
        for entry in self._graph.find_nodes(op="call_function", target=_ATTENTION_BACKWARD):
            query = self._fake_of[entry.args[1]]
            is_short = int(query.shape[-2] * query.shape[-1]) <= _SHORT_ATTENTION
            if query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and is_short):
                _in_float32(entry, query.dtype)
        self.module.recompile()


def _stand_in(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _is_like(fake: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> bool:
    told = [step for size, step in zip(fake.shape, fake.stride(), strict=True) if size != 1]
    real = [step for size, step in zip(shape, stride, strict=True) if size != 1]
    return tuple(fake.shape) == shape and fake.dtype == dtype and (told == real or not fake.numel())


def _makes_memory(entry: fx.Node) -> bool:
    """Tell whether a result is no look at an operand, which a copy of it would not be."""
    op: Any = entry.args[0] if entry.target is operator.getitem else entry
    return all(result.alias_info is None for result in op.target._schema.returns)


def _takes_numbers(schema: Any) -> bool:
    """Tell whether it has lists of numbers among its arguments."""
    return any(str(each.type) in ("List[int]", "List[float]") for each in schema.arguments)


def _can_be_laid_out(
    fake: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> bool:
    """Tell whether it has only other strides, and the wanted ones leave no gap."""
    if not isinstance(fake, Tensor) or tuple(fake.shape) != shape or fake.dtype != dtype:
        return False
    order = _dims_by_stride(stride)
    dense = torch.empty([shape[dim] for dim in order], dtype=dtype, device="meta")
    return _is_like(dense, dense.shape, [stride[dim] for dim in order], dtype)


def _dims_by_stride(stride: Sequence[int]) -> list[int]:
    """Return the dimensions from the widest step to the narrowest."""
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


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


def _compiled(graph: Graph, num_threads: int) -> tuple[str, list[Tensor], str]:
    """Return the library that Inductor has made, constants that it wants as last inputs, source."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[tuple[Any, int]] = []

    def inner(module: Any, examples: Any, **options: Any) -> Any:
        output = compile_fx_inner(module, examples, **options)
        found.append((output, len(examples)))
        return output

    # The number of threads is part of the code, and so of the cache's key.
    options = {
        **_OPTIONS,
        "cpp.threads": num_threads,
        # What overflows in eager mode has to, also between two operators: steps are skipped by it.
        "emulate_precision_casts": graph.computes_in(torch.float16),
    }
    # The graph that is given is not traced from code, so a cache by code would mix up graphs.
    with functorch_config.patch(enable_autograd_cache=False), config.patch(options):
        compile_fx(graph.module, graph.fakes, inner_compile=inner)
    if len(found) != 1 or found[0][1] != len(graph.fakes):
        raise RuntimeError("Inductor wants other inputs than the recording has")
    function = getattr(found[0][0], "current_callable", None)
    if function is None:
        raise RuntimeError("Inductor made no function")
    library = function.__globals__["inductor_entry"].__self__.__file__
    output = found[0][0]
    return library, [*(output.constants or {}).values()], output.source_code


if __name__ == "__main__":
    main()

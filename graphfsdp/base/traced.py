"""What torch.compile leaves alone."""

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Let torch.compile compile neither frames of this function nor of what it calls."""
    skip = _FrameAction.SKIP
    code: CodeType = function.__code__
    set_code_exec_strategy(code, _FrameExecStrategy(skip, skip))
    return function


def not_traced(function: F) -> F:
    """End what torch.compile traces at a call of this function, and go on behind it.

    ``torch.compiler.disable`` does so too, and imports all of torch.compile for it.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return not_compiled(function)

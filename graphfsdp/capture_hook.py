"""Lets somebody else answer the calls of ``graphfsdp.capture``: a check of a whole script."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class CapturedCall:
    """One call of ``graphfsdp.capture``.

    Attributes:
        model: Its first argument.
        optimizer: Its second argument.
        options: All keyword arguments.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    options: Mapping[str, Any]


Answer = Callable[[CapturedCall], Any]

# Belongs to a context, not to the module: other threads and tasks capture as ever.
_ANSWER: ContextVar[Answer | None] = ContextVar("graphfsdp_capture_hook", default=None)


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Give every call of ``graphfsdp.capture`` in the body to a function.

    Args:
        answer: Takes the call, returns what ``capture`` is to return.
    """
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


def answerable(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``answering`` take the calls of a function; its signature stays."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        answer = _ANSWER.get()
        if answer is None:
            return function(*args, **kwargs)
        options = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
        model, optimizer = options.pop("model"), options.pop("optimizer")
        answered: R = answer(CapturedCall(model, optimizer, options))
        return answered

    return call

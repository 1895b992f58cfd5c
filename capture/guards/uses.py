"""Whether anything follows from a value that code moves: read off its source, if there is any."""

import ast
import functools
import inspect
import linecache
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.moves import Move
from graphfsdp._capture.guards.names import functions_of
from graphfsdp._capture.guards.places import CONTAINERS, Place
from graphfsdp._capture.trace.source import Ran
from graphfsdp.errors import CaptureError, HazardKind, Refuse, SourceLine, raised

_LOG = logging.getLogger("graphfsdp")
_MOST_TOLD = 8
REMEDY = (
    "keep what counts in a buffer on the device and change it in place (add_, torch.where decides "
    "by it), pass it as an argument of the step, or do it outside of the iteration"
)
_DRAWS = (
    "draw on the device (torch.rand), or draw and advance outside of the iteration, and pass what "
    "comes of it as a tensor of the batch"
)
_SHOWING = frozenset(
    {
        *("print", "debug", "info", "warning", "warn", "error", "log", "write"),
        *("add_scalar", "add_scalars", "log_metrics", "set_description", "set_postfix"),
    }
)
_MOVING = frozenset(
    {
        *("append", "appendleft", "extend", "add", "update", "insert", "setdefault", "put"),
        *("discard", "remove", "clear", "set", "move_to_end", "subtract"),
    }
)
# What these give is as far as what they are given.
_PASSING_ON = frozenset(
    {"abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "str", "sum"}
)
# Attributes that torch reads below Python.
_READ_BY_TORCH = frozenset({"data", "grad", "param_groups", "requires_grad", "training"})
_OF_TORCH = (nn.Module, Tensor, torch.optim.Optimizer)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_INNER = (ast.Lambda, ast.NamedExpr, ast.Await, ast.comprehension)


class _Named(NamedTuple):
    """What code comes to by a name; see ``Uses.deciding``."""

    name: str
    owner: type | None


class Uses:
    """How the code that ran uses names.

    Note [Uses of what moves]: an iteration that moves Python (a counter, a log) trains right for as
    long as nothing else follows from it, since a replay leaves it. So a statement that reads such a
    value may assign to an attribute, an item or another function's variable, put something into a
    container, print or log, or ask by ``if`` whether to do so, and nothing else. What it moves may
    stand still in the iteration that is recorded (``if calls % 10 == 0: rate *= 0.5``) and not in a
    later one: so that is judged like the value itself.
    """

    def __init__(self, ran: Ran, places: Mapping[str, Place]) -> None:
        """``places`` are all that the code leads to, by title."""
        readable = ran.readable()
        self._functions = [(code, node) for code in readable for node in _nodes_of(code)]
        torchs = ran.not_ours().difference(readable)
        self._named_by_torch = _READ_BY_TORCH.union(*(code.co_names for code in torchs))
        self._places: dict[str, list[Place]] = {}
        for place in places.values():
            self._places.setdefault(place.name, []).append(place)

    def deciding(self, name: str, owner: type | None = None) -> tuple[bool, SourceLine | None]:
        """Tell whether anything follows from what is held under a name, and in which line.

        What the code does not name it finds by another way; then everything may follow.

        Args:
            name: Of a variable, or of an attribute with a dot before it.
            owner: Class of the object whose attribute it is, if it is one: methods of other classes
                have their own.
        """
        found: dict[_Named, SourceLine | None] = {_Named(name, owner): None}
        pending = list(found)
        is_named = False
        for each in pending:  # which grows meanwhile
            for code, use in self._uses_of(each):
                is_named = True
                line = SourceLine(code.co_filename, use.lineno, code.co_qualname)
                source = found[each] or line
                targets = _moved_by(use)
                if targets is None:
                    return True, source
                for target in targets:
                    other = self._named(target, code)
                    if other is None:
                        return True, source
                    if other not in found:
                        found[other] = source
                        pending.append(other)
        return not is_named and bool(self._functions), None

    def _uses_of(self, what: _Named) -> Iterator[tuple[CodeType, ast.expr]]:
        methods = None if what.owner is None else _methods_of(what.owner)
        for code, function in self._functions:
            variables = *code.co_freevars, *code.co_cellvars, *code.co_names, *code.co_varnames
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and f".{node.attr}" == what.name:
                    if methods is None or code in methods or not _is_of_self(node, code):
                        yield code, node
                elif isinstance(node, ast.Name) and node.id == what.name and node.id in variables:
                    yield code, node

    def _named(self, target: ast.expr, code: CodeType) -> _Named | None:
        """Return by which name code comes to what it moves; None if others may read that, too.

        Of a call it is what the method belongs to, which must be a container of Python's.
        """
        is_call = isinstance(target, ast.Call)
        if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            target = target.func.value
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            name = f".{target.attr}"
        elif isinstance(target, ast.Name) and target.id not in (
            *code.co_varnames,
            *code.co_cellvars,
        ):
            name = target.id
        else:
            return None
        places = self._places.get(name, [])
        if is_call and not any(isinstance(place.known, CONTAINERS) for place in places):
            return None
        may_be_torchs = not places or any(isinstance(each.owner, _OF_TORCH) for each in places)
        if may_be_torchs and name.removeprefix(".") in self._named_by_torch:
            return None
        return _Named(name, None)


@functools.lru_cache(maxsize=256)
def _tree_of(file: str, text: str) -> ast.Module | None:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


def _nodes_of(code: CodeType) -> list[ast.AST]:
    """Return the functions that begin in the line where code does: lambdas may share one."""
    text = "".join(linecache.getlines(code.co_filename))
    tree = _tree_of(code.co_filename, text) if text else None
    if tree is None:
        return []
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, _Function) and _first_line(node) == code.co_firstlineno
    ]


def _first_line(node: _Function) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _methods_of(kind: type) -> set[CodeType]:
    members = (member for base in kind.__mro__ for member in vars(base).values())
    functions = (inspect.unwrap(each) for member in members for each in functions_of(member))
    return {each.__code__ for each in functions if hasattr(each, "__code__")}


def _is_of_self(use: ast.Attribute, code: CodeType) -> bool:
    """Tell whether a use is an attribute of the object that a method belongs to."""
    is_self = isinstance(use.value, ast.Name) and use.value.id == "self"
    return is_self and code.co_varnames[:1] == ("self",)


def _moved_by(use: ast.expr) -> list[ast.expr] | None:
    """Return what the statement with this use may move by it; None if it does more."""
    if isinstance(getattr(use, "ctx", None), (ast.Store, ast.Del)):
        return []
    node: Any = use  # which knows its parent: see _tree_of
    while not isinstance(node, ast.stmt):
        child, node = node, node.parent
        if isinstance(node, ast.Call):
            is_statement = isinstance(node.parent, ast.Expr)  # type: ignore[attr-defined]
            if node.func is child and isinstance(child, ast.Attribute):  # a method of what moves
                return [] if is_statement else None
            passes_on = isinstance(node.func, ast.Name) and node.func.id in _PASSING_ON
            if not is_statement and not passes_on:
                return None
        elif isinstance(node, _INNER):
            return None
    return _moves_of(node)


def _moves_of(node: ast.stmt) -> list[ast.expr] | None:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        return [node.target]
    if isinstance(node, ast.If):
        found = [_moves_of(each) for each in (*node.body, *node.orelse)]
        return None if None in found else [each for part in found if part for each in part]
    if not isinstance(node, ast.Expr):
        return [] if isinstance(node, ast.Pass) else None
    call = node.value
    if not isinstance(call, ast.Call):
        return []
    is_method = isinstance(call.func, ast.Attribute)
    name: str = getattr(call.func, "attr" if is_method else "id", "")
    if name in _SHOWING:
        return []
    return [call] if is_method and name in _MOVING else None


def refuse_deciding(
    moves: Sequence[Move], ran: Ran, places: Mapping[str, Place], refuse: Refuse = raised
) -> Sequence[Move]:
    """Refuse moves from which more follows than other moves and log lines; return the others."""
    if not moves:
        return ()
    others = []
    uses = Uses(ran, places)
    for move in sorted(moves, key=lambda move: not move.is_drawn):
        decides, source = uses.deciding(move.name, move.owner)
        if move.is_drawn:
            why = (
                f"the iteration {move}; a replay runs no Python, so it would go on with what "
                f"came while it was recorded. Remedy: {_DRAWS}"
            )
        elif decides:
            why = (
                f"the iteration moves Python, which no replay runs, and reads it for more "
                f"than that: {move}. Remedy: {REMEDY}"
            )
        else:
            others.append(move)
            continue
        refuse(CaptureError(why, source=source, kind=HazardKind.BAKED_NUMBER))
    return others


def tell_of(stands_still: Sequence[str]) -> None:
    """Warn, once, of what no replay will move."""
    if stands_still:
        _LOG.warning(
            "a replay runs no Python, so this stands still from now on: %s. Do it outside of the "
            "iteration if it is to go on",
            "; ".join(stands_still[:_MOST_TOLD]),
        )

"""What code makes of a value that it also moves: read off its source, where there is one."""

import ast
import builtins
import functools
import inspect
import linecache
from collections.abc import Iterable, Iterator
from types import CodeType

from graphfsdp._capture.guards.names import functions_of
from graphfsdp.base.hazards import SourceLine

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
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Uses:
    """How the code that ran uses names.

    Note [Uses of what moves]: an iteration that moves Python (a counter, a log) trains right for as
    long as nothing else follows from it, since a replay leaves it. A use follows if it is more than
    to move this value or another, or to print or log something, or to decide whether to do so.
    """

    def __init__(self, codes: Iterable[CodeType]) -> None:
        self._functions: list[tuple[CodeType, ast.AST]] = []
        for code in codes:
            self._functions += [(code, node) for node in _nodes_of(code)]

    def deciding(
        self, name: str, key: object = None, owner: type | None = None
    ) -> tuple[bool, SourceLine | None]:
        """Tell whether anything follows from what is held under a name, and in which line.

        What the code does not name it finds by another way; then everything may follow.

        Args:
            name: Of a variable, or of an attribute with a dot before it.
            key: Under which a dict of this name holds it, if it does.
            owner: Class of the object whose attribute it is, if it is one: methods of other classes
                have their own.
        """
        is_named = False
        methods = None if owner is None else _methods_of(owner)
        for code, function in self._functions:
            if not name.startswith(".") and name not in _variables(code):
                continue
            for use in _uses(function, name):
                if _is_of_another_key(use, key):
                    continue
                if methods is not None and code not in methods and _is_of_self(use, code):
                    continue
                is_named = True
                if _follows(use, function):
                    line = getattr(use, "lineno", code.co_firstlineno)
                    return True, SourceLine(code.co_filename, line, code.co_qualname)
        return not is_named and bool(self._functions), None


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


def _variables(code: CodeType) -> Iterable[str]:
    """Return the variables that code has of others: of functions around it, and global ones."""
    return (*code.co_freevars, *code.co_cellvars, *code.co_names, *code.co_varnames)


def _uses(function: ast.AST, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            if f".{node.attr}" == name:
                yield node
        elif isinstance(node, ast.Name) and node.id == name:
            yield node


def _is_of_another_key(use: ast.expr, key: object) -> bool:
    parent = _parent(use)
    if not isinstance(key, str) or not (isinstance(parent, ast.Subscript) and parent.value is use):
        return False
    return isinstance(parent.slice, ast.Constant) and parent.slice.value != key


def _methods_of(kind: type) -> set[CodeType]:
    members = (member for base in kind.__mro__ for member in vars(base).values())
    functions = (inspect.unwrap(each) for member in members for each in functions_of(member))
    return {each.__code__ for each in functions if hasattr(each, "__code__")}


def _is_of_self(use: ast.expr, code: CodeType) -> bool:
    """Tell whether a use is an attribute of the object that a method belongs to."""
    if not isinstance(use, ast.Attribute) or not isinstance(use.value, ast.Name):
        return False
    return use.value.id == "self" and code.co_varnames[:1] == ("self",)


def _parent(node: ast.AST) -> ast.AST:
    found: ast.AST = node.parent  # type: ignore[attr-defined]
    return found


def _follows(use: ast.expr, function: ast.AST) -> bool:
    """Tell whether something follows from a use that neither moves nor shows a value."""
    node: ast.AST = use
    while True:
        parent = _parent(node)
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            return False
        if isinstance(parent, ast.Subscript) and parent.value is node:
            node = parent
        elif isinstance(parent, ast.Attribute):
            call = _parent(parent)
            if isinstance(call, ast.Call) and call.func is parent:
                return not isinstance(_parent(call), ast.Expr)
            node = parent
        elif isinstance(parent, ast.Call):
            if _called(parent) not in _PASSING_ON or not hasattr(builtins, _called(parent)):
                return not (isinstance(_parent(parent), ast.Expr) and _is_harmless(parent))
            node = parent
        elif isinstance(parent, ast.keyword):
            node = parent
        elif isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            return _flows_on(parent, function)
        elif isinstance(parent, (ast.If, ast.IfExp)) and parent.test is node:
            return not (isinstance(parent, ast.If) and _only_shows(parent, function))
        elif isinstance(parent, ast.Expr):
            return False
        elif isinstance(parent, ast.expr) and not isinstance(parent, (ast.Lambda, ast.Await)):
            node = parent
        else:
            return True


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_harmless(call: ast.Call) -> bool:
    return _called(call) in _SHOWING or (
        isinstance(call.func, ast.Attribute) and call.func.attr in _MOVING
    )


def _flows_on(node: ast.Assign | ast.AnnAssign | ast.AugAssign, function: ast.AST) -> bool:
    """Tell whether something follows from what is assigned: of a local variable, from its uses."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            continue
        if not isinstance(target, ast.Name):
            return True
        if target.id in _not_local(function):
            continue
        loads = [use for use in _uses(function, target.id) if isinstance(use.ctx, ast.Load)]  # type: ignore[attr-defined]
        within = {id(each) for each in ast.walk(node)}
        if any(id(use) not in within and _follows(use, function) for use in loads):
            return True
    return False


def _not_local(function: ast.AST) -> set[str]:
    outer = (n for n in ast.walk(function) if isinstance(n, (ast.Global, ast.Nonlocal)))
    return {name for each in outer for name in each.names}


def _only_shows(branch: ast.If, function: ast.AST) -> bool:
    """Tell whether a branch does nothing but print, log and count."""
    for statement in (*branch.body, *branch.orelse):
        if isinstance(statement, ast.If):
            shows = _only_shows(statement, function)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            shows = _is_harmless(statement.value)
        elif isinstance(statement, (ast.Assign, ast.AugAssign)):
            shows = not _flows_on(statement, function)
        else:
            shows = isinstance(statement, ast.Pass)
        if not shows:
            return False
    return True

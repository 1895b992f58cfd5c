"""What code makes of a value that it also moves: read off its source, where there is one."""

import ast
import builtins
import functools
import inspect
import linecache
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import NamedTuple

from graphfsdp._capture.guards.names import functions_of
from graphfsdp._capture.guards.places import CONTAINERS, Place
from graphfsdp._capture.trace.ran import Ran
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
# Attributes that torch reads wherever they are set.
_READ_BY_TORCH = frozenset({"data", "grad", "param_groups", "requires_grad", "training"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class _Named(NamedTuple):
    """What code comes to by a name; see ``Uses.deciding``."""

    name: str
    key: object
    owner: type | None


class Uses:
    """How the code that ran uses names.

    Note [Uses of what moves]: an iteration that moves Python (a counter, a log) trains right for as
    long as nothing else follows from it, since a replay leaves it. A use follows if it is more than
    to move this value or another, or to print or log something, or to decide whether to do so. What
    it moves may stand still in the iteration that is recorded (``if calls % 10 == 0: rate *= 0.5``)
    and not in a later one: so whatever it may move is judged like itself.
    """

    def __init__(self, ran: Ran, places: Mapping[str, Place]) -> None:
        """``places`` are all that the code leads to, by title."""
        readable = ran.readable()
        self._functions = [(code, node) for code in readable for node in _nodes_of(code)]
        self._torchs = ran.not_ours().difference(readable)
        self._places: dict[str, list[Place]] = {}
        for place in places.values():
            self._places.setdefault(place.name, []).append(place)

    def deciding(
        self, name: str, key: object = None, owner: type | None = None, count: object = None
    ) -> tuple[bool, SourceLine | None]:
        """Tell whether anything follows from what is held under a name, and in which line.

        What the code does not name it finds by another way; then everything may follow.

        Args:
            name: Of a variable, or of an attribute with a dot before it.
            key: Under which a dict of this name holds it, if it does.
            owner: Class of the object whose attribute it is, if it is one: methods of other classes
                have their own.
            count: The number that it is now, if it is one.
        """
        what = _Named(name, key, owner)
        pending: dict[_Named, SourceLine | None] = {what: None}
        passed = count if isinstance(count, int) and self._only_grows(what) else None
        is_named = False
        for each in _growing(pending):
            for code, function, use in self._uses_of(each):
                is_named = True
                if each is what and passed is not None and _is_settled(use, passed):
                    continue
                source = pending[each]
                if source is None:
                    line = getattr(use, "lineno", code.co_firstlineno)
                    source = SourceLine(code.co_filename, line, code.co_qualname)
                flow = _Flow(function)
                if flow.follows(use):
                    return True, source
                for target in flow.moved:
                    found = self._named_by(target, code)
                    if found is None:
                        return True, source
                    pending |= {other: source for other in found if other not in pending}
        return not is_named and bool(self._functions), None

    def _uses_of(self, what: _Named) -> Iterator[tuple[CodeType, ast.AST, ast.expr]]:
        methods = None if what.owner is None else _methods_of(what.owner)
        for code, function in self._functions:
            if not what.name.startswith(".") and what.name not in _variables(code):
                continue
            for use in _uses(function, what.name):
                if _is_of_another_key(use, what.key):
                    continue
                if methods is not None and code not in methods and _is_of_self(use, code):
                    continue
                yield code, function, use

    def _only_grows(self, what: _Named) -> bool:
        """Tell whether the code that ran does nothing to a count but to add numbers to it."""
        stores = [
            node
            for _, _, use in self._uses_of(what)
            if isinstance((node := _with_item(use)).ctx, (ast.Store, ast.Del))  # type: ignore[attr-defined]
        ]
        added = [parent for parent in map(_parent, stores) if isinstance(parent, ast.AugAssign)]
        return len(added) == len(stores) and all(
            isinstance(each.op, ast.Add)
            and isinstance(each.value, ast.Constant)
            and isinstance(each.value.value, int)
            for each in added
        )

    def _named_by(self, target: ast.expr, code: CodeType) -> list[_Named] | None:
        """Return by which names code comes to what it assigns; None if nobody knows.

        Of a call it is what the method belongs to, which must be a container of Python's.
        """
        is_call = isinstance(target, ast.Call)
        if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            target = target.func.value
        key: object = None
        while isinstance(target, ast.Subscript):
            key = target.slice.value if isinstance(target.slice, ast.Constant) else None
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
        if name.removeprefix(".") in _READ_BY_TORCH:
            return None
        owners = {type(place.owner) for place in places if place.owner is not None}
        if _is_of_self(target, code):
            owners = {each for each in owners if code in _methods_of(each)} or owners
        if any(self._is_read_by_torch(name, each) for each in owners):
            return None
        return [_Named(name, key, each) for each in owners or (None,)]

    def _is_read_by_torch(self, name: str, owner: type) -> bool:
        """Tell whether methods of torch's that ran name an attribute of the objects of a class."""
        ran = _methods_of(owner) & self._torchs
        return any(name.removeprefix(".") in code.co_names for code in ran)


def _growing(found: dict[_Named, SourceLine | None]) -> Iterator[_Named]:
    """Yield the keys of a dict that grows meanwhile."""
    seen: set[_Named] = set()
    while len(seen) < len(found):
        each = next(each for each in found if each not in seen)
        seen.add(each)
        yield each


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


def _with_item(use: ast.expr) -> ast.expr:
    """Return a use with the item of it that is used, if it is one of a dict."""
    parent = _parent(use)
    return parent if isinstance(parent, ast.Subscript) and parent.value is use else use


def _is_settled(use: ast.expr, passed: int) -> bool:
    """Tell whether it only asks what a number that grows is in comparison with smaller ones."""
    node = _with_item(use)
    parent = _parent(node)
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        return passed > 0
    if not isinstance(parent, ast.Compare) or parent.left is not node:
        return False
    others = [each.value for each in parent.comparators if isinstance(each, ast.Constant)]
    return len(parent.comparators) == 1 and all(
        isinstance(other, int) and other < passed for other in others or [passed]
    )


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


class _Flow:
    """What follows from a use in a function.

    Attributes:
        moved: What it moves beside local variables: targets, and calls of methods.
    """

    def __init__(self, function: ast.AST) -> None:
        self._function = function
        outer = (n for n in ast.walk(function) if isinstance(n, (ast.Global, ast.Nonlocal)))
        self._not_local = {name for each in outer for name in each.names}
        self._met: set[ast.AST] = set()
        self.moved: list[ast.expr] = []

    def follows(self, use: ast.expr) -> bool:
        """Tell whether something follows that neither moves nor shows a value."""
        node: ast.AST = use
        while True:
            parent = _parent(node)
            if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                return False
            if isinstance(parent, ast.Subscript) and parent.value is node:
                node = parent
            elif isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load):
                self.moved.append(parent)
                return False
            elif isinstance(parent, ast.NamedExpr):
                if self._follows_from([parent.target], parent):
                    return True
                node = parent
            elif isinstance(parent, ast.Attribute):
                call = _parent(parent)
                if isinstance(call, ast.Call) and call.func is parent:
                    return not isinstance(_parent(call), ast.Expr)
                node = parent
            elif isinstance(parent, ast.Call):
                if _called(parent) not in _PASSING_ON or not hasattr(builtins, _called(parent)):
                    return not (isinstance(_parent(parent), ast.Expr) and self._is_harmless(parent))
                node = parent
            elif isinstance(parent, ast.keyword):
                node = parent
            elif isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                return self._flows_on(parent)
            elif isinstance(parent, (ast.If, ast.IfExp)) and parent.test is node:
                return not (isinstance(parent, ast.If) and self._only_shows(parent))
            elif isinstance(parent, ast.Expr):
                return False
            elif isinstance(parent, ast.expr) and not isinstance(parent, (ast.Lambda, ast.Await)):
                node = parent
            else:
                return True

    def _is_harmless(self, call: ast.Call) -> bool:
        if _called(call) in _SHOWING:
            return True
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _MOVING:
            return False
        self.moved.append(call)
        return True

    def _flows_on(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
        return self._follows_from(
            node.targets if isinstance(node, ast.Assign) else [node.target], node
        )

    def _follows_from(self, targets: Iterable[ast.expr], node: ast.AST) -> bool:
        """Tell whether something follows from what is assigned: of a local variable, its uses."""
        if node in self._met:
            return False
        self._met.add(node)
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                self.moved.append(target)
                continue
            if not isinstance(target, ast.Name):
                return True
            if target.id in self._not_local:
                self.moved.append(target)
                continue
            loads = [
                use
                for use in _uses(self._function, target.id)
                if isinstance(use.ctx, ast.Load)  # type: ignore[attr-defined]
            ]
            within = {id(each) for each in ast.walk(node)}
            if any(id(use) not in within and self.follows(use) for use in loads):
                return True
        return False

    def _only_shows(self, branch: ast.If) -> bool:
        """Tell whether a branch does nothing but print, log and count."""
        for statement in (*branch.body, *branch.orelse):
            if isinstance(statement, ast.If):
                shows = self._only_shows(statement)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                shows = self._is_harmless(statement.value)
            elif isinstance(statement, (ast.Assign, ast.AugAssign)):
                shows = not self._flows_on(statement)
            else:
                shows = isinstance(statement, ast.Pass)
            if not shows:
                return False
        return True


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")

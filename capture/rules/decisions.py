"""Where code decides by a value that it has by name: tests of ``if``, ``while`` and the like."""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from graphfsdp._capture.trace.source import is_users_file
from graphfsdp.base.hazards import SourceLine

_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_NAMED = (ast.Name, ast.Attribute, ast.Subscript)
_NUMBERS = (int, float)


@dataclass(frozen=True)
class Period:
    """What a number is divided by, of which the rest decides."""

    length: float


_Limit = float | str | Period | None
_TYPE = "is of a type"  # no attribute has such a name
_ASK_TYPE = ("isinstance", "hasattr", "callable", "type")
# No iteration runs these.
_OUTSIDE = frozenset(("__init__", "__repr__", "__str__", "extra_repr", "__getstate__"))


@dataclass(frozen=True)
class Decision:
    """One place where code decides by a value.

    Attributes:
        words: How it reads the value: ``self.calls``, ``state['calls']``, ``calls``.
        name: Of the attribute that it is; "" for others.
        source: The line.
        limit: What it is compared with: a number, the name of an attribute of the same object, or
            None for anything else; if the rest of a division is compared, the divisor.
        is_counted_before: The same function assigns the value further up.
        kind: Of what object it is an attribute, if that is known.
    """

    words: str
    name: str
    source: SourceLine
    limit: _Limit
    is_counted_before: bool = False
    kind: type | None = None

    def may_turn(self, before: object, after: object, owner: object) -> bool:
        """Tell whether the decision may be another one later, if the value goes on as it does.

        A number that only grows never comes back to what it has passed: ``if self.calls == 0``
        has been decided for ever.

        Args:
            before: The value before an iteration.
            after: The value behind it.
            owner: The object whose attribute it is, if it is one.
        """
        if self.limit == _TYPE:
            return type(before) is not type(after)
        if isinstance(self.limit, Period):  # a whole number of periods in each iteration
            numbers = isinstance(before, _NUMBERS) and isinstance(after, _NUMBERS)
            return not numbers or (after - before) % self.limit.length != 0  # type: ignore[operator]
        limit = getattr(owner, self.limit, None) if isinstance(self.limit, str) else self.limit
        if isinstance(before, bool) or not (
            isinstance(before, _NUMBERS)
            and isinstance(after, _NUMBERS)
            and isinstance(limit, _NUMBERS)
        ):
            return True
        seen = after if self.is_counted_before else before
        return limit >= seen if after > before else limit <= seen


def decisions_of(kind: type[nn.Module]) -> list[Decision]:
    """Return all places where the user's code in a class of modules decides by an attribute."""
    found: list[Decision] = []
    for base, member, function in methods_of(kind):
        own = "" if isinstance(member, staticmethod) else _first_argument(function)
        found += [
            replace(each, kind=base) if each.words == f"{own}.{each.name}" else each
            for each in decisions_in(function)
        ]
    return found


def methods_of(kind: type[nn.Module]) -> Iterator[tuple[type, object, types.FunctionType]]:
    """Yield the user's functions in a class of modules that an iteration may run.

    With each its class, and the member of the class that it belongs to.
    """
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, member in vars(base).items():
            for function in () if name in _OUTSIDE else _functions(member):
                if is_users_file(function.__code__.co_filename):
                    yield base, member, function


def _first_argument(function: types.FunctionType) -> str:
    code = function.__code__
    return code.co_varnames[0] if code.co_argcount else ""


def _functions(member: object) -> Iterator[types.FunctionType]:
    if isinstance(member, property):
        members: tuple[object, ...] = (member.fget, member.fset)
    else:
        members = (getattr(member, "__func__", member),)
    for each in members:
        function = inspect.unwrap(each) if callable(each) else each
        if isinstance(function, types.FunctionType):
            yield function


def decisions_in(function: types.FunctionType) -> Iterator[Decision]:
    """Yield all places where a function decides by a value that it has by name."""
    code = function.__code__
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):  # made by exec, or a lambda within an expression
        return
    tests = list(_tests(tree))
    inside = {id(node) for test in tests for node in ast.walk(test)}
    # An assertion that holds decides nothing.
    inside |= {id(n) for a in ast.walk(tree) if isinstance(a, ast.Assert) for n in ast.walk(a)}
    # The result of other comparisons is kept, and decides later.
    tests += [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and id(n) not in inside]
    kept = _kept(tree)
    counted = _counted(tree)
    for test in tests:
        for named, limit in _of_test(test):
            line = code.co_firstlineno + named.lineno - 1
            source = SourceLine(code.co_filename, line, code.co_qualname)
            before = kept.get(named.id, []) if isinstance(named, ast.Name) else []
            for node, its_limit in ((named, limit), *_behind(before, limit)):
                name = node.attr if isinstance(node, ast.Attribute) else ""
                words = ast.unparse(node)
                is_counted = counted.get(words, named.lineno) < named.lineno
                yield Decision(words, name, source, its_limit, is_counted)


def _counted(tree: ast.AST) -> dict[str, int]:
    """Return the lines where values are counted, of those that are assigned once."""
    lines: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign | ast.Assign | ast.AnnAssign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                lines.setdefault(ast.unparse(target), []).append(node.lineno)
    return {words: numbers[0] for words, numbers in lines.items() if len(numbers) == 1}


def _kept(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """Return what variables were assigned: a test of one looks at that."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


def _behind(values: list[ast.expr], limit: _Limit) -> Iterator[tuple[ast.expr, _Limit]]:
    for value in values:
        yield from ((value, limit),) if isinstance(value, _NAMED) else _within(value)


def _tests(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject


def _of_test(test: ast.AST) -> Iterator[tuple[ast.expr, _Limit]]:
    """Yield everything that a test looks at, with its limit."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _of_test(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _of_test(test.operand)
    elif isinstance(test, _NAMED):
        yield test, 0  # true unless it is zero
        yield from _below(test)
    elif isinstance(test, ast.Compare):
        sides = [test.left, *test.comparators]
        for left, op, right in zip(sides, test.ops, sides[1:], strict=False):
            for one, other in ((left, right), (right, left)):
                is_none = isinstance(op, ast.Is | ast.IsNot) and ast.unparse(other) == "None"
                if isinstance(one, _NAMED) and (is_none or isinstance(op, _ORDERS)):
                    yield one, _TYPE if is_none else _limit(one, other)
                    yield from _below(one)
                else:
                    yield from _within(one)
    else:
        yield from _within(test)


def _below(named: ast.AST) -> Iterator[tuple[ast.expr, _Limit]]:
    for child in ast.iter_child_nodes(named):
        yield from _within(child)


def _within(expression: ast.AST) -> Iterator[tuple[ast.expr, _Limit]]:
    limits: dict[int, _Limit] = {}
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in _ASK_TYPE:
            limits |= dict.fromkeys(map(id, ast.walk(node)), _TYPE)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            divisor = node.right.value if isinstance(node.right, ast.Constant) else None
            if isinstance(divisor, int) and divisor:
                limits[id(node.left)] = Period(divisor)
    for node in ast.walk(expression):
        if isinstance(node, _NAMED):
            yield node, limits.get(id(node))


def _limit(one: ast.expr, other: ast.expr) -> _Limit:
    if isinstance(other, ast.Constant) and isinstance(other.value, _NUMBERS):
        return other.value
    if isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.USub):
        inner = _limit(one, other.operand)
        return -inner if isinstance(inner, _NUMBERS) else None
    if isinstance(one, ast.Attribute) and isinstance(other, ast.Attribute):
        return other.attr if ast.dump(other.value) == ast.dump(one.value) else None
    return None

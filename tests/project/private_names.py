"""The table of torch's private names in docs/architecture.md: run this to have it made anew.

Names and places are read off the source files. What a name is for, and which versions of torch
have it, is written into the table by hand, and kept. tests/project/test_private_names.py says what
is missing.
"""

import ast
import functools
import inspect
import pathlib
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
HOME = "graphfsdp.base.torch_internals"
START, END = "<!-- private names: start -->\n", "<!-- private names: end -->\n"
HEAD = "| name | where | what for | versions |\n|---|---|---|---|\n"
PRODUCT = ("graphfsdp", "capture", "optim")
ALL_VERSIONS = "all"
_MOST_PLACES = 3

# Whose private attributes are looked for; the first that has a name is named as its owner.
OWNERS = (
    *("torch.UntypedStorage", "torch.Tensor", "torch.nn.Module", "torch.optim.Optimizer"),
    *("torch.optim.lr_scheduler.LRScheduler", "torch.cuda.CUDAGraph", "torch._ops.OpOverload"),
    *("torch._ops.OpOverloadPacket", "torch.utils._python_dispatch.TorchDispatchMode"),
    *("torch.autograd.graph.Node", "torch.distributed.tensor.DTensor", "torch.amp.GradScaler"),
    *("torch.distributed.tensor._dtensor_spec.DTensorSpec", "torch.distributed.DeviceMesh"),
    *("torch.distributed.ProcessGroup", "torch._C._distributed_c10d.Backend"),
    "torch._C._distributed_c10d.Backend.Options",
    "torch.distributed.pipelining.schedules.PipelineScheduleSingle",
    "torch.distributed.pipelining.schedules.PipelineScheduleMulti",
    "torch.distributed.pipelining.PipelineStage",
)


class Row(NamedTuple):
    what_for: str
    versions: str  # "all", or as in ">= 2.13", "< 2.14", "all, CUDA"


NOTHING_KNOWN = Row("?", ALL_VERSIONS)


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[A-Za-z]\w*", name))


def resolve(name: str) -> Any:
    """Return what a dotted name stands for; ImportError or AttributeError if there is no such."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated among torch's own modules
        return pkgutil.resolve_name(name)


def has_attribute(owner: str, name: str) -> bool:
    """Tell whether a class of torch has such an attribute, or its methods set one."""
    kind = resolve(owner)
    if hasattr(kind, name):
        return True
    return any(re.search(rf"""(self\.|["']){name}\b""", _source(base)) for base in kind.__mro__)


@functools.cache
def _source(kind: type) -> str:
    if kind.__module__.startswith("torch"):
        try:
            return inspect.getsource(kind)
        except (OSError, TypeError):  # written in C++
            pass
    return ""


def exists(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    if owner in OWNERS:
        return has_attribute(owner, last)
    try:
        resolve(name)
    except (AttributeError, ImportError):
        return False
    return True


@functools.cache
def owner_of(attribute: str) -> str | None:
    return next((owner for owner in OWNERS if has_attribute(owner, attribute)), None)


class Source:
    """What one file of ours uses of torch."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        self.names = {"torch": "torch"}  # what names of this file stand for
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found = {each.asname: each.name for each in node.names if each.asname}
            elif isinstance(node, ast.ImportFrom):
                found = {e.asname or e.name: f"{node.module}.{e.name}" for e in node.names}
                if node.module == HOME:
                    found = {name: home().names.get(name, "") for name in found}
            else:
                continue
            self.names |= {k: v for k, v in found.items() if v.startswith("torch.")}
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                chain = self.chain(node.value)
                if chain and isinstance(targets[0], ast.Name) and targets[0].id not in self.names:
                    self.names[targets[0].id] = chain

    def chain(self, node: ast.AST) -> str:
        """Return the dotted name in torch that an expression is; "" if it is something else."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            before = self.chain(node.value)
            return f"{before}.{node.attr}" if before else ""
        match node:
            case ast.Call(ast.Name("getattr"), [what, ast.Constant(str(name)), *_]):
                before = self.chain(what)
                return f"{before}.{name}" if before else ""
            case ast.Call(ast.Attribute(attr="get"), [ast.Constant(str(name)), *_]):
                return name if name.startswith("torch.") else ""  # of sys.modules
        return ""

    def own_names(self) -> set[str]:
        """Return the private names that it gives to what is its own."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
        return found

    def chains(self) -> Iterator[str]:
        """Yield each name of torch in full, where it is imported, asked for, or in a string."""
        inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{each.name}" for each in node.names)
            elif isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value if re.fullmatch(r"torch(\.\w+)+", node.value) else ""
            elif isinstance(node, ast.Attribute | ast.Call) and id(node) not in inner:
                is_get = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                yield "" if is_get else self.chain(node)
            elif isinstance(node, ast.ClassDef):  # what it has in the place of torch's own
                own = [e.name for e in node.body if isinstance(e, ast.FunctionDef)]
                own = list(filter(is_private, own))
                for base in filter(None, map(self.chain, node.bases)):
                    yield from (f"{base}.{name}" for name in own if exists(f"{base}.{name}"))

    def attributes(self) -> Iterator[str]:
        """Yield each private attribute of what is no name of torch, and strings that may be one."""
        own = self.own_names()
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if is_private(node.value):
                    yield node.value
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                whose = ast.unparse(node.value)
                if not self.chain(node) and not (whose in ("self", "cls") and node.attr in own):
                    yield node.attr


@functools.cache
def home() -> Source:
    return Source(ROOT / f"{HOME.replace('.', '/')}.py")


def is_counted(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and parts[1:2] != ["ops"] and any(map(is_private, parts))


def uses(known: frozenset[str] = frozenset()) -> dict[str, Counter[str]]:
    """Return how often each file uses each private name; ``known`` ones are in the table."""
    folders = (*PRODUCT, "benchmarks", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = [Source(path) for path in files if path.resolve() == path]
    ours = {name for source in sources for name in source.own_names()}
    attributes = {name.rpartition(".")[2]: name for name in sorted(known) if is_attribute(name)}
    found: dict[str, Counter[str]] = {}
    for source in sources:
        names = [name for name in source.chains() if is_counted(name)]
        for attribute in source.attributes():
            owner = None if attribute in ours else owner_of(attribute)
            name = attributes.get(attribute) or (owner and f"{owner}.{attribute}")
            names += [name] if name else []
        for name in names:
            place = str(source.path.relative_to(ROOT)).removeprefix("graphfsdp/")
            found.setdefault(name, Counter())[place] += 1
    return dict(sorted(found.items()))


def is_attribute(name: str) -> bool:
    *_, owner, last = name.split(".")
    return is_private(last) and owner[0].isupper()


def read_table() -> dict[str, Row]:
    rows = re.findall(r"^\| `(.*?)` \| .*? \| (.*?) \| (.*?) \|$", read_section()[1], re.MULTILINE)
    return {name: Row(what_for, versions) for name, what_for, versions in rows}


def make_table(rows: dict[str, Row], found: dict[str, Counter[str]]) -> str:
    lines = []
    for name, places in found.items():
        where = [f"{path} ({n})" if n > 1 else path for path, n in sorted(places.items())]
        if len(where) > _MOST_PLACES:
            where = [*where[: _MOST_PLACES - 1], f"{len(where) - _MOST_PLACES + 1} more files"]
        row = rows.get(name, NOTHING_KNOWN)
        lines.append(f"| `{name}` | {', '.join(where)} | {row.what_for} | {row.versions} |\n")
    return HEAD + "".join(lines)


def read_section() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    table, _, after = rest.partition(END)
    return before + START, table, END + after


def main() -> None:
    rows = read_table()
    before, _, after = read_section()
    table = make_table(rows, uses(frozenset(rows)))
    PAGE.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()

"""What this package uses of torch's insides is in a table, and in the torch that runs.

Names are read off the source files; docs/architecture.md says what each is for, and which versions
of torch have it.
"""

import ast
import functools
import inspect
import pathlib
import pkgutil
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.torch_version import TorchVersion

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = "graphfsdp.base.torch_internals"
FOLDERS = ("graphfsdp", "capture", "optim", "benchmarks", "examples")

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


# Versions by name: "all", or as in ">= 2.13", "< 2.14", "all, CUDA".
TABLE: dict[str, str] = dict(
    re.findall(
        r"^\| `(torch\S*)` \| [^|]+ \| ([^|]+) \|$",
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)


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


def uses() -> dict[str, list[str]]:
    """Return which files use each private name; attributes of names in the table are theirs."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = [Source(path) for path in files if path.resolve() == path]
    ours = {name for source in sources for name in source.own_names()}
    attributes = {name.rpartition(".")[2]: name for name in sorted(TABLE) if is_attribute(name)}
    found: dict[str, list[str]] = {}
    for source in sources:
        names = set(filter(is_counted, source.chains()))
        for attribute in set(source.attributes()):
            owner = None if attribute in ours else owner_of(attribute)
            name = attributes.get(attribute) or (owner and f"{owner}.{attribute}")
            names |= {name} if name else set()
        for name in names:
            found.setdefault(name, []).append(str(source.path.relative_to(ROOT)))
    return found


def is_attribute(name: str) -> bool:
    *_, owner, last = name.split(".")
    return is_private(last) and owner[0].isupper()


def test_the_table_says_of_each_name_what_it_is_for() -> None:
    found = uses()
    unknown = {name: files for name, files in found.items() if name not in TABLE}
    assert not unknown, f"say in docs/architecture.md what they are for: {unknown}"
    assert TABLE.keys() - found.keys() == set(), "nothing uses these any more"


def test_each_name_is_in_the_torch_that_runs_if_the_table_says_so() -> None:
    wrong = {
        name: versions
        for name, versions in TABLE.items()
        if is_expected(versions) is not None and is_expected(versions) != exists(name)
    }
    assert not wrong, f"not as the table says in torch {torch.__version__}: {wrong}"


def is_expected(versions: str) -> bool | None:
    """None: it depends on the build."""
    versions, _, build = versions.partition(", ")
    if build == "CUDA" and torch.version.cuda is None:
        return None
    if versions == "all":
        return True
    sign, version = versions.split()
    running = TorchVersion(torch.__version__)
    return running >= version if sign == ">=" else running < version

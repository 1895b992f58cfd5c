"""The rules of the house (docs/architecture.md), read off the source files.

A floor, legs that never import each other, and a roof that joins them. A new module directly
in graphfsdp/ has to be given its place in FLOOR, SHARD_LEG or ROOF below.
"""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = {"graphfsdp": "graphfsdp", "capture": "graphfsdp._capture", "optim": "graphfsdp.optim"}

FLOOR = frozenset(
    {
        *("_recompute", "buckets", "capturable", "changes", "clip", "collectives", "config"),
        "collector",
        *(
            "dtensors",
            "errors",
            "flat_buffer",
            "hazards",
            "host_memory",
            "layout",
            "layout_plan",
            "memory_plan",
            "metric_ring",
            "norms",
        ),
        *("nvtx", "recut", "sharded", "streams"),
    }
)
SHARD_LEG = frozenset(
    {
        *("_fully_shard", "_materialize", "buffer_pool", "model_axes", "model_shards"),
        *("row_shard", "saved_weights", "schedule", "shard_buffer", "shard_group", "unit"),
        *("communicators", "grad_binding", "input_cast", "prefetched", "unreduced"),
        *("diagnostics", "shard_table", "unit_mesh", "unit_plan"),
        *("init_order", "initializers", "meta_tensors", "rank_agreement"),
        *("meta_load", "unit_memory", "unshard_function", "weight_writes", "whole_unit"),
        "sharded_parameter",
        *("fsdp_module", "unit_phase"),
    }
)
ROOF = frozenset(
    {
        *("", "__main__", "bench", "capture_hook", "checkpoint", "cli", "front", "pictures"),
        *("planning", "preconditions", "preflight", "preflight_cli", "preflight_report"),
        "preflight_run",
        *("cpu_instead", "preflight_script", "training", "wrapped"),
    }
)

MAX_LINES = 350
OPTIONAL_PACKAGES = (
    "apex",
    "matplotlib",
    "mlperf_logging",
    "nvtx",
    "safetensors",
    "tensorboard",
    "transformer_engine",
    "triton",
)
# May write to the terminal: it is what they are for.
TERMINAL_MODULES = frozenset({"graphfsdp.cli", "graphfsdp.__main__", "graphfsdp.training.console"})
MUTABLE_CONTAINERS = frozenset(
    {
        *("bytearray", "dict", "list", "set", "Counter", "OrderedDict", "defaultdict", "deque"),
        *("WeakKeyDictionary", "WeakSet", "WeakValueDictionary"),
    }
)


@functools.cache
def sources() -> tuple[tuple[str, pathlib.Path], ...]:
    """Every module of the package by its import name; the links are not followed."""
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if any((ROOT / folder / part).is_symlink() for part in relative.parents):
                continue
            parts = relative.with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found.append((name, path))
    return tuple(found)


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place_of(module: str) -> str:
    """floor, roof, or the name of a leg."""
    if module.startswith("graphfsdp._capture"):
        return "leg capture"
    if module.startswith("graphfsdp.optim"):
        return "leg optim"
    head = module.removeprefix("graphfsdp").removeprefix(".").partition(".")[0]
    for place, members in (("floor", FLOOR), ("leg shard", SHARD_LEG), ("roof", ROOF)):
        if head in members:
            return place
    raise LookupError(f"{module} has no place: add {head!r} to FLOOR, SHARD_LEG or ROOF here")


def imports_of(module: str, path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Line and name of each module of ours that ``module`` imports, anywhere in the file."""
    known = {name for name, _ in sources()}
    for node in ast.walk(parse(path)):
        line, targets = 0, list[str]()
        if isinstance(node, ast.Import):
            line, targets = node.lineno, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            line = node.lineno
            targets = [name if name in known else node.module for name in members]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            line = node.lineno
            targets = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        for target in dict.fromkeys(targets):
            if target.partition(".")[0] == "graphfsdp":
                yield line, target


def report(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


def where(path: pathlib.Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_each_source_file_is_found() -> None:
    names = {name for name, _ in sources()}
    assert {"graphfsdp", "graphfsdp._capture", "graphfsdp.optim", "graphfsdp.errors"} <= names


def test_each_module_has_a_place() -> None:
    for module, _ in sources():
        assert place_of(module)


def test_imports_are_absolute() -> None:
    report(
        [
            f"{where(path, node.lineno)}: relative import"
            for _, path in sources()
            for node in ast.walk(parse(path))
            if isinstance(node, ast.ImportFrom) and node.level
        ]
    )


def test_folders_are_imported_by_their_package_names() -> None:
    """`import capture` would load a second copy, or a user's own module of that name."""
    strangers = {"benchmarks", "capture", "examples", "optim", "tests"}
    violations = []
    for _, path in sources():
        for node in ast.walk(parse(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if name.partition(".")[0] in strangers:
                    violations.append(f"imports {name}: {path.relative_to(ROOT)}")
    report(violations)


def test_nothing_imports_upwards_or_sideways() -> None:
    """The floor imports the floor, a leg imports the floor and itself, the roof imports all."""
    violations = []
    for module, path in sources():
        place = place_of(module)
        for line, target in imports_of(module, path):
            if place != "roof" and place_of(target) not in ("floor", place):
                violations.append(
                    f"{where(path, line)}: {module} ({place}) imports {target} ({place_of(target)})"
                )
    report(violations)


def test_there_are_no_import_cycles() -> None:
    graph = {
        module: {target for _, target in imports_of(module, path) if target != module}
        for module, path in sources()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_files_are_short() -> None:
    """Packages, tests, benchmarks and examples alike."""
    folders = (*FOLDERS, "tests", "benchmarks", "examples")
    files = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert len(files) > len(folders)
    counted = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    report(
        [
            f"{path.relative_to(ROOT)}: {num_lines} lines, the limit is {MAX_LINES}; split it"
            for path, num_lines in sorted(counted.items())
            if num_lines > MAX_LINES
        ]
    )


def test_each_package_is_in_the_list_that_is_built() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {
        name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in sources()
    }
    assert sorted(setuptools["packages"]) == sorted(packages)
    for name, path in sources():
        assert (path.parent / "__init__.py").exists(), f"{name} lies in a folder without __init__"
    assert setuptools["package-dir"] == {
        package: folder for folder, package in FOLDERS.items() if folder != package
    }


@pytest.mark.parametrize(("link", "folder"), [("_capture", "capture"), ("optim", "optim")])
def test_a_bare_checkout_finds_the_folders_through_relative_links(link: str, folder: str) -> None:
    path = ROOT / "graphfsdp" / link
    assert path.is_symlink()
    assert path.readlink() == pathlib.Path("..") / folder
    assert path.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", ["capture", "optim"])
def test_a_folder_refuses_to_be_a_second_copy_of_its_package(folder: str) -> None:
    result = run_python(f"import {folder}")
    assert result.returncode == 1
    assert f"ImportError: this folder is the package {FOLDERS[folder]}" in result.stderr


def test_only_the_terminal_modules_print() -> None:
    report(
        [
            f"{where(path, node.lineno)}: print"
            for module, path in sources()
            if module not in TERMINAL_MODULES
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
    )


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CONTAINERS
    return False


def shared_assignments(tree: ast.Module) -> Iterator[tuple[int, str, ast.expr | None]]:
    """Assignments that run once and are shared: those of the module and of its classes."""
    bodies: list[ast.Module | ast.ClassDef] = [tree]
    bodies += [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for body in bodies:
        statements = list(body.body)
        while statements:
            node = statements.pop()
            if isinstance(node, ast.If | ast.Try | ast.With):
                statements += [child for child in ast.walk(node) if isinstance(child, ast.stmt)][1:]
            elif isinstance(node, ast.Assign):
                yield node.lineno, ast.unparse(node.targets[0]), node.value
            elif isinstance(node, ast.AnnAssign):
                yield node.lineno, ast.unparse(node.target), node.value


def test_there_is_no_mutable_state_in_modules_and_classes() -> None:
    """Two captured steps in one process must share nothing; constants are tuples or frozen."""
    violations = []
    for _, path in sources():
        for line, name, value in shared_assignments(parse(path)):
            if mutable(value) and name not in ("__all__", "__slots__"):
                violations.append(f"{where(path, line)}: {name} is mutable and shared")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Global):
                violations.append(f"{where(path, node.lineno)}: global {', '.join(node.names)}")
    report(violations)


def test_the_check_for_mutable_state_sees_it() -> None:
    source = "A = (1,)\nif A:\n    b = {}\nclass C:\n    d: list[int] = []\n    e = frozenset()\n"
    found = [name for _, name, value in shared_assignments(ast.parse(source)) if mutable(value)]
    assert sorted(found) == ["b", "d"]


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_optional_packages_are_not_imported_by_importing_graphfsdp() -> None:
    result = run_python(
        "import torch, sys; before = set(sys.modules)\n"
        "import graphfsdp, graphfsdp.optim\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        f"print(sorted(new & {{'rich', *{OPTIONAL_PACKAGES}}}))"
    )
    assert result.stderr == ""
    assert result.stdout.strip() == "[]"


BLOCK = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL_PACKAGES}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Block())
"""


def test_graphfsdp_trains_without_any_optional_package() -> None:
    result = run_python(
        BLOCK
        + """
import torch, graphfsdp, graphfsdp.optim, graphfsdp.cli, graphfsdp.training.loop
def train(scope):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = graphfsdp.optim.FusedAdam(model.parameters(), lr=0.1)
    loss_fn = lambda model, x: model(x).square().mean()
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope) as step:
        return torch.stack([step(torch.randn(2, 4)) for _ in range(6)])
print(torch.equal(train("none"), train("full_iteration")))
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "True"

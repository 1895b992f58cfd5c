"""The rules of the house (docs/architecture.md), read off the source files.

Rules are about folders: what each may import, and how many modules it holds.
"""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from types import MappingProxyType

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = {"graphfsdp": "graphfsdp", "capture": "graphfsdp._capture", "optim": "graphfsdp.optim"}

CAPTURE, OPTIM = "graphfsdp._capture", "graphfsdp.optim"
BASE = frozenset({"graphfsdp.base", "graphfsdp.errors", "graphfsdp.config"})
# What each folder may import beside itself. The front, graphfsdp/*.py, and the programs on top of
# it may import everything; errors.py and config.py are everybody's, data.py stands on them alone.
DATA = "graphfsdp.data"
EIGHT_BIT = "graphfsdp.eight_bit"
TRACE = f"{CAPTURE}.trace"
COMPILED = f"{CAPTURE}.compiled"
CHECKS = frozenset({f"{CAPTURE}.guards", f"{CAPTURE}.ranks", f"{CAPTURE}.rules"})
UNDO_AND_REPORT = frozenset({f"{CAPTURE}.undo", f"{CAPTURE}.report"})
BACKENDS = frozenset({f"{CAPTURE}.cpu", f"{CAPTURE}.cuda"})
MAY_IMPORT = {
    "graphfsdp.base": BASE,
    EIGHT_BIT: BASE,
    "graphfsdp.moe": BASE,
    "graphfsdp.sharding": BASE | {EIGHT_BIT},
    TRACE: BASE,
    **dict.fromkeys((*CHECKS, COMPILED), BASE | {TRACE}),
    **dict.fromkeys(UNDO_AND_REPORT, BASE | {TRACE} | CHECKS),
    **dict.fromkeys(BACKENDS, BASE | {TRACE, COMPILED} | CHECKS | UNDO_AND_REPORT),
    CAPTURE: BASE | {TRACE, f"{CAPTURE}.compiled"} | CHECKS | UNDO_AND_REPORT | BACKENDS,
    f"{OPTIM}.fused": BASE,
    f"{OPTIM}.adapters": BASE | {OPTIM, f"{OPTIM}.fused"},
    OPTIM: BASE | {f"{OPTIM}.{room}" for room in ("adapters", "fused")},
}
ON_TOP = frozenset(
    {
        "graphfsdp",
        *(f"graphfsdp.{room}" for room in ("checkpoint", "in_place", "integrations", "preflight")),
    }
)
# Programs for users: beside these folders, modules by name.
PROGRAMS = MappingProxyType(
    {
        # Where checkpoints lie, and how ranks decide together, is of one piece with them.
        "graphfsdp.training": BASE | {"graphfsdp.checkpoint"},
        "graphfsdp.bench": BASE | {"graphfsdp.training"},
        "graphfsdp.planning": BASE | {"graphfsdp.training"},
    }
)
OFFERED_TO_PROGRAMS = frozenset(
    {
        *("graphfsdp", "graphfsdp.cli", "graphfsdp.moe", "graphfsdp.optim", DATA),
        "graphfsdp.sharding.layout",  # what the layout decides is asked of the layout
    }
)

# What tests may import without being tied to how a room is built; programs are named as they are.
OFFERED_TO_TESTS = frozenset(
    {
        *("graphfsdp", "graphfsdp.checkpoint", "graphfsdp.cli", "graphfsdp.config"),
        *("graphfsdp.data", "graphfsdp.errors", "graphfsdp.moe", "graphfsdp.newer_torch"),
        *("graphfsdp.optim", "graphfsdp.integrations"),
        *("graphfsdp.integrations.lightning", "graphfsdp.integrations.transformers"),
    }
)
# Files of tests that import anything else: the fewer, the easier a module is merged or renamed.
MAX_FILES_OF_TESTS_INSIDE = 32
MAX_MODULES = 20
MAX_LINES = 600
OPTIONAL_PACKAGES = (
    "apex",
    "lightning",
    "mlperf_logging",
    "pytorch_lightning",
    "tensorboard",
    "torchao",
    "torchdata",
    "transformer_engine",
    "transformers",
    "triton",
    "wandb",
)
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


@functools.cache
def folder_of(module: str) -> str:
    """The package that a module lies in; of a package, itself."""
    return module if is_package(module) else module.rpartition(".")[0]


@functools.cache
def is_package(module: str) -> bool:
    return any(name == module and path.name == "__init__.py" for name, path in sources())


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


def test_each_folder_has_its_rule() -> None:
    assert {
        folder_of(module) for module, _ in sources()
    } == MAY_IMPORT.keys() | PROGRAMS.keys() | ON_TOP


def test_a_folder_can_be_looked_over() -> None:
    modules: dict[str, int] = {}
    for module, _ in sources():
        if not is_package(module):
            modules[folder_of(module)] = modules.get(folder_of(module), 0) + 1
    report(
        [
            f"{folder} has {num_modules} modules, the limit is {MAX_MODULES}"
            for folder, num_modules in sorted(modules.items())
            if num_modules > MAX_MODULES
        ]
    )


def test_imports_go_down() -> None:
    violations = []
    for module, path in sources():
        folder = folder_of(module)
        if folder in ON_TOP and module not in BASE | {DATA}:
            continue
        allowed = BASE if module == DATA else {folder, *(MAY_IMPORT | PROGRAMS).get(folder, BASE)}
        for line, target in imports_of(module, path):
            if folder in PROGRAMS and target in OFFERED_TO_PROGRAMS:
                continue
            if target not in allowed and folder_of(target) not in allowed:
                violations.append(f"{where(path, line)}: {module} imports {target}")
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


def test_few_tests_know_how_a_room_is_built() -> None:
    inside = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        for _, target in imports_of("", path)
        if target not in OFFERED_TO_TESTS and not target.startswith(tuple(PROGRAMS))
    }
    assert len(inside) <= MAX_FILES_OF_TESTS_INSIDE, sorted(inside)


def test_each_file_of_tests_is_in_the_list_of_what_is_asked() -> None:
    named = set(re.findall(r"\btest_\w+", (ROOT / "tests" / "README.md").read_text()))
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(named - files.keys()) == []
    report(
        [
            f"{path.relative_to(ROOT)} is in no row of tests/README.md"
            for name, path in sorted(files.items())
            if name not in named and path.parent.name != "project"
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


@pytest.mark.parametrize("folder", ["capture", "optim"])
def test_a_folder_refuses_to_be_a_second_copy_of_its_package(folder: str) -> None:
    result = run_python(f"import {folder}")
    assert result.returncode == 1
    assert f"ImportError: this folder is the package {FOLDERS[folder]}" in result.stderr


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CONTAINERS
    return False


def test_modules_hold_no_mutable_state() -> None:
    """Two captured steps in one process must share nothing; of classes ruff says it (RUF012)."""
    report(
        [
            f"{where(path, node.lineno)}: what is shared can be changed"
            for _, path in sources()
            for node in parse(path).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and mutable(node.value)
            if not ast.unparse(node).startswith("__all__")
        ]
    )


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )


WITHOUT_OPTIONAL_PACKAGES = f"""
import sys, torch
asked = []
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL_PACKAGES}:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Block())
before = set(sys.modules)
import graphfsdp, graphfsdp.optim
# torch brings sympy and imports it for a second where it is first needed.
print(asked, {{"rich", "sympy"}} & (set(sys.modules) - before))
import graphfsdp.cli, graphfsdp.training.loop
def train(scope):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = graphfsdp.optim.FusedAdam(model.parameters(), lr=0.1)
    loss_fn = lambda model, x: model(x).square().mean()
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope) as step:
        return torch.stack([step(torch.randn(2, 4)) for _ in range(6)])
print(torch.equal(train("none"), train("full_iteration")))
"""


def test_it_trains_without_optional_packages_and_asks_for_none_when_it_is_imported() -> None:
    result = run_python(WITHOUT_OPTIONAL_PACKAGES)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["[] set()", "True"]

"""What this package uses of torch's insides is in a table, and in the torch that runs."""

import private_names
import pytest
import torch
from torch.torch_version import TorchVersion


@pytest.fixture(scope="module")
def table() -> dict[str, private_names.Row]:
    return private_names.read_table()


def test_the_table_says_where_each_name_is_used_and_what_for(
    table: dict[str, private_names.Row],
) -> None:
    found = private_names.uses(frozenset(table))
    unknown = [
        f"{name} in {', '.join(places)}"
        for name, places in found.items()
        if table.get(name, private_names.NOTHING_KNOWN) == private_names.NOTHING_KNOWN
    ]
    assert not unknown, f"say in {private_names.PAGE} what it is for: {unknown}"
    assert private_names.make_table(table, found) == private_names.read_section()[1], (
        "the table is not up to date: run tests/project/private_names.py"
    )


def test_each_name_is_in_the_torch_that_runs_if_the_table_says_so(
    table: dict[str, private_names.Row],
) -> None:
    wrong = {
        name: row.versions
        for name, row in table.items()
        if is_expected(row.versions) is not None
        and is_expected(row.versions) != private_names.exists(name)
    }
    assert not wrong, f"not as the table says in torch {torch.__version__}: {wrong}"


def is_expected(versions: str) -> bool | None:
    """None: it depends on the build."""
    versions, _, build = versions.partition(", ")
    if build == "CUDA" and torch.version.cuda is None:
        return None
    if versions == private_names.ALL_VERSIONS:
        return True
    sign, version = versions.split()
    running = TorchVersion(torch.__version__)
    return running >= version if sign == ">=" else running < version


PROGRAM = """
import torch
from torch import _foreach_copy_ as copy_, nn
from torch.utils import _pytree as pytree
core = torch._C
class Layer(nn.Linear):
    def _apply(self, fn): return super()._apply(fn)
    def _ours(self): return self._ours
def f(tensor, modules):
    core._current_graph_task_id()
    getattr(core, "_host_emptyCache", None)
    pytree.tree_map(copy_, tensor.untyped_storage()._cdata)
    return torch.ops.aten._to_copy.default, "torch._dynamo", modules.get("torch._dynamo.utils")
"""


def test_the_program_sees_each_kind_of_use(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("checkout")
    (root / "graphfsdp").mkdir()
    (root / "graphfsdp" / "one.py").write_text(PROGRAM)
    monkeypatch.setattr(private_names, "ROOT", root)
    found = private_names.uses()
    assert sorted(found) == [
        "torch.UntypedStorage._cdata",
        "torch._C",
        "torch._C._current_graph_task_id",
        "torch._C._host_emptyCache",
        "torch._dynamo",
        "torch._dynamo.utils",
        "torch._foreach_copy_",
        "torch.nn.Linear._apply",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_map",
    ]
    assert set(found["torch._foreach_copy_"]) == {"one.py"}

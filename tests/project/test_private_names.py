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

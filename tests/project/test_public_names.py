"""Tests of what the package offers by name."""

import inspect
import pathlib

import graphfsdp

API = pathlib.Path(__file__).parents[2] / "docs" / "api.md"


def test_every_public_name_is_there_and_is_documented() -> None:
    page = API.read_text()
    for name in graphfsdp.__all__:
        assert inspect.getdoc(getattr(graphfsdp, name)), name
        assert f"`{name}" in page, f"{name} is not in docs/api.md"


def test_dir_shows_the_public_names_alone() -> None:
    shown = set(dir(graphfsdp))
    assert set(graphfsdp.__all__) <= shown
    assert not {"TYPE_CHECKING", "Any"} & shown

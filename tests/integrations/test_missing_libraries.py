"""An integration whose library is not installed says what to install."""

import importlib
import sys

import pytest

import graphfsdp


@pytest.mark.parametrize(
    ("integration", "libraries", "text"),
    [
        ("transformers", ["transformers"], r"needs transformers, .*pip install transformers"),
        (
            "lightning",
            ["lightning", "lightning.pytorch", "pytorch_lightning"],
            r"needs lightning\.pytorch or pytorch_lightning, .*pip install lightning",
        ),
    ],
)
def test_it_is_named(
    integration: str, libraries: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"graphfsdp.integrations.{integration}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(graphfsdp.ConfigError, match=text):
        importlib.import_module(module)

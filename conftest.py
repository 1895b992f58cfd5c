"""Lets the suite run on a torch that is newer than what was tested: that it warns is no failure."""

import warnings

import pytest

_NEWER = "torch .* is newer"
warnings.filterwarnings("ignore", _NEWER)  # where tests/conftest.py and what it imports are loaded


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", f"ignore:{_NEWER}")

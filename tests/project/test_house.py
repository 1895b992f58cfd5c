"""Tools are the same for hooks, the site and `make lint`."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_tools_are_those_that_are_pinned() -> None:
    """Hooks and the site have environments of their own, in which no constraint holds."""
    yaml = pytest.importorskip("yaml")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    elsewhere = [
        line
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
        for line in hook.get("additional_dependencies", ())
    ]
    elsewhere += (ROOT / "docs" / "requirements.txt").read_text().splitlines()
    found = [tuple(line.split("==")) for line in elsewhere if "==" in line]
    assert len(found) > 5
    assert [pair for pair in found if pins.get(pair[0], pair[1]) != pair[1]] == []

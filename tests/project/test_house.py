"""What other people's tools read of this repository: its workflow, templates and hooks."""

import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_what_ci_runs() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    (python,) = (step for step in job["steps"] if "setup-python" in step.get("uses", ""))
    cached = python["with"]["cache-dependency-path"].split()
    assert [name for name in cached if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("name", "asked"), [("bug", "graphfsdp check --json"), ("wish", "program")]
)
def test_a_template_asks_for_what_is_needed(name: str, asked: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    needed = [part for part in form["body"] if part.get("validations", {}).get("required")]
    assert any(asked in part["attributes"]["label"] for part in needed)


def test_tools_are_those_that_are_pinned() -> None:
    """Hooks and the site have environments of their own, in which no constraint holds."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    elsewhere = [
        line
        for repository in read(".pre-commit-config.yaml")["repos"]
        for hook in repository["hooks"]
        for line in hook.get("additional_dependencies", ())
    ]
    elsewhere += (ROOT / "docs" / "requirements.txt").read_text().splitlines()
    found = [tuple(line.split("==")) for line in elsewhere if "==" in line]
    assert len(found) > 5
    assert [pair for pair in found if pins.get(pair[0], pair[1]) != pair[1]] == []

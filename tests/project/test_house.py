"""What a user installs and with what it is made, read off the files; .ci/run tries the wheel.

A torch that is newer than what was tested is told of, once, and used.
"""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import warnings

import pytest
from packaging.requirements import Requirement

import graphfsdp
from graphfsdp.newer_torch import NEWEST_TESTED, warn_if_newer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_requirements() -> dict[str, list[Requirement]]:
    """The requirements of each extra; those of every user under "" (ours on ourselves not)."""
    project = PYPROJECT["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: [r for r in map(Requirement, lines) if r.name != "graphfsdp"]
        for extra, lines in extras.items()
    }


def pins() -> dict[str, str]:
    """Version by name, from constraints.txt, whose lines may be nothing but pins."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    pattern = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)")  # no URL, no path, no local version
    matches = {line: pattern.fullmatch(line) for line in lines}
    assert [line for line, match in matches.items() if not match] == []
    found = [(match[1], match[2]) for match in matches.values() if match]
    assert len(dict(found)) == len(found), "a name is pinned twice"
    return dict(found)


def test_constraints_pin_what_the_project_asks_for_in_versions_that_it_allows() -> None:
    pinned, direct = pins(), direct_requirements()
    # What only some users need is an extra.
    assert {r.name for r in direct[""]} == {"numpy", "rich", "safetensors", "torch"}
    for extra, requirements in direct.items():
        for requirement in requirements:
            name = canonical(requirement.name)
            assert name in pinned, f"{requirement} (extra {extra!r}) has no pin in constraints.txt"
            assert requirement.specifier.contains(pinned[name]), f"{requirement}: {pinned[name]}"


def test_constraints_pin_what_the_developers_packages_ask_for_in_turn() -> None:
    """Else a release of some package that nobody here knows could break the tests."""
    direct = direct_requirements()
    todo = [r for extra in ("", "test", "dev") for r in direct[extra]]
    seen: set[str] = set()
    unpinned: list[str] = []
    while todo:
        requirement = todo.pop()
        name = canonical(requirement.name)
        # The CUDA build of torch pins its own libraries.
        if name in seen or name.startswith(("nvidia-", "cuda-")):
            continue
        seen.add(name)
        if name not in pins():
            unpinned.append(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # optional, and not on this machine
        wanted = [r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate()]
        todo += wanted
    assert unpinned == []


def test_tools_are_those_that_are_pinned() -> None:
    """Hooks and the site have environments of their own, in which no constraint holds."""
    yaml = pytest.importorskip("yaml")
    pinned = pins()
    elsewhere = [
        line
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
        for line in hook.get("additional_dependencies", ())
    ]
    elsewhere += (ROOT / "docs" / "requirements.txt").read_text().splitlines()
    found = [tuple(line.split("==")) for line in elsewhere if "==" in line]
    assert len(found) > 5
    assert [pair for pair in found if pinned.get(pair[0], pair[1]) != pair[1]] == []


def test_the_version_has_a_section_of_the_changelog() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    dates = dict(re.findall(r"^## \[(\d[\d.]+)\] - (\d{4}-\d\d-\d\d)$", changes, re.M))
    assert next(iter(dates)) == graphfsdp.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {graphfsdp.__version__}\n" in citation
    assert f"\ndate-released: {dates[graphfsdp.__version__]}\n" in citation


def commands_of(target: str, **variables: str) -> str:
    """What `make target` would run on a fresh machine."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    arguments = [f"{name}={value}" for name, value in variables.items()]
    result = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("target", "program"), [("train", "-m graphfsdp train"), ("test", "-m pytest")]
)
def test_the_two_commands_need_nothing_but_python_and_install_once(
    target: str, program: str, tmp_path: pathlib.Path
) -> None:
    commands = commands_of(target, VENV=str(tmp_path), ARGS="--some-option")
    steps = ["-m venv", "pip install --quiet --constraint constraints.txt", program]
    places = [commands.index(step) for step in steps]
    assert places == sorted(places)
    assert "--some-option" in commands
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".dev", ".train"):
        (tmp_path / name).touch()
    assert "pip install" not in commands_of(target, VENV=str(tmp_path))
    check = commands_of("gpu-check", VENV=str(tmp_path / "new"))
    assert check.strip() == "python3 -m benchmarks.gpu_check"  # which installs nothing


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    paths = [ROOT / name for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run")]
    paths += [ROOT / ".gitignore", *(ROOT / "benchmarks" / "results").glob("*.json")]
    texts = {path.name: path.read_text() for path in paths}
    places = r"/(home|root|opt|tmp|work|Users)/"
    assert [name for name, text in texts.items() if re.search(places, text)] == []


MAJOR, MINOR = map(int, NEWEST_TESTED.split("."))
NEXT = f"{MAJOR}.{MINOR + 1}"
TRAIN = f"""
import torch
torch.__version__ = torch.torch_version.TorchVersion("{NEXT}.0.dev20261001+cpu")
import graphfsdp
import graphfsdp.optim
model = torch.nn.Linear(4, 1)
optimizer = graphfsdp.optim.FusedAdam(model.parameters(), lr=0.1)
loss_fn = lambda model, x: model(x).square().mean()
with graphfsdp.capture(model, optimizer, loss_fn=loss_fn) as step:
    for _ in range(4):
        step(torch.randn(2, 4))
    print(step.phase.name)
"""


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [
        *((f"{NEXT}{rest}", True) for rest in (".0", ".0.dev20261001+cu130", ".0a0+git0123abc")),
        *((version, True) for version in (f"{NEXT}.1+cpu", f"{MAJOR}.{MINOR + 10}.0")),
        (f"{MAJOR + 1}.0.0", True),
        *((f"{NEWEST_TESTED}{rest}", False) for rest in (".0", ".1+cu130", ".0.dev20260801")),
        *(("2.11.0+cpu", False), ("2.9.1", False)),
    ],
)
def test_newer_releases_are_told_of_and_patches_are_not(version: str, is_newer: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_newer(version)
    texts = [str(one.message) for one in caught]
    assert len(texts) == is_newer
    for text in texts:
        assert f"torch {version} is newer than {NEWEST_TESTED}" in text
        assert "Remedy: " in text


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", TRAIN],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_one_rank_warns_once_at_the_users_line_unless_told_not_to_and_captures_work() -> None:
    done = run()
    assert done.stderr.count("is newer than") == 1
    assert "<string>:4: UserWarning: torch" in done.stderr
    assert done.stdout.strip() == "REPLAY"
    assert run("-W", "ignore::UserWarning").stderr == ""
    assert run(LOCAL_RANK="1").stderr == ""


def test_the_newest_tested_release_is_the_newest_that_is_tested() -> None:
    found = re.search(
        r"^NEWEST_TORCH \?= (\d+\.\d+)\.", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert found
    assert found[1] == NEWEST_TESTED

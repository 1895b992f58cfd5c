"""The pages of the project: links and anchors, public names, the README's length and its claims."""

import inspect
import pathlib
import re
import tomllib

import pytest

import graphfsdp
import graphfsdp.data
import graphfsdp.moe
import graphfsdp.optim
from graphfsdp.newer_torch import NEWEST_TESTED

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
FOLDERS = ("docs", "examples", "tests", ".github")
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    }
)


def links_of(text: str) -> list[str]:
    without_code = re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "", text, flags=re.S | re.M)
    return re.findall(r"\]\(([^)\s]+)\)", without_code)


def anchors_of(text: str) -> set[str]:
    """Anchors as GitHub and Python-Markdown make them of headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: pathlib.Path) -> None:
    dead = []
    for link in links_of(path.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        if "://" in place or place.startswith("mailto:"):
            continue
        target = (path.parent / place).resolve() if place else path
        is_there = target.exists() and target.is_relative_to(ROOT)
        if is_there and anchor:
            is_there = anchor in anchors_of(target.read_text(encoding="utf-8"))
        if not is_there:
            dead.append(link)
    assert dead == []


def test_the_readme_is_short_and_its_badges_are_true() -> None:
    assert len(README.splitlines()) <= 180
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [
        line.rpartition(" ")[2]
        for line in document["classifiers"]
        if re.search(r":: 3\.\d+$", line)
    ]
    (torch,) = (line for line in document["dependencies"] if line.startswith("torch>="))
    badges = dict(re.findall(r"\[!\[([^:\]]+): ([^\]]+)\]\(https://img\.shields\.io", README))
    assert badges == {
        "licence": document["license"],
        "Python": f"{versions[0]} to {versions[-1]}",
        "torch": f"{torch.removeprefix('torch>=')} to {NEWEST_TESTED}",
        "runs on a GPU": "one H200, tests",
    }
    assert "Once, and on one GPU." in (ROOT / "docs" / "status.md").read_text()


def test_the_reference_has_each_public_name() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.M)) | set(re.findall(r"`([\w.]+)`", pages))
    public = {f"graphfsdp.{name}" for name in graphfsdp.__all__}
    for package in (graphfsdp.data, graphfsdp.moe, graphfsdp.optim):
        public |= {f"{package.__name__}.{name}" for name in package.__all__}
    short = {name for name in public if name.rpartition(".")[2] in shown}
    assert public - shown - short == set()


def test_every_public_name_is_there_and_is_documented_and_dir_shows_no_other() -> None:
    page = (DOCS / "api.md").read_text()
    for name in graphfsdp.__all__:
        assert inspect.getdoc(getattr(graphfsdp, name)), name
        assert f"`{name}" in page, f"{name} is not in docs/api.md"
    shown = set(dir(graphfsdp))
    assert set(graphfsdp.__all__) <= shown
    assert not {"TYPE_CHECKING", "Any"} & shown

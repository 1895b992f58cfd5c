"""docs/tutorial: each page is typed in, its commands run, and print what the page says."""

import contextlib
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from torch.distributed.run import main as torchrun_main

import forked_programs
from train_on_ranks import FORKS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
PROGRAM = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```$', re.S | re.M)
SESSION = re.compile(r"^```console\n(.*?)^```$", re.S | re.M)


def sessions(page: Path) -> list[tuple[list[str], str]]:
    """Commands that run side by side, by ``&``, and what they print together."""
    found: list[tuple[list[str], str]] = []
    for session in SESSION.findall(page.read_text(encoding="utf-8")):
        commands: list[str] = []
        for part in re.split(r"^\$ ", session, flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            commands.append(command.removesuffix(" &"))
            if not command.endswith(" &"):
                found.append((commands, printed))
                commands = []
    return found


def pattern_of(printed: str) -> str:
    """Numbers with a point, and milliseconds, are this machine's; an ellipsis is anything."""
    parts = re.split(r"(\.\.\.|\d+\.\d+|\d+(?= ms))", printed)
    others = (r".*" if part == "..." else r"[0-9.]+" for part in parts[1::2])
    return "".join(map("".join, zip(map(re.escape, parts[::2]), (*others, ""), strict=True)))


def run(commands: list[str], folder: Path) -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            name, *arguments = command.replace("29511", port).split()
            call = (PROGRAMS[name], folder, arguments)
            processes.append(stack.enter_context(forked_programs.forked(*call)))
        said = [process.ended() for process in processes]
    for done in said:
        assert done.returncode == 0, done.stderr
    return "".join(done.stdout for done in said)


def python(folder: Path, arguments: list[str]) -> None:
    os.environ.pop("GRAPHFSDP_AUDIT", None)  # as whoever follows the pages has it
    os.chdir(folder)
    forked_programs.run_as_main(folder / arguments[0], *arguments[1:])


def torchrun(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    torchrun_main([*FORKS, *arguments])


PROGRAMS = {"python": python, "torchrun": torchrun}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def losses() -> dict[str, list[str]]:
    """What each command of one process has printed."""
    return {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, folder: Path, losses: dict[str, list[str]]) -> None:
    for earlier in PAGES[: PAGES.index(page) + 1]:  # whose programs this page may run too
        for name, program in PROGRAM.findall(earlier.read_text(encoding="utf-8")):
            (folder / name).write_text(program, encoding="utf-8")
    assert sessions(page)
    for commands, printed in sessions(page):
        found = run(commands, folder)
        losses[commands[0]] = re.findall(r"loss ([\d.]+)", found)
        assert re.fullmatch(pattern_of(printed), found, re.S), found


def test_the_captured_loop_has_the_losses_of_the_plain_one(losses: dict[str, list[str]]) -> None:
    plain, captured = (losses.get(f"python {name}.py") for name in ("loop", "captured"))
    if plain is None or captured is None:
        pytest.skip("the pages have not run in this process")
    assert len(plain) == 4
    assert plain == captured

"""docs/porting.md: each program runs before and after its change, from the text of the page."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text(encoding="utf-8")
SECTIONS = {
    title: (program, change)
    for title, program, change in re.findall(
        r"^## (.*?)\n.*?```python\n(.*?)```.*?```diff\n(.*?)```", PAGE, re.S | re.M
    )
}


# transformers looks at its attention mask, and chooses other kernels by what it finds.
NOT_CAPTURED = ("LoRA with peft",)


def hunks_of(change: str) -> list[list[str]]:
    return [hunk.strip("\n").split("\n") for hunk in re.split(r"^@@\n", change, flags=re.M)]


def changed(program: str, change: str) -> str:
    for hunk in hunks_of(change):
        before = "\n".join(line[1:] for line in hunk if line[0] in " -")
        after = "\n".join(line[1:] for line in hunk if line[0] in " +")
        if not before:  # a line more at the top
            program = f"{after}\n{program}"
            continue
        assert program.count(f"{before}\n") == 1, f"the program does not have once:\n{before}"
        program = program.replace(f"{before}\n", f"{after}\n" if after else "")
    return program


def counted(change: str) -> tuple[int, int, int]:
    """Lines that are written before the loop and in it, and lines that are gone."""
    before = inside = gone = 0
    for hunk in hunks_of(change):
        num_gone = sum(line[0] == "-" for line in hunk)
        imports = "+import graphfsdp" if num_gone else ("+import graphfsdp", "+from graphfsdp")
        new = sum(line[0] == "+" and not line.startswith(imports) for line in hunk)
        gone += num_gone
        before += 0 if num_gone else new
        inside += new if num_gone else 0
    return before, inside, gone


def run(program: str, *, is_captured: bool = True) -> tuple[list[float], list[Tensor]]:
    names: dict[str, Any] = {"__name__": "program"}
    # So few iterations do not tell whether it pays.
    program = re.sub(r"(capture_in_place\(.*)\)\n", r'\1, keep="all")\n', program)
    exec(compile(program, "docs/porting.md", "exec"), names)
    loop = names.get("loop")
    if loop is not None:
        replays = sum(part.num_replays for part in loop.report().parts)
        assert (replays > 0) == is_captured, str(loop.report())
        loop.close()
    losses = [float(loss) for loss in names["losses"]]
    models = [value for value in names.values() if isinstance(value, nn.Module)]
    return losses, [tensor for model in models for tensor in model.state_dict().values()]


def test_each_program_of_the_table_is_there() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| (\d) \| (\d) \| (\d) \|$", PAGE, re.M)
    assert {title: tuple(map(int, counts)) for title, *counts in rows} == {
        title: counted(change) for title, (_, change) in SECTIONS.items()
    }
    one_line = [title for title in SECTIONS if sum(counted(SECTIONS[title][1])[:2]) == 1]
    assert set(SECTIONS) == set(one_line)


@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.time_limit(300)
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_the_program_trains_the_same_before_and_after(title: str) -> None:
    program, change = SECTIONS[title]
    for library in ("transformers", "peft", "lightning"):
        if f"from {library}" in program:
            pytest.importorskip(library)
    generator = torch.get_rng_state()
    expected = run(program)
    torch.set_rng_state(generator)
    got = run(changed(program, change), is_captured=title not in NOT_CAPTURED)
    assert expected[0] == got[0]
    assert all(torch.equal(a, b) for a, b in zip(expected[1], got[1], strict=True))

"""The examples run, and the README shows the smallest one as it is."""

import re
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: str) -> list[str]:
    done = forked.run_file(EXAMPLES / name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_smallest_example_learns_by_replay() -> None:
    lines = run_example("smallest.py")
    assert all("(replay)" in line for line in lines)
    losses = [float(line.split()[3]) for line in lines]
    assert losses[-1] < 0.01  # the target's variance is about 0.23


def test_the_smallest_example_is_small() -> None:
    assert len((EXAMPLES / "smallest.py").read_text().splitlines()) <= 35


def test_the_readme_s_first_code_block_is_the_smallest_example() -> None:
    readme = ROOT / "README.md"
    block = re.search(r"```python\n(.*?)```", readme.read_text(), re.S) if readme.exists() else None
    if block is None:
        pytest.skip("README.md has no Python code block")
    assert block.group(1).strip() == (EXAMPLES / "smallest.py").read_text().strip()


def test_the_gpt_example_trains_by_replay_and_shows_a_sample() -> None:
    lines = run_example("train_gpt.py", "full_iteration", "10")
    first = lines[0].split()
    assert first[:3] == ["iteration", "10", "loss"]
    assert float(first[3]) < 5.0  # a uniform guess over bytes is at 5.55
    assert first[-1] == "(replay)"
    assert any(line.startswith("unigram entropy") for line in lines)

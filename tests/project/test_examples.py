"""The examples run, and the README shows the smallest one as it is."""

import importlib.util
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.run import get_args_parser

import forked_programs
from graphfsdp.training.config import parse_train_arguments
from train_on_ranks import FORKS, torchrun

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: str) -> list[str]:
    done = forked_programs.run_file(EXAMPLES / name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_readme_s_first_code_block_is_the_smallest_example() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None
    assert block.group(1).strip() == (EXAMPLES / "smallest.py").read_text().strip()


def numbers_of(lines: list[str], word: str) -> list[float]:
    """The number behind a word, line by line."""
    return [float(found) for line in lines for found in re.findall(rf"{word} +([\d.]+)", line)]


def run_on_ranks(name: str, *arguments: str) -> list[str]:
    with torchrun(*FORKS, str(EXAMPLES / name), *arguments) as launcher:
        done = launcher.ended()
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_one_idea_that_the_list_tells(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 80
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text()


class Learns(NamedTuple):
    """What an example prints behind a word, replay by replay, and what must hold of it."""

    line: str  # the file and its arguments
    word: str
    holds: Callable[[list[float]], bool]
    library: str | None = None
    on_ranks: bool = False


LEARNS = [
    # The targets' variance is about 0.23 in the smallest one, 1 of experts, 0.4 in eight bits.
    Learns("smallest.py", "loss", lambda n: n[-1] < 0.01),
    Learns("experts.py", "error", lambda n: n[-1] < 0.7 * n[0] < 0.1),
    Learns("sharded.py", "loss", lambda n: len(n) == 4 and n[-1] < 0.05, on_ranks=True),
    Learns("mxfp8_gather.py mxfp8", "loss", lambda n: n[-1] < 0.01, on_ranks=True),
    Learns("pipeline.py", "loss", lambda n: n[-1] < 0.01 < n[0], on_ranks=True),
    Learns("packed_documents.py", "loss", lambda n: n[-1] < 0.9 * n[0] < 3.0),
    # A uniform guess over bytes is at 5.55.
    Learns("train_gpt.py full_iteration 10", "loss", lambda n: len(n) == 1 and n[0] < 5.0),
    # A policy that draws its moves falls after some twenty; a coin is right half of the time.
    Learns("ppo.py", r"iteration \d+", lambda n: n[-1] > 150),
    Learns("gnn.py", "right", lambda n: n[-1] > 0.75),
    Learns("accelerate_loop.py", "loss", lambda n: n[-1] < n[0] / 2, "accelerate"),
    Learns("fabric_loop.py", "loss", lambda n: n[-1] < n[0] / 2, "lightning"),
    Learns("hugging_face.py", "loss", lambda n: n[-1] < n[0] / 2, "transformers"),
]


@pytest.mark.parametrize("learns", LEARNS, ids=lambda learns: learns.line.split(".")[0])
def test_an_example_learns_by_replay(learns: Learns) -> None:
    # Not imported here, where it would leave its warnings behind.
    if learns.library is not None and importlib.util.find_spec(learns.library) is None:
        pytest.skip(f"{learns.library} is not installed")
    lines = (run_on_ranks if learns.on_ranks else run_example)(*learns.line.split())
    told = [line for line in lines if numbers_of([line], learns.word)]
    assert all(line.endswith("(replay)") for line in told)
    numbers = numbers_of(told, learns.word)
    assert learns.holds(numbers), numbers


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    lines = run_example("checkpoint_and_resume.py", str(tmp_path))
    assert numbers_of([lines[1]], "loss") == numbers_of([lines[3]], "loss")  # under a live graph
    expected = numbers_of([lines[2]], "loss")
    (tmp_path / "latest").write_text("step-00000040")
    resumed = run_example("checkpoint_and_resume.py", str(tmp_path))
    assert resumed[0] == "goes on behind iteration 40"
    assert numbers_of(resumed[1:2], "loss") == expected


def test_a_diffusion_model_draws_what_it_has_seen() -> None:
    *_, last = run_example("ddpm.py")
    (near,), (noise,) = numbers_of([last], "are"), numbers_of([last], "is")
    assert near < 0.4 * noise


LAUNCHED = ("slurm.sbatch", "kubernetes.yaml")


def launch_command(name: str) -> list[str]:
    """What a launch file gives torchrun, as words."""
    text = (EXAMPLES / "launch" / name).read_text()
    if name.endswith(".yaml"):
        yaml = pytest.importorskip("yaml")
        service, job = yaml.safe_load_all(text)
        assert (service["kind"], job["kind"]) == ("Service", "Job")
        pod = job["spec"]["template"]["spec"]
        assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
        (container,) = pod["containers"]
        words = [*container["command"], *container["args"]]
        assert f"--nnodes={job['spec']['completions']}" in words
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in {e["name"] for e in container["env"]}
        return words
    subprocess.run(["bash", "-n", str(EXAMPLES / "launch" / name)], check=True)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    return shlex.split(text[text.index("torchrun \\") :].replace("\\\n", " "))


@pytest.mark.parametrize("name", LAUNCHED)
def test_launch_files_have_flags_that_torchrun_and_the_trainer_know(name: str) -> None:
    words = launch_command(name)
    module = words.index("-m")
    given = get_args_parser().parse_args([*words[1:module], "--module", "graphfsdp"])
    assert given.rdzv_backend == "c10d"
    assert words[module + 1 : module + 3] == ["graphfsdp", "train"]
    config = parse_train_arguments(words[module + 3 :])
    num_ranks = 8 * int(given.nproc_per_node)
    assert config.batch(num_ranks).num_microbatches == 8
    assert config.save == config.load
    assert num_ranks % config.num_distributed_optimizer_instances == 0


def test_lines_of_any_length_are_trained_on_with_three_graphs() -> None:
    *epochs, graphs = run_example("padded_text.py")
    losses = [float(line.split()[-1]) for line in epochs]
    assert losses[2] < losses[1] < losses[0] < 4.0
    # All calls but three warm-ups and a capture of each length.
    captures, replays = (int(number) for number in re.findall(r"\d+", graphs))
    assert captures == 3
    assert replays > 150


def test_packed_documents_are_computed_as_if_alone() -> None:
    example = runpy.run_path(str(EXAMPLES / "packed_documents.py"))
    model, lengths = example["Model"]().eval(), [5, 1, 10]
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(tokens, places).split(lengths, dim=1)
    for logits, alone in zip(packed, tokens.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(logits, model(alone, torch.arange(alone.shape[1])[None]))


def test_metrics_of_all_steps_are_read_once_in_many() -> None:
    rows = [re.findall(r"[\d.]+", line) for line in run_example("metrics_on_device.py")]
    assert [int(number) for number, _, _ in rows] == list(range(1, 201))
    assert len({loss for _, loss, _ in rows}) > 150  # no row is read twice
    assert float(rows[-1][1]) < 0.05 < float(rows[0][1])

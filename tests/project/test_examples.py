"""The examples run, and the README shows the smallest one as it is."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import forked
from graphfsdp.training.arguments import parse_train_arguments

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


def test_the_readme_s_first_code_block_is_the_smallest_example() -> None:
    readme = ROOT / "README.md"
    block = re.search(r"```python\n(.*?)```", readme.read_text(), re.S) if readme.exists() else None
    if block is None:
        pytest.skip("README.md has no Python code block")
    assert block.group(1).strip() == (EXAMPLES / "smallest.py").read_text().strip()


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


def test_metrics_of_all_steps_are_read_once_in_many() -> None:
    rows = [re.findall(r"[\d.]+", line) for line in run_example("metrics_on_device.py")]
    assert [int(number) for number, _, _ in rows] == list(range(1, 201))
    assert len({loss for _, loss, _ in rows}) > 150  # no row is read twice
    assert float(rows[-1][1]) < 0.05 < float(rows[0][1])


def test_the_gpt_example_trains_by_replay_and_shows_a_sample() -> None:
    lines = run_example("train_gpt.py", "full_iteration", "10")
    first = lines[0].split()
    assert first[:3] == ["iteration", "10", "loss"]
    assert float(first[3]) < 5.0  # a uniform guess over bytes is at 5.55
    assert first[-1] == "(replay)"
    assert any(line.startswith("unigram entropy") for line in lines)

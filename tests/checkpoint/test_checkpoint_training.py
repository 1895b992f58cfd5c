"""A run that is killed and resumed has the bits of one that was not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from graphfsdp.cli import main
from ranks import RankPool
from train_on_ranks import FORKS, torchrun, train_both
from training_helpers import DROPOUT, SMALL, assert_same_run, lines_of, started
from training_helpers import numbers as numbers_of

# All that a resumed run must take up: dropout, warm-up and decay, clipping, micro-batches.
RUN = [*SMALL, *DROPOUT, "--num-layers", "1", "--train-iters", "40", "--eval-interval", "8"]
RUN += ["--deterministic-mode"]
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


def arguments(device: torch.device, out: Path, *flags: str) -> list[str]:
    return ["train", *RUN, "--device", device.type, "--out", str(out), *flags]


def numbers(out: Path) -> list[tuple[Any, ...]]:
    return numbers_of(lines_of(out))


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def reference(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "run"
    assert main(arguments(device, out)) == 0
    assert not torch.are_deterministic_algorithms_enabled()  # it was put back
    return out


def test_forty_iterations_are_twenty_and_a_kill_and_twenty_more(
    device: torch.device, reference: Path, tmp_path: Path
) -> None:
    """The very same command line is given again after each kill."""
    out, folder = tmp_path / "run", tmp_path / "checkpoints"
    command = arguments(device, out, "--save", str(folder), "--load", str(folder))
    command += ["--save-interval", "4", "--keep-last", "2", "--async-save"]
    latest = folder / "latest"

    def has_saved() -> bool:
        return latest.exists() and int(latest.read_text().strip()[-2:]) >= 20

    with started(command, has_saved):  # and killed
        pass
    saved = int(latest.read_text().strip()[-2:])
    assert 20 <= saved <= 40
    if saved == 40:  # a machine that is much faster than the test
        latest.write_text("step-00000036\n")
    assert main(command) == 0
    assert_same_run(out, reference)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["latest", "step-00000036", "step-00000040"]


def test_other_flags_are_used_and_told(
    device: torch.device, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "checkpoints")
    assert main(arguments(device, tmp_path / "a", "--save", folder, "--train-iters", "8")) == 0
    capsys.readouterr()
    longer = arguments(device, tmp_path / "b", "--load", folder, "--lr", "2e-2")
    assert main(longer) == 0
    shown = capsys.readouterr().out
    assert "--lr was 0.01, is 0.02" in shown
    assert "--train-iters was 8, is 40" in shown
    rates = [(line[0], line[2]) for line in numbers(tmp_path / "b")]
    expected = [(line[0], 2 * line[2]) for line in numbers(reference)[8:]]
    assert [step for step, _ in rates] == [step for step, _ in expected]
    assert [rate for _, rate in rates] == pytest.approx([rate for _, rate in expected])


def test_what_cannot_be_resumed_is_said(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "checkpoints")
    assert main(arguments(device, tmp_path / "a", "--load", folder)) == 2
    assert f"--load {folder}: {folder} has no latest checkpoint" in capsys.readouterr().err
    first = ["--save", folder, "--train-iters", "8", "--lr-warmup-iters", "2"]
    assert main(arguments(device, tmp_path / "a", *first)) == 0
    again = arguments(device, tmp_path / "b", "--load", folder, *first)
    assert main(again) == 2
    assert "has 8 iterations already; give more --train-iters than 8" in capsys.readouterr().err
    assert main(arguments(device, tmp_path / "c", "--load", folder, "--hidden-size", "48")) == 1
    shown = capsys.readouterr().err
    assert "does not fit; nothing was loaded" in shown
    assert "model: 'final_norm.weight': saved [32], here [48]" in shown
    (tmp_path / "file").write_text("")
    assert main(arguments(device, tmp_path / "d", "--save", f"{tmp_path}/file/below")) == 2
    assert "cannot be made" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


# Rank 1 ends in its first attempt, while a batch is made ready, as if its machine were gone.
KILLED_ONCE = """
import os, signal, sys
from graphfsdp.cli import main
from graphfsdp.data import TokenBatches
original = TokenBatches.batch
def batch(batches, sample):
    if sample >= 4 * 16:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(batches, sample)
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    TokenBatches.batch = batch
sys.exit(main(sys.argv[1:]))
"""


def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path: Path, launched2: RankPool) -> None:
    """docs/scale.md: from the last good checkpoint on, with the bits of an undisturbed run."""
    common = ["train", *RUN, "--device", "cpu", "--train-iters", "20", "--save-interval", "6"]
    common += ["--data-parallel-sharding-strategy", "optim_grads_params"]

    def flags(name: str) -> list[str]:
        folder = str(tmp_path / f"{name}-c")
        return [*common, "--out", str(tmp_path / name), "--save", folder, "--load", folder]

    train_both(launched2, {"undisturbed": flags("undisturbed")})
    program = tmp_path / "killed_once.py"
    program.write_text(KILLED_ONCE)
    options = ("--max-restarts=1", "--monitor-interval=0.1", *FORKS)
    with torchrun(*options, str(program), *flags("killed")) as launcher:
        done = launcher.ended()
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    assert "after 12 iterations" in done.stdout
    assert "Signal 9 (SIGKILL)" in done.stderr or "exitcode: -9" in done.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")


def test_a_run_goes_on_on_two_ranks_and_back(
    tmp_path: Path, launched2: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the third epoch, captured, bit for bit, as docs/data.md says when.

    The gradient of an iteration is a sum of two, of the same micro-batches on one rank or two. Of
    cut gradients the norm is a sum in another order, but no gradient is clipped by it. Of whole
    ones it is the same, so that clipping may engage.
    """
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"line %d of many\n" % (7 * i) for i in range(34)))
    common = ["train", *RUN, *NO_DROPOUT, "--data-path", str(text)]
    common += ["--train-iters", "16", "--device", "cpu", "--split", "80,20,0", "--clip-grad", "0"]

    def flags(name: str, *more: str) -> list[str]:
        return [*common, "--out", str(tmp_path / name), *more]

    def single(name: str, *more: str) -> None:
        assert main(flags(name, *more)) == 0

    def saves(name: str) -> tuple[str, ...]:
        return "--save", str(tmp_path / f"{name}-c"), "--save-interval", "9"

    def loads(name: str) -> tuple[str, ...]:
        return "--load", str(tmp_path / f"{name}-c" / "step-00000009")

    cut, clipped = (
        ("--data-parallel-sharding-strategy", "optim_grads_params"),
        ("--clip-grad", "0.5"),
    )
    single("one", *saves("one"))
    single("eager", "--cuda-graph-scope", "none")
    assert_same_run(tmp_path / "one", tmp_path / "eager")
    runs = {
        "two": (*cut, *saves("two")),
        "one-two": (*cut, *loads("one")),
        "clipped": (*clipped, *saves("clipped"), "--async-save"),
    }
    train_both(launched2, {name: flags(name, *more) for name, more in runs.items()})
    single("two-one", *loads("two"))
    single("clipped-one", *clipped, *loads("clipped"))
    assert numbers(tmp_path / "clipped-one") == numbers(tmp_path / "clipped")[9:]
    assert max(line[3] for line in numbers(tmp_path / "clipped-one")) > 0.5
    assert weights(tmp_path / "clipped-one") == weights(tmp_path / "clipped")
    for name in ("two", "two-one", "one-two"):
        lines = numbers(tmp_path / name), numbers(tmp_path / "one")[9 if "-" in name else 0 :]
        found, expected = (list(zip(*each, strict=True)) for each in lines)
        norms, expected_norms = found.pop(3), expected.pop(3)
        assert norms == pytest.approx(expected_norms, rel=1e-4)  # sums over ranks in another order
        assert found == expected, name
        assert weights(tmp_path / name) == weights(tmp_path / "one"), name
    # Another order of the same text: the comparison can fail.
    single("reordered", "--seed", "5", *loads("one"))
    assert numbers(tmp_path / "reordered") != numbers(tmp_path / "one")[9:]

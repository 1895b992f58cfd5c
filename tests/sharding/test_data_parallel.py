"""The trainer over two processes: what a single process computes, and no hang when one fails."""

import importlib.util
import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from graphfsdp.cli import main
from ranks import RankPool
from time_limits import until
from train_on_ranks import FORKS, SMALL, Answer, run_both, torchrun
from training_helpers import DROPOUT, TEXT, lines_of, numbers

ROOT = Path(__file__).parents[2]
ONE_LAYER = ["--num-layers", "1"]
# Each strategy but optim, which the plan of real ranks has.
IN_TWO = [("fp32", "no_shard"), ("fp32", "optim_grads_params"), ("meta", "optim_grads_params")]
IN_TWO += [("bf16", "optim_grads")]
HAS_MLLOG = importlib.util.find_spec("mlperf_logging") is not None
MAIN = str(ROOT / "graphfsdp" / "__main__.py")
STAGE_3 = ["--data-parallel-sharding-strategy", "optim_grads_params"]
PRECISIONS = {
    "fp32": ["--no-bf16"],
    "meta": ["--no-bf16", "--init-model-with-meta-device"],
    "bf16": ["--bf16"],
}
# Sums over ranks and micro-batches are taken in another order than in one process: a few units in
# the last place per iteration (eps = 2^-23 or 2^-8), which Adam's quotient passes on.
TOLERANCES = {"fp32": 5e-6, "meta": 5e-6, "bf16": 1e-2}


class Done(NamedTuple):
    folder: Path
    answers: dict[str, list[Answer]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, launched2: RankPool) -> Done:
    """Every run of two ranks that a test here looks at."""
    folder = tmp_path_factory.mktemp("two-ranks")
    (folder / "used").mkdir()
    (folder / "used" / "config.json").write_text("precious")
    (folder / "text").write_bytes(b"a" * 2000)
    number, outer = "--num-distributed-optimizer-instances", "--outer-dp-sharding-strategy"
    few = ["--data", str(folder / "text"), "--train-iters", "5", *ONE_LAYER]
    few += ["--global-batch-size", "4"]
    flags = {
        "used": [],
        "absent": [],
        "different": [],
        "thirds": [number, "3"],
        "uneven": ["--global-batch-size", "6"],
        "fp32-instances": [*STAGE_3, number, "2", outer, "optim"],
        "same": few,
        "same-dropout": [*DROPOUT, *few],
    }
    for precision, strategy in IN_TWO:
        cut = ["--data-parallel-sharding-strategy", strategy]
        flags[f"{precision}-{strategy}"] = [*PRECISIONS[precision], *cut]
    if HAS_MLLOG:
        flags["mllog"] = [*STAGE_3, "--mllog", str(folder / "ends.log")]
    runs = {name: command(folder / name, *own) for name, own in flags.items()}
    of_rank_1 = {"absent": ["--data", str(folder / "nothing")], "different": ["--lr", "0.5"]}
    return Done(folder, run_both(launched2, runs, of_rank_1))


def command(out: Path, *flags: str) -> list[str]:
    return ["train", *SMALL, "--data", TEXT, "--out", str(out), *flags]


def single(out: Path, *flags: str) -> Path:
    assert main(command(out, *flags)) == 0
    return out


def header_of(file: Path) -> bytes:
    content = file.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same trainings in one process, by precision."""
    folder = tmp_path_factory.mktemp("one-process")
    return {name: single(folder / name, *flags) for name, flags in PRECISIONS.items()}


@pytest.mark.parametrize(("precision", "strategy"), [*IN_TWO, ("fp32", "instances")])
def test_two_ranks_train_as_one_process_does_and_keep_its_parameters(
    precision: str, strategy: str, done: Done, references: dict[str, Path]
) -> None:
    name = f"{precision}-{strategy}"
    assert [answer.code for answer in done.answers[name]] == [0, 0], done.answers[name]
    ours, theirs = lines_of(done.folder / name), lines_of(references[precision])
    assert [line["step"] for line in ours] == list(range(1, 11))
    assert [line["tokens"] for line in ours] == [128 * step for step in range(1, 11)]
    assert [line["phase"] for line in ours] == ["warmup"] * 3 + ["capture"] + ["replay"] * 6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["lr"] == other["lr"]
        for quantity in ("loss", "grad_norm", "val_loss"):
            assert (quantity in mine) == (quantity in other)
            expected = pytest.approx(other.get(quantity, 0), rel=TOLERANCES[precision])
            assert mine.get(quantity, 0) == expected, (quantity, mine, other)
    files = [folder / "model.safetensors" for folder in (done.folder / name, references[precision])]
    assert header_of(files[0]) == header_of(files[1])
    kept, whole = map(load_file, files)
    for key, tensor in kept.items():
        difference = tensor.float() - whole[key].float()
        # A gradient near zero may change its sign, which moves a weight by all of lr a few times.
        assert difference.abs().max() < 5 * 3e-3
        assert difference.norm() <= 0.02 * whole[key].float().norm(), key


@pytest.mark.skipif(not HAS_MLLOG, reason="mlperf-logging is not installed")
def test_a_log_of_two_ranks_is_written_once_and_changes_no_number(done: Done) -> None:
    assert [answer.code for answer in done.answers["mllog"]] == [0, 0], done.answers["mllog"]
    ours, plain = lines_of(done.folder / "mllog"), lines_of(done.folder / "fp32-optim_grads_params")
    assert numbers(ours) == numbers(plain)
    assert {line["phase"] for line in ours} == {"replay"}
    text = (done.folder / "ends.log").read_text()
    assert text.count('"run_start"') == text.count('"status": "success"') == 1
    assert '"global_batch_size", "value": 8' in text


def test_ranks_draw_different_dropout(done: Done, tmp_path: Path) -> None:
    """All sequences are equal, so only dropout can make two ranks differ from one process."""
    flags = ["--data", str(done.folder / "text"), "--train-iters", "5", *ONE_LAYER]
    flags += ["--global-batch-size", "2"]
    for name, extra in (("same", []), ("same-dropout", DROPOUT)):
        alone = lines_of(single(tmp_path / name, *flags, *extra))[0]["loss"]
        both = lines_of(done.folder / name)[0]["loss"]
        assert (both == pytest.approx(alone, rel=1e-6)) == (name == "same")


def test_only_the_first_rank_prints_and_writes(done: Done) -> None:
    first, second = done.answers["same"]
    assert second == Answer(code=0, out="", err="")
    assert first.err == ""
    for expected in ("num_ranks" + 10 * " " + "2", "no_shard", "global_batch_size  4"):
        assert expected in first.out
    out = done.folder / "same"
    kept = {path.name for path in out.iterdir()}
    assert {"config.json", "metrics.jsonl", "model.safetensors"} <= kept
    assert not {name for name in kept if name.endswith("unfinished")}
    resolved = json.loads((out / "config.json").read_text())["resolved"]
    assert (resolved["num_ranks"], resolved["num_microbatches"]) == (2, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("used", "holds another run (config.json)"),
        ("absent", "error: rank 1: --data "),
        ("different", "error: rank 1 has --lr 0.5, rank 0 has 0.003"),
        ("thirds", "does not divide the 2 ranks"),
        ("uneven", "--global-batch-size 6 is not divisible by --micro-batch-size 2 x 2 ranks = 4"),
    ],
)
def test_what_one_rank_cannot_do_ends_all_with_one_message(
    name: str,
    message: str,
    done: Done,
) -> None:
    first, second = done.answers[name]
    assert (first.code, second.code) == (2, 2)
    assert second.err == second.out == first.out == ""
    assert message in first.err
    assert first.err.count("\n") == 1
    assert name == "used" or not (done.folder / name).exists()


def test_ctrl_c_ends_all_ranks_and_keeps_what_was_logged(tmp_path: Path) -> None:
    """Two ranks in the middle of a long training that `torchrun` has started."""
    out = tmp_path / "run"
    metrics = out / "metrics.jsonl"
    flags = [*SMALL, "--data", TEXT, "--train-iters", "1000000", "--out", str(out)]
    with torchrun(*FORKS, MAIN, "train", *flags, *STAGE_3) as launcher:

        def trains() -> bool:
            assert launcher.is_alive(), launcher.ended()
            return metrics.exists() and metrics.read_text().count("\n") >= 8

        assert until(trains, 60, pause_s=0.05)
        launcher.send_signal(signal.SIGINT)
        ended = launcher.ended()
    assert ended.returncode != 0
    assert ended.stderr.count("interrupted; what was logged so far is kept") == 1
    assert "Error" not in ended.stderr.replace("SignalException", "")
    steps = [line["step"] for line in lines_of(out)]
    assert steps == list(range(1, len(steps) + 1))
    assert not (out / "model.safetensors").exists()


def test_in_a_single_process_the_strategy_is_ignored_and_the_banner_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], references: dict[str, Path]
) -> None:
    out = single(tmp_path / "run", "--data-parallel-sharding-strategy", "optim_grads_params")
    assert "none in a single process; torchrun starts several" in capsys.readouterr().out
    assert numbers(lines_of(out)) == numbers(lines_of(references["fp32"]))

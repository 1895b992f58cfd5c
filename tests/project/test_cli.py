"""The command line: commands, exit codes, bad input."""

import io
import sys
from pathlib import Path

import pytest

import forked_programs
import graphfsdp
from graphfsdp import cli
from graphfsdp.cli import main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (summary, _) in cli.COMMANDS.items():
        assert f"  {name} " in shown
        assert summary in shown


def test_names_that_the_terminal_has_no_letters_for_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(shown, "ascii", write_through=True))
    assert main(["train", "--data", "größe.txt"]) == 2
    assert b"--data gr\\xf6\\xdfe.txt: cannot be read" in shown.getvalue()


def test_the_package_runs_as_a_module_and_tells_its_version() -> None:
    program = "import runpy; runpy.run_module('graphfsdp', None, '__main__')"
    done = forked_programs.run_source(program, "--version")
    assert (done.returncode, done.stdout) == (0, f"graphfsdp {graphfsdp.__version__}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND; 'graphfsdp --help'"),
        ("help", "argument COMMAND: invalid choice: 'help' (choose from"),
        ("train --data {tmp}/absent", "--data {tmp}/absent: cannot be read (No such file"),
        ("train --data {tmp}/empty", "--data {tmp}/empty: holds no text"),
        (
            "train --vocab-size 300 --data {tmp}/odd.bin",
            "2 bytes (uint16) per token, this one has 3 bytes",
        ),
        ("train --vocab-size 300 --data {tmp}/none.bin", "has 0 bytes"),
        ("train --data {tmp}/folder", "holds no text"),
        ("train --data {tmp}/x.npy", "say with --vocab-size how many there are"),
        ("train --data {tmp}/short", "--seq-length 256 needs 257 tokens in a row"),
        ("train --data {tmp}", "--seq-length 256 needs"),
        ("train --vocab-size 100", "--vocab-size 100 is too small"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2_and_no_directory(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "none.bin").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_bytes(b"too short")
    out = tmp_path / "run"
    arguments = line.format(tmp=tmp_path).split()
    if arguments[:1] == ["train"]:
        arguments += ["--device", "cpu", "--out", str(out)]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message.format(tmp=tmp_path) in shown.err
    assert not out.exists()


def test_several_processes_without_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--device", "cpu"]) == 2
    assert "start them with torchrun --nproc-per-node 2 " in capsys.readouterr().err


def test_of_several_processes_the_first_one_tells_of_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_SAY_FIRST_S", 0.0)
    for local_rank, shown in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert main(["train", "--lr", "0"]) == 2
        assert capsys.readouterr().err.count("--lr must be") == shown


LAST_OF_FOUR = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
INTERRUPTED = "rank 1 of 2 failed in iteration 9: KeyboardInterrupt: . So"


@pytest.mark.parametrize(
    ("error", "environment", "code", "message"),
    [
        (KeyboardInterrupt(), {}, 130, "interrupted"),
        (graphfsdp.RankFailedError(INTERRUPTED), {}, 130, "interrupted"),
        (graphfsdp.CaptureError("no graph\nbecause"), {}, 1, "error: no graph\nbecause"),
        (OSError(28, "No space left on device"), {}, 1, "No space left on device"),
        (OSError(28, "No space left on device"), LAST_OF_FOUR, 1, "rank 3: error: "),
    ],
    ids=["interrupt", "interrupt of another rank", "capture", "disk", "disk of a rank"],
)
def test_each_kind_of_failure_has_its_exit_code(
    error: BaseException,
    environment: dict[str, str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: object, console: object) -> None:
        raise error

    monkeypatch.setattr("graphfsdp.training.loop.run_train", fail)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train"]) == code
    assert message in capsys.readouterr().err

"""`graphfsdp check`: scripts run unchanged up to their first captured step, loops as they stand."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forked_programs
import graphfsdp
import loops
from graphfsdp.cli import main
from loops import LOOPS
from scripts_to_check import BAD_NEIGHBOUR, PROGRAMS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder with a few programs."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    yield tmp_path
    sys.modules.pop("neighbour", None)


def test_a_script_runs_up_to_its_first_step_and_ends_well(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, path = list(sys.argv), list(sys.path)
    state = torch.get_rng_state()
    assert main(["check", "good.py", "5", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["iteration 0 __main__", "cleaned up ['5', '--json']"]
    assert out[2].startswith("can be captured: ")
    assert "trained" not in out
    assert (sys.argv, sys.path) == (argv, path)
    assert not torch.equal(state, torch.get_rng_state())  # the script's own draws stay
    model = torch.nn.Linear(4, 1)
    step = graphfsdp.capture(model, graphfsdp.optim.FusedAdam(model.parameters()))
    assert isinstance(step, graphfsdp.CapturedStep)  # the hook is gone


def test_hazards_are_exit_code_1_with_their_line_as_text_and_as_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "neighbour.py").write_text(BAD_NEIGHBOUR)
    assert main(["check", "--json", "good.py", "5"]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert [(h["kind"], h["line"]) for h in report["hazards"]] == [("host-read", 4)]
    assert "iteration 0" in shown.err
    assert main(["check", "good.py", "5"]) == 1
    out = capsys.readouterr().out
    assert "cannot be captured: 1 hazard" in out
    assert 'neighbour.py:4 print("loss", float(loss.detach()))  # read' in out
    assert main(["check", "--ignore", "host-read", "good.py", "5"]) == 0
    assert "1 ignored" in capsys.readouterr().out


# What is checked, its exit code, and what is said of it.
SAID: dict[str, tuple[int, list[str]]] = {
    "-m good 2": (0, ["iteration 0 __main__", "can be captured: "]),  # a module, as python -m does
    # An unchanged script is told the lines to add.
    "plain.py": (
        0,
        [
            *("no hazards in what the modules compute", "capture_in_place(model, optimizer)"),
            *("model Sequential: captured, ", "optimizer 0 AdamW: an operator for each group"),
            "step = graphfsdp.capture(model, optimizer, iteration=iterate)",
        ],
    ),
    # What no graph holds is told with its line and module, and the modules in it are tried.
    "--device cpu reads.py": (
        1,
        [
            *("1 hazard in what", "reads.py:11 x = x * x.sum().item()", "in module model.1 "),
            *("model.0 Block: captured, ", "model.1 Block: as written. ", "model.1.0 Sequential: "),
        ],
    ),
    # One whose model counts and draws.
    "nanogpt.py": (0, ["model GPT: as written. it moves Python: "]),
    # All that steps is taken in, whenever it steps first.
    "critic.py": (
        0,
        [
            *("model 0 Linear: captured, ", "model 1 Linear: captured, "),
            *("optimizer 0 Adam: ", "optimizer 1 Adam: "),
        ],
    ),
    # No loop can be captured with this.
    "lbfgs.py": (1, ["LBFGS runs the model"]),
    "loop.py in_place": (0, ["model Linear: captured, "]),
    # A captured step is checked with the iteration that it was given.
    "loop.py whole": (0, ["can be captured: "]),
    "loop.py whole reads": (1, ["cannot be captured: 1 hazard", 'if "reads" in sys.argv: print(']),
    # Workers of a loader find their sockets.
    "--limit-s 60 workers.py": (0, ["model Model: captured, "]),
    # Steps that hooks make in a backward pass.
    "hooked.py": (0, ["have hooks", "optimizer 3 SGD: "]),
    # Files are copied, listed and removed, and the folder stays as it was.
    "files.py": (0, ["model Linear: "]),
    # A step answers before its first call, and autocast for a GPU is the CPU's.
    "--device cpu asks.py": (0, ["can be captured: "]),
}


@pytest.mark.parametrize("line", SAID)
def test_what_a_program_is_told_and_that_it_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (folder / "checkpoint.pt").write_text("precious")
    (folder / "kept").mkdir()
    (folder / "kept" / "a").touch()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, parts = SAID[line]
    assert main(["check", *shlex.split(line)]) == code
    out = " ".join(capsys.readouterr().out.split())
    for part in parts:
        assert part in out
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("name", LOOPS)
def test_any_loop_goes_on_in_parts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", loops.__file__, name]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["hazards"] == []
    names = [part["name"].replace(".", " ").split()[0] for part in report["parts"]]
    assert set(names) == {"model", "optimizer"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_script_for_a_gpu_is_told_what_to_do_and_checked_with_device_cpu(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "hardcoded.py"]) == 2
    shown = capsys.readouterr().err
    assert "Remedy: --device cpu" in shown
    assert 'model.to("cuda")' in shown
    assert main(["check", "--device", "cpu", "hardcoded.py"]) == 1
    out = capsys.readouterr().out
    assert "1 hazard" in out
    assert "host-tensor" in out
    assert "CUDA error 900" in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("without.py", "and trained no model with an optimizer. Remedy: let it run"),
        ("once.py", "did not call graphfsdp.capture, and stepped its optimizer once"),
        ("--limit-s 1 endless.py", "was stopped after 1 seconds and did not call"),
        ("uncalled.py", "captured a step, but did not call it"),
        ("leaving.py", "ended with exit code 3 and did not call graphfsdp.capture"),
        ("broken.py", "ValueError: broken here"),
        ("absent.py", "there is no file 'absent.py'"),
        ("", "nothing to check"),
        ("--ignore nonsense good.py", "invalid choice: 'nonsense'"),
        ("-m nowhere", "ImportError: No module named nowhere"),
        ("--limit-s nan good.py", "--limit-s must be greater than 0"),
        ("odd.py", "Odd: no message, whose making fails by ValueError"),
    ],
)
def test_what_cannot_be_checked_is_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert main(["check", *line.split()]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    if line == "broken.py":
        assert "in f\n    raise ValueError('broken here')" in shown.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["trains"], 0, "model        Linear: captured, "),
        ([], 2, "did not end after 1 seconds and did not call graphfsdp.capture"),
    ],
)
def test_a_script_that_does_not_let_itself_be_ended_is_ended(
    folder: Path, arguments: list[str], code: int, said: str
) -> None:
    program = (
        "import sys\nfrom graphfsdp.preflight import script\nscript._GRACE_S = 1.0\n"
        "from graphfsdp.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    limit = ["--limit-s", "60" if code == 0 else "1"]
    done = forked_programs.run_source(program, "check", *limit, f"{folder}/swallows.py", *arguments)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_help_has_an_example_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    shown = capsys.readouterr().out
    for part in ("check train.py", "check -m my_project.train", "--device cpu", "exit code: 0"):
        assert part in shown

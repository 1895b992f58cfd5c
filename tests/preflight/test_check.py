"""graphfsdp.check: finds every hazard of an iteration, and changes nothing, on no rank either."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import forked_programs
import graphfsdp
import loops
from faults_at_operators import World
from graphfsdp import HazardKind
from graphfsdp.cli import main
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, line_of, make_optimizer, quick_garbage_collection, snapshot
from iterations import Optimizer, gan, make_trained
from loops import LOOPS
from mid_forward import Inner, Probe, batches
from ranks import on_ranks
from scripts_to_check import LOOP, PROGRAMS
from sharding_helpers import (
    MAX_NORM,
    adam,
    assert_replayed,
    assert_same_training,
    make_net,
    my_part,
    train,
)
from sharding_helpers import batches as sharding_batches
from zoo import ZOO

CHECKED = (
    *("mlp", "conv_net", "gpt", "mixture_of_experts", "lstm", "unused_parameter", "parametrized"),
    *("moving_average", "in_place", "gradient_penalty", "extras", "autocast", "checkpoint", "vmap"),
)


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    world = World(model, optimizer)
    yield
    world.assert_unchanged("checked")


@pytest.mark.parametrize("name", CHECKED)
def test_good_iterations_have_no_hazard_and_nothing_changes(
    name: str, device: torch.device
) -> None:
    quick_garbage_collection()
    case = ZOO[name]
    torch.manual_seed(0)
    model = case.make().to(device)
    trained = [param for param in model.parameters() if param.requires_grad]
    optim = make_optimizer("fused_adam", trained, device)
    batch = case.batch(torch.Generator().manual_seed(0)).to(device)
    with unchanged(model, optim):
        report = graphfsdp.check(model, optim, *batch.args, loss_fn=case.loss_fn, **batch.kwargs)
    expected = {"unused_parameter": [HazardKind.GRADIENT]}.get(name, [])
    assert [hazard.kind for hazard in report.hazards] == expected, str(report)
    assert report.num_ops > 10


@pytest.mark.parametrize(
    ("optimizer", "when"), [("sgd", "new"), ("adamw", "stepped"), ("fused_adam", "captured")]
)
def test_a_check_in_the_middle_of_training_changes_nothing(
    optimizer: str, when: str, device: torch.device
) -> None:
    """Two runs with dropout, one of them checked on the way, stay equal bit for bit."""
    quick_garbage_collection()
    case = ZOO["gpt"]
    runs = []
    for checked in (False, True):
        torch.manual_seed(0)
        model = case.make().to(device)
        optim = make_optimizer(optimizer, model.parameters(), device)
        generator = torch.Generator().manual_seed(1)
        losses = []
        with graphfsdp.capture(model, optim, warmup_steps=1, max_grad_norm=1.0) as step:
            for index in range(6):
                batch = case.batch(generator).to(device)
                if checked and index == {"new": 0, "stepped": 1, "captured": 3}[when]:
                    with unchanged(model, optim):
                        report = graphfsdp.check(model, optim, *batch.args, max_grad_norm=1.0)
                    assert report.ok, str(report)
                losses.append((step(*batch.args), snapshot(model, optim)))
        runs.append(losses)
    for (left, left_state), (right, right_state) in zip(*runs, strict=True):
        assert torch.equal(left, right)
        assert_same_state(left_state, right_state)


def misbehaving(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    calls: int = vars(self).get("calls", 0) + 1
    vars(self)["calls"] = calls
    self.gate = self.gate * 0.9  # state
    h = h * h.sum().item()  # read
    for _ in range(3):
        h = h + float(x[0, 0])  # thrice
    torch.manual_seed(0)  # generator
    return h * calls + h[x > 0].sum()  # both


def test_every_hazard_is_found_in_one_run_and_nothing_changes() -> None:
    torch.manual_seed(11)
    model = Probe(misbehaving)
    optim = FusedAdam(model.parameters())
    with unchanged(model, optim):
        report = graphfsdp.check(model, optim, batches(torch.device("cpu"), 1)[0])
    assert not hasattr(model.body.inner, "calls")
    assert not report.ok
    found = [
        (h.kind, h.source.line - line_of(misbehaving, "# state"), h.count)
        for h in report.hazards
        if h.source is not None and h.kind is not HazardKind.STATE
    ]
    assert found == [
        (HazardKind.HOST_READ, 1, 1),
        (HazardKind.HOST_READ, 3, 3),
        (HazardKind.GENERATOR, 4, 1),
        (HazardKind.DYNAMIC_SHAPE, 5, 2),
    ], str(report)
    state, counter = report.hazards[-2:]
    assert "replaced 'body.inner.gate'" in state.why
    assert "attribute 'body.inner.calls': 3 -> 4" in counter.why
    assert {h.module_path for h in report.hazards[:-1]} == {"body.inner"}
    with pytest.raises(graphfsdp.CaptureError) as caught:
        report.raise_if_any()
    assert caught.value.kind is HazardKind.HOST_READ
    assert str(report) in str(caught.value)
    text = str(report)
    assert "cannot be captured: 6 hazards" in text
    assert "h = h * h.sum().item()  # read" in text
    assert "3 times" in text
    assert text.isascii()
    plain = json.loads(report.to_json_text())
    assert plain["hazards"][0]["line"] == line_of(misbehaving, "# read")
    assert plain["hazards"][0]["cuda_error"] == 900


def reading_gan(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], real: Tensor) -> Any:
    """Looks at a loss after the steps."""
    losses = gan(models, optimizers, real)
    if losses["net"].item() > 1e9:  # read
        raise ValueError("it diverges")
    return losses


def test_an_iteration_with_two_optimizers_is_checked_and_nothing_changes(
    device: torch.device,
) -> None:
    models, optimizers = make_trained(
        *("gan", device, lambda net: FusedAdam(net.parameters(), lr=0.1)),
        lambda critic: torch.optim.SGD(
            critic.parameters(), lr=torch.tensor(0.1, device=device), fused=True
        ),
    )
    real = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(device)
    with unchanged(models[0], optimizers[0]), unchanged(models[1], optimizers[1]):
        report = graphfsdp.check(models, optimizers, real, iteration=gan)
    report.raise_if_any()
    assert report.num_ops > 20
    (hazard,) = graphfsdp.check(models, optimizers, real, iteration=reading_gan).hazards
    assert hazard.kind is HazardKind.HOST_READ
    assert hazard.source is not None
    assert hazard.source.line == line_of(reading_gan, "# read")


@on_ranks("ranks2")
def test_a_check_leaves_a_sharded_model_alone() -> None:
    runs = []
    for checked in (False, True):
        model = make_net("optim_grads_params", dropout=0.2)
        optim = adam(model)
        if checked:
            batch = my_part(sharding_batches(1)[0])
            report = graphfsdp.check(
                model, optim, *batch, max_grad_norm=MAX_NORM, microbatches=3, ignore=["gradient"]
            )
            assert report.ok, str(report)
            assert report.num_ignored == 1  # a parameter that the net does not use
        runs.append(train(model, optim, microbatches=3))
    assert_same_training(*runs)
    assert_replayed(runs[1])


@on_ranks("ranks2")
def test_every_collective_that_cannot_be_recorded_is_listed_on_every_rank() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = [param.detach().clone() for param in model.parameters()]
    kept = torch.ones(4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        dist.all_reduce(kept)  # in place, of a tensor from outside
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        dist.barrier()
        loss: Tensor = model(x * kept).square().mean()
        return loss

    report = graphfsdp.check(
        model, FusedAdam(model.parameters()), torch.ones(2, 4), loss_fn=loss_fn
    )
    assert torch.equal(kept, torch.ones(4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    kinds = {hazard.kind for hazard in report.hazards}
    assert kinds == {HazardKind.COLLECTIVE}, str(report)
    lines = [hazard.source.text for hazard in report.hazards if hazard.source is not None]
    called = [f"dist.{name}" for name in ("all_reduce", "all_gather_object", "barrier")]
    assert [line.partition("(")[0] for line in lines] == called
    assert report.hazards[1].op == "torch.distributed.all_gather_object"


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
    reads = ["loop.py", "whole", "reads"]
    line = LOOP[: LOOP.index('if "reads"')].count("\n") + 1
    assert main(["check", "--json", *reads]) == 1
    report = json.loads(capsys.readouterr().out)  # what the loop prints is elsewhere
    assert [(h["kind"], h["line"]) for h in report["hazards"]] == [("host-read", line)]
    assert main(["check", *reads]) == 1
    out = capsys.readouterr().out
    assert "cannot be captured: 1 hazard" in out
    assert f'loop.py:{line} if "reads" in sys.argv: print(loss.item())' in out
    assert main(["check", "--ignore", "host-read", *reads]) == 0
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
    "--device cpu hardcoded.py": (1, ["1 hazard", "host-tensor", "CUDA error 900"]),
    # Workers of a loader find their sockets.
    "--limit-s 60 workers.py": (0, ["model Model: captured, "]),
    # Steps that hooks make in a backward pass.
    "hooked.py": (0, ["have hooks", "optimizer 3 SGD: "]),
    # Files are copied, listed and removed, and the folder stays as it was.
    "files.py": (0, ["model Linear: "]),
    # A step answers before its first call, and autocast for a GPU is the CPU's.
    "--device cpu asks.py": (0, ["can be captured: "]),
}

# Of costs, what is captured, or operators, their share and the place.
COST = re.compile(r"^(As written, .*)$|^ +([\d.]+) +(\d+)% +\d+%  (.+)$", re.MULTILINE)
# Of costs.py, counted by hand: operators, and whether they are captured.
COSTS = {
    "model Net": (4, True),  # twice a product and one of Python's
    "model Net, backward": (6, False),  # in which Python runs
    "model Net, calls that run as written": (2, False),
    "costs.py:21 loss = (model(x) - teacher(x)).sum()": (6, False),  # with the teacher's product
    "costs.py:22 loss.backward()": (2, False),
    "backward(), adding up gradients": (2, False),  # of two parameters, the second time
    "optimizer 0 SGD": (2, True),
    "costs.py:28 print('trained', model[0].weight.sum().item())": (2, False),
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


def test_the_page_shows_what_places_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text()
    (folder / "train.py").write_text(PROGRAMS["reads.py"])
    assert main(["check", "--device", "cpu", "train.py"]) == 1
    found = COST.findall(capsys.readouterr().out)
    assert found == COST.findall(page)
    assert len(found) == 7


def test_costs_are_of_what_a_graph_holds_and_no_bit_is_another(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path("costs.py", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert main(["check", "--json", "costs.py"]) == 0
    shown = capsys.readouterr()
    printed = [line for line in shown.err.splitlines() if line.startswith("trained ")]
    assert printed == lines[: len(printed)]
    assert len(set(printed)) >= 14
    costs = json.loads(shown.out)["costs"]
    found = {each["place"]: (each["num_ops"], each["is_captured"]) for each in costs}
    assert found == COSTS
    assert sum(each["time_share"] for each in costs) == pytest.approx(1)


@pytest.mark.parametrize("name", LOOPS)
def test_any_loop_goes_on_in_parts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", loops.__file__, name]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["hazards"] == []
    names = [part["name"].replace(".", " ").split()[0] for part in report["parts"]]
    assert set(names) == {"model", "optimizer"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_script_for_a_gpu_is_told_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "hardcoded.py"]) == 2
    shown = capsys.readouterr().err
    assert "Remedy: --device cpu" in shown
    assert 'model.to("cuda")' in shown


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

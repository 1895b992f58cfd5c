"""`graphfsdp check`: scripts run unchanged up to their first captured step, and exit codes."""

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import graphfsdp
from graphfsdp.cli import main

ROOT = Path(__file__).parents[2]
HEAD = """
import sys, torch, graphfsdp
from torch import nn
from graphfsdp.optim import FusedAdam
model = nn.Linear(4, 1)
optimizer = FusedAdam(model.parameters(), lr=0.1)
"""
GOOD = (
    HEAD
    + """
from neighbour import loss_fn
try:
    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, max_grad_norm=1.0) as step:
        for index in range(int(sys.argv[1])):
            print("iteration", index, __name__)
            step(torch.randn(8, 4))
            print("trained")
finally:
    print("cleaned up", sys.argv[1:])
"""
)
NEIGHBOUR = "def loss_fn(model, x):\n    return model(x).square().mean()\n"
BAD_NEIGHBOUR = """
def loss_fn(model, x):
    loss = model(x).square().mean()
    print("loss", float(loss))  # read
    return loss
"""
HARDCODED = HEAD + (
    """
device = torch.device("cuda")
model.to("cuda")
mask = torch.ones(4, device="cuda")
def loss_fn(model, x):
    return (model(x * mask.cuda()) * torch.tensor(2.0, device=device)).mean()
step = graphfsdp.capture(model, optimizer, loss_fn=loss_fn)
step(torch.randn(8, 4).pin_memory().to(device))
"""
)
FACTORY = HEAD + (
    """
def pair():
    return model, optimizer, torch.randn(8, 4), lambda model, x: model(x).mean()

def mapping():
    batch = {"x": torch.randn(8, 4)}
    loss_fn = lambda model, x: model(x).mean().item() * model(x).mean()
    return {"model": model, "optimizer": optimizer, "batch": batch, "loss_fn": loss_fn}

def wrong():
    return model

def failing():
    raise KeyError("no data")

number = 3
"""
)


PLAIN = """
import os, sys, torch
from torch import nn
os.makedirs("out", exist_ok=True)
from pathlib import Path
Path("out/log.txt").write_text("started")
assert Path("checkpoint.pt").read_text() == "precious"
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for iteration in range(1000):
    x = torch.randn(8, 4)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    if "read" in sys.argv:
        print(float(loss))  # read
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    torch.save(model.state_dict(), "checkpoint.pt")
    os.replace("out/log.txt", "out/other.txt")
    with open("out/log.txt", "a") as log:
        print("iteration", iteration, loss.item(), file=log)
"""
LIKE_NANOGPT = """
import random, torch
from torch import nn
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0
    def forward(self, idx, targets):
        self.calls += 1
        logits = self.inner(idx) * (1 + 1 / self.calls)  # counts
        logits = logits * random.random()  # draws
        return logits, nn.functional.mse_loss(logits, targets)
class Trainer:
    def __init__(self):
        self.model = torch.compile(GPT(), backend="eager")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
    def run(self):
        for iteration in range(100):
            for micro_step in range(2):
                logits, loss = self.model(torch.randn(2, 4), torch.randn(2, 4))
                (loss / 2).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
Trainer().run()
"""
GAN = """
import torch
from torch import nn
G, D = nn.Linear(2, 4), nn.Linear(4, 1)
opt_g, opt_d = (torch.optim.Adam(net.parameters()) for net in (G, D))
for _ in range(100):
    real, noise = torch.randn(3, 4), torch.randn(3, 2)
    opt_d.zero_grad()
    (D(real).mean() - D(G(noise).detach()).mean()).backward()
    opt_d.step()
    opt_g.zero_grad()
    D(G(noise)).mean().backward()
    opt_g.step()
"""
# A critic that steps twice, a look at the model, and optimizers that have nothing to do with it.
CRITIC = """
import sys, torch
from torch import nn
G, D = nn.Linear(2, 4), nn.Linear(4, 1)
opt_g, opt_d = (torch.optim.Adam(net.parameters()) for net in (G, D))
print(D(torch.ones(1, 4)))
beside = torch.optim.Adam(nn.Linear(3, 3).parameters())
instead = torch.optim.SGD(D.parameters(), lr=0.1)
for _ in range(100):
    for part in range(2):
        opt_d.zero_grad()
        (D(torch.randn(3, 4)).mean() - D(G(torch.randn(3, 2)).detach()).mean()).backward()
        opt_d.step()
    opt_g.zero_grad()
    loss = D(G(torch.randn(3, 2))).mean()
    if "read" in sys.argv:
        print(loss.item())  # read
    loss.backward()
    opt_g.step()
    print("trained")
"""
# Of an optimizer that nobody knows a graph bakes in the lr; a parameter has no gradient.
MINE = """
import sys, torch
class Mine(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
model = torch.nn.Linear(4, 1)
model.unused = torch.nn.Parameter(torch.ones(2))
optimizer = Mine(model.parameters(), {"lr": 0.1})
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    if "decays" in sys.argv:
        optimizer.param_groups[0]["lr"] *= 0.9
"""
LBFGS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters())
loss = lambda: model(torch.ones(8, 4)).square().mean()
optimizer.step(loss)
"""
SCALER = """
import torch
model = torch.nn.Linear(4, 1, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4, device="cuda")).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""

# What touches neither model nor weights runs as ever beside a graph.
BESIDE = """
import random, sys, torch
from torch import nn
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))
    def act(self, x):
        return self.mean(x) * self.scale
agent, target = Agent(), nn.Linear(4, 2)
optimizer = torch.optim.Adam(agent.parameters())
for iteration in range(100):
    with torch.no_grad():
        action = agent.act(torch.ones(1, 4)).sum().item()
    for part in range(2):
        out = agent.act(torch.ones(8, 4) * random.random())
        rows = torch.stack([torch.ones(4) * i.item() for i in torch.randint(8, (8,))])
        with torch.no_grad():
            wanted = target(rows)
            wanted[rows[:, 0] > 4] = random.random()
        loss = (out - wanted).square().mean()
        if "read" in sys.argv:
            action += loss.item()  # read
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# What a capture of the iteration refuses a check must tell, and it must not tell more.
LOOP = """
import sys, torch, graphfsdp
from contextlib import nullcontext
from torch import nn
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x
    @staticmethod
    def backward(ctx, gradient):
        return gradient
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled="scales" in sys.argv)
another = torch.Generator()
def iterate(model, optimizer, x):
    if "zeroes not" not in sys.argv:
        optimizer.zero_grad()
    loss = model(x)
    if "draws" in sys.argv: torch.randn(3)
    if "draws by itself" in sys.argv: torch.randn(3, generator=another)
    if "reads" in sys.argv: print(loss.sum().item())
    if "masks" in sys.argv: loss = loss[loss > 0]
    if "counts" in sys.argv: loss = loss * (1 + iteration)
    if "applies" in sys.argv: loss = Square.apply(loss)
    if "sets" in sys.argv: model[0].note = iteration
    if "seeds" in sys.argv: torch.manual_seed(iteration)
    scaler.scale(loss.mean()).backward()
    if "writes" in sys.argv: x[0].mul_(2)
    scaler.step(optimizer)
    scaler.update()
    return loss.sum()
run, loop = iterate, nullcontext()
if "in place" in sys.argv:
    loop = graphfsdp.capture_in_place(model, optimizer)
if "whole" in sys.argv:
    loop = graphfsdp.capture(model, optimizer, iteration=iterate, on_change="recapture")
    run = lambda model, optimizer, x: loop(x)
with loop:
    for iteration in range(12):
        x = torch.randn(2 if iteration % 2 and "has other shapes" in sys.argv else 8, 4)
        loss = run(model, optimizer, x)
        print("iteration", iteration, loss.item())
"""
DOES = {
    "nothing": "",
    "draws": "",
    "draws by itself": "",
    "reads": "a value of the iteration on the host",
    "masks": "a tensor whose shape depends on values",
    "counts": "was given 2 in one run of the iteration and 3 in the next one",
    "applies": "",
    "writes": "",
    "sets": "",
    "seeds": "the state of a random generator",
    "scales": "torch's GradScaler decides on the host",
    "has other shapes": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder with a few programs."""
    programs = {
        "good.py": GOOD,
        "neighbour.py": NEIGHBOUR,
        "hardcoded.py": HARDCODED,
        "factory.py": FACTORY,
        "without.py": HEAD + "print('no capture')",
        "uncalled.py": HEAD + "graphfsdp.capture(model, optimizer)",
        "broken.py": HEAD + "def f():\n    raise ValueError('broken here')\nf()",
        "once.py": HEAD + "model(torch.ones(2, 4)).mean().backward(); optimizer.step()",
        "endless.py": HEAD + "while True: pass",
        "plain.py": PLAIN,
        "nanogpt.py": LIKE_NANOGPT,
        "gan.py": GAN,
        "critic.py": CRITIC,
        "lbfgs.py": LBFGS,
        "mine.py": MINE,
        "scaler.py": SCALER,
        "beside.py": BESIDE,
        "loop.py": LOOP,
        "leaving.py": HEAD + "sys.exit(3)",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("neighbour", "factory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("neighbour", "factory"):
        sys.modules.pop(name, None)


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


def test_hazards_are_exit_code_1_with_the_line_of_the_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "neighbour.py").write_text(BAD_NEIGHBOUR)
    assert main(["check", "good.py", "5"]) == 1
    out = capsys.readouterr().out
    assert "cannot be captured: 1 hazard" in out
    assert 'print("loss", float(loss))  # read' in out
    assert "| neighbour.py:4 " in out
    assert main(["check", "--ignore", "host-read", "good.py", "5"]) == 0
    assert "1 ignored" in capsys.readouterr().out


def test_json_goes_to_a_file_or_alone_to_the_standard_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "neighbour.py").write_text(BAD_NEIGHBOUR)
    assert main(["check", "--json", "good.py", "5"]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert [(h["kind"], h["line"]) for h in report["hazards"]] == [("host-read", 4)]
    assert "iteration 0" in shown.err
    assert main(["check", "--json=found.json", "good.py", "5"]) == 1
    assert "cannot be captured" in capsys.readouterr().out
    assert json.loads((folder / "found.json").read_text()) == report


def test_an_unchanged_script_is_told_the_lines_to_add_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "checkpoint.pt").write_text("precious")
    before = sorted(folder.rglob("*"))
    assert main(["check", "plain.py"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("can be captured: ")
    assert "graphfsdp.capture_in_place(model, optimizer)" in out
    assert "model (Sequential): captured, " in out
    assert "optimizer (AdamW): an operator for each group" in out
    assert "plain.py:18 nn.utils.clip_grad_norm_(model.parameters(), 1.0): " in out
    assert "in place of plain.py:13 to plain.py:19, which become" in out
    assert "def iterate(model, optimizer, x" in out
    assert sorted(folder.rglob("*")) == before
    assert (folder / "checkpoint.pt").read_text() == "precious"
    assert main(["check", "plain.py", "read"]) == 1
    out = capsys.readouterr().out
    assert "cannot be captured: 1 hazard" in out
    assert "print(float(loss))  # read" in out


def test_counters_and_chance_in_the_model_of_an_unchanged_script_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "nanogpt.py"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "graphfsdp.capture_in_place(self.model, self.optimizer)" in out
    assert "cannot be captured: 2 hazards" in out
    for part in ("# counts", "random.Random", "# draws"):
        assert part in out


def test_two_optimizers_are_one_iteration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "gan.py"]) == 0
    assert "graphfsdp.capture_in_place([D, G], [opt_d, opt_g])" in capsys.readouterr().out
    (folder / "gan.py").write_text(GAN.replace("G, D =", "nets = G, D ="))
    assert main(["check", "gan.py"]) == 0
    assert "graphfsdp.capture_in_place(nets, [opt_d, opt_g])" in capsys.readouterr().out


def test_an_iteration_ends_with_the_last_optimizers_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "critic.py"]) == 0
    out = capsys.readouterr().out
    assert "graphfsdp.capture_in_place([D, G], [opt_d, opt_g])" in out
    for part in ("D (Linear): captured, ", "G (Linear): captured, ", "opt_g (Adam): "):
        assert part in out
    assert main(["check", "critic.py", "read"]) == 1
    out = capsys.readouterr().out
    assert "Fix: put it behind opt_g.step()" in out
    assert "cannot be captured: 1 hazard" in out  # the look is before the loop


def test_what_no_loop_can_be_captured_with_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "lbfgs.py"]) == 1
    assert "LBFGS runs the model" in capsys.readouterr().out
    assert main(["check", "--device", "cpu", "scaler.py"]) == 1
    assert "bfloat16" in capsys.readouterr().out


def test_a_number_of_an_optimizer_is_told_if_it_moves(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "mine.py"]) == 0, capsys.readouterr().out
    cycle = PLAIN.replace("CosineAnnealingLR(optimizer, 10)", "OneCycleLR(optimizer, 0.1, 9)")
    (folder / "plain.py").write_text(cycle.replace('"precious"', "str()"))
    (folder / "checkpoint.pt").touch()
    assert main(["check", "plain.py"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "'betas' of group 0 of torch AdamW was (0." in out
    assert "cannot be captured: 1 hazard" in out
    assert main(["check", "mine.py", "decays"]) == 1
    out = capsys.readouterr().out
    assert "'lr' of group 0 of __main__ Mine" in out
    assert "cannot be captured: 1 hazard" in out


@pytest.mark.parametrize("does", DOES)
def test_a_check_finds_what_a_capture_of_the_iteration_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    assert main(["check", "loop.py", does]) == bool(DOES[does])
    out = capsys.readouterr().out
    assert out.count("cannot be captured: 1 hazard") == bool(DOES[does])
    table = "".join(line.split("|")[-2].strip() + " " for line in out.splitlines() if "|" in line)
    assert DOES[does].casefold() in table.casefold()
    assert f'if "{does}" in' in out or does not in ("reads", "masks", "counts", "seeds")
    assert ("other shapes:" in out) == (does == "has other shapes")
    assert "model (Sequential): captured, " in out
    assert "def iterate(model, optimizer, x" in out
    monkeypatch.setattr(sys, "argv", ["loop.py", "whole", does])
    with pytest.raises(graphfsdp.CaptureError) if DOES[does] else nullcontext():
        runpy.run_path("loop.py")


def test_gradients_that_run_on_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "loop.py", "zeroes not"]) == 1
    out = capsys.readouterr().out
    assert "cannot be captured: 1 hazard" in out
    assert "Gradients were not zeroed" in out


def test_what_is_captured_already_is_told_no_line_to_add(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "loop.py", "in place"]) == 0
    assert main(["check", "loop.py", "in place", "reads"]) == 1
    out = capsys.readouterr().out
    assert "Fix: put it behind optimizer.step()" in out
    assert "before the loop" not in out
    assert "model (Sequential): captured, " in out


def test_what_is_beside_the_graph_is_not_judged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--device", "cpu", "beside.py"]) == 0
    assert "graphfsdp.capture_in_place(agent, optimizer)" in capsys.readouterr().out
    assert main(["check", "beside.py", "read"]) == 1
    out = capsys.readouterr().out
    assert "cannot be captured: 1 hazard" in out
    assert "Fix: put it behind optimizer.step()" in out
    assert out.index("Fix: ") < out.index("and then") < out.index("capture_in_place(agent")


def test_a_module_is_run_like_python_m(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(folder))
    try:
        assert main(["check", "-m", "good", "2"]) == 0
    finally:
        sys.path.remove(str(folder))
    assert "iteration 0 __main__" in capsys.readouterr().out


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
    ("target", "code", "said"),
    [
        ("factory:pair", 0, "can be captured"),
        ("factory.py:pair", 0, "can be captured"),
        ("factory:mapping", 1, "host-read"),
        ("factory:wrong", 2, "returned a Linear; expected (model, optimizer, batch)"),
        ("factory:failing", 2, "KeyError: 'no data'"),
        ("factory:number", 2, "no function 'number'"),
        ("factory:absent", 2, "no function 'absent'"),
        ("nowhere:f", 2, "no module 'nowhere'"),
        ("nowhere.py:f", 2, "no file 'nowhere.py'"),
    ],
)
def test_functions_are_checked(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str, code: int, said: str
) -> None:
    assert main(["check", target]) == code
    shown = capsys.readouterr()
    assert said in (shown.err if code == 2 else shown.out)


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
        ("factory:pair 3", "takes no arguments"),
    ],
)
def test_what_cannot_be_checked_is_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert main(["check", *line.split()]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "preflight/script.py" not in shown.err
    if line == "broken.py":
        assert "in f\n    raise ValueError('broken here')" in shown.err


def test_help_has_an_example_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    shown = capsys.readouterr().out
    for part in ("check train.py", "check my_project.setup:small", "--device cpu", "exit code: 0"):
        assert part in shown

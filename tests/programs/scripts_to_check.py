"""Training programs that `graphfsdp check` is tried on, by the names of their files."""

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
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    torch.save(model.state_dict(), "checkpoint.pt")
    os.replace("out/log.txt", "out/other.txt")
    with open(b"out/log.txt", "a") as log:
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
    D(G(torch.randn(3, 2))).mean().backward()
    opt_g.step()
    print("trained")
"""
# What is launched by a part that goes backward in Python, by calls of it that no graph has, by a
# frozen model, and by the closure of a step.
COSTS = """
import torch
from torch import nn
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
torch.manual_seed(0)
class Net(nn.Sequential):
    def forward(self, x):
        return Twice.apply(super().forward(x))
model, teacher = Net(nn.Linear(4, 4)), nn.Linear(4, 4).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(2, 4)
def closure():
    optimizer.zero_grad()
    for _ in range(2):
        loss = (model(x) - teacher(x)).sum()
        loss.backward()
    return loss
for _ in range(40):
    optimizer.step(closure)
    with torch.no_grad():
        model(x)
    print('trained', model[0].weight.sum().item())
"""
LBFGS = (
    HEAD
    + """
model.parameters = lambda: [model.weight, model.bias]
optimizer = torch.optim.LBFGS(model.parameters())
for _ in range(20):
    optimizer.step(lambda: model(torch.ones(8, 4)).square().mean())
"""
)
# A module that reads, beside one that does not, for a GPU.
READS = """
import torch
from torch import nn
class Block(nn.Sequential):
    def __init__(self, reads):
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.reads = reads
    def forward(self, x):
        x = super().forward(x.to("cuda"))
        if self.reads:
            x = x * x.sum().item()
        return x
model = nn.Sequential(Block(False), Block(True), nn.Linear(4, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# A loop that says itself what is to be captured.
LOOP = (
    HEAD
    + """
def iterate(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).mean()
    if "reads" in sys.argv: print(loss.item())
    loss.backward()
    optimizer.step()
    return loss
run = iterate
if "in_place" in sys.argv:
    graphfsdp.capture_in_place(model, optimizer)
else:
    step = graphfsdp.capture(model, optimizer, iteration=iterate)
    run = lambda model, optimizer, x: step(x)
for iteration in range(100):
    print("iteration", iteration, run(model, optimizer, torch.randn(8, 4)).item())
"""
)

# Worker processes, whose sockets lie among temporary files, and a module beside the model which
# hides a name of torch's.
WORKERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
class Replay(nn.Module):
    children = ()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
    def forward(self, x):
        return self.net(x)
if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(80, 6)), batch_size=8, num_workers=1)
    model, replay = Model(), Replay()
    optimizer = torch.optim.Adam(model.parameters())
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
# What scripts do with files beside writing them; it goes into a folder which it has made, writes
# through safetensors, has its output elsewhere, and leaves a thread that waits and a function for
# Python's exit that writes.
FILES = """
import atexit, io, os, shutil, sys, threading, torch, graphfsdp
from pathlib import Path
from safetensors.torch import load_file, save_file
shutil.copy2("files.py", "copy.py")
assert Path("copy.py").read_text() == Path("files.py").read_text()
assert {"copy.py", "files.py"} <= set(os.listdir()) & {path.name for path in Path().iterdir()}
shutil.copytree("kept", "kept-too")
assert [files for *_, files in os.walk("kept-too")] == [["a"]]
Path("kept", "a").touch()
os.makedirs("run/inner")
os.chdir("run/inner")
assert "write" in Path("../../files.py").read_text() and "files.py" in os.listdir("../..")
threading.Thread(target=threading.Event().wait).start()
atexit.register(Path("../../exit.txt").write_text, "late")
sys.stdout = io.StringIO()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.ones(2, 2)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    os.makedirs(f"steps/{step}", exist_ok=True)
    torch.save(model, f"steps/{step}/model.pt")
    for name in sorted(os.listdir("steps"), key=int)[:-2]:
        shutil.rmtree(f"steps/{name}")
    assert len(list(Path("steps").glob("*/model.pt"))) <= 2
    save_file(model.state_dict(), "model.safetensors")
    assert torch.equal(load_file("model.safetensors")["weight"], model.weight)
    graphfsdp.save("../checkpoints", model, optimizer, step=step, keep_last=2)
    assert graphfsdp.load("../checkpoints", model, optimizer).step == step
"""

# What is asked of a step before its first call, with modes of a GPU.
ASKS = (
    HEAD
    + """
def loss_fn(model, x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(x).square().mean()
step = graphfsdp.capture(model, optimizer, loss_fn=loss_fn, microbatches=2, skip_nonfinite=True)
before = model.weight.clone()
print(step.report(), step.microbatches, step.phase, step.grad_norm)
assert step.evaluate(torch.ones(2, 4)) == step.evaluate(torch.ones(2, 4))
assert torch.equal(model.weight, before)
step(torch.ones(2, 4))
"""
)
# Whatever ends it, it goes on.
SWALLOWS = (
    HEAD
    + """
import time
while True:
    try:
        if "trains" in sys.argv:
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.01)
    except:
        continue
"""
)

PROGRAMS = {
    "good.py": GOOD,
    "neighbour.py": NEIGHBOUR,
    "hardcoded.py": HARDCODED,
    "without.py": HEAD + "print('no capture')",
    "uncalled.py": HEAD + "graphfsdp.capture(model, optimizer)",
    "broken.py": HEAD + "def f():\n    raise ValueError('broken here')\nf()",
    "once.py": HEAD + "model(torch.ones(2, 4)).mean().backward(); optimizer.step()",
    "endless.py": HEAD + "while True: pass",
    "plain.py": PLAIN,
    "nanogpt.py": LIKE_NANOGPT,
    "critic.py": CRITIC,
    "costs.py": COSTS,
    "lbfgs.py": LBFGS,
    "reads.py": READS,
    "loop.py": LOOP,
    "workers.py": WORKERS,
    "files.py": FILES,
    "asks.py": ASKS,
    "swallows.py": SWALLOWS,
    "odd.py": HEAD
    + """
class Odd(BaseException):
    def __str__(self):
        raise ValueError
raise Odd
""",
    "leaving.py": HEAD + "sys.exit(3)",
    "hooked.py": """
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}


def step(param):
    optimizers[param].step()
    optimizers[param].zero_grad()


for param in model.parameters():
    param.register_post_accumulate_grad_hook(step)
for _ in range(12):
    model(torch.randn(3, 4)).square().mean().backward()
""",
}

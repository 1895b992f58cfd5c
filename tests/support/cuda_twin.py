"""Runs one program under CUDA graphs in a process of its own, and tells what came of it.

A capture that the driver has broken leaves the process in a state that no other test should
inherit: memory pools stay open, generators stay in capture mode.
"""

import json
import os

import torch
from torch import Tensor, nn

import graphfsdp
from allowed_programs import ALLOWED
from mid_forward import Inner, Probe, Program, make_probe
from refused_programs import REFUSED as PROGRAMS
from unjoined_stream import leaves_a_stream_unjoined


def synchronize(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.cuda.current_stream().synchronize()
    return h


def event_from_before(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    event: torch.cuda.Event | None = vars(self).get("event")
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
    event = vars(self)["event"] = torch.cuda.Event()
    event.record()
    return h


# What the driver refuses and no operator tells of: the kind, and the number of the error.
UNSEEN: dict[str, Program] = {
    "synchronize": synchronize,
    "loose_stream": lambda self, h, x: h + leaves_a_stream_unjoined(nn.Identity(), x),
    "event_from_before": event_from_before,
    "literal": lambda self, h, x: h * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"),
}
CODES = {"synchronize": 900, "loose_stream": 904, "event_from_before": 905, "literal": 900}
REFUSED: dict[str, Program] = {
    **{name: case.program for name, case in PROGRAMS.items() if case.driver and not case.cpu_only},
    **UNSEEN,
}
CONTROLS: dict[str, Program] = {name: ALLOWED[name] for name in ("where", "random", "einsum")}


def chain(error: BaseException) -> list[str]:
    """Return the messages of an error and of what led to it."""
    found: list[str] = []
    link: BaseException | None = error
    while link is not None:
        found.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return found


def without_rules(program: Program) -> dict[str, object]:
    """Capture an iteration with torch alone."""
    torch.manual_seed(0)
    model = Probe(program).to("cuda")
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 4, device="cuda")
    stream = torch.cuda.Stream()

    def iterate() -> None:
        optim.zero_grad(set_to_none=True)
        model(x).backward()
        optim.step()

    with torch.cuda.stream(stream):
        for _ in range(3):
            iterate()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            iterate()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        return {"errors": chain(error)}
    return {"errors": []}


def with_capture(program: Program) -> dict[str, object]:
    """Capture with graphfsdp what its rules cannot see; then go on eagerly."""
    step, model, _ = make_probe(program, torch.device("cuda"))
    x = torch.randn(8, 4, device="cuda")
    for _ in range(3):
        step(x)
    before = [param.detach().clone() for param in model.parameters()]
    try:
        step(x)
    except graphfsdp.CaptureError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return {
            "errors": chain(error),
            "op": error.op,
            "code": error.cuda_error,
            "module": error.module_path,
            "line": None if error.source is None else error.source.text,
            "rolled_back": same,
        }
    return {"errors": []}


def tell(way: str, name: str) -> None:
    """Run the program of that name in one way, print what came of it, and end the process."""
    run = {"without_rules": without_rules, "with_capture": with_capture}[way]
    print(json.dumps(run({**REFUSED, **CONTROLS}[name])), flush=True)
    os._exit(0)  # a broken capture may make the ordinary way out hang

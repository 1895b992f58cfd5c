"""The parts of the GPU check in processes of their own: parity with eager, the optimizer, more.

``python -m benchmarks.gpu_parts PART DEVICE`` runs one part and prints its rows as JSON. Each
part has a process of its own, since a CUDA error makes every later call in a process fail.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from benchmarks import workloads
from benchmarks.adam_speed import compare_optimizers
from benchmarks.gpu_features import features, offload
from benchmarks.gpu_overlap import overlap
from benchmarks.workloads import SCOPES, Run, Workload

PARITY_STEPS = 20


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was looked at.
        result: What was seen.
        ok: Whether that is what should be seen.
        data: The numbers behind it.
    """

    what: str
    result: str
    ok: bool = True
    data: Mapping[str, object] = field(default_factory=dict)


def _train(workload: Workload, scope: str, device: torch.device) -> dict[str, Tensor]:
    """Train some steps, with dropout, clipping and a moving learning rate; return everything."""
    with Run(workload, scope, device, dropout=0.1) as run:
        seen: dict[str, Tensor] = {}
        for index in range(PARITY_STEPS):
            for group in run.optimizer.param_groups:
                group["lr"] = 1e-3 * (1 - index / PARITY_STEPS)
            seen[f"loss of step {index}"] = run()
            norm = run.step.grad_norm
            assert norm is not None
            seen[f"gradient norm of step {index}"] = norm.clone()
        for name, parameter in run.model.named_parameters():
            seen[f"parameter {name}"] = parameter.detach().clone()
    return seen


def first_difference(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str | None:
    """Name the first value that is not equal, and by how much; None if all are."""
    for name, value in expected.items():
        if not torch.equal(value, got[name]):
            gap = (value.double() - got[name].double()).abs().max().item()
            return f"{name} differs by {gap:.3g}"
    return None


def parity(workload: Workload, device: torch.device) -> Iterator[Row]:
    """Compare every loss, gradient norm and final parameter with eager's, bit for bit."""
    precision = "bf16" if workload.bf16 else "fp32"
    eager = _train(workload, "none", device)
    for scope in SCOPES:
        difference = first_difference(eager, _train(workload, scope, device))
        other = "eager again" if scope == "none" else scope
        yield Row(
            f"{workload.name} {precision}: {other} against eager, {PARITY_STEPS} steps",
            difference or "equal bit for bit",
            ok=difference is None,
            data={"final_loss": eager[f"loss of step {PARITY_STEPS - 1}"].item()},
        )


def run_part(name: str, device: torch.device) -> Iterator[Row]:
    """Yield what the part of that name sees; a CPU rehearses all on the smallest model."""
    rehearsal = device.type == "cpu"
    tiny = workloads.TINY
    small = (tiny,) if rehearsal else (tiny, workloads.TINY_LLAMA, workloads.GPT_11M)
    large = tiny if rehearsal else workloads.GPT2_124M
    largest = tiny if rehearsal else workloads.GPT_1B
    often, seldom = ((2, 1), (2, 1)) if rehearsal else ((20, 10), (8, 5))
    table: dict[str, Callable[[], Iterator[Row]]] = {
        "parity-fp32": lambda: (row for each in small for row in parity(each, device)),
        "parity-bf16": lambda: (
            row for each in small for row in parity(replace(each, bf16=True), device)
        ),
        "optimizer": lambda: compare_as_rows(large, device, *often),
        "optimizer-1b": lambda: compare_as_rows(largest, device, *seldom),
        "features": lambda: (Row(*row) for row in features(device)),
        "offload": lambda: (Row(*row) for row in offload(large, device)),
        "overlap": lambda: (Row(*row) for row in overlap(large, device)),
    }
    yield from table[name]()


def compare_as_rows(
    workload: Workload, device: torch.device, num_rounds: int, num_steps: int
) -> Iterator[Row]:
    """Yield the comparison of optimizers as rows."""
    for row in compare_optimizers(workload.model, device, num_rounds, num_steps):
        yield Row(*row)


def main() -> None:
    """Run one part; the last line of the output is the result."""
    name, device = sys.argv[1], torch.device(sys.argv[2])
    if device.type == "cpu":
        torch.set_num_threads(1)
    if name.startswith(("parity", "features", "overlap")):
        # Replay can equal eager only as far as eager equals itself. Child processes inherit it.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first matrix product
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rows: list[dict[str, object]] = []
    error = None
    try:
        for row in run_part(name, device):
            rows.append(asdict(row))
            # The last line that was printed counts, also if the process is killed meanwhile.
            print(json.dumps({"rows": rows, "error": "it did not end"}), flush=True)
    except Exception:
        error = traceback.format_exc()
    print(json.dumps({"rows": rows, "error": error}))


if __name__ == "__main__":
    main()

"""What looks forbidden and is not: a capture holds it, and replays equal eager."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers import line_of
from probe import Inner, Program, check_captured, check_refused

CPU = torch.device("cpu")


ALLOWED: dict[str, Program] = {
    "fixed_one_hot": lambda self, h, x: h * functional.one_hot((x[:, 0] > 0).long(), 4),
    "to_the_same_device": lambda self, h, x: h.to(x.device) * self.gate.to(h),
    "to_dtype": lambda self, h, x: h.to(torch.float64).float(),
    "masked_fill": lambda self, h, x: h.masked_fill(x > 0, 0.25),
    "where": lambda self, h, x: torch.where(x > 0, h, 0.0),
    "repeat_of_known_size": lambda self, h, x: torch.repeat_interleave(
        h, (x[:, 0] * 0).long() + 2, dim=0, output_size=16
    ),
    "index_by_integers": lambda self, h, x: h[x[:, 0].argsort()],
    "iteration_over_rows": lambda self, h, x: torch.stack([row.softmax(0) for row in h]),
    "shapes_and_metadata": lambda self, h, x: h * h.shape[0] / len(h) * h.dim() / h.numel(),
    "einsum": lambda self, h, x: torch.einsum("bi,bj->b", h, x),
    "assigned_under_a_mask": lambda self, h, x: (
        h.clone().index_put((x > 0,), torch.tensor(1.0, device=h.device))
        if h.device.type == "cpu"
        else h.masked_fill(x > 0, 1.0)
    ),
    "random": lambda self, h, x: h * torch.rand_like(h) + torch.randn(4, device=h.device),
    "literal": lambda self, h, x: h * torch.full((4,), 2.0, device=h.device),
    "detached_writes": lambda self, h, x: h + self.gate.copy_(h.detach().mean(dim=0)),
    "data_attribute": lambda self, h, x: h + h.data.mean() + self.extra.data,
    "sort_and_topk": lambda self, h, x: h.sort(dim=0).values + h.topk(2).values.sum(),
    "dtype_view": lambda self, h, x: h + x.view(torch.int32).remainder(7).float(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_is_captured(name: str, device: torch.device) -> None:
    check_captured(ALLOWED[name], device)


# Their CUDA kernels may read on the host, which is theirs to decide in each release.
ALLOWED_ON_A_CPU: dict[str, Program] = {
    "nonzero_static": lambda self, h, x: h * torch.nonzero_static(x[0] > 0, size=4).sum(),
    "permutation": lambda self, h, x: h[torch.randperm(8)],
    "multinomial": lambda self, h, x: h[torch.multinomial(x.abs() + 1, 2)[:, 0]],
}


@pytest.mark.parametrize("name", ALLOWED_ON_A_CPU)
def test_what_a_cpu_graph_can_hold_is_captured(name: str) -> None:
    check_captured(ALLOWED_ON_A_CPU[name], CPU)


CONSTANT_READS: dict[str, Program] = {
    "float": lambda self, h, x: h * float(torch.ones(3).sum()),
    "tolist": lambda self, h, x: h * torch.arange(1, 4).tolist()[1],
    "numpy": lambda self, h, x: h * float(torch.full((2,), 3.0).numpy()[0]),
    "literal": lambda self, h, x: h * torch.tensor([0.5, 2.0])[1].item(),
    "branch": lambda self, h, x: h * 2 if torch.zeros(()) < 1 else h,
    "mask": lambda self, h, x: h[:, torch.arange(4) < 2],
    "nonzero": lambda self, h, x: h[:, torch.eye(4).nonzero()[:, 0]],
    "cpu": lambda self, h, x: h * torch.ones(4).cpu().to("cpu"),
    "printed": lambda self, h, x: h * len(repr(torch.ones(2))),
    "shape": lambda self, h, x: h * torch.tensor(x.shape)[0].item(),
}


@pytest.mark.parametrize("name", CONSTANT_READS)
def test_reads_of_constants_are_captured_on_a_cpu(name: str) -> None:
    check_captured(CONSTANT_READS[name], CPU)


def test_a_constant_stops_being_one_when_it_is_written() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total += h.detach().mean(dim=0)
        return h * total[0].item()  # refused

    error = check_refused(program, CPU)
    assert error.source is not None
    assert error.source.line == line_of(program, "# refused")


def test_a_view_of_a_constant_that_is_written_taints_all_of_it() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total[2:].copy_(h.detach()[0, :2])
        return h * float(total[3])

    check_refused(program, CPU)


def test_a_literal_starts_anew_in_every_replay() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.tensor([0.0, 1.0, 2.0, 3.0])
        total += h.detach().mean(dim=0)
        total[0] = 7.0
        return h * total

    check_captured(program, CPU)

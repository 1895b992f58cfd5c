"""Programs in the middle of a forward pass that look forbidden, or odd, and are not."""

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import graphfsdp
from mid_forward import Inner, Program

LIBRARY = torch.library.Library("graphfsdp_allowed", "FRAGMENT")
LIBRARY.define("honest_add(Tensor(a!) x, Tensor y) -> Tensor")
LIBRARY.impl("honest_add", lambda x, y: x.add_(y).clone(), "CompositeExplicitAutograd")
LIBRARY.define("in_numpy(Tensor x) -> Tensor")
LIBRARY.impl("in_numpy", lambda x: torch.from_numpy(numpy.tanh(x.numpy())), "CPU")

ALLOWED: dict[str, Program] = {
    "fixed_one_hot": lambda self, h, x: graphfsdp.recompute(
        lambda h: h * functional.one_hot((x[:, 0] > 0).long(), 4), h
    ),
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
    "declared_write": lambda self, h, x: (
        h * torch.ops.graphfsdp_allowed.honest_add(self.gate, x[0])
    ),
}


def literal_that_is_written(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    """Begins anew in every replay."""
    total = torch.tensor([0.0, 1.0, 2.0, 3.0])
    total += h.detach().mean(dim=0)
    total[0] = 7.0
    return h * total


def block_mask(starts: Tensor) -> BlockMask:
    """Let nothing attend to another document; FlexAttention's own kernels are for a GPU."""
    documents, size = starts.cumsum(0), len(starts)

    def allows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[query] == documents[key]) & (query >= key)

    return create_block_mask(
        allows, None, None, size, size, device=str(starts.device), BLOCK_SIZE=2
    )


def contents_that_no_operator_wrote(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    filled = torch.empty(4)
    filled.untyped_storage()  # harmless
    numpy.from_dlpack(filled)[:] = 3.0
    return h * filled + torch.empty(4).copy_(x[0])


# Their CUDA kernels may read on the host, which is theirs to decide in each release.
ALLOWED_ON_A_CPU: dict[str, Program] = {
    "nonzero_static": lambda self, h, x: h * torch.nonzero_static(x[0] > 0, size=4).sum(),
    "permutation": lambda self, h, x: h[torch.randperm(8)],
    "block_mask": lambda self, h, x: h * block_mask(x[:, 0] > 0).to_dense().float().mean(),
    "multinomial": lambda self, h, x: h[torch.multinomial(x.abs() + 1, 2)[:, 0]],
    "literal_that_is_written": literal_that_is_written,
    "contents_that_no_operator_wrote": contents_that_no_operator_wrote,
    "in_numpy": lambda self, h, x: h * torch.ops.graphfsdp_allowed.in_numpy(h.detach().cos()),
}

# Reads of constants, which are the same in every replay.
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

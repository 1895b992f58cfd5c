"""The operation ``graphfsdp::fused_adam_``: one fused step of many parameters as one node."""

import torch

from graphfsdp.optim.fused import step_kernel
from graphfsdp.optim.fused.step_args import SCHEMA, StepArgs, advance, as_kernel, run_tensor_code
from graphfsdp.optim.fused.step_cpu import run_cpu

# A registration lives as long as its library object.
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")
_LIBRARY.define(SCHEMA)


def run_cuda(args: StepArgs) -> None:
    """Run the step with the Triton kernel, or as tensor code where ``tables`` is empty.

    Capture: no host sync, no copy from the host; the tables must live as long as the graph.
    """
    if not args.tables:
        run_tensor_code(args)
        return
    advance(args)
    step_kernel.launch(
        step_kernel.Tables(*args.tables),
        args.columns.dtypes(),
        args.hyper,
        args.grad_scale,
        args.found_inf,
        args.flags,
    )


_LIBRARY.impl("fused_adam_", as_kernel(run_cpu), "CPU")
_LIBRARY.impl("fused_adam_", as_kernel(run_cuda), "CUDA")

fused_adam_ = torch.ops.graphfsdp.fused_adam_.default

"""Megatron-FSDP (PyPI: megatron-fsdp) as a contender; has not run on a GPU yet."""

from torch import nn

from graphfsdp.bench.contender import Contender, Setting, initial_model, to_bf16
from graphfsdp.bench.torch_contenders import TorchLoop


def megatron_fsdp(setting: Setting) -> Contender:
    """Return Megatron-FSDP's ZeRO-3 on each block and the root, with fused AdamW.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    model = initial_model(setting)
    if setting.bf16:
        to_bf16(model)  # main weights are float32 by its default policy
    blocks = model.get_submodule("blocks")
    kinds = list({type(block): None for block in blocks.children()})
    device = None if setting.device.type == "cuda" else setting.device
    sharded: nn.Module = fully_shard_model(
        module=model, fsdp_unit_modules=kinds, zero_dp_strategy=3, device=device
    )
    loop = TorchLoop(sharded, sharded, autocast=None)
    loop.optimizer = fully_shard_optimizer(loop.optimizer)
    return loop

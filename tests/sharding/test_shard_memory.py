"""Where sharded weights lie, and what gives its memory back."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_compiled_units import Tracer, compiled_net
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphfsdp
from overlap_helpers import NUM_BLOCKS, WIDTH, Stack, Watch, make_stack
from parallel_models import TP_AXES, part_of_axis, tensor_parallel, whole_batches
from ranks import on_ranks, rank_device
from sharding_helpers import adam, batches, buffers, hybrid_mesh, make_net, my_part, shard


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, None])
@on_ranks("ranks2")
def test_weights_are_cast_where_their_gather_has_them(param_dtype: torch.dtype | None) -> None:
    """Main weights that fit are given themselves; nobody has a cast beside the whole weights."""
    policy = graphfsdp.MixedPrecisionPolicy(param_dtype=param_dtype)
    model = make_stack("optim_grads_params", mp_policy=policy)
    places: list[tuple[int, int, int]] = []

    def note(whole: Tensor, part: Tensor) -> None:
        places.append((whole.data_ptr(), part.data_ptr(), part.nbytes))

    with Watch("all_gather", note):
        model(torch.randn(4, WIDTH, device=rank_device())).backward()
    mains = {buffer.main.data_ptr() for buffer in buffers(model)}
    assert len(places) > NUM_BLOCKS
    for whole, part, num_bytes in places:
        if param_dtype is None:
            assert part in mains
        else:
            assert part == whole + dist.get_rank() * num_bytes


@on_ranks("ranks2")
def test_whole_parameters_give_their_memory_back() -> None:
    """An optimizer that was made before does not keep the whole weights alive."""
    model = Stack().to(rank_device())
    optim = adam(model)
    storages = [weakref.ref(param) for param in model.parameters()]
    shard(model, "optim_grads_params")
    held = [ref() for ref in storages]
    assert all(param is not None for param in held), "the optimizer holds them"
    total = sum(param.untyped_storage().nbytes() for param in held if param is not None)
    assert optim.param_groups
    assert total == 0


@on_ranks("ranks2")
def test_a_model_that_is_dropped_gives_its_buffers_back() -> None:
    model = make_net("optim_grads_params")
    optim = adam(model)
    step = graphfsdp.capture(model, optim)
    for data in batches(5):
        step(*my_part(data))
    step.close()
    reference = weakref.ref(buffers(model)[0])
    del model, optim, step
    gc.unfreeze()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(("ranks", "is_compiled"), [("ranks2", True), ("ranks4", False)])
@on_ranks()
def test_whole_weights_are_let_go_between_forward_and_backward(is_compiled: bool) -> None:
    """Saved weights are places in the gathered buffer, DTensors too, so that it is freed."""
    if is_compiled:
        model: Any = compiled_net("optim_grads_params", "before", Tracer())
        batch: Any = my_part(batches(1)[0])
    else:
        model = tensor_parallel(sequence=True)
        batch = part_of_axis(whole_batches()[0], hybrid_mesh((2, 2), TP_AXES), "dp")
    gathered: list[StorageWeakRef] = []

    def note(block: nn.Module, args: object, out: object) -> None:
        for buffer in buffers(block):
            assert buffer.full is not None
            gathered.append(StorageWeakRef(buffer.full.untyped_storage()))

    for block in model.blocks:
        block.register_forward_hook(note, prepend=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile
        loss = model(*batch)
        assert len(gathered) >= 2
        assert all(storage.expired() for storage in gathered)
        loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "blocks" in name)

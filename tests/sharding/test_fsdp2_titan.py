"""A loop in torchtitan's style, with tensor parallelism and mixed precision, on either import."""

import pathlib
import warnings
from typing import Any

import torch

import titan_llama
from ranks import on_ranks
from sharding_helpers import Training, adam, assert_same_training, train

SOURCE = pathlib.Path(titan_llama.__file__).read_text()
IMPORT = "from torch.distributed.fsdp import"
NUM_STEPS = 8


def loop(package: str) -> dict[str, Any]:
    assert SOURCE.count(IMPORT) == 1
    found: dict[str, Any] = {"__name__": package}
    source = SOURCE.replace(IMPORT, f"from {package} import")
    exec(compile(source, f"loop of {package}", "exec"), found)
    return found


def compare(tp: int, accumulation: int) -> None:
    packages = ("torch.distributed.fsdp", "graphfsdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # FSDP2's, of what its units return
        theirs, ours = (loop(each)["train"](tp, NUM_STEPS, accumulation) for each in packages)
    assert theirs[-1] < theirs[0] * 0.75, theirs  # it learns
    # Until the first step weights are the same, and so is what is computed of them.
    assert ours[:accumulation] == theirs[:accumulation]
    # Gradients are summed in float32 in both, in another order at most: after n steps of AdamW main
    # weights differ by rounding alone, so copies in bfloat16 by their last bit, a part in 2^8, and
    # so do the activations that a loss is made of.
    bound = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=bound, atol=0)


@on_ranks("ranks2")
def test_losses_are_those_of_fsdp2_where_nothing_is_sharded() -> None:
    compare(2, 1)


@on_ranks("ranks4")
def test_losses_are_those_of_fsdp2_with_tensor_parallelism() -> None:
    compare(2, 2)


def captured(tp: int, scope: str) -> Training:
    ours = loop("graphfsdp")
    model, mesh = ours["parallelized"](tp)
    rank = mesh["dp_shard"].get_local_rank()
    data = [ours["next_batch"](index, rank) for index in range(NUM_STEPS)]
    options: dict[str, Any] = {"scope": scope, "warmup_steps": 1, "loss_fn": ours["loss_fn"]}
    return train(model, adam(model), data=data, max_grad_norm=1.0, **options)


@on_ranks("ranks2")
def test_the_same_model_in_a_graph() -> None:
    assert_same_training(*(captured(2, scope) for scope in ("none", "full_iteration")))

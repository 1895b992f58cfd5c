"""What `graphfsdp plan` says of memory and time, and what it refuses."""

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp.cli import main
from graphfsdp.errors import ConfigError
from graphfsdp.planning.activations import Activations, measure_activations
from graphfsdp.planning.model_plan import plan_model
from graphfsdp.planning.rehearsal import Collective
from graphfsdp.planning.training_plan import Speeds, estimate_time, plan_training
from graphfsdp.training.arguments import parse_train_arguments
from graphfsdp.training.gpt import GPT, GPTConfig

# Odd sizes, tied embeddings, biases.
SHAPE = GPTConfig(
    vocab_size=37,
    seq_length=5,
    num_layers=2,
    hidden_size=12,
    num_attention_heads=2,
    ffn_hidden_size=29,
)


def run_on_meta(model: nn.Module) -> Tensor:
    tokens = torch.empty((4, 5), dtype=torch.int64, device="meta")
    loss: Tensor = model(tokens, tokens)
    return loss


def test_a_plan_needs_modules_and_ranks_that_exist() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="no module 'blocks'"):
        plan_model(model, ["blocks"], run_on_meta, num_ranks=2)
    with pytest.raises(ConfigError, match="at least 1, got 0 and 1"):
        plan_model(model, ["0"], run_on_meta, num_ranks=0)
    assert not dist.is_initialized()


def test_a_unit_that_is_planned_alone_is_the_whole_model() -> None:
    with torch.device("meta"):
        model = GPT(SHAPE)
    plan = plan_model(model, [], run_on_meta, num_ranks=1, strategy="no_shard")
    assert plan.num_parameters == sum(param.numel() for param in model.parameters())
    assert [unit.name for unit in plan.units] == [""]
    assert {call.wire_bytes for call in plan.collectives} == {0}


def test_time_is_arithmetic_and_communication_at_the_stated_speeds() -> None:
    calls = [Collective("all_gather", "u", 2, 4_000_000, 4), Collective("all_reduce", "u", 1, 8, 4)]
    speeds = Speeds(tflops=100.0, utilization=0.5, bandwidth_gbs=3.0, latency_us=10.0)
    time = estimate_time(50e9, calls, speeds)
    assert time.compute_ms == pytest.approx(1.0)
    # 2 x 3 steps and 2 x 3 MB at 3 GB/s; 6 steps and 12 bytes.
    assert time.communication_ms == pytest.approx(0.06 + 2.0 + 0.06, rel=1e-5)
    assert time.overlapped_ms == time.communication_ms
    assert time.serial_ms == pytest.approx(3.12, rel=1e-5)


def test_activations_are_what_lives_for_the_backward_pass() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.empty(16, 4)
    found = measure_activations(model, lambda: model(x).sum())
    hidden, out, loss = 16 * 8 * 4, 16 * 4, 4
    assert found.saved_bytes == hidden + loss  # what tanh returned, and the loss itself
    # The gradients of the last layer's weights while that of the hidden layer is there too.
    assert hidden + loss + out < found.peak_bytes <= 3 * hidden + loss + 2 * out + 8 * 4 + 4
    assert all(param.grad is None for param in model.parameters())


def test_an_iteration_takes_less_than_its_parts_at_their_most() -> None:
    """Whole weights and gradients are few while the logits' gradient is there."""
    line = "--preset llama3-8b --num-layers 2 --bf16 --micro-batch-size 1 --global-batch-size 8"
    line += " --data-parallel-sharding-strategy optim_grads_params"
    plan = plan_training(parse_train_arguments(line.split()), num_ranks=8)
    whole = plan.model.whole
    assert whole.iteration_bytes == sum(item.num_bytes for item in plan.memory()[-2:])
    # Above the stand-in for a driver, torch's own allocator has counted 14,938 MiB.
    assert round(whole.iteration_bytes / 2**20) == 14_938


def test_weights_that_an_iteration_casts_are_no_activations_too() -> None:
    plan = plan_training(parse_train_arguments(["--preset", "tiny", "--bf16"]), num_ranks=2)
    casts, activations = plan.memory()[-2:]
    assert casts.num_bytes == 2 * plan.model.num_parameters
    assert casts.num_bytes + activations.num_bytes == plan.model.whole.iteration_bytes


def test_attention_keeps_no_scores_and_each_layer_takes_the_same() -> None:
    def run(layers: int, positions: int) -> Activations:
        shape = dataclasses.replace(SHAPE, num_layers=layers, seq_length=positions, hidden_size=8)
        with torch.device("meta"):
            model = GPT(shape)
            tokens = torch.empty((1, positions), dtype=torch.int64)
        return measure_activations(model, lambda: model(tokens, tokens))

    two, three, six = run(2, 64), run(3, 64), run(6, 64)
    assert six.saved_bytes - three.saved_bytes == 3 * (three.saved_bytes - two.saved_bytes)
    assert six.peak_bytes - three.peak_bytes == 3 * (three.peak_bytes - two.peak_bytes)
    assert run(2, 128).saved_bytes < 2.1 * two.saved_bytes  # scores would grow fourfold


def test_a_norm_keeps_its_input_and_no_copy_in_float32() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.RMSNorm(8)).bfloat16()
        x = torch.empty((16, 8), dtype=torch.bfloat16)
    found = measure_activations(model, lambda: model(x).sum())
    inputs, scales, loss = 2 * 16 * 8 * 2, 2 * 16 * 4, 2
    assert found.saved_bytes == inputs + scales + loss


def plan_json(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", "--json", *line.split()]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_command_plans_thousands_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--preset llama3-8b --world-size 4096 --strategy optim_grads_params"
    data = plan_json(line, capsys)
    assert data["num_parameters"] == 8_030_261_248
    assert data["num_units"] == 33
    memory = {entry["kind"]: entry for entry in data["memory"]}
    whole = data["num_parameters"] + data["num_padding"]
    assert memory["main weights"]["num_bytes"] == 4 * whole // 4096
    assert memory["main grads"]["num_bytes"] == 4 * whole // 4096
    assert not memory["activations"]["exact"]
    entry = memory["whole weights and grads"]
    assert entry["exact"]  # test_planned_ranks.py compares it with real ranks
    assert entry["num_bytes"] == data["whole"]["whole_bytes"]
    assert data["total_bytes"] == sum(entry["num_bytes"] for entry in data["memory"])
    counts = Counter(call["op"] for call in data["collectives"] for _ in range(call["count"]))
    assert counts["all_gather"] == 2 * counts["reduce_scatter"]
    long, short = (
        plan_json(f"--preset tiny --world-size 2 --seq-length {length}", capsys)
        for length in (128, 64)
    )
    assert short["flops"] < long["flops"] / 2


def test_command_prints_tables_that_mark_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "tiny", "--world-size", "2", "--strategy", "3"]) == 0
    out = capsys.readouterr().out
    assert "tiny: memory of each of 2 ranks" in out
    for word in ("main weights", "optimizer state", "whole weights", "reduce_scatter", "~ marks"):
        assert word in out
    activations = next(line for line in out.splitlines() if "activations" in line)
    assert "~" in activations


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--world-size 0", "--world-size must be at least 1, got 0"),
        ("--world-size 2 --rank 2", "--rank must be in 0..1, got 2"),
        ("--world-size 3 --global-batch-size 8", "not divisible"),
        ("--preset gigantic", "there is no such preset"),
        ("--tflops 0", "--tflops must be greater than 0"),
        ("--utilization 2", "--utilization must be in"),
        ("--bandwidth-gbs -1", "--bandwidth-gbs must be greater than 0"),
        ("--latency-us -1", "--latency-us must be at least 0"),
        ("--world-size two", "invalid int value"),
        ("--fast", "unrecognized arguments: --fast"),
    ],
)
def test_command_refuses_what_cannot_be(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_pipeline_is_planned_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank of 1F1B keeps activations of one micro-batch more than the next one."""
    flags = ["plan", "--preset", "tiny", "--world-size", "8", "--json", "--global-batch-size", "32"]
    flags += ["--num-layers", "4", "--untie-embeddings-and-output-weights"]
    plans = {}
    for name, more in {
        "none": [],
        "1f1b": ["--pipeline-model-parallel-size", "4"],
        "place 2": ["--pipeline-model-parallel-size", "4", "--rank", "4"],
        "interleaved": [
            *("--pipeline-model-parallel-size", "2"),
            *("--num-layers-per-virtual-pipeline-stage", "1"),
        ],
    }.items():
        main([*flags, *more])
        plans[name] = json.loads(capsys.readouterr().out)
    assert plans["none"]["pipeline"] is None
    plain, interleaved = plans["1f1b"]["pipeline"], plans["interleaved"]["pipeline"]
    assert plain["bubble"] == 3 / (4 + 3)
    assert interleaved["bubble"] == 1 / (2 * 2 + 1)
    assert plain["message_bytes"] == 4 * 32 * 64 * 4
    assert plain["totals"][1] > plain["totals"][2]
    assert plans["place 2"]["total_bytes"] == plain["totals"][2]
    lines = [{line["kind"]: line["num_bytes"] for line in p["memory"]} for p in plans.values()]
    whole, _, middle, _ = lines
    assert middle["main weights"] < whole["main weights"] / 4  # nothing that embeds or ends
    assert middle["optimizer state"] < whole["optimizer state"] / 4

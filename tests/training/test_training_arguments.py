"""Flags, presets and the checks of a run's configuration."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from graphfsdp.config import GatherFormat, Scope, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.training.arguments import (
    PRESETS,
    find_preset,
    make_parser,
    parse_train_arguments,
)
from graphfsdp.training.config import TrainConfig


def parse(line: str) -> TrainConfig:
    return parse_train_arguments(line.split())


def test_no_flag_gives_the_default_preset() -> None:
    assert parse("") == TrainConfig() == find_preset("default")


def test_every_field_has_a_flag_with_help_and_every_flag_a_field() -> None:
    actions = {action.dest: action for action in make_parser()._actions}
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert actions.keys() - fields == {"help", "config"}
    assert fields <= actions.keys()
    for action in actions.values():
        assert action.help is not None
        assert len(action.help) >= 14


def test_a_file_of_settings_counts_more_than_the_preset_and_less_than_flags(
    tmp_path: Path,
) -> None:
    toml, also = tmp_path / "run.toml", tmp_path / "run.json"
    toml.write_text('preset = "tiny"\nlr = 0.5\nbf16 = true\nswiglu = false\nnum-layers = 3\n')
    settings = {"preset": "tiny", "lr": 0.5, "bf16": True, "swiglu": False, "num_layers": 3}
    also.write_text(json.dumps({**settings, "vocab_size": None}))
    expected = dataclasses.replace(
        find_preset("tiny"), lr=0.5, bf16=True, swiglu=False, num_layers=3
    )
    assert parse(f"--config {toml}") == parse(f"--config {also}") == expected
    assert parse(f"--lr 0.25 --config {toml} --no-bf16 --num-layers 1") == dataclasses.replace(
        expected, lr=0.25, bf16=False, num_layers=1
    )
    # As a run keeps them.
    kept = {**dataclasses.asdict(expected), "resolved": {"num_ranks": 1}, "versions": {}}
    also.write_text(json.dumps(kept))
    assert parse(f"--config {also}") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"run.json: cannot be read as JSON \("),
        ("[]", "run.json: holds no settings by name"),
        ('{"learning_rate": 1}', "there is no setting 'learning_rate'"),
        ('{"micro_batchsize": 1}', "no setting 'micro_batchsize'; is micro_batch_size meant?"),
        ('{"lr": "fast"}', "run.json: argument --lr: invalid float value: 'fast'"),
        ('{"lr": [1]}', "lr is a list; expected a number, a text, true or false"),
        ('{"lr": true}', "run.json: argument --lr: expected one argument"),
        ('{"bf16": 1}', "run.json: argument --bf16"),
        ('{"lr": 0}', "--lr must be greater than 0"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(f"--config {tmp_path}/run.json")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config none.toml: cannot be read as TOML"):
        parse("--config none.toml")


def test_presets_are_found_by_name_and_shown_in_help() -> None:
    text = make_parser().format_help()
    for config, about in PRESETS:
        assert parse(f"--preset {config.preset}") == config
        assert re.search(rf"\n  {config.preset} +{about[:9]}", text)


def test_flags_override_the_preset() -> None:
    config = parse("--preset gpt2-124m --num-layers 2 --swiglu --lr 0.5 --lr-decay-style linear")
    expected = dataclasses.replace(
        find_preset("gpt2-124m"), num_layers=2, swiglu=True, lr=0.5, lr_decay_style="linear"
    )
    assert config == expected
    assert find_preset("llama-160m").swiglu
    assert not parse("--preset llama-160m --no-swiglu").swiglu


@pytest.mark.parametrize(
    ("flags", "num_ranks", "expected"),
    [
        ("--micro-batch-size 4 --global-batch-size 12", 1, (3, 12, 120)),
        *(("--micro-batch-size 2 --global-batch-size 12", n, (6 // n, 12, 120)) for n in (2, 3, 6)),
        ("--micro-batch-size 4", 1, (1, 4, 40)),
        ("--micro-batch-size 2", 5, (1, 10, 100)),
    ],
)
def test_the_global_batch_is_cut_over_ranks_and_micro_batches(
    flags: str, num_ranks: int, expected: tuple[int, int, int]
) -> None:
    batch = parse(f"{flags} --seq-length 10").batch(num_ranks)
    assert (batch.num_microbatches, batch.num_sequences, batch.num_tokens) == expected
    config = parse("--micro-batch-size 2 --global-batch-size 12")
    message = r"--global-batch-size 12 is not divisible by --micro-batch-size 2 x 4 ranks = 8: "
    with pytest.raises(ConfigError, match=message):
        config.batch(num_ranks=4)
    with pytest.raises(ConfigError, match="--global-batch-size 6 is not divisible by --micro-b"):
        parse("--micro-batch-size 4 --global-batch-size 6").batch(num_ranks=1)
    with pytest.raises(ConfigError, match="-instances 3 does not divide the 4 ranks"):
        parse("--num-distributed-optimizer-instances 3").batch(num_ranks=4)


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_a_strategy_has_a_name_and_a_number(strategy: ShardingStrategy) -> None:
    for given in (strategy.value, str(strategy.stage)):
        config = parse(f"--data-parallel-sharding-strategy {given}")
        assert config.sharding is strategy
        assert config.data_parallel_sharding_strategy == strategy.value


@pytest.mark.parametrize("flag", ["--cuda-graph-scope", "--cuda-graph-impl"])
def test_both_spellings_of_the_scope_mean_the_same(flag: str) -> None:
    assert parse(f"{flag} forward_backward").scope is Scope.FORWARD_BACKWARD
    assert parse("--cuda-graph-scope full_iteration --cuda-graph-impl none").scope is Scope.NONE
    assert parse("--cuda-graph-scope none --cuda-graph-warmup-steps 0").scope is Scope.NONE


def test_precision_flags_become_a_policy() -> None:
    config = parse("--bf16 --main-grads-dtype bf16 --use-precision-aware-optimizer")
    assert config.mp_policy.param_dtype == torch.bfloat16
    assert config.mp_policy.main_params_dtype == torch.float32
    assert config.mp_policy.main_grads_dtype == torch.bfloat16
    assert config.mp_policy.use_decoupled_grad
    assert config.master_weights
    assert config.mp_policy.gather_format is None
    for recipe, gathered in (("tensorwise", "float8"), ("rowwise", "float8_rowwise")):
        config = parse(f"--fp8-param-gather --fp8-recipe {recipe}")
        assert config.mp_policy.gather_format is GatherFormat(gathered)
    config = parse("--fp8-param-gather --fp8-recipe mxfp8")
    assert config.mp_policy.gather_format is GatherFormat.MXFP8
    assert not parse("--bf16 --main-params-dtype bf16 --main-grads-dtype bf16").master_weights
    assert not parse("").master_weights


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--preset huge", "--preset huge: there is no such preset; choose one of default, tiny"),
        ("--fp8-recipe mxfp8", "--fp8-recipe needs --fp8-param-gather"),
        ("--fp8-param-gather --mllog x.log", "--mllog has no word for gathers in 8 bits"),
        ("--fp8-format e4m3", "unrecognized arguments: --fp8-format"),
        ("--hidden-size 100 --num-attention-heads 3", "--hidden-size 100 is not divisible by --nu"),
        ("--cuda-graph-scope some", "argument --cuda-graph-scope: invalid choice"),
        ("--cuda-graph-warmup-steps 0", "--cuda-graph-warmup-steps must be at least 1"),
        ("--main-params-dtype bf16", "add --bf16"),
        ("--main-grads-dtype fp64", "argument --main-grads-dtype: invalid choice"),
        ("--lr 0", "--lr must be greater than 0, got 0.0"),
        ("--lr nan", "--lr must be greater than 0, got nan"),
        ("--lr inf", "--lr must be"),
        ("--lr fast", "argument --lr: invalid float value"),
        ("--lr 1e-3 --min-lr 1e-2", r"--min-lr must be in \[0, --lr 0.001\], got 0.01"),
        ("--train-iters 10 --lr-warmup-iters 10", "--lr-warmup-iters 10 leaves nothing"),
        ("--train-iters 0", "--train-iters must be at least 1"),
        ("--micro-batch-size 0", "--micro-batch-size must be at least 1"),
        ("--global-batch-size 0", "--global-batch-size must be at least 1"),
        ("--vocab-size 0", "--vocab-size must be at least 1"),
        ("--clip-grad -1", "--clip-grad must be at least 0"),
        ("--adam-beta2 1", r"--adam-beta2 must be in \[0, 1\)"),
        ("--hidden-dropout 1.5", r"--hidden-dropout must be in \[0, 1\)"),
        ("--log-interval 0", "--log-interval must be at least 1"),
        ("--seed -1", "--seed must be at least 0"),
        ("--data-parallel-sharding-strategy 4", "argument --data-parallel-sharding-strategy: inv"),
        ("--num-distributed-optimizer-instances 0", "-instances must be at least 1, got 0"),
        ("--outer-dp-sharding-strategy optim", "add --num-distributed-optimizer-instances"),
        ("--main-grads-dtype bf16", "add --use-precision-aware-optimizer"),
        ("--outer-dp-sharding-strategy 2", "argument --outer-dp-sharding-strategy: invalid"),
        ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes must be at least 1"),
        ("--num-layer 3", "unrecognized arguments: --num-layer 3"),
        ("--split 95", "--split 95 must be two numbers greater than 0"),
        ("--split 90,5,5", "which is Megatron's test data, must be 0"),
    ],
)
def test_bad_input_is_refused_by_the_flag_s_name(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(line)
    assert "\n" not in str(caught.value)


def test_help_shows_the_default_of_each_flag() -> None:
    shown = " ".join(make_parser().format_help().split())
    assert "0 turns clipping off (default: 1.0)" in shown
    assert "learning rate at the end (default: 0.0)" in shown
    assert "gated feed-forward layers instead of GELU ones (default: on)" in shown
    assert "float32 main weights --main-params-dtype" in shown  # off, so nothing to say


def test_a_short_run_gets_a_warmup_that_fits_unless_one_is_given() -> None:
    assert parse("--preset tiny --train-iters 10").lr_warmup_iters == 1
    assert parse("--train-iters 1").lr_warmup_iters == 0
    assert parse("--train-iters 50 --lr-warmup-iters 20").lr_warmup_iters == 20

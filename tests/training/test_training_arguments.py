"""Flags, presets and the checks of a run's configuration."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from graphfsdp.errors import ConfigError
from graphfsdp.training.config import (
    PRESETS,
    TrainConfig,
    find_preset,
    make_parser,
    parse_train_arguments,
)

RECORDED = json.loads(
    (Path(__file__).parents[1] / "references" / "megatron_schedules.json").read_text()
)


def parse(line: str) -> TrainConfig:
    return parse_train_arguments(line.split())


def test_every_flag_has_help_and_a_field() -> None:
    actions = {action.dest: action for action in make_parser()._actions}
    assert actions.keys() == {"help", "config", *TrainConfig().settings()}
    for action in actions.values():
        assert action.help is not None
        assert len(action.help) >= 14


def test_a_file_of_settings_counts_more_than_the_preset_and_less_than_flags(
    tmp_path: Path,
) -> None:
    toml, also = tmp_path / "run.toml", tmp_path / "run.json"
    toml.write_text('preset = "tiny"\nlr = 0.5\nbf16 = true\nnum-layers = 3\n')
    settings = {"preset": "tiny", "lr": 0.5, "bf16": True, "num_layers": 3}
    also.write_text(json.dumps({**settings, "vocab_size": None}))
    expected = dataclasses.replace(find_preset("tiny"), lr=0.5, bf16=True, num_layers=3)
    assert parse(f"--config {toml}") == parse(f"--config {also}") == expected
    assert parse(f"--lr 0.25 --config {toml} --no-bf16 --num-layers 1") == dataclasses.replace(
        expected, lr=0.25, bf16=False, num_layers=1
    )
    also.write_text('{"data_path": "some.txt", "cuda-graph-impl": "none"}')
    assert parse(f"--config {also}") == parse("--data some.txt --cuda-graph-scope none")
    # As a run keeps them.
    kept = {**expected.settings(), "resolved": {"num_ranks": 1}, "versions": {}}
    also.write_text(json.dumps(kept))
    assert parse(f"--config {also}") == expected
    ended = {"mllog_submission": "org=us", "mllog_cache_cleared": False, "tensorboard": False}
    also.write_text(json.dumps({**kept, **ended}))
    assert parse(f"--config {also}") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"run.json: Expecting property name"),
        ("[]", "run.json: holds no settings by name"),
        ('{"learning_rate": 1}', "run.json: unrecognized arguments: --learning-rate=1"),
        ('{"lr": false}', "run.json: unrecognized arguments: --no-lr"),
        ('{"lr": "fast"}', "run.json: argument --lr: invalid float value: 'fast'"),
        ('{"lr": [1]}', r"run.json: argument --lr: invalid float value: '\[1\]'"),
        ('{"wandb": false}', "run.json: unrecognized arguments: --no-wandb"),
        ('{"lr": true, "bf16": true}', "run.json: argument --lr: expected one argument"),
        ('{"help": true}', "there is no setting 'help'"),
        ("[" * 100_000, r"run.json: maximum recursion depth"),
        ('{"bf16": 1}', "run.json: argument --bf16"),
        ('{"lr": 0}', "--lr must be greater than 0"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(f"--config {tmp_path}/run.json")


def test_presets_are_found_by_name_and_shown_in_help() -> None:
    text = make_parser().format_help()
    assert parse("") == TrainConfig() == find_preset("default")
    for config, about in PRESETS:
        assert parse(f"--preset {config.preset}") == config
        assert re.search(rf"\n  {config.preset} +{about[:9]}", text)


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


def test_bf16_keeps_main_weights_and_gradients_in_float32() -> None:
    policy = parse("--bf16").mp_policy
    assert policy.param_dtype == torch.bfloat16
    assert policy.main_params_dtype == policy.main_grads_dtype == torch.float32
    assert parse("").mp_policy.param_dtype == torch.float32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--preset huge", "argument --preset: invalid choice: 'huge' .choose from '?default"),
        ("--config none.toml", "--config none.toml: .* No such file"),
        ("--num-layers 0", "--num-layers must be at least 1, got 0"),
        ("--hidden-size 20 --num-attention-heads 4", "rope rotates .* a head has 5 of them"),
        ("--lr-decay-style WSD", "argument --lr-decay-style: invalid choice"),
        ("--hidden-size 100 --num-attention-heads 3", "--hidden-size 100 is not divisible by --nu"),
        ("--cuda-graph-scope some", "--cuda-graph-scope/--cuda-graph-impl: invalid choice"),
        ("--lr 0", "--lr must be greater than 0, got 0.0"),
        ("--lr nan", "--lr must be greater than 0, got nan"),
        ("--lr 1e-3 --min-lr 1e-2", r"--min-lr must be in \[0, --lr 0.001\], got 0.01"),
        ("--train-iters 10 --lr-warmup-iters 10", "--lr-warmup-iters 10 leaves nothing"),
        ("--train-iters 0", "--train-iters must be at least 1"),
        ("--micro-batch-size 0", "--micro-batch-size must be at least 1"),
        ("--clip-grad -1", "--clip-grad must be at least 0"),
        ("--adam-beta2 1", r"--adam-beta2 must be in \[0, 1\)"),
        ("--hidden-dropout 1.5", r"--hidden-dropout must be in \[0, 1\)"),
        ("--seed -1", "--seed must be at least 0"),
        (f"--seed {2**63}", "--seed must be at least 0 and below 2"),
        ("--data-parallel-sharding-strategy 4", "argument --data-parallel-sharding-strategy: inv"),
        ("--outer-dp-sharding-strategy optim", "add --num-distributed-optimizer-instances"),
        ("--num-layer 3", "unrecognized arguments: --num-layer 3"),
        ("--save-interval 3", "--save-interval needs --save DIR"),
        ("--async-save", "--async-save needs --save DIR"),
        ("--keep-last 2", "--keep-last needs --save DIR"),
        ("--tensorboard", "--tensorboard needs --out DIR"),
        ("--split 95", "--split 95 must be two numbers greater than 0"),
        ("--split 90,5,5", "which is Megatron's test data, must be 0"),
    ],
)
def test_bad_input_is_refused_by_the_flag_s_name(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(line)
    assert "\n" not in str(caught.value)


def test_a_short_run_gets_a_warmup_that_fits_unless_one_is_given() -> None:
    assert parse("--preset tiny --train-iters 10").lr_warmup_iters == 1
    assert parse("--train-iters 1").lr_warmup_iters == 0
    assert parse("--train-iters 50 --lr-warmup-iters 20").lr_warmup_iters == 20


@pytest.mark.parametrize("case", range(len(RECORDED["cases"])))
def test_learning_rates_are_those_of_megatron_but_for_a_first_one_of_0(case: int) -> None:
    given, numbers = RECORDED["cases"][case]["arguments"], RECORDED["cases"][case]["numbers"]
    warmup, last = given["lr_warmup_steps"], given["lr_decay_steps"]
    for column, (lr, min_lr) in enumerate(((given["max_lr"], given["min_lr"]), (0.5, 0.2))):
        config = TrainConfig(
            lr_decay_style=given["lr_decay_style"],
            lr=lr,
            min_lr=min_lr,
            lr_warmup_iters=warmup,
            train_iters=last,
        )
        for iteration, rates in zip(RECORDED["iterations"], numbers, strict=True):
            if 0 < iteration <= warmup:
                assert config.lr_at(iteration - 1) == pytest.approx(rates[column], rel=1e-15)
            elif warmup < iteration < last:
                assert config.lr_at(iteration) == rates[column], iteration

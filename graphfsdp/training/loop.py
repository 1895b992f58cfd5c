"""A training run: its parts, its checkpoints, and its loop.

One captured step per iteration, and nothing read from the device between two logged ones.
"""

import dataclasses
import functools
import math
import os
import resource
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import graphfsdp
from graphfsdp.checkpoint import AsyncSaver, load, save
from graphfsdp.cli import flag_name, print_line
from graphfsdp.data import BYTES_VOCAB_SIZE, Batch, Feed, TokenBatches, is_token_file, load_corpus
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from graphfsdp.training.config import TrainConfig, parse_train_arguments
from graphfsdp.training.gpt import GPT, make_model
from graphfsdp.training.hugging_face import load_weights, save_weights
from graphfsdp.training.mllog import UNVERIFIED, RunLog, open_run_log
from graphfsdp.training.ranks import Ranks, choose_device, find_gpu, find_ranks, process_group
from graphfsdp.training.run_directory import (
    Metrics,
    Sink,
    begins_anew,
    open_sinks,
    refuse_unusable_directories,
    write_model,
)

_CHECKED_NUMEL = 1 << 20
_HYPER_PARAMETERS = ("betas", "eps", "weight_decay")


class TrainingRun:
    """What trains and on what, how far it has come, and its checkpoints.

    These keep, beside model, optimizer and generators, this object's state. The position in the
    data is a number of sequences, and the same on every rank.
    """

    iteration = 0  # done so far
    tokens = 0  # trained on, all ranks together

    def __init__(
        self, config: TrainConfig, ranks: Ranks, device: torch.device, log: RunLog, stack: ExitStack
    ) -> None:
        """Make every part, the cheapest to refuse first; all ranks together, in a process group.

        With ``--mllog`` the graph is captured on made-up tokens before the data is touched, and the
        clock starts in between. The stack closes what must not outlive the group.
        """
        self.config, self.ranks, self.device = config, ranks, device
        self.batch = config.batch(ranks.size)
        _refuse_vocabulary(config)
        if config.mllog is None:
            self._load_data()
        settings = dataclasses.asdict(config).items()
        ranks.refuse_differences({flag_name(key): value for key, value in settings})
        self.model = self._make_model()
        self.optimizer = self._make_optimizer()
        self.step = graphfsdp.capture(
            self.model,
            self.optimizer,
            scope=config.cuda_graph_scope,
            microbatches=self.batch.num_microbatches,
            # An infinite limit measures the norm without clipping.
            max_grad_norm=config.clip_grad or float("inf"),
            example_batch=None if config.mllog is None else self._made_up_batch(),
            compile="auto" if config.compile == "auto" else config.compile == "on",
            mp_policy=config.mp_policy,
        )
        stack.callback(self.step.close)
        if config.mllog is not None:
            log.run_starts(self.step)
            self._load_data()
        self._saver = stack.enter_context(closing(AsyncSaver())) if config.async_save else None

    def _load_data(self) -> None:
        config, ranks = self.config, self.ranks
        self.batches = ranks.together(
            lambda: TokenBatches(
                load_corpus(config.data, held_out_percent=config.held_out_percent),
                seq_length=config.seq_length,
                batch_size=self.batch.num_sequences,
                seed=config.seed,
                rank=ranks.rank,
                num_ranks=ranks.size,
                vocab_size=config.gpt().vocab_size,
            )
        )
        self.feed = Feed(self.batches, self.device)
        corpus = self.batches.corpus
        held_out = zlib.crc32(corpus.validation[:_CHECKED_NUMEL].tobytes())
        facts = {
            "a number of training tokens of": len(corpus.train),
            "a checksum of held-out tokens of": held_out,
        }
        ranks.refuse_differences(facts)
        self._numbers: dict[str, Any] = {
            **config.numbers(),
            "global_batch_size": self.batch.num_sequences,
            "corpus": [*facts.values()],
        }

    def _make_model(self) -> GPT:
        config, ranks = self.config, self.ranks
        # A sharded model holds the main weights itself, and needs none beside them.
        dtype = torch.float32 if ranks.launched else config.param_dtype
        torch.manual_seed(config.seed)
        on_meta, folder = config.init_model_with_meta_device, config.hf_model
        where = torch.device("meta") if on_meta else self.device
        model = ranks.together(lambda: make_model(config.gpt(), where, dtype))
        if folder is not None:
            ranks.together(lambda: load_weights(model, folder))
        if not on_meta:
            ranks.copy_first(model)
        if ranks.launched:
            shard_model(model, config, self.device)
        if on_meta:
            graphfsdp.materialize(model, self.device)
        if ranks.rank > 0:
            # Other dropout than the other ranks; rank 0 draws what a single process would.
            torch.manual_seed(config.seed + ranks.rank)
        return model

    def _make_optimizer(self) -> FusedAdam:
        """Matrices decay, vectors (norms and biases) do not."""
        config, params = self.config, list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [param for param in params if param.dim() >= 2]},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        return FusedAdam(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            master_weights=config.bf16 and not self.ranks.launched,
        )

    def _made_up_batch(self) -> Batch:
        """Random tokens and targets, [B, T], shaped like one rank's part of a batch."""
        config = self.config
        size = (self.batch.num_microbatches * config.micro_batch_size, config.seq_length + 1)
        # A generator of its own: torch's global one draws the same as in a run without this.
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(config.gpt().vocab_size, size, generator=generator).to(self.device)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": {"iteration": self.iteration, "tokens": self.tokens},
            "facts": self._numbers,
            "data": self.feed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the position, and note which settings are others now."""
        self.iteration, self.tokens = (state["position"][name] for name in ("iteration", "tokens"))
        saved, ours = state["facts"], self._numbers
        self._differences = [
            f"{'the data' if key == 'corpus' else flag_name(key)} was {saved[key]}, is {ours[key]}"
            for key in sorted(saved.keys() & ours.keys())
            if saved[key] != ours[key]
        ]
        self.feed.load_state_dict(state["data"])

    def resume(self) -> list[str]:
        """Load what ``--load`` names, if anything; return lines to print."""
        config, groups = self.config, self.optimizer.param_groups
        if config.load is None:
            return []
        if begins_anew(config):
            return [f"{config.load} has no checkpoint yet: the run starts from nothing"]
        # The hyper-parameters that this run's flags ask for; the same where these are.
        asked = [{name: group[name] for name in _HYPER_PARAMETERS} for group in groups]
        loaded = load(config.load, self.model, self.optimizer, objects={"run": self})
        if self.iteration >= config.train_iters:
            raise ConfigError(
                f"{loaded.path} has {self.iteration} iterations already; give more "
                f"--train-iters than {config.train_iters} to go on"
            )
        for group, hyper_parameters in zip(groups, asked, strict=True):
            group.update(hyper_parameters)
        lines = [f"resumed from {loaded.path} after {self.iteration} iterations"]
        if self._differences:
            lines.append(
                "other settings than saved, so no exact continuation: "
                + "; ".join(self._differences)
            )
        return lines

    def save_if_due(self, *, is_last: bool) -> None:
        config = self.config
        if config.save is None or not (is_last or is_due(self.iteration, config.save_interval)):
            return
        write = save if self._saver is None else self._saver.save
        write(
            config.save,
            self.model,
            self.optimizer,
            objects={"run": self},
            step=self.iteration,
            keep_last=config.keep_last,
        )
        if is_last and self._saver is not None:
            self._saver.close()

    def facts(self) -> dict[str, object]:
        """Return what follows from the settings, for the first lines and for ``config.json``."""
        config, ranks, corpus = self.config, self.ranks, self.batches.corpus
        instances = config.num_distributed_optimizer_instances
        sharding: str = config.data_parallel_sharding_strategy
        if not ranks.launched:
            sharding = "none in a single process; torchrun starts several"
        elif instances > 1:
            sharding += f" over {ranks.size // instances} ranks, {instances} times"
        return {
            "device": _name_of(self.device),
            "num_threads": torch.get_num_threads(),
            "num_parameters": sum(param.numel() for param in self.model.parameters()),
            "param_dtype": str(config.param_dtype),
            "scope": config.cuda_graph_scope,
            "global_batch_size": self.batch.num_sequences,
            "num_microbatches": self.batch.num_microbatches,
            "num_ranks": ranks.size,
            "sharding": sharding,
            "corpus": corpus.name,
            "train_tokens": len(corpus.train),
            "validation_tokens": len(corpus.validation),
        }

    def kept_facts(self) -> dict[str, object]:
        return {
            **self.config.settings(),
            "resolved": {**dataclasses.asdict(self.model.config), **self.facts()},
            "versions": {"graphfsdp": graphfsdp.__version__, "torch": str(torch.__version__)},
        }

    def whole_weights(self) -> dict[str, Tensor]:
        """Return what the model holds on rank 0, weights as it computes with them; a collective."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(self.model, options=options)
        if not self.config.untie_embeddings_and_output_weights:
            state.pop("output.weight", None)  # it is the embedding's
        return {name: tensor.to(self.config.param_dtype) for name, tensor in state.items()}


def shard_model(model: GPT, config: TrainConfig, device: torch.device) -> None:
    """Make a unit of each block and one of the rest, which holds tied embeddings too.

    Of several instances each holds all shards.
    """
    instances, mesh = config.num_distributed_optimizer_instances, None
    if instances > 1:
        mesh = init_device_mesh(
            device.type,
            (instances, dist.get_world_size() // instances),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
    for module in (*model.blocks.children(), model):
        graphfsdp.fully_shard(
            module,
            mesh,
            strategy=config.sharding,
            mp_policy=config.mp_policy,
            outer_strategy=config.outer_dp_sharding_strategy,
        )


def _refuse_vocabulary(config: TrainConfig) -> None:
    """Before the data is touched, which waits for the clock of ``--mllog``."""
    if config.data is not None and is_token_file(config.data):
        if config.vocab_size is None:
            raise ConfigError(
                f"--data {config.data} holds tokens; say with --vocab-size how many there are"
            )
    elif config.gpt().vocab_size < BYTES_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size {config.vocab_size} is too small for texts, which are read as bytes; "
            f"give --vocab-size {BYTES_VOCAB_SIZE} or more"
        )


def is_due(done: int, interval: int) -> bool:
    return interval > 0 and done % interval == 0


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def run_train(arguments: Sequence[str], console: Console) -> None:
    """Processes that torchrun has started train together; the first one prints and writes.

    Raises ConfigError where the run cannot start; nothing was written then.
    """
    config, began_ms = parse_train_arguments(arguments), time.time_ns() // 1_000_000
    ranks = find_ranks()
    config.batch(ranks.size)  # refused here, before anything takes time
    device = choose_device(config.device, ranks)
    if not ranks.is_first:
        console = Console(quiet=True)
    say = functools.partial(print_line, console)
    with ExitStack() as stack:
        minutes = config.distributed_timeout_minutes
        ranks = stack.enter_context(process_group(ranks, device, timeout_minutes=minutes))
        if config.deterministic_mode:
            _use_deterministic_kernels(stack)
        ranks.first(lambda: refuse_unusable_directories(config))
        opened = open_run_log(config, ranks, device, began_ms=began_ms)
        log = ranks.together(lambda: stack.enter_context(opened))
        run = TrainingRun(config, ranks, device, log, stack)
        lines = run.resume()
        kept_facts = run.kept_facts()
        sinks = ranks.together(
            lambda: open_sinks(config, kept_facts, run.iteration, stack) if ranks.is_first else []
        )
        if config.mllog is not None:
            lines.append(f"MLPerf-style log in {config.mllog}; {UNVERIFIED}")
        say(f"graphfsdp train, preset {config.preset}, torch {torch.__version__}")
        for name, fact in run.facts().items():
            say(f"  {name:<18} {fact}")
        for line in lines:
            say(line)
        sinks.insert(0, lambda metrics: say(metrics.describe(config.train_iters)))
        with closing(iter(run.feed)) as feed:
            metrics = _iterate(run, feed, sinks, log)
        if config.out is not None:
            state = run.whole_weights()
            if ranks.is_first:
                write_model(Path(config.out, "model.safetensors"), state)
                if config.hf_model is not None:
                    shape, target = run.model.config, Path(config.out, "hugging_face")
                    save_weights(state, shape, config.hf_model, target)
        val_loss = metrics.val_loss
        assert val_loss is not None  # the last iteration is validated
        say(f"validation loss {val_loss:.4f} nats per token\n{run.step.report()}")
        if config.target_loss is not None:
            what = "reached" if config.is_success(val_loss) else "not reached"
            say(f"target loss {config.target_loss:g} {what} after {metrics.step} iterations")
        kept = "nothing of this run is kept; --out DIR keeps metrics and parameters"
        say(kept if config.out is None else f"kept in {config.out}")


def _use_deterministic_kernels(stack: ExitStack) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses cuBLAS
    was_on, switches = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic
    name = "fill_uninitialized_memory"
    stack.callback(torch.use_deterministic_algorithms, was_on)
    stack.callback(setattr, switches, name, getattr(switches, name))
    torch.use_deterministic_algorithms(True)
    # It finds programs that read what they never wrote, by a kernel for each empty tensor.
    setattr(switches, name, False)


def _iterate(
    run: TrainingRun, feed: Iterator[Batch], sinks: Sequence[Sink], log: RunLog
) -> Metrics:
    config, step = run.config, run.step
    log.block_starts()
    window = _Window(run)
    first = run.iteration
    for iteration in range(first, config.train_iters):
        batch = next(feed)
        lr = config.lr_at(iteration)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        phase = step.phase
        loss = step(*batch)
        window.num_steps += 1
        captured = phase is not step.phase
        done = run.iteration = iteration + 1
        run.tokens += run.batch.num_tokens
        log.trained(done * run.batch.num_sequences)
        is_last = done == config.train_iters
        evaluates = is_last or is_due(done, config.eval_interval)
        if evaluates or done in (1, first + 1) or is_due(done, config.log_interval):
            phase = graphfsdp.Phase.CAPTURE if captured else phase
            metrics = window.measure(loss, lr, phase)
            if evaluates:
                log.block_stops()
                val_loss = validation_loss(run)
                log.validated(val_loss)
                metrics = dataclasses.replace(metrics, val_loss=val_loss)
                success = config.is_success(val_loss)
                is_last = is_last or (success and config.target_loss is not None)
                if is_last:
                    log.run_stops(success=success)
                else:
                    log.block_starts()
            for sink in sinks:
                sink(metrics)
            window = _Window(run)
        elif captured:
            window = _Window(run)  # so that the speed of replay does not include the capture
        began = time.perf_counter()
        run.save_if_due(is_last=is_last)
        window.leave_out(began)
        if is_last:
            break
    return metrics


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


class _Window:
    """Measures speed over the iterations between two moments when the host waits anyway."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._wait()
        self._start = time.perf_counter()
        self._waited_s = run.feed.waited_s
        self.num_steps = 0

    def _wait(self) -> None:
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)

    def leave_out(self, began: float) -> None:
        self._start += time.perf_counter() - began

    def measure(self, loss: Tensor, lr: float, phase: graphfsdp.Phase) -> Metrics:
        self._wait()
        run, passed = self._run, time.perf_counter() - self._start
        seconds = passed / self.num_steps
        tokens_per_s = run.batch.num_tokens / seconds
        gpu, mfu = find_gpu(_name_of(run.device)), None
        if gpu is not None:
            peak = run.ranks.size * gpu.flops_per_s(run.config.param_dtype)
            mfu = tokens_per_s * run.model.flops_per_token() / peak
        assert run.step.grad_norm is not None  # a limit is always given
        return Metrics(
            step=run.iteration,
            loss=float(run.ranks.mean(loss)),
            lr=lr,
            grad_norm=float(run.step.grad_norm),
            tokens=run.tokens,
            tokens_per_s=tokens_per_s,
            step_ms=1000 * seconds,
            memory_bytes=_peak_memory_bytes(run.device),
            phase=phase.value,
            data_wait=(run.feed.waited_s - self._waited_s) / passed,
            mfu=mfu,
        )


@torch.no_grad()
def validation_loss(run: TrainingRun) -> float:
    """Mean loss in nats per token over fixed batches of the held-out part.

    Ranks share the batches out: all must call this, and all get the same mean, whose terms and
    whose order of addition do not depend on the number of ranks.
    """
    ranks, num_batches = run.ranks, run.config.eval_iters
    num_rounds = math.ceil(num_batches / ranks.size)
    # Sharded weights are gathered by all ranks together, so each runs equally many batches; one
    # that has none left runs the last again, which is then not counted.
    mine = [min(turn * ranks.size + ranks.rank, num_batches - 1) for turn in range(num_rounds)]
    batches = run.batches.validation_batches(num_batches, run.config.micro_batch_size, mine)
    run.model.eval()  # without dropout, so that nothing is drawn from the generators
    try:
        losses = [run.model(*(tensor.to(run.device) for tensor in batch)) for batch in batches]
    finally:
        run.model.train()
    everyone = ranks.gather(torch.stack(losses).tolist())
    in_order = torch.tensor(everyone, dtype=torch.float64).T.flatten()[:num_batches]
    return float(in_order.mean())

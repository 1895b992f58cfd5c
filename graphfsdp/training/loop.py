"""The training loop: one captured step per iteration, nothing read from the device between."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import graphfsdp
from graphfsdp.command_line import print_line
from graphfsdp.data import Batch
from graphfsdp.training.build import TrainingRun, choose_device, is_due
from graphfsdp.training.config import parse_train_arguments
from graphfsdp.training.hugging_face import save_weights
from graphfsdp.training.metrics import Metrics, flops_per_token, peak_memory_bytes, peak_tflops
from graphfsdp.training.mllog import UNVERIFIED, RunLog, is_success, open_run_log, reached
from graphfsdp.training.ranks import find_ranks, process_group
from graphfsdp.training.run_directory import (
    Sink,
    open_sinks,
    refuse_unusable_directories,
    write_model,
)


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
        stack.enter_context(process_group(ranks, device, timeout_minutes=minutes))
        if config.deterministic_mode:
            stack.enter_context(_deterministic_kernels())
        ranks.members.first(lambda: refuse_unusable_directories(config))
        opened = open_run_log(config, ranks, device, began_ms=began_ms)
        log = ranks.members.together(lambda: stack.enter_context(opened))
        run = TrainingRun(config, ranks, device, log)
        stack.callback(run.step.close)
        stack.callback(run.finish_saving)
        lines = run.resume()
        facts = _kept_facts(run)
        sinks = ranks.members.together(
            lambda: open_sinks(config, facts, run.iteration, stack) if ranks.is_first else []
        )
        if config.mllog is not None:
            lines.append(f"MLPerf-style log in {config.mllog}; {UNVERIFIED}")
        say(f"graphfsdp train, preset {config.preset}, torch {torch.__version__}")
        for name, fact in _facts(run).items():
            say(f"  {name:<18} {fact}")
        for line in lines:
            say(line)
        sinks.insert(0, lambda metrics: say(metrics.describe(config.train_iters)))
        with closing(iter(run.feed)) as feed:
            metrics = _iterate(run, feed, sinks, log)
        run.finish_saving()
        if config.out is not None:
            state = _whole_weights(run)
            if ranks.is_first:
                write_model(Path(config.out, "model.safetensors"), state)
                if config.hf_model is not None:
                    shape, target = run.model.config, Path(config.out, "hugging_face")
                    save_weights(state, shape, config.hf_model, target)
        say(f"validation loss {metrics.val_loss:.4f} nats per token\n{run.step.report()}")
        if config.target_loss is not None:
            what = "reached" if reached(config, metrics.val_loss) else "not reached"
            say(f"target loss {config.target_loss:g} {what} after {metrics.step} iterations")
        kept = "nothing of this run is kept; --out DIR keeps metrics and parameters"
        say(kept if config.out is None else f"kept in {config.out}")


def _kept_facts(run: TrainingRun) -> dict[str, object]:
    packages = ((graphfsdp, graphfsdp.__version__), (torch, torch.__version__))
    return {
        **run.config.settings(),
        "resolved": {**dataclasses.asdict(run.model.config), **_facts(run)},
        "versions": {package.__name__: str(version) for package, version in packages},
    }


def _facts(run: TrainingRun) -> dict[str, object]:
    """Return what follows from the settings, for the first lines and for ``config.json``."""
    config, ranks = run.config, run.ranks
    instances = config.num_distributed_optimizer_instances
    sharding: str = config.data_parallel_sharding_strategy
    if not ranks.launched:
        sharding = "none in a single process; torchrun starts several"
    elif instances > 1:
        sharding += f" over {ranks.size // instances} ranks, {instances} times"
    return {
        "device": _name_of(run.device),
        "num_threads": torch.get_num_threads(),
        "num_parameters": sum(param.numel() for param in run.model.parameters()),
        "param_dtype": str(config.param_dtype),
        "scope": config.cuda_graph_scope,
        "global_batch_size": run.batch.num_sequences,
        "num_microbatches": run.batch.num_microbatches,
        "num_ranks": ranks.size,
        "sharding": sharding,
        "corpus": run.corpus.name,
        "train_tokens": len(run.corpus.train),
        "validation_tokens": len(run.corpus.validation),
    }


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextmanager
def _deterministic_kernels() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses cuBLAS
    switches: Any = torch.utils.deterministic
    was_on = torch.are_deterministic_algorithms_enabled()
    filled = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # It finds programs that read what they never wrote, by a kernel for each empty tensor.
    switches.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        switches.fill_uninitialized_memory = filled


def _whole_weights(run: TrainingRun) -> dict[str, Tensor]:
    """Return what the model holds on rank 0, weights as it computes with them; a collective."""
    state = run.model.state_dict(keep_vars=True)
    wholes: dict[int, Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():  # tied ones once
        whole: Any = getattr(tensor, "full_tensor", tensor.detach)()
        if run.ranks.is_first:
            dtype = run.config.param_dtype if isinstance(tensor, nn.Parameter) else None
            wholes[id(tensor)] = whole.detach().to("cpu", dtype)
    return {name: wholes[id(t)] for name, t in state.items()} if run.ranks.is_first else {}


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
                is_last = is_last or reached(config, val_loss)
                if is_last:
                    log.run_stops(success=is_success(config, val_loss))
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
        peak = peak_tflops(_name_of(run.device), run.config.param_dtype)
        flops_per_s = tokens_per_s * flops_per_token(run.model)
        assert run.step.grad_norm is not None  # a limit is always given
        return Metrics(
            step=run.iteration,
            loss=float(run.ranks.mean(loss)),
            lr=lr,
            grad_norm=float(run.step.grad_norm),
            tokens=run.tokens,
            tokens_per_s=tokens_per_s,
            step_ms=1000 * seconds,
            memory_bytes=peak_memory_bytes(run.device),
            phase=phase.value,
            data_wait=(run.feed.waited_s - self._waited_s) / passed,
            mfu=None if peak is None else flops_per_s / (run.ranks.size * peak * 1e12),
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
    everyone = ranks.members.gather(torch.stack(losses).tolist())
    in_order = torch.tensor(everyone, dtype=torch.float64).T.flatten()[:num_batches]
    return float(in_order.mean())

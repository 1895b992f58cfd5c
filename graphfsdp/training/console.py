"""What a training run prints: banner, log lines, progress bar, summary."""

import platform

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import graphfsdp
from graphfsdp.command_line import print_line
from graphfsdp.training.build import TrainingRun
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.metrics import Metrics


class TrainingConsole:
    """Prints a run to a terminal, or plain lines to a file or a pipe."""

    def __init__(self, console: Console, train_iters: int) -> None:
        self._console = console
        self._train_iters = train_iters
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task("training", total=train_iters)

    def banner(self, run: TrainingRun) -> None:
        self.line(f"graphfsdp train, preset {run.config.preset}")
        for label, fact in _facts(run):
            self.line(f"  {label:<10} {fact}")
        if run.config.out is None:
            self.line("nothing of this run is kept; --out DIR keeps metrics and parameters")

    def say(self, what: str) -> None:
        """Show what goes on, "" if it is training."""
        self.progress.update(self._task, description=what or "training")

    def advance(self, num_iterations: int = 1) -> None:
        self.progress.advance(self._task, num_iterations)

    def log(self, metrics: Metrics) -> None:
        self.line(metrics.describe(self._train_iters))

    def summary(self, run: TrainingRun, validation_loss: float) -> None:
        entropy = run.corpus.unigram_entropy
        self.line(
            f"validation loss {validation_loss:.4f} nats per token; unigram entropy of the "
            f"corpus {entropy:.4f} (a model that knows only how frequent each token is)"
        )
        self.line(str(run.step.report()))

    def line(self, text: str) -> None:
        print_line(self._console, text)


def _facts(run: TrainingRun) -> list[tuple[str, str]]:
    config, corpus, model = run.config, run.corpus, run.model
    num_params = sum(param.numel() for param in model.parameters())
    precision = f"{'bf16' if config.bf16 else 'fp32'} model weights, fp32 main weights and grads"
    batch = f"{run.batch.num_sequences} x {config.seq_length} tokens"
    if run.batch.num_microbatches > 1:
        batch += f" in {run.batch.num_microbatches} micro-batches"
    if run.batch.num_ranks > 1:
        batch += f" on each of {run.batch.num_ranks} ranks"
    shape = f"{config.num_layers} layers, width {config.hidden_size}, "
    shape += f"{config.num_attention_heads} heads, vocabulary {model.config.vocab_size}"
    scope: str = config.cuda_graph_scope
    if scope != "none" and config.compile != "off":
        scope += f", compiled ({config.compile})"
    versions = f"graphfsdp {graphfsdp.__version__}, torch {torch.__version__}, Python "
    device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    if run.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(run.device)}, CUDA {torch.version.cuda}"
    return [
        ("versions", versions + platform.python_version()),
        ("device", device),
        ("model", f"{num_params:,} parameters ({shape})"),
        ("precision", precision),
        ("scope", scope),
        ("iteration", f"{run.batch.num_tokens:,} tokens ({batch})"),
        *_describe_ranks(run),
        ("data", corpus.name),
        ("", f"{len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out"),
    ]


def _describe_ranks(run: TrainingRun) -> list[tuple[str, str]]:
    strategy: str = run.config.data_parallel_sharding_strategy
    if not run.ranks.launched:
        if strategy == TrainConfig().data_parallel_sharding_strategy:
            return []
        return [("sharding", f"{strategy} is ignored in a single process; torchrun starts several")]
    backend = "nccl" if run.device.type == "cuda" else "gloo"
    num_units = sum(isinstance(each, graphfsdp.FSDPModule) for each in run.model.modules())
    instances = run.config.num_distributed_optimizer_instances
    if instances > 1:
        strategy += f" over {run.ranks.size // instances} ranks, {instances} times"
    return [
        ("ranks", f"{run.ranks.size} ({backend})"),
        ("sharding", f"{strategy}, {num_units} units"),
    ]

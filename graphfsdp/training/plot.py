"""The loss curve as a picture, where matplotlib is installed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from graphfsdp.training.metrics import Metrics


def plot_loss(path: Path, history: Sequence[Metrics], *, unigram_entropy: float) -> bool:
    """Draw training and validation loss over the steps.

    Returns:
        Whether the picture was written: matplotlib is optional.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    # A Figure of its own, not pyplot: no window system and no global list of figures.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([m.step for m in history], [m.loss for m in history], label="training", linewidth=1)
    validated = [(m.step, m.val_loss) for m in history if m.val_loss is not None]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", label="validation", markersize=4)
    axes.axhline(unigram_entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True

"""An Adam of any library by the library's name, made so that it can be captured."""

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.optimizers import FusedAdam

ADAM_BACKENDS = ("auto", "native", "torch", "te", "apex")


def make_adam(
    params: ParamsT,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    backend: str = "auto",
    adam_w_mode: bool = True,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Return an Adam that ``graphfsdp.capture`` takes.

    Args:
        params: Parameters, (name, parameter) pairs, or groups of either.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Fraction of the weight removed per unit of learning rate.
        backend: "native" is ``FusedAdam``; "torch" is torch's fused Adam or AdamW; "te" and "apex"
            are the FusedAdam of Transformer Engine and of NVIDIA's apex, which need CUDA; "auto"
            is "native", which runs everywhere and with every precision.
        adam_w_mode: Decoupled weight decay (AdamW); otherwise decay joins the gradient.
        **settings: What else that optimizer's constructor knows, by its names.

    Raises:
        ConfigError: the backend is unknown or not installed, or does not know a setting.
    """
    if backend not in ADAM_BACKENDS:
        known = ", ".join(map(repr, ADAM_BACKENDS))
        raise ConfigError(f"backend must be one of {known}; got {backend!r}")
    if not isinstance(params, Iterable):
        raise ConfigError(f"params must be an iterable, got {type(params).__name__}")
    listed: list[Any] = list(params)
    numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    make: Callable[..., torch.optim.Optimizer]
    if backend in ("auto", "native"):
        make, own = FusedAdam, {"adam_w_mode": adam_w_mode}
    elif backend == "torch":
        make = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        on_cuda = any(tensor.is_cuda for tensor in _tensors(listed))
        own = {"fused": True, "capturable": on_cuda}
    else:
        make = _FINDERS[backend]()
        own = {"adam_w_mode": adam_w_mode, "capturable": True}
        listed = [_with_tensor_lr(item) for item in listed]
    given = {**numbers, **own, **settings}
    unknown = sorted(set(given) - set(inspect.signature(make).parameters))
    if unknown:
        raise ConfigError(
            f"{make.__module__}.{make.__name__} does not know {', '.join(unknown)}. Remedy: "
            "leave it out, a newer version of that library, or backend='native'"
        )
    return make(listed, **given)


def _tensors(listed: Iterable[Any]) -> Iterator[Tensor]:
    for item in listed:
        if isinstance(item, dict):
            members = item["params"]
            yield from _tensors([members] if isinstance(members, Tensor) else members)
        else:
            yield item[1] if isinstance(item, tuple) else item


def _with_tensor_lr(item: Any) -> Any:
    """Return a group whose own lr is a tensor, as their capturable mode needs and does not make."""
    if not isinstance(item, dict) or "lr" not in item or isinstance(item["lr"], Tensor):
        return item
    return {**item, "lr": torch.tensor(item["lr"], dtype=torch.float32, device="cpu")}


def _find_te() -> Callable[..., torch.optim.Optimizer]:
    try:
        module = importlib.import_module("transformer_engine.pytorch.optimizers")
    # Without CUDA its import ends in RuntimeError or OSError: it loads cuDNN and NCCL by itself.
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"backend='te' needs Transformer Engine, which cannot be imported here ({error}). "
            "Remedy: pip install --no-build-isolation 'graphfsdp[te]', on a machine with CUDA; or "
            "backend='native'"
        ) from error
    found: Callable[..., torch.optim.Optimizer] = module.FusedAdam
    return found


def _find_apex() -> Callable[..., torch.optim.Optimizer]:
    install = "Remedy: build it from github.com/NVIDIA/apex with its CUDA extensions; or 'native'"
    if importlib.util.find_spec("apex") is None:
        raise ConfigError(f"backend='apex' needs NVIDIA's apex, which is not installed. {install}")
    if importlib.util.find_spec("apex.optimizers") is None:
        raise ConfigError(
            f"backend='apex' needs NVIDIA's apex, but the installed package apex{_apex_version()} "
            "is another one: that of PyPI is a toolkit for the Pyramid web framework. Remedy: pip "
            "uninstall apex, then build NVIDIA's from github.com/NVIDIA/apex; or 'native'"
        )
    try:
        importlib.import_module("amp_C")
        module = importlib.import_module("apex.optimizers")
    except (ImportError, RuntimeError, OSError) as error:  # built without CUDA, or none is there
        raise ConfigError(
            f"backend='apex' needs apex's CUDA extensions, which cannot be imported here ({error})."
            f" {install}"
        ) from error
    found: Callable[..., torch.optim.Optimizer] = module.FusedAdam
    if "capturable" not in inspect.signature(found).parameters:
        raise ConfigError(
            f"the FusedAdam of this apex{_apex_version()} is too old to be captured: it does not "
            f"know capturable=True. {install}"
        )
    return found


def _apex_version() -> str:
    try:
        return f" {importlib.metadata.version('apex')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


_FINDERS: Mapping[str, Callable[[], Callable[..., torch.optim.Optimizer]]] = MappingProxyType(
    {"te": _find_te, "apex": _find_apex}
)

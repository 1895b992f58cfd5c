"""Inductor, in a process of its own: a graph becomes C++, compiled once for all who build it."""

import getpass
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.compiled.stretch_graph import StretchGraph
from graphfsdp.errors import ConfigError

Compiled = Callable[[list[Tensor]], list[Tensor]]

_WORKER = Path(__file__).with_name("worker.py")
_WAIT_S = 0.1
_DATA_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # where a library finds torch's function


class RefusedError(Exception):
    """Operators that cannot be compiled; ``why`` has the reasons, by number of the node."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(", ".join(why.values()))
        self.why = why


def require_compiler() -> None:
    """Refuse to begin where there is no C++ compiler.

    Raises:
        ConfigError: Inductor would find none.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"compile needs a C++ compiler, and Inductor would find none ({name} is not there). "
            "Remedy: install g++ or clang++, or name one in the environment variable CXX; or "
            "compile=False"
        )


class Compiler:
    """Compiles graphs while its body lasts.

    Note [Process]: Inductor takes seconds and a hundred MB to import, and to compile as much again.
    So it runs in a process that is begun when a graph is met that is not in the cache, and ended
    with the body. It leaves an extension module for each graph, which is all that a replay needs.

    Note [Cache]: what a graph became lies in ``KEY.pt``: the digest of its library, which lies in
    ``DIGEST.so``, the constants that Inductor wants, or what was refused. The key is that of the
    graph's text and of all that decides what is made of it. A file that is damaged is made anew.
    """

    def __init__(self, while_waiting: Callable[[], object] = lambda: None) -> None:
        """``while_waiting`` is called now and then while Inductor works, and may raise."""
        self._while_waiting = while_waiting
        self._folder = _cache_folder()
        self._surroundings = _surroundings()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def compile(self, graph: StretchGraph) -> Compiled:
        """Compile, or find what was compiled before; nothing is run.

        Raises:
            RefusedError: with some of its operators no graph can be compiled.
            RuntimeError: whatever Inductor raises.
        """
        text = f"{self._surroundings}\n{graph.text}"
        key = hashlib.sha256(text.encode()).hexdigest()
        try:
            return _load(self._folder, key)
        except RefusedError:
            raise
        except Exception:  # not there, damaged, or made on another kind of machine
            self._make(key, text)
        return _load(self._folder, key)

    def _make(self, key: str, text: str) -> None:
        process = self._process = self._process or _begin()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([str(self._folder), key, text]) + "\n")
            process.stdin.flush()
        with DefaultSelector() as answers:
            answers.register(process.stdout, EVENT_READ)
            while not answers.select(_WAIT_S):
                self._while_waiting()
        answer = process.stdout.readline()
        if not answer:
            code = self._end()
            how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            raise RuntimeError(f"Inductor's process ended with {how}")
        wrong = json.loads(answer)
        if wrong:
            raise RuntimeError(wrong)

    def _end(self) -> int:
        """End the process and the compilers that it runs; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), process:  # it may not have read what it was sent
            process.wait()
        return process.returncode


def _begin() -> subprocess.Popen[str]:
    # In a session of its own: Ctrl-C reaches us, who end it. It ends itself when we are no more.
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no processes that outlive it
        },
        start_new_session=True,
        text=True,
    )


def _load(folder: Path, key: str) -> Compiled:
    """Load what was made of a graph.

    Raises:
        RefusedError: it was refused.
        Exception: there is nothing that can be loaded.
    """
    made = torch.load(folder / f"{key}.pt", map_location="cpu", weights_only=True)
    if made["refused"]:
        raise RefusedError(made["refused"])
    path, constants = folder / f"{made['library']}.so", made["constants"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != made["library"]:
        raise OSError(f"{path} is damaged")
    guards: Any = torch._C._dynamo.guards
    os.environ[_DATA_POINTER] = str(guards._torchinductor_pyobject_tensor_data_ptr)
    loader = ExtensionFileLoader(f"{made['library']}.inductor_entry_cpp", str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    run = module.inductor_entry_cpp
    hand_over = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    take = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

    def call(inputs: list[Tensor]) -> list[Tensor]:
        results: list[Tensor] = take(run(hand_over([*inputs, *constants])))
        return results

    return call


def _cache_folder() -> Path:
    """Return our folder in Inductor's."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's
            user = f"uid_{os.getuid()}"
        folder = str(Path(tempfile.gettempdir(), f"torchinductor_{user}"))
    return Path(folder, "graphfsdp").absolute()


def _surroundings() -> str:
    """Return what decides beside a graph what is made of it, in one line."""
    settings = [name for name in os.environ if name.startswith("TORCHINDUCTOR_")]
    names = {"CXX", "ATEN_CPU_CAPABILITY", *settings} - {"TORCHINDUCTOR_CACHE_DIR"}
    processor = set()
    with suppress(OSError):  # Linux only
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                processor.add(line)
    return json.dumps(
        {
            "threads": torch.get_num_threads(),
            "deterministic": torch.get_deterministic_debug_mode(),
            "torch": [torch.__version__, torch.version.git_version],
            "python": sysconfig.get_config_var("SOABI"),
            "processor": [platform.machine(), *sorted(processor)],
            "environment": {name: os.environ.get(name) for name in sorted(names)},
            "worker": hashlib.sha256(_WORKER.read_bytes()).hexdigest(),
        }
    )

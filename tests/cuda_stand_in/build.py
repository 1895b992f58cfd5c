"""Builds the library that stands in for driver, runtime, cuBLAS and NCCL, beside torch's headers.

What torch needs of NVIDIA's libraries and nobody has written yet gets an entry that says so by
name when it is called: nothing of a library that wants a real driver ever runs.
"""

import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE / "src"
BUILDS = HERE / "build"
LIBRARY = "libcuda.so.1"
# Torch opens it by this name and asks it for its functions, so it is a library of its own.
NVRTC = "libnvrtc.so.13"
FLAGS = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fPIC")

# Whose functions are answered by name; cuPTI, cuFile and NVSHMEM are left alone, nobody calls them.
PLAYED = re.compile(r"(__cuda|cuda|cublas|cudnn|cufft|cusolver|cusparse|nccl|nvrtc)[A-Z]|cu[A-Z]")
LEFT_ALONE = re.compile(r"cupti|cuFile")
# Triton looks for it in the driver by itself.
WANTED_BESIDE_TORCH = ("cuTensorMapEncodeTiled",)

# Only what programs call: the rest of this library must not meet another copy of libstdc++.
EXPORTS = "{ global: cu*; __cuda*; nccl*; nvrtc*; stand_in_*; local: *; };\n"


def _site_packages() -> pathlib.Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit("there is no torch in this environment: see tests/cuda_stand_in/requirements.txt")
    return pathlib.Path(found.origin).parents[1]


def _include_flags(site: pathlib.Path) -> list[str]:
    folders = (*site.glob("nvidia/cu[0-9]*/include"), site / "nvidia" / "nccl" / "include")
    if not (folders[0] / "cuda_runtime_api.h").is_file():
        sys.exit(
            f"{folders[0]} holds no headers of CUDA: this is no CUDA build of torch, or the "
            "packages of tests/cuda_stand_in/requirements.txt are missing"
        )
    return [f"-I{folder}" for folder in folders]


def _symbols(library: pathlib.Path, which: str) -> set[str]:
    out = subprocess.run(
        ["nm", "-D", which, str(library)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in out.splitlines() if line}


def _missing(site: pathlib.Path, objects: list[pathlib.Path]) -> list[str]:
    """Names that torch needs and that none of the objects defines."""
    needed = set(WANTED_BESIDE_TORCH)
    for library in sorted((site / "torch" / "lib").glob("*.so")):
        needed |= _symbols(library, "--undefined-only")
    out = subprocess.run(
        ["nm", "--defined-only", *map(str, objects)], check=True, capture_output=True, text=True
    ).stdout
    written = {line.split()[-1] for line in out.splitlines() if len(line.split()) == 3}
    return sorted(
        name
        for name in needed - written
        if PLAYED.match(name) and not LEFT_ALONE.match(name) and not name.startswith("cuda_")
    )


def _answers(names: list[str]) -> str:
    """Assembly: each name hands itself to the function that reports it."""
    lines = ["    .text"]
    for name in names:
        lines += [
            f"    .globl {name}",
            f"    .type {name}, @function",
            f"{name}:",
            f"    leaq text_{name}(%rip), %rdi",
            "    jmp stand_in_is_missing",
        ]
    lines.append("    .section .rodata")
    lines += [f'text_{name}: .string "{name}"' for name in names]
    return "\n".join([*lines, '    .section .note.GNU-stack,"",@progbits', ""])


def _build(folder: pathlib.Path, site: pathlib.Path) -> None:
    includes = _include_flags(site)
    compiler = os.environ.get("CXX", "g++")

    def compile_one(source: pathlib.Path) -> pathlib.Path:
        made = folder / f"{source.stem}.o"
        subprocess.run([compiler, *FLAGS, *includes, "-c", source, "-o", made], check=True)
        return made

    def link(name: str, parts: list[pathlib.Path]) -> None:
        script = f"-Wl,--version-script={folder / 'exports.map'}"
        subprocess.run(
            [
                *(compiler, "-shared", f"-Wl,-soname,{name}", script),
                *map(str, (*parts, "-o", folder / name, "-ldl", "-lrt")),
            ],
            check=True,
        )

    (folder / "exports.map").write_text(EXPORTS)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    nvrtc = [made for made in objects if made.stem == "nvrtc"]
    driver = [made for made in objects if made.stem != "nvrtc"]
    link(NVRTC, nvrtc)
    (folder / "missing.S").write_text(_answers(_missing(site, objects)))
    link(LIBRARY, [*driver, folder / "missing.S"])


def built_library() -> pathlib.Path:
    """Return the library for this environment's torch and these sources, built if need be."""
    site = _site_packages()
    key = hashlib.sha256((site / "torch" / "version.py").read_bytes())
    for source in (*sorted(SOURCES.iterdir()), pathlib.Path(__file__)):
        key.update(source.read_bytes())
    folder = BUILDS / key.hexdigest()[:16]
    if not (folder / LIBRARY).is_file():
        BUILDS.mkdir(exist_ok=True)
        made = pathlib.Path(tempfile.mkdtemp(dir=BUILDS))
        try:
            _build(made, site)
            made.rename(folder)
        except OSError:  # another process was faster
            if not (folder / LIBRARY).is_file():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / LIBRARY

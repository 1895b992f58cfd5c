"""Runs a Python program above the stand-in: ``python above.py -m pytest tests/optim``.

With torch's CUDA build in the environment of this Python, ``cuda`` is then a device like any
other. The library is built when its sources have changed. What can be set: see README.md.
"""

import os
import pathlib
import sys

# As a program, it has its own folder on the path, and not the one that the package is in.
sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from cuda_stand_in import build  # noqa: E402


def environment() -> dict[str, str]:
    """Return what a process above the stand-in finds in its environment."""
    library = build.built_library()
    here = pathlib.Path(__file__).resolve().parent
    tests = here.parent
    folders = (here / "site", tests, tests / "support", tests / "programs", tests.parent)
    paths = [str(folder) for folder in folders]
    wanted = {
        "LD_PRELOAD": f"{library} {library.parent / build.NVRTC}",
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
        # Triton 3.9 warns where nobody has chosen; our kernels choose by themselves.
        "TRITON_DEFAULT_FP_FUSION": "1",
        "CUDA_STAND_IN": str(library),
    }
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, **wanted, "PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    """Become that program."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} PROGRAM.py ... | -m MODULE ... | -c CODE ...")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())


if __name__ == "__main__":
    main()

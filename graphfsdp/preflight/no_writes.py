"""Runs a program so that nothing on disk is changed: what it writes goes to a folder for it alone.

Followed are Python's own ways to files, ``torch.save`` and safetensors. Not followed are other
libraries that write by themselves, in C or Rust, processes that the program starts, and the
network.
"""

import builtins
import contextlib
import functools
import io
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@contextlib.contextmanager
def nothing_written() -> Iterator[None]:
    """Lead what the body writes to a folder that goes when it ends; it reads it back from there.

    Temporary files lie there as well, where also what no Python opens is found: the sockets of
    worker processes, say. Devices are left alone.
    """
    with tempfile.TemporaryDirectory(prefix="graphfsdp_check_") as made:
        scratch = os.path.realpath(made)  # as the working directory is shown
        replaced = _Aside(Path(scratch)).replaced()
        temporary = os.path.join(scratch, "tmp")
        os.mkdir(temporary)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(tempfile, "tempdir", temporary))
            stack.enter_context(mock.patch.dict(os.environ, TMPDIR=temporary))
            # Trees are removed by whole names, which say where they lie.
            stack.enter_context(mock.patch.object(shutil, "_use_fd_functions", False, create=True))
            for owner, name, answer in replaced:
                replacement = functools.partial(answer, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield


class _Aside:
    """Where files lie that the program has written."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        # Its server of worker processes, the default from Python 3.14 on, outlives a check.
        of_processes = Path(multiprocessing.util.get_temp_dir())
        self._free = [Path("/dev"), Path("/proc"), of_processes, scratch]

    def replaced(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return functions whose first arguments may be paths, and what answers in their place."""
        found: list[tuple[Any, str, Callable[..., Any]]] = [
            (builtins, "open", self._open),
            (io, "open", self._open),
            (os, "open", self._open_descriptor),
            (os, "mkdir", self._mkdir),
            (os, "listdir", self._listdir),
            (os, "scandir", self._scandir),
            (os, "chdir", self._chdir),
            (torch, "save", self._save),
            (safetensors.torch, "serialize_file", self._save),
            (safetensors.torch, "safe_open", self._open_tensors),
            (safetensors, "safe_open", self._open_tensors),
        ]
        found += [(os, name, self._ask) for name in ("stat", "lstat", "access", "readlink")]
        changes = ("remove", "unlink", "rmdir", "truncate", "chmod", "utime")
        found += [(os, name, self._change) for name in changes]
        found += [(os, name, self._move) for name in ("rename", "replace")]
        found += [(os, name, self._link) for name in ("symlink", "link")]
        return found

    def _place(self, path: Any) -> Path | None:
        """Return where a path lies aside; None for what is no path, or is left alone."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        named = os.fsdecode(path)
        whole = Path(os.path.abspath(named))
        if whole.is_relative_to(self._scratch) and not os.path.isabs(named):
            return whole  # the program is in a folder that it has made
        if any(whole.is_relative_to(folder) for folder in self._free):
            return None
        return self._scratch / whole.relative_to(whole.anchor)

    def _before(self, path: Any) -> Any:
        """Return where it lies that the program has not written."""
        whole = Path(os.path.abspath(os.fsdecode(path)))
        if not whole.is_relative_to(self._scratch):
            return path
        return Path(whole.anchor) / whole.relative_to(self._scratch)

    def _for_writing(self, path: Any, *, keeps: bool) -> Any:
        """Return where to write; ``keeps``: what was there before is read or added to."""
        place = self._place(path)
        if place is None:
            return path
        os.makedirs(place.parent, exist_ok=True)
        if keeps and not place.exists() and os.path.isfile(self._before(path)):
            shutil.copyfile(self._before(path), place)
        return place

    def _open(self, original: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        # os.open as it is then, which leads it aside; 0o666 is what it would have without.
        kwargs.setdefault("opener", lambda path, flags: os.open(path, flags, 0o666))
        return original(file, *args, **kwargs)

    def _open_descriptor(
        self, original: Any, path: Any, flags: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not flags & _WRITING:
            return original(self._where(path), flags, *args, **kwargs)
        if flags & os.O_EXCL and os.path.exists(path):
            raise FileExistsError(f"File exists: {path!r}")
        writes = self._for_writing(path, keeps=not flags & (os.O_TRUNC | os.O_EXCL))
        return original(writes, flags, *args, **kwargs)

    def _where(self, path: Any) -> Any:
        """Return where to read."""
        place = self._place(path)
        if place is None:
            return path
        return place if os.access(place, os.F_OK) else self._before(path)

    def _ask(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self._where(path), *args, **kwargs)

    def _listdir(self, original: Any, path: Any = ".") -> list[Any]:
        return list(dict.fromkeys(self._listed(original, path)))

    def _scandir(self, original: Any, path: Any = ".") -> "_Entries":
        found = self._listed(original, path)
        return _Entries({entry.name: entry for entry in reversed(found)}.values())

    def _listed(self, original: Any, path: Any) -> list[Any]:
        """List what lies aside in a folder, and what has been there before."""
        aside = self._where(path)
        found = list(original(aside))
        if aside is not path:
            with contextlib.suppress(OSError):  # there has been none
                found += original(self._before(path))
        return found

    def _mkdir(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        place = self._place(path)
        if place is None:
            original(path, *args, **kwargs)
        elif os.path.exists(path):
            raise FileExistsError(f"File exists: {path!r}")
        else:
            os.makedirs(place, exist_ok=True)

    def _save(self, original: Any, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        original(obj, self._for_writing(f, keeps=False), *args, **kwargs)

    def _open_tensors(self, original: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self._where(filename), *args, **kwargs)

    def _chdir(self, original: Any, path: Any) -> None:
        """Go to where the folder was before, if it was there: libraries in C look there as well."""
        place = self._place(path)
        try:
            original(path if place is None else self._before(path))
        except FileNotFoundError:
            if place is None:
                raise
            original(place)

    def _change(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Do it to what lies aside; what has been there before stays as it is."""
        place = self._place(path)
        if place is None or os.path.lexists(place):
            original(path if place is None else place, *args, **kwargs)
        else:
            os.lstat(path)  # as it would, it says of what is not there that it is not

    def _move(self, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        source, target = self._for_writing(src, keeps=True), self._for_writing(dst, keeps=False)
        original(source, target, *args, **kwargs)

    def _link(self, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        original(src, self._for_writing(dst, keeps=False), *args, **kwargs)


class _Entries(contextlib.ExitStack):
    """What os.scandir returns, of two folders."""

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__()
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

"""Reads pieces of a checkpoint into parts of tensors; first all ranks check all that they need."""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from graphfsdp.checkpoint.folder import entries
from graphfsdp.checkpoint.manifest import BLOCK_BYTES, Manifest, SavedPiece, read_manifest
from graphfsdp.checkpoint.members import Members
from graphfsdp.checkpoint.named import Box, NamedPart, Part
from graphfsdp.checkpoint.safetensors_file import map_file, view_bytes
from graphfsdp.checkpoint.values import Json
from graphfsdp.errors import CheckpointDamagedError, CheckpointError

_MAX_NAMED = 20


class CheckpointFiles:
    """The files of a checkpoint, mapped when they are first looked at, and their checksums."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.folder = folder
        self._mapped: dict[str, Tensor | None] = {}
        self._damage: list[str] = []

    def _content(self, name: str) -> Tensor | None:
        """Return a file's bytes, [bytes] uint8; None where it is damaged, which is noted."""
        if name not in self._mapped:
            self._mapped[name] = self._open(name)
        return self._mapped[name]

    def _open(self, name: str) -> Tensor | None:
        expected, path = self.manifest.files[name], self.folder / name
        try:
            size = path.stat().st_size
            if size != expected.num_bytes:
                self._damage.append(f"{name} has {size} bytes, expected {expected.num_bytes}")
                return None
            content = map_file(path)
        except OSError as error:
            self._damage.append(f"{name} cannot be read ({error.strerror or error})")
            return None
        except RuntimeError as error:  # torch's word for a file that it cannot map
            self._damage.append(f"{name} cannot be read ({str(error).splitlines()[0]})")
            return None
        if zlib.crc32(content[: expected.head_bytes].numpy().data) != expected.head_crc32:
            self._damage.append(f"{name}: the checksum of its first bytes differs")
            return None
        return content

    def check(self, key: str, piece: SavedPiece, begin: int = 0, end: int | None = None) -> None:
        """Compare the checksums of the bytes [begin, end) of a piece; note what differs."""
        content = self._content(piece.file)
        if content is None:
            return
        num_bytes = math.prod(piece.sizes) * self.manifest.tensors[key].dtype.itemsize
        for block in range(
            begin // BLOCK_BYTES, -(-(num_bytes if end is None else end) // BLOCK_BYTES)
        ):
            start = piece.start + block * BLOCK_BYTES
            last = min(start + BLOCK_BYTES, piece.start + num_bytes)
            if zlib.crc32(content[start:last].numpy().data) != piece.crc32[block]:
                self._damage.append(
                    f"{key} is damaged in bytes [{start}, {last}) of {piece.file}: "
                    "the checksum differs"
                )

    def check_all(self) -> None:
        for name in self.manifest.files:
            self._content(name)
        for key, saved in self.manifest.tensors.items():
            for piece in saved.pieces:
                self.check(key, piece)
        self.raise_damage()

    def piece(self, key: str, piece: SavedPiece) -> Tensor:
        """Return a piece that was checked, as a view of the mapped file."""
        content = self._content(piece.file)
        assert content is not None
        return view_bytes(content, self.manifest.tensors[key].dtype, piece.sizes, piece.start)

    def objects(self, name: str) -> dict[str, Json]:
        content = self._content(name)
        self.raise_damage()
        assert content is not None
        found: dict[str, Json] = json.loads(content.numpy().tobytes())
        return found

    def raise_damage(self) -> None:
        if not self._damage:
            return
        named = "\n".join(f"  {line}" for line in self._damage[:_MAX_NAMED])
        more = len(self._damage) - _MAX_NAMED
        raise CheckpointDamagedError(
            f"the checkpoint {self.folder} is damaged; nothing was loaded:\n{named}"
            + (f"\n  and {more} more" if more > 0 else "")
            + "\nRemedy: load an earlier one (step=...), or copy this one anew"
        )


def read_parts(parts: Sequence[NamedPart], files: CheckpointFiles, members: Members) -> None:
    """Check, then fill every rank's parts, converting dtypes; after damage no rank fills any."""
    found = _find_reads(parts, files.manifest)
    reads = sorted(found, key=lambda read: (read[1].file, read[1].start))  # as the disk has them

    def check() -> None:
        # Once for each piece: parts of one tensor may lie in the same blocks.
        ranges: dict[tuple[str, int], tuple[str, SavedPiece, int, int]] = {}
        for key, piece, source, _ in reads:
            begin, end = _byte_range(piece, source, files.manifest.tensors[key].dtype.itemsize)
            _, _, low, high = ranges.get((piece.file, piece.start), (key, piece, begin, end))
            ranges[piece.file, piece.start] = (key, piece, min(low, begin), max(high, end))
        for needed in ranges.values():
            files.check(*needed)
        files.raise_damage()

    def fill() -> None:
        for key, piece, source, target in reads:
            target.copy_(files.piece(key, piece)[source])

    members.together(check)
    members.together(fill)


def _find_reads(
    parts: Sequence[NamedPart], manifest: Manifest
) -> Iterator[tuple[str, SavedPiece, Box, Tensor]]:
    """Yield every saved piece that overlaps with a part: which box of it goes into which view."""
    for key, part in parts:
        if part.local.numel():
            for piece in manifest.tensors[key].pieces:
                found = _overlap(piece, part)
                if found is not None:
                    yield key, piece, found[0], part.local.detach()[found[1]]


def _overlap(piece: SavedPiece, part: Part) -> tuple[Box, Box] | None:
    source, target = [], []
    for saved, size, here, length in zip(
        piece.offsets, piece.sizes, part.offsets, part.local.shape, strict=True
    ):
        first, end = max(saved, here), min(saved + size, here + length)
        if first >= end:
            return None
        source.append(slice(first - saved, end - saved))
        target.append(slice(first - here, end - here))
    return tuple(source), tuple(target)


def _byte_range(piece: SavedPiece, read: Box, itemsize: int) -> tuple[int, int]:
    first = last = 0
    for size, place in zip(piece.sizes, read, strict=True):
        first = first * size + place.start
        last = last * size + place.stop - 1
    return first * itemsize, (last + 1) * itemsize


def name_last_good(damaged: Path) -> str:
    """Read as a whole, so that nobody is sent from one damaged checkpoint to the next."""
    known = entries(damaged.parent)
    names = [entry.name for entry in known]
    earlier = known[: names.index(damaged.name)] if damaged.name in names else known
    for entry in reversed(earlier):
        folder = damaged.parent / entry.name
        try:
            CheckpointFiles(folder, read_manifest(folder)).check_all()
        except CheckpointError:
            continue
        which = (
            "The newest one before it is without damage:"
            if entry == earlier[-1]
            else "Of those before it, the newest without damage is"
        )
        return f"{which} step={entry.step} of {damaged.parent}, or the path {folder}"
    what = "None of those before it is without damage" if earlier else "There is none before it"
    return f"{what} in {damaged.parent}"

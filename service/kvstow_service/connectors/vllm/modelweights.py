"""Identifies a model's weights. Engines share KV only if they have the same weights.

Files in the cache of the Hugging Face Hub are identified by their path below the snapshot and by the names of their
blobs, which are digests of their content. A commit alone does not identify weights, because a repository may hold
several models. Other files are identified on their node by names, sizes, times and inodes, and in the fleet by a digest
of their settings and of samples of their content."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvstow.tier.fingerprint import named_weights
from kvstow_service.connectors.engine_core.vllmprocess import InSnapshot, blob_of, in_snapshot

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".index.json")
"""The suffixes of weight files."""
_SETTINGS = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
SAMPLE_BYTES = 64 << 10
"""The size of a sample, in bytes."""
_MOST, _FEWEST, _OF_ALL_FILES = 32, 4, 512
"""How many samples are read of one file at most, of one file at least, and of all files together. The same number is
read of tensors."""
_MAX_HEADER = 100_000_000
"""The longest header that the safetensors format allows, in bytes."""


class _Span(NamedTuple):
    start: int
    end: int


def digest_of_weights(path: Path) -> str | None:
    """A digest of a model's weights; None if there are no weight files. `path`: the model's folder, or its single file.
    Raises `OSError`.

    The digest covers names, sizes, settings and the headers of safetensors files in full. It covers the other bytes by
    samples of 64 KiB, at places that depend on the sizes alone. The places are evenly spread from a file's start to its
    end. As many tensors are sampled: the first at its start, the last at its end, and the others in between. At most 4
    MiB of a file are read, and at most 64 MiB of 128 files together. With more files, 512 KiB of each are read.
    """
    files = weight_files(path)
    if files is None:
        return None
    digest, most = hashlib.sha256(), _samples_of(files)
    for file in files:
        digest.update(_digest_of_content(file, "" if file == path else file.name, most))
    return digest.hexdigest()[:40]


def weight_files(path: Path) -> list[Path] | None:
    """The files from which vLLM reads weights, and the files of settings beside them, in order. `path`: the model's
    folder, or its file, which may be one of several parts, or have a projector beside it. None if there are no weights.
    Raises `OSError`."""
    if path.is_file():
        part = _PART.fullmatch(path.name)
        parts = [] if part is None else path.parent.glob(f"{glob.escape(part[1])}-*-of-{part[2]}{part[3]}")
        beside = path.parent.glob("*mmproj*.gguf") if path.suffix == ".gguf" else ()
        return sorted({path, *parts, *beside})
    files = [file for file in sorted(path.iterdir()) if file.name.endswith((*WEIGHTS, *_SETTINGS)) and file.is_file()]
    return files if any(file.name.endswith(WEIGHTS) for file in files) else None


_PART = re.compile(r"(.*)-[0-9]+-of-([0-9]+)(\.[a-z]+)")
"""The name of one part of a model that is split into several files."""


def _samples_of(files: Sequence[Path]) -> int:
    """How many samples are read of each file."""
    return min(_MOST, max(_FEWEST, _OF_ALL_FILES // sum(file.name.endswith(WEIGHTS) for file in files)))


def _digest_of_content(file: Path, name: str, most: int) -> bytes:
    """A digest of a file's content. Settings are read in full, and weights by samples."""
    if file.name.endswith(WEIGHTS):
        return _digest_of_file(file, name, most)
    settings = file.read_bytes()
    return f"{name} {len(settings)}\n".encode() + hashlib.sha256(settings).digest()


def _digest_of_file(path: Path, name: str, most: int) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(f"{name} {size}\n".encode())
        tensors: list[_Span] = []
        if path.name.endswith(".safetensors"):
            header = _header(file, size)
            digest.update(header)
            tensors = _tensors(header, size)
        for start, end in _merged([*_spread([_Span(0, size)] * most), *_spread(_chosen(tensors, most))]):
            file.seek(start)
            digest.update(file.read(end - start))
    return digest.digest()


def _header(file: BinaryIO, size: int) -> bytes:
    """The header of a safetensors file, which lists its tensors and their places. Empty for other files."""
    length = int.from_bytes(file.read(8), "little")
    return file.read(length) if 0 < length <= min(size, _MAX_HEADER) else b""


def _tensors(header: bytes, size: int) -> list[_Span]:
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        first = 8 + len(header)
        spans = [_Span(*(first + int(offset) for offset in entry["data_offsets"])) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return sorted(span for span in spans if first <= span.start < span.end <= size)


def _chosen(spans: Sequence[_Span], most: int) -> list[_Span]:
    if len(spans) <= most:
        return list(spans)
    return [spans[number * (len(spans) - 1) // (most - 1)] for number in range(most)]


def _spread(spans: Sequence[_Span]) -> Iterator[_Span]:
    """One sample per span: at the start of the first span, at the end of the last, and in between for the others."""
    for number, span in enumerate(spans):
        room = max(0, span.end - span.start - SAMPLE_BYTES)
        start = span.start + room * number // max(1, len(spans) - 1)
        yield _Span(start, min(span.end, start + SAMPLE_BYTES))


def _merged(spans: Sequence[_Span]) -> list[_Span]:
    """The spans in order, with no byte twice."""
    found: list[_Span] = []
    top = 0
    for span in sorted(spans):
        if span.end > top:
            found.append(_Span(max(span.start, top), span.end))
            top = span.end
    return found


FindSnapshot = Callable[[str, str | None], Path | None]
"""Finds the files of a repository, at a revision, in the local cache of the Hugging Face Hub."""


class Weights(NamedTuple):
    """The weights of a model. `weights_id` is empty if nothing identifies them. `source`: `configured`, `snapshot`,
    `files` or `unknown`. `path`: where they are, if the source is `files`. `commit`: the commit of the snapshot in
    which they are, if they are in one. `spelled`: the name of the model as the user has given it, with no links
    followed."""

    model: str
    weights_id: str
    source: str
    path: Path | None = None
    commit: str = ""
    spelled: str = ""

    def fleet_id(self) -> str:
        """The name of the weights on every node; empty if there is none. Reads samples of `files`
        (`digest_of_weights`), and raises `OSError`."""
        match self.source:
            case "configured":
                return named_weights(self.weights_id, self.spelled or self.model).weights_id
            case "snapshot":
                return f"snapshot {self.weights_id}"
            case "files":
                assert self.path is not None
                digest = digest_of_weights(self.path)
                return f"files {digest}" if digest else ""
        return ""


def place_of_weights(model: str, revision: str | None, find_snapshot: FindSnapshot) -> Path | None:
    """Where the weights of a model are: its folder, with all links followed, or its file. `model`: a path, or a
    repository of the Hugging Face Hub. None if they are not on this node."""
    path = Path(model)
    place = path if path.exists() else find_snapshot(model, revision)
    if place is None:
        return None
    return place.parent.resolve() / place.name if place.is_file() else place.resolve()


def identify_weights(model: str, revision: str | None, configured: str | None, find_snapshot: FindSnapshot) -> Weights:
    """Identify the weights of a model. `model`: a path, or a repository of the Hugging Face Hub. Files that are in no
    snapshot are identified by name, size, times and inode, without reading them. Raises `OSError`."""
    place = place_of_weights(model, revision, find_snapshot)
    snapshot = None if place is None else in_snapshot(place)
    if snapshot is not None:
        name = spelled = "/".join(filter(None, (snapshot.repository, snapshot.path)))
    else:
        name, spelled = str(place or model), model
    commit = "" if snapshot is None else snapshot.commit
    if configured:
        return Weights(name, configured, "configured", commit=commit, spelled=spelled)
    files = None if place is None else weight_files(place)
    if place is None or not files:
        return Weights(name, "", "unknown", commit=commit)
    if snapshot is not None:
        return Weights(name, _digest_in_snapshot(files, snapshot), "snapshot", commit=commit)
    return Weights(name, _digest_of_times(files), "files", place)


def _digest_in_snapshot(files: Sequence[Path], snapshot: InSnapshot) -> str:
    """A digest of the files of a snapshot. A real file, which was copied or written there, has no blob that names its
    content, so its content is read."""
    digest, most = hashlib.sha256(), _samples_of(files)
    for file in files:
        name, blob = file.relative_to(snapshot.snapshot).as_posix(), blob_of(file)
        digest.update(f"{name} blob {blob}\n".encode() if blob else _digest_of_content(file, name, most))
    return digest.hexdigest()[:40]


def _digest_of_times(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        # Any program can set the first time; some network file systems do not keep the second.
        times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        digest.update(f"{file.name} {stat.st_size} {times} {stat.st_ino}\n".encode())
    return digest.hexdigest()[:40]

"""What identifies a model's weights. Engines share KV only if they have the same weights.

A digest that is the same on every node covers the configuration and samples of the files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvstow.tier.fingerprint import named_weights
from kvstow_service.connectors.engine_core.vllmprocess import commit_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".index.json")
"""The suffixes of weight files."""
_SETTINGS = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
SAMPLE_BYTES = 64 << 10
_MOST, _FEWEST, _OF_ALL_FILES = 32, 4, 512
_MAX_HEADER = 100_000_000
"""The limit of the safetensors format."""


class _Span(NamedTuple):
    start: int
    end: int


def digest_of_weights(path: Path) -> str | None:
    """`path`: the model's folder, or its single file. None without weight files. Raises `OSError`.

    The digest covers names, sizes, settings and the headers of safetensors files in full. It covers the other bytes by
    samples of 64 KiB, at places that depend on the sizes alone. The places are evenly spread from a file's start to its
    end. As many tensors are sampled: the first at its start, the last at its end, and the others in between. At most 4
    MiB of a file are read, and at most 64 MiB of 128 files together; with more files, 512 KiB of each.
    """
    files = [path] if path.is_file() else sorted(path.iterdir())
    weights = [file for file in files if file.name.endswith(WEIGHTS) and file.is_file()]
    if not weights:
        return None
    digest = hashlib.sha256()
    most = min(_MOST, max(_FEWEST, _OF_ALL_FILES // len(weights)))
    for file in files:
        if file in weights:
            name = "" if file == path else file.name
            digest.update(_digest_of_file(file, name, most))
        elif file.name in _SETTINGS:
            settings = file.read_bytes()
            digest.update(f"{file.name} {len(settings)}\n".encode() + hashlib.sha256(settings).digest())
    return digest.hexdigest()[:40]


def digested_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.iterdir() if file.name.endswith((*WEIGHTS, *_SETTINGS))]


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
    """The header of a safetensors file: what the file holds and where. Empty for other files."""
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
    """`weights_id` is empty if nothing identifies them. `source`: `configured`, `snapshot`, `files` or `unknown`.
    `path`: where the `files` are."""

    model: str
    weights_id: str
    source: str
    path: Path | None = None

    def fleet_id(self) -> str:
        """The name of the weights on every node; empty if there is none. Reads samples of `files`
        (`digest_of_weights`), and raises `OSError`."""
        match self.source:
            case "configured":
                return named_weights(self.weights_id, self.model).weights_id
            case "snapshot":
                return f"commit {self.weights_id}"
            case "files":
                assert self.path is not None
                digest = digest_of_weights(self.path)
                return f"files {digest}" if digest else ""
        return ""

    def changed_after(self, moment: float) -> bool:
        """Whether one of the `files` has changed after `moment`, in seconds since the epoch. Raises `OSError`."""
        return self.path is not None and any(file.stat().st_ctime > moment for file in digested_files(self.path))


def identify_weights(model: str, revision: str | None, configured: str | None, find_snapshot: FindSnapshot) -> Weights:
    """`model`: a path, or a repository of the Hugging Face Hub. Reads no weights: files are identified by name, size,
    times and inode."""
    path = Path(model)
    place = path if path.exists() else find_snapshot(model, revision)
    snapshot = None if place is None else commit_of(place)
    name = model if snapshot is None else snapshot[0]
    if configured:
        return Weights(name, configured, "configured")
    if snapshot is not None:
        return Weights(name, snapshot[1], "snapshot")
    if path.exists() and (digest := _digest_of_files(path)) is not None:
        return Weights(name, digest, "files", path)
    return Weights(name, "", "unknown")


def _digest_of_files(path: Path) -> str | None:
    """Returns None without weight files."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    weights = [file for file in files if file.name.endswith(WEIGHTS)]
    if not weights:
        return None
    digest = hashlib.sha256()
    for file in files:
        if file in weights or file.name == "config.json":
            stat = file.stat()
            # Any program can set the first time; some network file systems do not keep the second.
            times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
            digest.update(f"{file.name} {stat.st_size} {times} {stat.st_ino}\n".encode())
    return digest.hexdigest()[:40]

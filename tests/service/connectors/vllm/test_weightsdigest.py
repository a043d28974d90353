"""The digest is that of the weights, wherever they lie, and whatever is changed in what it reads changes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvstow_service.connectors.vllm import modelweights
from kvstow_service.connectors.vllm.modelweights import SAMPLE_BYTES, digest_of_weights

TENSORS = 40
TENSOR_BYTES = 3 * SAMPLE_BYTES


def write_safetensors(path: Path, tensors: int = TENSORS, tensor_bytes: int = TENSOR_BYTES) -> None:
    header = {
        f"layer.{number}": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [number * tensor_bytes, (number + 1) * tensor_bytes],
        }
        for number in range(tensors)
    }
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for number in range(tensors):
            file.write(bytes([number + 1]) * tensor_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"layers": 40}')
    (made / "README.md").write_text("a model")
    write_safetensors(made / "model.safetensors")
    return made


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 255]))


def places_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the digest reads of a file, as (start, end)."""
    found: list[tuple[int, int]] = []
    make = Path.open

    class Reader:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def read(self, size: int) -> bytes:
            start = self._file.tell()
            data: bytes = self._file.read(size)
            found.append((start, start + len(data)))
            return data

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def opened(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        file = make(self, mode, *rest, **more)
        return Reader(file) if self == path else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        digest_of_weights(path)
    return sorted(found)


def test_the_same_model_elsewhere_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    """With other times and inodes."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    for file in copy.iterdir():
        os.utime(file, ns=(10**18, 10**18))
        assert file.stat().st_ino != (folder / file.name).stat().st_ino
    (copy / "README.md").write_text("a copy")
    assert digest_of_weights(copy) == digest_of_weights(folder) is not None


def add_file(folder: Path) -> None:
    write_safetensors(folder / "more.safetensors", 1)


def rename_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layer.7", b"layer.x", 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"layers": 41}'),
        lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        add_file,
        rename_tensor,
    ],
    ids=["config", "quantization", "name", "file", "header"],
)
def test_what_is_not_sampled_counts_as_a_whole(folder: Path, change: Callable[[Path], object]) -> None:
    before = digest_of_weights(folder)
    change(folder)
    assert digest_of_weights(folder) != before


def test_every_byte_that_is_read_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    read = places_read(path, monkeypatch)
    digests = {digest_of_weights(folder)}
    for start, end in read:
        for at in (start, (start + end) // 2, end - 1):
            if at >= 8:  # the header's length
                flip(path, at)
                digests.add(digest_of_weights(folder))
                flip(path, at)
    assert len(digests) >= 3 * len(read) - 5


def test_samples_lie_at_the_start_at_the_end_and_in_most_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    read, first = places_read(path, monkeypatch), data_start(path)
    assert read[0][0] == 0
    assert max(end for _, end in read) == path.stat().st_size
    assert sum(end - start for start, end in read) <= 64 * SAMPLE_BYTES + first
    touched = {(at - first) // TENSOR_BYTES for start, end in read for at in range(max(start, first), end, 4096)}
    assert len(touched) >= 32


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.gguf"])
def test_other_formats_count_by_samples_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(100 * SAMPLE_BYTES))
    read = places_read(path, monkeypatch)
    assert (read[0][0], read[-1][1]) == (0, path.stat().st_size)
    assert len(read) == 32
    assert max(later - earlier for (_, earlier), (later, _) in pairwise(read)) < 4 * SAMPLE_BYTES
    digests = {digest_of_weights(path), digest_of_weights(tmp_path)}
    for at in (0, path.stat().st_size - 1, read[16][0]):
        flip(path, at)
        digests.add(digest_of_weights(path))
    assert len(digests) == 5


def test_small_files_are_read_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(32 * SAMPLE_BYTES - 5))
    read = places_read(path, monkeypatch)
    assert [start for start, _ in read] == [0, *(end for _, end in read[:-1])]
    assert read[-1][1] == path.stat().st_size


def test_less_of_each_file_is_read_if_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the whole is bounded."""
    monkeypatch.setattr(modelweights, "SAMPLE_BYTES", 8)
    for number in range(200):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1000))
    before = digest_of_weights(tmp_path)
    flip(tmp_path / "7.bin", 8)  # between the first two of four samples
    assert digest_of_weights(tmp_path) == before
    flip(tmp_path / "7.bin", 999)
    assert digest_of_weights(tmp_path) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (9).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[17]",
        (17).to_bytes(8, "little") + b'{"a":{"data_o":3}}'[:17],
        (35).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,999999999]}}'[:35],
        (28).to_bytes(8, "little") + b'{"a":{"data_offsets":"zwei"}}'[:28],
    ],
)
def test_what_only_looks_like_safetensors_has_a_digest_too(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    before = digest_of_weights(tmp_path)
    assert before is not None
    (tmp_path / "model.safetensors").write_bytes(content + b"x")
    assert digest_of_weights(tmp_path) != before


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert digest_of_weights(tmp_path) is None

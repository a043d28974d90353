"""One rank's KV cache: a forward's reads, checked, and its writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tests.vllm.harness.sequence import Words, values
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig
from vllm.v1.worker.utils import allocate_kv_cache


class Layer(NamedTuple):
    """`words[block, token]` are its values, each once or several times; `window` is the number of tokens it reads.
    `replays`: where a hit ends, vLLM computes its last window anew, and that of no other layer."""

    name: str
    group: int
    block_tokens: int
    window: int | None
    replays: int
    words: npt.NDArray[np.uint64]


class KVCache:
    """The tensors as vLLM's model runner makes them, all groups in the same memory."""

    def __init__(self, rank: int, config: VllmConfig, geometry: KVCacheConfig) -> None:
        layout = config.cache_config.get_resolved_kv_cache_layout()
        self.rank = rank
        self.weights = 0
        """Which weights compute the values: what others have computed is wrong."""
        self.tensors: dict[str, torch.Tensor] = allocate_kv_cache(geometry, torch.device("cpu"), layout)
        self.layers = [
            Layer(
                name,
                number,
                group.kv_cache_spec.block_size,
                getattr(group.kv_cache_spec, "sliding_window", None),
                group.kv_cache_spec.prefix_replay_tokens,
                self.tensors[name].view(torch.uint64)[:, 0].numpy(),
            )
            for number, group in enumerate(geometry.kv_cache_groups)
            for name in group.layer_names
            if not isinstance(group.kv_cache_spec, CircularBufferSpec)  # it has no place for each token
        ]

    def check(
        self, tables: Sequence[Sequence[int]], digests: Words, start: int, replay_start: int
    ) -> tuple[int, list[str]]:
        """Read all that the token at `start` attends to: (number of values, what was wrong). `replay_start`: where the
        layers that replay begin; 0 without a replay."""
        wrong: list[str] = []
        count = 0
        for layer in self.layers:
            first = 0 if layer.window is None else max(0, start - layer.window + 1)
            if layer.replays:
                first = max(first, replay_start)
            blocks, offsets = self._places(layer, tables, first, start)
            expected = values(digests[first:start], self._name(layer))
            count += start - first
            bad = np.flatnonzero((layer.words[blocks, offsets] != expected[:, None]).any(axis=1))
            if bad.size:
                where = f"positions {first + bad[0]} to {first + bad[-1]} ({bad.size}) of {start}"
                wrong.append(f"rank {self.rank}, {layer.name}: {where}, blocks {sorted(set(blocks[bad].tolist()))}")
        return count, wrong

    def write(self, tables: Sequence[Sequence[int]], digests: Words, start: int, replay_start: int) -> None:
        """Store the values of the tokens from `start` on. What is replayed leaves the other layers as they are."""
        end, replayed = start + len(digests), max(layer.replays for layer in self.layers)
        for layer in self.layers:
            first = start if layer.replays or not replay_start else max(start, min(end, replay_start + replayed))
            blocks, offsets = self._places(layer, tables, first, end)
            layer.words[blocks, offsets] = values(digests[first - start :], self._name(layer))[:, None]

    def _name(self, layer: Layer) -> str:
        return f"rank {self.rank}, {layer.name}, weights {self.weights}"

    @staticmethod
    def _places(
        layer: Layer, tables: Sequence[Sequence[int]], first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(first, end)
        table = np.array(tables[layer.group], dtype=np.int64)
        return table[positions // layer.block_tokens], positions % layer.block_tokens

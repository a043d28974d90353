"""Random lives of adapters: files change, engines come and go, ranks load and reload. No request is ever served what
another version has computed, and each mutant, which takes one protection out, is found out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow_service.connectors.engine_core import adapters as module
from kvstow_service.connectors.engine_core.adapters import Adapter, AdapterFiles, Adapters

PATHS, NUMBERS, BLOCKS = 2, 2, 3


class Disk:
    """The files of all adapters. `now` is the time of the last change, and the only clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 1
        self._changed: dict[str, int] = {}
        self.paths = [str(folder / str(number)) for number in range(PATHS)]
        for path in self.paths:
            Path(path).mkdir(parents=True, exist_ok=True)
            self.write(path)

    def write(self, path: str) -> None:
        self.now += 1
        self._changed[path] = self.now
        (Path(path) / "adapter_model.safetensors").write_text(f"{self.now}")

    def version(self, path: str) -> str:
        return (Path(path) / "adapter_model.safetensors").read_text()

    def stat(self, file: Path) -> tuple[int, ...] | None:
        return (1, 0, 0, 0, self._changed[str(file.parent)] * 10**9) if file.exists() else None


class Running(NamedTuple):
    """A request. `blocks`: the version that has computed each block that was not offered yet."""

    adapter: Adapter
    path: str
    number: int
    blocks: dict[bytes, str]
    left: list[bytes]


@dataclass
class Engine:
    """`loaded`: the version that its ranks have loaded, by number."""

    adapters: Adapters
    loaded: dict[int, str] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)


class World:
    def __init__(self, folder: Path, seed: int) -> None:
        self._random, self._disk = random.Random(seed), Disk(folder)
        self._pool: dict[bytes, str] = {}  # the version that has computed a block, by its key
        self._engines = [self._start()]
        self.hits = 0

    @property
    def disk(self) -> Disk:
        return self._disk

    def step(self) -> None:
        move = self._random.choices(
            [self._write, self._restart, self._load, self._ask, self._store, self._evict, self._reload],
            [2, 2, 3, 12, 8, 1, 1],
        )[0]
        move(self._random.choice(self._engines))

    def _start(self) -> Engine:
        self._disk.now += 1
        return Engine(Adapters("{}", self._disk.now, clock=FakeClock(), start_thread=lambda target: target()))

    def _write(self, engine: Engine) -> None:
        self._disk.write(self._random.choice(self._disk.paths))

    def _restart(self, engine: Engine) -> None:
        if len(self._engines) > 1:
            self._engines.remove(engine)
        self._engines.append(self._start())

    def _load(self, engine: Engine) -> None:
        """An operator's request: the scheduler learns nothing of it."""
        number = self._random.randrange(NUMBERS)
        engine.loaded.setdefault(number, self._disk.version(self._disk.paths[number]))

    def _evict(self, engine: Engine) -> None:
        """Ranks keep a limited number of adapters, and load others again."""
        engine.loaded.pop(self._random.randrange(NUMBERS), None)

    def _ask(self, engine: Engine) -> None:
        number = self._random.randrange(NUMBERS)
        self._run(engine, number, self._disk.paths[number])

    def _reload(self, engine: Engine) -> None:
        """A request with `load_inplace`, maybe from another path."""
        number = self._random.randrange(NUMBERS)
        path = self._random.choice(self._disk.paths)
        engine.loaded.pop(number, None)
        self._run(engine, number, path)

    def _run(self, engine: Engine, number: int, path: str) -> None:
        lora = SimpleNamespace(lora_int_id=number, lora_path=path)
        adapter = engine.adapters.of(SimpleNamespace(lora_request=lora))
        assert adapter is not None
        version = engine.loaded.setdefault(number, self._disk.version(path))
        if adapter.check():
            for each in _hashes(path):
                if (found := self._pool.get(adapter.mix(each))) is not None:
                    self.hits += 1
                    assert found == version, "a request is served what another version has computed"
        first, *left = _hashes(path)
        engine.running.append(Running(adapter, path, number, {first: version}, left))

    def _store(self, engine: Engine) -> None:
        """A step: what older ones have computed is stored, and each request computes a block."""
        engine.adapters.move_on()
        for adapter, path, number, blocks, left in engine.running:
            if adapter.check():
                for each, version in blocks.items():
                    assert self._pool.setdefault(adapter.mix(each), version) == version, "a key has two meanings"
            blocks.clear()
            if left:
                blocks[left.pop(0)] = engine.loaded.setdefault(number, self._disk.version(path))
        engine.running = [request for request in engine.running if request.blocks]
        engine.adapters.move_on()


def _hashes(path: str) -> list[bytes]:
    """vLLM's, which cover the adapter's path."""
    return [f"{path[-1]}-{number}".encode() for number in range(BLOCKS)]


def run(folder: Path, seed: int, patch: pytest.MonkeyPatch, steps: int = 60) -> int:
    world = World(folder / str(seed), seed)
    patch.setattr(module, "_stat", world.disk.stat)
    for _ in range(steps):
        world.step()
    return world.hits


def test_no_request_is_served_what_another_version_has_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = [run(tmp_path, seed, monkeypatch) for seed in range(100)]
    assert sum(map(bool, hits)) > 20


def keys_do_not_name_the_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapter, "mix", lambda adapter, block_hash: block_hash)


def files_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterFiles, "stats", lambda files: ())


def files_are_compared_only_when_a_request_comes(patch: pytest.MonkeyPatch) -> None:
    def check(adapter: Adapter, original: Callable[..., bool] = Adapter.check, *, now: bool = False) -> bool:
        return original(adapter, now=True) if now or not adapter.salt else adapter.is_named

    patch.setattr(Adapter, "check", check)


def files_may_be_newer_than_the_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterFiles, "changed_after", lambda files, moment, stats: False)


def numbers_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapters, "_refuse_both", lambda adapters, lora: None)


def a_changed_adapter_is_read_again(patch: pytest.MonkeyPatch) -> None:
    of = Adapters.of

    def again(adapters: Adapters, request: Any) -> Adapter | None:
        found = of(adapters, request)
        if found is not None and "have changed since this engine has used it" in found.reason:
            del adapters._adapters[found.path]
            adapters._started = float("inf")
            return of(adapters, request)
        return found

    patch.setattr(Adapters, "of", again)


@pytest.mark.parametrize(
    "mutant",
    [
        a_changed_adapter_is_read_again,
        files_are_compared_only_when_a_request_comes,
        files_are_not_compared,
        files_may_be_newer_than_the_engine,
        keys_do_not_name_the_adapter,
        numbers_are_not_compared,
    ],
)
def test_adapters_without_one_of_their_protections_are_found_out(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)

    def is_found(seed: int) -> bool:
        try:
            run(tmp_path, seed, monkeypatch)
        except AssertionError:
            return True
        return False

    assert any(is_found(seed) for seed in range(200))

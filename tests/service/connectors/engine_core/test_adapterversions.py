"""Random lives of adapters: files change, engines come and go, ranks load and reload. No request is ever served what
another version has computed, and each mutant, which takes one protection out, is found out."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.doubles.fakes import FakeClock

from kvstow_service.connectors.engine_core.adapters import Adapter, Adapters, EngineStart

PATHS, NUMBERS, BLOCKS = 2, 2, 3

real_lstat = os.lstat


class Disk:
    """The files of all adapters. `now` is the time of the last change, and the only clock. The first path is a folder,
    which may be exchanged for another one; the second one is a link, which may be switched."""

    def __init__(self, folder: Path) -> None:
        self.now = 1
        self._folder = folder
        self._times: dict[int, tuple[int, int]] = {}  # of the last write and of the last change, by inode
        self.paths = [str(folder / str(number)) for number in range(PATHS)]
        for name in ("0", "0-other", "1-a", "1-b"):
            (folder / name).mkdir(parents=True)
            self.write(str(folder / name))
        (folder / "1").symlink_to("1-a")

    def write(self, path: str) -> None:
        self._touch(Path(path) / "adapter_model.safetensors", f"{self.now + 1}")

    def switch(self) -> None:
        link, other = self._folder / "1", {"1-a": "1-b", "1-b": "1-a"}
        target = other[os.readlink(link)]
        link.unlink()
        link.symlink_to(target)
        self._note(link)

    def exchange(self, *, marks: bool) -> None:
        """`marks`: a new entry hides that the folder was renamed."""
        place, other, between = self._folder / "0", self._folder / "0-other", self._folder / "between"
        for old, new in ((place, between), (other, place), (between, other)):
            old.rename(new)
            self._note(new, written=False)
        if marks:
            self._touch(place / f"mark {self.now}", "")
            self._note(place)

    def version(self, path: str) -> str:
        return (Path(path) / "adapter_model.safetensors").read_text()

    def lstat(self, place: str | Path) -> Any:
        found = real_lstat(place)
        written, changed = self._times.get(found.st_ino, (0, 0))
        kept = {name: getattr(found, name) for name in ("st_mode", "st_dev", "st_ino", "st_size")}
        return SimpleNamespace(**kept, st_mtime_ns=written * 10**9, st_ctime_ns=changed * 10**9)

    def _touch(self, file: Path, content: str) -> None:
        file.write_text(content)
        self._note(file)

    def _note(self, place: Path, *, written: bool = True) -> None:
        self.now += 1
        inode = real_lstat(place).st_ino
        before, _ = self._times.get(inode, (0, 0))
        self._times[inode] = (self.now if written else before, self.now)


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
        self._random, self._disk, self._folder = random.Random(seed), Disk(folder), folder
        self._pool: dict[bytes, str] = {}  # the version that has computed a block, by its key
        self._engines = [self._start()]
        self.hits = 0

    @property
    def disk(self) -> Disk:
        return self._disk

    def step(self) -> None:
        move = self._random.choices(
            [
                *(self._write, self._switch, self._exchange, self._restart),
                *(self._load, self._ask, self._store, self._evict, self._reload),
            ],
            [1, 1, 1, 2, 3, 12, 8, 1, 1],
        )[0]
        move(self._random.choice(self._engines))

    def _start(self) -> Engine:
        self._disk.now += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "lstat", self._disk.lstat)
            start = EngineStart.now(self._disk.now, [self._folder])
        return Engine(Adapters("{}", start, clock=FakeClock(), start_thread=lambda target: target()))

    def _write(self, engine: Engine) -> None:
        self._disk.write(self._random.choice(self._disk.paths))

    def _switch(self, engine: Engine) -> None:
        self._disk.switch()

    def _exchange(self, engine: Engine) -> None:
        self._disk.exchange(marks=self._random.random() < 0.5)

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
    shutil.rmtree(folder / str(seed), ignore_errors=True)
    world = World(folder / str(seed), seed)
    patch.setattr(os, "lstat", world.disk.lstat)
    for _ in range(steps):
        world.step()
    return world.hits


def test_no_request_is_served_what_another_version_has_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = [run(tmp_path, seed, monkeypatch) for seed in range(100)]
    assert sum(map(bool, hits)) > 20

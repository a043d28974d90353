"""LoRA adapters: what their files say, so that a key names the adapter that has computed a block.

vLLM's block hash covers the name and the path of an adapter, and what lies at the path may change. The key of a block
therefore covers a digest of the adapter's files. A rank may have loaded an adapter long before its first request, so
the digest counts only if the files are older than the engine, and as long as they do not change. Otherwise nobody
knows which version computes, and the requests of the adapter use no host cache until the engine ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvstow_service.connectors.engine_core import vllmprocess

logger = logging.getLogger("kvstow.vllm")

FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_model.pt",
)
"""All files of an adapter that vLLM reads."""
MOST_BYTES = 4 << 30
"""The largest adapter that is read. Reading takes 1.3 s per GiB, on a thread of its own."""
READ_SECONDS = 5.0
"""How long a request waits for the digest of its adapter. After that it is computed."""

Stat = tuple[int, ...] | None
"""What changes if a file does; None if there is no such file."""


class AdapterFiles(NamedTuple):
    """What names an adapter: `files`, which are read, and `reference`, which says which revision of a repository of the
    Hub they are. `is_commit`: the files are the snapshot of a commit, which never changes."""

    files: tuple[Path, ...]
    reference: Path | None = None
    is_commit: bool = False

    @classmethod
    def of(cls, path: str) -> AdapterFiles | None:
        """Where vLLM finds the adapter; None if it is not on this node, or not yet."""
        folder, reference = Path(os.path.expanduser(path)), None
        if not folder.is_absolute() and not folder.exists():
            found = vllmprocess.find_snapshot(path, None)
            if found is None:
                return None
            folder, reference = found, vllmprocess.reference_of(path, None)
        if not folder.is_dir():
            return None
        is_commit = vllmprocess.commit_of(folder) is not None
        return cls(tuple([folder.absolute() / name for name in FILES]), reference, is_commit)

    def stats(self) -> tuple[Stat, ...]:
        """Those of the files, and then that of the reference, if there is one: 4 calls of `stat`, or 5."""
        watched = self.files if self.reference is None else (*self.files, self.reference)
        return tuple([_stat(file) for file in watched])

    def changed_after(self, moment: float, stats: tuple[Stat, ...]) -> bool:
        """Whether what lies here may be another version than at that moment, in seconds since the epoch."""
        mutable = stats[len(self.files) :] if self.is_commit else stats
        return any(stat is not None and stat[-1] > moment * 1e9 for stat in mutable)

    def digest(self) -> bytes:
        """Covers every byte of the files. Raises `OSError`."""
        digest = hashlib.blake2b(digest_size=32)
        for file in self.files:
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                continue
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb", buffering=0) as opened:
                hashlib.file_digest(opened, lambda: digest)
        return digest.digest()


class Adapter:
    """One adapter of an engine, at one path. Everything but `read` is for the scheduler's thread.

    `salt` is empty until the digest is known. `reason`: why its requests use no host cache, as a sentence. `stats`:
    those of its files when the engine used it first.
    """

    def __init__(self, path: str, files: AdapterFiles | None, settings: str, moment: list[int], began: float) -> None:
        """`settings`: what decides, besides the files, how the adapter is applied. `moment`: see `Adapters`. `began`:
        when the engine has used it first."""
        self.path, self.salt, self.reason, self.began = path, b"", "", began
        self.stats = files.stats() if files is not None else ()
        self._files, self._settings = files, settings
        self._moment, self._checked = moment, -1
        self._digest: bytes | OSError | None = None  # the thread's result

    @property
    def is_named(self) -> bool:
        """Whether its blocks have keys."""
        return bool(self.salt) and not self.reason

    def mix(self, block_hash: bytes) -> bytes:
        """What stands for this hash of vLLM's in a key: as many bytes."""
        return hashlib.blake2b(block_hash, key=self.salt, digest_size=len(block_hash)).digest()

    def check(self, *, now: bool = False) -> bool:
        """Take the digest if it is known by now, and compare the files: `now`, or once between two calls of
        `Adapters.move_on`. Returns `is_named`."""
        if self.reason or self._files is None or (self._checked == self._moment[0] and not now and self.salt):
            return self.is_named
        self._checked = self._moment[0]
        if self._files.stats() != self.stats:
            self.refuse("its files have changed since this engine has used it first")
        elif isinstance(self._digest, OSError):
            self.refuse(f"its files cannot be read ({self._digest})")
        elif self._digest is not None and not self.salt:
            self.salt = hashlib.blake2b(self._digest + self._settings.encode(), digest_size=32).digest()
        return self.is_named

    def refuse(self, reason: str) -> None:
        """Use no host cache for its requests from now on."""
        if not self.reason:
            self.reason = reason
            logger.warning("requests of the LoRA adapter at %s use no host cache: %s", self.path, reason)

    def read(self) -> None:
        """Find the digest. For a thread of its own; `check` takes the result."""
        assert self._files is not None
        try:
            self._digest = self._files.digest()
        except OSError as error:
            self._digest = error


class Adapters:
    """The adapters of an engine. Used by the scheduler's thread; another one reads files."""

    def __init__(
        self,
        settings: str,
        started: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        start_thread: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`settings`: those of LoRA that decide how an adapter is applied. `started`: a moment before this engine has
        loaded any adapter, in seconds since the epoch."""
        self._settings, self._started, self._clock = settings, started, clock
        self._start_thread = start_thread or _start_thread
        self._moment = [0]  # shared with the adapters: see `move_on`
        self._adapters: dict[str, Adapter] = {}
        self._paths: dict[int, str] = {}  # by the number under which ranks know an adapter
        self._unread: deque[Adapter] = deque()
        self._lock = threading.Lock()
        self._is_reading = False

    def of(self, request: Any) -> Adapter | None:
        """The adapter of vLLM's `request`, whose files are compared; None if it has none."""
        lora = request.lora_request
        if lora is None:
            return None
        adapter = self._adapters.get(lora.lora_path)
        if adapter is None:
            adapter = self._adapters[lora.lora_path] = self._make(lora)
        if self._paths.setdefault(lora.lora_int_id, lora.lora_path) != lora.lora_path:
            self._refuse_both(lora)
        adapter.check(now=True)
        return adapter

    def must_wait(self, adapter: Adapter) -> bool:
        """Whether a request has to wait for the digest of its adapter: `READ_SECONDS` at most, once per adapter."""
        return not (adapter.salt or adapter.reason) and self._clock() - adapter.began < READ_SECONDS

    def move_on(self) -> None:
        """Have files compared again. Call it before blocks are offered: what they hold was computed before that, so it
        belongs to the version that was read if the files are still the same."""
        self._moment[0] += 1

    def _make(self, lora: Any) -> Adapter:
        settings = f"{self._settings} 3d {getattr(lora, 'is_3d_lora_weight', False)}"
        files = AdapterFiles.of(lora.lora_path)
        adapter = Adapter(lora.lora_path, files, settings, self._moment, self._clock())
        if files is None or getattr(lora, "tensorizer_config_dict", None):
            adapter.refuse("its files are in no folder of this node and in no snapshot of the Hugging Face Hub")
        elif files.changed_after(self._started, adapter.stats):
            adapter.refuse(
                "its files have changed since this engine started, which may have loaded them before; write an adapter "
                "before the engine starts, or take a snapshot of the Hugging Face Hub"
            )
        elif (size := sum(stat[0] for stat in adapter.stats if stat is not None)) > MOST_BYTES:
            adapter.refuse(f"its files have {size >> 20} MiB; at most {MOST_BYTES >> 20} are read")
        else:
            self._read_later(adapter)
        return adapter

    def _refuse_both(self, lora: Any) -> None:
        """Ranks know adapters by number, so they may use either."""
        other = self._paths[lora.lora_int_id]
        for path, its_other in ((lora.lora_path, other), (other, lora.lora_path)):
            self._adapters[path].refuse(f"another adapter, at {its_other}, has had its number {lora.lora_int_id}")

    def _read_later(self, adapter: Adapter) -> None:
        with self._lock:
            self._unread.append(adapter)
            is_reading, self._is_reading = self._is_reading, True
        if not is_reading:
            self._start_thread(self._read_all)

    def _read_all(self) -> None:
        while (adapter := self._next()) is not None:
            adapter.read()

    def _next(self) -> Adapter | None:
        with self._lock:
            if self._unread:
                return self._unread.popleft()
            self._is_reading = False
            return None


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="kvstow-adapters", daemon=True).start()


def _stat(file: Path) -> Stat:
    """Ends with the time of the last change. No program can set that time, unlike the time of the last write."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns

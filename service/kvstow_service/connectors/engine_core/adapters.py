"""LoRA adapters: digests of their files, so that a key names the adapter that has computed a block.

vLLM's block hash covers the name and the path of an adapter, but the files at the path may change. The key of a block
therefore covers a digest of the adapter's files. A rank may have loaded an adapter long before its first request. So
the digest counts only if no link, folder or file on the adapter's path has changed since the engine started, and as
long as none does. Otherwise it is unknown which version computes, and the requests of the adapter use no host cache
until the engine ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvstow_service.connectors.engine_core import vllmprocess
from kvstow_service.connectors.engine_core.pathtrail import Trail, mount_points

logger = logging.getLogger("kvstow.vllm")

FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_model.pt",
)
"""All files of an adapter that vLLM reads."""
MOST_BYTES = 4 << 30
"""The largest adapter that is read, in bytes. Reading takes 1.3 s per GiB, on a thread of its own."""
READ_SECONDS = 5.0
"""How many seconds a request waits for the digest of its adapter. After that it is computed without the host cache."""


class AdapterFiles(NamedTuple):
    """The files of an adapter. `reference` is the file that names their revision, if they come from a repository of the
    Hub."""

    files: tuple[Path, ...]
    reference: Path | None = None

    @classmethod
    def of(cls, path: str) -> AdapterFiles | None:
        """The files of the adapter where vLLM finds them; None if they are not on this node, or not yet."""
        folder, reference = Path(os.path.expanduser(path)), None
        if not folder.is_absolute() and not folder.exists():
            found = vllmprocess.find_snapshot(path, None)
            if found is None:
                return None
            folder, reference = found, vllmprocess.reference_of(path, None)
        if not folder.is_dir():
            return None
        return cls(tuple([folder / name for name in FILES]), reference)

    def trail(self) -> Trail:
        """All places that lead to the files. Raises `OSError`."""
        return Trail.of(self.files if self.reference is None else (*self.files, self.reference))

    def newer_than(self, start: EngineStart, trail: Trail) -> str | None:
        """A place on the `trail` that may have led elsewhere when the engine started, or since; None if there is none.

        The cache of the Hub does not count, because it names files by their content, and never replaces one.
        """
        newer = (*trail.newer_than(start.moment), *trail.folders_newer_than(start.moment, start.known, start.mounts))
        return next((place for place in newer if not vllmprocess.is_in_hub(place)), None)

    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files if file.exists())

    def digest(self) -> bytes:
        """A digest of every byte of the files. Raises `OSError`."""
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


class EngineStart(NamedTuple):
    """What is known about paths from before this engine has loaded any adapter. `moment`: when that was, in seconds
    since the epoch. `known`: folders that existed then, even if their own time does not show it. `mounts`: see
    `mount_points`."""

    moment: float
    known: Trail
    mounts: frozenset[str]

    @classmethod
    def now(cls, moment: float, folders: Iterable[Path] = ()) -> EngineStart:
        """`moment`: the start of the process. `folders`: places near which adapters may be."""
        return cls(moment, Trail.of([Path.cwd(), Path(tempfile.gettempdir()), *folders]), mount_points())


class Adapter:
    """One adapter of an engine, at one path. Only the scheduler's thread uses it, except for `read`.

    `salt` is empty until the digest is known. `reason`: why its requests use no host cache, as a sentence. `trail`: the
    places to which its path led when the engine used it first; None if the path could not be followed.
    """

    def __init__(self, path: str, files: AdapterFiles | None, settings: str, moment: list[int], began: float) -> None:
        """`settings`: the settings that decide, besides the files, how the adapter is applied. `moment`: see
        `Adapters`. `began`: when the engine used it first."""
        self.path, self.salt, self.reason, self.began = path, b"", "", began
        self.trail: Trail | None = None
        self._files, self._settings = files, settings
        self._moment, self._checked = moment, -1
        self._digest: bytes | OSError | None = None  # the thread's result

    @property
    def is_named(self) -> bool:
        """Whether its blocks have keys."""
        return bool(self.salt) and not self.reason

    def mix(self, block_hash: bytes) -> bytes:
        """The bytes that replace this hash of vLLM's in a key. The length stays the same."""
        return hashlib.blake2b(block_hash, key=self.salt, digest_size=len(block_hash)).digest()

    def check(self, *, now: bool = False) -> bool:
        """Take the digest if it is known by now, and compare the files: always with `now`, otherwise once after each
        call of `Adapters.move_on`. Returns `is_named`."""
        if self.reason or self._files is None or (self._checked == self._moment[0] and not now and self.salt):
            return self.is_named
        self._checked = self._moment[0]
        if self.trail is not None and (place := self.trail.changed_place()) is not None:
            self.refuse(f"{place} has changed since this engine has used it first")
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
        """Compute the digest, on a thread of its own. `check` takes the result."""
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
        start: EngineStart,
        *,
        clock: Callable[[], float] = time.monotonic,
        start_thread: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`settings`: the settings of LoRA that decide how an adapter is applied."""
        self._settings, self._start, self._clock = settings, start, clock
        self._start_thread = start_thread or _start_thread
        self._moment = [0]  # shared with the adapters: see `move_on`
        self._adapters: dict[str, Adapter] = {}
        self._paths: dict[int, str] = {}  # by the number under which ranks know an adapter
        self._unread: deque[Adapter] = deque()
        self._lock = threading.Lock()
        self._is_reading = False

    def of(self, request: Any) -> Adapter | None:
        """The adapter of vLLM's `request`, after its files were compared; None if the request has none."""
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
        """Whether a request has to wait for the digest of its adapter. It waits for `READ_SECONDS` at most, once per
        adapter."""
        return not (adapter.salt or adapter.reason) and self._clock() - adapter.began < READ_SECONDS

    def move_on(self) -> None:
        """Make adapters compare their files again. It is called before blocks are offered: their contents were computed
        before, so they belong to the version that was read if the files are still the same."""
        self._moment[0] += 1

    def _make(self, lora: Any) -> Adapter:
        settings = f"{self._settings} 3d {getattr(lora, 'is_3d_lora_weight', False)}"
        files = AdapterFiles.of(lora.lora_path)
        adapter = Adapter(lora.lora_path, files, settings, self._moment, self._clock())
        if files is None or getattr(lora, "tensorizer_config_dict", None):
            adapter.refuse("its files are in no folder of this node and in no snapshot of the Hugging Face Hub")
            return adapter
        try:
            adapter.trail = files.trail()
            newer = files.newer_than(self._start, adapter.trail)
        except OSError as error:
            adapter.refuse(f"its files cannot be read ({error})")
            return adapter
        if newer is not None:
            adapter.refuse(
                f"{newer} has changed since this engine started, which may have loaded another version before; put an "
                "adapter into place before the engine starts, or take it from the Hugging Face Hub"
            )
        elif (size := files.num_bytes()) > MOST_BYTES:
            adapter.refuse(f"its files have {size >> 20} MiB; at most {MOST_BYTES >> 20} are read")
        else:
            self._read_later(adapter)
        return adapter

    def _refuse_both(self, lora: Any) -> None:
        """Refuse both adapters that have the same number. Ranks know adapters by number, so they may use either."""
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

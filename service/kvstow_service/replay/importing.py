"""Traces of others, in the form that a replay reads.

*kv-cache-tester* has a file for each session of a coding agent: one JSON object with `requests`, whose `hash_ids` name
prefixes within that session, in blocks of 64 tokens. The times count from the session's start, so the sessions are
spread over a time that the caller chooses, and merged. A request of a subagent is in a context of its own. One trace is
of one model: requests to another model than the session's first are left out.

*Mooncake* has one file of JSON objects, one a line, with absolute times. Such a trace is read alone.

Sessions are read in the order in which they start, and a request is passed on as soon as no later session can come
before it. So the memory that this takes depends on how many sessions are open at a time, not on how many there are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from kvstow.errors import ConfigError, InvalidRequestError
from kvstow_service.replay.trace import (
    BLOCK_TOKENS,
    Runs,
    TraceRequest,
    check_text,
    check_tokens,
    parse_line,
    read_lines,
)

LARGEST_FILE = 512 << 20
"""Bytes of one session, uncompressed: it is read as a whole."""
_LOOKED_AT = 16  # lines that tell the forms apart: the first ones may be damaged
_LONGEST = 1e9  # seconds


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """`share_system`: sessions whose model and lengths of tools and system prompt are equal begin with the same blocks;
    otherwise sessions share nothing. `spread`: seconds in which the sessions start, at random times that `seed`
    decides."""

    share_system: bool = False
    spread: float = 12 * 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= _LONGEST:
            raise ConfigError("spread", self.spread, f"0 to {_LONGEST:g} seconds")


@dataclass(slots=True)
class ImportCounts:
    """What became of an import. `other_model`: requests that were left out because they are to another model than their
    session."""

    requests: int = 0
    sessions: int = 0
    skipped_files: int = 0
    skipped_requests: int = 0
    other_model: int = 0


class Importer:
    """Reads files of either form. `on_problem` is called with a sentence for each file or request that is skipped,
    `on_file` after each file."""

    def __init__(
        self,
        options: ImportOptions,
        *,
        on_problem: Callable[[str], None] = lambda problem: None,
        on_file: Callable[[], None] = lambda: None,
    ) -> None:
        self._options, self._on_problem, self._on_file = options, on_problem, on_file
        self._numbers = count()
        """The ids of blocks in the trace that is made. Each is given once."""
        self._shared: dict[_System, list[int]] = {}
        """The ids of the blocks that sessions share."""
        self.counts = ImportCounts()

    def read(self, paths: Sequence[str]) -> Iterator[TraceRequest]:
        """The requests of all files, in order of time. A folder stands for the JSON files in it; `-` alone is a trace
        on standard input. Raises `ConfigError` for a folder without files."""
        files = session_files(paths)
        if files == ["-"] or (len(files) == 1 and is_trace(files[0])):
            yield from self._read_trace(files[0])
        else:
            yield from self._merge(files)

    def _read_trace(self, path: str) -> Iterator[TraceRequest]:
        try:
            for number, line in enumerate(read_lines(path), start=1):
                if not line.strip():
                    continue
                try:
                    request = parse_line(line, f"{path}:{number}")
                except InvalidRequestError as error:
                    self._skip_request(str(error))
                else:
                    self.counts.requests += 1
                    yield request
        except InvalidRequestError as error:
            self._skip_file(str(error))
        self._on_file()

    def _merge(self, files: Sequence[str]) -> Iterator[TraceRequest]:
        choose = random.Random(self._options.seed)
        starts = [choose.uniform(0, self._options.spread) if len(files) > 1 else 0.0 for _ in files]
        waiting: list[tuple[float, int, TraceRequest]] = []
        order = count()
        names = _names(files)
        for start, path, name in sorted(zip(starts, files, names, strict=True)):
            while waiting and waiting[0][0] < 1000 * start:
                yield heappop(waiting)[-1]
            for request in self._read_session(path, name, start):
                heappush(waiting, (request.timestamp, next(order), request))
            self._on_file()
        while waiting:
            yield heappop(waiting)[-1]

    def _read_session(self, path: str, name: str, start: float) -> list[TraceRequest]:
        try:
            session = _Session.parse(_load(path), path, name)
            requests = [self._request(session, one, start) for one in self._entries(session)]
        except (ValueError, RecursionError, InvalidRequestError) as error:
            text = str(error)
            self._skip_file(text if text.startswith((path, "cannot read")) else f"{path}: {text}")
            return []
        self.counts.sessions += 1
        self.counts.requests += len(requests)
        return sorted(requests, key=lambda request: request.timestamp)

    def _entries(self, session: _Session) -> Iterator[_Entry]:
        """The requests that the trace takes, in the order of the file."""
        model = session.model
        for part in self._parts(session):
            for number, value in enumerate(part.requests):
                if isinstance(value, dict) and value.get("type") == "subagent":
                    continue  # a part of its own
                try:
                    entry = _Entry.parse(value, part, session.block_tokens)
                except ValueError as error:
                    self._skip_request(f"{session.path}: request {part.prefix}{number}: {error}")
                    continue
                model = model or entry.model
                if entry.model not in (None, model):
                    self.counts.other_model += 1
                    continue
                yield entry

    def _parts(self, session: _Session) -> Iterator[_Part]:
        """The session's own requests, and those of each subagent."""
        waiting = [session.main]
        while waiting:
            part = waiting.pop(0)
            yield part
            for number, value in enumerate(part.requests):
                if isinstance(value, dict) and value.get("type") == "subagent":
                    try:
                        waiting.append(_subagent(value, part, number))
                    except ValueError as error:
                        self._skip_request(f"{session.path}: request {part.prefix}{number}, a subagent: {error}")

    def _request(self, session: _Session, entry: _Entry, start: float) -> TraceRequest:
        begun = start + entry.time
        return TraceRequest(
            round(1000 * begun),
            entry.input_length,
            entry.output_length,
            Runs.of(self._number(session, entry)),
            end=None if entry.seconds is None else round(1000 * (begun + entry.seconds)),
            context=entry.part.context,
            stop=entry.stop,
        )

    def _number(self, session: _Session, entry: _Entry) -> list[int]:
        """The numbers of its blocks. One stands for an id and all before it, so it names a prefix even where the ids of
        a file do not."""
        found: list[int] = []
        system = entry.part.system
        if self._options.share_system and system.tokens >= BLOCK_TOKENS:
            model = _System(session.model or entry.model, system.tool_tokens, system.system_tokens)
            shared = self._shared.setdefault(model, [])
            wanted = min(system.tokens // BLOCK_TOKENS, len(entry.ids))
            shared += islice(self._numbers, max(0, wanted - len(shared)))
            found += shared[:wanted]
        before = found[-1] if found else -1
        for one in entry.ids[len(found) :]:
            place = before, one
            if place not in session.numbers:
                session.numbers[place] = next(self._numbers)
            before = session.numbers[place]
            found.append(before)
        return found

    def _skip_file(self, problem: str) -> None:
        self.counts.skipped_files += 1
        self._on_problem(problem)

    def _skip_request(self, problem: str) -> None:
        self.counts.skipped_requests += 1
        self._on_problem(problem)


class _System(NamedTuple):
    """The beginning of the prompts of a context. `model` is None until sessions are told apart by it."""

    model: str | None
    tool_tokens: int
    system_tokens: int

    @property
    def tokens(self) -> int:
        return self.tool_tokens + self.system_tokens


class _Part(NamedTuple):
    """The requests of one context: the session's own, or those of a subagent. `prefix`: of their numbers in messages.
    `start`: seconds after the session's."""

    context: str
    prefix: str
    start: float
    system: _System
    requests: list[Any]


@dataclass(frozen=True, slots=True)
class _Session:
    """A file of kv-cache-tester. `numbers`: the ids of the trace by those of the file and the number before."""

    path: str
    name: str
    block_tokens: int
    model: str | None
    main: _Part
    numbers: dict[tuple[int, int], int]

    @classmethod
    def parse(cls, value: Any, path: str, name: str) -> _Session:
        """Raises `ValueError` if nothing of it can be read."""
        if not isinstance(value, dict) or not isinstance(value.get("requests"), list):
            raise ValueError("it is not one JSON object with `requests`, a session of kv-cache-tester")
        size, scope = value.get("block_size"), value.get("hash_id_scope", "local")
        if type(size) is not int or size < 1 or BLOCK_TOKENS % size:
            raise ValueError(f"block_size is {size!r}; allowed: a divisor of {BLOCK_TOKENS}")
        if scope != "local":
            raise ValueError(f"hash_id_scope is {scope!r}; allowed: local, ids that are unique within the file")
        models = value.get("models")
        model = check_text("models", models[0]) if isinstance(models, list) and models else None
        return cls(path, name, size, model, _Part(name, "", 0.0, _system_of(value), value["requests"]), {})


class _Entry(NamedTuple):
    """One request. `time`: seconds after the session's start. `seconds`: until its answer was complete; None if the
    file does not say. `ids`: of its whole blocks of `BLOCK_TOKENS`."""

    part: _Part
    time: float
    seconds: float | None
    model: str | None
    input_length: int
    output_length: int
    stop: str | None
    ids: list[int]

    @classmethod
    def parse(cls, value: Any, part: _Part, block_tokens: int) -> _Entry:
        """Raises `ValueError`."""
        if not isinstance(value, dict):
            raise ValueError(f"{type(value).__name__} found; a request is a JSON object")
        if missing := [field for field in ("t", "in", "out", "hash_ids") if field not in value]:
            raise ValueError(f"{', '.join(missing)} missing")
        length, ids = check_tokens("in", value["in"]), value["hash_ids"]
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise ValueError("hash_ids is not a list of whole numbers")
        if len(ids) > -(-length // block_tokens):
            raise ValueError(f"hash_ids has {len(ids)} ids for {length} tokens in blocks of {block_tokens}")
        if len(set(ids)) < len(ids):
            raise ValueError("hash_ids has an id twice; an id names a whole prefix, so it occurs once in a request")
        each = BLOCK_TOKENS // block_tokens
        whole = min(len(ids), length // block_tokens) // each * each  # a block that is not full is not kept
        seconds = value.get("api_time")
        return cls(
            part,
            part.start + _seconds("t", value["t"]),
            None if seconds is None else _seconds("api_time", seconds),
            check_text("model", value.get("model")),
            length,
            check_tokens("out", value["out"]),
            check_text("stop", value.get("stop")),
            ids[each - 1 : whole : each],
        )


def _subagent(value: dict[str, Any], part: _Part, number: int) -> _Part:
    """`t` of a subagent is when it was done, and the times of its requests count from its start. Raises
    `ValueError`."""
    ended, duration = _seconds("t", value.get("t", 0.0)), _seconds("duration_ms", value.get("duration_ms", 0)) / 1000
    if not isinstance(value.get("requests"), list):
        raise ValueError("requests is not a list")
    name = check_text("agent_id", value.get("agent_id")) or f"agent_{number}"
    context = check_text("context", f"{part.context}/{name}")
    start = part.start + max(0.0, ended - duration)
    return _Part(context or "", f"{part.prefix}{number}.", start, _system_of(value), value["requests"])


def _system_of(value: dict[str, Any]) -> _System:
    tool, system = (check_tokens(field, value.get(field, 0)) for field in ("tool_tokens", "system_tokens"))
    return _System(None, tool, system)


def _seconds(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _LONGEST:
        raise ValueError(f"{field} is {value!r:.40}; allowed: 0 to {_LONGEST:g}")
    return float(value)


def _load(path: str) -> Any:
    parts, size = [], 0
    for part in read_lines(path, longest=LARGEST_FILE):
        parts.append(part)
        size += len(part)
        if size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
    return json.loads(b"".join(parts))


def session_files(paths: Sequence[str]) -> list[str]:
    """The files at `paths`; of a folder, those in it whose names end with .json or .json.gz, by name. Raises
    `ConfigError` for a folder without any."""
    files: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            files.append(path)
            continue
        found = sorted(str(one) for one in Path(path).iterdir() if one.name.endswith((".json", ".json.gz")))
        if not found:
            raise ConfigError("FILE", path, "a folder with files whose names end with .json or .json.gz")
        files += found
    return files


def is_trace(path: str) -> bool:
    """Whether a file has a request on each line, as Mooncake's traces have and KVStow's own."""
    try:
        for line in islice(read_lines(path, longest=LARGEST_FILE), _LOOKED_AT):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and "timestamp" in value:
                return True
    except InvalidRequestError:
        pass  # whoever reads it says so
    return False


def _names(files: Sequence[str]) -> list[str]:
    """What contexts are called by: the names of the files, or their numbers where two files have the same name."""
    names = [Path(path).name.removesuffix(".gz").removesuffix(".json")[:128] for path in files]
    return names if len(set(names)) == len(names) else [str(number) for number in range(len(files))]

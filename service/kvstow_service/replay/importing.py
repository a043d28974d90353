"""Imports traces of other projects into the form that a replay reads.

*kv-cache-tester* has a file for each session of a coding agent. It is one JSON object with `requests`, whose `hash_ids`
name prefixes within that session, in blocks of 64 tokens. Times count from the session's start. So the sessions start
at random times within a span that the caller chooses, and are merged. The requests of a subagent get a context of their
own. A trace is of one model, so requests to another model than the session's first one are left out.

*Mooncake* has one file of JSON objects, one on each line, with absolute times. Such a trace is imported alone.

Sessions are read in the order of their starts, and a request is passed on as soon as no later session can have an
earlier one. So the memory that is needed depends on how many sessions overlap, and not on how many there are.
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
"""The limit for a session's file, uncompressed, in bytes. A session is read as a whole."""
_LOOKED_AT = 16  # how many lines are read to recognize the form of a file, because the first ones may be damaged
_LONGEST = 1e9  # the limit for a time, in seconds


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """With `share_system`, sessions begin with the same blocks if they have the same model and the same lengths of
    tools and system prompt. Otherwise sessions share nothing. `spread` is the span in which the sessions start, in
    seconds. `seed` decides their random times."""

    share_system: bool = False
    spread: float = 12 * 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= _LONGEST:
            raise ConfigError("spread", self.spread, f"0 to {_LONGEST:g} seconds")


@dataclass(slots=True)
class ImportCounts:
    """What an import has counted. `other_model` is the number of requests that were left out because they are to
    another model than their session."""

    requests: int = 0
    sessions: int = 0
    skipped_files: int = 0
    skipped_requests: int = 0
    other_model: int = 0


class Importer:
    """Reads files of either form. It calls `on_problem` with a sentence for each file or request that it skips, and
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
        """Gives the ids of blocks in the new trace. Each is given once."""
        self._shared: dict[_System, list[int]] = {}
        """The ids of the blocks that sessions share, by the beginning of their prompts."""
        self.counts = ImportCounts()

    def read(self, paths: Sequence[str]) -> Iterator[TraceRequest]:
        """Yield the requests of all files, in order of time. A folder stands for the JSON files in it, and `-` alone
        for a trace on standard input. Raises `ConfigError` for a folder without files."""
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
        """Yield the requests that the trace takes, in the order of the file."""
        model = session.model
        for part in self._parts(session):
            for number, value in enumerate(part.requests):
                if isinstance(value, dict) and value.get("type") == "subagent":
                    continue  # the requests of a subagent are a separate part
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
        """Yield the session's own requests, and those of each subagent."""
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
        """Return the numbers of an entry's blocks in the trace. A number stands for an id and all ids before it. So it
        names a prefix even if the ids of the file do not."""
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
    """What the prompts of a context begin with. `model` is None until the sessions' models are known."""

    model: str | None
    tool_tokens: int
    system_tokens: int

    @property
    def tokens(self) -> int:
        return self.tool_tokens + self.system_tokens


class _Part(NamedTuple):
    """The requests of one context: the session's own, or those of a subagent. `prefix` is put before their numbers in
    messages. `start` is in seconds after the session's start."""

    context: str
    prefix: str
    start: float
    system: _System
    requests: list[Any]


@dataclass(frozen=True, slots=True)
class _Session:
    """A file of kv-cache-tester. `numbers` has the ids of blocks in the trace, by the number before and the id in the
    file."""

    path: str
    name: str
    block_tokens: int
    model: str | None
    main: _Part
    numbers: dict[tuple[int, int], int]

    @classmethod
    def parse(cls, value: Any, path: str, name: str) -> _Session:
        """Parse the content of a file. Raises `ValueError` if it is no session."""
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
    """One request. `time` is in seconds after the session's start. `seconds` is how long it took until its answer was
    complete, or None if the file does not say. `ids` are those of its whole blocks of `BLOCK_TOKENS` tokens."""

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
        """Parse a request. Raises `ValueError`."""
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
        whole = min(len(ids), length // block_tokens) // each * each  # a block that is not full is left out
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
    """Return the part of a subagent. `t` of the subagent is the time at which it ended, and the times of its requests
    count from its start. Raises `ValueError`."""
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
    """Return the files at `paths`. A folder stands for the files in it whose names end with .json or .json.gz, by name.
    Raises `ConfigError` for a folder that has none."""
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
    """Whether a file has a request on each line, as traces of Mooncake and of KVStow have."""
    try:
        for line in islice(read_lines(path, longest=LARGEST_FILE), _LOOKED_AT):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and "timestamp" in value:
                return True
    except InvalidRequestError:
        pass  # the reader of the file reports it
    return False


def _names(files: Sequence[str]) -> list[str]:
    """Return names for contexts: the names of the files, or their numbers if two files have the same name."""
    names = [Path(path).name.removesuffix(".gz").removesuffix(".json")[:128] for path in files]
    return names if len(set(names)) == len(names) else [str(number) for number in range(len(files))]

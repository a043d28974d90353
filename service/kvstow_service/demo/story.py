"""The acts of the demo, in order. Each act yields claims about what it shows.

No claim depends on speed. If an event has to happen in the middle of an activity, the activity pauses for it, or goes
on until the demo stops it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstow.bytesize import format_size, parse_size
from kvstow_service.demo.processes import DEADLINE_SECONDS, Engine, Service, wait_until
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.launcher import EngineSpec
from kvstow_service.replay.result import AttachedResult
from kvstow_service.replay.trace import ReplayOptions, TraceShape, even_shape, generate_trace

_SAME = 0.99
"""A hit ratio counts as the same if it is at least this fraction of the other."""
_SHARED = 1.05
"""Several engines may need this many times the slots that one engine needs."""
_MIDDLE = 20
"""How many requests an engine finishes before and after an event of the story."""
_HELD = ("--pin-pause", "1h")
"""The service populates one chunk, and pauses for longer than the demo runs."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much the demo does. The first memory that a pool gets must have room for the whole trace. `rate`: requests
    that each engine starts per second while something happens to it."""

    memory: str = "512MiB"
    ranks: int = 2
    slot: str = "128KiB"
    shape: TraceShape = TraceShape(sessions=60, turns=5, shared_prompts=4)  # noqa: RUF009 - frozen
    flags: tuple[str, ...] = ()
    rate: float = 40.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the demo. `seen`: what the demo has observed. `holds`: whether this proves the claim."""

    text: str
    seen: str
    holds: bool


class Story:
    """Runs the acts of the demo. `say` prints a line about each event."""

    def __init__(self, folder: Path, scale: Scale, say: Callable[[str], None]) -> None:
        self._scale, self._say = scale, say
        self._requests = generate_trace(scale.shape)
        self._service = Service(folder, scale.memory, scale.flags)
        self._results: list[AttachedResult] = []

    def run(self) -> list[Claim]:
        """Run all acts, and return their claims. Raises `DemoError` if an act cannot continue."""
        try:
            return [
                *self._start(),
                *self._share(),
                *self._kill_an_engine(),
                *self._kill_the_service(),
                *self._verified(),
                *self._stop(),
            ]
        finally:
            self._service.close()

    # -- acts -----------------------------------------------------------------------------------------------

    def _start(self) -> Iterator[Claim]:
        service = self._service
        service.start(*_HELD)
        said = []
        for probe in ("/livez", "/readyz"):
            wait_until(lambda probe=probe: service.answers(probe), f"{probe} says 200")  # type: ignore[misc]
            said.append(f"{probe} after {service.milliseconds:,.0f} ms")
        wait_until(lambda: self._memory()[0] and service.answers("/readyz"), "healthy with the first memory")
        populated, target = self._memory()
        self._say(f"The service is healthy: {', '.join(said)}; {_part(populated, target)} of its memory is populated.")
        seen = f"{', '.join(said)}, with {_part(populated, target)} populated"
        yield Claim("The service is healthy while its memory is still being populated", seen, populated < target)
        self._say("It waits an hour before it populates more: it is killed, and started again without the wait.")
        service.kill()
        service.start()
        wait_until(lambda: service.answers("/readyz"), "the service is back")
        wait_until(lambda: self._memory() == (target, target), "all memory is populated")
        self._say(f"{_part(*self._memory())} are populated after {service.milliseconds:,.0f} ms.")

    def _share(self) -> Iterator[Claim]:
        requests = f"{len(self._requests)} requests of {self._scale.shape.sessions} conversations"
        self._say(f"Engine A, with {self._scale.ranks} ranks in processes of their own, replays {requests}.")
        first, alone = self._replay("A"), self._cached_slots()
        self._say(f"Engine A: hit ratio {first:.1%}. Engine B, a new process, replays the same.")
        second, both = self._replay("B"), self._cached_slots()
        self._say(f"Engine B: hit ratio {second:.1%}.")
        yield Claim(
            "An engine finds what another has stored",
            f"hit ratio {first:.1%} of the first engine, {second:.1%} of the second",
            second >= _SAME > first,
        )
        yield Claim(
            "Engines share memory",
            f"{alone:,} slots in use after the first engine, {both:,} after the second",
            0 < both <= _SHARED * alone,
        )

    def _kill_an_engine(self) -> Iterator[Claim]:
        self._say("Engines C and D replay at once. C is killed in the middle (SIGKILL), and started again.")
        with self._traffic("C", "D") as (engine, other):
            engine.kill()
            engine.wait_for(_MIDDLE, life=2)
            found, _ = self._end(engine, other)
        last = found.engines[0].lives[-1].result
        self._say(f"It found {last.first_hit_blocks} of the {last.first_blocks} blocks of its first request.")
        ratio = last.hit_blocks / max(1, last.blocks)
        yield Claim(
            "An engine that was killed comes back to a hot cache",
            f"{last.first_hit_blocks} of the {last.first_blocks} blocks of its first request found; "
            f"hit ratio {ratio:.1%} from then on",
            last.first_hit_blocks > 0 and ratio >= _SAME,
        )

    def _kill_the_service(self) -> Iterator[Claim]:
        service, slots = self._service, self._cached_slots()
        self._say("Engines E and F replay at once. Now the service is killed (SIGKILL), and started again.")
        with self._traffic("E", "F") as engines:
            service.kill()
            service.start()
            wait_until(lambda: service.answers("/readyz"), "the service is back")
            away = service.milliseconds
            self._say(f"It is healthy again after {away:,.0f} ms, and {self._cached_slots():,} slots are in use.")
            for engine in engines:
                engine.wait_until_attached()
                engine.wait_for(engine.finished + _MIDDLE)
            ended = self._end(*engines)
        self._say("Engine G replays everything once more.")
        after = self._replay("G")
        sessions = [found.engines[0].sessions for found in ended]
        finished, given_up = (sum(getattr(found.total, name) for found in ended) for name in ("requests", "abandoned"))
        yield Claim(
            "The service is killed under traffic; no request fails, and the engines attach again",
            f"{finished:,} requests ended, {given_up} did not; sessions of the two engines: "
            f"{' and '.join(map(str, sessions))}",
            not given_up and min(sessions) >= 2 and all(len(found.engines[0].lives) == 1 for found in ended),
        )
        yield Claim(
            "The cache outlives the service",
            f"hit ratio {after:.1%} afterwards; {slots:,} slots in use before, {self._cached_slots():,} afterwards",
            after >= _SAME,
        )

    def _verified(self) -> Iterator[Claim]:
        totals = [found.total for found in self._results]
        loaded = sum(total.loaded.num_bytes for total in totals)
        verified = sum(total.verified_bytes for total in totals)
        wrong = sum(total.mismatches for total in totals)
        yield Claim(
            "Every loaded byte is the one that was stored",
            f"{format_size(verified)} of {format_size(loaded)} compared, {wrong} blocks wrong",
            0 < loaded == verified and not wrong,
        )

    def _stop(self) -> Iterator[Claim]:
        status = self._service.stop()
        left = self._service.left_behind()
        yield Claim(
            "SIGTERM leaves nothing behind",
            f"exit status {status}, {len(left)} processes left",
            status == 0 and not left,
        )

    # -- parts of acts --------------------------------------------------------------------------------------

    def _engine(self, name: str, rate: float | None = None) -> Engine:
        """Start an engine. With a rate, it replays the trace without an end."""
        scale, service = self._scale, self._service
        options = ReplayOptions(concurrency=4, rate=rate, drain_seconds=DEADLINE_SECONDS)
        blocks = blocks_needed(self._requests, options.concurrency)
        shape = even_shape(parse_size(scale.slot, "slot"))
        spec = EngineSpec(f"engine-{name}", service.socket, shape, scale.ranks, blocks, 0, self._requests, options)
        return Engine(service, spec, endless=rate is not None)

    def _replay(self, name: str) -> float:
        """Let one engine replay the trace as fast as it can. Returns its hit ratio."""
        engine = self._engine(name)
        try:
            return self._result(engine).total.block_hit_rate
        finally:
            engine.close()

    @contextmanager
    def _traffic(self, *names: str) -> Iterator[list[Engine]]:
        """Start engines that replay the trace until `_end`, and yield them in the middle of the replay."""
        with ExitStack() as running:
            engines = [self._engine(name, self._scale.rate) for name in names]
            for engine in engines:
                running.callback(engine.close)
            for engine in engines:
                engine.wait_for(_MIDDLE)
            yield engines

    def _end(self, *engines: Engine) -> list[AttachedResult]:
        for engine in engines:
            engine.stop()
        return [self._result(engine) for engine in engines]

    def _result(self, engine: Engine) -> AttachedResult:
        found = engine.result()
        self._results.append(found)
        return found

    def _memory(self) -> tuple[int, int]:
        memory = self._service.get("/v1/readiness")["memory"]
        return memory["populated_bytes"], memory["target_bytes"]

    def _cached_slots(self) -> int:
        pools = self._service.get("/v1/pools")["items"]
        return sum(pool["slots"]["cached"] + pool["slots"]["leased"] for pool in pools)


def _part(num_bytes: int, of: int) -> str:
    return f"{format_size(num_bytes)} of {format_size(of)}"

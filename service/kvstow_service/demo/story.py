"""What happens in the demo, in order. Each act returns what it shows as claims."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.bytesize import format_size
from kvstow_service.demo.claims import Claim
from kvstow_service.demo.processes import DemoError, Replay, Service, wait_until
from kvstow_service.replay.generate import TraceShape, generate_trace

_SAME = 0.99
"""Of a hit ratio: what counts as the same."""
_SHARED = 1.05
"""Of the slots that one engine needs: what several may need together."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much the demo does. `rate`: requests that each engine starts per second where something happens meanwhile,
    among it populating, which must be faster than the first engine stores; `middle`: seconds of traffic before it does.
    """

    memory: str = "1GiB"
    ranks: int = 2
    slot: str = "128KiB"
    shape: TraceShape = TraceShape(sessions=60, turns=5, shared_prompts=4)  # noqa: RUF009 - frozen
    flags: tuple[str, ...] = ("--pin-chunk", "16MiB", "--pin-pause", "100ms")
    rate: float = 40.0
    middle: float = 2.5


class Story:
    """`say` prints a line of what happens."""

    def __init__(self, folder: Path, scale: Scale, say: Callable[[str], None]) -> None:
        self._scale, self._say = scale, say
        self._requests = generate_trace(scale.shape)
        self._trace = folder / "trace.jsonl"
        self._trace.write_text("".join(f"{request.to_line()}\n" for request in self._requests))
        self._service = Service(folder, scale.memory, scale.flags)
        self._results: list[dict[str, Any]] = []

    def run(self) -> list[Claim]:
        """Raises `DemoError` where it cannot go on."""
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
        service.start()
        said = []
        for probe in ("/livez", "/readyz"):
            wait_until(lambda probe=probe: service.answers(probe), f"{probe} says 200")  # type: ignore[misc]
            said.append(f"{probe} after {service.milliseconds:,.0f} ms")
        wait_until(lambda: self._memory()[0], "the first memory is populated")
        healthy, (populated, target) = service.answers("/readyz"), self._memory()
        self._say(f"The service is healthy: {', '.join(said)}; {_part(populated, target)} of its memory is populated.")
        seen = f"{', '.join(said)}, with {_part(populated, target)} populated"
        yield Claim(
            "The service is healthy while its memory is still being populated", seen, healthy and populated < target
        )

    def _share(self) -> Iterator[Claim]:
        requests = f"{len(self._requests)} requests of {self._scale.shape.sessions} conversations"
        self._say(f"Engine A, with {self._scale.ranks} ranks in processes of their own, replays {requests}.")
        first = self._replay("--rate", str(self._scale.rate))
        alone = self._cached_slots()
        self._say(f"{_part(*self._memory())} of the memory is populated. Engine A: hit ratio {_percent(first)}.")
        self._say("Engine B, a new process, replays the same.")
        second = self._replay()
        both = self._cached_slots()
        self._say(f"Engine B: hit ratio {_percent(second)}.")
        yield Claim(
            "An engine finds what another has stored",
            f"hit ratio {_percent(first)} of the first engine, {_percent(second)} of the second",
            second["block_hit_rate"] >= _SAME > first["block_hit_rate"],
        )
        yield Claim(
            "Engines share memory",
            f"{alone:,} slots in use after the first engine, {both:,} after the second",
            0 < both <= _SHARED * alone,
        )

    def _kill_an_engine(self) -> Iterator[Claim]:
        self._say("Two engines replay at once. One is killed in the middle (SIGKILL), and started again.")
        with self._traffic(self._scale.rate) as replay:
            session = self._sessions()[0]
            os.kill(session["pid"], signal.SIGKILL)
            found = self._finish(replay)
        killed = [engine for engine in found["engines"] if engine["restarts"]]
        lives = killed[0]["lives"] if killed else []
        if len(lives) < 2:
            raise DemoError(f"no engine was started again: {found}")
        last = lives[-1]
        self._say(f"It found {last['first_hit_blocks']} of the {last['first_blocks']} blocks of its first request.")
        ratio = last["hit_blocks"] / max(1, last["blocks"])
        yield Claim(
            "An engine that was killed comes back to a hot cache",
            f"{last['first_hit_blocks']} of the {last['first_blocks']} blocks of its first request found; "
            f"hit ratio {ratio:.1%} from then on",
            last["first_hit_blocks"] > 0 and ratio >= _SAME,
        )

    def _kill_the_service(self) -> Iterator[Claim]:
        before, slots = self._results[-1]["block_hit_rate"], self._cached_slots()
        self._say("Two engines replay at once. Now the service is killed (SIGKILL), and started again.")
        with self._traffic(self._scale.rate / 2) as replay:
            self._service.kill()
            self._service.start()
            wait_until(lambda: self._service.answers("/readyz"), "the service is back")
            away = self._service.milliseconds
            self._say(f"It is healthy again after {away:,.0f} ms, and {self._cached_slots():,} slots are in use.")
            during = self._finish(replay)
        self._say("An engine replays everything once more.")
        after = self._replay()
        yield Claim(
            "The service is killed under traffic; no request fails, and the engines attach again",
            f"{during['requests']:,} of {2 * len(self._requests):,} requests ended, hit ratio {_percent(during)}; "
            f"sessions of the two engines: {during['sessions']}",
            during["requests"] == 2 * len(self._requests) and during["sessions"] == 4,
        )
        yield Claim(
            "The cache outlives the service",
            f"hit ratio {before:.1%} before, {_percent(after)} after; {slots:,} and {self._cached_slots():,} slots",
            after["block_hit_rate"] >= _SAME * before,
        )

    def _verified(self) -> Iterator[Claim]:
        loaded, verified, wrong = (
            sum(found[name] for found in self._results) for name in ("loaded_bytes", "verified_bytes", "mismatches")
        )
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

    def _flags(self, *more: str) -> tuple[str, ...]:
        return ("--ranks", str(self._scale.ranks), "--slot-size", self._scale.slot, "--concurrency", "4", *more)

    def _replay(self, *more: str) -> dict[str, Any]:
        """One engine, as fast as it can."""
        replay = Replay(self._service, self._trace, *self._flags(*more))
        try:
            return self._finish(replay)
        finally:
            replay.close()

    @contextmanager
    def _traffic(self, rate: float) -> Iterator[Replay]:
        """Two engines that are in the middle of a replay."""
        flags = self._flags("--engines", "2", "--rate", str(rate))
        replay = Replay(self._service, self._trace, *flags)
        try:
            wait_until(lambda: replay.has_ended or len(self._sessions()) == 2, "two engines are attached")
            time.sleep(self._scale.middle)
            if replay.has_ended:
                raise DemoError("the replay ended before its middle")
            yield replay
        finally:
            replay.close()

    def _finish(self, replay: Replay) -> dict[str, Any]:
        found = replay.result()
        self._results.append(found)
        return found

    def _memory(self) -> tuple[int, int]:
        memory = self._service.get("/v1/readiness")["memory"]
        return memory["populated_bytes"], memory["target_bytes"]

    def _sessions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._service.get("/v1/sessions")["items"]
        return [session for session in found if session["state"] == "attached"]

    def _cached_slots(self) -> int:
        pools = self._service.get("/v1/pools")["items"]
        return sum(pool["slots"]["cached"] + pool["slots"]["leased"] for pool in pools)


def _part(num_bytes: int, of: int) -> str:
    return f"{format_size(num_bytes)} of {format_size(of)}"


def _percent(found: dict[str, Any]) -> str:
    return f"{found['block_hit_rate']:.1%}"

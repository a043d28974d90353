"""An embedded engine with a fleet tier, driven by vLLM's steps on a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.engine.conftest import Eventually
from tests.service.connectors.engine_core.vllmhost import ONE_GROUP, FakeRequest, Output, VllmHost, keys_of

from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.messages import TierCompletion, TierOp
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.objectname import ObjectName
from kvstow.tier.writepolicy import WriteMode
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.enginetier import EngineTier, Identity
from kvstow_service.connectors.engine_core.kvgroups import KVGroups

TOKENS = "abcdefgh"
KEYS = keys_of(TOKENS)


class TierHost(VllmHost):
    """Its ranks move the keys' names to and from `store`: a block's content is its key."""

    def __init__(
        self,
        store: ControlledStore,
        *,
        groups: KVGroups = ONE_GROUP,
        num_ranks: int = 1,
        slots: int = 64,
        write: WriteMode = "through",
        identity: Identity | None = None,
    ) -> None:
        super().__init__(groups, num_ranks=num_ranks, slots=slots)
        self.store_of_tier = store
        self.time = FakeClock()
        settings = TierSettings(write=write)
        fingerprint = "f" if identity is None else None
        fleet = FleetTier(self.engine, store.open_lookups(), settings, fingerprint, clock=self.time)
        self.tier = EngineTier(self.engine, fleet, 1024, identity=identity, clock=self.time)
        control = self.side._control
        assert isinstance(control, EmbeddedControl)
        self.control = control
        control.use_tier(self.tier)
        self.ops: list[tuple[int, TierOp]] = []
        self.number = 0

    def step_tier(self) -> None:
        """One more step of vLLM without tokens: what begins with it waits in `ops`."""
        self.side.plan_step(Output({}))
        self.ops += self.plan_tier({})

    def plan_tier(self, tokens: dict[str, int]) -> tuple[tuple[int, TierOp], ...]:
        self.number += 1
        return self.tier.plan(self.number, Output(tokens))

    def move(self, rank: int, op: TierOp, moved: int | None = None) -> None:
        """A rank has moved these leading objects, and says so."""
        self.ops.remove((rank, op))
        moved = len(op.keys) if moved is None else moved
        for key, slot in zip(op.keys[:moved], op.slots[:moved], strict=True):
            name = str(ObjectName(op.fingerprint, key, rank, len(self.ranks)))
            if op.direction == "put":
                content = self.ranks[rank].slots[slot]
                assert isinstance(content, bytes)
                self.store_of_tier.put(name, content)
            else:
                self.ranks[rank].slots[slot] = self.store_of_tier.get(name)
        done = TierCompletion(op.op_id, "done", moved=moved, seconds=0.001)
        self.control.complete(rank, self.ranks[rank].boot_id, [done])

    def move_all(self) -> None:
        while self.ops:
            self.move(*self.ops[0])
            self.step_tier()

    @property
    def fetches(self) -> list[tuple[int, TierOp]]:
        return [(rank, op) for rank, op in self.ops if op.direction == "fetch"]

    def look_up_in_step(self, request: FakeRequest) -> int | None:
        found = self.look_up(request)
        self.step_tier()
        return found

    def look_up(self, request: FakeRequest) -> int | None:
        return self.side.find_hit(request, 0)

    def look_up_at_last(self, request: FakeRequest, eventually: Eventually) -> int:
        """vLLM asks in each step, and the ranks do what they are given, until there is an answer."""
        found: list[int] = []

        def is_found() -> bool:
            self.move_all()
            answer = self.look_up_in_step(request)
            found.extend([] if answer is None else [answer])
            return bool(found)

        eventually(is_found)
        return found[0]


MakeHost = Callable[..., TierHost]


def filled(store: ControlledStore, num_ranks: int = 1, keys: Iterable[bytes] = KEYS) -> None:
    """Another node has put these."""
    for key in keys:
        for rank in range(num_ranks):
            store.put(str(ObjectName("f", key, rank, num_ranks)), key)


def ask_until_fetching(host: TierHost, request: FakeRequest, eventually: Eventually) -> None:
    """vLLM asks in each step."""

    def is_fetching() -> bool:
        assert host.look_up(request) is None
        host.step_tier()
        return bool(host.fetches)

    eventually(is_fetching)

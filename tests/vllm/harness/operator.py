"""What operators do in the middle of the traffic, and how ranks fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

from tests.service.connectors.engine_core.connectorhosts import scheduler_host_of
from tests.vllm.harness.core import EngineCore
from tests.vllm.harness.host import Host
from tests.vllm.harness.setup import Setup

from kvstow.control.administration import Sweep

_USUAL = (
    *("evict", "purge", "resize", "set_policy", "drain", "bypass", "purge_everything", "reset_prefix_cache"),
    *("preempt_and_reset", "change_weights", "restart_rank", "kill_copy_thread", "lose_session", "lose_service"),
)
"""Actions of a run that names none."""
_CHANGE = "weights_changed: a call of the harness may have changed the weights of the running engine"


class Operator:
    """One action at a time; those that empty the pool are rare. What closes the gate is undone some steps later."""

    def __init__(self, setup: Setup, random: Random, core: EngineCore, host: Host) -> None:
        self._setup, self._random, self._core = setup, random, core
        self._host, self._engine = host, host.engine
        self._broken: int | None = None
        self._resize: Sweep | None = None
        self._reopen_in = self._restart_in = 0
        self._dies_in, self._dies_under_a_load = -1, False
        core.on_moment = self.pass_moment
        self.is_changing_weights = False
        """No request may come until it is done."""
        self._replacing = False
        """The weights are replaced when no step is under way, whatever loads and stores are."""
        self._is_emptying = False
        """They were, and the device's cache has to be emptied."""
        self._notices_at_admission = False
        gentle: list[Callable[[], None]] = [self.evict, self.purge, self.resize, self.set_policy]
        closing = [self.drain, self.bypass]
        drastic = [
            self.purge_everything,
            self.reset_prefix_cache,
            self.preempt_and_reset,
            self.change_weights,
            self.replace_weights,
            self.notice_change,
            self.restart_rank,
            self.kill_copy_thread,
        ]
        if setup.attached:
            gentle, drastic = [self.evict, self.purge], [self.reset_prefix_cache, self.change_weights]
            drastic += [self.replace_weights, self.notice_change] * 8
            drastic += [self.lose_session] * 8 + [self.lose_service] * 16
        wanted = setup.operations or _USUAL
        self._actions = [action for action in (*gentle * 8, *closing, *drastic) if action.__name__ in wanted]
        if "notice_change" in wanted:
            self._notice_at_admissions()

    def step(self) -> None:
        if self._resize is not None and not self._resize.step():
            self._resize = None
        self._reopen_in -= 1
        if self._reopen_in == 0:
            self.reopen()
        elif self._reopen_in < 0 and self._engine.admin.bypass.load:  # not by us: a request is held back
            self._reopen_in = 3
        self._restart_in -= 1
        if self._restart_in == 0:
            self.restart_rank()
        if self.is_changing_weights:
            self._go_on_with_weights()
        elif self._random.random() < self._setup.operator_rate:
            action = self._random.choice(self._actions)
            self._core.report.operations[action.__name__] += 1
            action()

    def finish(self) -> None:
        """Leave things as they were found: open, all ranks alive."""
        self.reopen()
        if self._broken is not None:
            self.restart_rank()

    def evict(self) -> None:
        self._engine.admin.evict(slots=self._random.randint(1, 12)).run()

    def purge(self) -> None:
        if keys := self._some_keys():
            self._engine.admin.purge(keys=keys).run()

    def purge_everything(self) -> None:
        self._engine.admin.purge(everything=True).run()

    def resize(self) -> None:
        most = self._setup.slots
        if self._resize is None:
            self._resize = self._engine.admin.resize(self._random.randint(most // 3, most))

    def drain(self) -> None:
        self._engine.admin.drain(self._random.choice(("all", "stop_stores")), None)
        self._reopen_in = 10

    def bypass(self) -> None:
        load = self._random.random() < 0.5
        self._engine.admin.set_bypass(load=load, store=not load, ttl_seconds=None)
        self._reopen_in = 10

    def reopen(self) -> None:
        self._engine.admin.undrain()
        self._engine.admin.set_bypass(load=False, store=False, ttl_seconds=None)

    def set_policy(self) -> None:
        self._engine.admin.set_policy(self._random.choice(("auto", "lru")))

    def reset_prefix_cache(self) -> None:
        """What vLLM's own API does after a change of the weights."""
        self._core.reset(preempt=False)

    def preempt_and_reset(self) -> None:
        """The same while requests run. vLLM raises where others than they hold GPU blocks: then it is not done."""
        if not self._core.has_blocks_in_flight:
            self._core.reset(preempt=True)

    def change_weights(self) -> None:
        """As vLLM does it: abort all, let everything come to an end, and forget all KV, which must succeed then."""
        self._core.abort(None)
        self.is_changing_weights = True

    def replace_weights(self) -> None:
        """As a trainer does it: it ends all requests, waits for no load or store, and empties the device's cache
        alone."""
        self._core.abort(None)
        self.is_changing_weights = self._replacing = True

    def notice_change(self) -> None:
        """A call that may have changed the weights, and has not: what every engine had must stay right. It comes from
        the scheduler's thread, or from another one, while vLLM admits a request if possible."""
        moment = self._random.randrange(3)
        if moment == 0:
            self._notice()
        elif moment == 1:
            self._notice_elsewhere()
        else:
            self._notices_at_admission = True

    def _notice(self) -> None:
        scheduler_host_of(self._core.connector).weights_may_change(_CHANGE)

    def _notice_elsewhere(self) -> None:
        thread = threading.Thread(target=self._notice)
        thread.start()
        thread.join()

    def _notice_at_admissions(self) -> None:
        connector: Any = self._core.connector
        find = connector.get_num_new_matched_tokens

        def find_and_notice(*arguments: Any) -> tuple[int | None, bool]:
            found: tuple[int | None, bool] = find(*arguments)
            if found[0] and self._notices_at_admission:
                self._notices_at_admission = False
                self._notice_elsewhere()
            return found

        connector.get_num_new_matched_tokens = find_and_notice

    def _go_on_with_weights(self) -> None:
        if self._replacing:
            if not self._core.has_steps_in_flight:
                self._replacing, self._is_emptying = False, True
                self._notice()
                self._core.replace_weights()
        elif self._is_emptying:
            if self._core.scheduler.reset_prefix_cache():
                self.is_changing_weights = self._is_emptying = False
        elif not self._core.is_busy:
            self.is_changing_weights = False
            if not self._core.reset(preempt=False):
                self._core.report.add("the caches of an idle engine could not be reset")

    def lose_session(self) -> None:
        """The service has gone, and is back with its memory. The ranks join when their copies have ended."""
        self._host.service.lose()

    def lose_service(self) -> None:
        """The service ends at some moment of the step. The ranks notice that at once, the scheduler when it reads what
        has arrived."""
        self._dies_in, self._dies_under_a_load = self._random.randrange(3), self._random.random() < 0.7

    def pass_moment(self, output: Any) -> None:
        """A moment of the step `output` has passed, in which ranks may have looked at their sessions."""
        is_due = output.has_sync_kv_loads if self._dies_under_a_load else self._dies_in == 0
        self._dies_in -= 1
        if is_due:
            self._dies_under_a_load, self._dies_in = False, -1
            self._host.service.die()
            self._core.report.deaths += 1
        if is_due or self._random.random() < 0.5:
            self._host.look_at_sessions()

    def restart_rank(self) -> None:
        """Its pool is another one, with nothing in it, as after a sleep. First the one whose copy thread is dead."""
        rank = self._random.choice(self._core.ranks) if self._broken is None else self._core.ranks[self._broken]
        self._broken = None
        rank.connector.unregister_kv_caches()
        rank.connector.restore_kv_caches()

    def kill_copy_thread(self) -> None:
        """The rank moves nothing any more until it is restarted."""
        if self._broken is None:
            self._broken = self._random.randrange(self._setup.ranks)
            self._host.workers[self._broken].kill_copy_thread()
            self._restart_in = 10

    def _some_keys(self) -> list[bytes]:
        blocks = self._engine.blocks(self._random.randrange(self._setup.slots), 8).blocks
        return [bytes.fromhex(block.key) for block in blocks]

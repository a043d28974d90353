from __future__ import annotations

import threading

import pytest
from tests.doubles.fakes import FakeClock, Latch
from tests.waiting import eventually

from kvstow.errors import CopyError, PinError
from kvstow.memory.hoststeps import IDLE_SECONDS, CallBudget, CallQueue, HostSteps, RegisterCall


class NotedSteps(HostSteps):
    """Notes what the pinning thread offers. `offered` is None when nothing is."""

    offered: CallQueue | None = None

    def offer(self, queue: CallQueue, seconds: float) -> None:
        super().offer(queue, seconds)
        self.offered = queue

    def withdraw(self) -> None:
        super().withdraw()
        self.offered = None


class Host:
    """A host whose steps launch for three quarters of their time and wait for the last one."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.steps = NotedSteps(self.clock)

    def step(self, seconds: float) -> None:
        self.steps.begin()
        self.clock.advance(seconds * 3 / 4)
        self.steps.launched()
        self.steps.end()
        self.clock.advance(seconds / 4)

    @property
    def state(self) -> str:
        return self.steps.state(self.clock())


class Calls:
    """Calls that a thread of their own offers, each of so many seconds; on which thread they were made."""

    def __init__(self, host: Host, seconds: float, number: int = 1, error: BaseException | None = None) -> None:
        self.made_by: list[threading.Thread] = []
        self.errors: list[Exception] = []
        self._host, self._seconds, self._number, self._error = host, seconds, number, error
        self._seen: object = None
        self.thread = threading.Thread(target=self._offer, daemon=True)
        self.thread.start()

    def wait_for_offer(self) -> None:
        """The next one, after those that were waited for before."""
        before = self._seen
        eventually(lambda: self._host.steps.offered not in (None, before))
        self._seen = self._host.steps.offered

    def _offer(self) -> None:
        for _ in range(self._number):
            try:
                self._host.steps.run(self._call, 1, self._seconds)
            except (ValueError, PinError) as error:
                self.errors.append(error)

    def _call(self) -> None:
        self.made_by.append(threading.current_thread())
        self._host.clock.advance(self._seconds)
        if self._error is not None:
            raise self._error


def test_a_host_that_never_begins_a_step_is_idle_once_it_has_started() -> None:
    host = Host()
    assert host.state == "idle"
    host.steps.is_starting = True
    assert host.state == "starting"
    host.step(0.01)
    assert not host.steps.is_starting, "a host that makes steps has started"


def test_a_host_is_idle_when_it_has_waited_for_long() -> None:
    host = Host()
    host.steps.begin()
    assert host.state == "stepping"
    host.steps.launched()
    assert host.state == "stepping"
    host.clock.advance(IDLE_SECONDS)
    assert host.state == "idle", "its device is busy for long, or it has no work"


def test_a_step_that_never_ends_does_not_block_pinning_forever() -> None:
    host = Host()
    host.steps.begin()
    host.clock.advance(10.0)
    assert host.state == "idle"


def test_only_launches_count_as_steps_that_pay_for_a_call() -> None:
    counted: list[float] = []

    class NotedBudget(CallBudget):
        def end_step(self, seconds: float, expected: float) -> None:
            counted.append(seconds)
            super().end_step(seconds, expected)

    host = Host()
    host.steps.budget = NotedBudget()
    host.step(0.010)
    for _ in range(1000):
        host.steps.begin()
        host.steps.end()
    host.clock.advance(0.010)
    assert host.state == "stepping"
    host.step(0.050)
    assert counted == [pytest.approx(0.0025 + 0.010 + 0.0375)], "from launch to launch"


@pytest.mark.parametrize("is_starting", [False, True])
def test_without_steps_of_the_host_the_offering_thread_makes_the_call_at_once(is_starting: bool) -> None:
    host = Host()
    host.steps.is_starting = is_starting
    calls = Calls(host, 0.001)
    calls.thread.join(60)
    assert calls.made_by == [calls.thread]


def test_while_the_host_makes_steps_its_own_thread_makes_the_calls() -> None:
    host = Host()
    host.step(0.020)
    calls = Calls(host, 0.0010, number=1000)
    calls.wait_for_offer()
    for _ in range(400):
        before = len(calls.made_by)
        host.step(0.020)
        assert len(calls.made_by) <= before + 1
        if len(calls.made_by) > before:
            calls.wait_for_offer()
    assert set(calls.made_by) == {threading.current_thread()}
    assert len(calls.made_by) == pytest.approx(0.44 * 400, rel=0.02), "fewer than half of the steps have one"
    host.clock.advance(IDLE_SECONDS)
    calls.thread.join(60)
    assert len(calls.made_by) == 1000
    assert calls.made_by[-1] is calls.thread, "an idle host leaves the rest to the pinning thread"


@pytest.mark.parametrize("ending", ["made", "held", "stopped", "idle"])
def test_the_pinning_thread_waits_through_its_looks_until_there_is_something_to_do(
    quick_checks: None, ending: str
) -> None:
    host, queue = Host(), CallQueue()
    queue.add([RegisterCall(lambda: None, 1)] * 3)
    host.step(0.020)
    host.steps.offer(queue, 0.001)
    waiting = threading.Thread(target=host.steps.wait, args=(queue, 2), daemon=True)
    waiting.start()
    eventually(lambda: host.steps.checks >= 5)
    assert waiting.is_alive(), "each return would run the pool's Python beside the host's steps"
    if ending == "made":
        while queue.made < 2:
            host.step(0.020)
    elif ending == "held":
        queue.hold(True)
    elif ending == "stopped":
        queue.stop()
    else:
        host.clock.advance(IDLE_SECONDS)
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_host_whose_device_works_on_a_step_is_not_idle() -> None:
    host, work = Host(), Latch()
    host.steps.begin()
    host.steps.launched(work)
    host.steps.end()
    assert host.state == "stepping"
    host.clock.advance(IDLE_SECONDS)
    assert host.state == "waiting"
    work.open()
    assert host.state == "idle"


def test_work_whose_end_the_driver_cannot_tell_counts_as_finished() -> None:
    class Lost:
        def query(self) -> bool:
            raise CopyError("the device is lost")

    host = Host()
    host.steps.launched(Lost())
    host.clock.advance(IDLE_SECONDS)
    assert host.state == "idle"


@pytest.mark.parametrize("is_stepping", [False, True])
def test_an_error_of_a_call_reaches_the_pinning_thread_and_never_the_host(is_stepping: bool) -> None:
    host, error = Host(), ValueError("refused")
    if is_stepping:
        host.step(0.010)
    calls = Calls(host, 0.0001, error=error)
    if is_stepping:
        calls.wait_for_offer()
        for _ in range(2):
            host.step(0.010)
    calls.thread.join(60)
    assert calls.errors == [error]
    assert calls.made_by == [threading.current_thread() if is_stepping else calls.thread]
    assert host.steps.offered is None


def test_a_call_is_made_once_by_the_thread_that_claims_it_first() -> None:
    """The host goes idle just as it begins to make the call: the pinning thread waits for it."""
    host, begun, go_on = Host(), threading.Event(), threading.Event()
    made: list[int] = []

    def call() -> None:
        made.append(1)
        begun.set()
        assert go_on.wait(60)

    host.step(0.010)
    offering = threading.Thread(target=host.steps.run, args=(call, 1, 0.0001), daemon=True)
    offering.start()
    eventually(lambda: host.steps.offered is not None)
    stepping = threading.Thread(target=host.step, args=(0.080,), daemon=True)
    stepping.start()
    assert begun.wait(60)
    host.clock.advance(IDLE_SECONDS * 100)
    offering.join(IDLE_SECONDS * 5)
    assert offering.is_alive(), "the call is under way"
    go_on.set()
    offering.join(60)
    stepping.join(60)
    assert made == [1]


def test_a_signal_in_the_middle_of_a_call_ends_the_host_and_not_the_pinning_thread() -> None:
    """vLLM ends a worker by a signal handler that raises SystemExit, once."""
    host = Host()
    host.step(0.010)
    calls = Calls(host, 0.0001, error=SystemExit())
    calls.wait_for_offer()
    with pytest.raises(SystemExit):
        host.step(0.010)
    calls.thread.join(60)
    assert [type(error) for error in calls.errors] == [PinError], "it is unknown whether the call was made"
    assert host.steps.offered is None


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_signal_around_the_claim_loses_no_offer(is_claimed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes just before or just after the host's thread has claimed the offer."""
    host = Host()
    host.step(0.010)
    calls = Calls(host, 0.0001)
    calls.wait_for_offer()
    offer = host.steps.offered
    assert offer is not None
    claim = offer.claim

    def interrupted() -> bool:
        if is_claimed:
            claim()
        raise KeyboardInterrupt

    monkeypatch.setattr(offer, "claim", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.step(0.010)
    calls.thread.join(60)
    assert not calls.thread.is_alive()
    assert ([type(error) for error in calls.errors], calls.made_by) == ([PinError], [])


def test_a_host_whose_steps_have_no_work_for_the_device_is_idle() -> None:
    """vLLM steps without a forward pass while requests wait for their loads: nothing would make the calls."""
    host = Host()
    host.step(0.010)
    calls = Calls(host, 0.001)
    calls.wait_for_offer()
    for _ in range(5):
        host.steps.begin()
        host.clock.advance(IDLE_SECONDS / 2)
        host.steps.end()
    assert host.state == "idle"
    calls.thread.join(60)
    assert calls.made_by == [calls.thread]


def test_nothing_is_called_on_the_hosts_thread_once_the_pool_closes() -> None:
    host = Host()
    host.step(0.010)
    calls = Calls(host, 0.0001)
    calls.wait_for_offer()
    host.steps.close()
    host.step(0.010)
    calls.thread.join(60)
    assert calls.made_by == [calls.thread]


def test_each_call_is_made_once_while_the_host_steps_and_pauses_at_random() -> None:
    """On real clocks: the pinning thread and the host race for each offer, as the host is idle in between."""
    steps = HostSteps()
    made: list[int] = []

    def offer() -> None:
        for number in range(300):
            steps.run(lambda: made.append(number), 1, 0.0)  # noqa: B023 (called before `run` returns)

    pinning = threading.Thread(target=offer, daemon=True)
    pinning.start()
    while pinning.is_alive():
        steps.begin()
        steps.launched()
        steps.end()
        if len(made) % 7 == 0:
            pinning.join(IDLE_SECONDS * 1.02)
    assert made == list(range(300))

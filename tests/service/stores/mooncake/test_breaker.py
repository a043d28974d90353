from tests.doubles.fakes import FakeClock

from kvstow_service.stores.mooncake.breaker import PROBE_SECONDS, Breaker


def test_an_outage_opens_it_and_a_probe_that_succeeds_closes_it() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    assert breaker.is_closed
    assert not breaker.wants_probe()
    assert breaker.note_outage("no master")
    assert (breaker.state, breaker.reason, breaker.opened) == ("open", "no master", 1)
    clock.advance(PROBE_SECONDS - 0.1)
    assert not breaker.wants_probe()
    clock.advance(0.1)
    assert breaker.wants_probe()
    assert breaker.state == "half_open"
    assert not breaker.wants_probe(), "one probe at a time"
    assert not breaker.note_probe("still no master")
    assert (breaker.state, breaker.reason) == ("open", "still no master")
    assert not breaker.wants_probe(), "the next one comes as long after that"
    clock.advance(PROBE_SECONDS)
    assert breaker.wants_probe()
    assert breaker.note_probe(None)
    assert (breaker.state, breaker.reason, breaker.opened) == ("closed", "", 1)


def test_what_began_before_it_opened_has_no_say() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    breaker.note_outage("first")
    assert not breaker.note_outage("second")
    breaker.note_success()
    assert not breaker.note_probe(None), "nobody has asked for a probe"
    assert (breaker.state, breaker.reason, breaker.opened) == ("open", "first", 1)


def test_three_failures_in_a_row_open_it() -> None:
    breaker = Breaker(FakeClock())
    for _ in range(5):
        assert not breaker.note_failure("slow")
        assert not breaker.note_failure("slow")
        breaker.note_success()
    assert [breaker.note_failure("slow") for _ in range(3)] == [False, False, True]
    assert breaker.reason == "slow"

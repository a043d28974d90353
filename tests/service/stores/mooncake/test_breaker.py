from tests.doubles.fakes import FakeClock

from kvstow_service.stores.mooncake.breaker import Breaker


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

"""Commands that change a server: effects, confirmations, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstow.hints import context_id

KEYS = [bytes([0, 0, number]) for number in range(6)]
HEX = [key.hex() for key in KEYS]


@pytest.fixture
def kvstow(kvstow: Any, host: Any) -> Any:
    host.store(*KEYS)
    return kvstow


def cached(host: Any) -> int:
    return int(host.engine.stats().pool.slots.cached)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["evict", "--slots", "2"], 4),
        (["evict", "--size", "12KiB"], 3),
        (["evict", "--idle", "0"], 0),
        (["purge", "--all"], 0),
        (["purge", HEX[0], HEX[1]], 4),
        (["purge", "--key-prefix", "0000"], 0),
        (["purge", "--age", "0"], 0),
        (["purge", "--idle", "1h"], 6),
        (["purge", "--slots", "1"], 5),
        (["purge", "--size", "8KiB"], 4),
        (["resize", "16KiB"], 4),
        (["resize", "--slots", "3"], 3),
        (["config", "set", "capacity_slots=2"], 2),
    ],
)
def test_destructive_commands_need_a_yes_and_have_a_dry_run(
    kvstow: Any, host: Any, arguments: list[str], left: int
) -> None:
    outcome = kvstow(*arguments, "--dry-run")
    assert outcome.exit_code == 0, outcome.stderr
    assert cached(host) == 6
    if left < 6:
        outcome = kvstow(*arguments)
        assert (outcome.exit_code, outcome.stdout) == (2, "")
        assert f" on {host.url}, and there is no terminal to confirm it on" in outcome.stderr
        assert "hint: --yes proceeds without a prompt" in outcome.stderr
    assert cached(host) == 6
    outcome = kvstow(*arguments, "--yes")
    assert (outcome.exit_code, outcome.stderr) == (0, f"server: {host.url}\n")
    assert cached(host) == left


def test_the_removed_amount_is_printed(kvstow: Any) -> None:
    assert kvstow("evict", "--slots", "1", "--dry-run").stdout == "would remove 1 block, 4 KiB of each rank\n"
    assert kvstow("evict", "--slots", "2", "--yes").stdout == "removed 2 blocks, 8 KiB of each rank\n"
    removed = json.loads(kvstow("purge", "--all", "--yes", "-o", "json").stdout)
    assert removed == {
        "evicted_slots": 4,
        "evicted_bytes": 16384,
        "stored_blocks": 0,
        "notice": "",
        "dry_run": False,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["evict"],
        ["evict", "--slots", "1", "--idle", "1s"],
        ["evict", "--size", "8 fish"],
        ["purge"],
        ["purge", "--all", "--slots", "1"],
        ["purge", "xyz", "--yes"],
        ["resize"],
        ["resize", "1GiB", "--slots", "4"],
        ["resize", "--slots", "9999"],
        ["evict", "--slots", "1", "--context", "trip"],
        ["purge", "--all", "--context", "trip"],
        ["release"],
        ["bypass"],
        ["bypass", "--off", "--load"],
        ["bypass", "--off", "--ttl", "1s"],
        ["config", "set", "policy"],
        ["config", "set", "policy=mru"],
        ["config", "set", "colour=red"],
        ["config", "log-level", "loud"],
        ["drain", "--mode", "some", "--yes"],
    ],
)
def test_invalid_arguments_are_exit_code_2_and_change_nothing(kvstow: Any, host: Any, arguments: list[str]) -> None:
    before = (host.engine.stats(), host.engine.desired())
    assert kvstow(*arguments).exit_code == 2
    assert (host.engine.stats(), host.engine.desired()) == before


def test_growing_needs_no_confirmation(kvstow: Any, host: Any) -> None:
    assert kvstow("resize", "--slots", "32").exit_code == 0
    assert host.engine.desired().capacity_slots == 32


def test_a_refused_value_comes_with_the_allowed_ones(kvstow: Any) -> None:
    said = kvstow("config", "set", "policy=mru").stderr
    assert said.endswith("policy is 'mru': this is not a policy; allowed: auto, lru\n")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000])
def test_a_number_that_json_does_not_have_is_refused_in_words(kvstow: Any, value: str) -> None:
    answer = kvstow("config", "set", f"policy={value}")
    assert answer.exit_code == 2
    assert answer.stderr.endswith(": this is not a policy; allowed: auto, lru\n")


def test_one_resize_runs_at_a_time_and_can_be_cancelled(kvstow: Any, host: Any) -> None:
    lease = host.engine.lease(KEYS)
    assert lease is not None
    identity = json.loads(kvstow("resize", "--slots", "2", "--yes", "--no-wait", "-o", "json").stdout)["id"]
    assert "waiting" in kvstow("get", "ops").stdout
    assert kvstow("config", "set", "capacity_slots=5", "--yes").exit_code == 5  # one at a time
    cancelled = kvstow("cancel", identity)
    assert "cancelled" in cancelled.stdout
    host.engine.release_lease(lease)


def test_a_context_is_released_by_its_id_or_its_name(kvstow: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bytes] = []

    def release(context: bytes) -> int:
        released.append(context)
        return 3

    monkeypatch.setattr(type(host.engine.admin), "release_context", staticmethod(release))
    by_salt = context_id("trip", "alice")
    for arguments in (["trip"], [context_id("trip").hex().upper()], ["trip", "--salt", "alice"]):
        assert kvstow("release", *arguments).stdout == "released 3 blocks\n"
    assert released == [context_id("trip"), context_id("trip"), by_salt]


def test_an_unknown_context_is_exit_code_4(kvstow: Any) -> None:
    assert kvstow("release", "nobody").exit_code == 4
    assert kvstow("describe", "context", "nobody").exit_code == 4


def test_a_dry_run_is_listed_as_one(kvstow: Any) -> None:
    kvstow("evict", "--slots", "2", "--dry-run")
    assert "would remove 2" in kvstow("get", "ops").stdout


def test_a_size_above_the_maximum_is_explained(kvstow: Any) -> None:
    outcome = kvstow("resize", "1GiB", "--yes")
    assert outcome.exit_code == 2
    assert (
        "capacity_bytes is 1073741824; allowed: 4096 (one slot) to 131072, the maximum of this host" in outcome.stderr
    )


def test_a_drain_begins_and_ends(kvstow: Any, host: Any) -> None:
    plan = "would stop loads and stores, and make /readyz fail; in flight: 0 transfers and 0 leases\n"
    assert kvstow("drain", "--dry-run").stdout == plan
    refused = kvstow("drain")
    assert (refused.exit_code, f" on {host.url}, and there is no terminal" in refused.stderr) == (2, True)
    assert not host.engine.admin.drain_status.active
    assert kvstow("drain", "--mode", "stop-stores", "--deadline", "30s", "--yes").exit_code == 0
    assert host.engine.admin.drain_status.mode == "stop_stores"
    assert kvstow("undrain", "--dry-run").stdout == "would end the drain\n"
    assert host.engine.admin.drain_status.active
    assert kvstow("undrain").exit_code == 0
    assert kvstow("undrain").stdout == "nothing to do: there was no drain\n"
    assert not host.engine.admin.drain_status.active


def test_a_bypass_begins_and_ends(kvstow: Any, host: Any) -> None:
    assert kvstow("bypass", "--store", "--ttl", "1h", "--dry-run").stdout == "would switch stores off for 1h\n"
    assert kvstow("bypass", "--off", "--dry-run").stdout == "would switch loads and stores on\n"
    assert not host.engine.admin.bypass.store
    assert kvstow("bypass", "--store", "--ttl", "1h").stdout == "stores are bypassed for another 1h\n"
    assert host.engine.admin.bypass.store
    assert kvstow("bypass", "--off").stdout == "nothing is bypassed\n"
    assert kvstow("bypass", "--off").stdout == "nothing to do: there was no bypass\n"
    assert not host.engine.admin.bypass.store


def test_pinning_pauses_resumes_and_retries(kvstow: Any, host: Any) -> None:
    assert kvstow("pinning", "pause").exit_code == 0
    assert host.engine.desired().paused
    assert kvstow("pinning", "resume").exit_code == 0
    assert not host.engine.desired().paused
    attempt = host.engine.desired().pin_attempt
    assert kvstow("pinning", "retry").stdout == f"ranks try again: attempt {attempt + 1}\n"


def test_settings_are_shown_and_changed(kvstow: Any, host: Any) -> None:
    assert json.loads(kvstow("config", "view", "-o", "json").stdout)["pools"]["host"]["policy"] == "auto"
    changed = kvstow("config", "set", "policy=lru", "pinning_paused=true").stdout
    assert changed.split() == ["capacity", "slots", "16", "policy", "lru", "pinning", "paused", "yes"]
    assert (host.engine.stats().pool.policy, host.engine.desired().paused) == ("lru", True)
    assert "debug" in kvstow("config", "log-level", "debug", "--logger", "kvstow.admin").stdout


def test_a_prompt_on_a_terminal(host: Any, on_terminal: Any) -> None:
    host.store(*KEYS)
    question = f"Remove 2 blocks, 8 KiB of each rank on {host.url}? [y/N]"
    for answer, words, code, left in (("n", "nothing was changed", 1, 6), ("y", "removed 2 blocks", 0, 4)):
        with on_terminal("evict", "--slots", "2") as terminal:
            terminal.until(question)
            terminal.type(f"{answer}\n")
            terminal.until(words)
            assert terminal.end() == code
        assert cached(host) == left


@pytest.fixture
def held(host: Any) -> Any:
    """All blocks are leased: no pool shrinks."""
    host.store(*KEYS)
    return host.engine.lease(KEYS)


def test_an_operation_is_followed_to_its_end(host: Any, held: Any, on_terminal: Any) -> None:
    with on_terminal("resize", "--slots", "2", "--yes") as terminal:
        terminal.until("14 of 14 slots, waiting for transfers")
        host.engine.release_lease(held)
        terminal.until("the pool has 2 slots")
        assert terminal.end() == 0


def test_an_operation_cancelled_elsewhere_is_an_error(kvstow: Any, held: Any, on_terminal: Any) -> None:
    with on_terminal("resize", "--slots", "2", "--yes") as terminal:
        terminal.until("waiting for transfers")
        (running,) = json.loads(kvstow("get", "ops", "-o", "json").stdout)["items"]
        kvstow("cancel", running["id"])
        terminal.until(f"{running['id']} was cancelled")
        assert terminal.end() == 1


def test_interrupting_says_that_the_operation_continues(held: Any, on_terminal: Any) -> None:
    with on_terminal("resize", "--slots", "2", "--yes") as terminal:
        terminal.until("waiting for transfers")
        terminal.type("\x03")
        terminal.until("is still running; `kvstow cancel resize-")
        assert terminal.end() == 1

"""All mutants: each takes one protection out, and a test must notice.

    python -m tests.mutants [NAME ...]

A `Mutant` replaces code. The command applies each in a copy of the checkout, runs its test there and says which ones
survived. A `Patched` mutant is a function, class or test that patches the code while its test runs: the test itself
asserts that somebody notices, so it is part of the suite. `test_mutants.py` holds this list to the code.

The tests run with this interpreter, those of tests/vllm with that of the newest vLLM's environment, and those of
tests/jax and tests/tpu with those of `.venv-jax` and `.venv-tpu`, where they exist.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """`code` stands exactly once in the file `path`; with `instead` in its place, `test` fails."""

    name: str
    path: str
    code: str
    instead: str
    test: str


@dataclass(frozen=True)
class Patched:
    """What `path` defines by `names`; `test` runs them all and passes, because each is noticed."""

    path: str
    names: tuple[str, ...]
    test: str


CONTROL = "tests/engine/control"
CONTROL_CODE = "engine/kvstow/control"
OPS = "engine/kvstow/control/ops.py"
COPYTHREAD = "engine/kvstow/copythread.py"
JAX = "engine/kvstow/devices/jax"
RANK_MEMORY = "service/kvstow_service/node/pools/memoryholder.py"
MEMFD = "engine/kvstow/memfd.py"
RECORDS = "service/kvstow_service/node/pools/noderecords.py"
SURVIVORS = "service/kvstow_service/node/survival/roster.py"
SURVIVAL = "tests/service/node/survival/test_survival.py"
AUTH = "api/kvstow_api/auth.py"
AGENT = "service/kvstow_service/admin/agent.py"
RANK_SOCKET = "service/kvstow_service/admin/ranksocket.py"
ADMISSION = "api/kvstow_api/middleware.py"
HEADER = "service/kvstow_service/stores/mooncake/objectheader.py"
MOONCAKE_BLOCKS = "service/kvstow_service/stores/mooncake/mooncakeblocks.py"
NODE_STORE = "service/kvstow_service/node/tier/nodestore.py"
DISK, DISK_TESTS = "service/kvstow_service/stores/disk", "tests/service/stores/disk"
POOL_TIER = "engine/kvstow/control/pooltier.py"
POOL_TIER_TESTS = "tests/engine/control/test_pooltier.py"
ENGINE_CORE = "service/kvstow_service/connectors/engine_core"
ADAPTERS = "tests/service/connectors/engine_core/test_adapters.py"
DESCRIPTIONS = "tests/engine/control/test_descriptions.py"
EVENT_FEED = "tests/service/connectors/engine_core/test_kvevents.py"
DESCRIBED_STORES = "tests/service/connectors/engine_core/test_describedstores.py"
VLLM = "service/kvstow_service/connectors/vllm"
WATCH = "tests/vllm/test_weightwatch.py"

LAYERS = "engine/kvstow/devices/cuda/layerloader.py"
LOAD_POLICY = "tests/service/connectors/engine_core/test_loadpolicy.py"
LAYER_WAYS = "tests/engine/devices/test_cuda_layerways.py"
LAYER_TESTS = "tests/engine/devices/test_cuda_layers.py"

NODE_API = "tests/api/node/test_conditions.py"
OVERVIEW = "tests/api/test_overview.py"
NODE_HOST = "tests/service/node/test_nodehost.py"
NODE_MEMORY = "tests/engine/memory/test_nodememory.py"

MIDDLEWARE = "service/kvstow_service/connectors/middleware.py"
MIDDLEWARE_TESTS = "tests/service/connectors/test_middleware.py"
HINT_TESTS = "tests/service/connectors/engine_core/test_hints.py"
PREFILL_METER = "tests/service/connectors/engine_core/test_prefillmeter.py"
SAVINGS = "tests/service/connectors/engine_core/test_savings.py"

FAIRNESS = "tests/engine/memory/test_fairness.py"

LEARNED = f"{CONTROL}/test_learned.py"

# Random schedules over real bytes.
STATE_MACHINE = f"{CONTROL}/test_state_machine.py::test_with_all_safeguards_nothing_goes_wrong"
SESSION_SCHEDULES = f"{CONTROL}/test_session_schedules.py::test_with_all_safeguards_nothing_goes_wrong"
JOURNALED_SCHEDULES = (
    f"{CONTROL}/test_slotjournal.py::test_a_restart_at_any_write_recovers_all_blocks_and_reuses_no_slot_too_early"
)
SHARING = "tests/vllm/test_sharing.py"
SHARED_LOADS = "tests/service/connectors/engine_core/test_sharedloads.py"
ADAPTER_VERSIONS = (
    "tests/service/connectors/engine_core/test_adapterversions.py"
    "::test_no_request_is_served_what_another_version_has_computed"
)
BUDGET = "tests/engine/memory/test_budget.py::test_whatever_happens_the_guarantees_hold"

MUTANTS = [
    Mutant(
        "a_store_evicts_whatever_it_wants",
        f"{CONTROL_CODE}/chains.py",
        "limit = Limit(self.place_of(part), part.request is None, part)",
        "limit = NO_LIMIT",
        f"{LEARNED}::test_a_running_request_evicts_nothing_that_is_needed_sooner",
    ),
    Mutant(
        "what_was_refused_is_not_stored_at_the_end",
        f"{CONTROL_CODE}/pool.py",
        "                        running.lacks_blocks()\n",
        "                        pass\n",
        f"{LEARNED}::test_a_running_request_evicts_nothing_that_is_needed_sooner",
    ),
    Mutant(
        "what_was_lent_is_not_taken_back",
        f"{CONTROL_CODE}/chains.py",
        "            running.lacks_blocks()\n",
        "",
        f"{LEARNED}::test_what_a_running_request_uses_may_go_and_is_taken_back_at_its_end",
    ),
    Mutant(
        "a_part_stays_with_the_request_that_has_lost_it",
        f"{CONTROL_CODE}/chains.py",
        "                del before.request.parts[before]\n",
        "                pass\n",
        f"{LEARNED}::test_blocks_run_until_the_request_that_has_taken_them_last_ends",
    ),
    Mutant(
        "unknown_blocks_stand_for_those_that_are_not_used",
        f"{CONTROL_CODE}/chains.py",
        "part.order.expected.find(piece.absent).count(part) == part.expected",
        "True",
        f"{LEARNED}::test_a_request_with_unknown_blocks_leaves_others_what_it_does_not_use",
    ),
    Mutant(
        "a_slot_that_comes_back_to_its_part_counts_twice",
        f"{CONTROL_CODE}/chains.py",
        "return list(dict.fromkeys([slot for slot in part.slots if owner[slot] is part]))",
        "return [slot for slot in part.slots if owner[slot] is part]",
        f"{LEARNED}::test_a_slot_that_comes_back_to_its_part_is_counted_once",
    ),
    Mutant(
        "what_another_engine_has_found_is_lent",
        f"{CONTROL_CODE}/chains.py",
        "            if part.is_shared:",
        "            if False:",
        f"{LEARNED}::test_what_another_engine_has_found_meanwhile_is_not_lent",
    ),
    Mutant(
        "nobody_says_after_the_end_what_was_lent",
        "service/kvstow_service/node/pools/nodesession.py",
        "        if ended.is_incomplete:",
        "        if False:",
        "tests/service/node/pools/test_nodesession.py"
        "::test_an_engine_is_told_after_the_end_of_a_request_that_some_of_its_blocks_were_lent",
    ),
    Mutant(
        "what_is_known_late_is_not_stored",
        f"{ENGINE_CORE}/schedulerside.py",
        "            self._stores.offer_again(late)\n",
        "            pass\n",
        "tests/service/connectors/engine_core/test_runningrequests.py"
        "::test_what_was_lent_is_stored_again_if_that_is_known_only_after_the_end",
    ),
    Mutant(
        "lru_goes_by_the_end_of_requests",
        f"{CONTROL_CODE}/chains.py",
        "            part.by_start = self.is_lru\n",
        "",
        f"{LEARNED}::test_the_policy_lru_goes_by_the_start_of_the_last_request",
    ),
    Mutant(
        "what_is_stored_late_was_used_late",
        f"{CONTROL_CODE}/chains.py",
        "steps < _MOST_STEPS and last.since > watch.since",
        "False",
        f"{LEARNED}::test_the_policy_lru_goes_by_the_start_of_the_last_request",
    ),
    Mutant(
        "uses_are_not_recorded",
        f"{CONTROL_CODE}/pool.py",
        "            if not self.journal_pasts():\n                break\n",
        "            break\n",
        "tests/service/node/test_noderestart.py::test_what_was_learned_of_blocks_and_traffic_outlives_the_service",
    ),
    Mutant(
        "pairs_of_an_earlier_life_do_not_count_towards_halving",
        "engine/kvstow/endings.py",
        "                self._total += count\n",
        "",
        f"{LEARNED}::test_the_counts_of_pairs_are_halved_as_often_after_a_restart",
    ),
    Mutant(
        "a_transfer_within_a_step_is_told_with_the_next_request",
        "service/kvstow_service/connectors/engine_core/metricsexport.py",
        "(self._was_busy or not _SIZES.isdisjoint(self._observed))",
        "self._was_busy",
        "tests/vllm/test_metricsexport.py"
        "::test_counters_are_read_ten_times_a_second_and_when_the_last_transfer_has_ended",
    ),
    Mutant(
        "what_was_learned_is_not_recorded",
        f"{CONTROL_CODE}/pool.py",
        "                    self.journal.write_learned(self.requests.endings.dump() + observed)\n",
        "                    pass\n",
        "tests/service/node/test_noderestart.py::test_what_was_learned_of_blocks_and_traffic_outlives_the_service",
    ),
    Mutant(
        "nobody_reads_what_was_learned",
        f"{CONTROL_CODE}/sharedpool.py",
        "        pool.learn_from(pool.journal.learned())\n",
        "",
        "tests/service/node/test_noderestart.py::test_what_was_learned_of_blocks_and_traffic_outlives_the_service",
    ),
    Mutant(
        "recovered_blocks_were_never_used",
        f"{CONTROL_CODE}/sharedpool.py",
        "        pasts = pool.journal.pasts(limit)\n",
        "",
        "tests/service/node/test_noderestart.py::test_what_was_learned_of_blocks_and_traffic_outlives_the_service",
    ),
    Mutant(
        "damaged_lessons_are_believed",
        f"{CONTROL_CODE}/indexjournal.py",
        'return found if zlib.crc32(found) == checksum else b""',
        "return found",
        f"{CONTROL}/test_indexjournal.py::test_what_was_learned_is_dropped_if_a_byte_of_it_has_changed",
    ),
    Mutant(
        "a_pair_of_tokens_changes_its_state_over_a_restart",
        "engine/kvstow/endings.py",
        "self._counts[pair[0], pair[1]], self._states[pair[0], pair[1]] = count, state",
        "pass",
        f"{LEARNED}::test_a_pair_of_tokens_keeps_its_state",
    ),
    Mutant(
        "every_use_of_a_burst_counts",
        f"{CONTROL_CODE}/chains.py",
        "now - before.running.since >= SAME_USE",
        "now - before.running.since >= 0",
        f"{LEARNED}::test_uses_within_two_seconds_count_once",
    ),
    Mutant(
        "blocks_are_classed_by_uses_alone",
        f"{CONTROL_CODE}/hazards.py",
        " + _USES * bisect_right(_PAUSES, pause) if uses",
        " if uses",
        f"{LEARNED}::test_blocks_are_classed_by_the_pause_before_their_last_use",
    ),
    Mutant(
        "a_long_request_is_a_pause",
        f"{CONTROL_CODE}/chains.py",
        "0.0 if before.ended is None else now - before.ended.since",
        "0.0 if before.running is None else now - before.running.since",
        f"{LEARNED}::test_blocks_are_classed_by_the_pause_before_their_last_use",
    ),
    Mutant(
        "every_length_of_a_pause_is_learned_anew",
        f"{CONTROL_CODE}/hazards.py",
        "levels[due, None] == levels",
        "due[:, None] == np.arange(len(levels))",
        f"{LEARNED}::test_little_is_known_of_a_pause_and_much_of_blocks_that_were_used_as_often",
    ),
    Mutant(
        "the_curve_takes_what_it_splits_for_blocks_that_have_waited_for_ever",
        "engine/kvstow/control/curve.py",
        ", head.since, head.request = run.past, run.started, run.since, run.request",
        " = run.past, run.started",
        f"{CONTROL}/test_curve.py::test_a_beginning_that_is_used_alone_has_waited_as_long_as_its_chain",
    ),
    Mutant(
        "the_clock_of_running_blocks_ends_with_their_request",
        f"{CONTROL_CODE}/chains.py",
        "for watch in (part.running, part.ended):\n                self._link",
        "for watch in (part.ended,):\n                self._link",
        f"{LEARNED}::test_a_return_counts_by_how_long_the_blocks_have_waited",
    ),
    Mutant(
        "nothing_is_known_of_evicted_blocks",
        f"{CONTROL_CODE}/chains.py",
        "        self._known[part.number] = part\n",
        "",
        f"{LEARNED}::test_uses_are_remembered_after_eviction",
    ),
    Mutant(
        "held_blocks_are_evicted",
        f"{CONTROL_CODE}/chains.py",
        "free = self._held.free_of(some)",
        "free = list(some)",
        f"{LEARNED}::test_a_held_block_stays_and_returns_to_the_order_with_its_last_hold",
    ),
    Mutant(
        "what_was_held_is_never_evicted",
        f"{CONTROL_CODE}/index.py",
        "        self.chains.unhold(slots)\n",
        "",
        f"{LEARNED}::test_a_held_block_stays_and_returns_to_the_order_with_its_last_hold",
    ),
    Mutant(
        "requests_of_a_lost_session_run_for_ever",
        f"{CONTROL_CODE}/attachedsession.py",
        "LeaseBook()\n        self.leave_requests()\n",
        "LeaseBook()\n",
        f"{LEARNED}::test_requests_of_a_session_that_is_lost_end",
    ),
    Mutant(
        "a_session_runs_any_number_of_requests",
        f"{CONTROL_CODE}/session.py",
        "if ended is None and len(self._running) >= MOST_RUNNING:",
        "if False:",
        f"{LEARNED}::test_too_many_requests_end_the_oldest",
    ),
    Mutant(
        "a_fetch_is_a_use",
        f"{CONTROL_CODE}/chains.py",
        "if before.fetch == _UNUSED:",
        "if False:",
        f"{LEARNED}::test_what_was_fetched_is_a_class_of_its_own_until_the_next_hit",
    ),
    Mutant(
        "what_the_store_below_has_is_like_other_blocks",
        f"{CONTROL_CODE}/chains.py",
        "FETCHED if part.fetch else state",
        "state",
        f"{LEARNED}::test_what_the_store_below_has_is_of_the_class_of_fetched_blocks",
    ),
    Mutant(
        "a_chain_is_in_the_store_below_as_a_whole",
        f"{CONTROL_CODE}/chains.py",
        "count = self.below.leading(own)",
        "count = len(own) * bool(self.below.leading(own))",
        f"{LEARNED}::test_what_the_store_below_has_is_of_the_class_of_fetched_blocks",
    ),
    Mutant(
        "what_is_stored_anew_counts_as_in_the_store_below",
        f"{CONTROL_CODE}/chains.py",
        "            self.below.discard(slots)\n",
        "            pass\n",
        f"{LEARNED}::test_a_block_that_was_stored_anew_is_not_in_the_store_below",
    ),
    Mutant(
        "what_is_cheap_to_read_keeps_its_place",
        f"{CONTROL_CODE}/hazards.py",
        "seen.fetch_cost * rows",
        "rows",
        f"{LEARNED}::test_what_is_cheap_to_read_has_a_low_place",
    ),
    Mutant(
        "what_was_written_is_not_known",
        POOL_TIER,
        "        self._pool.index.chains.below.add(piece.good)\n",
        "",
        f"{POOL_TIER_TESTS}::test_what_was_written_is_known_to_be_in_the_store",
    ),
    Mutant(
        "blocks_that_do_not_come_cost_nothing",
        POOL_TIER,
        "read.of.even.note_read(len(piece.good), len(piece.bad))",
        "read.of.even.note_read(len(piece.good), 0)",
        f"{POOL_TIER_TESTS}::test_a_store_that_brings_nothing_back_is_asked_for_no_more_than_probes",
    ),
    Mutant(
        "reads_that_were_given_up_count_as_lost",
        POOL_TIER,
        "                self._reads[op_id].is_cancelled = True\n",
        "                pass\n",
        f"{POOL_TIER_TESTS}::test_a_read_that_was_given_up_says_nothing_about_what_the_store_loses",
    ),
    Mutant(
        "what_does_not_pay_is_cheap_to_read",
        POOL_TIER,
        " if estimate.pays else 1.0\n",
        "\n",
        f"{POOL_TIER_TESTS}::test_the_cost_of_reading_is_an_average_of_the_decisions",
    ),
    Mutant(
        "a_store_that_has_failed_is_cheap_to_read",
        POOL_TIER,
        "            self.failure = TIER_FAILED\n            self._pool.index.chains.hazards.fetch_cost = 1.0\n",
        "            self.failure = TIER_FAILED\n",
        f"{POOL_TIER_TESTS}::test_nothing_is_cheap_to_read_from_a_store_that_is_not_used",
    ),
    Mutant(
        "who_sends_most_teaches_most",
        f"{CONTROL_CODE}/shares.py",
        "weight = self._total / (len(self._counts) * len(salts) * own)",
        "weight = 1.0",
        f"{LEARNED}::test_every_salt_teaches_as_much",
    ),
    Mutant(
        "a_context_belongs_to_its_name",
        f"{CONTROL_CODE}/contexts.py",
        "place = _Place(namespace.tag, hints.context, chain[0])",
        'place = _Place(namespace.tag, hints.context, b"")',
        f"{LEARNED}::test_a_name_in_a_strangers_request_releases_only_its_own_chain",
    ),
    Mutant(
        "contexts_pile_up",
        f"{CONTROL_CODE}/contexts.py",
        "while len(self._contexts) > MOST_CONTEXTS or self._num_keys > MOST_KEYS:",
        "while False:",
        f"{LEARNED}::test_contexts_are_bounded",
    ),
    Mutant(
        "a_key_that_repeats_is_taken_twice",
        f"{CONTROL_CODE}/index.py",
        "if len(set(keys)) < len(keys):  # no chain",
        "if False:  # no chain",
        f"{LEARNED}::test_a_repeated_key_counts_once",
    ),
    Mutant(
        "damaged_hazards_are_believed",
        f"{CONTROL_CODE}/hazards.py",
        "or not np.isfinite(found).all()",
        "",
        f"{LEARNED}::test_damaged_hazards_are_dropped",
    ),
    Mutant(
        "a_pair_of_tokens_inherits_what_another_has_taught",
        "engine/kvstow/endings.py",
        "            states[pair] = states.pop(rarest)\n            return states[pair], True\n",
        "            states[pair] = states.pop(rarest)\n            return states[pair], False\n",
        f"{LEARNED}::test_a_state_that_gets_another_meaning_forgets_what_was_learned",
    ),
    Mutant(
        "a_hint_crosses_a_salt",
        f"{ENGINE_CORE}/hints.py",
        'context_id(name, getattr(request, "cache_salt", None) or "")',
        "context_id(name)",
        f"{HINT_TESTS}::test_contexts_of_two_salts_differ",
    ),
    Mutant(
        "a_bad_hint_is_an_error",
        f"{ENGINE_CORE}/hints.py",
        "type(value) in (int, float) and 0 <= value",
        "value is not None and 0 <= value",
        f"{HINT_TESTS}::test_no_hint_is_an_error",
    ),
    Mutant(
        "what_follows_a_removed_slot_in_its_chain_is_lost",
        f"{CONTROL_CODE}/keytable.py",
        "nexts[before[is_second]] = nexts[rest[is_second]]",
        "nexts[before[is_second]] = _END",
        f"{CONTROL}/test_keytable.py::test_the_table_is_a_dictionary_while_its_buckets_are_split",
    ),
    Mutant(
        "evicted_keys_are_remembered_for_the_wrong_part",
        f"{CONTROL_CODE}/index.py",
        "                at += len(some)\n",
        "",
        f"{LEARNED}::test_what_is_evicted_together_is_remembered_by_part",
    ),
    Mutant(
        "a_body_that_is_no_json_fails_its_request",
        MIDDLEWARE,
        "except (ValueError, RecursionError):",
        "except ZeroDivisionError:",
        f"{MIDDLEWARE_TESTS}::test_other_bodies_arrive_as_they_came",
    ),
    Mutant(
        "a_body_has_the_length_that_it_had_before",
        MIDDLEWARE,
        'b"%d" % size if name == b"content-length" else value',
        "value",
        f"{MIDDLEWARE_TESTS}::test_hints_are_added_to_the_transfer_parameters",
    ),
    Mutant(
        "a_body_of_any_length_is_kept",
        MIDDLEWARE,
        "while size <= MOST_BYTES:",
        "while True:",
        f"{MIDDLEWARE_TESTS}::test_a_body_that_is_too_long_is_passed_on_while_it_comes",
    ),
    Mutant(
        "other_words_count_more_than_the_clients_own",
        MIDDLEWARE,
        "{**hints, **own}",
        "{**own, **hints}",
        f"{MIDDLEWARE_TESTS}::test_what_the_client_says_to_kvstow_itself_counts_more",
    ),
    Mutant(
        "what_every_request_says_hides_how_it_ended",
        "service/kvstow_service/connectors/otherwords.py",
        "{} if seconds == _DEFAULT_SECONDS else {",
        "{",
        "tests/service/connectors/test_otherwords.py::test_words_in_a_body",
    ),
    Mutant(
        "how_long_blocks_are_to_be_kept_is_not_learned",
        f"{CONTROL_CODE}/session.py",
        "hints.keep_for if hints.resume_in is None else hints.resume_in",
        "hints.resume_in",
        f"{LEARNED}::test_what_a_client_says_classes_the_request_with_or_without_a_name",
    ),
    Mutant(
        "requests_that_let_nothing_be_stored_are_stored",
        f"{ENGINE_CORE}/stores.py",
        " or not tracked.may_store:",
        ":",
        f"{HINT_TESTS}::test_nothing_of_it_is_stored",
    ),
    Mutant(
        "the_backlog_stores_what_must_not_be_stored",
        f"{ENGINE_CORE}/gpublocks.py",
        "if block_hash is not None and not self._gpu.is_unstored(block_hash):",
        "if block_hash is not None:",
        f"{HINT_TESTS}::test_the_backlog_stores_none_of_its_blocks",
    ),
    Mutant(
        "what_must_not_be_stored_is_stored_lazily",
        f"{ENGINE_CORE}/stores.py",
        " and not self._gpu.is_unstored(content):",
        ":",
        f"{HINT_TESTS}::test_lazily_none_of_its_blocks_is_stored_until_another_request_has_them",
    ),
    Mutant(
        "an_engine_may_send_any_number_of_hints",
        "service/kvstow_service/node/pools/nodesession.py",
        "if hints is not None and not self._hint_rate.admits(self.pool.clock()):",
        "if False:",
        "tests/service/node/pools/test_nodesession.py::test_more_hints_than_an_engine_can_send_are_ignored",
    ),
    Mutant(
        "everybody_sees_the_names_of_contexts",
        "api/kvstow_api/routes/contexts.py",
        '    if not is_admin(request.scope.get(ACTOR, "")):\n        items',
        "    if False:\n        items",
        "tests/api/routes/test_contexts.py::test_contexts_come_in_pages_with_ids_and_names_for_admins_alone",
    ),
    Mutant(
        "what_an_operator_expects_moves_no_prefetch",
        "engine/kvstow/control/administration.py",
        "            pool.tier.expect_context(context)\n",
        "            pass\n",
        "tests/engine/control/test_pooltier.py::test_an_operator_who_says_when_a_context_comes_back_moves_its_prefetch",
    ),
    Mutant(
        "names_of_contexts_can_be_tried",
        "api/kvstow_api/routes/contexts.py",
        '    if not is_admin(request.scope.get(ACTOR, "")):\n        raise',
        "    if False:\n        raise",
        "tests/api/routes/test_contexts.py::test_others_than_admins_cannot_try_which_contexts_there_are",
    ),
    Mutant(
        "what_loads_have_saved_is_told_twice",
        f"{ENGINE_CORE}/loadpolicy.py",
        "self._told, self._hits, self._waited, self._not_made = cost, PromptPart(), 0.0, 0",
        "self._told, self._waited, self._not_made = cost, 0.0, 0",
        f"{PREFILL_METER}::test_nothing_is_told_before_the_cost_is_known_and_then_everything_once",
    ),
    Mutant(
        "failed_loads_save_time",
        f"{ENGINE_CORE}/loads.py",
        "if tokens is not None and not failed:",
        "if tokens is not None:",
        f"{SAVINGS}::test_a_failed_load_saves_nothing",
    ),
    Mutant(
        "loads_that_others_hide_cost_time",
        f"{ENGINE_CORE}/loadpolicy.py",
        "if self._queued and not self._steps.is_under_way:",
        "if self._queued:",
        f"{PREFILL_METER}::test_the_engine_waits_for_a_load_before_its_step_while_nothing_runs",
    ),
    Mutant(
        "loads_by_layer_give_time_back",
        f"{ENGINE_CORE}/enginetimes.py",
        "min(step.load_seconds, max(0.0, seconds - self._expected(step)))",
        "min(step.load_seconds, seconds - self._expected(step))",
        f"{PREFILL_METER}::test_the_engine_waits_for_a_load_by_layer_as_long_as_its_step_takes_longer",
    ),
    Mutant(
        "the_seconds_saved_fall",
        "engine/kvstow/stats.py",
        "max(self.seconds_saved, self.hit_seconds - self.load_wait_seconds)",
        "self.hit_seconds - self.load_wait_seconds",
        "tests/engine/test_prefill.py::test_what_is_saved_never_falls_and_pays_for_waiting_first",
    ),
    Mutant(
        "one_slow_step_changes_the_cost_of_prefill",
        "engine/kvstow/prefill.py",
        "weighted_median((cost, one.tokens) for one, cost in steps)",
        "sum(cost for _, cost in steps) / len(steps)",
        "tests/engine/test_prefill.py::test_single_slow_steps_change_nothing",
    ),
    Mutant(
        "failures_wait_for_a_step_that_may_not_come",
        "engine/kvstow/attach/engine.py",
        "        self._flush()\n        settled = list(",
        "        settled = list(",
        "tests/service/connectors/vllm/test_attachedblocks.py::test_the_failure_of_the_last_store_is_sent_though_no_step_follows",
    ),
    Mutant(
        "slots_of_one_prefix_are_asked_for_by_each_request",
        "service/kvstow_service/connectors/engine_core/loads.py",
        "            return None if self._shared.must_wait(tracked, local, hit.end) else self._begin_early(",
        "            return self._begin_early(",
        "tests/service/connectors/vllm/test_attached.py::test_slots_of_one_prefix_are_asked_for_once",
    ),
    Mutant(
        "contexts_of_all_salts_are_one",
        "engine/kvstow/hints.py",
        "for part in (salt, name):",
        "for part in (name,):",
        f"{HINT_TESTS}::test_contexts_of_two_salts_differ",
    ),
    Mutant(
        "uses_begin_behind_the_gpus_hit",
        f"{ENGINE_CORE}/runningrequests.py",
        "keys = tracked.keys_between(self._full, 0, tracked.told_tokens)",
        "keys = tracked.keys_between(self._full, tracked.load.start, tracked.told_tokens)",
        "tests/service/connectors/engine_core/test_eviction.py"
        "::test_each_request_uses_its_whole_chain_once_what_the_gpu_had_of_it_included",
    ),
    Mutant(
        "a_curve_needs_no_evidence",
        "engine/kvstow/control/curve.py",
        "if len(pieces) < _PIECES // 2:",
        "if not pieces:",
        "tests/api/routes/test_curve.py::test_nothing_is_said_before_there_is_evidence",
    ),
    Mutant(
        "sizes_count_what_they_hit_while_they_fill",
        "engine/kvstow/control/curve.py",
        "if self._sizes[_OWN].is_full and not piece.full[_OWN]:",
        "if False:",
        f"{CONTROL}/test_curve.py"
        "::test_a_window_begins_when_the_pool_is_full_and_larger_sizes_are_lower_bounds_until_they_were",
    ),
    Mutant(
        "a_repeated_key_is_followed_twice",
        "engine/kvstow/control/curve.py",
        "elif run.request is request:",
        "elif False:",
        f"{CONTROL}/test_curve.py::test_a_client_whose_chains_are_none_harms_no_other",
    ),
    Mutant(
        "two_runs_have_one_first_key",
        "engine/kvstow/control/curve.py",
        "            self._drop(run)\n        return head",
        "            pass\n        return head",
        f"{CONTROL}/test_curve.py::test_a_client_whose_chains_are_none_harms_no_other",
    ),
    Mutant(
        "other_sizes_evict_what_smaller_ones_have_kept",
        "engine/kvstow/control/curve.py",
        "for level in range(number, -1, -1):",
        "for level in range(number + 1):",
        f"{CONTROL}/test_curve.py::test_where_all_keys_are_followed_each_size_hits_what_a_real_pool_hits",
    ),
    Mutant(
        "hot_beginnings_are_sampled_like_others",
        "engine/kvstow/control/curve.py",
        "hot = place + 1",
        "hot = 0",
        f"{CONTROL}/test_curve.py::test_a_sample_of_the_keys_predicts_the_hits",
    ),
    Mutant(
        "the_present_size_has_a_figure_of_its_own",
        "engine/kvstow/control/curve.py",
        "own = found / queried if queried > 0 else",
        "own = found / queried if queried < 0 else",
        f"{CONTROL}/test_curve.py::test_the_present_size_has_the_figure_of_the_pool_itself",
    ),
    Mutant(
        "a_larger_size_makes_classes_of_its_own",
        "engine/kvstow/control/curve.py",
        "found = self._first_cells[state, past] = self._hazards.first_cell(state, past)",
        "found = self._first_cells[state, past] = 0",
        f"{CONTROL}/test_curve.py::test_a_class_that_only_a_larger_size_has_gets_its_row_in_the_table_of_the_pool",
    ),
    Mutant(
        "a_curve_that_is_behind_goes_on",
        "engine/kvstow/control/curve.py",
        "            self._is_behind = True\n            return\n",
        "            return\n",
        f"{CONTROL}/test_curve.py::test_requests_that_are_too_many_to_follow_begin_a_thinner_sample",
    ),
    Mutant(
        "what_is_said_of_a_size_flickers",
        "api/kvstow_api/readings.py",
        "if statement is None or statement.is_outdated(key, figures, samples.now):",
        "if True:",
        "tests/api/routes/test_curve.py::test_a_sentence_stays_until_it_has_changed",
    ),
    Mutant(
        "a_size_that_was_never_full_is_recommended_against",
        "api/kvstow_api/sizing.py",
        "    if now.at_least:\n        return replace(found, advice=too_early(evidence))\n",
        "",
        "tests/api/test_sizing.py::test_nothing_follows_before_the_pool_was_full",
    ),
    Mutant(
        "any_gain_is_worth_its_memory",
        "api/kvstow_api/sizing.py",
        "if size.ratio - now.ratio >= GAIN * doublings)",
        "if size.ratio > now.ratio)",
        "tests/api/test_sizing.py::test_nothing_is_recommended_for_less_than_the_gain_or_for_more_than_the_loss",
    ),
    Mutant(
        "hashes_of_a_recording_have_no_key",
        "engine/kvstow/control/recording.py",
        "digest_size=8, key=self._secret)",
        "digest_size=8)",
        f"{CONTROL}/test_recording.py::test_ids_tell_nothing_outside_of_their_recording",
    ),
    Mutant(
        "recordings_share_a_key",
        "engine/kvstow/control/recording.py",
        "secrets.token_bytes(_SECRET_BYTES)",
        "bytes(_SECRET_BYTES)",
        f"{CONTROL}/test_recording.py::test_ids_tell_nothing_outside_of_their_recording",
    ),
    Mutant(
        "a_recording_holds_whatever_comes",
        "engine/kvstow/control/recording.py",
        "if self._held + what.size > MOST_WAITING:",
        "if False:",
        f"{CONTROL}/test_recording.py::test_it_ends_when_nobody_reads_and_holds_no_more",
    ),
    Mutant(
        "a_bin_that_ends_between_two_floats_is_never_left",
        "engine/kvstow/control/chains.py",
        "watch.since + upper <= now and most > 0:",
        "watch.since <= now - upper and most > 0:",
        f"{CONTROL}/test_learned.py::test_a_bin_that_ends_between_two_floats_is_left",
    ),
    Mutant(
        "an_engine_that_resets_its_cache_counts_anew",
        f"{CONTROL_CODE}/attachedsession.py",
        "            if is_fresh:\n",
        "            if False:\n",
        "tests/api/node/test_metrics.py::test_who_profits_is_told_by_namespace",
    ),
    Mutant(
        "namespaces_that_nobody_uses_keep_their_series",
        "api/kvstow_api/metrics.py",
        "        if one.sessions:\n            used",
        "        if True:\n            used",
        "tests/api/node/test_metrics.py::test_who_profits_is_told_by_namespace",
    ),
    Mutant(
        "blocks_that_the_gpu_evicts_before_their_store_are_not_counted",
        "service/kvstow_service/connectors/engine_core/gpublocks.py",
        "            self._gpu.lost_blocks += block_hash is None\n",
        "",
        "tests/service/connectors/engine_core/test_runningrequests.py::"
        "test_blocks_that_the_gpu_has_evicted_first_are_counted",
    ),
    Mutant(
        "a_recording_has_no_size",
        "engine/kvstow/control/recording.py",
        "if len(line) > self._bytes_left:",
        "if False:",
        f"{CONTROL}/test_recording.py::test_it_ends_by_size",
    ),
    Mutant(
        "a_recording_outlives_its_reader",
        "engine/kvstow/control/engine.py",
        "            recording.stop()\n"
        "            with pool.lock:\n"
        "                if pool.requests.recording is recording:\n",
        "            with pool.lock:\n                if False:\n",
        "tests/api/routes/test_trace.py::test_it_ends_with_its_connection",
    ),
    Mutant(
        "recordings_of_stalled_readers_pile_up",
        "engine/kvstow/control/engine.py",
        "                pool.requests.recording.stop()\n",
        "                pass\n",
        f"{CONTROL}/test_recording.py::test_stalled_readers_hold_no_more_than_one_recording",
    ),
    Mutant(
        "a_call_is_worked_off_in_one_turn",
        "service/kvstow_service/node/attach/attachserver.py",
        "if client.steps is not None or self._clock()",
        "if self._clock()",
        "tests/service/node/attach/test_attachserver.py"
        "::test_a_call_with_many_items_is_worked_off_between_the_turns_of_others",
    ),
    Mutant(
        "a_list_has_a_million_items",
        "engine/kvstow/attach/wire.py",
        "MOST_ITEMS = 1 << 16",
        "MOST_ITEMS = 1 << 20",
        "tests/engine/attach/test_messages.py::test_a_list_has_65_536_items_at_most",
    ),
    Mutant(
        "a_list_of_keys_is_unpacked_in_one_call",
        "engine/kvstow/attach/wire.py",
        "_PIECE = 1024",
        "_PIECE = 1 << 15",
        "tests/engine/attach/test_messages.py::test_keys_are_unpacked_in_steps_of_1024",
    ),
    Mutant(
        "what_comes_beside_keys_has_no_limit",
        "engine/kvstow/attach/wire.py",
        "_MOST_BESIDE_KEYS = 4096",
        "_MOST_BESIDE_KEYS = 8 << 20",
        "tests/engine/attach/test_messages.py::test_a_message_that_takes_long_to_unpack_is_refused_unread",
    ),
    Mutant(
        "a_message_of_any_kind_has_8_mib",
        "engine/kvstow/attach/wire.py",
        "        if len(payload) > cls.MOST_BYTES and",
        "        if len(payload) > 8 << 20 and",
        "tests/engine/attach/test_messages.py::test_a_message_that_takes_long_to_unpack_is_refused_unread",
    ),
    Mutant(
        "errors_of_ops_are_made_plain_by_the_service",
        "engine/kvstow/attach/calls.py",
        "            if done.error and not is_plain(done.error, MOST_ERROR):",
        "            if False:",
        "tests/engine/attach/test_messages.py"
        "::test_what_ranks_and_the_service_say_of_an_error_is_one_line_of_printable_text",
    ),
    Mutant(
        "a_long_list_of_keys_is_unpacked_in_one_turn",
        "service/kvstow_service/node/attach/attachserver.py",
        "    if len(frame.payload) > _UNPACKED_AT_ONCE_BYTES:",
        "    if False:",
        "tests/service/node/attach/test_attachserver.py"
        "::test_a_call_with_many_keys_is_unpacked_between_the_turns_of_others",
    ),
    Mutant(
        "a_lookup_is_one_slice",
        "service/kvstow_service/node/pools/nodesession.py",
        "    return [items[start : start + size] for start in range(0, len(items), size)]",
        "    return [items]",
        "tests/service/node/test_nodehost.py::test_a_lookup_in_slices_finds_and_holds_the_same",
    ),
    Mutant(
        "a_prefetch_is_looked_at_again_without_the_lock",
        "engine/kvstow/control/pooltier.py",
        "        if under_way is None:\n            self._begin_prefetch(",
        "        if self._prefetching is None:\n            self._begin_prefetch(",
        f"{CONTROL}/test_pooltier.py::test_two_threads_go_on_with_a_prefetch_at_once",
    ),
    Mutant(
        "a_lookup_of_1000_keys_takes_four_turns",
        "service/kvstow_service/node/pools/nodesession.py",
        "LOOKUP_SLICE = 1024",
        "LOOKUP_SLICE = 256",
        "tests/service/node/test_nodehost.py::test_a_prompt_of_16_000_tokens_is_looked_up_in_one_turn",
    ),
    Mutant(
        "keys_of_an_ordinary_prompt_are_unpacked_in_turns",
        "service/kvstow_service/node/attach/attachserver.py",
        "_UNPACKED_AT_ONCE_BYTES = 64 << 10",
        "_UNPACKED_AT_ONCE_BYTES = 32 << 10",
        "tests/service/node/test_nodehost.py::test_a_prompt_of_16_000_tokens_is_looked_up_in_one_turn",
    ),
    Mutant(
        "a_lookup_of_a_session_that_has_ended_is_an_error",
        "service/kvstow_service/node/pools/nodesession.py",
        "            most = min(len(keys), control.leases.max_slots)",
        "            most = control.leases.max_slots",
        "tests/service/node/test_nodehost.py"
        "::test_a_lookup_of_a_session_that_has_ended_meanwhile_finds_nothing_and_is_no_error",
    ),
    Mutant(
        "a_slot_behind_another_one_stays_in_its_chain",
        "engine/kvstow/control/keytable.py",
        "        following[at] = following[slot]\n",
        "",
        f"{CONTROL}/test_keytable.py::test_the_table_is_a_dictionary_while_its_buckets_are_split",
    ),
    Mutant(
        "of_slots_that_meet_in_a_bucket_one_is_linked",
        "engine/kvstow/control/keytable.py",
        "        if not last.all():",
        "        if False:",
        f"{CONTROL}/test_keytable.py::test_keys_that_meet_in_one_bucket_are_all_there",
    ),
    Mutant(
        "a_split_bucket_is_looked_up_like_the_others",
        "engine/kvstow/control/keytable.py",
        "        if self._num_split:\n            np.copyto",
        "        if False:\n            np.copyto",
        f"{CONTROL}/test_keytable.py::test_the_table_is_a_dictionary_while_its_buckets_are_split",
    ),
    Mutant(
        "all_buckets_are_split_at_once",
        "engine/kvstow/control/keytable.py",
        "end = min(self._num_split + _SPLIT_AT_ONCE, self._mask + 1)",
        "end = self._mask + 1",
        f"{CONTROL}/test_keytable.py::test_a_bucket_is_split_in_steps_of_bounded_length",
    ),
    Mutant(
        "keys_of_a_lookup_are_taken_for_a_list",
        f"{CONTROL_CODE}/namespaces.py",
        "        if not isinstance(keys, list):\n",
        "        if False:\n",
        f"{CONTROL}/test_namespaces.py::test_keys_may_come_in_any_sequence",
    ),
    Mutant(
        "equal_keys_of_two_namespaces_are_one",
        f"{CONTROL_CODE}/namespaces.py",
        "return hashes ^ mix if mix else hashes",
        "return hashes",
        f"{CONTROL}/test_keytable.py::test_equal_keys_of_two_namespaces_have_different_hashes",
    ),
    Mutant(
        "a_hash_alone_names_a_key",
        f"{CONTROL_CODE}/namespaces.py",
        "numbers[index] = slot if found == key else ~slot if found is None else self.get(key)",
        "numbers[index] = slot if found is not None else ~slot",
        f"{CONTROL}/test_keytable.py::test_another_key_with_the_same_hash_is_not_taken_for_it",
    ),
    # -- what the person on call sees -----------------------------------------------------------------------
    Mutant(
        "keepers_are_orphans",
        "service/kvstow_service/node/survival/orphanedmemory.py",
        " or _command(path) == PROCESS_NAME",
        "",
        "tests/service/node/survival/test_orphanedmemory.py"
        "::test_what_a_keeper_holds_is_no_orphan_whosever_keeper_it_is",
    ),
    Mutant(
        "keys_are_shown_to_everybody",
        AUTH,
        "        shows_keys = reading and _shows_keys(scope)\n",
        "        shows_keys = False\n",
        "tests/api/test_auth.py::test_keys_are_shown_to_viewers_and_admins_alone",
    ),
    Mutant(
        "pages_of_other_sites_may_read",
        AUTH,
        "        if _is_cross_site(scope) and not (reading and _is_navigation(scope)):\n",
        "        if _is_cross_site(scope) and not reading:\n",
        "tests/api/test_auth.py::test_requests_marked_as_cross_site_are_refused",
    ),
    Mutant(
        "every_refusal_is_logged",
        ADMISSION,
        " and not self._refusals.is_first(",
        " and not (1, self._refusals.is_first)[0] and (",
        "tests/api/test_limitedlog.py::test_refused_requests_have_one_line_a_minute_and_hide_no_change",
    ),
    Mutant(
        "refusals_are_not_counted",
        ADMISSION,
        "            if oldest.more:\n",
        "            if False:\n",
        "tests/api/test_limitedlog.py::test_the_number_of_refused_requests_is_written_at_the_end_of_a_callers_minute",
    ),
    Mutant(
        "secrets_are_logged",
        ADMISSION,
        """_SECRET.sub(rb"\\1...", """,
        """bytes.strip(""",
        "tests/api/test_limitedlog.py::test_secrets_are_left_out_of_the_audit_log",
    ),
    Mutant(
        "anonymous_answers_are_not_metered",
        ADMISSION,
        "                self._allowance.use(self._cpu_clock() - begun)\n",
        "                pass\n",
        "tests/api/test_anonymous.py::test_a_flood_gets_its_share_and_is_told_when_to_come_back",
    ),
    Mutant(
        "probes_share_the_allowance_of_others",
        ADMISSION,
        '        allowance = self._polled if is_polled(scope["path"]) else self._others\n',
        "        allowance = self._others\n",
        "tests/api/test_anonymous.py::test_probes_and_metrics_have_an_allowance_of_their_own",
    ),
    Mutant(
        "bodies_without_a_length_are_read",
        ADMISSION,
        '        if b"transfer-encoding" in headers:',
        "        if False:",
        "tests/api/test_admission.py::test_a_chunked_body_is_refused_before_its_trailers_are_parsed",
    ),
    Mutant(
        "heads_have_any_number_of_lines",
        "service/kvstow_service/admin/server.py",
        '            if head.count(b"\\n") > MAX_HEADERS:',
        "            if False:",
        "tests/service/admin/test_protocol.py::test_a_head_beyond_a_limit_is_refused_while_it_arrives",
    ),
    Mutant(
        "the_audit_log_shares_the_limit_of_messages",
        "service/kvstow_service/process/logwriter.py",
        " or record.name == _AUDIT:",
        ":",
        "tests/service/process/test_logwriter.py::"
        "test_a_message_is_written_so_often_a_minute_and_the_next_line_says_how_many_were_not",
    ),
    Mutant(
        "the_audit_log_shares_the_room_of_others",
        "service/kvstow_service/process/logwriter.py",
        "            if record.name != _AUDIT and self._waiting.qsize() >= _MOST_LINES:",
        "            if self._waiting.qsize() >= _MOST_LINES:",
        "tests/service/process/test_logwriter.py::test_lines_of_the_audit_log_have_room_of_their_own",
    ),
    Mutant(
        "an_alarm_ends_the_process",
        "service/kvstow_service/process/stop.py",
        "_SIGNALS = tuple(sorted(set(signal.valid_signals()) - _LEFT_ALONE))\n",
        "_SIGNALS = (*_STOPPING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)\n",
        "tests/service/process/test_stop.py::test_other_signals_do_not_end_the_process",
    ),
    Mutant(
        "malformed_transfer_parameters_reach_vllm",
        "service/kvstow_service/connectors/engine_core/connector.py",
        "            request.kv_transfer_params = None\n",
        "            pass\n",
        "tests/vllm/test_parity.py::test_transfer_parameters_that_are_no_object_do_not_reach_vllm",
    ),
    Mutant(
        "each_doctor_measures",
        "api/kvstow_api/hostwatch.py",
        "if self._look is None or self._look.done():",
        "if True:",
        "tests/api/test_hostwatch.py::test_all_who_wait_share_one_measurement",
    ),
    Mutant(
        "strangers_measure_each_time",
        "api/kvstow_api/routes/server.py",
        "_MAX_AGE_FOR_STRANGERS if is_stranger(request.scope) else 0.0",
        "0.0",
        "tests/api/test_hostwatch.py::test_only_those_who_may_change_things_measure_anew_each_time",
    ),
    Mutant(
        "a_life_is_a_rate",
        "api/kvstow_api/figures.py",
        "if not ranks or any(rank.boot_id is None for rank in ranks):",
        "if not ranks:",
        "tests/api/node/test_sessions.py::test_what_was_copied_before_the_server_started_is_no_rate",
    ),
    Mutant(
        "a_life_is_counted_at_once",
        "api/kvstow_api/sampler.py",
        "self._boots.get(name, _busy(rank))",
        "self._boots.get(name, Counter())",
        "tests/api/node/test_sessions.py::test_what_was_copied_before_the_server_started_is_no_rate",
    ),
    Mutant(
        "a_refusal_is_logged_each_time",
        "engine/kvstow/memory/extents.py",
        "if error.reason != self._logged_reason:",
        "if True:",
        "tests/engine/memory/test_populator.py::test_a_refusal_is_in_the_log_once_however_often_it_is_tried_again",
    ),
    Mutant(
        "a_request_keeps_its_blocks_while_it_generates",
        "service/kvstow_service/replay/driver.py",
        "if self._is_over(job.request.ended) and is_offered and not job.is_ending:",
        "if is_offered and not job.is_ending:",
        "tests/service/replay/test_driver.py"
        "::test_a_request_runs_until_it_has_ended_in_the_trace_and_keeps_its_blocks_so_long",
    ),
    Mutant(
        "requests_end_in_the_order_of_the_trace",
        "service/kvstow_service/replay/trace.py",
        "        while running and running[0][0] <= request.timestamp:\n",
        "        while running and False:\n",
        "tests/service/replay/test_trace.py::test_requests_end_in_order_of_time_and_before_others_start_at_that_moment",
    ),
    Mutant(
        "a_run_of_ids_is_bounded",
        "service/kvstow_service/replay/trace.py",
        "        if left < 0:\n",
        "        if left < -(1 << 30):\n",
        "tests/service/replay/test_trace.py::test_a_bad_value_of_the_packed_form_is_named",
    ),
    Mutant(
        "a_session_that_is_damaged_is_skipped",
        "service/kvstow_service/replay/importing.py",
        "        except (ValueError, RecursionError, InvalidRequestError) as error:\n",
        "        except InvalidRequestError as error:\n",
        "tests/service/replay/test_importing.py::test_a_damaged_file_is_named_and_skipped",
    ),
    Mutant(
        "an_import_passes_on_what_no_later_session_precedes",
        "service/kvstow_service/replay/importing.py",
        "            while waiting and waiting[0][0] < 1000 * start:\n",
        "            while waiting and waiting[0][0] < 0:\n",
        "tests/service/replay/test_importing.py::test_memory_depends_on_the_sessions_that_are_open_not_on_all",
    ),
    Mutant(
        "an_imported_id_names_a_prefix",
        "service/kvstow_service/replay/importing.py",
        "            place = before, one\n",
        "            place = 0, one\n",
        "tests/service/replay/test_importing.py::test_ids_that_do_not_name_a_prefix_get_numbers_that_do",
    ),
    Mutant(
        "a_session_is_read_up_to_a_size",
        "service/kvstow_service/replay/importing.py",
        "        if size > LARGEST_FILE:\n",
        "        if size > 100 * LARGEST_FILE:\n",
        "tests/service/replay/test_importing.py::test_a_file_that_is_too_large_is_not_read_whole",
    ),
    Mutant(
        "a_recording_numbers_a_bounded_number_of_ids",
        "service/kvstow_service/replay/trace.py",
        "        if len(self._number_of) >= self.MOST:\n",
        "        if len(self._number_of) >= 100 * self.MOST:\n",
        "tests/service/replay/test_importing.py::test_numbers_are_bounded_and_ids_stay_equal_where_they_were",
    ),
    Mutant(
        "the_pool_is_offered_what_the_gpu_had",
        "service/kvstow_service/replay/hittable.py",
        "        rest = [*keys[:first], *keys[first + found :]]\n",
        "        rest = keys[first + found :]\n",
        "tests/service/replay/test_hittable.py::test_what_the_gpu_has_hits_there_and_the_rest_in_the_pool",
    ),
    Mutant(
        "a_gpu_keeps_the_blocks_of_running_requests",
        "service/kvstow_service/replay/hittable.py",
        "            if not self._users[one]:\n",
        "            if self._users[one] <= 1:\n",
        "tests/service/replay/test_hittable.py::test_a_gpu_keeps_what_runs_and_evicts_the_oldest_of_the_rest",
    ),
    Mutant(
        "a_replay_ends_with_a_rank",
        "service/kvstow_service/replay/processes.py",
        '        logger.warning("%s", error)\n',
        "        pipe.send(error)\n",
        "tests/service/replay/test_attached.py::test_an_engine_that_is_killed_or_loses_a_rank_comes_back_to_a_hot_cache",
    ),
    Mutant(
        "silent_ranks_are_no_condition",
        "api/kvstow_api/conditions/pools.py",
        "        if silence:\n",
        "        if False:\n",
        f"{NODE_API}::test_a_rank_that_is_stopped_is_told_by_everything",
    ),
    Mutant(
        "dropped_stores_are_no_condition",
        "api/kvstow_api/conditions/pools.py",
        "        if dropped and not (outcome",
        "        if False and not (outcome",
        f"{NODE_API}::test_stores_that_are_dropped_are_told",
    ),
    Mutant(
        "conditions_fail_no_check",
        "api/kvstow_api/conditions/table.py",
        "failures.setdefault(check, []).extend(found)",
        "pass",
        f"{NODE_API}::test_a_rank_that_is_stopped_is_told_by_everything",
    ),
    Mutant(
        "nobody_holds_memory_that_a_pool_waits_for",
        "service/kvstow_service/node/pools/memorythread.py",
        "sessions = {session_of(client) for client in clients}",
        "sessions = set[str]()",
        "tests/service/node/pools/test_recalledmemory.py::test_who_waits_for_memory_that_which_session_holds_is_shown",
    ),
    Mutant(
        "sessions_are_asked_for_what_their_pool_still_uses",
        "service/kvstow_service/node/pools/memorythread.py",
        "if found.holder in clients:",
        "if False:",
        "tests/service/node/pools/test_recalledmemory.py"
        "::test_who_uses_slots_of_recalled_memory_and_says_nothing_is_shown",
    ),
    Mutant(
        "one_refusal_is_told_twice",
        "api/kvstow_api/conditions/pools.py",
        "        return  # refused memory has",
        "        pass  # refused memory has",
        "tests/api/test_conditions.py::test_one_refusal_is_one_condition",
    ),
    Mutant(
        "memory_that_is_yet_to_be_given_back_is_no_condition",
        "api/kvstow_api/conditions/pools.py",
        "left > GIVEN_BACK_BYTES:",
        "left > 1 << 60:",
        "tests/api/test_conditions.py::test_a_condition_has_cause_reason_fix_and_evidence",
    ),
    Mutant(
        "early_requests_lose_no_blocks",
        "api/kvstow_api/conditions/pools.py",
        '"warning" if lacking else "info",',
        '"info",',
        "tests/api/test_conditions.py::test_a_condition_has_cause_reason_fix_and_evidence",
    ),
    Mutant(
        "processes_of_an_engine_decide_on_other_sizes",
        "engine/kvstow/memory/limits.py",
        'get("MemTotal:")',
        'get("MemAvailable:")',
        "tests/service/connectors/engine_core/test_options.py"
        "::test_no_size_means_a_quarter_of_what_the_machine_or_the_container_has",
    ),
    Mutant(
        "a_stopped_engine_is_an_idle_one",
        "engine/kvstow/attach/peer.py",
        'in "Tt" else "running"',
        'in "" else "running"',
        "tests/service/node/test_faults.py::test_an_engine_that_is_stopped_is_told_and_one_that_goes_on_is_not",
    ),
    Mutant(
        "token_files_are_read_only_for_callers",
        "api/kvstow_api/hostwatch.py",
        '        self._try("the token files", self._renew_tokens)\n',
        "",
        "tests/api/test_conditions.py::test_a_token_file_that_was_emptied_is_told_while_nobody_comes_with_a_token",
    ),
    Mutant(
        "a_pause_of_the_service_counts_for_timeouts",
        "service/kvstow_service/process/runningclock.py",
        "_Watched(stopped + pause, ",
        "_Watched(stopped, ",
        "tests/service/process/test_runningclock.py::test_the_time_in_which_the_process_was_stopped_does_not_count",
    ),
    Mutant(
        "a_pause_of_the_service_counts_until_it_is_noticed",
        "service/kvstow_service/process/runningclock.py",
        "(now if now < until else until) - stopped",
        "now - stopped",
        "tests/service/process/test_runningclock.py"
        "::test_a_thread_that_goes_on_before_the_one_that_watches_sees_no_jump",
    ),
    Mutant(
        "a_pause_of_the_service_is_one_of_its_ticker",
        "service/kvstow_service/node/nodeprocess.py",
        "tls.renew, clock=clock)",
        "tls.renew)",
        "tests/service/node/test_nodeprocess.py::test_the_ticker_does_not_count_a_pause_of_the_process",
    ),
    Mutant(
        "tls_files_that_cannot_be_used_are_only_logged",
        "service/kvstow_service/admin/tls.py",
        "= stamps, True",
        "= stamps, False",
        "tests/service/admin/test_tls.py::test_unreadable_files_never_block",
    ),
    Mutant(
        "files_of_a_disk_that_are_removed_are_not_missed",
        "service/kvstow_service/stores/disk/diskfiles.py",
        "        if not (os.fstat(self._records).st_nlink",
        "        if False and not (os.fstat(self._records).st_nlink",
        "tests/service/stores/disk/test_diskstore.py::test_files_that_somebody_removes_are_made_anew",
    ),
    Mutant(
        "processes_that_serve_again_are_to_be_ended",
        "api/kvstow_api/conditions/hosts.py",
        "set(pids) & set(_pids(session))",
        "False",
        "tests/api/test_conditions.py::test_processes_of_a_lost_session_that_serve_again_are_not_to_be_ended",
    ),
    Mutant(
        "the_checks_are_those_of_the_first_moment",
        "api/kvstow_api/health.py",
        'Probe("readyz", lambda: [*_condition_checks(host), *process], failures)',
        'Probe("readyz", lambda first=[*_condition_checks(host), *process]: first, failures)',
        f"{NODE_API}::test_the_check_of_the_tier_is_there_although_the_tier_comes_after_the_server",
    ),
    Mutant(
        "a_refusal_is_a_condition_for_ever",
        "api/kvstow_api/sampler.py",
        "count - before.get(name, 0)",
        "count",
        f"{NODE_API}::test_the_doctor_knows_memory_the_keeper_and_who_was_rejected",
    ),
    Mutant(
        "silent_ranks_are_ready",
        "service/kvstow_service/cli/tables.py",
        "age > _REPORTS_ARE_FRESH else",
        "False else",
        "tests/service/cli/test_tables.py::test_a_silent_rank_does_not_show_the_state_that_it_last_reported",
    ),
    Mutant(
        "long_names_push_others_off_a_narrow_terminal",
        "service/kvstow_service/cli/board.py",
        "_SHORTEST_NAME = 20",
        "_SHORTEST_NAME = 200",
        "tests/service/cli/test_board.py::test_a_terminal_of_100_columns_shows_which_engine_it_is_and_on_which_host",
    ),
    Mutant(
        "each_viewer_has_the_overview_made_anew",
        "api/kvstow_api/overview.py",
        "if found is None or now - found.made_at >= INTERVAL:",
        "if True:",
        f"{OVERVIEW}::test_the_document_is_made_once_a_second_for_all",
    ),
    Mutant(
        "each_unknown_pool_has_an_overview_of_its_own",
        "api/kvstow_api/overview.py",
        "name = _NO_POOL if pool is not None and pool not in pools else pool",
        "name = pool",
        f"{OVERVIEW}::test_the_document_is_made_once_a_second_for_all",
    ),
    Mutant(
        "the_overview_leaves_out_what_is_in_trouble",
        "api/kvstow_api/overview.py",
        "lambda one: not is_first(one)",
        "lambda one: 0",
        f"{OVERVIEW}::test_the_document_is_bounded_and_counts_what_it_leaves_out",
    ),
    Mutant(
        "the_overview_has_no_bound",
        "api/kvstow_api/overview.py",
        "return shortlist(items, most, lambda",
        "return shortlist(items, len(items), lambda",
        f"{OVERVIEW}::test_the_document_is_bounded_and_counts_what_it_leaves_out",
    ),
    Mutant(
        "conditions_of_one_kind_hide_others",
        "api/kvstow_api/overview.py",
        "kinds.setdefault(one.name, one)",
        "kinds[str(one)] = one",
        f"{OVERVIEW}::test_a_kind_of_condition_is_there_once_with_the_number_of_the_others",
    ),
    Mutant(
        "conditions_are_not_logged",
        "api/kvstow_api/conditions/table.py",
        "if concern not in before:",
        "if concern in before:",
        "tests/api/node/test_conditions.py::test_conditions_are_logged_when_they_begin_and_end",
    ),
    Mutant(
        "a_condition_that_comes_and_goes_fills_the_log",
        "api/kvstow_api/conditions/table.py",
        "LimitedLog(logger, burst=_LINES_A_MINUTE)",
        "LimitedLog(logger, burst=1000)",
        "tests/api/node/test_conditions.py::test_a_condition_that_comes_and_goes_has_few_lines",
    ),
    Mutant(
        "kinds_of_conditions_have_the_order_of_their_mildest_cases",
        "api/kvstow_api/overview.py",
        "for one in conditions:\n        kinds.setdefault(one.name, one)",
        "for one in reversed(conditions):\n        kinds[one.name] = one\n    kinds = dict(reversed(kinds.items()))",
        f"{OVERVIEW}::test_kinds_of_conditions_come_with_the_worst_first",
    ),
    Mutant(
        "the_page_may_run_foreign_scripts",
        "api/kvstow_api/page/policy.py",
        "\"'none'\" if script is None else _digest(script)",
        "\"'self'\"",
        "tests/api/test_page.py::test_the_policy_allows_only_the_pages_own_style_and_script",
    ),
    Mutant(
        "the_page_connects_anywhere",
        "api/kvstow_api/page/policy.py",
        "\"'none'\" if script is None else \"'self'\"",
        '"*"',
        "tests/api/test_page.py::test_the_policy_allows_only_the_pages_own_style_and_script",
    ),
    Mutant(
        "a_wait_on_a_terminal_shows_no_bar",
        "service/kvstow_service/cli/watching.py",
        "memory=memory if is_node else None",
        "memory=None",
        "tests/service/cli/test_node.py::test_waiting_on_a_terminal_shows_a_bar_until_the_memory_is_populated",
    ),
    Mutant(
        "ops_of_another_boot_are_copied",
        "engine/kvstow/dataplane.py",
        "if op.boots and op.boots[self.rank] != self.boot_id:",
        "if False:",
        "tests/engine/test_dataplane.py::test_ops_of_another_boot_fail_and_those_beside_them_do_not",
    ),
    Mutant(
        "ops_name_the_boots_before_the_last_report",
        "engine/kvstow/control/ranktable.py",
        "        last, record.report, record.reported_at = record.report, report, now\n"
        "        self.boots = tuple(one.report.boot_id for one in self._ranks)\n",
        "        self.boots = tuple(one.report.boot_id for one in self._ranks)\n"
        "        last, record.report, record.reported_at = record.report, report, now\n",
        "tests/service/connectors/engine_core/test_schedulerside.py"
        "::test_a_first_report_between_two_stores_of_a_step_makes_no_rank_refuse_it",
    ),
    # -- ranks on JAX ----------------------------------------------------------------------------------------
    Mutant(
        "loads_are_launched_when_this_rank_has_staged_them",
        f"{JAX}/device.py",
        "                self._loads.launch(launches)\n",
        "                self._loads.launch([LoadLaunch(one.op_id, one.num_blocks, one.num_launched, one.num_staged)"
        " for one in self._loads._tickets if one.num_launched < one.num_staged])\n",
        "tests/jax/test_processes.py::test_ranks_of_which_one_is_slow_and_repeats_itself",
    ),
    Mutant(
        "loads_are_launched_when_the_first_rank_has_staged_them",
        "engine/kvstow/control/launchorder.py",
        "ready = min(load.staged)",
        "ready = max(load.staged)",
        f"{CONTROL}/test_launchorder.py::test_a_load_is_launched_when_all_ranks_have_staged_it",
    ),
    Mutant(
        "loads_that_fail_on_a_rank_are_not_launched_there",
        f"{JAX}/deviceloads.py",
        "                        self._scatter_nothing(bucket_of(self._buckets, len(pieces[number])), arrays, split)\n",
        "",
        "tests/jax/test_device.py::test_a_load_that_fails_here_is_launched_and_writes_nothing",
    ),
    Mutant(
        "stores_that_fail_on_a_rank_are_not_launched_there",
        f"{JAX}/devicestores.py",
        "        held = self._wait_for_memory(bucket * self._kv.layout.slot_bytes)\n",
        "        held = self._wait_for_memory(bucket * self._kv.layout.slot_bytes)\n"
        "        if held is None:\n            return\n",
        "tests/jax/test_device.py::test_a_store_that_fails_here_is_gathered",
    ),
    Mutant(
        "stores_for_an_earlier_boot_are_not_launched",
        "engine/kvstow/dataplane.py",
        '            elif op.direction == "store":\n',
        "            elif False:\n",
        "tests/engine/test_dataplane.py::test_a_launcher_works_on_the_host_s_thread_in_the_order_of_the_plan",
    ),
    Mutant(
        "stores_that_a_restart_has_disowned_are_done",
        OPS,
        'entry.error = entry.error or f"rank {rank}: rank {rank} has restarted"',
        "pass",
        f"{CONTROL}/test_ranktable.py::test_a_store_that_a_restarted_rank_had_finished_fails",
    ),
    # -- loads by layer --------------------------------------------------------------------------------------
    Mutant(
        "a_load_by_layer_ignores_older_writers",
        LAYERS,
        "            after.hold_back(stream)\n",
        "            pass\n",
        f"{LAYER_TESTS}::test_blocks_are_written_after_the_work_before_the_fence",
    ),
    Mutant(
        "a_layer_waits_for_the_one_before_it",
        LAYERS,
        "stream, launch = self._compute(), self.launches[part]\n",
        "stream, launch = self._compute(), max(0, self.launches[part] - 1)\n",
        f"{LAYER_TESTS}::test_a_layer_waits_for_its_own_part_and_for_none_behind_it",
    ),
    Mutant(
        "a_load_by_layer_ends_at_its_launch",
        LAYERS,
        "            if not twice(partial(self._driver.is_reached, buffers.finished)):\n                return\n",
        "",
        f"{LAYER_TESTS}::test_the_load_ends_once_the_last_layer_is_there",
    ),
    Mutant(
        "a_load_by_layer_that_fails_writes_on",
        LAYERS,
        "            self._wait()  # what has been submitted must not write once another way has begun\n",
        "",
        f"{LAYER_TESTS}::test_a_load_that_fails_has_left_the_device",
    ),
    Mutant(
        "memory_is_given_back_under_a_load_by_layer",
        "engine/kvstow/layeredloads.py",
        "        for op, hold in zip(ops, holds, strict=True):\n",
        "        for op, hold in zip(ops, holds, strict=True):\n            hold.close()\n",
        "tests/engine/test_layeredloads.py::test_the_memory_of_the_slots_stays_until_the_last_part_was_read",
    ),
    Mutant(
        "a_rank_tries_by_layer_again",
        "engine/kvstow/layeredloads.py",
        '                self.failure = f"{type(error).__name__}: {error}"\n',
        "",
        "tests/engine/test_layeredloads.py::test_a_rank_that_failed_once_loads_by_layer_no_more",
    ),
    Mutant(
        "the_slower_way_brings_the_layers",
        "engine/kvstow/devices/cuda/layerways.py",
        "kernel < SLOW_KERNEL * engine:",
        "engine < SLOW_KERNEL * kernel:",
        f"{LAYER_WAYS}::test_the_kernel_reads_unless_it_is_slow",
    ),
    Mutant(
        "a_kernel_that_is_almost_as_fast_as_the_copy_engine_is_not_used",
        "engine/kvstow/devices/cuda/layerways.py",
        "kernel < SLOW_KERNEL * engine:",
        "kernel < engine:",
        f"{LAYER_WAYS}::test_the_kernel_reads_unless_it_is_slow",
    ),
    Mutant(
        "rates_near_the_limit_change_the_way_of_layers",
        "engine/kvstow/devices/cuda/layerways.py",
        "kernel >= _FASTER * SLOW_KERNEL * engine:",
        "kernel >= SLOW_KERNEL * engine:",
        f"{LAYER_WAYS}::test_rates_near_the_limit_do_not_change_the_way",
    ),
    Mutant(
        "streams_of_layers_are_waited_for_when_they_are_gone",
        LAYERS,
        "        undo.callback(twice, partial(driver.synchronize, self._stream))\n",
        "        undo.callback(self._wait)\n",
        f"{LAYER_WAYS}::test_closing_waits_for_all_streams_before_it_destroys_them",
    ),
    Mutant(
        "the_trial_of_one_way_counts_for_the_other",
        "engine/kvstow/devices/cuda/layertrial.py",
        "return TrialRates(kernel, engine)",
        "return TrialRates(engine, kernel)",
        f"{LAYER_WAYS}::test_the_kernel_reads_unless_it_is_slow",
    ),
    Mutant(
        "a_slow_kernel_is_not_told",
        "api/kvstow_api/conditions/pools.py",
        "if kernel < SLOW_KERNEL * engine:",
        "if False:",
        "tests/api/test_conditions.py::test_a_condition_has_cause_reason_fix_and_evidence",
    ),
    Mutant(
        "the_ways_are_tried_once",
        "engine/kvstow/devices/cuda/layerways.py",
        "return self._clock() >= self._tried_at + _AGAIN",
        "return False",
        f"{LAYER_WAYS}::test_both_ways_are_tried_again_every_minute",
    ),
    Mutant(
        "a_staging_buffer_of_layers_is_filled_before_it_is_empty",
        "engine/kvstow/devices/cuda/layergroups.py",
        "        driver.wait_event(link, buffer.freed)\n",
        "",
        f"{LAYER_WAYS}::test_a_buffer_is_not_filled_again_before_it_is_empty",
    ),
    Mutant(
        "a_group_of_layers_is_moved_before_it_is_there",
        "engine/kvstow/devices/cuda/layergroups.py",
        "                self._driver.wait_event(stream, buffer.copied)\n",
        "",
        f"{LAYER_WAYS}::test_each_layer_waits_for_its_group_and_for_none_behind_it",
    ),
    Mutant(
        "a_load_through_the_engine_does_not_wait_for_older_work",
        "engine/kvstow/devices/cuda/layergroups.py",
        "        if isinstance(after, CudaFence):\n",
        "        if False:\n",
        f"{LAYER_WAYS}::test_nothing_is_written_before_the_fence",
    ),
    Mutant(
        "rates_of_both_kinds_of_load_are_swapped",
        f"{ENGINE_CORE}/enginetimes.py",
        "rate = self._rates.get(by_layer) or self._rates.get(not by_layer) or _FIRST_RATE",
        "rate = self._rates.get(not by_layer) or self._rates.get(by_layer) or _FIRST_RATE",
        f"{LOAD_POLICY}::test_the_way_that_takes_less_is_taken",
    ),
    Mutant(
        "no_estimate_decides_how_a_load_goes",
        f"{ENGINE_CORE}/loadpolicy.py",
        "        if not is_slower:\n",
        "        if True:\n",
        f"{LOAD_POLICY}::test_the_way_that_takes_less_is_taken",
    ),
    Mutant(
        "loads_by_layer_that_were_slow_once_are_not_tried_again",
        f"{ENGINE_CORE}/loadpolicy.py",
        'return Choice(True, "trial") if self._loads.needs_layers(num_blocks) else Choice(False, "rate")',
        'return Choice(False, "rate")',
        f"{LOAD_POLICY}::test_loads_by_layer_that_were_slower_are_tried_again_every_minute",
    ),
    Mutant(
        "a_step_has_no_launch",
        f"{ENGINE_CORE}/enginetimes.py",
        "return max(self._launch(prompts.tokens), 0.0 if self.cost is None else self.cost.seconds(prompts))",
        "return 0.0 if self.cost is None else self.cost.seconds(prompts)",
        f"{LOAD_POLICY}::test_alone_a_load_that_takes_longer_than_computing_is_not_made",
    ),
    Mutant(
        "all_steps_have_one_launch",
        f"{ENGINE_CORE}/enginetimes.py",
        "return median(self._by_size[max(sizes)]) if sizes else self.tail or self.decode",
        "return self.tail or self.decode",
        f"{LOAD_POLICY}::test_a_prompt_that_no_graph_holds_is_loaded_where_computing_it_takes_longer",
    ),
    Mutant(
        "a_step_that_compiled_kernels_has_a_long_launch",
        f"{ENGINE_CORE}/enginetimes.py",
        "return median(self._by_size[max(sizes)])",
        "return max(self._by_size[max(sizes)])",
        f"{LOAD_POLICY}::test_a_prompt_that_no_graph_holds_is_loaded_where_computing_it_takes_longer",
    ),
    Mutant(
        "decoding_counts_as_the_launch_of_prompts",
        f"{ENGINE_CORE}/enginetimes.py",
        "        if not step.decodes:\n            times",
        "        if True:\n            times",
        f"{LOAD_POLICY}::test_a_step_that_also_decodes_says_nothing_of_its_size",
    ),
    Mutant(
        "a_load_that_takes_longer_than_computing_is_made",
        f"{ENGINE_CORE}/loadpolicy.py",
        "        if hit < self._steps.seconds(prompt):\n",
        "        if True:\n",
        f"{LOAD_POLICY}::test_alone_a_load_that_takes_longer_than_computing_is_not_made",
    ),
    Mutant(
        "loads_that_are_not_made_are_not_told",
        f"{ENGINE_CORE}/loadpolicy.py",
        "            self._not_made += 1\n",
        "            pass\n",
        f"{LOAD_POLICY}::test_alone_a_load_that_takes_longer_than_computing_is_not_made",
    ),
    Mutant(
        "who_waits_to_be_scheduled_does_not_count",
        f"{ENGINE_CORE}/loadpolicy.py",
        "everything = max(len(self.requests), len(self._running))",
        "everything = len(self._running)",
        f"{LOAD_POLICY}::test_where_others_wait_no_long_load_goes_by_layer",
    ),
    Mutant(
        "a_whole_prompt_goes_by_layer",
        "service/kvstow_service/connectors/engine_core/loadpolicy.py",
        '"whole_prompt": is_whole,',
        '"whole_prompt": False,',
        "tests/service/connectors/engine_core/test_loadpolicy.py::test_a_whole_prompt_never_goes_by_layer",
    ),
    Mutant(
        "a_step_ends_before_its_loads_by_layer",
        "service/kvstow_service/connectors/engine_core/workerside.py",
        "        if load is not None:\n            load.wait(num_parts - 1)\n",
        "        pass\n",
        "tests/service/connectors/engine_core/test_layerwaits.py::test_what_follows_the_step_waits_for_all_of_the_load",
    ),
    Mutant(
        "layers_without_a_hook_do_not_wait",
        "service/kvstow_service/connectors/engine_core/workerside.py",
        "        if missing or not self.part_of:\n",
        "        if False:\n",
        "tests/service/connectors/engine_core/test_layerwaits.py::test_layers_whose_hook_was_never_called_are_waited_for_first",
    ),
    Mutant(
        "a_step_goes_on_without_its_load",
        "service/kvstow_service/connectors/engine_core/workerside.py",
        "layered is None or any(op.boots and op.boots[self.rank] != self.plane.boot_id for op in plan.ops)",
        "layered is None",
        "tests/service/connectors/engine_core/test_layerwaits.py"
        "::test_a_refused_load_is_reported_as_invalid_blocks_in_its_own_step",
    ),
    Mutant(
        "what_one_stream_has_waited_for_counts_for_all",
        LAYERS,
        "if self._waited.get(stream, -1) < launch:",
        "if max(self._waited.values(), default=-1) < launch:",
        f"{LAYER_TESTS}::test_each_of_two_streams_waits_for_a_layer",
    ),
    Mutant(
        "a_step_loads_without_a_fence",
        f"{ENGINE_CORE}/workerside.py",
        "layered.load(plan.ops, self.fence())",
        "layered.load(plan.ops, None)",
        "tests/service/connectors/engine_core/test_layerwaits.py::test_blocks_are_written_after_the_work_that_the_compute_stream_has_by_then",
    ),
    Mutant(
        "slots_of_a_load_that_vllm_has_no_blocks_for_stay",
        f"{ENGINE_CORE}/loads.py",
        "                tracked.load.had_no_room = True\n                self._drop_begun(tracked)\n",
        "                tracked.load.begun = None\n",
        "tests/service/connectors/vllm/test_attached.py::test_a_load_by_layer_that_vllm_has_no_blocks_for_is_given_up_and_goes_before_a_step",
    ),
    Mutant(
        "slots_of_a_load_that_vllm_asks_for_no_more_stay",
        f"{ENGINE_CORE}/loads.py",
        "            if not is_asked_for:\n                self._drop_begun(tracked)\n",
        "",
        "tests/service/connectors/vllm/test_attached.py::test_slots_for_a_request_that_vllm_asks_for_no_more_are_given_up",
    ),
    Mutant(
        "slots_of_a_lost_session_are_used",
        f"{ENGINE_CORE}/loads.py",
        "begun.answer.value is None or not self._finder.is_valid(begun.hit)",
        "begun.answer.value is None",
        "tests/service/connectors/vllm/test_attached.py::test_slots_that_a_lost_session_gave_are_not_used",
    ),
    Mutant(
        "a_broken_lease_stays",
        "service/kvstow_service/node/pools/nodesession.py",
        "            control.release_lease(lease)\n",
        "",
        "tests/service/connectors/vllm/test_attached.py::test_a_broken_lease_holds_nothing_after_it_was_refused",
    ),
    Mutant(
        "loads_whose_slots_come_late_do_not_count",
        f"{ENGINE_CORE}/loadpolicy.py",
        "return self._by_layer + self._queued + self._waiting",
        "return self._by_layer + self._queued",
        f"{LOAD_POLICY}::test_loads_whose_slots_come_late_count",
    ),
    Mutant(
        "a_load_by_layer_of_another_session_is_let_through",
        "engine/kvstow/attach/opgate.py",
        "            if any(number_of(op.op_id) != self._number for op in ops):\n",
        "            if False:\n",
        "tests/service/node/test_attachedworker.py::test_what_a_step_computes_with_is_let_through_until_the_host_rests",
    ),
    Mutant(
        "a_session_is_settled_while_a_load_by_layer_starts",
        "engine/kvstow/attach/opgate.py",
        "return not self._starting and self._plane.pending_ops == 0",
        "return self._plane.pending_ops == 0",
        "tests/engine/attach/test_worker.py"
        "::test_a_load_that_takes_long_to_start_locks_nobody_out_and_the_gate_is_not_quiet_meanwhile",
    ),
    Mutant(
        "a_load_by_layer_holds_no_memory",
        "engine/kvstow/layeredloads.py",
        "holds = [self._hold(_end([op])) for op in ops]",
        "holds = [self._hold(0) for _ in ops]",
        "tests/service/node/test_attachedworker.py::test_an_extent_that_is_revoked_stays_until_its_copies_have_ended",
    ),
    Mutant(
        "a_session_is_settled_while_a_step_needs_it",
        "engine/kvstow/attach/opgate.py",
        "            if not self.hold:\n                self._number = 0\n",
        "            self._number = 0\n",
        "tests/service/node/test_attachedworker.py::test_what_a_step_computes_with_is_let_through_until_the_host_rests",
    ),
    Mutant(
        "a_rank_says_that_it_keeps_a_hold_of_another_session",
        "engine/kvstow/attach/opgate.py",
        "self.hold = hold.number if hold.session == self._number else 0",
        "self.hold = hold.number",
        "tests/service/node/test_attachedworker.py::test_a_hold_that_comes_too_late_or_for_another_session_is_not_kept",
    ),
    Mutant(
        "a_rank_waits_for_ever_for_a_host_that_hangs",
        "engine/kvstow/attach/worker.py",
        "        if grace <= 0:\n",
        "        if False:\n",
        "tests/service/node/test_attachedworker.py::test_a_host_that_never_rests_is_waited_for_so_long_and_no_longer_unless_it_can_take_nothing_back",
    ),
    Mutant(
        "a_rank_refuses_what_its_host_cannot_take_back",
        "engine/kvstow/attach/worker.py",
        "LONGEST_GRACE_SECONDS if may_refuse else inf",
        "LONGEST_GRACE_SECONDS",
        "tests/service/node/test_attachedworker.py"
        "::test_a_host_that_never_rests_is_waited_for_so_long_and_no_longer_unless_it_can_take_nothing_back",
    ),
    Mutant(
        "a_service_that_ends_revokes_what_a_step_needs",
        "engine/kvstow/attach/worker.py",
        "            if revoked.at_end and self._gate.hold:\n",
        "            if False:\n",
        "tests/service/node/test_attachedworker.py"
        "::test_what_a_service_revokes_at_its_end_is_kept_for_the_loads_that_may_still_come",
    ),
    Mutant(
        "a_step_that_takes_seconds_is_silence",
        f"{ENGINE_CORE}/controlplane.py",
        "if oldest is not None and oldest.sent_at < self._previous_step:",
        "if oldest is not None:",
        "tests/service/connectors/vllm/test_attached.py::test_a_step_that_takes_seconds_is_no_silence_of_the_service",
    ),
    Mutant(
        "an_answer_is_believed_although_the_connection_ends_behind_it",
        f"{ENGINE_CORE}/controlplane.py",
        "        if answer.done:\n            self._connection.drain()\n",
        "",
        "tests/service/connectors/vllm/test_attached.py"
        "::test_slots_are_not_used_if_the_end_of_the_session_stands_behind_them",
    ),
    Mutant(
        "the_end_of_a_connection_is_not_read_with_what_stands_before_it",
        "engine/kvstow/attach/connection.py",
        "        while channel is not None and self._channel is channel and received != channel.bytes_received:\n",
        "        if channel is not None:\n",
        "tests/engine/attach/test_connection.py::test_all_that_has_arrived_is_read_up_to_the_end_of_the_connection",
    ),
    Mutant(
        "what_has_arrived_before_a_write_fails_is_lost",
        "engine/kvstow/attach/connection.py",
        "            while self._channel is channel and received != channel.bytes_received:\n",
        "            while False:\n",
        "tests/engine/attach/test_connection.py"
        "::test_what_was_pushed_before_the_end_is_returned_before_the_next_session",
    ),
    Mutant(
        "the_end_of_a_session_drops_its_last_results",
        "engine/kvstow/attach/engine.py",
        "        self._take(self._connection.take_pushed())  # results that have arrived before the end\n",
        "",
        "tests/engine/attach/test_engine.py::test_a_result_counts_that_has_arrived_before_the_end_of_the_session",
    ),
    Mutant(
        "a_load_by_layer_is_promised_although_a_rank_may_refuse_it",
        f"{ENGINE_CORE}/loads.py",
        "        if not self._control.gates_are_held:  # the ranks say so after a step\n",
        "        if False:\n",
        "tests/service/connectors/vllm/test_attached.py"
        "::test_no_load_by_layer_is_promised_before_every_rank_holds_its_gate",
    ),
    Mutant(
        "a_hold_ends_while_ops_of_its_session_come",
        f"{ENGINE_CORE}/controlplane.py",
        "or any(number_of(op.op_id) == self._current.session for op in ops)",
        "or False",
        "tests/service/connectors/vllm/test_attached.py::test_a_hold_lasts_until_no_op_of_its_session_comes",
    ),
    Mutant(
        "an_idle_engine_holds_its_gates",
        f"{ENGINE_CORE}/controlplane.py",
        "session = 0 if ticket is None or not has_requests else ticket.number",
        "session = 0 if ticket is None else ticket.number",
        "tests/service/connectors/vllm/test_attached.py::test_an_engine_without_requests_holds_no_gate",
    ),
    Mutant(
        "late_words_of_an_earlier_hold_count",
        f"{ENGINE_CORE}/controlplane.py",
        "if number and number == self._current.number:",
        "if number:",
        "tests/service/connectors/vllm/test_attached.py::test_a_late_word_of_an_earlier_hold_does_not_count",
    ),
    Mutant(
        "a_refused_load_counts_as_loaded",
        f"{ENGINE_CORE}/workerside.py",
        "            self._refused.update(block for op in plan.ops for block in op.blocks)\n",
        "",
        "tests/service/connectors/engine_core/test_layerwaits.py"
        "::test_a_refused_load_is_reported_as_invalid_blocks_in_its_own_step",
    ),
    Mutant(
        "a_step_that_vllm_cannot_take_back_goes_on",
        f"{ENGINE_CORE}/workerside.py",
        "            if not self._takes_back:\n                raise\n",
        "",
        "tests/service/connectors/engine_core/test_layerwaits.py"
        "::test_where_vllm_cannot_take_a_step_back_a_refused_load_ends_the_step",
    ),
    Mutant(
        "blocks_that_were_not_loaded_are_found_on_the_gpu",
        f"{ENGINE_CORE}/schedulerside.py",
        "        self._gpu.forget(blocks)\n",
        "",
        "tests/service/connectors/engine_core/test_failedloads.py::test_what_was_computed_with_blocks_that_were_not_"
        "loaded_leaves_the_cache_and_each_request_computes_it",
    ),
    Mutant(
        "requests_go_on_with_blocks_that_another_one_computes_again",
        f"{ENGINE_CORE}/schedulerside.py",
        "                request.num_computed_tokens = min(request.num_computed_tokens, start)\n",
        "",
        "tests/service/connectors/engine_core/test_failedloads.py::test_what_was_computed_with_blocks_that_were_not_"
        "loaded_leaves_the_cache_and_each_request_computes_it",
    ),
    Mutant(
        "a_burst_goes_by_layer_after_long_steps",
        f"{ENGINE_CORE}/loadpolicy.py",
        "self._steps.shortest if others else 0.0",
        "self._steps.shortest",
        "tests/service/connectors/engine_core/test_loadpolicy.py::test_a_burst_after_long_steps_is_a_burst_all_the_same",
    ),
    # -- ops -------------------------------------------------------------------------------------------------
    Mutant(
        "a_failed_store_is_published",
        OPS,
        "        elif entry.error:\n            entry.namespace.pending_stores",
        "        elif entry.error is False:\n            entry.namespace.pending_stores",
        f"{CONTROL}/test_engine.py::test_a_failed_store_publishes_nothing_and_frees_its_slots",
    ),
    Mutant(
        "a_failed_op_ends_at_the_first_failure",
        OPS,
        "        if not entry.pending:\n            self._end(entry)",
        "        if not entry.pending or entry.error:\n            self._end(entry)",
        f"{CONTROL}/test_engine.py::test_a_failed_store_publishes_nothing_and_frees_its_slots",
    ),
    Mutant(
        "a_stuck_store_frees_its_slots",
        OPS,
        "            pool.end_quarantine(op.slots)\n        elif entry.error:\n",
        "            pass\n        elif entry.error:\n",
        f"{CONTROL}/test_engine.py::test_a_stuck_store_is_abandoned_and_its_slots_wait_in_quarantine",
    ),
    Mutant(
        "a_failed_load_keeps_its_keys",
        OPS,
        '            self.pool.remove_blocks(slots, "load_failed")\n',
        "",
        f"{CONTROL}/test_engine.py::test_a_failed_load_removes_its_keys_at_the_first_failure",
    ),
    Mutant(
        "older_desired_states_are_applied",
        "engine/kvstow/messages.py",
        "        return self.engine_id != applied.engine_id or self.number > applied.number\n",
        "        return True\n",
        "tests/engine/test_dataplane.py::test_a_late_desired_state_reverts_nothing",
    ),
    Mutant(
        "late_reports_are_believed",
        f"{CONTROL_CODE}/ranktable.py",
        "            return report.number <= last.number\n",
        "            return False\n",
        f"{CONTROL}/test_ranktable.py::test_a_late_report_of_the_same_boot_is_counted_and_changes_nothing",
    ),
    Mutant(
        "reports_may_have_anything",
        "engine/kvstow/attach/calls.py",
        "        if not _is_sound(getattr(message, name)):\n",
        "        if False:\n",
        "tests/engine/attach/test_rankreports.py",
    ),
    Mutant(
        "reports_have_no_numbers",
        AGENT,
        "        link.send(Report.now(self._numbers.number(report)))\n",
        "        link.send(Report.now(report))\n",
        "tests/service/admin/test_agent.py::test_a_change_is_reported_at_once",
    ),
    Mutant(
        "changes_wait_for_the_next_report",
        RANK_SOCKET,
        "        self._engine.pool.target.on_wanted = self._wake.set\n",
        "        self._engine.pool.target.on_wanted = lambda: None\n",
        "tests/service/admin/test_ranksocket.py::"
        "test_a_change_of_the_desired_state_is_sent_at_once_and_once_to_each_rank",
    ),
    Mutant(
        "any_user_may_report",
        RANK_SOCKET,
        "        if uid not in (0, os.geteuid()):\n",
        "        if False:\n",
        "tests/service/admin/test_ranksocket.py::test_processes_of_other_users_may_not_report",
    ),
    Mutant(
        "connections_of_ranks_have_no_bound",
        RANK_SOCKET,
        "        if len(self._clients) >= self._engine.config.num_ranks + _SPARE_CLIENTS:\n",
        "        if False:\n",
        "tests/service/admin/test_ranksocket.py::test_connections_have_a_bound",
    ),
    Mutant(
        "an_error_ends_the_thread_of_the_ranks_socket",
        RANK_SOCKET,
        "            except Exception:  # nothing may end the thread\n",
        "            except KvstowError:\n",
        "tests/service/admin/test_ranksocket.py::test_no_error_ends_the_thread",
    ),
    Mutant(
        "an_error_ends_the_thread_of_an_agent",
        AGENT,
        "            except Exception as error:  # noqa: BLE001 - nothing may end the thread\n",
        "            except KvstowError as error:\n",
        "tests/service/admin/test_agent.py::test_the_thread_outlives_a_rank_that_raises",
    ),
    Mutant(
        "an_agent_waits_forever_for_an_answer",
        AGENT,
        "        if self._awaited_since is not None and now >= self._due():\n",
        "        if False:\n",
        "tests/service/admin/test_agent.py::test_an_engine_that_does_not_answer_is_a_failure_and_the_link_is_new",
    ),
    Mutant(
        "reports_do_not_wait_for_answers",
        AGENT,
        "        if self._awaited_since is None and now >= self._due():\n",
        "        if now >= (self._next_look if self._is_changed else self._next_report):\n",
        "tests/service/admin/test_agent.py::test_a_report_waits_until_the_one_before_is_answered",
    ),
    Mutant(
        "sockets_of_living_engines_are_removed",
        "service/kvstow_service/admin/rendezvous.py",
        "            if not is_listening(path):\n",
        "            if True:\n",
        "tests/service/admin/test_rendezvous.py::test_sockets_of_killed_hosts_are_ignored_replaced_and_removed",
    ),
    # -- copies ----------------------------------------------------------------------------------------------
    Mutant(
        "a_copy_holds_no_memory",
        COPYTHREAD,
        "self._hold(max(op.slots, default=-1) + 1)",
        "self._hold(0)",
        "tests/engine/test_dataplane.py::test_memory_under_a_copy_is_freed_only_after_the_copy",
    ),
    Mutant(
        "memory_is_dropped_before_the_copy_has_ended",
        COPYTHREAD,
        '            if completion.mark != "source_free":\n                self._ops.discard_running(copy)\n',
        "            copy.drop_memory()\n"
        '            if completion.mark != "source_free":\n                self._ops.discard_running(copy)\n',
        "tests/engine/test_copythread.py::test_a_store_reports_when_its_blocks_are_free_and_when_it_is_done",
    ),
    Mutant(
        "ops_fail_before_their_device_is_closed",
        COPYTHREAD,
        "            self._fail_queued(reason)\n        try:\n            with self._turn:\n",
        "            self._fail_queued(reason)\n"
        "            self._publish([_failed(copy.op, DataPlaneFailedError(reason)) for copy in self._ops.running()])\n"
        "        try:\n            with self._turn:\n",
        "tests/engine/test_copythread.py::test_running_ops_fail_only_after_the_device_was_closed",
    ),
    Mutant(
        "memory_of_earlier_sessions_stays_mapped",
        "engine/kvstow/memory/mappedpool.py",
        "                if not extent.is_granted:\n                    extent.is_revoked = True\n",
        "                pass\n",
        "tests/engine/memory/test_mappedpool.py::test_memory_that_nobody_grants_again_goes",
    ),
    Mutant(
        "memory_is_shown_before_it_is_populated",
        "engine/kvstow/memory/mappedpool.py",
        "shown = min(self.grid.max_slots, self.populated_bytes // self.grid.slot_stride)",
        "shown = self.grid.max_slots",
        "tests/engine/memory/test_mappedpool.py::test_nothing_above_the_populated_bytes_is_registered_mapped_or_touched",
    ),
    # -- the node's memory -----------------------------------------------------------------------------------
    Mutant(
        "a_worker_releases_what_was_not_revoked",
        RANK_MEMORY,
        "            if not self._find(extent_id).revoked:\n",
        "            if self._find(extent_id) is None:\n",
        "tests/service/node/test_nodehost.py",
    ),
    Mutant(
        "more_slots_are_registered_than_there_are",
        RANK_MEMORY,
        "            if num_slots > self._find(extent_id).grant.num_slots:\n",
        "            if num_slots > (self._find(extent_id).grant.num_slots << 32):\n",
        "tests/service/node/test_nodehost.py",
    ),
    Mutant(
        "released_extents_are_named_before_the_report",
        "engine/kvstow/attach/rankreports.py",
        "        self._registered = registered\n        for piece in listed(news):\n",
        "        self._registered = registered\n"
        "        if released:\n            self._connection.send(ReleasedExtents(tuple(released)))\n"
        "            released = []\n"
        "        for piece in listed(news):\n",
        "tests/engine/attach/test_worker.py::test_fewer_slots_and_the_applied_state_are_said_before_it_lets_go",
    ),
    Mutant(
        "memory_that_was_not_granted_again_stays",
        "engine/kvstow/attach/worker.py",
        "        if granted.is_all:",
        "        if granted is None:",
        "tests/service/node/test_attachedworker.py::test_memory_of_which_the_next_service_has_nothing_goes",
    ),
    Mutant(
        "a_worker_without_memory_gets_no_message",
        "service/kvstow_service/node/pools/poolmemory.py",
        "        self.has_all = not session.control.is_engine\n",
        "        self.has_all = True\n",
        "tests/service/node/pools/test_poolmemory.py::"
        "test_a_worker_is_told_that_it_has_everything_also_if_that_is_nothing",
    ),
    Mutant(
        "a_claim_ends_after_its_pool_may_be_deleted",
        "service/kvstow_service/node/nodehost.py",
        "            if not self._sessions_of(session.pool):\n"
        "                self._memory.do(self._memory.end_claims, session.pool.name)\n"
        "        self._memory.look_again()\n",
        "        if not self.has_sessions(session.pool):\n"
        "            self._memory.do(self._memory.end_claims, session.pool.name)\n"
        "        self._memory.look_again()\n",
        f"{NODE_HOST}::test_a_pool_may_be_deleted_as_soon_as_its_last_session_is_over",
    ),
    Mutant(
        "a_row_is_given_back_before_its_blocks_are_gone",
        "service/kvstow_service/node/pools/poolmemory.py",
        "        surplus = len(self.pool.extents) - active\n",
        "        for number in sorted(self._held, reverse=True)[: len(self._held) - active]:\n"
        "            self._drop_claim(number)\n"
        "        return False\n"
        "        surplus = len(self.pool.extents) - active\n",
        "tests/service/node/test_schedules.py::test_no_byte_is_wrong_and_nothing_is_left",
    ),
    Mutant(
        "memory_of_a_session_is_freed_at_the_end_of_a_connection",
        "service/kvstow_service/node/attach/sessionlife.py",
        "        self._guarded(partial(session.lose, reason))\n        for member in session.members:\n",
        "        self._guarded(partial(session.lose, reason))\n"
        "        for member in session.members:\n"
        "            member.has_memory = False\n",
        "tests/service/node/attach/test_sessionlife.py"
        "::test_the_end_of_any_connection_loses_the_session_and_frees_nothing",
    ),
    Mutant(
        "extents_of_the_store_are_released_before_they_are_unmapped",
        "service/kvstow_service/node/tier/tiermemory.py",
        "            self.tier.stored_pool.remove_extent(self.stored_ranks.index(rank), extent_id, then)\n",
        "            then()\n"
        "            self.tier.stored_pool.remove_extent(self.stored_ranks.index(rank), extent_id, lambda: None)\n",
        "tests/service/node/test_nodestore.py::test_an_extent_stays_with_the_store_until_no_process_maps_it",
    ),
    Mutant(
        "transfers_of_the_store_are_not_recorded",
        "service/kvstow_service/node/pools/memorythread.py",
        "        if self.records is not None:\n            record = session.worker_record(hello, peer)\n",
        "        if self.records is not None and session.control.is_engine:\n"
        "            record = session.worker_record(hello, peer)\n",
        "tests/service/node/test_tierrestart.py"
        "::test_slots_stay_in_quarantine_until_the_process_of_the_former_transfers_has_ended",
    ),
    Mutant(
        "an_idle_namespace_keeps_its_place",
        "service/kvstow_service/node/nodehost.py",
        "if len(idle) < excess:",
        "if idle is not None:",
        f"{NODE_HOST}::test_the_namespace_that_was_left_first_makes_room_for_another",
    ),
    Mutant(
        "sealed_memory_that_all_workers_have_stays",
        "service/kvstow_service/node/pools/poolmemory.py",
        "        changed |= self._give_up_sealed(rows)\n",
        "",
        "tests/service/node/pools/test_poolmemory.py::test_memory_that_is_sealed_before_it_is_populated_is_replaced",
    ),
    Mutant(
        "a_user_has_any_number_of_pools",
        "service/kvstow_service/node/nodehost.py",
        "if len(mine) < POOLS_OF_USER:",
        "if True:",
        f"{NODE_HOST}::test_a_user_has_so_many_pools_and_one_without_sessions_makes_room",
    ),
    Mutant(
        "a_user_has_any_number_of_ranks",
        "service/kvstow_service/node/nodehost.py",
        "if there + identity.num_ranks > RANKS_OF_USER:",
        "if False:",
        f"{NODE_HOST}::test_the_sessions_of_a_user_have_so_many_ranks",
    ),
    Mutant(
        "what_is_released_and_not_yet_freed_has_no_bound",
        "engine/kvstow/control/session.py",
        " + self.pool.debts.num_slots",
        "",
        f"{CONTROL}/test_sessions.py::test_what_is_released_counts_until_it_is_freed",
    ),
    Mutant(
        "the_end_of_a_lease_frees_all_its_slots_at_once",
        "engine/kvstow/control/sharedpool.py",
        "        self.debts.owe(held)  #",
        "        super().end_holds(held)  #",
        "tests/engine/control/test_slices.py::test_the_slots_of_a_large_load_are_freed_in_slices",
    ),
    Mutant(
        "a_repeated_slot_is_held_once",
        "engine/kvstow/control/slots.py",
        "            return self._add_repeated(slots, up=True)",
        "            slots = list(dict.fromkeys(slots))",
        "tests/engine/control/test_sessions.py::test_a_lease_with_a_repeated_key_gives_up_one_hold_of_its_slot",
    ),
    Mutant(
        "completions_are_taken_in_one_go",
        "engine/kvstow/control/session.py",
        "                while at < len(completions) and left > 0:",
        "                while at < len(completions):",
        "tests/engine/control/test_slices.py::test_many_completions_are_taken_in_steps",
    ),
    Mutant(
        "a_failed_load_ends_before_its_blocks_are_removed",
        "engine/kvstow/control/session.py",
        "                        left -= removed\n                        continue\n",
        "                        left -= removed\n",
        "tests/engine/control/test_slices.py::test_the_blocks_of_a_failed_load_are_removed_in_steps_before_it_ends",
    ),
    Mutant(
        "the_ops_of_a_lost_session_end_in_one_go",
        "engine/kvstow/control/ops.py",
        "            if left <= 0:\n                break\n",
        "",
        "tests/engine/control/test_slices.py::test_an_op_with_many_slots_is_a_step_of_its_own",
    ),
    Mutant(
        "the_slots_of_a_lost_session_are_freed_before_its_ops_have_ended",
        "engine/kvstow/control/attachedsession.py",
        '            if self._ending == "processes" and not',
        "            if not",
        "tests/engine/control/test_slices.py::test_the_ops_of_a_lost_session_end_in_steps",
    ),
    Mutant(
        "quarantine_ends_in_one_go",
        "engine/kvstow/control/attachedsession.py",
        "            pool.end_quarantine(self.quarantined_slots[-pool.slice_slots :])\n"
        "            del self.quarantined_slots[-pool.slice_slots :]",
        "            pool.end_quarantine(self.quarantined_slots)\n            del self.quarantined_slots[:]",
        "tests/engine/control/test_slices.py::test_the_slots_of_a_lost_session_are_freed_in_steps_after_the_death_of_its_processes",
    ),
    Mutant(
        "the_ops_of_a_rank_that_restarts_fail_in_one_go",
        "engine/kvstow/control/ops.py",
        "            if left <= 0:\n                yield\n",
        "            if False:\n                yield\n",
        "tests/engine/control/test_slices.py::test_the_ops_of_a_rank_that_restarts_fail_in_steps",
    ),
    Mutant(
        "a_store_leaves_slots_that_are_owed",
        "engine/kvstow/control/pool.py",
        "                    if len(found) < missing and self.debts.slots:",
        "                    if False:",
        "tests/engine/control/test_slices.py::test_a_store_finds_slots_that_are_owed",
    ),
    Mutant(
        "a_turn_has_no_bound_of_time",
        "service/kvstow_service/node/attach/attachserver.py",
        " or self._clock() >= until:",
        ":",
        "tests/service/node/attach/test_attachserver.py::test_a_client_with_frames_that_take_long_waits_for_the_others",
    ),
    Mutant(
        "a_store_has_as_many_blocks_as_a_look_up",
        "engine/kvstow/attach/wire.py",
        "Meta(max_length=MOST_STORED)",
        "Meta(max_length=MOST_ITEMS)",
        "tests/engine/attach/test_messages.py::test_a_store_has_a_bound_of_its_own",
    ),
    Mutant(
        "an_offer_is_stored_in_one_go",
        "service/kvstow_service/connectors/engine_core/stores.py",
        "range(0, len(offer.keys), MOST_STORED)",
        "range(0, len(offer.keys), len(offer.keys))",
        "tests/service/connectors/engine_core/test_schedulerside.py::test_an_offer_is_stored_in_parts",
    ),
    Mutant(
        "the_collector_visits_the_keys_of_a_call",
        "engine/kvstow/attach/wire.py",
        "keys: list[bytes] = unvisited([])",
        "keys: list[bytes] = []",
        "tests/engine/attach/test_messages.py::test_the_collector_visits_no_list_of_keys",
    ),
    Mutant(
        "the_collector_visits_the_slots_of_a_large_lease",
        "engine/kvstow/control/leases.py",
        "            unvisited(slots)  #",
        "            pass  #",
        "tests/engine/control/test_sessions.py::test_the_collector_visits_no_slots_of_a_large_lease",
    ),
    Mutant(
        "the_collector_visits_the_keys_of_all_slots",
        "engine/kvstow/control/slots.py",
        "unvisited([])",
        "[]",
        "tests/engine/control/test_keytable.py::test_the_collector_visits_no_list_of_slots",
    ),
    Mutant(
        "one_client_keeps_the_thread_of_the_memory",
        "service/kvstow_service/node/pools/memorythread.py",
        "        if pool.debts.pay():\n            self._owing.add(pool)",
        "        while pool.debts.pay():\n            pass",
        f"{NODE_HOST}::test_many_slots_are_freed_by_the_thread_of_the_memory",
    ),
    Mutant(
        "one_user_takes_all_places",
        "service/kvstow_service/node/attach/attachserver.py",
        "if not self._clients.has_place_for(peer.uid):",
        "if False:",
        "tests/service/node/attach/test_attachserver.py::test_one_user_leaves_places_for_others",
    ),
    Mutant(
        "a_pool_that_cannot_be_read_costs_all",
        SURVIVORS,
        "except Exception as error:  # noqa: BLE001 - a bad record of one user",
        "except OSError as error:  # a bad record of one user",
        f"{SURVIVAL}::test_a_pool_that_cannot_be_read_costs_no_other_one",
    ),
    Mutant(
        "the_pools_of_one_user_fill_the_roster",
        SURVIVORS,
        "_COPY_BYTES = 32 << 20",
        "_COPY_BYTES = 8 << 20",
        f"{SURVIVAL}::test_the_roster_has_room_for_the_pools_of_some_users",
    ),
    Mutant(
        "settings_of_any_length",
        "engine/kvstow/attach/hello.py",
        "> _MOST_SETTINGS:",
        "< 0:",
        "tests/engine/attach/test_messages.py::test_the_settings_of_an_engine_have_a_bound",
    ),
    Mutant(
        "a_user_has_any_number_of_namespaces",
        "service/kvstow_service/node/nodehost.py",
        "if excess <= 0:",
        "if True:",
        f"{NODE_HOST}::test_a_user_has_so_many_namespaces",
    ),
    Mutant(
        "each_session_keeps_its_hello",
        "service/kvstow_service/node/nodehost.py",
        "hello = replace(hello.in_session(), namespace=namespace.identity, fleet_weights=hello.fleet_weights)",
        "pass",
        f"{NODE_HOST}::test_a_session_keeps_no_identities_of_its_own",
    ),
    Mutant(
        "a_client_fills_the_log",
        "service/kvstow_service/process/logwriter.py",
        "if written.lines >= _LINES_OF_MESSAGE:",
        "if False:",
        "tests/service/process/test_logwriter.py"
        "::test_a_message_is_written_so_often_a_minute_and_the_next_line_says_how_many_were_not",
    ),
    Mutant(
        "descriptors_of_clients_are_accepted",
        "service/kvstow_service/node/attach/clients.py",
        "Channel(accepted, scratch=scratch, limit=MAX_HELLO_BYTES)",
        "Channel(accepted, scratch=scratch, limit=MAX_HELLO_BYTES, accepts_fds=True)",
        "tests/service/node/attach/test_attachfuzz.py::test_descriptors_of_a_client_never_enter_the_service",
    ),
    Mutant(
        "what_a_lost_keeper_has_still_counts",
        RECORDS,
        "            self._roster.void()\n",
        "            pass\n",
        f"{SURVIVAL}::test_what_a_keeper_has_is_void_once_the_service_has_parted_from_it",
    ),
    Mutant(
        "a_keeper_that_hangs_is_not_noticed",
        RECORDS,
        "        elif owed >= _SILENT_SECONDS:\n",
        "        elif False:\n",
        f"{SURVIVAL}::test_a_keeper_that_hangs_is_told_and_loses_nothing_once_it_goes_on",
    ),
    Mutant(
        "a_keeper_that_nobody_would_find_is_kept",
        RECORDS,
        "self._client.can_be_found():",
        "True:",
        f"{SURVIVAL}::test_a_keeper_that_the_next_service_would_not_find_is_replaced",
    ),
    Mutant(
        "an_answer_of_the_keeper_is_taken_for_another",
        "service/kvstow_service/node/survival/keeperclient.py",
        "        if self._asked_at is not None:\n            self._take_answer()\n        self._send(",
        "        self._send(",
        "tests/service/node/survival/test_keeper.py::test_a_request_after_a_question_gets_its_own_answer",
    ),
    Mutant(
        "a_lost_keeper_is_a_lack_of_memory",
        "service/kvstow_service/node/node.py",
        "for words in memory.figures.failures)",
        "for words in (*memory.figures.failures, *self.memory_thread.records.unsaved))",
        "tests/service/node/test_node.py::test_a_keeper_that_is_gone_is_no_lack_of_memory",
    ),
    Mutant(
        "a_start_that_died_is_tried_again",
        "service/kvstow_service/node/survival/roster.py",
        "        os.pwrite(fd, _IN_RECOVERY, 0)\n",
        "",
        f"{SURVIVAL}::test_a_start_that_dies_in_recovery_is_followed_by_a_cold_one",
    ),
    Mutant(
        "the_roster_names_what_the_keeper_lacks",
        RECORDS,
        "            if new := {label: fd for label, fd in fds.items() if label not in self._held}:\n",
        "            self._roster.write(self._content(memory))\n"
        "            if new := {label: fd for label, fd in fds.items() if label not in self._held}:\n",
        f"{SURVIVAL}::test_the_roster_never_names_what_the_keeper_lacks",
    ),
    Mutant(
        "memory_is_handed_out_before_it_is_recorded",
        "service/kvstow_service/node/pools/memorythread.py",
        "                    self._guarded(partial(self.records.save, self.memory))\n",
        "                    pass\n",
        "tests/service/node/pools/test_poolmemory.py::test_nothing_is_handed_out_before_it_is_recorded",
    ),
    Mutant(
        "rows_above_a_lost_one_are_used",
        SURVIVORS,
        "if row.first_slot != end or not pool.record.layout.has_row(row.num_slots, sizes):\n            break\n",
        "if not pool.record.layout.has_row(row.num_slots, sizes):\n            continue\n",
        f"{SURVIVAL}::test_whatever_the_keeper_lacks_costs_that_and_what_depends_on_it",
    ),
    Mutant(
        "a_pool_is_used_although_a_worker_of_it_cannot_be_seen",
        SURVIVORS,
        "    if missing or label not in kept:\n",
        "    workers = tuple(one for one in workers if one not in missing)\n"
        "    missing = []\n"
        "    if missing or label not in kept:\n",
        f"{SURVIVAL}::test_whatever_the_keeper_lacks_costs_that_and_what_depends_on_it",
    ),
    Mutant(
        "two_services_have_the_memory",
        "service/kvstow_service/node/survival/keeper.py",
        "        if life != self._life and self._process is not None and not",
        "        if life == self._life and self._process is not None and not",
        "tests/service/node/survival/test_keeper.py::test_a_service_is_refused_while_the_process_before_it_lives",
    ),
    Mutant(
        "a_former_life_comes_back",
        "service/kvstow_service/node/survival/keeper.py",
        "        if life in self._former:\n",
        "        if life in ():\n",
        "tests/service/node/survival/test_keeper.py::test_a_life_that_another_one_has_followed_does_not_come_back",
    ),
    Mutant(
        "memory_is_free_that_a_process_has_open",
        "engine/kvstow/memory/nodememory.py",
        "is_unused = not is_open_elsewhere(extent.fd)",
        "is_unused = True",
        f"{NODE_MEMORY}::test_memory_that_is_pinned_while_it_is_given_up_is_not_free",
    ),
    Mutant(
        "memory_is_free_although_it_is_pinned",
        "engine/kvstow/memory/nodememory.py",
        "            return seal_writes(extent.fd)\n",
        "            return True\n",
        f"{NODE_MEMORY}::test_memory_goes_to_another_owner_only_when_no_process_has_it",
    ),
    Mutant(
        "memory_is_free_when_it_is_closed",
        "engine/kvstow/memory/nodememory.py",
        "(() if self._ends is None else self._ends.remaining())",
        "()",
        f"{NODE_MEMORY}::test_memory_goes_to_another_owner_only_when_no_process_has_it",
    ),
    Mutant(
        "memory_whose_seals_are_sealed_is_free_at_once",
        "engine/kvstow/memory/nodememory.py",
        "return not self.budget.closed[number].had",
        "return True",
        f"{NODE_MEMORY}::test_memory_whose_seals_a_client_has_sealed_is_kept_until_those_that_had_it_have_ended",
    ),
    Mutant(
        "pinned_memory_holds_up_the_rest",
        "engine/kvstow/memory/nodememory.py",
        "self.given_up[number] = extent  # at the end, so that the others are checked before it",
        "self.given_up = {number: extent, **self.given_up}",
        f"{NODE_MEMORY}::test_pinned_memory_does_not_hold_up_the_rest",
    ),
    Mutant(
        "workers_share_an_open_file",
        "service/kvstow_service/node/pools/poolmemory.py",
        "fds.append(open_for_client(extent.fd))",
        'fds.append(__import__("os").dup(extent.fd))',
        "tests/service/node/pools/test_recalledmemory.py"
        "::test_a_worker_that_lies_about_letting_go_does_not_make_the_node_larger",
    ),
    Mutant(
        "memory_that_an_engine_has_sealed_is_handed_out",
        "service/kvstow_service/node/pools/poolmemory.py",
        "            if extent is not None and not extent.is_sound:\n                self._give_up(extent_id)\n",
        "            if extent is not None and extent.fd < 0:\n                self._give_up(extent_id)\n",
        "tests/service/node/pools/test_poolmemory.py::test_memory_that_an_engine_has_sealed_is_handed_out_no_more",
    ),
    Mutant(
        "records_count_before_their_data",
        f"{DISK}/blockfile.py",
        "        self._write_record(place, Record(state=DIRTY, generation=place.generation))\n"
        "        self._files.write_data(",
        "        self._files.write_data(",
        f"{DISK_TESTS}/test_blockfile.py::test_a_process_that_is_killed_within_a_write_leaves_no_record",
    ),
    Mutant(
        "a_disk_publishes_for_a_service_that_is_gone",
        f"{DISK}/blockfile.py",
        "        if not is_lent():\n",
        "        if False:\n",
        f"{DISK_TESTS}/test_blockfile.py::test_what_was_read_from_slots_after_the_service_had_ended_is_not_found",
    ),
    Mutant(
        "a_purge_is_answered_before_it_is_synced",
        f"{DISK}/blockfile.py",
        "generation=place.generation))\n        self._files.sync_records()\n",
        "generation=place.generation))\n",
        f"{DISK_TESTS}/test_blockfile.py::test_purged_blocks_stay_purged_after_a_power_cut",
    ),
    Mutant(
        "a_chunk_that_moves_keeps_its_bytes",
        f"{DISK}/blockfile.py",
        "        self._zero_chunk(chunk)\n        self._set_chunk(",
        "        self._set_chunk(",
        f"{DISK_TESTS}/test_blockfile.py::test_a_chunk_that_moves_holds_nothing_of_before",
    ),
    Mutant(
        "a_chunk_that_was_cut_off_comes_back_with_its_records",
        f"{DISK}/blockfile.py",
        "entry if chunk < num_chunks else",
        "entry if True else",
        f"{DISK_TESTS}/test_blockfile.py::test_a_chunk_that_a_smaller_size_has_cut_off_comes_back_empty",
    ),
    Mutant(
        "places_of_lost_records_count_as_empty",
        f"{DISK}/blockfile.py",
        "        if was_cut:\n            opened._forget",
        "        if False:\n            opened._forget",
        f"{DISK_TESTS}/test_blockfile.py::test_a_power_cut_never_gives_wrong_bytes",
    ),
    Mutant(
        "blocks_on_disks_are_not_verified",
        f"{DISK}/blockfile.py",
        "        if checksum_of(block.digest, parts) == record.checksum:\n",
        "        if True:\n",
        f"{DISK_TESTS}/test_blockfile.py::test_a_flipped_bit_is_corruption",
    ),
    Mutant(
        "a_digest_names_a_block_alone",
        f"{DISK}/blockfile.py",
        "BlockName(record.digest, record.namespace, ",
        "BlockName(record.digest, block.namespace, ",
        f"{DISK_TESTS}/test_blockfile.py::test_a_block_whose_name_only_has_an_equal_digest_is_missing",
    ),
    Mutant(
        "one_copy_of_the_header_overwrites_the_other",
        f"{DISK}/diskformat.py",
        "HEADER_BYTES: Final = 3 << 20",
        "HEADER_BYTES: Final = 1 << 20",
        f"{DISK_TESTS}/test_blockfile.py::test_the_header_has_room_for_as_many_kinds_as_chunks",
    ),
    Mutant(
        "a_part_of_a_block_may_lie_outside_of_its_extent",
        f"{DISK}/diskchild.py",
        "if not 0 <= offset < end <= len(mapped):",
        "if False:",
        f"{DISK_TESTS}/test_diskchild.py::test_a_part_that_does_not_lie_in_its_extent_is_not_lent",
    ),
    Mutant(
        "memory_that_no_process_gets_is_kept",
        f"{DISK}/pathchannel.py",
        "        finally:\n            for fd in fds:",
        "        if link is self._link:\n            for fd in fds:",
        f"{DISK_TESTS}/test_diskstore.py::test_memory_that_comes_while_a_child_ends_is_not_kept",
    ),
    Mutant(
        "records_of_a_former_generation_count",
        f"{DISK}/diskformat.py",
        'is_valid & (records["generation"] == generation)',
        "is_valid",
        f"{DISK_TESTS}/test_blockfile.py::test_a_chunk_that_moves_holds_nothing_of_before",
    ),
    Mutant(
        "records_count_wherever_they_are",
        f"{DISK}/diskformat.py",
        "    mixed = (np.uint64(chunk + 1) << np.uint64(32)) + places\n",
        "    mixed = np.ones_like(places)\n",
        f"{DISK_TESTS}/test_blockfile.py::test_the_data_of_a_misdirected_write_is_found_out",
    ),
    Mutant(
        "places_are_evicted_while_they_are_read",
        f"{DISK}/places.py",
        "            self._unlink(self._groups[chunk.kind], place)\n            chunk.busy += 1\n        self._readers",
        "            chunk.busy += 1\n        self._readers",
        f"{DISK_TESTS}/test_places.py::test_a_block_that_is_being_read_or_written_stays",
    ),
    Mutant(
        "owners_of_disks_take_everything",
        f"{DISK}/places.py",
        "            if one is not group and not is_protected:\n",
        "            if one is not group:\n",
        f"{DISK_TESTS}/test_places.py::test_a_second_owner_gets_its_share_and_no_more",
    ),
    Mutant(
        "writes_to_disks_go_beside_reads",
        f"{DISK}/pathqueue.py",
        ' or (direction == "write" and not self.lanes["read"].is_empty)',
        "",
        f"{DISK_TESTS}/test_diskpath.py::test_reads_go_first",
    ),
    Mutant(
        "one_owner_has_every_turn",
        f"{DISK}/pathqueue.py",
        "                lane.had_turn(owner)\n",
        "",
        f"{DISK_TESTS}/test_diskpath.py::test_owners_take_turns",
    ),
    Mutant(
        "a_purge_forgets_what_is_being_written",
        f"{DISK}/diskpath.py",
        "                job.is_purged, job.purge = True, purge\n",
        "                job.purge = purge\n",
        f"{DISK_TESTS}/test_diskpath.py::test_a_purge_waits_for_a_write_that_is_under_way_and_undoes_it",
    ),
    Mutant(
        "the_end_of_a_process_undoes_purges",
        f"{DISK}/diskpath.py",
        "            if job.is_purged:  # its record may be valid\n",
        "            if False:\n",
        f"{DISK_TESTS}/test_diskpath.py::test_a_process_that_ends_does_not_bring_a_purged_block_back",
    ),
    Mutant(
        "requests_wait_for_a_disk_that_hangs",
        f"{DISK}/diskpath.py",
        '            self._empty_queue()\n        if self.state == "failed"',
        '            pass\n        if self.state == "failed"',
        f"{DISK_TESTS}/test_diskpath.py::test_an_operation_that_hangs_stops_what_has_not_begun",
    ),
    Mutant(
        "a_purge_of_a_disk_in_use_is_forgotten",
        f"{DISK}/diskpath.py",
        "                self._gone.wishes.append(",
        '                if self.state == "starting":\n                    self._gone.wishes.append(',
        f"{DISK_TESTS}/test_diskpath.py::"
        "test_a_purge_while_another_process_has_the_files_is_answered_and_done_when_it_has_them_no_longer",
    ),
    Mutant(
        "a_purge_waits_for_files_that_cannot_be_opened",
        f"{DISK}/diskpath.py",
        "        self.state, self.reason = state, reason\n        self._answer_purges()\n",
        "        self.state, self.reason = state, reason\n",
        f"{DISK_TESTS}/test_diskpath.py::"
        "test_a_purge_while_another_process_has_the_files_is_answered_and_done_when_it_has_them_no_longer",
    ),
    Mutant(
        "a_purge_of_a_context_does_not_say_what_it_leaves",
        f"{CONTROL_CODE}/administration.py",
        'sweep.notice = "; ".join(filter(None, (store_notice, notice)))',
        "sweep.notice = store_notice",
        f"{POOL_TIER_TESTS}::test_what_a_context_has_used_is_purged_from_the_store",
    ),
    Mutant(
        "a_slow_disk_is_noticed_when_it_has_answered",
        f"{DISK}/pathqueue.py",
        "        return measured if measured is None or seconds <= 0 else min(measured, bytes_then / seconds)\n",
        "        return measured\n",
        f"{DISK_TESTS}/test_diskstore.py::test_reads_that_take_long_are_expected_to_before_they_have_ended",
    ),
    Mutant(
        "a_long_command_without_a_terminal_is_silent",
        "service/kvstow_service/cli/progress.py",
        "        elif self._clock() >= self._next_line:\n",
        "        elif self._clock() > self._next_line + LINE_SECONDS:\n",
        "tests/service/cli/test_progress.py::test_without_a_terminal_a_line_is_written_now_and_then",
    ),
    Mutant(
        "a_purge_does_not_name_a_disk_that_keeps_blocks",
        f"{DISK}/diskpath.py",
        '        if self.state in ("on", "starting") or (count == 0 and not undoes_writes):\n',
        "        if self.state or undoes_writes:\n",
        f"{DISK_TESTS}/test_diskpath.py::test_a_purge_says_what_a_disk_that_does_not_work_keeps",
    ),
    Mutant(
        "a_purge_is_silent_about_a_write_that_hangs",
        f"{DISK}/diskpath.py",
        "(count == 0 and not undoes_writes)",
        "count == 0",
        f"{DISK_TESTS}/test_diskpath.py::test_a_purge_says_that_a_write_hangs_which_it_undoes",
    ),
    Mutant(
        "a_reset_s_answer_does_not_name_the_disk",
        "service/kvstow_service/node/nodehost.py",
        "ResetDone(name, plain(purged.notice))",
        "ResetDone(name)",
        "tests/service/node/test_disknode.py::test_the_answer_names_a_disk_that_keeps_what_should_go",
    ),
    Mutant(
        "a_deletion_s_answer_does_not_name_the_disk",
        "api/kvstow_api/routes/pools.py",
        "DeletedPoolView(stored_blocks=purged.blocks, notice=purged.notice)",
        'DeletedPoolView(stored_blocks=purged.blocks, notice="")',
        "tests/api/node/test_sessions.py::test_a_pool_is_deleted_when_no_session_uses_it",
    ),
    Mutant(
        "a_deletion_is_answered_before_the_store_has_forgotten",
        "service/kvstow_service/node/node.py",
        "answers.get(timeout=_PURGE_SECONDS)",
        "answers.get(timeout=0)",
        "tests/service/node/test_nodestore.py::test_the_answer_to_a_deletion_waits_for_the_store",
    ),
    Mutant(
        "a_reset_is_answered_before_the_store_has_forgotten",
        "service/kvstow_service/node/nodehost.py",
        "        self.tier.forget_reset(before, answer)\n        return None\n",
        "        self.tier.forget_reset(before, lambda purged: None)\n        return ResetDone(name)\n",
        "tests/service/node/test_nodestore.py::test_the_answer_to_a_reset_waits_for_the_store",
    ),
    Mutant(
        "a_purge_before_an_engine_comes_back_leaves_the_disk_alone",
        "service/kvstow_service/node/node.py",
        "                self.tier.restore_pool(pool)\n",
        "                pass\n",
        "tests/service/node/test_disknode.py::test_what_is_purged_before_an_engine_comes_back_leaves_the_disk",
    ),
    Mutant(
        "long_chains_are_looked_for_at_once",
        POOL_TIER,
        "        for at in range(0, len(keys), pool.slice_slots):\n            if at:\n                yield\n",
        "        for at in range(0, len(keys), pool.slice_slots):\n",
        f"{POOL_TIER_TESTS}::test_a_long_chain_is_looked_for_in_slices",
    ),
    Mutant(
        "the_end_of_a_long_chain_is_used_last",
        POOL_TIER,
        "            for start in range((len(keys) - 1) // size * size, -1, -size):\n",
        "            for start in range(0, len(keys), size):\n",
        f"{POOL_TIER_TESTS}::test_a_long_chain_is_offered_in_slices_its_root_last_and_written_root_first",
    ),
    Mutant(
        "the_budget_of_writes_is_spent_on_anything",
        f"{DISK}/writebudget.py",
        "        return was_used_again or available >= self._size / len(self._level) / 2\n",
        "        return True\n",
        f"{DISK_TESTS}/test_writebudget.py::test_below_half_only_blocks_that_were_used_twice_are_written",
    ),
    Mutant(
        "two_paths_share_a_disk",
        f"{DISK}/startcheck.py",
        "        if one.device in devices:\n",
        "        if False:\n",
        f"{DISK_TESTS}/test_startcheck.py::test_two_paths_on_one_file_system_are_refused",
    ),
    Mutant(
        "workers_of_an_idle_engine_say_nothing",
        "engine/kvstow/attach/worker.py",
        "            return self._settle()\n",
        "            return IDLE_SECONDS\n",
        "tests/service/node/test_attachedworker.py::"
        "test_a_worker_says_by_itself_that_its_copies_have_ended_when_its_engine_takes_no_step",
    ),
    Mutant(
        "a_worker_says_that_its_copies_have_ended_while_some_are_under_way",
        "engine/kvstow/attach/worker.py",
        "        if not self._gate.is_quiet():\n            return DETACHED_SECONDS\n",
        "",
        "tests/service/node/test_attachedworker.py::"
        "test_a_worker_says_by_itself_that_its_copies_have_ended_when_its_engine_takes_no_step",
    ),
    Mutant(
        "ops_of_every_session_are_let_through",
        "engine/kvstow/attach/opgate.py",
        "if number_of(op.op_id) == self._number]",
        "if op is not None]",
        "tests/service/node/test_attachedworker.py",
    ),
    Mutant(
        "memory_of_other_users_is_taken",
        MEMFD,
        "    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != MODE:\n",
        "    if found.st_uid != os.geteuid():\n",
        "tests/engine/test_memfd.py",
    ),
    Mutant(
        "memory_without_its_seals_is_taken",
        MEMFD,
        "    if seals & SEALS != SEALS or",
        "    if",
        "tests/engine/test_memfd.py",
    ),
    Mutant(
        "another_memfd_of_that_name_is_taken",
        MEMFD,
        "    if identity is not None and identify_memfd(fd) != identity:\n",
        "    if identity is None and num_bytes < 0:\n",
        "tests/engine/test_memfd.py",
    ),
    Mutant(
        "kills_the_service_itself",
        "engine/kvstow/attach/peer.py",
        "        if pid in (0, os.getpid()):\n",
        "        if pid == 0:\n",
        "tests/engine/attach/test_peer.py::test_this_process_is_not_killed_whoever_names_it",
    ),
    Mutant(
        "kills_processes_of_other_users",
        "engine/kvstow/attach/peer.py",
        "        return found == self.uid and pid_of",
        "        return found is not None and pid_of",
        "tests/engine/attach/test_peer.py::test_a_process_of_another_user_is_not_killed",
    ),
    Mutant(
        "a_process_number_given_to_another_process_is_believed",
        "engine/kvstow/attach/peer.py",
        "    if poll.poll(0):\n",
        "    if poll.poll(0) is None:\n",
        "tests/engine/attach/test_peer.py::test_a_number_that_was_given_to_another_process_is_not_believed",
    ),
    # -- the journal -----------------------------------------------------------------------------------------
    Mutant(
        "a_record_counts_in_any_slot",
        "engine/kvstow/control/indexjournal.py",
        "salt ^ (rows.astype(np.uint64) * _FACTORS[0])",
        "salt ^ (0 * rows.astype(np.uint64) * _FACTORS[0])",
        f"{CONTROL}/test_indexjournal.py::test_a_record_counts_in_its_own_slot_of_its_own_journal_only",
    ),
    Mutant(
        "a_record_counts_in_any_journal",
        "engine/kvstow/control/indexjournal.py",
        "salt ^ (rows.astype(np.uint64) * _FACTORS[0])",
        "(rows.astype(np.uint64) * _FACTORS[0])",
        f"{CONTROL}/test_indexjournal.py::test_a_record_counts_in_its_own_slot_of_its_own_journal_only",
    ),
    Mutant(
        "slots_are_published_that_were_not_begun",
        "engine/kvstow/control/indexjournal.py",
        "        if (present[:, COMMIT] != 0).any() or not is_filling(present).all():\n",
        "        if not len(present):\n",
        f"{CONTROL}/test_indexjournal.py",
    ),
    Mutant(
        "each_new_namespace_labels_all",
        "engine/kvstow/control/sharedpool.py",
        "self.journal.name_namespaces((one.tag, self.namespace_label(one.name)) for one in named)",
        "self.journal.name_namespaces([(one.tag, self.namespace_label(one.name)) for one in named])",
        f"{CONTROL}/test_slotjournal.py::test_a_new_namespace_costs_no_labels_for_which_the_journal_has_no_room",
    ),
    Mutant(
        "a_link_of_another_user_leads_to_the_socket",
        "service/kvstow_service/admin/sockets.py",
        "found, link = folder.stat(), folder.lstat()",
        "found = link = folder.stat()",
        "tests/service/node/attach/test_attachsocket.py::test_a_link_of_another_user_is_refused",
    ),
    Mutant(
        "a_group_replaces_the_socket",
        "service/kvstow_service/admin/sockets.py",
        "(stat.S_IWGRP | stat.S_IWOTH)",
        "stat.S_IWOTH",
        "tests/service/node/attach/test_attachsocket.py"
        "::test_a_folder_in_which_a_group_may_replace_the_socket_is_refused",
    ),
    # -- users beside each other -----------------------------------------------------------------------------
    Mutant(
        "many_pools_get_a_user_more_memory",
        "engine/kvstow/memory/budget.py",
        "demands.setdefault(pool.layout.owner, {})[name] = demand",
        "demands.setdefault(len(demands), {})[name] = demand",
        f"{FAIRNESS}::test_many_pools_of_one_owner_take_nothing_of_another_ones_share",
    ),
    Mutant(
        "who_keeps_memory_gets_more",
        "engine/kvstow/memory/budget.py",
        "            wanted[owner] = min(wanted[owner], max(0, most - num_bytes))\n",
        "",
        f"{FAIRNESS}::test_who_keeps_what_it_has_given_back_comes_to_keep_half_at_most",
    ),
    Mutant(
        "what_an_owner_keeps_costs_all_alike",
        "engine/kvstow/memory/budget.py",
        "fair_shares(self.total_bytes, wanted, kept)",
        "fair_shares(self.total_bytes - kept.total(), wanted)",
        f"{FAIRNESS}::test_what_an_owner_keeps_is_a_part_of_its_own_share",
    ),
    Mutant(
        "shares_below_what_is_kept_are_not_divided_again",
        "engine/kvstow/memory/rows.py",
        "if most is None or kept[most] <= shares[most]:",
        "if True:",
        f"{FAIRNESS}::test_shares_are_max_min_fair",
    ),
    Mutant(
        "lost_sessions_of_one_user_keep_all_out",
        "service/kvstow_service/node/attach/sessionlife.py",
        "if awaited[peer.uid] >= self._most_awaited(peer.uid, awaited):",
        "if awaited.total() >= self._most_awaited(peer.uid, awaited):",
        "tests/service/node/attach/test_sessionlife.py"
        "::test_too_many_processes_of_lost_sessions_keep_new_ones_of_their_user_out",
    ),
    Mutant(
        "one_user_has_all_connections",
        "service/kvstow_service/node/attach/clients.py",
        "return counts[uid] < self._most(uid, counts)",
        "return counts[uid] < self.limit",
        "tests/service/node/attach/test_attachserver.py::test_one_user_leaves_places_for_others",
    ),
    Mutant(
        "leases_of_one_user_take_all",
        "engine/kvstow/control/session.py",
        "self.holding is None or self.holding.may_grow",
        "True",
        "tests/service/node/test_fairleases.py::test_a_user_s_leases_in_all_pools_hold_half_of_what_others_leave",
    ),
    Mutant(
        "leases_of_lost_sessions_count_nothing",
        "engine/kvstow/control/attachedsession.py",
        "            self.holding.note(slots + SLOTS_OF_LEASE * count)",
        "            self.holding.note(0)",
        "tests/service/node/test_fairleases.py::test_a_user_s_leases_in_all_pools_hold_half_of_what_others_leave",
    ),
    Mutant(
        "who_detaches_is_believed",
        "service/kvstow_service/node/pools/memorythread.py",
        "            self.budget.record_departure(client)\n",
        "            self.budget.record_death(client)\n",
        "tests/service/node/pools/test_recalledmemory.py"
        "::test_memory_that_an_engine_keeps_after_it_has_detached_names_its_session",
    ),
    Mutant(
        "any_number_of_detached_processes_is_watched",
        "service/kvstow_service/node/pools/memorythread.py",
        "or peer.has_ended() or too_many:",
        "or peer.has_ended():",
        "tests/service/node/pools/test_recalledmemory.py"
        "::test_of_the_processes_that_have_detached_only_so_many_of_a_user_are_watched",
    ),
    Mutant(
        "nobody_is_named_who_uses_recalled_slots",
        "service/kvstow_service/node/pools/poolmemory.py",
        "if one.is_engine and one.uses_slots_from(low)}",
        "if False}",
        "tests/service/node/pools/test_recalledmemory.py"
        "::test_who_uses_slots_of_recalled_memory_and_says_nothing_is_shown",
    ),
    # -- the store below the pools ---------------------------------------------------------------------------
    Mutant(
        "blocks_that_did_not_arrive_are_visible",
        OPS,
        "pool.publish(entry.namespace, sorted(good), fetched=True) if good else ()",
        "pool.publish(entry.namespace, sorted(slots), fetched=True)",
        f"{POOL_TIER_TESTS}::test_a_block_that_does_not_arrive_is_a_miss_and_costs_no_slot",
    ),
    Mutant(
        "writes_hold_nothing",
        POOL_TIER,
        "            pool.index.hold([slot for _, slot in found])\n",
        "",
        f"{POOL_TIER_TESTS}::test_a_slot_that_is_being_written_is_not_reused",
    ),
    Mutant(
        "what_was_read_enters_as_stored",
        OPS,
        "sorted(good), fetched=True) if good else ()",
        "sorted(good)) if good else ()",
        f"{POOL_TIER_TESTS}::test_the_request_that_fetched_is_no_use_and_the_next_hit_is",
    ),
    Mutant(
        "the_request_that_fetched_is_a_use",
        "engine/kvstow/control/chains.py",
        "            if before.fetch == _UNUSED:\n",
        "            if False:\n",
        f"{POOL_TIER_TESTS}::test_the_request_that_fetched_is_no_use_and_the_next_hit_is",
    ),
    Mutant(
        "what_arrives_is_leased_to_nobody",
        POOL_TIER,
        "        if slots and not wait.is_over:\n",
        "        if slots and wait.is_over:\n",
        f"{POOL_TIER_TESTS}::test_what_arrives_is_leased_to_its_request_in_the_moment_in_which_it_becomes_visible",
    ),
    Mutant(
        "writes_keep_any_number_of_slots",
        POOL_TIER,
        "                del found[room:]\n",
        "                pass\n",
        f"{POOL_TIER_TESTS}::test_writes_keep_at_most_a_twentieth_of_the_pool_and_the_rest_follows",
    ),
    Mutant(
        "what_could_not_be_written_is_never_tried_again",
        POOL_TIER,
        "        yield from self._offer(of, keys, is_use=True)\n",
        "        yield from ()\n",
        f"{POOL_TIER_TESTS}::test_what_could_not_be_written_is_written_at_its_next_use",
    ),
    Mutant(
        "reads_go_on_however_many_slots_are_stuck",
        POOL_TIER,
        "            if session.ops.stuck_tier_slots > STUCK_SHARE * pool.slots.limit:\n",
        "            if session.ops.stuck_tier_slots > pool.slots.limit:\n",
        f"{POOL_TIER_TESTS}::test_a_read_that_hangs_keeps_its_slots_and_stops_reads_when_it_has_a_hundredth_of_the_pool",
    ),
    Mutant(
        "requests_wait_for_reads_as_long_as_it_takes",
        POOL_TIER,
        "(UNKNOWN_SECONDS if compute is None else compute)",
        "(UNKNOWN_SECONDS if compute is None else 1e9)",
        f"{POOL_TIER_TESTS}::test_a_request_waits_no_longer_than_computing_takes_and_uses_what_has_arrived",
    ),
    Mutant(
        "reads_go_on_for_which_nobody_waits",
        POOL_TIER,
        "            self.stored_pool.cancel(op_id)\n",
        "            pass\n",
        f"{POOL_TIER_TESTS}::test_a_request_waits_no_longer_than_computing_takes_and_uses_what_has_arrived",
    ),
    Mutant(
        "blocks_are_read_into_namespaces_that_nobody_finds",
        POOL_TIER,
        " or namespace.is_dropped or ",
        " or ",
        f"{POOL_TIER_TESTS}::test_nothing_is_read_into_a_namespace_that_nobody_finds",
    ),
    Mutant(
        "prefetches_take_the_store_from_requests",
        POOL_TIER,
        " or self.is_closed or self.stored_pool.expect(1).queued_bytes:",
        " or self.is_closed:",
        f"{POOL_TIER_TESTS}::test_nothing_is_prefetched_while_anything_is_queued",
    ),
    Mutant(
        "contexts_that_never_came_back_are_prefetched",
        POOL_TIER,
        "if found is None or found.requests < 2 or",
        "if found is None or",
        f"{POOL_TIER_TESTS}::test_a_context_is_prefetched_shortly_before_it_is_expected_if_it_has_come_back_before",
    ),
    Mutant(
        "purged_blocks_come_back_by_the_store",
        POOL_TIER,
        " and not self._num_purges",
        "",
        f"{POOL_TIER_TESTS}::test_while_blocks_are_purged_none_goes_from_the_pool_to_the_store_or_back",
    ),
    Mutant(
        "purges_do_not_wait_for_the_store",
        "engine/kvstow/control/administration.py",
        "        while not done:\n            sweep.waiting = True\n",
        "        while False:\n            sweep.waiting = True\n",
        f"{POOL_TIER_TESTS}::test_an_operator_s_purge_covers_the_store_and_waits_until_it_cannot_come_back",
    ),
    Mutant(
        "former_weights_name_those_after_a_reset",
        NODE_STORE,
        "        if namespace.is_reset:\n",
        "        if namespace.is_reset and not weights.weights_id:\n",
        "tests/service/node/test_nodestore.py::test_after_a_reset_nothing_is_written_or_read_and_the_former_blocks_are_gone",
    ),
    Mutant(
        "a_reset_leaves_blocks_in_the_store",
        "service/kvstow_service/node/nodehost.py",
        "        self.tier.forget_reset(before, answer)\n",
        "        answer(Purged(0))\n",
        "tests/service/node/test_nodestore.py::test_after_a_reset_nothing_is_written_or_read_and_the_former_blocks_are_gone",
    ),
    Mutant(
        "a_deleted_pool_leaves_blocks_in_the_store",
        NODE_STORE,
        "                former.purge(PurgeWish(), on_purged)\n",
        "                on_purged(Purged(0))\n",
        "tests/service/node/test_nodestore.py::test_a_pool_that_an_operator_deletes_leaves_no_block_in_the_store",
    ),
    Mutant(
        "users_of_no_tenant_use_the_store",
        NODE_STORE,
        "self._tenant_of(_uid_of(pool)))",
        'self._tenant_of(_uid_of(pool)) or "")',
        "tests/service/node/test_nodestore.py::test_where_tenants_are_named_nobody_else_uses_the_store",
    ),
    Mutant(
        "every_rank_writes_replicated_blocks",
        NODE_STORE,
        "for rank in pool.config.storing_ranks)",
        "for rank in range(pool.config.num_ranks))",
        "tests/service/node/test_nodestore.py::test_blocks_that_are_the_same_on_all_ranks_are_stored_once",
    ),
    Mutant(
        "rank_0_puts_first",
        MOONCAKE_BLOCKS,
        'ranks = (*range(1, last), 0) if kind == "put" else range(last)',
        "ranks = range(last)",
        "tests/service/stores/mooncake/test_mooncakeblocks.py::test_rank_0_puts_its_object_when_the_others_have_put_theirs",
    ),
    Mutant(
        "short_ranks_do_not_count",
        MOONCAKE_BLOCKS,
        "                    left = self._move_rank(kind, job, rank, left, bad)\n",
        "                    self._move_rank(kind, job, rank, left, {})\n",
        "tests/service/stores/mooncake/test_mooncakeblocks.py::test_a_block_is_there_only_if_every_rank_has_its_object",
    ),
    Mutant(
        "a_full_store_is_asked_again_at_once",
        MOONCAKE_BLOCKS,
        "or not store.is_working or store.is_full:",
        "or not store.is_working:",
        "tests/service/stores/mooncake/test_mooncakeblocks.py::test_a_full_store_gets_nothing_for_a_while",
    ),
    Mutant(
        "a_store_that_does_not_answer_is_asked_on",
        MOONCAKE_BLOCKS,
        "return self._breaker.is_closed and not self.is_closed",
        "return not self.is_closed",
        "tests/service/stores/mooncake/test_mooncakeblocks.py::test_a_store_that_does_not_answer_is_left_alone_until_a_probe_succeeds",
    ),
    Mutant(
        "tenants_share_a_fleet_tier",
        "engine/kvstow/tier/fingerprint.py",
        '        "tenant": tenant,\n',
        "",
        "tests/engine/tier/test_fingerprint.py::test_each_tenant_has_fingerprints_of_its_own",
    ),
    Mutant(
        "changed_bytes_of_an_object_are_loaded",
        HEADER,
        '    return None if checksum == xxhash.xxh3_64_intdigest(slot) else "checksum"\n',
        "    return None\n",
        "tests/service/stores/mooncake/test_objectheader.py",
    ),
    Mutant(
        "an_object_of_another_name_is_loaded",
        HEADER,
        "    if of_name != _digest(name):\n",
        "    if of_name is None:\n",
        "tests/service/stores/mooncake/test_objectheader.py",
    ),
    Mutant(
        "an_object_of_other_weights_is_loaded",
        HEADER,
        "    if of_fingerprint != _digest_again(fingerprint):\n",
        "    if of_fingerprint is None:\n",
        "tests/service/stores/mooncake/test_objectheader.py",
    ),
    Mutant(
        "a_small_object_is_taken_without_a_look_at_its_header",
        "service/kvstow_service/stores/mooncake/objectbuffers.py",
        "        mismatch = find_mismatch(header, part.name.fingerprint, str(part.name), staged)\n",
        "        mismatch = None\n",
        "tests/service/stores/mooncake/test_objectbuffers.py::test_an_object_with_other_bytes_is_refused",
    ),
    Mutant(
        "a_large_object_is_taken_without_a_look_at_its_header",
        "service/kvstow_service/stores/mooncake/objectbuffers.py",
        "            return find_mismatch(header, part.name.fingerprint, str(part.name), slot)\n",
        "            return None\n",
        "tests/service/stores/mooncake/test_objectbuffers.py::test_an_object_with_other_bytes_is_refused",
    ),
    Mutant(
        "a_call_ends_before_its_process",
        "service/kvstow_service/stores/mooncake/childchannel.py",
        "        child.kill()\n        problem = f",
        "        threading.Thread(target=child.kill).start()\n        problem = f",
        "tests/service/stores/mooncake/test_childchannel.py"
        "::test_a_call_that_takes_too_long_ends_only_when_its_process_is_gone",
    ),
    Mutant(
        "nobody_waits_for_a_process_that_was_killed",
        "service/kvstow_service/stores/childprocess.py",
        "        self._process.kill()\n        self._process.wait()\n",
        "        self._process.kill()\n",
        "tests/service/stores/mooncake/test_childprocess.py::test_a_process_that_was_killed_is_gone",
    ),
    Mutant(
        "the_removal_of_memory_is_not_answered_after_the_end",
        "service/kvstow_service/stores/mooncake/childchannel.py",
        "self._ranges.pop(range_id, None)",
        "self._ranges.pop(range_id)",
        "tests/service/stores/mooncake/test_childchannel.py::test_memory_is_gone_once_the_channel_was_closed",
    ),
    Mutant(
        "more_objects_are_placed_than_there_is_room_for",
        "service/kvstow_service/stores/mooncake/objectbuffers.py",
        "        if len(objects) > self._num_objects:\n",
        "        if False:\n",
        "tests/service/stores/mooncake/test_objectbuffers.py::test_more_objects_than_there_is_room_for_are_refused",
    ),
    Mutant(
        "addresses_outside_of_the_memory_are_taken",
        "service/kvstow_service/stores/mooncake/objectbuffers.py",
        "        if part.offset < 0 or part.num_bytes < 1 or part.offset + part.num_bytes > found.num_bytes:\n",
        "        if part.num_bytes < 1:\n",
        "tests/service/stores/mooncake/test_childmemory.py::test_an_address_outside_of_what_is_registered_is_refused",
    ),
    # -- the admin API ---------------------------------------------------------------------------------------
    Mutant(
        "an_agent_may_change_everything",
        AUTH,
        '    if actor == "agent" and not is_report(scope["path"]):\n',
        '    if actor == "agent" and False:\n',
        "tests/api/test_auth.py::test_the_agent_token_allows_only_the_report",
    ),
    Mutant(
        "a_viewer_may_change_everything",
        AUTH,
        '    if actor == "viewer" and not reading:\n',
        '    if actor == "viewer" and False:\n',
        "tests/api/test_auth.py::test_a_viewer_token_does_not_allow_changes",
    ),
    Mutant(
        "a_password_allows_changes",
        AUTH,
        '        case b"basic" if reading:\n',
        '        case b"basic":\n',
        "tests/api/test_auth.py::test_a_password_does_not_allow_changes",
    ),
    Mutant(
        "the_first_of_two_credentials_counts",
        AUTH,
        "if len(values) == 1 else",
        "if values else",
        "tests/api/test_auth.py::test_two_authorization_headers_are_refused",
    ),
    Mutant(
        "reports_need_no_token",
        AUTH,
        '        if caller is not None and caller != self._nobody and not is_report(scope["path"]):\n',
        "        if caller is not None and caller != self._nobody:\n",
        "tests/api/test_auth.py::test_a_report_needs_a_credential_where_changes_need_none",
    ),
    Mutant(
        "changes_over_tcp_need_nothing",
        AUTH,
        "        return None if token is None else known.kind_of(token)\n",
        '        return "anonymous" if token is None and not known.guard_changes else known.kind_of(token or b"")\n',
        "tests/api/test_auth.py::test_over_tcp_a_server_without_a_credential_only_reads",
    ),
    Mutant(
        "the_overflow_uid_makes_changes",
        AUTH,
        '        if caller is not None and caller != self._nobody and not is_report(scope["path"]):\n',
        '        if caller is not None and not is_report(scope["path"]):\n',
        "tests/api/test_auth.py::test_the_overflow_uid_is_nobodys",
    ),
    Mutant(
        "a_log_that_nobody_reads_stops_threads",
        "service/kvstow_service/process/logwriter.py",
        "            self.queue.put(record)\n        except",
        "            self._write(record)\n        except",
        "tests/service/node/test_serve_process.py::test_a_log_that_nobody_reads_stops_nothing",
    ),
    Mutant(
        "a_session_may_hold_any_number_of_leases",
        "engine/kvstow/control/session.py",
        'return "too_many_leases" if num_held >= MOST_HELD or slots',
        'return "too_many_leases" if slots',
        f"{CONTROL}/test_sessions.py::test_a_session_that_holds_too_many_leases_and_loads_finds_nothing_more",
    ),
    Mutant(
        "loads_that_never_end_are_not_counted",
        "engine/kvstow/control/ops.py",
        "        self.held_slots += len(held)\n",
        "",
        f"{CONTROL}/test_sessions.py::test_the_slots_of_a_sessions_leases_and_loads_are_bounded",
    ),
    Mutant(
        "descriptors_wait_without_a_bound",
        "engine/kvstow/attach/channel.py",
        "            if self._unsent_fds + len(fds) > MAX_UNSENT_FDS:\n",
        "            if self._unsent_fds < 0:\n",
        "tests/engine/attach/test_channel.py::test_a_reader_that_does_not_read_does_not_take_all_descriptors",
    ),
    Mutant(
        "a_browser_is_asked_for_no_password",
        AUTH,
        "    if reading:\n        answer.headers.append(",
        "    if False:\n        answer.headers.append(",
        "tests/api/test_auth.py::test_each_challenge_has_a_line_of_its_own_and_basic_is_first",
    ),
    Mutant(
        "a_body_comes_before_the_method",
        ADMISSION,
        "            if (refusal := method_not_allowed(scope)) is not None:\n",
        "            if (refusal := None) is not None:\n",
        "tests/api/test_admission.py::test_a_method_that_is_not_allowed_comes_before_a_body_that_is_not",
    ),
    Mutant(
        "no_descriptor_is_taken_for_an_ended_process",
        "engine/kvstow/attach/peer.py",
        "_NO_DESCRIPTOR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})",
        "_NO_DESCRIPTOR_ERRNOS = frozenset[int]()",
        "tests/engine/attach/test_peer.py::test_a_service_without_descriptors_says_so",
    ),
    Mutant(
        "bad_utf8_of_a_peer_is_an_error_of_pythons",
        "engine/kvstow/attach/wire.py",
        "InvalidRequestError, ValueError, RecursionError)",
        "InvalidRequestError, RecursionError)",
        "tests/engine/attach/test_messages.py::test_text_that_is_no_utf8_is_malformed",
    ),
    Mutant(
        "what_the_types_of_a_message_cannot_exclude_is_not_checked",
        "engine/kvstow/attach/wire.py",
        "        message.check()\n",
        "",
        "tests/engine/attach/test_messages.py::test_values_out_of_range_are_malformed",
    ),
    Mutant(
        "text_of_clients_is_not_checked",
        "engine/kvstow/plaintext.py",
        " and value.isprintable()\n",
        "\n",
        "tests/engine/attach/test_messages.py::test_a_name_that_cannot_be_shown_in_a_line_is_refused",
    ),
    Mutant(
        "the_overflow_uid_attaches",
        "engine/kvstow/attach/peer.py",
        "    if uid == overflow_uid():\n",
        "    if uid == -1:\n",
        "tests/engine/attach/test_peer.py::test_a_user_whom_the_kernel_cannot_name_is_refused",
    ),
    Mutant(
        "a_forwarded_port_leads_to_the_local_socket",
        "service/kvstow_service/cli/localserver.py",
        "                if local.call(routes.get_info).engine_id == info.engine_id:\n",
        "                if local.call(routes.get_info).engine_id:\n",
        "tests/service/cli/test_connection.py::test_the_socket_of_another_server_is_not_used",
    ),
    Mutant(
        "any_listener_names_the_socket",
        "service/kvstow_service/cli/localserver.py",
        "        return {path.stat().st_uid} == _listeners(port) and",
        "        return bool(path.stat()) and",
        "tests/service/cli/test_connection.py::test_the_socket_of_another_user_is_not_used",
    ),
    Mutant(
        "pages_of_other_sites_make_changes",
        AUTH,
        "        if _is_cross_site(scope) and not (reading and _is_navigation(scope)):\n",
        "        if _is_cross_site(scope) and reading and not _is_navigation(scope):\n",
        "tests/api/test_auth.py::test_requests_marked_as_cross_site_are_refused",
    ),
    Mutant(
        "any_host_name_is_accepted",
        ADMISSION,
        "        if self._allowed is None or not _is_tcp(scope):\n",
        "        if self._allowed is not None or not _is_tcp(scope):\n",
        "tests/api/test_admission.py::test_an_unknown_name_that_resolves_to_loopback_is_refused",
    ),
    Mutant(
        "bodies_convert_types",
        "api/kvstow_api/bodies.py",
        "ConfigDict(strict=True, ",
        "ConfigDict(strict=False, ",
        "tests/api/test_strictness.py"
        "::test_a_field_or_parameter_is_refused_by_its_name_if_the_description_does_not_allow_it",
    ),
    Mutant(
        "bodies_may_have_unknown_fields",
        "api/kvstow_api/bodies.py",
        'extra="forbid", ',
        'extra="ignore", ',
        "tests/api/test_strictness.py"
        "::test_a_field_or_parameter_is_refused_by_its_name_if_the_description_does_not_allow_it",
    ),
    Mutant(
        "bodies_of_any_size_are_read",
        "api/kvstow_api/middleware.py",
        "    if declared.isdigit() and int(declared) > limit:\n",
        "    if False:\n",
        "tests/api/test_body.py::test_a_body_declared_too_large_is_not_read",
    ),
    # -- what a key means --------------------------------------------------------------------------------------
    Mutant(
        "a_block_of_an_unknown_hash_is_the_models",
        f"{ENGINE_CORE}/gpublocks.py",
        "return [self._mix(each) if each in known else None for each in hashes]",
        "return [self._mix(each) if each in known else each for each in hashes]",
        f"{ADAPTERS}::test_a_block_of_an_unknown_hash_is_not_stored",
    ),
    Mutant(
        "a_comparison_before_a_step_counts_for_it",
        f"{ENGINE_CORE}/schedulerside.py",
        "            self._adapters.move_on()\n        self._loads.take_begun(wait=True)",
        "            pass\n        self._loads.take_begun(wait=True)",
        f"{ADAPTERS}::test_what_was_computed_after_a_change_is_not_stored",
    ),
    Mutant(
        "changed_adapters_keep_their_keys",
        f"{ENGINE_CORE}/trackedrequests.py",
        "return self.adapter is None or self.adapter.is_named",
        "return True",
        f"{ADAPTERS}::test_nothing_is_stored_or_found_once_the_files_have_changed",
    ),
    Mutant(
        "requests_do_not_wait_for_the_digest",
        f"{ENGINE_CORE}/schedulerside.py",
        "            if self._adapters.must_wait(tracked.adapter):\n                return None\n",
        "",
        f"{ADAPTERS}::test_a_request_waits_for_the_digest_and_then_for_no_more",
    ),
    Mutant(
        "events_announce_keys_instead_of_hashes",
        f"{ENGINE_CORE}/kvevents.py",
        "            if block_hash:\n                self._hashes[key] = block_hash\n            else:\n",
        "            if True:\n",
        "tests/service/connectors/engine_core/test_adapterevents.py",
    ),
    Mutant(
        "descriptions_outlive_their_blocks",
        "engine/kvstow/control/pool.py",
        "            self.events.descriptions.drop(namespace.tag, keys)\n",
        "",
        DESCRIPTIONS,
    ),
    Mutant(
        "stores_of_others_are_described",
        "engine/kvstow/control/attachedsession.py",
        '            if entry is None or entry.op.direction != "store" or entry.abandoned:\n',
        "            if entry is None:\n",
        DESCRIPTIONS,
    ),
    Mutant(
        "descriptions_are_not_bounded",
        "engine/kvstow/control/descriptions.py",
        "        self._num_bytes += _sum_of(described.values())\n        self._forget_oldest()\n",
        "        self._num_bytes += _sum_of(described.values())\n",
        DESCRIPTIONS,
    ),
    Mutant(
        "sessions_are_told_what_they_have_said",
        "engine/kvstow/control/descriptions.py",
        " and block[0] != reader]",
        "]",
        DESCRIPTIONS,
    ),
    Mutant(
        "tokens_show_in_text",
        "engine/kvstow/descriptions.py",
        '    def __repr__(self) -> str:\n        return f"BlockDescription(',
        '    def _repr(self) -> str:\n        return f"BlockDescription(',
        DESCRIPTIONS,
    ),
    Mutant(
        "bad_descriptions_are_taken",
        "engine/kvstow/attach/calls.py",
        "        if most > MOST_DESCRIPTION or any(",
        "        if most < 0 and any(",
        "tests/engine/attach/test_messages.py::test_a_bad_description_is_refused_without_a_word_of_it",
    ),
    Mutant(
        "columns_of_other_lengths_are_taken",
        "engine/kvstow/attach/calls.py",
        "        if len(self.numbers) != count or any(",
        "        if count < 0 or any(() and ",
        "tests/engine/attach/test_messages.py::test_columns_of_other_lengths_are_refused",
    ),
    Mutant(
        "messages_show_what_blocks_hold",
        "engine/kvstow/attach/calls.py",
        '    def __repr__(self) -> str:\n        return f"DescribeStore(',
        '    def _repr(self) -> str:\n        return f"DescribeStore(',
        "tests/engine/attach/test_messages.py::test_columns_are_made_of_descriptions_and_back",
    ),
    Mutant(
        "descriptions_that_cannot_be_sent_are_sent",
        "engine/kvstow/attach/calls.py",
        "        if _fits(columns):\n",
        "        if columns:\n",
        "tests/engine/attach/test_messages.py::test_descriptions_are_sent_in_messages_that_fit",
    ),
    Mutant(
        "pages_with_descriptions_have_no_end",
        "service/kvstow_service/node/pools/nodesession.py",
        " or num_bytes >= _DESCRIPTIONS_PER_PAGE",
        "",
        "tests/service/node/test_readevents.py",
    ),
    Mutant(
        "blocks_without_tokens_are_announced",
        f"{ENGINE_CORE}/kvevents.py",
        "            if block is None or key in announced:\n                continue\n",
        "            if key in announced:\n                continue\n"
        '            block = block or BlockDescription(b"")\n',
        EVENT_FEED,
    ),
    Mutant(
        "a_block_is_announced_that_only_seemed_to_be_there",
        f"{ENGINE_CORE}/kvevents.py",
        "        return [*self._remove(gone), *self._announce([key for key in keys if key in present], {})]\n",
        "        return [*self._remove(gone), *self._announce(keys, {})]\n",
        EVENT_FEED,
    ),
    Mutant(
        "lookups_are_believed_after_newer_news",
        f"{ENGINE_CORE}/kvevents.py",
        "        if self._checked is None:  # newer news come later\n            source.ask_news()\n",
        "        source.ask_news()\n        if self._checked is None:\n",
        "tests/service/connectors/vllm/test_attachedblocks.py::test_a_block_that_was_found_and_removed_before_the_answer_came_does_not_stay",
    ),
    Mutant(
        "engines_rest_before_they_have_announced",
        f"{ENGINE_CORE}/kvevents.py",
        "        return bool(self._uses or is_checking) or self._source.is_behind\n",
        "        return self._source.is_behind\n",
        "tests/service/connectors/vllm/test_attachedblocks.py::test_what_nobody_has_described_is_told_when_a_request_has_loaded_it",
    ),
    Mutant(
        "stores_of_running_requests_are_not_described",
        f"{ENGINE_CORE}/kvevents.py",
        "        self.known.follow_all(accepted)\n",
        "",
        EVENT_FEED,
    ),
    Mutant(
        "blocks_that_the_pool_has_are_not_announced",
        f"{ENGINE_CORE}/kvevents.py",
        "            self.found([key for index, key in enumerate(keys) if index not in others])\n",
        "            pass\n",
        DESCRIBED_STORES,
    ),
    Mutant(
        "blocks_that_are_loaded_are_not_announced",
        f"{ENGINE_CORE}/schedulerside.py",
        "                self.events.used(tracked, tracked.load.start, tracked.load.start + load_tokens)\n",
        "                pass\n",
        DESCRIBED_STORES,
    ),
    Mutant(
        "lazy_stores_do_not_announce_what_they_find",
        f"{ENGINE_CORE}/stores.py",
        "            self._events.found([key for key, is_there in zip(found.keys, there, strict=True) if is_there])\n",
        "            pass\n",
        DESCRIBED_STORES,
    ),
    Mutant(
        "lazy_stores_are_not_described",
        f"{ENGINE_CORE}/stores.py",
        "            self._events.known.keep(tracked)\n",
        "            pass\n",
        DESCRIBED_STORES,
    ),
    Mutant(
        "the_backlog_is_not_described",
        f"{ENGINE_CORE}/stores.py",
        "        if self._events is not None:\n            self._events.known.follow(tracked)\n        for group",
        "        for group",
        DESCRIBED_STORES,
    ),
    Mutant(
        "other_engines_learn_no_tokens",
        f"{ENGINE_CORE}/stores.py",
        "                    self._control.describe_store(grant.op, described)\n",
        "                    pass\n",
        "tests/service/connectors/vllm/test_routerindex.py",
    ),
    Mutant(
        "known_blocks_are_not_bounded",
        f"{ENGINE_CORE}/knownblocks.py",
        "        if len(known) > self._most:\n",
        "        if not known:\n",
        EVENT_FEED,
    ),
    Mutant(
        "extra_keys_that_cannot_be_packed_end_offload",
        f"{ENGINE_CORE}/knownblocks.py",
        "        except (TypeError, ValueError, OverflowError):",
        "        except OverflowError:",
        EVENT_FEED,
    ),
    Mutant(
        "blocks_are_described_by_an_earlier_prompt",
        f"{ENGINE_CORE}/trackedrequests.py",
        "                self.known_hashes = self.described_tokens = 0\n",
        "                self.known_hashes = 0\n",
        EVENT_FEED,
    ),
    Mutant(
        "executors_do_not_notice_what_changes_weights",
        f"{VLLM}/weightwatch.py",
        "                watch_of(executor.vllm_config).asks(",
        "                0 and watch_of(executor.vllm_config).asks(",
        f"{WATCH}::test_an_executor_notices_before_it_sends",
    ),
    Mutant(
        "functions_change_no_weights",
        f"{VLLM}/weightwatch.py",
        '                self._change(f"the function',
        '                str(f"the function',
        f"{WATCH}::test_an_executor_notices_before_it_sends",
    ),
    Mutant(
        "a_deep_sleep_loses_no_weights",
        f"{VLLM}/weightwatch.py",
        "            if level not in (0, 1):",
        "            if level not in (0, 1, 2):",
        f"{WATCH}::test_sleep_and_discard_count_if_weights_are_lost",
    ),
    Mutant(
        "ranks_do_not_notice_what_changes_weights",
        f"{VLLM}/weightwatch.py",
        "        if self.noticed > self.asked:",
        "        if self.noticed > self.asked + 1:",
        f"{WATCH}::test_a_rank_notices_what_nobody_here_has_asked_for",
    ),
    Mutant(
        "a_call_is_heard_twice",
        f"{VLLM}/weightwatch.py",
        "        if self.noticed > self.asked:",
        "        if self.noticed:",
        f"{WATCH}::test_a_call_that_was_noticed_when_it_was_sent_is_heard_once",
    ),
    Mutant(
        "weights_that_are_loaded_again_are_the_same",
        f"{VLLM}/weightwatch.py",
        'if name == "load_model" and watch.loaded is None:',
        'if name == "load_model":',
        f"{WATCH}::test_loading_is_compared_before_and_after",
    ),
    Mutant(
        "a_rank_stores_what_changed_weights_have_computed",
        f"{ENGINE_CORE}/workerside.py",
        "        if step.stores.ops and self.stores_fail_because is not None:",
        "        if step.stores.ops and not self.rank + 1:",
        "tests/service/connectors/engine_core/test_workerside.py"
        "::test_stores_fail_while_the_rank_knows_more_of_its_weights_than_the_scheduler",
    ),
    Mutant(
        "loads_that_nobody_needs_fail_with_the_stores",
        f"{ENGINE_CORE}/workerside.py",
        '        stores = [op for op in step.stores.ops if op.direction == "store"]',
        "        stores = [*step.stores.ops]",
        "tests/service/connectors/engine_core/test_workerside.py"
        "::test_loads_that_nobody_needs_do_not_fail_with_the_stores",
    ),
    Mutant(
        "a_change_of_weights_takes_a_promised_load_away",
        f"{ENGINE_CORE}/schedulerhost.py",
        "        if self._unheard and not admits:",
        "        if self._unheard:",
        "tests/vllm/test_schedulerhost.py::test_a_change_on_another_thread_counts_at_the_next_hook",
    ),
    Mutant(
        "loads_hold_a_change_of_weights_up",
        f"{ENGINE_CORE}/schedulerside.py",
        "        if self._loads.are_under_way and not reason:",
        "        if self._loads.are_under_way:",
        "tests/service/connectors/engine_core/test_schedulerside.py::test_a_change_of_weights_waits_for_no_loads",
    ),
    Mutant(
        "resets_of_the_gpu_are_not_followed_after_a_change_of_weights",
        f"{ENGINE_CORE}/schedulerhost.py",
        "            if is_reset:\n                self._forget()\n",
        "",
        "tests/vllm/test_schedulerhost.py::test_a_reset_of_the_gpu_counts_once_weights_may_have_changed",
    ),
    Mutant(
        "what_ranks_notice_is_not_followed",
        f"{ENGINE_CORE}/schedulerhost.py",
        "            if own > self._weight_changes.get(rank, 0):",
        "            if own < self._weight_changes.get(rank, 0):",
        "tests/vllm/test_schedulerhost.py::test_a_change_that_only_a_rank_has_noticed_counts_once",
    ),
    Mutant(
        "a_change_before_the_ranks_are_known_is_forgotten",
        f"{ENGINE_CORE}/schedulerhost.py",
        "        if self._weights_changed:\n            self._forget()\n",
        "",
        "tests/vllm/test_schedulerhost.py::test_a_change_before_the_ranks_are_known_is_remembered",
    ),
    Mutant(
        "regions_differ_by_the_number_of_gpu_blocks",
        f"{VLLM}/rankdataplane.py",
        '{number} {arrangement}")',
        '{number} {arrangement} {num_blocks}")',
        "tests/service/connectors/vllm/test_kvgeometry.py"
        "::test_what_a_region_has_does_not_depend_on_the_number_of_blocks",
    ),
    Mutant(
        "settings_do_not_count",
        f"{VLLM}/valuesettings.py",
        "    for part, names in FIELDS.items():\n",
        "    for part, names in ():\n",
        f"{SHARING}::test_each_setting_makes_another_identity",
    ),
    Mutant(
        "files_do_not_count",
        f"{VLLM}/engineidentity.py",
        "        files = model_files(config, program_start())\n",
        "        files = None\n",
        f"{SHARING}::test_the_processors_files_count_where_there_is_one",
    ),
    Mutant(
        "remote_code_does_not_count",
        f"{VLLM}/valuesettings.py",
        "        return code\n",
        "        return False\n",
        f"{SHARING}::test_remote_code_counts_where_it_is_trusted",
    ),
    Mutant(
        "newer_files_are_believed",
        f"{VLLM}/valuesettings.py",
        "        if self.changed:\n",
        "        if False:\n",
        f"{SHARING}::test_files_that_are_newer_than_vllm_are_shared_with_nobody",
    ),
    Mutant(
        "what_no_rank_has_seen_is_believed",
        f"{VLLM}/engineidentity.py",
        " or _why_not_loaded(config, model, loaded)\n",
        "\n",
        f"{SHARING}::test_what_no_rank_has_seen_is_shared_with_nobody",
    ),
    Mutant(
        "what_a_rank_has_loaded_is_not_compared",
        f"{VLLM}/engineidentity.py",
        "if matters and (changed or here != there):",
        "if matters and changed:",
        f"{SHARING}::test_each_rank_must_have_loaded_the_same",
    ),
    Mutant(
        "changes_while_loading_are_not_seen",
        f"{VLLM}/engineidentity.py",
        "if matters and (changed or here != there):",
        "if matters and here != there:",
        f"{SHARING}::test_what_is_put_behind_the_path_of_the_weights_is_shared_with_nobody",
    ),
    Mutant(
        "links_to_a_model_do_not_count",
        f"{ENGINE_CORE}/pathtrail.py",
        "        stamps[place] = _stamp(found)\n",
        "        if not modes.S_ISLNK(found.st_mode):\n            stamps[place] = _stamp(found)\n",
        f"{SHARING}::test_what_was_there_while_vllm_loaded_is_shared_with_nobody",
    ),
    Mutant(
        "folders_of_a_model_do_not_count",
        f"{ENGINE_CORE}/pathtrail.py",
        "return self.changed != earlier.changed and self.written == earlier.written",
        "return False",
        f"{SHARING}::test_what_was_there_while_vllm_loaded_is_shared_with_nobody",
    ),
    Mutant(
        "a_commit_names_weights",
        f"{VLLM}/modelweights.py",
        "_digest_in_snapshot(files, snapshot), ",
        "snapshot.commit, ",
        f"{SHARING}::test_a_commit_names_no_model",
    ),
    Mutant(
        "links_in_snapshots_are_believed",
        f"{VLLM}/modelweights.py",
        ".as_posix(), blob_of(file)\n",
        ".as_posix(), file.name\n",
        f"{SHARING}::test_a_real_file_in_a_snapshot_is_known_by_its_content",
    ),
    Mutant(
        "paths_are_names",
        f"{VLLM}/modelweights.py",
        "return place.parent.resolve() / place.name if place.is_file() else place.resolve()",
        "return place",
        f"{SHARING}::test_one_folder_is_one_model_however_its_path_is_spelled",
    ),
    Mutant(
        "revisions_are_believed",
        f"{VLLM}/engineidentity.py",
        "    if weights.commit and _has_moved(load, model, weights):\n",
        "    if False:\n",
        f"{SHARING}::test_a_revision_that_has_moved_is_shared_with_nobody",
    ),
    Mutant(
        "the_usual_cache_is_believed",
        f"{ENGINE_CORE}/vllmprocess.py",
        "return Path(cache or constants.HF_HUB_CACHE) / f",
        "return Path(constants.HF_HUB_CACHE) / f",
        f"{SHARING}::test_weights_come_from_the_folder_that_vllm_downloads_to",
    ),
    Mutant(
        "worker_extensions_change_no_weights",
        f"{VLLM}/engineidentity.py",
        "    if config.parallel_config.worker_extension_cls and",
        "    if not config and",
        "tests/vllm/test_sharing.py::test_code_of_workers_may_change_weights",
    ),
    Mutant(
        "a_drafter_without_a_model_has_settings",
        f"{VLLM}/valuesettings.py",
        '        if part == "speculative_config" and drafts_from_prompt(config):\n            continue\n',
        "",
        "tests/vllm/test_sharing.py::test_a_drafter_without_a_model_changes_nothing",
    ),
    Mutant(
        "one_part_of_a_file_is_all_of_it",
        f"{VLLM}/modelweights.py",
        "        return sorted({path, *parts, *beside})",
        "        return [path]",
        "tests/service/connectors/vllm/test_weightsid.py::test_parts_of_a_file_and_a_projector_beside_it_count",
    ),
    Mutant(
        "a_renamed_folder_of_the_processor_is_not_seen",
        f"{VLLM}/valuesettings.py",
        "newer = (*trail.newer_than(loaded_by), *trail.moved_after(loaded_by))",
        "newer = tuple(trail.newer_than(loaded_by))",
        "tests/vllm/test_sharing.py::test_files_behind_a_link_that_is_newer_than_vllm_are_shared_with_nobody",
    ),
    Mutant(
        "what_the_hub_downloads_is_never_changed_by_hand",
        f"{ENGINE_CORE}/vllmprocess.py",
        "    if blob_of(path) is not None:",
        "    if in_snapshot(path) is not None:",
        f"{ADAPTERS}::test_a_repository_is_its_commit_until_its_branch_moves",
    ),
    Mutant(
        "weights_are_told_by_times_that_can_be_set",
        "service/kvstow_service/connectors/vllm/modelweights.py",
        "{stat.st_mtime_ns} {stat.st_ctime_ns}",
        "{stat.st_mtime_ns}",
        "tests/vllm/test_sharing.py::test_weights_that_were_replaced_with_their_old_times_are_others",
    ),
    Mutant(
        "a_request_loads_again_after_a_failure",
        "service/kvstow_service/connectors/engine_core/schedulerside.py",
        "        if tracked.load.has_failed:\n            tracked.load.start = local\n            return 0\n",
        "",
        "tests/service/connectors/engine_core/test_loads.py"
        "::test_a_request_whose_load_failed_is_computed_even_if_its_blocks_are_there_again",
    ),
    Mutant(
        "a_hit_that_another_connector_loads_stays_leased",
        f"{ENGINE_CORE}/schedulerside.py",
        "        self._loads.ended(tracked)\n        if not tracked.load.is_under_way",
        "        if not tracked.load.is_under_way",
        "tests/service/connectors/engine_core/test_loads.py::test_a_hit_that_another_connector_loads_is_let_go",
    ),
    Mutant(
        "a_rank_beside_another_connector_gives_its_handshake_to_both",
        f"{VLLM}/connector.py",
        "return hello if hello is not None and hello.is_alone else None",
        "return hello",
        "tests/vllm/test_connector.py::test_a_child_of_multiconnector_follows_the_settings_of_its_parent",
    ),
    Mutant(
        "loads_go_by_layer_beside_another_connector",
        f"{ENGINE_CORE}/schedulerhost.py",
        "process.may_load_by_layer and is_alone",
        "process.may_load_by_layer",
        "tests/vllm/test_schedulerhost.py::test_beside_another_connector_loads_go_before_the_step",
    ),
    Mutant(
        "ranks_introduce_themselves_with_the_first_request_only",
        f"{ENGINE_CORE}/schedulerhost.py",
        "return self._setup.clock() < self._expecting_until",
        "return False",
        "tests/vllm/test_schedulerhost.py::test_an_engine_whose_ranks_are_unknown_makes_steps_for_a_while",
    ),
    Mutant(
        "a_tag_that_is_elsewhere_is_released",
        "publish/release.py",
        """elif _git(root, "tag", "--points-at", "HEAD", "--list", tag) != tag:""",
        "elif not tag:",
        "tests/publish/test_release.py::test_nothing_is_missing_once_the_tag_is_there",
    ),
    Mutant(
        "a_version_whose_test_failed_has_run",
        "bench/compatibility.py",
        """ and all(one.result == "passed" for one in engines.values())""",
        "",
        "tests/test_compatibility.py::test_a_run_replaces_what_was_known_of_its_tests",
    ),
    Mutant(
        "another_python_hides_a_failure",
        "bench/compatibility.py",
        """            if test not in found or one.result != "passed":\n""",
        "            if True:\n",
        "tests/test_compatibility.py::test_a_failure_with_one_python_is_not_hidden_by_another",
    ),
    Mutant(
        "without_leases",
        f"{CONTROL_CODE}/index.py",
        "        self.held.increment(slots)\n",
        "",
        STATE_MACHINE,
    ),
    Mutant(
        "keys_are_visible_at_submission",
        OPS,
        "        self.held_slots += len(held)\n        return op\n",
        """\
        self.held_slots += len(held)
        if direction == "store":
            pool.publish(self._owner.namespace, slots)
            entry.op = Op(op.op_id, direction, blocks, (), boots)
        return op
""",
        STATE_MACHINE,
    ),
    Mutant(
        "the_first_rank_ends_an_op",
        OPS,
        "            entry.pending.discard(rank)\n",
        "            entry.pending.clear()\n",
        STATE_MACHINE,
    ),
    Mutant(
        "repeated_completions_count",
        OPS,
        "            faults.duplicate_completions += 1\n",
        "            self._accept(entry, min(entry.pending), completion)\n",
        STATE_MACHINE,
    ),
    Mutant(
        "op_ids_are_reused",
        OPS,
        "        del self._open[op.op_id]\n",
        "        del self._open[op.op_id]\n        self.pool.last_op_id *= bool(self._open)\n",
        STATE_MACHINE,
    ),
    Mutant(
        "restarts_keep_the_index",
        f"{CONTROL_CODE}/pool.py",
        "        self.lost = slots or range(0)\n",
        "        self.lost = range(0)\n",
        STATE_MACHINE,
    ),
    Mutant(
        "restarts_clear_the_usable_slots_only",
        f"{CONTROL_CODE}/pool.py",
        "max(self.slots.top, self.lost.stop)",
        "max(self.slots.limit, self.lost.stop)",
        STATE_MACHINE,
    ),
    Mutant(
        "leases_outlive_a_restart",
        f"{CONTROL_CODE}/pool.py",
        "            session.leases.break_all()\n",
        "            pass\n",
        STATE_MACHINE,
    ),
    Mutant(
        "lost_blocks_are_served",
        f"{CONTROL_CODE}/session.py",
        "if not self.serving or self.pool.lost:",
        "if not self.serving:",
        f"{CONTROL}/test_ranktable.py::test_an_interrupted_removal_is_finished_before_anything_is_served",
    ),
    Mutant(
        "resize_does_not_wait",
        f"{CONTROL_CODE}/administration.py",
        "                sweep.waiting = pool.slots.leaving > 0\n",
        "                sweep.waiting = False\n",
        STATE_MACHINE,
    ),
    Mutant(
        "late_desired_states_are_obeyed",
        "engine/kvstow/messages.py",
        "return self.engine_id != applied.engine_id or self.number > applied.number",
        "return True",
        STATE_MACHINE,
    ),
    Mutant(
        "shrinks_are_forgotten",
        f"{CONTROL_CODE}/ranktable.py",
        "record.report.applied >= desired.number for record",
        "True for record",
        STATE_MACHINE,
    ),
    Mutant(
        "namespaces_are_ignored",
        f"{CONTROL_CODE}/namespaces.py",
        "        namespace = self._by_name.get(name)\n        if namespace is None:\n            tag",
        '        name, namespace = "", self._by_name.get("")\n        if namespace is None:\n            tag',
        SESSION_SCHEDULES,
    ),
    Mutant(
        "runs_go_on_in_other_namespaces",
        f"{CONTROL_CODE}/namespaces.py",
        "        if self._own_tags.startswith(found):\n",
        "        if found:\n",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "leases_outlive_a_reset",
        f"{CONTROL_CODE}/attachedsession.py",
        "            self.leases.break_all()\n            return joined.name\n",
        "            return joined.name\n",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "slots_are_freed_at_the_end_of_a_connection",
        f"{CONTROL_CODE}/attachedsession.py",
        "        if not self.processes:\n            yield from self._free_slots()\n",
        "        yield from self._free_slots()\n",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "a_clock_frees_leases",
        f"{CONTROL_CODE}/pool.py",
        "            self.debts.note_held()\n            for session in self.sessions:\n",
        """\
            self.debts.note_held()
            for session in self.sessions:
                for lease in session.leases:
                    self.index.unhold(list(lease.slots))
""",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "a_clock_ends_quarantine",
        f"{CONTROL_CODE}/pool.py",
        "            self.debts.note_held()\n            for session in self.sessions:\n",
        """\
            self.debts.note_held()
            for session in self.sessions:
                self.end_quarantine(session.quarantined_slots)
                session.quarantined_slots = []
""",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "lost_sessions_are_believed",
        f"{CONTROL_CODE}/attachedsession.py",
        "        self.is_lost = self.closed = True\n",
        "        self.is_lost = self.closed = True\n        return\n",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "slots_are_shown_above_the_watermark",
        f"{CONTROL_CODE}/attachedsession.py",
        "self.watermark = None if 0 < self.pool.memory_slots() <= registered else registered",
        "self.watermark = None if registered else registered",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "leases_outlive_a_boot",
        f"{CONTROL_CODE}/attachedsession.py",
        "        self.leases.break_from(low)\n",
        "        pass\n",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "extents_that_are_mapped_count_as_released",
        f"{CONTROL_CODE}/sharedpool.py",
        "return all(session.has_released(self._last_lowering) for session in self.attached())",
        "return True",
        SESSION_SCHEDULES,
    ),
    Mutant(
        "the_journal_publishes_before_the_bytes_are_whole",
        OPS,
        "            entry.pending.discard(rank)\n",
        "            entry.pending.clear()\n",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "the_journal_begins_nothing",
        f"{CONTROL_CODE}/session.py",
        "                        pool.journal.begin(slots, self.session_id)\n",
        "                        pass\n",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "removed_slots_are_cleared_although_they_are_read",
        f"{CONTROL_CODE}/pool.py",
        "self.journal.begin(removal.orphans, ANY_SESSION)",
        "self.journal.clear(removal.orphans)",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "namespaces_are_named_after_the_first_one",
        f"{CONTROL_CODE}/sharedpool.py",
        "self.namespace_label(one.name)) for one in named",
        "self.namespace_label(named[0].name)) for one in named",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "blocks_that_earlier_engines_read_are_evicted",
        f"{CONTROL_CODE}/pool.py",
        "        if self.earlier is not None:\n            return slots\n",
        "",
        f"{CONTROL}/test_sessions.py"
        "::test_while_engines_of_an_earlier_service_live_a_store_evicts_no_block_and_ends_no_lease",
    ),
    Mutant(
        "slots_that_earlier_engines_read_are_freed",
        f"{CONTROL_CODE}/pool.py",
        "(kept if self._was_used.is_used(slot) else others).append(slot)",
        "others.append(slot)",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "a_restart_ends_quarantine",
        f"{CONTROL_CODE}/sharedpool.py",
        "    slots = [slot for slot in filling if slot < pool.slots.limit]\n",
        "    slots = list[int]()\n",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "op_ids_begin_again",
        f"{CONTROL_CODE}/sharedpool.py",
        "secrets.randbits(32) << 20",
        "0",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "namespaces_have_new_numbers",
        f"{CONTROL_CODE}/sharedpool.py",
        "pool.index.namespaces.restore(name, tag)",
        "pool.index.namespaces.join(name)",
        JOURNALED_SCHEDULES,
    ),
    Mutant(
        "hands_over_while_mapped",
        "engine/kvstow/memory/rows.py",
        "return self.recalled and not self.maps",
        "return self.recalled",
        BUDGET,
    ),
    Mutant(
        "forgets_a_count",
        "engine/kvstow/memory/budget.py",
        "        maps[client] -= 1\n        if not maps[client]:\n            del maps[client]\n",
        "        del maps[client]\n",
        BUDGET,
    ),
    Mutant(
        "believes_a_death_of_others",
        "engine/kvstow/memory/budget.py",
        "            extent.maps.pop(client, None)\n            extent.had.discard(client)\n",
        "            extent.maps.clear()\n",
        BUDGET,
    ),
    Mutant(
        "spends_recalled_memory",
        "engine/kvstow/memory/budget.py",
        "return self.total_bytes - self._remaining_bytes + self.spare_bytes",
        "return self.total_bytes - self._remaining_bytes + self.spare_bytes + self.recalled_bytes",
        BUDGET,
    ),
    Mutant(
        "spends_memory_that_is_not_free_yet",
        "engine/kvstow/memory/budget.py",
        "return self.total_bytes - self.allocated_bytes >= num_bytes",
        "return True",
        BUDGET,
    ),
    Mutant(
        "ignores_owners",
        "engine/kvstow/memory/budget.py",
        "            and extent.owner in (None, owner)\n",
        "",
        BUDGET,
    ),
    Mutant(
        "gives_an_extent_twice",
        "engine/kvstow/memory/budget.py",
        "            if extent.is_spare\n            and extent.num_bytes",
        "            if extent.num_bytes",
        BUDGET,
    ),
    Mutant(
        "gives_rows_beside_recalled_ones",
        "engine/kvstow/memory/rows.py",
        "return any(row.recalled for row in self.rows.values())",
        "return False",
        BUDGET,
    ),
    Mutant(
        "recalls_the_first_row_first",
        "engine/kvstow/memory/rows.py",
        "return sorted(number for number, row in self.rows.items() if not row.recalled)",
        "return sorted((number for number, row in self.rows.items() if not row.recalled), reverse=True)",
        BUDGET,
    ),
    Mutant(
        "a_rank_is_believed_to_keep_what_it_frees",
        f"{CONTROL_CODE}/ranktable.py",
        "record.report.applied >= desired.number for record",
        "True for record",
        "tests/engine/test_resize.py::test_freed_slots_are_not_used_before_they_are_pinned_again",
    ),
    Mutant(
        "memory_under_a_copy_is_unregistered",
        "engine/kvstow/memory/slotpool.py",
        "max(self._wanted_end(), *self._held, 0)",
        "self._wanted_end()",
        "tests/engine/devices/test_cuda_memory.py::test_a_shrink_waits_for_the_copy",
    ),
    Mutant(
        "nothing_waits",
        f"{ENGINE_CORE}/loads.py",
        "            return tracked.load.wait is not None\n",
        "            return False\n",
        f"{SHARED_LOADS}::test_requests_of_one_prompt_copy_it_once",
    ),
    Mutant(
        "waits_end_with_the_copy",
        f"{ENGINE_CORE}/loads.py",
        "            load.done_in = self._draft.number\n",
        "            load.is_over = True\n",
        f"{SHARED_LOADS}::test_a_request_that_is_asked_about_before_the_loading_one_is_scheduled_still_waits",
    ),
    Mutant(
        "waits_outlast_the_copy",
        f"{ENGINE_CORE}/loads.py",
        "            load.done_in = self._draft.number\n",
        "            pass\n",
        f"{SHARED_LOADS}::test_a_request_loads_if_a_finished_load_brought_it_nothing",
    ),
    Mutant(
        "failed_loads_are_waited_for",
        f"{ENGINE_CORE}/loads.py",
        "            (self._shared.ended if failed else self._shared.done)(tracked)\n",
        "            self._shared.done(tracked)\n",
        f"{SHARED_LOADS}::test_all_load_at_once_when_the_load_has_failed",
    ),
    Mutant(
        "lost_loads_are_waited_for",
        f"{ENGINE_CORE}/loads.py",
        "        self._shared.ended(tracked)\n        self._draft.lost_loads",
        "        self._draft.lost_loads",
        f"{SHARED_LOADS}::test_a_load_that_is_lost_before_it_begins_is_not_waited_for",
    ),
    Mutant(
        "loads_of_aborted_requests_are_waited_for",
        f"{ENGINE_CORE}/loads.py",
        "            load.is_over = True\n",
        "            pass\n",
        f"{SHARED_LOADS}::test_all_load_at_once_when_the_loading_request_is_aborted",
    ),
    Mutant(
        "loads_that_have_ended_are_kept",
        f"{ENGINE_CORE}/loads.py",
        "self._loads.pop(tracked, None)",
        "self._loads.get(tracked)",
        f"{SHARED_LOADS}::test_nothing_is_kept_of_requests_that_have_ended",
    ),
    Mutant(
        "waits_have_no_bound",
        f"{ENGINE_CORE}/loads.py",
        "LoadWait(load, shared, self._clock() + WAIT_SECONDS)",
        'LoadWait(load, shared, float("inf"))',
        f"{SHARED_LOADS}::test_all_load_at_once_after_a_bounded_time",
    ),
    Mutant(
        "only_equal_prompts_wait",
        f"{ENGINE_CORE}/loads.py",
        "        if not self._groups.is_plain:\n            return most",
        "        if True:\n            return most",
        f"{SHARED_LOADS}::test_what_follows_a_shared_prefix_is_loaded_after_the_wait",
    ),
    Mutant(
        "windows_share_any_prefix",
        f"{ENGINE_CORE}/loads.py",
        "        if not self._groups.is_plain:\n            return most",
        "        if False:\n            return most",
        f"{SHARED_LOADS}::test_with_windows_only_a_prompt_that_contains_the_whole_load_waits",
    ),
    Mutant(
        "requests_wait_again",
        f"{ENGINE_CORE}/loads.py",
        """\
        load, end, deadline = tracked.load.wait
        return not self._is_over(load) and load.start <= local < end and self._clock() < deadline
""",
        """\
        if self._is_over(tracked.load.wait.load):
            tracked.load.wait = None
            return self.must_wait(tracked, local, end)
        return True
""",
        f"{SHARED_LOADS}::test_a_request_that_has_waited_waits_for_no_other_load",
    ),
    Mutant(
        "waits_are_never_forgotten",
        f"{ENGINE_CORE}/trackedrequests.py",
        "self.offered_tokens, self.load.wait = 0, None",
        "self.offered_tokens = 0",
        f"{SHARED_LOADS}::test_a_request_that_is_admitted_again_may_wait_again",
    ),
    Mutant(
        "a_long_load_is_worth_a_wait",
        f"{ENGINE_CORE}/loads.py",
        "shared >= half and is_short and (",
        "shared >= half and (",
        f"{SHARED_LOADS}::test_a_request_does_not_wait_for_much_more_than_it_needs",
    ),
    Mutant(
        "a_load_of_little_is_worth_a_wait",
        f"{ENGINE_CORE}/loads.py",
        "half = local + -(-need // (2 * step)) * step",
        "half = local + step",
        f"{SHARED_LOADS}::test_a_request_does_not_wait_for_less_than_half_of_what_it_needs",
    ),
    Mutant(
        "keys_do_not_name_the_adapter",
        f"{ENGINE_CORE}/adapters.py",
        "return hashlib.blake2b(block_hash, key=self.salt, digest_size=len(block_hash)).digest()",
        "return block_hash",
        ADAPTER_VERSIONS,
    ),
    Mutant(
        "files_are_not_compared",
        f"{ENGINE_CORE}/pathtrail.py",
        "return next((place for place, stamp in self.stamps.items() if _may_differ(stamp, stamp_of(place))), None)",
        "return None",
        ADAPTER_VERSIONS,
    ),
    Mutant(
        "files_are_compared_only_when_a_request_comes",
        f"{ENGINE_CORE}/adapters.py",
        "(self._checked == self._moment[0] and not now and self.salt)",
        "(not now and self.salt)",
        f"{ADAPTERS}::test_the_files_are_compared_once_in_a_step",
    ),
    Mutant(
        "files_may_be_newer_than_the_engine",
        f"{ENGINE_CORE}/adapters.py",
        "*trail.newer_than(start.moment), ",
        "*(), ",
        ADAPTER_VERSIONS,
    ),
    Mutant(
        "folders_may_be_newer_than_the_engine",
        f"{ENGINE_CORE}/adapters.py",
        "*trail.folders_newer_than(start.moment, start.known, start.mounts)",
        "",
        ADAPTER_VERSIONS,
    ),
    Mutant(
        "a_new_entry_hides_a_rename",
        f"{ENGINE_CORE}/adapters.py",
        "trail.folders_newer_than(start.moment, start.known, start.mounts)",
        "trail.moved_after(start.moment)",
        ADAPTER_VERSIONS,
    ),
    Mutant(
        "links_are_not_compared",
        f"{ENGINE_CORE}/pathtrail.py",
        "        stamps[place] = _stamp(found)\n",
        "        if not modes.S_ISLNK(found.st_mode):\n            stamps[place] = _stamp(found)\n",
        ADAPTER_VERSIONS,
    ),
    Mutant(
        "numbers_are_not_compared",
        f"{ENGINE_CORE}/adapters.py",
        "            self._refuse_both(lora)\n",
        "            pass\n",
        ADAPTER_VERSIONS,
    ),
    Mutant(
        "a_changed_adapter_is_read_again",
        f"{ENGINE_CORE}/adapters.py",
        """\
            self.refuse(f"{place} has changed since this engine has used it first")
""",
        """\
            self.salt, self.trail, self._digest = b"", self._files.trail(), self._files.digest()
""",
        ADAPTER_VERSIONS,
    ),
]

PATCHED = [
    Patched(
        f"{CONTROL}/mutants.py",
        ("visible_at_submission", "first_rank_decides"),
        "tests/vllm/test_scheduling_mutants.py::test_a_broken_promise_is_noticed",
    ),
    Patched(
        f"{CONTROL}/test_state_machine.py",
        ("test_dead_boots_that_are_believed_are_noticed",),
        f"{CONTROL}/test_state_machine.py::test_dead_boots_that_are_believed_are_noticed",
    ),
    Patched(
        f"{CONTROL}/test_netloss.py",
        ("reads_always_pay",),
        f"{CONTROL}/test_netloss.py::test_without_break_even_a_slow_store_costs_time",
    ),
    Patched(
        f"{CONTROL}/test_indexjournal.py",
        ("WithoutErasing", "ChecksumFirst"),
        f"{CONTROL}/test_indexjournal.py::test_a_journal_without_one_of_its_protections_is_found_out",
    ),
    Patched(
        "tests/service/node/test_schedules.py",
        (
            "slots_are_freed_at_the_end_of_the_connection",
            "a_clock_frees_what_lost_sessions_hold",
            "extents_change_hands_while_they_are_mapped",
            "slots_are_shown_that_no_worker_has_registered",
            "the_weights_are_no_part_of_a_namespace",
            "users_share_a_pool",
            "a_reset_keeps_the_namespace",
        ),
        "tests/service/node/test_schedules.py::test_taking_out_a_safeguard_is_noticed",
    ),
    Patched(
        "tests/jax/test_mutants.py",
        (
            "gather_after_the_step",
            "gather_rest_after_the_step",
            "upload_on_the_copy_thread",
            "download_on_the_copy_thread",
            "load_without_witness",
        ),
        "tests/jax/test_mutants.py::test_taking_out_a_safeguard_is_noticed",
    ),
    Patched(
        "tests/jax/test_slots.py",
        ("duplicates_allocated_twice", "saves_end_when_their_blocks_are_read"),
        "tests/jax/test_slots.py::test_taking_out_a_safeguard_is_noticed",
    ),
    Patched(
        "tests/vllm/test_scheduling_mutants.py",
        (
            "stores_do_not_hold_their_blocks",
            "stores_never_let_their_blocks_go",
            "stores_do_not_wait_for_the_forward",
            "loads_write_zeros",
            "load_blocks_are_rotated",
            "loads_are_done_at_submission",
            "aborted_loads_are_not_reported",
            "failed_loads_are_done",
            "windows_fail_by_block",
            "windows_lack_a_block",
            "left_out_groups_count_as_loaded",
            "resets_keep_the_keys",
            "dead_boots_are_served",
            "ended_leases_are_not_released",
            "blocks_that_wait_for_slots_are_not_held",
            "ranks_leave_sessions_under_way",
            "unwanted_answers_are_kept",
        ),
        "tests/vllm/test_scheduling_mutants.py::test_a_broken_promise_is_noticed",
    ),
]


def path_of(test: str) -> str:
    return test.partition("::")[0]


# -- the command -----------------------------------------------------------------------------------------------------

_PLACES = ("vllm", "jax", "tpu")
_COPIED = (
    *("engine", "api", "service", "tests", "bench", "docs", "helm", "publish", "locks", ".github"),
    *("README.md", "CHANGELOG.md", "CITATION.cff", "Dockerfile", "pyproject.toml"),
)
_SECONDS = 300.0


def interpreter(test: str) -> Path | None:
    """None where it has not been made."""
    for place in _PLACES:
        if test.startswith(f"tests/{place}/"):
            names = ".venv-vllm-*" if place == "vllm" else f".venv-{place}"
            found = ROOT.glob(f"{names}/bin/python")
            return max(found, key=lambda one: [int(part) for part in re.findall(r"\d+", str(one))], default=None)
    return Path(sys.executable)


def run_test(folder: Path, test: str) -> int:
    """pytest's exit status."""
    python = interpreter(test)
    assert python is not None
    paths = [str(folder / part) for part in ("engine", "api", "service")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(folder)]), "PYTHONDONTWRITEBYTECODE": "1"}
    marks = next((place for place in _PLACES if test.startswith(f"tests/{place}/")), "not soak")
    warnings = ["-W", "default"] if marks == "vllm" else []  # vLLM and its packages give many
    command = [str(python), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *warnings, "-m", marks, test]
    try:
        return subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, check=False, timeout=_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        return 1  # what hangs is noticed


def verdict(folder: Path, mutant: Mutant) -> str:
    """`folder`: a copy of the checkout, which is as before afterwards."""
    path = folder / mutant.path
    before = path.read_text()
    path.write_text(before.replace(mutant.code, mutant.instead))
    try:
        status = run_test(folder, mutant.test)
    finally:
        path.write_text(before)
    if status < 0 and status != -signal.SIGKILL:  # the mutant has let a signal end the process of its test
        return "dead"
    return {0: "SURVIVED", 1: "dead"}.get(status, f"PYTEST ENDED WITH {status}")


def chosen(names: list[str]) -> Iterator[tuple[str, Mutant | Patched]]:
    listed: list[tuple[str, Mutant | Patched]] = [(mutant.name, mutant) for mutant in MUTANTS]
    listed += [(", ".join(patched.names), patched) for patched in PATCHED]
    known = {name for names, _ in listed for name in names.split(", ")}
    if unknown := set(names) - known:
        raise SystemExit(f"there is no mutant {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
    return ((title, one) for title, one in listed if not names or set(names) & set(title.split(", ")))


def main(names: list[str]) -> int:
    """0 if all are dead."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kvstow-mutants-") as made:
        folder = Path(made)
        for part in _COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / part)
        sound: dict[str, int] = {}
        for title, one in chosen(names):
            if interpreter(one.test) is None:
                said = "skipped: its environment has not been made"
            else:
                if one.test not in sound:
                    sound[one.test] = run_test(folder, one.test)
                if sound[one.test] in (2, 5):
                    said = "skipped: its test is not collected here"
                elif sound[one.test] != 0:
                    said = "THE TEST FAILS WITHOUT IT"
                else:
                    said = verdict(folder, one) if isinstance(one, Mutant) else "dead"
            failed += said[0].isupper()
            print(f"{said}: {title}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

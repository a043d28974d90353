"""Hints in the words of others: what each word means. A form that nobody has defined is counted, and fails nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.connectors.engine_core.test_hints import request_with

from kvstow.hints import Hints, context_id
from kvstow_service.connectors.engine_core.hints import hints_of
from kvstow_service.connectors.otherwords import WORDS, hints_in_body

HOUR, DAY = 3600.0, 86_400.0


def hints_of_action(action_type: Any, payload: Any) -> Hints | None:
    """As the connector reads them from vLLM's envelope."""
    action = SimpleNamespace(action_type=action_type, payload=payload)
    return hints_of(request_with(None, kv_transfer_params=None, kv_hints=SimpleNamespace(actions=[action])))


@pytest.mark.parametrize(
    ("body", "hints"),
    [
        ({"prompt_cache_key": "trip"}, {"context": "trip"}),
        ({"prompt_cache_retention": "24h"}, {"keep_for": DAY}),
        ({"prompt_cache_retention": "in_memory"}, {}),
        ({"prompt_cache_retention": "in-memory"}, {}),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, {"keep_for": 1800.0}),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, {"keep_for": HOUR}),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, {}),
        ({"cache_control": {"type": "ephemeral"}}, {}),
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 1024, "speculative_prefill": True}}}, {}),
        (
            {"nvext": {"agent_hints": {"prefix_id": "trip"}, "cache_control": {"ttl": "90s"}}},
            {"context": "trip", "keep_for": 90.0},
        ),
        (
            {"agent_hint": {"session_id": "w", "parent_session_id": "o", "cache_control": {"ttl": 60.5}}},
            {"context": "w", "keep_for": 60.5},
        ),
        ({"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": 300}}}, {}),
        ({"agent_hint": {"context_management": {"edits": [{"type": "evict"}]}}}, {"release": True}),
        ({"agent_hint": {"context_management": {"edits": [{"type": "evict", "block_start": 4}]}}}, {}),
        ({"agent_hint": {"context_management": {"edits": [{"type": "offload"}, {"type": "prefetch"}]}}}, {}),
        ({"retention_scope": "trip"}, {"context": "trip"}),
        (
            {
                "retention_directives": [
                    {"start": 0, "end": 64, "priority": 90, "duration": 49.0},
                    {"start": 64, "duration": 12.5},
                ]
            },
            {"keep_for": 49.0},
        ),
        ({"retention_directives": [{"start": 0, "end": 64, "priority": 0, "duration": 49.0}]}, {}),
        ({"retention_directives": [{"start": 0, "end": None, "priority": 70}]}, {}),
        ({"model": "m", "messages": [{"content": [{"cache_control": {"ttl": "1h"}}]}]}, {}),
    ],
)
def test_words_in_a_body(body: dict[str, Any], hints: dict[str, Any]) -> None:
    assert hints_in_body(body) == hints


def test_the_most_specific_of_several_words_counts() -> None:
    scoped = {"prompt_cache_key": "key", "retention_scope": "scope", "prompt_cache_retention": "24h"}
    assert hints_in_body(scoped) == {"context": "scope", "keep_for": DAY}
    hinted = {**scoped, "agent_hint": {"session_id": "agent"}, "cache_control": {"ttl": "1h"}}
    assert hints_in_body(hinted) == {"context": "agent", "keep_for": HOUR}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_cache_key": 7},
        {"prompt_cache_key": ""},
        {"prompt_cache_key": "x" * 257},
        {"prompt_cache_retention": "for ever"},
        {"prompt_cache_retention": ["24h"]},
        {"prompt_cache_options": "24h"},
        {"cache_control": "ephemeral"},
        {"cache_control": {"ttl": "1 hour"}},
        {"cache_control": {"ttl": -1}},
        {"cache_control": {"ttl": "999999d"}},
        {"nvext": []},
        {"nvext": {"agent_hints": 5}},
        {"nvext": {"agent_hints": {"prefix_id": {}}}},
        {"agent_hint": "w"},
        {"agent_hint": {"context_management": []}},
        {"agent_hint": {"context_management": {"edits": [7]}}},
        {"retention_directives": {"start": 0}},
        {"retention_directives": [7]},
        {"retention_directives": [{"duration": "49"}]},
        {"retention_scope": None, "retention_directives": [{"duration": 10**400}]},
    ],
)
def test_a_word_in_a_form_that_nobody_has_defined_is_counted(body: dict[str, Any]) -> None:
    found = hints_of(request_with(hints_in_body(body)))
    assert found is not None
    assert (found.ignored, found.context, found.keep_for) == (("invalid",), None, None)


@pytest.mark.parametrize(
    ("kind", "payload", "hints"),
    [
        ("Pin", {"session_id": "s", "ttl": 60}, Hints(context_id("s"), keep_for=60.0, name="s")),
        ("retain", {"session": "s", "priority": 7}, Hints(context_id("s"), name="s")),
        ("Retain", {"ttl_seconds": 90.5}, Hints(keep_for=90.5)),
        ("Demote", {"session_id": "s", "ttl": 60}, Hints(context_id("s"), name="s")),
        ("PREFETCH", {"session_id": "s"}, Hints(context_id("s"), name="s")),
        ("Pin", "s", Hints(ignored=("invalid",))),
        ("Retain", {"ttl": "soon"}, Hints(ignored=("invalid",))),
        ("Share", {"session_id": "s"}, None),
        (None, {"session_id": "s"}, None),
    ],
)
def test_actions_of_vllms_envelope(kind: Any, payload: Any, hints: Hints | None) -> None:
    assert hints_of_action(kind, payload) == hints


def test_several_actions_of_one_request() -> None:
    actions = [
        SimpleNamespace(action_type="Prefetch", payload={"session_id": "s"}),
        SimpleNamespace(action_type="Retain", payload={"session_id": "other", "ttl": 60}),
    ]
    envelope = SimpleNamespace(actions=actions)
    found = hints_of(request_with(None, kv_transfer_params=None, kv_hints=envelope))
    assert found == Hints(context_id("s"), keep_for=60.0, name="s")
    own = SimpleNamespace(action_type="kvstow", payload={"context": "own"})
    envelope = SimpleNamespace(actions=[*actions, own])
    found = hints_of(request_with(None, kv_transfer_params=None, kv_hints=envelope))
    assert found == Hints(context_id("own"), name="own"), "KVStow's own words count more"


VALUES = st.sampled_from([None, True, 0, -1.5, 10**400, "", "trip", "1h", "5m", "\ud800", "evict"])
FIELDS = st.sampled_from(["agent_hints", "cache_control", "ttl", "session_id", "context_management", "edits", "type"])
NESTED = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(FIELDS, inner, max_size=3), max_leaves=6
)


@given(body=st.dictionaries(st.sampled_from(WORDS), NESTED, max_size=4))
def test_no_body_fails(body: dict[str, Any]) -> None:
    hints_of(request_with(hints_in_body(body)))


@given(kind=st.sampled_from(["Pin", "Retain", "Demote", "Prefetch"]) | VALUES, payload=NESTED)
def test_no_action_fails(kind: Any, payload: Any) -> None:
    hints_of_action(kind, payload)

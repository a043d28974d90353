"""Translates hints in the words of others to KVStow's own. Only this module knows these words; docs/agents.md has them
as a table.

This module checks only what decides the meaning of a word. Values are checked where KVStow's hints are read. A word in
an unknown form becomes the hint `invalid`, so that it is counted.

Anthropic, and others who use its words, keep a prompt for five minutes if no time is given. Clients send this time with
every request, so it distinguishes no request from another and is not taken as a hint. If it were, it would hide how the
request has ended, which tells more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

HintFields = dict[str, Any]
"""KVStow's hints by name, as a client would send them."""

_INVALID: Final[HintFields] = {"invalid": True}
_DEFAULT_SECONDS = 300.0
"""The time that is not taken as a hint."""
_DURATION = re.compile(r"([0-9]{1,6})(s|m|h|d)")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def hints_in_body(body: Mapping[str, Any]) -> HintFields:
    """The hints in the body of a request to an OpenAI or Anthropic API. If two words give the same hint, the more
    specific one counts."""
    found: HintFields = {}
    for word, read in _WORDS.items():
        if (value := body.get(word)) is not None:
            found = {**read(value), **found}
    return found


def hints_in_action(action_type: Any, payload: Any) -> HintFields | None:
    """The hints in an action of vLLM's `kv_hints`. None for an action of another kind, which is not for this connector.

    Only the session of `Demote` and `Prefetch` counts, because KVStow does by itself what they ask for: it stores
    blocks that the GPU is about to lose, and loads blocks that a request needs."""
    if not isinstance(action_type, str) or action_type.lower() not in ("pin", "retain", "demote", "prefetch"):
        return None
    if not isinstance(payload, Mapping):
        return dict(_INVALID)
    found = _context(payload.get("session_id", payload.get("session")))
    if action_type.lower() in ("pin", "retain"):
        return {**_keep_for(payload.get("ttl_seconds", payload.get("ttl"))), **found}
    return found


def _context(name: Any) -> HintFields:
    return {} if name is None else {"context": name}


def _keep_for(given: Any) -> HintFields:
    """The hint `keep_for` for a time in seconds, or for a text such as `1h`."""
    if given is None:
        return {}
    seconds = given
    if isinstance(given, str):
        match = _DURATION.fullmatch(given)
        if match is None:
            return dict(_INVALID)
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]]
    return {} if seconds == _DEFAULT_SECONDS else {"keep_for": seconds}


def _cache_control(value: Any) -> HintFields:
    """The hints in `cache_control` of Anthropic, Dynamo and vLLM's `agent_hint`. Only that of the whole request is
    read. Marks inside of messages, tools and system prompts concern a part of the prompt, and clients send them whether
    or not another request follows."""
    return _keep_for(value.get("ttl")) if isinstance(value, Mapping) else dict(_INVALID)


def _retention(value: Any) -> HintFields:
    """The hints in OpenAI's `prompt_cache_retention`."""
    return {} if value in ("in_memory", "in-memory") else _keep_for(value)


def _agent_hint(value: Any) -> HintFields:
    """The hints in `agent_hint` of a proposal for vLLM, "Session-Aware KV Cache Hints for Agentic Workloads"."""
    if not isinstance(value, Mapping):
        return dict(_INVALID)
    found = _context(value.get("session_id"))
    if (control := value.get("cache_control")) is not None:
        found |= _cache_control(control)
    if (management := value.get("context_management")) is not None:
        found |= _edits(management)
    return found


def _edits(management: Any) -> HintFields:
    """The hints in edits of a context. `evict` of the whole context means that no request continues it. `offload` and
    `prefetch` are no hints, because KVStow stores and loads by itself."""
    edits = management.get("edits", []) if isinstance(management, Mapping) else None
    if not isinstance(edits, list) or not all(isinstance(edit, Mapping) for edit in edits):
        return dict(_INVALID)
    whole = [edit for edit in edits if edit.get("block_start") is None and edit.get("block_end") is None]
    return {"release": True} if any(edit.get("type") == "evict" for edit in whole) else {}


def _nvext(value: Any) -> HintFields:
    """The hints in Dynamo's `nvext`. Fields such as `priority` and `osl` are about queues, and do not say whether
    another request follows."""
    if not isinstance(value, Mapping):
        return dict(_INVALID)
    found: HintFields = {}
    if (hints := value.get("agent_hints")) is not None:
        found = _context(hints.get("prefix_id")) if isinstance(hints, Mapping) else dict(_INVALID)
    if (control := value.get("cache_control")) is not None:
        found |= _cache_control(control)
    return found


def _directives(value: Any) -> HintFields:
    """The hints in llm-d's `retention_directives`: the longest time for which a range is to be kept. A range with the
    priority 0 need not be kept."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return dict(_INVALID)
    times = [one["duration"] for one in value if one.get("duration") is not None and one.get("priority") != 0]
    if not all(type(seconds) in (int, float) for seconds in times):
        return dict(_INVALID)
    return {"keep_for": max(times)} if times else {}


_WORDS: Final[Mapping[str, Callable[[Any], HintFields]]] = {
    "agent_hint": _agent_hint,
    "nvext": _nvext,
    "retention_scope": _context,
    "retention_directives": _directives,
    "cache_control": _cache_control,
    "prompt_cache_retention": _retention,
    "prompt_cache_options": _cache_control,
    "prompt_cache_key": _context,
}
"""The fields of a body that may have hints, with the function that reads each. The most specific one comes first."""

WORDS: Final = tuple(_WORDS)

"""Every message comes back as it was sent, and nothing else is taken for one."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.attach import calls, extentcalls, hello
from kvstow.attach.calls import BlockChange, Completions, Found, Hold, Lookup, SettledOp, SettledOps, StoreBegun
from kvstow.attach.connection import Message
from kvstow.attach.extentcalls import ExtentBytes, ExtentGrant, ExtentSlots, GrantedExtents
from kvstow.attach.hello import Hello, Refused, Welcome
from kvstow.attach.identity import FleetWeights, GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.payloads import RULES, VERSION, Kind, pack_keys, pack_u32s, refusal_of
from kvstow.errors import AttachRefusedError, ProtocolError
from kvstow.messages import Completion, DesiredState, RankReport

POOL = PoolIdentity(
    slot_bytes=(4096, 4096),
    regions=(RegionIdentity("layer.0", 2048, "NHD"), RegionIdentity("layer.1", 2048)),
    kv_cache_dtype="fp8",
    groups=(GroupIdentity("full", 16, 16), GroupIdentity("window", 16, 16, 1024)),
    tensor_parallel=2,
    other_regions=((1, (RegionIdentity("layer.2", 4096),)),),
    uid=1000,
)
NAMESPACE = NamespaceIdentity(
    model="meta-llama/Llama-3.1-8B",
    weights_id="0e9e39f249a16976918f6564b8830bc894c89659",
    weights_source="snapshot",
    hash_probe="a1b2",
    value_settings=(("rope", "default"), ("quantization", "none")),
    epoch=3,
)
HELLO = Hello(
    role="scheduler",
    engine="vllm",
    host="node-1",
    pid=17,
    pool=POOL,
    namespace=NAMESPACE,
    fleet_weights=FleetWeights("commit 0e9e39f2", "no reason"),
    wanted_bytes=1 << 40,
)

MESSAGES: list[Any] = [
    Lookup([b"a" * 33 + b"\0", bytes(34)], Hold.PRESENT, False),
    Lookup([], Hold.NOTHING),
    Found(9, ((0, 3), (7, 100_000)), ((1, 2),)),
    Found(0, ()),
    calls.Pending(),
    calls.Prefill(4096, 0.25),
    calls.LookupPrompt([b"12", b"\0\0"]),
    calls.Release((1, 2**63)),
    calls.BeginLoad(9, 2, 3, "request-ä"),
    calls.LoadBegun(2**40, (5, 4, 3)),
    calls.BeginStore([b"12", b"\0\0"], "r"),
    StoreBegun(7, (0, 2), (11, 12), (3,), {"skipped_already_cached": 1}, 99),
    StoreBegun(0, (), ()),
    Completions(1, "boot", (Completion(7, "done", None, 4096, 0.25, 0.5), Completion(8, "failed", "no device"))),
    SettledOps((SettledOp(7, "store", "source_free"), SettledOp(8, "load", "failed", "x" * 50)), 5),
    calls.Refresh([b"abc"]),
    calls.CountLookup(100, 99),
    calls.Reset(),
    calls.ResetDone("llama-3-1-8b-0a1b2c"),
    calls.ReadEvents(1 << 40),
    calls.EventPage(
        7, (BlockChange("stored", [bytes(34), b"a" * 34]), BlockChange("removed", [b"abc"])), lost=True, has_more=True
    ),
    GrantedExtents(
        2 << 20, (ExtentGrant(1, 0, 0, 512, 1 << 30, 64 << 20), ExtentGrant(2, 1, 512, 4, 8 << 20, 0)), is_all=False
    ),
    GrantedExtents(2 << 20, (), is_all=True),
    extentcalls.PopulatedExtents((ExtentBytes(1, 128 << 20),)),
    extentcalls.RegisteredExtents((ExtentSlots(1, 64), ExtentSlots(2, 0))),
    extentcalls.RevokedExtents((1, 2)),
    extentcalls.ReleasedExtents((1,)),
    extentcalls.Report(RankReport.without_pool(1, "boot", "starting", 4096, error="later")),
    extentcalls.Desired(DesiredState("engine", 100, paused=True, number=4)),
    extentcalls.Detach("done"),
    HELLO,
    Hello(role="worker", engine="vllm", host="h", pid=1, token="t", rank=1, device="cuda:1", settled_tokens=("old",)),
    Welcome(session_id="s1", service="node", token="t", sharing_off=("the probe differs",)),
    Refused("version", "upgrade"),
    hello.CallError("lease_invalid", "it has ended"),
]


def test_every_message_comes_back_as_it_was_sent() -> None:
    assert [message for message in MESSAGES if type(message).unpack(message.pack()) != message] == []


def test_engines_that_do_not_name_their_weights_to_other_nodes_attach_as_well() -> None:
    value = json.loads(HELLO.pack())
    del value["fleet_weights"]
    unnamed = Hello.unpack(json.dumps(value).encode())
    assert unnamed == replace(HELLO, fleet_weights=FleetWeights())
    assert unnamed.namespace == HELLO.namespace


def test_every_kind_has_a_message_and_a_rule() -> None:
    assert {message.KIND for message in MESSAGES} == set(Kind) == set(RULES)


BINARY = [message for message in MESSAGES if message.KIND not in (Kind.HELLO, Kind.WELCOME, Kind.REFUSED, Kind.ERROR)]


def reason(kind: type[Message], payload: bytes) -> str | None:
    """Why a payload is refused, or None."""
    try:
        kind.unpack(payload)
    except ProtocolError as error:
        return error.reason
    return None


def test_a_payload_that_is_cut_or_too_long_is_malformed() -> None:
    for message in BINARY:
        payload, kind = message.pack(), type(message)
        lengths = [length for length in range(len(payload)) if reason(kind, payload[:length]) != "malformed"]
        assert lengths == [], kind
        assert reason(kind, payload + b"\0x") is not None, kind


@settings(max_examples=60)
@given(st.binary(max_size=120))
def test_garbage_raises_nothing_but_a_protocol_error(data: bytes) -> None:
    for kind in {type(message) for message in MESSAGES}:
        with suppress(ProtocolError):
            kind.unpack(data)


WITH_LISTS = [kind for kind in dict.fromkeys(map(type, BINARY)) if kind is not calls.ReadEvents]


def test_a_count_of_four_billion_is_refused_before_anything_is_allocated() -> None:
    for kind in WITH_LISTS:
        leads = [lead for lead in range(0, 24, 2) if not reason(kind, bytes(lead) + struct.pack("<HI", 34, 2**32 - 1))]
        assert leads == [], kind


def test_keys_keep_their_zero_bytes() -> None:
    keys = [bytes(34), b"\0" + b"x" * 33, b"x" * 33 + b"\0"]
    assert Lookup.unpack(Lookup(keys).pack()).keys == keys


def test_keys_of_different_lengths_do_not_go_into_one_message() -> None:
    with pytest.raises(ProtocolError, match="different lengths"):
        pack_keys([b"ab", b"c"])
    with pytest.raises(ProtocolError, match="a key has 257 bytes; allowed: 1 to 256"):
        pack_keys([bytes(257)])


def test_a_slot_beyond_four_billion_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no 32-bit number"):
        pack_u32s([2**32])


def test_values_out_of_range_are_malformed() -> None:
    with pytest.raises(ProtocolError, match="hold is 9"):
        Lookup.unpack(struct.pack("<B?HI", 9, True, 0, 0))
    with pytest.raises(ProtocolError, match="1 hits of 0 blocks"):
        calls.CountLookup.unpack(struct.pack("<II", 0, 1))
    with pytest.raises(ProtocolError, match="1 blocks and 0 slots"):
        StoreBegun.unpack(StoreBegun(1, (0,), ()).pack())
    with pytest.raises(ProtocolError, match="too short for what it says"):
        GrantedExtents.unpack(GrantedExtents(4096, (ExtentGrant(1, 0, 0, 2, 4096, 0),), True).pack())
    header = struct.pack("<I", 0) + struct.pack("<H", 0) + struct.pack("<I", 1)
    for mark, seconds in ((3, 0.0), (1, float("nan")), (1, -1.0), (1, float("inf"))):
        with pytest.raises(ProtocolError, match="has mark"):
            Completions.unpack(header + struct.pack("<QBQdd", 1, mark, 0, seconds, 0.0) + struct.pack("<H", 0))


def test_the_leading_run_begins_at_the_first_key() -> None:
    assert Found(1, ((0, 3), (5, 1))).leading == 3
    assert Found(1, ((2, 3),)).leading == 0
    assert Found(0, ()).leading == 0


# -- the hello and its version -----------------------------------------------------------------------------------------


def test_a_hello_ignores_fields_that_it_does_not_know() -> None:
    value = json.loads(HELLO.pack()) | {"colour": "blue"}
    assert Hello.unpack(json.dumps(value).encode()) == HELLO


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"role": "king"}, "hello.role is 'king'; allowed: scheduler, worker"),
        ({"pid": -1}, "hello.pid is -1; allowed: a whole number, 0 or more"),
        ({"pid": True}, "hello.pid is True"),
        ({"engine": None}, "hello.engine is missing"),
        ({"host": "h" * 5000}, "hello.host is 'hhh"),
        ({"version": None}, "hello.version is missing"),
        ({"version": "1"}, "hello.version is '1'; allowed: a whole number, 0 or more"),
        ({"pool": None}, "hello of a scheduler needs hello.pool and hello.namespace"),
        ({"pool": 3}, "hello.pool is 3; allowed: an object"),
        ({"namespace": {"model": "m"}}, "hello.namespace.weights_id is missing"),
        ({"settled_tokens": [1]}, "hello.settled_tokens is"),
        ({"settled_tokens": ["t"] * 5000}, "hello.settled_tokens is"),
    ],
)
def test_a_wrong_hello_is_refused_with_the_name_of_the_field(change: dict[str, Any], complaint: str) -> None:
    value = json.loads(HELLO.pack()) | change
    with pytest.raises(ProtocolError, match=complaint):
        Hello.unpack(json.dumps(value).encode())


@pytest.mark.parametrize("text", ["a\nb", "\ud800", "a\u202eb", "\x1b[2J", "a" * 256])
@pytest.mark.parametrize("name", ["engine", "host", "engine_version", "device"])
def test_a_name_that_cannot_be_shown_in_a_line_is_refused(name: str, text: str) -> None:
    """It could forge a line of the log, or could not be encoded in an answer."""
    with pytest.raises(ProtocolError, match=f"hello.{name} is .*; allowed: a text of at most 255 printable") as refused:
        Hello.unpack(json.dumps(json.loads(HELLO.pack()) | {name: text}).encode())
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["model", "weights_id", "hash_probe"])
def test_names_of_a_namespace_are_printable(name: str) -> None:
    value = json.loads(HELLO.pack())
    value["namespace"][name] = "a\ud800"
    with pytest.raises(ProtocolError, match=f"hello.namespace.{name} is .*; allowed: a text of at most 4096 printable"):
        Hello.unpack(json.dumps(value).encode())


def test_the_settings_of_an_engine_have_a_bound() -> None:
    assert HELLO.namespace is not None
    namespace = replace(HELLO.namespace, value_settings=tuple((f"s{number}", "x" * 4000) for number in range(5)))
    with pytest.raises(ProtocolError, match="allowed: texts of at most 16384 characters together"):
        Hello.unpack(replace(HELLO, namespace=namespace).pack())


def test_settings_and_sentences_may_have_several_lines() -> None:
    """They come from an engine's configuration, and from exceptions."""
    assert HELLO.namespace is not None
    namespace = replace(HELLO.namespace, value_settings=(("scale", "a\nb"),), unshared="one\ntwo")
    given = Hello.unpack(replace(HELLO, namespace=namespace).pack()).namespace
    assert given is not None
    assert (given.value_settings, given.unshared) == ((("scale", "'a\\nb'"),), "one two")
    assert Refused.unpack(Refused("memory", "one\ntwo").pack()).message == "one two"


def test_a_hello_that_is_nested_too_deeply_is_malformed() -> None:
    with pytest.raises(ProtocolError):
        Hello.unpack(b"[" * 100_000)


@pytest.mark.parametrize("other", [VERSION - 1, VERSION + 1])
def test_a_hello_of_another_version_is_refused_with_both_numbers(other: int) -> None:
    words = f"the service has version {VERSION} of the attach protocol, the engine version {other}: install the same"
    for value in ({**json.loads(HELLO.pack()), "version": other}, {"version": other, "else": "all is new"}):
        with pytest.raises(AttachRefusedError, match=words) as caught:
            Hello.unpack(json.dumps(value).encode())
        assert caught.value.reason == "version"


def test_a_kind_comes_only_from_its_senders() -> None:
    assert refusal_of(Kind.LOOKUP, "scheduler") is None
    assert refusal_of(Kind.LOOKUP, "worker") == "LOOKUP does not come from a worker"
    assert refusal_of(999, "scheduler") == "kind 999 does not exist"
    assert refusal_of(Kind.LOOKUP, "scheduler", 2) == "LOOKUP came with 2 file descriptors"
    assert refusal_of(Kind.EXTENTS, "service", 2) is None

"""Every message comes back as it was sent, and nothing else is taken for one."""

from __future__ import annotations

import gc
import json
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstow.attach import calls, hello
from kvstow.attach.calls import (
    BeginLoad,
    BlockChange,
    Completions,
    ExtentBytes,
    ExtentGrant,
    ExtentSlots,
    Found,
    GrantedExtents,
    Hold,
    Lookup,
    RegisteredExtents,
    SettledOp,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.hello import Hello, Refused, Welcome
from kvstow.attach.identity import FleetWeights, GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.wire import (
    MOST_COMPLETIONS,
    MOST_LISTED,
    MOST_STORED,
    SENT_BY,
    VERSION,
    Kind,
    Message,
    Packed,
    refusal_of,
)
from kvstow.descriptions import BlockDescription, DescribedBlocks
from kvstow.errors import AttachRefusedError, ProtocolError
from kvstow.hints import LONGEST_PAUSE, MOST_NAME_CHARS, Hints
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

DESCRIPTION = BlockDescription(b"\1\0\0\0\2\0\0\0", bytes(32), b"h" * 32, b"\x91\x01", 3, "french", "trip-ä")
MESSAGES: list[Any] = [
    Lookup([b"a" * 33 + b"\0", bytes(34)], Hold.PRESENT, False),
    Lookup([], Hold.NOTHING),
    Found(9, ((0, 3), (7, 100_000)), ((1, 2),)),
    Found(0, ()),
    calls.Pending(),
    calls.Prefill((1e-4, 2.5e-9, 8192.0), 4096, 0.25, 0.125),
    calls.LookupPrompt([b"12", b"\0\0\0"]),
    calls.Release((1, 2**63)),
    calls.BeginLoad(9, 2, 3, "request-ä"),
    calls.BeginLoad(9, 2, 3, "r", "layer_budget"),
    calls.LoadBegun(2**40, (5, 4, 3)),
    calls.BeginStore([b"12", b"\0\0"], "r"),
    calls.DescribeStore(7, (0, 255), *DescribedBlocks.of([DESCRIPTION, BlockDescription(b"tell" * 4)])),
    calls.DescribeStore(7, (3,), (b"tell",)),
    StoreBegun(7, (0, 2), (11, 12), (3,), {"skipped_already_cached": 1}, 99),
    StoreBegun(0, (), ()),
    Completions(1, "boot", (Completion(7, "done", None, 4096, 0.25, 0.5), Completion(8, "failed", "no device"))),
    SettledOps((SettledOp(7, "store", "source_free"), SettledOp(8, "load", "failed", "x" * 50)), 5),
    calls.Admit(1, [b"abc"], (2, 9)),
    calls.End(1, "other", None, [], []),
    calls.End(1, "stop", (7, 1 << 40), [b"abc"], [b"abc", b"def"]),
    calls.Admit(
        1, [b"abc"], (0, 1), Hints(bytes(16), 2.5, 3.5, release=True, store=False, name="trip", ignored=("unknown",))
    ),
    calls.Admit(1, [b"abc"], (2, 9), None, b"eight678"),
    calls.CountLookup(100, 99),
    calls.Reset(),
    calls.ResetDone("llama-3-1-8b-0a1b2c"),
    calls.ReadEvents(1 << 40),
    calls.EventPage(
        7, (BlockChange("stored", [bytes(34), b"a" * 34]), BlockChange("removed", [b"abc"])), lost=True, has_more=True
    ),
    calls.EventPage(8, (BlockChange("stored", [b"abc", b"def"], ((1, DESCRIPTION),)),)),
    GrantedExtents(
        2 << 20, (ExtentGrant(1, 0, 0, 512, 1 << 30, 64 << 20), ExtentGrant(2, 1, 512, 4, 8 << 20, 0)), is_all=False
    ),
    GrantedExtents(2 << 20, (), is_all=True),
    calls.PopulatedExtents((ExtentBytes(1, 128 << 20),)),
    calls.RegisteredExtents((ExtentSlots(1, 64), ExtentSlots(2, 0))),
    calls.RevokedExtents((1, 2)),
    calls.ReleasedExtents((1,)),
    calls.Report(RankReport.without_pool(1, "boot", "starting", 4096, error="later")),
    calls.Desired(DesiredState("engine", 100, paused=True, number=4)),
    calls.Detach("done"),
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
    assert {message.KIND for message in MESSAGES} == set(Kind) == set().union(*SENT_BY.values())


PACKED = [message for message in MESSAGES if isinstance(message, Packed)]


def reason(kind: type[Message], payload: bytes) -> str | None:
    """Why a payload is refused, or None."""
    try:
        kind.unpack(payload)
    except ProtocolError as error:
        return error.reason
    return None


def test_a_payload_that_is_cut_or_too_long_is_malformed() -> None:
    for message in PACKED:
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


LENGTHS = ((0xDD, "array"), (0xDF, "map"), (0xC6, "bytes"), (0xDB, "text"))
"""The codes of MessagePack for a value that says its length in 32 bits."""


def test_a_length_of_four_billion_is_refused_before_anything_is_allocated() -> None:
    """At each place of each message where a value begins."""
    tracemalloc.start()
    try:
        for message in PACKED:
            payload, kind = message.pack(), type(message)
            for at in range(len(payload)):
                for code, _ in LENGTHS:
                    assert reason(kind, payload[:at] + struct.pack(">BI", code, 2**32 - 1) + payload[at:]) is not None
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=200)
@given(st.data())
def test_a_message_with_changed_bytes_is_read_as_another_one_or_refused(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(MESSAGES))
    payload = bytearray(message.pack())
    for _ in range(data.draw(st.integers(1, 4))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError, AttachRefusedError):
        again = type(message).unpack(bytes(payload))
        assert type(message).unpack(again.pack()) == again


@pytest.mark.parametrize("quoted", ["$[99]", "`$[99]`", "at `$[0]`", "$[" + "9" * 4000 + "]"])
def test_a_complaint_may_quote_anything(quoted: str) -> None:
    """It names fields where msgspec says so, and nowhere in what a peer has sent."""
    payload = msgspec.msgpack.encode([1, 0, 1, "", quoted])
    with pytest.raises(ProtocolError, match=r"begin_load: the choice is ") as error:
        BeginLoad.unpack(payload)
    assert "$." not in str(error.value)


def test_text_that_is_no_utf8_is_malformed() -> None:
    """msgspec does not count it among its own errors."""
    for kind, payload in ((calls.Detach, b"\x91\xa1\xff"), (Refused, b'{"reason":"\xff","message":""}')):
        assert reason(kind, payload) == "malformed"


def test_a_key_has_between_1_and_256_bytes() -> None:
    for key in (b"", bytes(257)):
        with pytest.raises(ProtocolError, match=r"lookup: keys: Expected `bytes` of length .* - at `\$\[0\]`"):
            Lookup.unpack(Lookup([key]).pack())


def test_a_list_has_65_536_items_at_most() -> None:
    most = [b"key"] * (1 << 16)
    assert len(calls.Lookup.unpack(calls.Lookup(most).pack()).keys) == 1 << 16
    for kind in (calls.Lookup, calls.LookupPrompt):
        with pytest.raises(ProtocolError, match=r"length <= 64 - at `\$\[1\]`"):  # pieces of 1,024 keys
            kind.unpack(kind([*most, b"key"]).pack())
    with pytest.raises(ProtocolError, match="length <= 1024"):
        calls.Lookup.unpack(in_pieces(calls.Lookup([]).pack(), [b"key"] * 1025))
    with pytest.raises(ProtocolError, match="length <= 4096"):
        calls.Release.unpack(calls.Release((1,) * 4097).pack())


def in_pieces(without_keys: bytes, *pieces: list[bytes]) -> bytes:
    """The message with these pieces of keys."""
    rest, _ = msgspec.msgpack.decode(without_keys)
    return msgspec.msgpack.encode([rest, list(map(msgspec.msgpack.encode, pieces))])


def test_keys_are_unpacked_in_steps_of_1024() -> None:
    """One call for all of them would keep other threads waiting."""
    keys = [b"%d" % number for number in range(5000)]
    steps = calls.Admit.unpack_in_steps(calls.Admit(7, keys, (2, 9)).pack())
    assert sum(1 for _ in steps) == 5
    assert calls.Admit.unpack(calls.Admit(7, keys, (2, 9)).pack()) == calls.Admit(7, keys, (2, 9))


def test_the_collector_visits_no_list_of_keys() -> None:
    assert not gc.is_tracked(calls.Lookup.unpack(calls.Lookup([b"key"] * 1000).pack()).keys)


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        (calls.Admit, calls.Admit(0, [], (0, 0), Hints(ignored=("rate",) * 1000)).pack(), "length <= 4096"),
        (calls.Report, b"[" + b"[]," * 30_000 + b"0]", "allowed: 65536"),
        (Completions, Completions(0, "x" * (1 << 20), ()).pack(), "allowed: 1048576"),
    ],
)
def test_a_message_that_takes_long_to_unpack_is_refused_unread(kind: type[Message], payload: bytes, words: str) -> None:
    """However its bytes are shared out, in fields that have no limit of their own, too."""
    with pytest.raises(ProtocolError, match=words):
        kind.unpack(payload)


def test_a_slot_beyond_four_billion_is_refused() -> None:
    for slot in (2**32, -1):
        with pytest.raises(ProtocolError, match=r"load_begun: Expected `int` .* - at `\$.slots\[0\]`"):
            calls.LoadBegun.unpack(calls.LoadBegun(1, (slot,)).pack())
    with pytest.raises(ProtocolError, match="load_begun: "):
        calls.LoadBegun(1, (2**64,)).pack()


def test_a_worker_lists_no_more_than_a_list_has_room_for() -> None:
    done, extent = Completion(1, "done"), ExtentSlots(1, 1)
    makes: dict[int, Callable[[int], Message]] = {
        MOST_COMPLETIONS: lambda count: Completions(0, "", (done,) * count),
        MOST_LISTED: lambda count: RegisteredExtents((extent,) * count),
    }
    for most, make in makes.items():
        message = make(most)
        assert type(message).unpack(message.pack()) == message
        with pytest.raises(ProtocolError, match=f"Expected `array` of length <= {most}"):
            type(message).unpack(make(most + 1).pack())


def test_values_out_of_range_are_malformed() -> None:
    with pytest.raises(ProtocolError, match=r"lookup: Invalid enum value 9 - at `\$.hold`"):
        Lookup.unpack(msgspec.msgpack.encode([msgspec.msgpack.encode([[], 9]), []]))
    with pytest.raises(ProtocolError, match="1 hits of 0 blocks"):
        calls.CountLookup.unpack(calls.CountLookup(0, 1).pack())
    with pytest.raises(ProtocolError, match="the looked-up blocks begin at 9 and end at 8"):
        calls.Admit.unpack(calls.Admit(1, [], (9, 8)).pack())
    with pytest.raises(ProtocolError, match="1 blocks and 0 slots"):
        StoreBegun.unpack(StoreBegun(1, (0,), ()).pack())
    with pytest.raises(ProtocolError, match="shorter than its slots"):
        GrantedExtents.unpack(GrantedExtents(4096, (ExtentGrant(1, 0, 0, 2, 4096, 0),), True).pack())
    for name in ("seconds", "queue_seconds"):
        for seconds in (float("nan"), -1.0, float("inf"), 1e9):
            done: Any = {name: seconds}
            with pytest.raises(ProtocolError, match="op 1 has moved 0 bytes in"):
                Completions.unpack(Completions(0, "", (Completion(1, "done", **done),)).pack())
    for wrong in (Completion(-1, "done"), Completion(1, "done", None, -1)):
        with pytest.raises(ProtocolError, match="has moved"):
            Completions.unpack(Completions(0, "", (wrong,)).pack())
    with pytest.raises(ProtocolError, match="Invalid enum value 'lost'"):
        Completions.unpack(msgspec.msgpack.encode([0, "", [{"op_id": 1, "mark": "lost"}]]))


@pytest.mark.parametrize(
    "hints",
    [
        Hints(b"short"),
        Hints(bytes(16), -1.0),
        Hints(bytes(16), float("nan")),
        Hints(bytes(16), LONGEST_PAUSE + 1),
        Hints(keep_for=-1.0),
        Hints(keep_for=LONGEST_PAUSE + 1),
        Hints(bytes(16), name="x" * (MOST_NAME_CHARS + 1)),
        Hints(bytes(16), name="two\nlines"),
        Hints(ignored=("boredom",)),
        Hints(ignored=("unknown",) * 100),
    ],
)
def test_hints_have_limits(hints: Hints) -> None:
    with pytest.raises(ProtocolError, match="admit: "):
        calls.Admit.unpack(calls.Admit(1, [], (0, 0), hints).pack())


def test_many_completions_are_sent_in_several_messages() -> None:
    done = [Completion(number, "done") for number in range(MOST_COMPLETIONS + 1)]
    sent = [message.completions for message in Completions.listed(0, "boot", done)]
    assert sent == [tuple(done[:-1]), (done[-1],)]


def test_what_ranks_and_the_service_say_of_an_error_is_one_line_of_printable_text() -> None:
    for text in ("one\ntwo", "one\ud800two"):
        (message,) = Completions.listed(0, "", [Completion(1, "failed", text)])
        (done,) = Completions.unpack(message.pack()).completions
        (op,) = SettledOps.unpack(SettledOps((SettledOp(1, "store", "failed", text),)).pack()).ops
        assert done.error == op.error == "one two"
    for text in ("one\ntwo", "x" * 256):
        (message,) = Completions.listed(0, "", [Completion(1, "failed", text)])
        assert len(message.completions[0].error or "") <= 255
        with pytest.raises(ProtocolError, match=r"the error of op 1 is .*; allowed: one line of printable characters"):
            Completions.unpack(Completions(0, "", (Completion(1, "failed", text),)).pack())


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
        ({"role": "king"}, r"hello: Invalid enum value 'king' - at `\$.role`"),
        ({"pid": -1}, r"hello: Expected `int` >= 0 - at `\$.pid`"),
        ({"pid": True}, r"Expected `int`, got `bool` - at `\$.pid`"),
        ({"pid": 1 << 63}, r"Expected `int` <= .* - at `\$.pid`"),
        ({"engine": None}, r"Expected `str`, got `null` - at `\$.engine`"),
        ({"host": "h" * 5000}, r"Expected `str` of length <= 255 - at `\$.host`"),
        ({"version": None}, r"Expected `int`, got `null` - at `\$.version`"),
        ({"version": "1"}, r"Expected `int`, got `str` - at `\$.version`"),
        ({"pool": None}, "hello: the scheduler half of an engine must send pool and namespace"),
        ({"pool": 3}, r"Expected `object . null`, got `int` - at `\$.pool`"),
        ({"namespace": {"model": "m"}}, r"missing required field `weights_id` - at `\$.namespace`"),
        ({"settled_tokens": [1]}, r"Expected `str`, got `int` - at `\$.settled_tokens\[0\]`"),
        ({"settled_tokens": ["t"] * 5000}, r"Expected `array` of length <= 4096 - at `\$.settled_tokens`"),
    ],
)
def test_a_wrong_hello_is_refused_with_the_name_of_the_field(change: dict[str, Any], complaint: str) -> None:
    value = json.loads(HELLO.pack()) | change
    with pytest.raises(ProtocolError, match=complaint):
        Hello.unpack(json.dumps(value).encode())


@pytest.mark.parametrize("text", ["a\nb", "a\u202eb", "\x1b[2J", "a" * 256])
@pytest.mark.parametrize("name", ["engine", "host", "engine_version", "device"])
def test_a_name_that_cannot_be_shown_in_a_line_is_refused(name: str, text: str) -> None:
    """It could forge a line of the log, or could not be encoded in an answer."""
    with pytest.raises(ProtocolError, match=rf"hello: .*{name}") as refused:
        Hello.unpack(json.dumps(json.loads(HELLO.pack()) | {name: text}).encode())
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["model", "weights_id", "hash_probe"])
def test_names_of_a_namespace_are_printable(name: str) -> None:
    value = json.loads(HELLO.pack())
    value["namespace"][name] = "a\x00"
    with pytest.raises(ProtocolError, match=f"it.namespace.{name} is .*; allowed: printable characters"):
        Hello.unpack(json.dumps(value).encode())


def test_a_hello_with_half_a_surrogate_is_refused_by_the_service() -> None:
    """A path may have one. The engine must be able to send it, because an error there would stop the engine."""
    assert reason(Hello, replace(HELLO, engine="a\ud800").pack()) == "malformed"


def test_the_settings_of_an_engine_have_a_bound() -> None:
    assert HELLO.namespace is not None
    namespace = replace(HELLO.namespace, value_settings=tuple((f"s{number}", "x" * 4000) for number in range(5)))
    with pytest.raises(ProtocolError, match="allowed: 16384 characters in all texts together"):
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


def test_a_store_has_a_bound_of_its_own() -> None:
    keys = [b"key"] * (MOST_STORED + 1)
    assert calls.BeginStore.unpack(calls.BeginStore(keys[1:]).pack()).keys == keys[1:]
    with pytest.raises(ProtocolError, match=r"length <= 256 - at `\$.keys`"):
        calls.BeginStore.unpack(calls.BeginStore(keys).pack())


def test_descriptions_are_sent_in_messages_that_fit() -> None:
    block = BlockDescription(bytes(16_000))
    half_a_surrogate, too_long = block._replace(session_id="\ud800"), BlockDescription(bytes(17_000))
    blocks = [block, None, half_a_surrogate, too_long, *[block] * 252]
    sent = list(calls.DescribeStore.listed(7, blocks))
    assert [number for message in sent for number in message.numbers] == [0, *range(4, 256)]
    assert len(sent) < 20
    assert all(len(message.pack()) < calls.DescribeStore.MOST_BYTES for message in sent)
    assert [calls.DescribeStore.unpack(message.pack()) for message in sent] == sent
    assert list(calls.DescribeStore.listed(7, [None])) == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(b"tell" * 4097, "up to 16388 bytes"), (b"", "0 or more of them for tokens"), (b"tellm", "5 or more of them")],
)
def test_a_bad_description_is_refused_without_a_word_of_it(tokens: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words) as caught:
        calls.DescribeStore.unpack(calls.DescribeStore(7, (0,), (tokens,)).pack())
    assert "tell" not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        calls.DescribeStore(7, (0, 1), (b"tell",)),
        calls.DescribeStore(7, (0,), (b"tell",), (b"parent",) * 2),
        calls.DescribeStore(7, (0, 1), (b"tell",) * 2, session_ids=("trip",)),
    ],
)
def test_columns_of_other_lengths_are_refused(message: calls.DescribeStore) -> None:
    with pytest.raises(ProtocolError, match=r"[12] blocks, of which [12] have tokens"):
        calls.DescribeStore.unpack(message.pack())


def test_columns_are_made_of_descriptions_and_back() -> None:
    blocks = [DESCRIPTION, BlockDescription(b"tell"), BlockDescription(b"more", session_id="trip")]
    columns = DescribedBlocks.of(blocks)
    assert [BlockDescription(*fields) for fields in zip(*columns.columns(), strict=False)] == blocks
    assert repr(columns) == "DescribedBlocks(3 blocks)", "no tokens"
    assert repr(calls.DescribeStore(7, (0, 1, 2), *columns)) == "DescribeStore(7, 3 blocks)"
    assert columns.sizes() == [87, 4, 8]
    assert DescribedBlocks.of(blocks[1:2]) == ((b"tell",), (), (), (), (), (), ())

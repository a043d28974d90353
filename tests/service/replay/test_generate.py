import pytest

from kvstow.errors import ConfigError
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceShape, generate_trace


def test_a_seed_gives_one_trace_and_another_seed_another() -> None:
    first, again, other = (generate_trace(TraceShape(seed=seed)) for seed in (7, 7, 8))
    assert first == again != other


def test_an_id_always_follows_the_same_ids() -> None:
    prefixes: dict[int, tuple[int, ...]] = {}
    for request in generate_trace(TraceShape(sessions=50, seed=3)):
        for end, hash_id in enumerate(request.hash_ids):
            before = tuple(request.hash_ids[:end])
            assert prefixes.setdefault(hash_id, before) == before


def test_there_is_one_id_per_block_the_last_may_be_partial() -> None:
    for request in generate_trace(TraceShape(sessions=50, seed=3)):
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)


def test_conversations_grow_and_share_system_prompts() -> None:
    requests = generate_trace(TraceShape(sessions=40, turns=4, shared_prompts=2))
    blocks = [hash_id for request in requests for hash_id in request.hash_ids]
    firsts = {request.hash_ids[0] for request in requests}
    assert len(firsts) == 2
    assert len(set(blocks)) < len(blocks) / 2


def test_without_shared_prompts_conversations_share_nothing() -> None:
    requests = generate_trace(TraceShape(sessions=20, turns=1, shared_prompts=0))
    blocks = [hash_id for request in requests for hash_id in request.hash_ids]
    assert len(set(blocks)) == len(blocks)


def test_requests_are_in_order_of_time_and_limited() -> None:
    requests = generate_trace(TraceShape(), limit=30)
    assert len(requests) == 30
    assert [request.timestamp for request in requests] == sorted(request.timestamp for request in requests)


@pytest.mark.parametrize("shape", [{"sessions": 0}, {"turns": 0}, {"shared_prompts": -1}])
def test_a_shape_that_makes_no_sense_is_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(shape))} is"):
        TraceShape(**shape)


def test_a_limit_of_none_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="requests is 0"):
        generate_trace(TraceShape(), limit=0)

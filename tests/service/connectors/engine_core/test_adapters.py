"""LoRA adapters: their keys name what their files say, and they have none while that is not certain."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.service.connectors.engine_core.releases import (
    in_hub,
    released,
    rename,
    rename_above,
    rename_and_back,
    switch,
    switch_and_back,
)
from tests.service.connectors.engine_core.vllmhost import (
    ONE_GROUP,
    WITH_SHORT_WINDOW,
    FakeRequest,
    VllmHost,
    hashes_of,
    keys_of,
)

from kvstow_service.connectors.engine_core import adapters as module
from kvstow_service.connectors.engine_core import schedulerside, vllmprocess
from kvstow_service.connectors.engine_core.adapters import READ_SECONDS, Adapter, Adapters, EngineStart
from kvstow_service.connectors.engine_core.gpublocks import KnownHashes
from kvstow_service.connectors.engine_core.pathtrail import Trail
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

PROMPT = "abcdefghijkl"
SETTINGS = "{}"


def write(folder: Path, weights: str = "weights", config: str = "{}") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files_of(weights, config).items():
        (folder / name).write_text(content)
    return str(folder)


def files_of(weights: str, config: str = "{}") -> dict[str, str]:
    return {"adapter_config.json": config, "adapter_model.safetensors": weights}


def lora(path: str, number: int = 1, **more: Any) -> Any:
    return SimpleNamespace(lora_name="french", lora_int_id=number, lora_path=path, **more)


class Reader:
    """The thread that reads files, which runs when a test says so."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self.started = 0

    def start(self, target: Callable[[], None]) -> None:
        self._waiting.append(target)
        self.started += 1

    def run(self) -> None:
        for target in self._waiting:
            target()
        self._waiting = []


def make_adapters(
    started: float | None = None,
    *,
    settings: str = SETTINGS,
    reader: Reader | None = None,
    clock: Any = None,
    folders: Sequence[Path] = (),
) -> Adapters:
    """Those of an engine that starts now. Files are read at once, unless there is a `reader`."""
    moment = EngineStart.now(time.time() + 60 if started is None else started, folders)
    start = (lambda target: target()) if reader is None else reader.start
    return Adapters(settings, moment, clock=clock or FakeClock(), start_thread=start)


def ask(adapters: Adapters, path: str, number: int = 1, **more: Any) -> Adapter:
    found = adapters.of(SimpleNamespace(lora_request=lora(path, number, **more)))
    assert found is not None
    return found


def salt(path: str, **how: Any) -> bytes:
    return ask(make_adapters(**how), path).salt


def test_equal_files_have_one_name_wherever_they_lie(tmp_path: Path) -> None:
    assert salt(write(tmp_path / "a")) == salt(write(tmp_path / "b")) != b""


def test_each_byte_of_each_file_and_each_setting_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    others = [write(tmp_path / "b", "Weights"), write(tmp_path / "c", config="{ }"), write(tmp_path / "d")]
    (tmp_path / "d" / "adapter_model.bin").write_text("more")
    salts = [salt(path), *map(salt, others), salt(path, settings="other")]
    salts.append(ask(make_adapters(), path, is_3d_lora_weight=True).salt)
    assert len(set(salts)) == len(salts)


def test_one_thread_reads_all_adapters(tmp_path: Path) -> None:
    reader = Reader()
    adapters = make_adapters(reader=reader)
    asked = [ask(adapters, write(tmp_path / str(number)), number) for number in range(1, 4)]
    assert reader.started == 1
    reader.run()
    for number, adapter in enumerate(asked, 1):
        assert ask(adapters, str(tmp_path / str(number)), number) is adapter
        assert adapter.salt
    ask(adapters, write(tmp_path / "4"), 4)
    assert reader.started == 2, "the first one has ended"


def test_a_request_without_an_adapter_has_none() -> None:
    assert make_adapters().of(SimpleNamespace(lora_request=None)) is None


def test_a_mixed_hash_is_as_long_and_names_the_adapter(tmp_path: Path) -> None:
    one, other = ask(make_adapters(), write(tmp_path / "a")), ask(make_adapters(), write(tmp_path / "b", "other"))
    for length in (16, 32):
        block_hash = bytes(length)
        assert len(one.mix(block_hash)) == length
        assert len({block_hash, one.mix(block_hash), other.mix(block_hash), one.mix(bytes(length - 1) + b"1")}) == 4


def rewrite(path: str) -> None:
    (Path(path) / "adapter_model.safetensors").write_text("changed")


def replace(path: str) -> None:
    """As a program does that renames the new file, and gives it the old times."""
    file = Path(path) / "adapter_model.safetensors"
    new = file.with_name("new")
    new.write_text(file.read_text())
    os.utime(new, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    new.rename(file)


def touch_back(path: str) -> None:
    """Other bytes, as many, with the old times."""
    file = Path(path) / "adapter_model.safetensors"
    stat = file.stat()
    file.write_text("WEIGHTS")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def remove(path: str) -> None:
    (Path(path) / "adapter_config.json").unlink()


@pytest.mark.parametrize("change", [rewrite, replace, touch_back, remove])
def test_an_adapter_that_has_changed_has_no_keys_for_the_engines_life(
    tmp_path: Path, change: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    adapters, path = make_adapters(), write(tmp_path / "a")
    before = ask(adapters, path)
    assert before.is_named
    change(path)
    assert not ask(adapters, path).is_named
    assert "has changed" in before.reason
    write(tmp_path / "a")
    assert not ask(adapters, path).is_named
    assert len([record for record in caplog.records if "use no host cache" in record.message]) == 1


def test_what_cannot_be_seen_has_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllmprocess, "find_snapshot", lambda repository, revision: None)
    adapters = make_adapters()
    for path in (str(tmp_path / "absent"), "org/absent"):
        assert "in no folder" in ask(adapters, path).reason
    assert "in no folder" in ask(adapters, write(tmp_path / "a"), 2, tensorizer_config_dict={"uri": "x"}).reason


def write_snapshot(folder: Path, commit: str, weights: str = "weights") -> Path:
    """Of org/name, whose branch main is now this commit."""
    return in_hub(folder, commit, files_of(weights), is_main=True)


def use_hub(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The cache of the Hub is in this folder."""
    constants = SimpleNamespace(HF_HUB_CACHE=str(folder))
    patch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(constants=constants))


def test_a_repository_is_its_commit_until_its_branch_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(tmp_path, monkeypatch)
    first = write_snapshot(tmp_path, "1" * 40)
    adapters = make_adapters()
    adapter = ask(adapters, "org/name")
    assert adapter.salt == salt(write(tmp_path / "same")) != b""
    write_snapshot(tmp_path, "2" * 40, "other weights")
    assert not ask(adapters, "org/name").is_named
    assert ask(make_adapters(), "org/name").salt not in (b"", adapter.salt)
    assert "since this engine started" in ask(make_adapters(1.0), "org/name").reason
    late, later = (make_adapters(1.0, folders=[tmp_path]) for _ in range(2))
    assert ask(late, str(first)).salt == adapter.salt, "the Hub names what it downloads by its content"
    real = first / "adapter_config.json"
    content = real.read_text()
    real.unlink()
    real.write_text(content)
    assert str(real) in ask(later, str(first)).reason


def test_a_link_of_a_snapshot_that_is_changed_by_hand_is_noticed_once_its_adapter_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(tmp_path, monkeypatch)
    link = write_snapshot(tmp_path, "1" * 40) / "adapter_model.safetensors"
    other = write_snapshot(tmp_path, "2" * 40, "other weights") / "adapter_model.safetensors"
    adapters = make_adapters()
    adapter = ask(adapters, str(link.parent))
    assert adapter.is_named
    link.unlink()
    link.symlink_to(os.readlink(other))
    assert str(link) in ask(adapters, str(link.parent)).reason


def let_time_pass(folder: Path) -> None:
    """Until the file system has a later time than this moment: its clock is coarse."""
    now, file = time.time(), folder / "time"
    while not file.exists() or file.stat().st_ctime <= now:
        file.write_text("")


def rename_and_mark(folder: Path) -> None:
    """The new entry hides that the folder was renamed."""
    rename(folder)
    (folder / "current" / "ready").write_text("")


def released_adapters(folder: Path) -> Path:
    """Both versions are older than the engine, and so is the folder that `rename_above` puts in their place."""
    for place in (folder, folder / "other"):
        released(place, lambda version, name: write(version, f"weights {name}"))
    return folder


CHANGES = [switch, rename, rename_and_mark, rename_above, switch_and_back, rename_and_back]


@pytest.mark.parametrize("change", CHANGES)
def test_another_adapter_that_is_put_behind_the_path_has_no_keys(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The files are older than the engine. A rank may have loaded the adapter before it is first asked for."""
    folder = released_adapters(tmp_path / "adapters")
    let_time_pass(tmp_path)
    adapters, path = make_adapters(time.time()), str(folder / "current")
    let_time_pass(tmp_path)
    assert ask(make_adapters(), path).is_named
    change(folder)
    assert "since this engine started" in ask(adapters, path).reason


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_that_is_replaced_by_another_path_has_no_keys_any_more(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = released_adapters(tmp_path / "adapters")
    adapters, path = make_adapters(), str(folder / "current")
    adapter = ask(adapters, path)
    assert adapter.is_named
    change(folder)
    assert not adapter.check(now=True)
    assert "has changed since this engine has used it first" in adapter.reason


def test_adapters_may_be_added_beside_others(tmp_path: Path) -> None:
    """A folder that was there when the engine started may get entries, as the folder of all adapters does."""
    path = write(tmp_path / "adapters" / "old")
    adapters = make_adapters(time.time(), folders=[tmp_path / "adapters"])
    let_time_pass(tmp_path)
    new = write(tmp_path / "adapters" / "new")
    assert ask(adapters, path, 1).is_named
    assert "since this engine started" in ask(adapters, new, 2).reason


def test_files_that_cannot_be_read_or_are_too_large_have_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(module, "MOST_BYTES", 3)
        assert "at most" in ask(make_adapters(), path).reason

    def fail(*_: object) -> Any:
        raise OSError("input/output error")

    monkeypatch.setattr("hashlib.file_digest", fail)
    assert "input/output error" in ask(make_adapters(), path).reason


def test_a_file_that_changes_while_it_is_read_has_no_keys(tmp_path: Path) -> None:
    reader = Reader()
    adapters, path = make_adapters(reader=reader), write(tmp_path / "a")
    assert not ask(adapters, path).is_named
    reader.run()
    rewrite(path)
    assert "has changed" in ask(adapters, path).reason


def test_each_adapter_is_named_once_it_was_read(tmp_path: Path) -> None:
    reader = Reader()
    adapters = make_adapters(reader=reader)
    paths = [write(tmp_path / name) for name in "abc"]
    for number, path in enumerate(paths):
        ask(adapters, path, number)
    reader.run()
    assert all(ask(adapters, path, number).is_named for number, path in enumerate(paths))


def test_the_real_thread_ends_when_all_is_read(tmp_path: Path) -> None:
    import threading

    adapters, path = Adapters(SETTINGS, EngineStart.now(time.time() + 60)), write(tmp_path / "a")
    ask(adapters, path)
    for thread in threading.enumerate():
        if thread.name == "kvstow-adapters":
            thread.join(30)
    assert ask(adapters, path).is_named


# -- in the scheduler's half --------------------------------------------------------------------------------------


def keys_in(host: VllmHost) -> set[bytes]:
    return {bytes.fromhex(block.key) for block in host.engine.blocks(limit=1000).blocks}


def mixed(adapter: Adapter, tokens: str = PROMPT, group: int = 0) -> list[bytes]:
    return [group.to_bytes(2, "big") + adapter.mix(each) for each in hashes_of(tokens)]


def request_with(path: str, name: str = "r", tokens: str = PROMPT) -> FakeRequest:
    request = FakeRequest(name, tokens)
    request.lora_request = lora(path)
    return request


def run(host: VllmHost, request: FakeRequest) -> None:
    host.ask(request)
    host.run(request)
    host.step({request: 0})
    host.finish(request)
    host.step()
    host.step()


def test_blocks_are_stored_and_found_under_the_adapters_keys(tmp_path: Path) -> None:
    adapters, path = make_adapters(), write(tmp_path / "a")
    host = VllmHost(adapters=adapters)
    run(host, request_with(path))
    assert keys_in(host) == set(mixed(ask(adapters, path)))
    assert host.ask(request_with(path, "again", PROMPT + "mn")) == len(PROMPT)
    assert host.ask(FakeRequest("plain", PROMPT)) == 0, "the model without an adapter is another one"
    other = make_adapters()  # as another engine of the pool, whose files differ
    rewrite(path)
    elsewhere = VllmHost(adapters=other)
    elsewhere.store(*keys_in(host))
    assert elsewhere.ask(request_with(path)) == 0


def test_requests_without_an_adapter_have_the_keys_that_all_engines_give_them(tmp_path: Path) -> None:
    host = VllmHost(adapters=make_adapters())
    run(host, FakeRequest("r", PROMPT))
    assert keys_in(host) == set(keys_of(PROMPT))


def test_nothing_is_stored_or_found_once_the_files_have_changed(tmp_path: Path) -> None:
    adapters, path = make_adapters(), write(tmp_path / "a")
    host = VllmHost(adapters=adapters)
    run(host, request_with(path))
    stored = keys_in(host)
    rewrite(path)
    assert host.ask(request_with(path, "again")) == 0
    run(host, request_with(path, "other", "ABCDEFGH"))
    assert keys_in(host) == stored


def test_what_was_computed_after_a_change_is_not_stored(tmp_path: Path) -> None:
    """The change comes while a request runs, so its later tokens may be those of the new version."""
    adapters, path = make_adapters(), write(tmp_path / "a")
    host, request = VllmHost(adapters=adapters), request_with(path)
    host.ask(request)
    host.admit(request, 4)
    host.step({request: 4})
    host.step({request: 4})
    host.step({request: 4})
    before = keys_in(host)
    assert before == set(mixed(ask(adapters, path), PROMPT[:8])[: len(before)])
    assert before
    rewrite(path)
    host.step({request: 0})
    host.finish(request)
    host.step()
    host.step()
    assert keys_in(host) == before


def test_a_request_waits_for_the_digest_and_then_for_no_more(tmp_path: Path) -> None:
    reader, clock = Reader(), FakeClock()
    adapters, path = make_adapters(reader=reader, clock=clock), write(tmp_path / "a")
    host, request = VllmHost(adapters=adapters), request_with(path)
    assert host.side.find_hit(request, 0) is None
    reader.run()
    assert host.side.find_hit(request, 0) == 0
    slow, other = Reader(), write(tmp_path / "b")
    host = VllmHost(adapters=make_adapters(reader=slow, clock=clock))
    request = request_with(other)
    assert host.side.find_hit(request, 0) is None
    clock.advance(READ_SECONDS)
    assert host.side.find_hit(request, 0) == 0


def test_a_request_that_did_not_wait_is_stored_once_the_digest_is_known(tmp_path: Path) -> None:
    reader, clock = Reader(), FakeClock()
    adapters, path = make_adapters(reader=reader, clock=clock), write(tmp_path / "a")
    host, request = VllmHost(adapters=adapters), request_with(path)
    host.side.find_hit(request, 0)
    clock.advance(READ_SECONDS)
    host.run(request)
    host.step({request: 0})
    assert keys_in(host) == set()
    reader.run()
    host.finish(request)
    host.step()
    host.step()
    assert keys_in(host) == set(mixed(ask(adapters, path)))


def test_blocks_that_are_known_by_their_hash_alone_have_the_same_keys(tmp_path: Path) -> None:
    """Lazy stores see no request."""
    adapters, path = make_adapters(), write(tmp_path / "a")
    host = VllmHost(adapters=adapters, lazy_blocks=32)
    run(host, request_with(path))
    run(host, FakeRequest("plain", "ABCDEFGH"))
    for _ in range(3):
        host.step()
    assert keys_in(host) == {*mixed(ask(adapters, path)), *keys_of("ABCDEFGH")}


def known_hashes(most: int, *prompts: str) -> KnownHashes:
    """Those of requests without an adapter, which have ended."""
    known = KnownHashes({}, most)
    for prompt in prompts:
        known.add_ended(TrackedRequest(FakeRequest(prompt, prompt), 2))
    return known


def test_a_block_of_an_unknown_hash_is_not_stored() -> None:
    assert known_hashes(8, PROMPT).mix([*hashes_of(PROMPT), b"12345678"]) == [*hashes_of(PROMPT), None]


def test_the_hashes_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has evicted the blocks of the oldest requests by then."""
    bounds: list[int] = []
    monkeypatch.setattr(schedulerside, "KnownHashes", lambda requests, most: bounds.append(most))
    VllmHost(adapters=make_adapters(), gpu_blocks=17)
    assert bounds == [2 * 17]
    assert known_hashes(8, "ABCDEFGH", PROMPT).mix(hashes_of("ABCDEFGH")) == [None, None, *hashes_of("ABCDEFGH")[2:]]


def test_groups_with_a_window_have_the_adapters_keys(tmp_path: Path) -> None:
    adapters, path = make_adapters(), write(tmp_path / "a")
    host = VllmHost(WITH_SHORT_WINDOW, adapters=adapters)
    run(host, request_with(path))
    adapter = ask(adapters, path)
    assert keys_in(host) >= {*mixed(adapter), mixed(adapter, group=1)[-1]}
    assert all(key in {*mixed(adapter), *mixed(adapter, group=1)} for key in keys_in(host))


def test_the_files_are_compared_once_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, path = make_adapters(), write(tmp_path / "a")
    host, request = VllmHost(ONE_GROUP, adapters=adapters), request_with(path)
    host.ask(request)
    count = 0

    def changed_place(trail: Trail, original: Callable[[Trail], Any] = Trail.changed_place) -> Any:
        nonlocal count
        count += 1
        return original(trail)

    monkeypatch.setattr(Trail, "changed_place", changed_place)
    for _ in range(3):
        host.side.find_hit(request, 0)
    assert count <= 1
    host.admit(request, 4)
    host.step({request: 4})
    for _ in range(3):
        before = count
        host.step({request: 2})
        assert count == before + 1

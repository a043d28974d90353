import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstow_service.cli import app
from kvstow_service.replay.launcher import EngineLauncher
from kvstow_service.replay.result import AttachedResult, EngineLife, EngineResult, ReplayResult
from kvstow_service.replay.trace import TraceShape, generate_trace

FIELDS = {
    "requests", "blocks", "hit_blocks", "block_hit_rate", "stored_bytes", "loaded_bytes", "verified_bytes",
    "mismatches", "evicted_blocks", "dropped_stores", "load_gbps", "store_gbps", "seconds",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{request.to_line()}\n" for request in generate_trace(TraceShape(sessions=12))))
    return str(path)


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["replay", *arguments], input=stdin)


def test_the_json_has_the_documented_fields(trace: str) -> None:
    outcome = invoke(trace, "--slot-size", "1KiB", "--pool-slots", "100", "--ranks", "2", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    result = json.loads(outcome.stdout)
    assert result.keys() >= FIELDS
    assert result["block_hit_rate"] == result["hit_blocks"] / result["blocks"]
    assert (result["ranks"], result["slots"], result["policy"]) == (2, 100, "auto")


def test_the_summary_has_the_main_numbers(trace: str) -> None:
    outcome = invoke(trace, "--slot-size", "1KiB", "--pool-slots", "100")
    assert outcome.exit_code == 0
    names = [line[:16].strip() for line in outcome.stdout.splitlines()]
    assert names[:5] == ["requests", "pool", "hit ratio", "loaded", "stored"]
    assert names[5:] == ["dropped stores", "failed", "verified", "mismatches"]


def test_a_trace_from_standard_input_can_be_truncated(trace: str) -> None:
    outcome = invoke(
        "-", "--slot-size", "1KiB", "--requests", "7", "--json", "--policy", "lru", stdin=Path(trace).read_text()
    )
    assert outcome.exit_code == 0, outcome.stderr
    result = json.loads(outcome.stdout)
    assert (result["requests"], result["policy"]) == (7, "lru")


def test_wrong_bytes_are_exit_code_1(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ReplayResult(requests=3, blocks=10, hit_blocks=5)
    found.count_mismatches(["key a in block 0", "key b in block 1"])
    result = AttachedResult([EngineResult("replay-1", [EngineLife(found, end="finished")])], 2.0)
    monkeypatch.setattr(EngineLauncher, "run", lambda *_: result)
    outcome = invoke(trace, "--attach", "unix:/socket", "--json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout)["first_mismatches"] == ["key a in block 0", "key b in block 1"]


ATTACH = ("--attach", "unix:/a")
SIZES = ("--sizes", "8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--pool-slots", "0"), "'--pool-slots': 0 is not in the range x>=1"),
        (("--slot-size", "lots"), "--slot-size is 'lots'"),
        (("--shape", "gpt-2"), "--shape is 'gpt-2'; allowed: llama-3-8b or llama-3-70b-tp8 or mla-18k or gpt-oss-32k"),
        (("--shape", "mla-18k", "--slot-size", "1KiB"), "--slot-size is '1KiB'; allowed: --slot-size or --shape"),
        (("--policy", "fifo"), "--policy is 'fifo'; allowed: auto, lru"),
        (("--policy", "auto", "--policy", "lru"), "needs --sizes"),
        (("--concurrency", "0"), "'--concurrency': 0 is not in the range x>=1"),
        (("--rate", "-1"), "'--rate': -1.0 is not in the range x>0"),
        (("--kv-blocks", "2"), "--kv-blocks 2 needs --attach"),
        (("--kv-blocks", "0"), "'--kv-blocks': 0 is not in the range x>=1"),
        (("--ranks", "0"), "'--ranks': 0 is not in the range x>=1"),
        (("--engines", "2"), "--engines 2 needs --attach"),
        (("--prefill-rate", "0"), "'--prefill-rate': 0.0 is not in the range x>0"),
        (("--attach", "/run/kvstow.sock"), "--attach is '/run/kvstow.sock'; allowed: unix:PATH or unix:///PATH"),
        (("--attach", "unix://host/path"), "--attach is 'unix://host/path'; allowed: unix:PATH or unix:///PATH"),
        ((*ATTACH, "--policy", "lru"), "--policy lru cannot be used with --attach: the pool is the serv"),
        ((*ATTACH, "--kv-blocks", "2"), "the KV cache 2; allowed"),
        ((*ATTACH, "--rate", "1", "--time-scale", "1"), "not both"),
        ((*ATTACH, *SIZES), "--sizes 8 cannot be used with --attach"),
        (("--sizes", "0"), "1 slot or more"),
        (("--sizes", "1KiB"), "1 slot or more"),
        (("--sizes", "many"), "--sizes"),
        (("--sizes", ","), "separated by commas"),
        ((*SIZES, "--policy", "best"), "min, with foresight"),
        ((*SIZES, "--pool-slots", "8"), "--sizes has the sizes"),
        ((*SIZES, "--rate", "2"), "no bytes move"),
    ],
)
def test_invalid_options_are_exit_code_2_with_a_reason_and_start_nothing(
    trace: str, arguments: tuple[str, ...], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **named: pytest.fail("a process was started"))
    outcome = invoke(trace, *arguments)
    assert outcome.exit_code == 2
    assert complaint in outcome.stderr


def test_an_invalid_line_is_exit_code_2_and_located(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0}\n')
    outcome = invoke(str(tmp_path / "bad.jsonl"))
    assert outcome.exit_code == 2
    assert "bad.jsonl:1: input_length, output_length, hash_ids missing" in outcome.stderr


@pytest.mark.parametrize(
    ("command", "module"),
    [(("replay", "--attach=unix:/a"), "replay.driver"), (("replay", "--sizes=8"), "replay.hittable")],
)
def test_a_package_that_is_missing_is_named(
    trace: str, command: tuple[str, ...], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kvstow_service.cli.replay", raising=False)
    monkeypatch.setitem(sys.modules, f"kvstow_service.{module}", None)
    outcome = CliRunner().invoke(app, [*command, trace])
    assert outcome.exit_code == 1
    assert f"this command needs the package kvstow_service.{module}" in outcome.stderr


@pytest.mark.process
def test_a_replay_does_not_import_torch(trace: str) -> None:
    program = (
        "import sys; from kvstow_service.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the checkout need not be installed
    subprocess.run(
        [sys.executable, "-c", program, "replay", "--pool-slots=100", trace],
        check=True,
        capture_output=True,
        env=environ,
    )


# -- a table of sizes and policies -------------------------------------------------------------------------------------

TABLE = ("--sizes", "50,2MiB,20", "--slot-size", "8KiB", "--ranks", "2")


def test_a_table_has_the_hits_of_each_size_and_policy(trace: str) -> None:
    policies = ("--policy", "auto", "--policy", "lru", "--policy", "min")
    outcome = invoke(trace, *TABLE, *policies, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert [(size["slots"], size["bytes"]) for size in found["sizes"]] == [
        (20, 20 << 14), (50, 50 << 14), (128, 2 << 20),
    ]  # fmt: skip
    for size in found["sizes"]:
        ratios = size["ratios"]
        assert list(ratios) == ["auto", "lru", "min"]
        assert all(0 <= ratio <= ratios["min"] + 1e-9 for ratio in ratios.values())
    assert found["sizes"][-1]["ratios"]["min"] <= found["everything"]
    single = json.loads(invoke(trace, "--slot-size=1KiB", "--pool-slots=50", "--policy=lru", "--json").stdout)
    assert found["sizes"][1]["ratios"]["lru"] == pytest.approx(single["block_hit_rate"])


def test_a_table_is_printed(trace: str) -> None:
    outcome = invoke(trace, *TABLE)
    lines = outcome.stdout.splitlines()
    assert lines[0].split() == ["SLOTS", "SIZE", "AUTO", "LRU"]
    assert lines[1].split()[:3] == ["20", "320", "KiB"]
    assert lines[1].endswith(" %")
    assert "without evictions" in lines[-1]


def test_only_what_was_looked_up_counts_in_a_table(tmp_path: Path) -> None:
    """The GPU had the first block of each, and the last one was computed."""
    path = tmp_path / "recorded.jsonl"
    line = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1, 2, 3, 4], "looked_up": [1, 3]}
    path.write_text("\n".join(json.dumps({**line, "timestamp": number}) for number in range(3)))
    found = json.loads(invoke(str(path), "--sizes", "8", "--policy", "lru", "--json").stdout)
    assert (found["blocks"], found["everything"]) == (6, pytest.approx(2 / 3))
    assert found["sizes"][0]["ratios"]["lru"] == pytest.approx(2 / 3)

"""The table at the top of the README: the time to the first token of a prompt that is computed again, that has its
prefix on the GPU, and that has it on the host, with KVStow and with other connectors.

    python3 -m bench.vllm headline [--shape 8b] [--graphs none] [--connectors ...] [--turns 2] [--seconds 500]
        [--quick] [--resume DIR] [--out DIR]
    python3 -m bench.vllm headline --table DIR

A row is a process with one connector, and the connectors take turns. Rows in `headline*.jsonl` of `--resume` are not
measured again, and no row begins that would not end within `--seconds`. So a machine that is available for minutes
makes some rows, and the next one makes the others. Each row also has the rates of a large copy and of the kernel that
reads host memory, and the time of a loop of Python, because machines differ. If a way gave a wrong answer, the table
has no times of it (`bench.vllm.firsttokens`). Writes `headline.jsonl` and `headline.md`. `--table` makes the tables of
all rows in a folder.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from bench.report import Table
from bench.vllm import firsttokens
from bench.vllm.firsttokens import Work
from bench.vllm.process import run
from bench.vllm.results import (
    Nodes,
    Results,
    add_engines,
    add_resuming,
    make_parser,
    name_of,
    open_results,
    plain_setup,
    read_rows,
    rows_of,
    shape_of,
)

_TIMEOUT = 300.0
_FIRST, _FIRST_QUICK = 150.0, 60.0  # the assumed seconds of a row until one was measured
_MARGIN = 1.15
_BLOCKS, _BLOCKS_QUICK = 18000, 8000  # of 16 tokens: 16 prompts of 16,007, or 6
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_POOLS, _POOLS_QUICK = {"8b": 48.0, "tp8": 18.0}, {"8b": 24.0, "tp8": 10.0}  # GiB
_LABELS = ("shape", "graphs", "attention", "connector", "turn")

Row = dict[str, Any]


def label_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _LABELS)


def tables(rows: Iterable[Row]) -> list[Table]:
    """Make a table for each model and kind of graphs."""
    kinds: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["shape"], row["graphs"], row["attention"]), []).append(row)
    return [table for kind, these in kinds.items() for table in (_hits(kind, these), _others(kind, these))]


def _hits(kind: tuple[str, str, str], rows: list[Row]) -> Table:
    cases = [(case["tokens"], case["new"]) for case in rows[0]["cases"]]
    title = f"{kind[0]}, graphs: {kind[1]}, {kind[2]}: first token in ms, medians (in brackets: prefix on the GPU)"
    head = ["connector", *(f"{tokens:,}" + (f" and {new:,} new" if new else "") for tokens, new in cases)]
    head += ["right answers", "link, kernel: GB/s", "loop of the host, ms", "start, s"]
    lines = []
    for row in rows:
        same = [_machine(row), f"{statistics.median(row['host']):.1f}", f"{row['start_seconds']:.0f}"]
        if row["connector"] == "none":
            cells = [f"{_median(case['recompute'])} ({_median(case['gpu'])})".strip() for case in row["cases"]]
            told = f"{row['distinct']} different of {row['of']}"
            lines.append(["computed again", *cells, told, *same])
        for way in row["cases"][0]["ways"]:
            right = sum(case["right"].get(way, 0) for case in row["cases"])
            compared = sum(case["compared"] for case in row["cases"])
            computed = sum(case["computed"].get(way, 0) for case in row["cases"])
            answers = f"{right} of {compared}" + (f", {computed} of them computed again" if computed else "")
            cells = [_hit(case, way) for case in row["cases"]]
            name = row["connector"] + {"auto": "", "hit": "", "async": ", whole load first"}[way]
            lines.append([name, *cells, answers, *same])
    return Table(title, head, lines)


def _hit(case: Row, way: str) -> str:
    if case["right"].get(way, 0) < case["compared"]:
        return "wrong answers"
    return f"{_median(case['ways'][way])} ({_median(case['gpu'])})"


def _others(kind: tuple[str, str, str], rows: list[Row]) -> Table:
    title = f"{kind[0]}, graphs: {kind[1]}, {kind[2]}: at once, and beside requests that decode"
    head = ["connector", "at once: mean first token, ms", "last one, ms", "first tokens as alone"]
    head += ["share of undisturbed steps", "longest step, ms", "undisturbed", "steps after a store, ms more", "choices"]
    lines = []
    for row in rows:
        decoding = row["decoding"]
        for way in {burst["way"]: None for burst in row["bursts"]}:
            these = [burst for burst in row["bursts"] if burst["way"] == way]
            right = f"{sum(burst['right'] for burst in these)} of {sum(burst['of'] for burst in these)}"
            cells = [_median([burst["mean"] for burst in these]), _median([burst["last"] for burst in these]), right]
            beside = [""] * 5
            if decoding is not None and way in ("auto", "hit"):
                beside = [f"{decoding['share']:.2f}", f"{decoding['gap']:.1f}", f"{decoding['step']:.1f}"]
                beside += [f"{decoding['stored']:+.1f}", _choices(decoding["chosen"])]
            lines.append([f"{row['connector']}, {way}", *cells, *beside])
    return Table(title, head, lines)


def _choices(chosen: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in chosen.items())


def _machine(row: Row) -> str:
    return row["machine"] if row["link"] is None else f"{row['link']:.1f}, {row['kernel']:.1f}"


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else ""


def _measure(options: argparse.Namespace, results: Results, known: set[tuple[Any, ...]]) -> None:
    began, longest = time.monotonic(), _FIRST_QUICK if options.quick else _FIRST
    shape, work = shape_of(options), firsttokens.QUICK if options.quick else Work()
    blocks = _BLOCKS_QUICK if options.quick else _BLOCKS
    given: dict[str, Any] = {"max_tokens": 40000, "gpu_blocks": blocks, "gpu_share": 0.85, "graph_sizes": _SIZES}
    if options.tiny:
        work = firsttokens.TINY
        given = {"max_tokens": 2048, "gpu_blocks": 600}
    is_measured = False
    with plain_setup(options, shape="tiny" if options.tiny else options.shape, tiny_pool=0.25, **given) as plain:
        for turn in range(options.turns):
            for connector in options.connectors:
                labels = {name: getattr(options, name) for name in _LABELS[:3]}
                labels |= {"connector": name_of(connector), "turn": turn}
                if label_of(labels) in known:
                    continue
                if time.monotonic() - began + _MARGIN * longest > options.seconds:
                    results.add("left", **labels)
                    continue
                at = time.monotonic()
                with ExitStack() as stack:
                    nodes = Nodes(stack, plain.pool_bytes)

                    def once(connector: str = connector, nodes: Nodes = nodes) -> Any:
                        setup = replace(plain, connector=connector, node=nodes.of(connector))
                        return run(_TIMEOUT, firsttokens.measure, setup, shape, work)

                    results.attempt("headline", once, **labels)
                longest = max(longest, time.monotonic() - at) if is_measured else time.monotonic() - at
                is_measured = True


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.table is not None:
        for table in tables(read_rows("headline", options.table)):
            print(f"{table.to_markdown()}\n")
        return 0
    if options.pool is None:
        options.pool = (_POOLS_QUICK if options.quick else _POOLS).get(options.shape, 24.0)
    before = read_rows("headline", options.resume)
    results = open_results("headline", options)
    _measure(options, results, {label_of(row) for row in before})
    for table in tables([*before, *rows_of("headline", results.path)]):
        results.show(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("headline", __doc__, shape=True)
    parser.add_argument("--turns", type=int, default=2, help="processes of each connector; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=500.0, help="in which all rows must end; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer prompts and pairs, for a machine lent for minutes")
    add_resuming(parser, "headline")
    parser.add_argument("--attention", default="FLASH_ATTN", help="vLLM's attention backend; default: %(default)s")
    add_engines(parser, ["none", "kvstow", "simple", "attached", "offloading"], pool=None, graphs="full")
    return parser

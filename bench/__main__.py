"""`python -m bench`: runs the named benchmarks, or all of them, and records their figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import (
    admin,
    agents,
    attach,
    compatibility,
    control,
    disk,
    diskfaults,
    diskrates,
    holds,
    policy,
    policytraces,
    populate,
    retention,
    startup,
    steps,
    tier,
)
from bench.machine import describe
from bench.report import PAGE, Table, page, record

_ROOT = Path(__file__).parents[1]
_Run = Callable[[argparse.Namespace, Callable[[str], None]], list[Table]]
BENCHMARKS: dict[str, _Run] = {
    "control": lambda options, say: control.run(options.sizes, options.repeats, say),
    "holds": lambda options, say: holds.run(say),
    "trace": lambda options, say: control.run_trace(_conversations(options), control.TRACE_SIZES, say),
    "policy": lambda options, say: policy.run(options.cases, say),
    "curve": lambda options, say: policy.run_curves(policy.CURVES, say),
    "retention": lambda options, say: retention.run(_conversations(options), say),
    "agents": lambda options, say: agents.run(
        options.trace or agents.TRACE, options.slots, options.clients, options.gpu_blocks, say
    ),
    "steps": lambda options, say: steps.run(options.sizes, options.repeats, say),
    "admin": lambda options, say: admin.run(options.admin_slots, options.seconds, say),
    "startup": lambda options, say: startup.run(options.pools, options.repeats + 2, say),
    "populate": lambda options, say: populate.run(options.repeats, say),
    "attach": lambda options, say: attach.run(options.repeats, say),
    "tier": lambda options, say: tier.run(options.repeats, say),
    "disk": lambda options, say: disk.run(tuple(disk.CASES), say),
    "diskfaults": lambda options, say: diskfaults.run(options.repeats, options.seconds, say),
    "diskrates": lambda options, say: diskrates.run(options.folder, options.repeats + 2, options.seconds, say),
}
_NAMED_ONLY = {"diskfaults", "diskrates"}
"""They run only if they are named: the first needs root, and the second fio and 20 GiB on a disk."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.benchmarks == ["page"]:
        PAGE.write_text(page())
        return 0
    if options.benchmarks == ["compatibility"]:
        compatibility.main()
        return 0
    names = options.benchmarks or BENCHMARKS.keys() - _NAMED_ONLY
    if {"control", "trace"} & set(names) and not control.vllm_is_there():
        _say("no .venv-vllm: `make venv-vllm` makes it; KVStow is measured alone")
    for name in (name for name in BENCHMARKS if name in names):
        if name == "trace" and not _conversations(options).exists():
            _say(f"no trace at {_conversations(options)}: pass --trace")
            continue
        load = os.getloadavg()[0]
        tables = BENCHMARKS[name](options, _say)
        if tables and not options.no_record:
            record(name, f"{describe()}; load {load:.1f} before, {os.getloadavg()[0]:.1f} after", tables)
        _say("\n\n".join(table.to_markdown() for table in tables))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "benchmarks",
        nargs="*",
        choices=[*BENCHMARKS, "page", "compatibility", []],
        help=f"default: all but {' and '.join(sorted(_NAMED_ONLY))}; page: make README.md anew; "
        "compatibility: make docs/compatibility.md of build/results",
    )
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure")
    parser.add_argument("--sizes", type=int, nargs="+", default=control.SIZES, metavar="SLOTS")
    parser.add_argument("--trace", type=Path, help=f"for agents, by default {agents.TRACE.relative_to(_ROOT)}")
    parser.add_argument("--slots", type=int, nargs="+", default=agents.SLOTS, help="pools of the agents benchmark")
    parser.add_argument(
        "--clients", nargs="+", default=agents.CLIENTS, choices=agents.CLIENTS, help="columns of the agents benchmark"
    )
    parser.add_argument("--cases", nargs="+", default=policy.CASES, choices=policy.CASES, help="policy: these tables")
    parser.add_argument("--gpu-blocks", type=int, help="agents: the pools are behind a GPU that caches so many blocks")
    parser.add_argument("--no-record", action="store_true", help="print the tables, and keep the recorded results")
    parser.add_argument("--admin-slots", type=int, default=1_000_000)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="length of each phase: admin, diskfaults, diskrates"
    )
    parser.add_argument("--folder", type=Path, help="diskrates: on the disk; default: the working directory")
    parser.add_argument("--pools", nargs="+", default=["256MiB", "16GiB"], metavar="SIZE")
    return parser


def _conversations(options: argparse.Namespace) -> Path:
    """Return the public trace of conversations, unless another one is given."""
    return options.trace or policytraces.DATA / "conversation_trace.jsonl"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

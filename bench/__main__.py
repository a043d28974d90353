"""`python -m bench`: run the benchmarks that are named, or all, and record their figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import admin, attach, control, policy, populate, retention, startup, steps, tier
from bench.machine import describe
from bench.report import PAGE, Table, page, record

_ROOT = Path(__file__).parents[1]
BENCHMARKS = (
    *("control", "trace", "policy", "curve", "retention", "steps", "admin", "startup", "populate", "attach", "tier"),
)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.benchmarks == ["page"]:
        PAGE.write_text(page())
        return 0
    names = options.benchmarks or BENCHMARKS
    if {"control", "trace"} & set(names) and not control.vllm_is_there():
        _say("no .venv-vllm: `make venv-vllm` makes it; KVStow is measured alone")
    for name in BENCHMARKS:
        if name in names:
            load = os.getloadavg()[0]
            tables = _run(name, options)
            if tables:
                record(name, f"{describe()}; load {load:.1f} before, {os.getloadavg()[0]:.1f} after", tables)
            _say("\n\n".join(table.to_markdown() for table in tables))
    return 0


def _run(name: str, options: argparse.Namespace) -> list[Table]:
    if name == "control":
        return control.run(options.sizes, options.repeats, _say)
    if name == "trace":
        if not options.trace.exists():
            _say(f"no trace at {options.trace}: pass --trace")
            return []
        return control.run_trace(options.trace, control.TRACE_SIZES, _say)
    if name == "policy":
        return policy.run(tuple(policy.POOLS), _say)
    if name == "curve":
        return policy.run_curves(tuple(policy.CURVES), _say)
    if name == "retention":
        return retention.run(options.trace, _say)
    if name == "steps":
        return steps.run(options.sizes, options.repeats, _say)
    if name == "admin":
        return admin.run(options.admin_slots, options.seconds, _say)
    if name == "startup":
        return startup.run(options.pools, options.repeats + 2, _say)
    if name == "attach":
        return attach.run(options.repeats, _say)
    if name == "tier":
        return tier.run(options.repeats, options.trace, _say)
    return populate.run(options.repeats, _say)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "benchmarks", nargs="*", choices=[*BENCHMARKS, "page", []], help="default: all; page: make README.md anew"
    )
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure")
    parser.add_argument("--sizes", type=int, nargs="+", default=control.SIZES, metavar="SLOTS")
    parser.add_argument("--trace", type=Path, default=_ROOT.parent / "shared" / "data" / "conversation_trace.jsonl")
    parser.add_argument("--admin-slots", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each phase of the admin benchmark")
    parser.add_argument("--pools", nargs="+", default=["256MiB", "16GiB"], metavar="SIZE")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

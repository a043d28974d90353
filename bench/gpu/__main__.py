"""`python3 -m bench.gpu --out DIR`: runs the named benchmarks, or all of them, each in its own process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = ("rates", "submit", "token", "drive", "pinning", "parts", "attach")

_ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", choices=[*BENCHMARKS, []], help="default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="DIR")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.benchmarks or BENCHMARKS
    return max(_run(name, options.out.resolve()) for name in BENCHMARKS if name in names)


def _run(name: str, out: Path) -> int:
    """Run a benchmark, and return its exit status. A bare checkout is enough: KVStow need not be installed."""
    paths = [*(str(_ROOT / part) for part in ("engine", "api", "service", "")), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OUT": str(out), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    print(f"## {name}", flush=True)
    return subprocess.run([sys.executable, "-m", f"bench.gpu.{name}"], env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())

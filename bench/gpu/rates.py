"""Rates of stores, loads and both together by page size, compared with the rate of one large copy.

    python3 -m bench.gpu.rates [--gib 2] [--out DIR]

KVStow is measured through its worker, from the submission until the host knows that the bytes have arrived. Writes
`rates.json` and `rates.png`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gpu import figures
from bench.gpu.plain import Give, PlainCopies, first
from bench.gpu.rank import BOTH, GIB, KIB, KVCache, Shape
from bench.report import Table, verdict
from kvstow.devices.cuda.plan import Copies
from kvstow.messages import Direction

SHAPES = (
    Shape(4 * KIB, 80),
    Shape(8 * KIB, 80),  # Llama 70B on 8 GPUs
    Shape(16 * KIB, 64),
    Shape(18 * KIB, 61),  # multi-head latent attention, as in DeepSeek
    Shape(32 * KIB, 64),
    Shape(64 * KIB, 32),  # Llama 3 8B
    Shape(128 * KIB, 32),
    Shape(256 * KIB, 32),
    Shape(512 * KIB, 32),
    Shape(1024 * KIB, 32),
    Shape(2048 * KIB, 32),
)
WAYS = {
    "auto": "KVStow, its own choice",
    "staged": "KVStow, staged",
    "direct": "KVStow, direct",
    "batch": "one cuMemcpyBatchAsync of all pages",
    "page": "a cuMemcpyAsync for each page",
}
DIRECTIONS: dict[str, tuple[Direction, ...]] = {"store": ("store",), "load": ("load",), "both": BOTH}
BARS = {"store": 0.95, "load": 0.95, "both": 0.90}

_TICKS = (4, 16, 64, 256, 1024)  # KiB
_REPEATS = 5
_MOST_CALLS = 1 << 16  # calls of cuMemcpyAsync in one measurement; more would take longer without changing the rate
_SLOW_PAGE, _SLOW_REPEATS = 32 * KIB, 2  # copying smaller pages one by one takes up to a second, so it is repeated less


@dataclass(frozen=True, slots=True)
class Rate:
    """The median of some repeats. `share` is relative to the limit in the same direction, which is measured beside
    it."""

    page_kib: int
    layers: int
    way: str
    direction: str
    gb_per_second: float
    share: float


def measure(shape: Shape, num_bytes: int) -> list[Rate]:
    cache = KVCache(shape, num_bytes)
    limit, rates = _plain_rates(cache)
    for way in ("staged", "direct", "auto"):
        rates |= {(way, name): rate for name, rate in _worker_rates(cache, way).items()}
    return [
        Rate(shape.page_bytes // KIB, shape.layers, way, name, rate / 1e9, rate / limit[name])
        for (way, name), rate in rates.items()
    ]


def _plain_rates(cache: KVCache) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Return the limit by direction, and the rates by way and direction."""
    with cache.pool() as (pool, _):
        plain = PlainCopies(cache, pool)

        def by_direction(give: Give, copies: Copies, repeats: int) -> dict[str, float]:
            return {
                name: _median(partial(plain.rate, give, copies, directions), repeats)
                for name, directions in DIRECTIONS.items()
            }

        limit = by_direction(plain.give, plain.large, _REPEATS)
        repeats = _repeats(cache.shape)
        batch = by_direction(plain.give, plain.pages, repeats)
        page = by_direction(plain.give_each, first(plain.pages, _MOST_CALLS), repeats)
    ways = {"limit": limit, "batch": batch, "page": page}
    return limit, {(way, name): rate for way, rates in ways.items() for name, rate in rates.items()}


def _worker_rates(cache: KVCache, strategy: str) -> dict[str, float]:
    repeats = _repeats(cache.shape) if strategy == "direct" else _REPEATS
    with cache.worker(strategy=strategy) as traffic:
        num_bytes = {"both": 2 * traffic.half_bytes}
        return {
            name: num_bytes.get(name, traffic.num_bytes) / _median(partial(traffic.seconds, directions), repeats)
            for name, directions in DIRECTIONS.items()
        }


def _repeats(shape: Shape) -> int:
    return _SLOW_REPEATS if shape.page_bytes < _SLOW_PAGE else _REPEATS


def _median(measure_once: Callable[[], float], repeats: int) -> float:
    measure_once()  # a warm-up, which loads kernels and touches the link's buffers
    return statistics.median(measure_once() for _ in range(repeats))


def table(rates: Sequence[Rate]) -> Table:
    """Make a table of store / load / both for each way, relative to the limit."""
    found = {(rate.page_kib, rate.layers, rate.way, rate.direction): rate for rate in rates}
    rows = []
    for page, layers in dict.fromkeys((rate.page_kib, rate.layers) for rate in rates):
        limit = " / ".join(f"{found[page, layers, 'limit', name].gb_per_second:.1f}" for name in DIRECTIONS)
        shares = {way: [found[page, layers, way, name].share for name in DIRECTIONS] for way in WAYS}
        met = all(share >= bar for share, bar in zip(shares["auto"], BARS.values(), strict=True))
        cells = [" / ".join(f"{share:.3f}" for share in shares[way]) for way in WAYS]
        rows.append([f"{page} KiB x {layers}", limit, *cells, verdict(met)])
    head = ["page x layers", "limit, GB/s", *WAYS.values(), "bar 0.95 / 0.95 / 0.90"]
    return Table("Store / load / both together, as parts of the limit", head, rows)


def draw(rates: Sequence[Rate], path: Path) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    for axes, (name, bar) in zip(panels, BARS.items(), strict=True):
        for way, label in WAYS.items():
            points = [(rate.page_kib, rate.share) for rate in rates if (rate.way, rate.direction) == (way, name)]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.axhline(bar, color="black", linestyle="--", linewidth=0.8, label="bar")
        axes.set_xscale("log", base=2)
        axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
        axes.set_title({"store": "stores", "load": "loads", "both": "both together"}[name])
        axes.set_xlabel("page, KiB")
        axes.set_ylim(0, 1.05)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("rate, part of one large copy's")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=64)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="bytes that each measurement moves")
    figures.add_folder(parser)
    options = parser.parse_args(argv)
    rates: list[Rate] = []
    for shape in SHAPES:
        rates += measure(shape, int(options.gib * GIB))
        print(shape, flush=True)
    figures.write(options.out / "rates.json", rates=rates)
    figures.show(table(rates))
    draw(rates, options.out / "rates.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

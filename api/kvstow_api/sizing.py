"""What the curve of a pool says about its size: the next size that is worth its memory, the smallest that would do, and
what a disk below the memory would bring.

This module alone has these rules and their words, so the API, the doctor, the status page and `kvstow top` say the
same. Until the pool has seen as many distinct blocks as a size has slots, the hits of that size can only grow. So there
is no advice before the pool has seen enough blocks to fill its own size, and the figures of larger sizes that it has
not seen enough blocks for are lower bounds. No web framework.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

from kvstow.bytesize import format_size
from kvstow.status import CurveEvidence, SizeCurve
from kvstow_api.answers import PoolCurveView, SizeView
from kvstow_api.texts import counted, duration, percent

GAIN = 0.02
"""A larger size is worth its memory if each doubling up to it adds this share of the blocks, on the average. The curve
is off by less than one point on the average, and by three at most."""
LOSS = 0.005
"""A smaller size would do if it loses no more than this share in total."""
REST = 0.01
"""A size is the end of the curve if all larger ones together would add less than this share."""
DISK_TIMES = 8
"""The advice on disks considers sizes of at least this many times the memory."""
_MEMORY = {1: "twice the memory", 2: "four times the memory", 3: "eight times the memory"}
_PARTS = {-1: "half of it", -2: "a quarter of it", -3: "an eighth of it"}


def too_early(evidence: CurveEvidence) -> str:
    """Return a sentence: what the pool must see before it has a curve, and about how long that takes."""
    if evidence.seen < evidence.needed_seen:
        words = f"the pool has seen {evidence.seen:,} of {counted(evidence.needed_seen, 'distinct block')} that fill it"
    else:
        requests, blocks = evidence.needed_requests, evidence.needed_blocks
        words = (
            f"since the pool was full, {min(evidence.requests, requests):,} of {requests:,} requests have begun, and "
            f"they have looked up {min(evidence.blocks, blocks):,} of {blocks:,} blocks"
        )
    return f"too early to tell: {words}{_time_left(evidence.seconds_left)}"


def _time_left(seconds: float | None) -> str:
    return "" if seconds is None else f"; about {duration(seconds)} more at the pace so far"


def with_sizes(
    view: PoolCurveView, curve: SizeCurve, evidence: CurveEvidence, seconds_per_ratio: float | None
) -> PoolCurveView:
    """Return `view` with what follows from `curve`, or `view` as it is if the curve has no point near its size. The
    points are a doubling apart. `seconds_per_ratio`: how many seconds of prefill would be saved in a minute if all
    looked-up blocks hit; None if unknown."""
    points = [point for point in curve.points if point.num_slots > 0]
    if not points or view.num_slots < 1:
        return view
    distances = [abs(math.log2(point.num_slots / view.num_slots)) for point in points]
    at = distances.index(min(distances))
    if distances[at] > 0.5:
        return view
    ratios = accumulate([point.ratio for point in points], max)  # a larger pool does not hit less; that is noise
    slot_bytes = view.num_bytes // view.num_slots
    sizes = [
        SizeView(
            num_slots=point.num_slots,
            num_bytes=point.num_slots * slot_bytes,
            times=point.num_slots / points[at].num_slots,
            ratio=ratio,
            error=point.error,
            at_least=point.at_least,
            seen_blocks=point.seen_blocks,
            seconds_left=point.seconds_left,
        )
        for point, ratio in zip(points, ratios, strict=True)
    ]
    now, everything, larger = sizes[at], sizes[-1].ratio, enumerate(sizes[at + 1 :], 1)
    found = replace(view, requests=curve.requests, blocks=curve.blocks, items=sizes, everything=everything)
    if now.at_least:
        return replace(found, advice=too_early(evidence))
    found = replace(
        found,
        next_useful=next((size for doublings, size in larger if size.ratio - now.ratio >= GAIN * doublings), None),
        enough=next((size for size in sizes[:at] if now.ratio - size.ratio <= LOSS), None),
        end=next((size for size in sizes[at:] if everything - size.ratio < REST), None),
        disk_advice=_of_disks(sizes[at:]),
    )
    seen = f"seen in the last {counted(curve.requests, 'request')}, {counted(curve.blocks, 'block')}"
    return replace(found, advice=f"{'; '.join(_parts(found, at, seconds_per_ratio))} ({seen})")


def _parts(view: PoolCurveView, at: int, seconds_per_ratio: float | None) -> list[str]:
    now, larger, smaller, largest = view.items[at], view.next_useful, view.enough, view.items[-1]
    if largest.ratio < GAIN:
        return [f"no size would help{_so_far(largest)}: {_would_hit(largest)} of the blocks"]

    def named(size: SizeView) -> str:
        doublings = view.items.index(size) - at
        words = {**_MEMORY, **_PARTS}.get(doublings, f"{2.0**doublings:g} times the memory")
        return f"{words} ({format_size(size.num_bytes)})"

    parts = []
    if larger is not None:
        gain = larger.ratio - now.ratio
        parts.append(
            f"{named(larger)} would add {_least(larger)}{_points(gain)}{_so_far(larger)} to the "
            f"{percent(now.ratio)} of blocks that hit{_worth(gain, seconds_per_ratio)}"
        )
        parts.append(_rest(view.end, larger, now, largest))
    if smaller is not None and (larger is None or now.ratio >= GAIN):
        parts.append(
            f"{named(smaller)} would do, and hit {percent(smaller.ratio)} of the blocks instead of {percent(now.ratio)}"
        )
    if not parts:
        next_size = view.items[at + 1] if at + 1 < len(view.items) else None
        is_known = next_size is None or not next_size.at_least
        parts.append(f"{'the size fits, and ' if is_known else ''}{percent(now.ratio)} of the blocks hit")
        if at > 0:
            parts.append(f"half of it would lose {_points(now.ratio - view.items[at - 1].ratio)}")
        if next_size is not None and is_known:
            parts.append(f"twice the memory would add {_points(next_size.ratio - now.ratio)}")
        elif next_size is not None:
            parts.append(
                f"too early to tell what twice the memory would add: {next_size.seen_blocks:,} of "
                f"{counted(next_size.num_slots, 'distinct block')} were seen that fill it"
                f"{_time_left(next_size.seconds_left)}"
            )
    return parts


def _of_disks(sizes: list[SizeView]) -> str | None:
    """Return a sentence: what a disk below the memory would add, by the sizes that are far above it. The first of the
    `sizes` is that of the pool."""
    now, far = sizes[0], [size for size in sizes if size.times >= DISK_TIMES * sizes[0].times]
    if not far:
        return None
    largest = far[-1]
    found = next(size for size in far if largest.ratio - size.ratio < REST)
    gain = found.ratio - now.ratio
    if gain < GAIN:
        return f"disks below the memory would add less than {_points(GAIN)}{_so_far(largest)}"
    return (
        f"disks of {format_size(found.num_bytes)} below the memory would add {_least(found)}{_points(gain)}"
        f"{_so_far(found)} to the {percent(now.ratio)} of blocks that hit"
    )


def _least(size: SizeView) -> str:
    return "at least " if size.at_least else ""


def _so_far(size: SizeView) -> str:
    return " so far" if size.at_least else ""


def _would_hit(largest: SizeView) -> str:
    return f"a pool of {format_size(largest.num_bytes)} would hit {percent(largest.ratio)}"


def _rest(end: SizeView | None, larger: SizeView, now: SizeView, largest: SizeView) -> str:
    if end is None or end == largest:
        return f"{_would_hit(largest)}{_so_far(largest)}"
    if end == larger:
        return f"above that less than a point is left{_so_far(largest)}"
    gain = _points(end.ratio - now.ratio)
    return (
        f"{format_size(end.num_bytes)} would add {_least(end)}{gain}, and above that less than a point is left"
        f"{_so_far(largest)}"
    )


def _worth(gain: float, seconds_per_ratio: float | None) -> str:
    return "" if seconds_per_ratio is None else f", {duration(gain * seconds_per_ratio)} of prefill a minute"


def _points(share: float) -> str:
    """
    >>> _points(0.09), _points(0.004), _points(0.01)
    ('9 points', '0.4 points', '1 point')
    """
    words = f"{100 * share:.1f}".removesuffix(".0")
    return f"{words} {'point' if words == '1' else 'points'}"

"""How soon blocks come back: the hazard of each class of blocks, learned from the pool's traffic, and what it makes a
block worth.

The class of a block is its past, and the state of the request that used it last: that request is still running, or it
has ended in one of a number of ways (`kvstow.endings`). The past is how often the block was used, and how long it had
waited for the last of these uses. For each class, `Hazards` counts how many blocks have waited so long for their next
use, and how many of those came back then, in bins of waiting time.

The place of a block is its best rate of return over all horizons, the highest ratio of the probability that it comes
back within a time to the expected wait up to then. That is the index of Gittins, "Bandit Processes and Dynamic
Allocation Indices", JRSS B 41, 1979, for this hazard. Places are compared, and nothing else: what has the lowest one is
evicted.

The table belongs to the traffic, not to the size of a pool: `kvstow.control.curve` uses the pool's for all sizes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.endings import NUM_STATES, OTHER, RESUME_TIMES, RESUMES, RUNNING

Floats = npt.NDArray[np.float64]

USED_ONCE = 1
"""The past of a block that was used once."""
MOST_USES = 5
"""Further uses are not counted."""
_PAUSES = (8.0, 64.0, 512.0)
"""The bounds between the four lengths of a pause, in seconds."""
_NUM_PAUSES = len(_PAUSES) + 1
_USES = 8
"""A past is a byte: how often a block was used, and so many times the length of the pause before the last use."""
_LEVEL_OF_USES = (0, 0, 1, 1, 1, 2, 2, 2)
_NUM_LEVELS = _LEVEL_OF_USES[-1] + 1
"""Used once, two to four times, and more often."""
_NUM_PASTS = 1 + _NUM_PAUSES * (_NUM_LEVELS - 1)
"""A block that was used once has had no pause."""
NUM_CLASSES = NUM_STATES * _NUM_PASTS
NUM_BINS = 50
_FIRST, _FACTOR = 0.5, 1.25
LOWER = (0.0, *[_FIRST * _FACTOR**number for number in range(NUM_BINS - 1)])
"""The shortest waiting time of each bin, in seconds."""
UPPER = LOWER[1:]
"""Of all bins but the last, which has no end."""
_BOUNDS = list(UPPER)
_PRIOR_WEIGHT = 10.0
"""Of what is known of all running, or of all ended, blocks, in the hazard of those of one state and level of uses."""
_LEVEL_WEIGHT = 30.0
"""Of that hazard in the one of a class. With it, lengths of pauses that seldom occur cost nothing: on the synthetic
trace of 3,993 requests, they lost 1.1 points at 16,000 slots without it."""
_PRIOR_HAZARD = 0.02
"""Of each bin, before anything was learned."""
_HALF_LIFE = 20_000
"""Requests after which an observation counts half."""
EVERY = 32
"""Requests after which the places are computed anew."""
_LEAST_SURVIVAL = 1e-6
_MOST_KEPT = 40
"""Rows that outlive the process, those with the most observations: 400 bytes each."""
_HEAD = b"KVH2" + b"".join(number.to_bytes(2, "little") for number in (NUM_CLASSES, NUM_BINS, RUNNING))
_ALL_ROWS_EVERY = 8
"""So often, the places of classes that were not observed are computed, too, as the common prior changes."""


def bin_of(seconds: float) -> int:
    """The bin of a waiting time."""
    return bisect_right(_BOUNDS, seconds)


def used_again(past: int, pause: float) -> int:
    """The past of a block with this past that is used again after a pause, in seconds. 0: it was never used."""
    uses = uses_of(past)
    return min(uses + 1, MOST_USES) + _USES * bisect_right(_PAUSES, pause) if uses else USED_ONCE


def uses_of(past: int) -> int:
    """How often a block with this past was used, up to `MOST_USES`."""
    return past % _USES


def _class_of(past: int) -> int:
    level, pause = _LEVEL_OF_USES[uses_of(past)], past // _USES % _NUM_PAUSES
    return 1 + _NUM_PAUSES * (level - 1) + pause if level else 0


_CLASS_OF_PAST = tuple(_class_of(past) for past in range(256))


class Observations(NamedTuple):
    """Weights by row and bin, of shape [rows, NUM_BINS]: of the blocks that were still waiting when the bin ended, or
    came back in it, and of those that came back. `classes`: that of each row. `place`: of each cell, as it was.
    `changed`: the rows whose places are due."""

    classes: npt.NDArray[np.int64]
    exposed: Floats
    returned: Floats
    place: Floats
    changed: npt.NDArray[np.int64]

    def dump(self) -> bytes:
        """What was observed, in a form that `Hazards.load` reads. At most 16 KiB."""
        rows = np.sort(np.argsort(self.exposed.sum(axis=1))[-_MOST_KEPT:])
        counts = [one[rows].astype("<f4").tobytes() for one in (self.exposed, self.returned)]
        classes = self.classes[rows].astype("<u2")
        return b"".join((_HEAD, len(rows).to_bytes(2, "little"), classes.tobytes(), *counts))


class Places(NamedTuple):
    """What follows from observations. A cell is one bin of one row; its number is the row's times `NUM_BINS` plus the
    bin's. `place[cell]`: see the module. `rank[cell]`: the position of the cell among all cells by place, the lowest
    first. `cells`: all cells in that order. `rows`: `place` by row, for the next time."""

    place: list[float]
    rank: list[int]
    cells: list[int]
    rows: Floats


class Hazards:
    """What was observed, and the places that follow from it. Used under the pool's lock, except `compute`.

    A class gets a row of the table when it first occurs.
    """

    def __init__(self) -> None:
        self._exposed, self._returned = array("d"), array("d")
        self._classes: list[int] = []
        self._first_cell: list[int] = [-1] * NUM_CLASSES
        self._changed: set[int] = set()
        self._since = self._times = 0
        """Requests since the places were computed, and how often they were."""
        self.version = 0
        """Grows with each new table of places."""
        self.places = Places([], [], [], np.empty((0, NUM_BINS)))
        self.first_cell(OTHER, USED_ONCE)

    def first_cell(self, state: int, past: int) -> int:
        """The cell of the first bin of the class of blocks that have this past, and were used last by a request in this
        state."""
        number = state * _NUM_PASTS + _CLASS_OF_PAST[past]
        cell = self._first_cell[number]
        return cell if cell >= 0 else self._add_row(number)

    def _add_row(self, number: int) -> int:
        self._first_cell[number] = cell = len(self._exposed)
        self._classes.append(number)
        nothing = array("d", bytes(8 * NUM_BINS))
        self._exposed += nothing
        self._returned += nothing
        rows = np.concatenate((self.places.rows, np.zeros((1, NUM_BINS))))
        changed = np.array([len(self._classes) - 1])
        self.install(compute(Observations(np.array(self._classes), *self._views(), rows, changed)))
        return cell

    # -- learning -------------------------------------------------------------------------------------------

    def waited(self, first: int, end: int, weight: float) -> None:
        """Blocks of this weight have waited through the cells from `first` to before `end`, and still do."""
        exposed = self._exposed
        for cell in range(first, end):
            exposed[cell] += weight
        self._changed.add(first // NUM_BINS)

    def came_back(self, cell: int, weight: float) -> None:
        """Blocks of this weight, which have waited in the cell, were used again."""
        self._exposed[cell] += weight
        self._returned[cell] += weight
        self._changed.add(cell // NUM_BINS)

    def observed(self) -> tuple[Floats, Floats]:
        """A copy of what was observed, by row (`first_cell` // `NUM_BINS`) and bin: see `Observations`."""
        exposed, returned = self._views()
        return exposed.copy(), returned.copy()

    def forget(self, state: int) -> None:
        """What the state means has changed."""
        for number in range(state * _NUM_PASTS, (state + 1) * _NUM_PASTS):
            if (first := self._first_cell[number]) >= 0:
                for counts in (self._exposed, self._returned):
                    counts[first : first + NUM_BINS] = array("d", bytes(8 * NUM_BINS))
                self._changed.add(first // NUM_BINS)

    # -- places ---------------------------------------------------------------------------------------------

    def count_request(self) -> Observations | None:
        """A request has begun. Returns what was observed if the places are due: give it to `compute` without the lock,
        and the result to `install`."""
        self._since += 1
        if self._since < EVERY:
            return None
        exposed, returned = self._views()
        decay = 0.5 ** (self._since / _HALF_LIFE)
        exposed *= decay
        returned *= decay
        self._since, self._times = 0, self._times + 1
        changed = range(len(self._classes)) if self._times % _ALL_ROWS_EVERY == 0 else self._changed
        rows = np.array(sorted(changed), np.int64)
        self._changed = set()
        return Observations(np.array(self._classes), exposed.copy(), returned.copy(), self.places.rows, rows)

    def _views(self) -> tuple[Floats, Floats]:
        shape = len(self._classes), NUM_BINS
        return np.frombuffer(self._exposed).reshape(shape), np.frombuffer(self._returned).reshape(shape)

    def install(self, places: Places) -> None:
        """Use these places, unless a class has got its row since they were due."""
        if len(places.place) == len(self._exposed):
            self.places = places
            self.version += 1

    # -- persistence ----------------------------------------------------------------------------------------

    def load(self, data: bytes) -> bool:
        """Take up what an earlier life of the pool has observed; see `Observations.dump`. Returns False, and changes
        nothing, if the data are damaged, or of other classes."""
        at = len(_HEAD) + 2
        count = int.from_bytes(data[len(_HEAD) : at], "little")
        if not data.startswith(_HEAD) or len(data) != at + count * (2 + 8 * NUM_BINS):
            return False
        classes = np.frombuffer(data, "<u2", count, at)
        found = np.frombuffer(data, "<f4", 2 * count * NUM_BINS, at + 2 * count).reshape(2, count, NUM_BINS)
        if (classes >= NUM_CLASSES).any() or len(np.unique(classes)) < count or not np.isfinite(found).all():
            return False
        if (found < 0).any() or (found[1] > found[0]).any():
            return False
        for number in classes.tolist():
            if self._first_cell[number] < 0:
                self._add_row(number)
        cells = [self._first_cell[number] for number in classes.tolist()]
        rows = np.array(cells, np.int64) // NUM_BINS
        for counts, loaded in zip(self._views(), found, strict=True):
            counts[rows] = loaded
        every = np.arange(len(self._classes))
        self.install(compute(Observations(np.array(self._classes), *self._views(), self.places.rows, every)))
        return True


_WIDTHS: Floats = np.diff([*LOWER, 3 * LOWER[-1]])


def _resume_priors() -> Floats:
    """The hazard that a class of blocks whose return was announced begins with, of shape [announced times, NUM_BINS]:
    half of them come back around that time."""
    centres = np.sqrt(np.maximum(LOWER, 0.25) * np.array([*UPPER, 3 * LOWER[-1]]))
    distance = np.log(centres[None] / np.maximum(np.array(RESUME_TIMES), 0.25)[:, None])
    priors: Floats = _PRIOR_HAZARD + 0.3 * np.exp(-0.5 * (distance / 0.5) ** 2)
    return priors


_RESUME_PRIORS = _resume_priors()


def compute(seen: Observations) -> Places:
    """The places that follow from what was observed. 0.3 ms for 25 rows, without the lock."""
    rows = seen.place.copy()
    states = seen.classes // _NUM_PASTS
    levels = states * _NUM_LEVELS + (seen.classes % _NUM_PASTS + _NUM_PAUSES - 1) // _NUM_PAUSES
    is_running = states == RUNNING
    for which in (is_running, ~is_running):
        due = seen.changed[which[seen.changed]]
        if not len(due):
            continue
        exposed, returned = seen.exposed[which].sum(axis=0), seen.returned[which].sum(axis=0)
        common = (returned + _PRIOR_HAZARD * _PRIOR_WEIGHT) / (exposed + _PRIOR_WEIGHT)
        prior = np.broadcast_to(common, (len(due), NUM_BINS)).copy()
        announced = states[due] - RESUMES.start
        is_hint = (announced >= 0) & (announced < len(RESUMES))
        prior[is_hint] = np.maximum(_RESUME_PRIORS[announced[is_hint]], common)
        of_level = (levels[due, None] == levels).astype(np.float64)
        prior = (of_level @ seen.returned + _PRIOR_WEIGHT * prior) / (of_level @ seen.exposed + _PRIOR_WEIGHT)
        hazard = (seen.returned[due] + _LEVEL_WEIGHT * prior) / (seen.exposed[due] + _LEVEL_WEIGHT)
        rows[due] = _gittins(hazard)
    flat = rows.reshape(-1)
    # Of equal places, the one that has waited for longer goes first.
    cells = np.lexsort((-(np.arange(len(flat)) % NUM_BINS), flat))
    rank = np.empty(len(flat), np.int64)
    rank[cells] = np.arange(len(flat))
    return Places(flat.tolist(), rank.tolist(), cells.tolist(), rows)


def _gittins(hazard: Floats) -> Floats:
    """The place in each bin, for hazards by bin, of shape [n, NUM_BINS]."""
    survival = np.maximum(np.cumprod(1.0 - hazard, axis=1), _LEAST_SURVIVAL)
    before = np.concatenate((np.ones((len(hazard), 1)), survival[:, :-1]), axis=1)
    start = np.zeros((len(hazard), 1))
    wait = np.concatenate((start, np.cumsum(before * _WIDTHS * (1.0 - hazard / 2), axis=1)), axis=1)
    back = np.concatenate((start, np.cumsum(before * hazard, axis=1)), axis=1)
    found = np.empty_like(hazard)
    for at in range(NUM_BINS):
        rates = (back[:, at + 1 :] - back[:, at, None]) / (wait[:, at + 1 :] - wait[:, at, None])
        found[:, at] = rates.max(axis=1)
    return found

"""How soon blocks come back: the hazard of each class of blocks, and the place in the order of eviction that follows
from it. The pool learns both from its traffic.

The class of a block is its past, and the state of the request that used it last: that request is still running, or it
has ended in one of a number of ways (`kvstow.endings`). The past is how often the block was used, and how long it had
waited for the last of these uses. Waiting time is divided into bins. For each class and bin, `Hazards` counts the
blocks that have waited through the bin or came back within it, and the blocks that came back within it. The ratio of
the second number to the first is the hazard.

The place of a block says what its slot earns if the block is kept. Suppose that a block is kept for some time, but is
evicted at the end of it if it has not come back. This costs the time in the slot, and earns a hit if the block comes
back. For each length of that time, the rate of return is the probability of the hit divided by the expected wait. The
place is the highest of these rates, because the pool may choose the length. That is the index of Gittins, "Bandit
Processes and Dynamic Allocation Indices", JRSS B 41, 1979, for this hazard. The pool compares places and nothing else,
and evicts the block with the lowest one.

The hazards belong to the traffic, not to the size of a pool: `kvstow.control.curve` uses those of the pool for all
sizes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.endings import FETCHED, NUM_STATES, OTHER, RESUME_TIMES, RESUMES, RUNNING

Floats = npt.NDArray[np.float64]

USED_ONCE = 1
"""The past of a block that was used once."""
MOST_USES = 5
"""A block that was used more often counts as used this often, so that a chain falls into fewer parts."""
_PAUSES = tuple(2.0**power for power in range(1, 10))
"""The bounds between the ten lengths of a pause that are distinguished, in seconds. With three bounds, 0.2 to 0.7
points less of the agents' trace hit at 1,000 and 2,000 slots. With twenty, no more hit."""
_NUM_PAUSES = len(_PAUSES) + 1
_USES = 8
"""A past is one byte: how often the block was used, plus this constant times the number of the length of the pause
before the last use, from 0 to 9."""
_LEVEL_OF_USES = (0, 0, 1, 1, 1, 2, 2, 2)
"""The level of each number of uses: 0 for at most one use, 1 for two to four, 2 for more."""
_NUM_LEVELS = _LEVEL_OF_USES[-1] + 1
_NUM_PASTS = 1 + _NUM_PAUSES * (_NUM_LEVELS - 1)
"""How many pasts make classes of their own. The first level has one, because a block that was used once has had no
pause. The others have one for each length of a pause."""
NUM_CLASSES = NUM_STATES * _NUM_PASTS
NUM_BINS = 50
_FIRST, _FACTOR = 0.5, 1.25
"""The end of the first bin, in seconds, and the factor by which the end grows from each bin to the next."""
LOWER = (0.0, *[_FIRST * _FACTOR**number for number in range(NUM_BINS - 1)])
"""The shortest waiting time of each bin, in seconds."""
UPPER = LOWER[1:]
"""The longest waiting time of each bin, in seconds. The last bin has none, because it has no end."""
_BOUNDS = list(UPPER)
_PRIOR_WEIGHT = 10.0
"""The hazard of all running blocks, or of all ended ones, counts as this many observations in the hazard of the blocks
of one state and level of uses. `_PRIOR_HAZARD` has the same weight in that hazard of all."""
_LEVEL_WEIGHT = 300.0
"""The hazard of the blocks of one state and level of uses counts as this many observations in the hazard of a class.
Without it, each length of a pause would be learned on its own, even if it seldom occurs: on the synthetic trace of
3,993 requests, that cost 1.1 points at 16,000 slots. With 30 instead of 300, 0.2 to 0.5 points less of that trace hit,
and 0.25 points less of the agents' trace at 2,000 slots."""
_PRIOR_HAZARD = 0.02
"""The hazard of each bin before the pool has learned anything."""
_HALF_LIFE = 20_000
"""After this many requests, an observation counts half."""
EVERY = 32
"""After this many requests, the places are computed anew."""
_LEAST_SURVIVAL = 1e-6
"""The probability that a block is still waiting never falls below this. Otherwise the expected wait in the bins that
follow could be rounded to zero, and a place is divided by it."""
_MOST_KEPT = 40
"""How many rows of the table outlive the process. They are the ones with the most observations. Each takes 400
bytes."""
_HEAD = b"KVH2" + b"".join(number.to_bytes(2, "little") for number in (NUM_CLASSES, NUM_BINS, RUNNING))
"""What `Observations.dump` begins with: the version of its form, and the numbers on which the meaning of rows
depends."""
_ALL_ROWS_EVERY = 8
"""Once in this many times, the places of all classes are computed, because their common prior has changed. The other
times, only the places of the classes that were observed since are computed."""


def bin_of(seconds: float) -> int:
    """Return the number of the bin that this waiting time is in."""
    return bisect_right(_BOUNDS, seconds)


def used_again(past: int, pause: float) -> int:
    """Return the new past of a block that had this past and is used after a pause of `pause` seconds. If the past was
    0, the block had never been used, and there is no pause."""
    uses = uses_of(past)
    return min(uses + 1, MOST_USES) + _USES * bisect_right(_PAUSES, pause) if uses else USED_ONCE


def uses_of(past: int) -> int:
    """Return how often a block with this past was used. `MOST_USES` stands for that or more."""
    return past % _USES


def _class_of(past: int) -> int:
    level, pause = _LEVEL_OF_USES[uses_of(past)], past // _USES % _NUM_PAUSES
    return 1 + _NUM_PAUSES * (level - 1) + pause if level else 0


_CLASS_OF_PAST = tuple(_class_of(past) for past in range(256))


class Observations(NamedTuple):
    """What was observed in each bin of each row of the table, as arrays of shape [rows, NUM_BINS].

    `exposed`: the weight of the blocks that have waited through the bin or came back in it. `returned`: the weight of
    the blocks that came back in it. `place`: the places that were computed last. `classes`: the class of each row.
    `changed`: the rows whose places have to be computed. `fetch_cost`: see `Hazards`.
    """

    classes: npt.NDArray[np.int64]
    exposed: Floats
    returned: Floats
    place: Floats
    changed: npt.NDArray[np.int64]
    fetch_cost: float

    def dump(self) -> bytes:
        """Return what was observed, in a form that `Hazards.load` reads. It has at most 16 KiB."""
        rows = np.sort(np.argsort(self.exposed.sum(axis=1))[-_MOST_KEPT:])
        counts = [one[rows].astype("<f4").tobytes() for one in (self.exposed, self.returned)]
        classes = self.classes[rows].astype("<u2")
        return b"".join((_HEAD, len(rows).to_bytes(2, "little"), classes.tobytes(), *counts))


class Places(NamedTuple):
    """The places that follow from observations.

    A cell is one bin of one row of the table. Its number is the number of the row times `NUM_BINS`, plus the number of
    the bin. `place[cell]`: the place of the blocks in the cell, see the module. `cells`: all cells in the order of
    their places, the lowest first. `rank[cell]`: the position of the cell in that order. `rows`: the places as an array
    of shape [rows, NUM_BINS], which the next computation changes in part.
    """

    place: list[float]
    rank: list[int]
    cells: list[int]
    rows: Floats


class Hazards:
    """Counts how long blocks of each class wait and when they come back, and has the places that follow from that. Used
    under the pool's lock. `compute`, which takes long, needs no lock.

    A class gets a row of the table when it first occurs, because most classes never do.
    """

    def __init__(self) -> None:
        self._exposed, self._returned = array("d"), array("d")
        self._classes: list[int] = []
        self._first_cell: list[int] = [-1] * NUM_CLASSES
        self._changed: set[int] = set()
        self._since = self._times = 0
        """How many requests have begun since the places were last due, and how often they were due."""
        self.fetch_cost = 1.0
        """The cost of reading a block from the store below the pool, as a share of the cost of computing it. A hit in
        memory saves only this share if the store has the block, too, so the place of such a block is multiplied by
        it."""
        self.version = 0
        """A number that grows whenever `places` is replaced."""
        self.places = Places([], [], [], np.empty((0, NUM_BINS)))
        self.first_cell(OTHER, USED_ONCE)

    def first_cell(self, state: int, past: int) -> int:
        """Return the cell of the first bin of a class: the blocks that have this past, and whose last request is in
        this state."""
        number = state * _NUM_PASTS + _CLASS_OF_PAST[past]
        cell = self._first_cell[number]
        return cell if cell >= 0 else self._add_row(number)

    def _add_row(self, number: int) -> int:
        self._first_cell[number] = cell = len(self._exposed)
        self._classes.append(number)
        nothing = array("d", bytes(8 * NUM_BINS))
        self._exposed += nothing
        self._returned += nothing
        self.places = self.places._replace(rows=np.concatenate((self.places.rows, np.zeros((1, NUM_BINS)))))
        self.install(compute(self._observations([len(self._classes) - 1])))
        return cell

    # -- learning -------------------------------------------------------------------------------------------

    def waited(self, first: int, end: int, weight: float) -> None:
        """Note that blocks of this weight have waited through the cells from `first` to before `end`, and still
        wait."""
        exposed = self._exposed
        for cell in range(first, end):
            exposed[cell] += weight
        self._changed.add(first // NUM_BINS)

    def came_back(self, cell: int, weight: float) -> None:
        """Note that blocks of this weight were used again while they waited in the cell."""
        self._exposed[cell] += weight
        self._returned[cell] += weight
        self._changed.add(cell // NUM_BINS)

    def observed(self) -> tuple[Floats, Floats]:
        """Return copies of `exposed` and `returned`, see `Observations`. The row of a class is `first_cell` //
        `NUM_BINS`."""
        exposed, returned = self._views()
        return exposed.copy(), returned.copy()

    def forget(self, state: int) -> None:
        """Forget what was observed of this state, because it has another meaning from now on."""
        for number in range(state * _NUM_PASTS, (state + 1) * _NUM_PASTS):
            if (first := self._first_cell[number]) >= 0:
                for counts in (self._exposed, self._returned):
                    counts[first : first + NUM_BINS] = array("d", bytes(8 * NUM_BINS))
                self._changed.add(first // NUM_BINS)

    # -- places ---------------------------------------------------------------------------------------------

    def count_request(self) -> Observations | None:
        """Note that a request has begun. Returns None, or what was observed if the places are due. The caller gives it
        to `compute` without the lock, and the result to `install`."""
        self._since += 1
        if self._since < EVERY:
            return None
        exposed, returned = self._views()
        decay = 0.5 ** (self._since / _HALF_LIFE)
        exposed *= decay
        returned *= decay
        self._since, self._times = 0, self._times + 1
        changed = range(len(self._classes)) if self._times % _ALL_ROWS_EVERY == 0 else self._changed
        found = self._observations(changed)
        self._changed = set()
        return found

    def _observations(self, changed: Iterable[int]) -> Observations:
        """Return copies of what was observed, from which `compute` makes the places of the `changed` rows anew."""
        rows = np.array(sorted(changed), np.int64)
        return Observations(np.array(self._classes), *self.observed(), self.places.rows, rows, self.fetch_cost)

    def _views(self) -> tuple[Floats, Floats]:
        shape = len(self._classes), NUM_BINS
        return np.frombuffer(self._exposed).reshape(shape), np.frombuffer(self._returned).reshape(shape)

    def install(self, places: Places) -> None:
        """Use these places from now on. They are dropped if a class has got its row since they were due, because they
        have no place for it."""
        if len(places.place) == len(self._exposed):
            self.places = places
            self.version += 1

    # -- persistence ----------------------------------------------------------------------------------------

    def load(self, data: bytes) -> bool:
        """Take up what an earlier life of the pool has observed; see `Observations.dump`. Returns False, and changes
        nothing, if the data are damaged or come from a version with other classes or bins."""
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
        self.install(compute(self._observations(range(len(self._classes)))))
        return True


_WIDTHS: Floats = np.diff([*LOWER, 3 * LOWER[-1]])
"""The width of each bin, in seconds. The last one counts as if it ended at three times its beginning."""


def _resume_priors() -> Floats:
    """Return the hazards with which the states in `RESUMES` begin, as an array of shape [len(RESUMES), NUM_BINS]. The
    hazard is highest around the time that the client has announced."""
    centres = np.sqrt(np.maximum(LOWER, 0.25) * np.array([*UPPER, 3 * LOWER[-1]]))
    distance = np.log(centres[None] / np.maximum(np.array(RESUME_TIMES), 0.25)[:, None])
    priors: Floats = _PRIOR_HAZARD + 0.3 * np.exp(-0.5 * (distance / 0.5) ** 2)
    return priors


_RESUME_PRIORS = _resume_priors()


def compute(seen: Observations) -> Places:
    """Return the places that follow from what was observed. Takes about 11 us for each changed row, but needs no lock.

    A class of which little is known has about the hazard of all blocks in the same state and level of uses. If little
    is known of these either, they have about the hazard of all running blocks, or of all ended ones, and around an
    announced time a higher one.
    """
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
    flat = np.where((states == FETCHED)[:, None], seen.fetch_cost * rows, rows).reshape(-1)
    # Among cells with the same place, blocks that have waited longer are evicted first.
    cells = np.lexsort((-(np.arange(len(flat)) % NUM_BINS), flat))
    rank = np.empty(len(flat), np.int64)
    rank[cells] = np.arange(len(flat))
    return Places(flat.tolist(), rank.tolist(), cells.tolist(), rows)


def _gittins(hazard: Floats) -> Floats:
    """Return the place in each bin, for hazards of shape [rows, NUM_BINS].

    `before` is the probability that a block still waits when a bin begins, `back` the probability that it has come back
    by then, and `wait` how long it has waited by then on average. All three count from the start of the wait. For a
    block in a later bin, both the hit and the wait would be divided by the probability that it has reached this bin,
    which cancels out of their ratio. A block that comes back within a bin has waited for half of the bin.
    """
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

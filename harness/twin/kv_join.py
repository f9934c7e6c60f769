"""KV cache events joined with a log: which blocks each request's prompt has.

An event says which blocks entered the prefix cache, behind which block, and when; it names no request. A log says when
each request began, had its first and its last token, and how long prompt and output are. So the blocks of a request
are the chain whose block number `prompt // block` was stored when the first token came, or was found then, and which
went on growing by one block for every block of output until the last token. Each request gets a chain of its own, so
that all misfits in time together are least (an assignment). What fits no chain stays unjoined and is counted.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.twin.log import FloatArray, IntArray, LoggedRequests
from traces.errors import TraceError
from traces.formats.kv_events import DEVICE, AllBlocksCleared, BlockStored, EventHash, read_batches

_BIN_S = 0.25  # of the votes for the shift between both clocks
_AGREE = 0.2  # of the requests must agree on the shift
_MOST_VOTES = 2_000_000  # pairs of a request and an event that vote
_CANDIDATES = 12  # chains tried for each request, the nearest in time
_UNJOINED = 14.0  # a misfit above it, in units of a step, is worse than no chain
_CAP = 5.0  # the most that a late or a missing block of output counts
# for a chain whose prompt the request did not store: the same chain with a store is preferred
_FOUND_WHOLE = 1.5
_AMBIGUOUS = 1.0  # another prompt whose misfit is larger by less would do as well


# -- events as chains of blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that entered the cache together at `at_s`: `depth` blocks of their chain come before them."""

    at_s: float
    depth: int
    hashes: tuple[EventHash, ...]
    parent: EventHash | None

    @property
    def end(self) -> int:
        """The blocks of the chain up to the last one of these."""
        return self.depth + len(self.hashes)


@dataclass
class BlockEvents:
    """The stored blocks of a file. Chains whose first blocks are older than the file hang on a hash in `older`."""

    file: str
    block_size: int
    stored: list[Stored] = field(default_factory=list)
    parents: dict[EventHash, EventHash | None] = field(default_factory=dict)
    older: dict[EventHash, list[int]] = field(default_factory=dict)  # events (places in `stored`) below each
    cleared: int = 0
    offloaded: int = 0

    def chain(self, last: EventHash | None) -> list[EventHash]:
        """The blocks up to `last`, from the first one of the chain that the file shows, or from its older root."""
        found: list[EventHash] = []
        while last is not None:
            found.append(last)
            last = self.parents.get(last)
        return found[::-1]


def read_block_events(path: Path) -> BlockEvents:
    """The stored blocks of a file of events. Raises TraceError."""
    found: BlockEvents | None = None
    places: dict[EventHash, tuple[EventHash | None, int]] = {}  # older root, and depth below it
    for batch in read_batches(path):
        for event in batch.events:
            if isinstance(event, AllBlocksCleared) and found is not None:
                found.cleared += 1
            if not isinstance(event, BlockStored) or not event.block_hashes:
                continue
            if found is None:
                found = BlockEvents(path.name, event.block_size)
            if event.block_size != found.block_size:
                sizes = f"{found.block_size} and of {event.block_size}"
                raise TraceError(str(path), None, "block_size", f"blocks of {sizes} tokens in one file")
            if event.medium not in (None, DEVICE) or event.group_idx not in (None, 0):
                found.offloaded += 1
                continue
            _add(found, places, event, batch.ts)
    if found is None or not found.stored:
        raise TraceError(str(path), None, None, "no event in it stores a block on the device")
    return found


def _add(
    found: BlockEvents, places: dict[EventHash, tuple[EventHash | None, int]], event: BlockStored, at_s: float
) -> None:
    parent = event.parent_block_hash
    if parent is None:
        root, depth = None, 0
    elif parent in places:
        root, depth = places[parent]
    else:
        root, depth = parent, 0  # blocks that were stored before the file begins
        places[parent] = root, depth
        found.older[parent] = []
    hashes = tuple(event.block_hashes)
    for index, (own, before) in enumerate(zip(hashes, (parent, *hashes), strict=False)):
        if own not in places:
            places[own] = root, depth + index + 1
            found.parents[own] = before
    if root is not None:
        found.older[root].append(len(found.stored))
    found.stored.append(Stored(at_s, depth, hashes, parent))


# -- the join ---------------------------------------------------------------------------------------------------------


# The last block of a prompt, and the blocks of the output behind it.
_Chain = tuple[EventHash | None, tuple[EventHash, ...]]


@dataclass(frozen=True)
class Joined:
    """The blocks of each request's prompt and output, in order of the requests; None: not joined.

    `roots` has, for chains that are older than the file, how many blocks their root stands for.
    """

    prompts: tuple[tuple[EventHash, ...] | None, ...]
    outputs: tuple[tuple[EventHash, ...], ...]
    block_size: int
    roots: dict[EventHash, int]
    notes: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many requests were joined."""
        return sum(one is not None for one in self.prompts)


def join(events: BlockEvents, times: LoggedRequests) -> Joined:
    """The blocks of each request of a log, from the events of the same run. Both clocks may differ by a constant."""
    return _Join(events, times).run()


class _Join:
    def __init__(self, events: BlockEvents, times: LoggedRequests) -> None:
        self.events, self.times, self.size = events, times, events.block_size
        self.full = (times.prompt_tokens // self.size).tolist()
        self.last = ((times.prompt_tokens + times.output_tokens - 1) // self.size).tolist()
        tpot = np.nan_to_num(times.tpot_s)
        self.tpot = tpot.tolist()
        positive = tpot[tpot > 0]
        self.step_s = max(float(np.median(positive)) if len(positive) else 0.02, 1e-3)
        self.entered = (times.entered_s if times.scheduled_s is None else times.scheduled_s).tolist()
        self.first = times.first_token_s.tolist()
        self.lag_s, self.spread_s = 0.0, 2 * self.step_s

    def run(self) -> Joined:
        stored = self.events.stored
        ends = np.array([one.end for one in stored])
        at_s = np.array([one.at_s for one in stored])
        known = np.ones(len(stored), dtype=bool)
        for below in self.events.older.values():
            known[below] = False
        votes, shift = self._shift(ends[known], at_s[known])
        if votes < _AGREE * len(self.times):  # most prompts were found whole
            single = known & np.array([len(one.hashes) == 1 for one in stored])
            more = self._shift_of_outputs(ends[single], at_s[single])
            votes, shift = max((votes, shift), more)
        roots: dict[EventHash, int] = {}
        for root, below in self.events.older.items():
            prompts = [
                index for index in below if len(stored[index].hashes) > 1 or stored[index].parent == root
            ]
            found = self._depth_of(ends[prompts], at_s[prompts], shift if votes else None)
            if found is not None:
                roots[root], shift = found
                votes = votes or 1
        if not votes:
            return self._nothing()
        self._place(shift, roots)
        self._settle()
        chosen, doubtful = self._assigned()
        return self._joined(chosen, doubtful, shift, roots)

    # -- the clock ---------------------------------------------------------------------------------------------

    def _shift(self, ends: IntArray, at_s: FloatArray) -> tuple[int, float]:
        """The requests that agree most on the time of the events less that of the log, and that difference.

        A request votes with each event that ends where its prompt's full blocks do; 0 votes: no agreement.
        """
        return self._agreed(dict(enumerate(self.full)), dict(enumerate(self.first)), ends, at_s)

    def _shift_of_outputs(self, ends: IntArray, at_s: FloatArray) -> tuple[int, float]:
        """The same from the first block of each output, for prompts that were found and never stored."""
        able = [i for i, full in enumerate(self.full) if self.last[i] > full]
        due = {i: self._due_s(i, self.full[i] + 1)[0] for i in able}
        return self._agreed({i: self.full[i] + 1 for i in able}, due, ends, at_s)

    def _agreed(
        self, wanted: Mapping[int, int], due_s: Mapping[int, float], ends: IntArray, at_s: FloatArray
    ) -> tuple[int, float]:
        by_end = {int(end): at_s[ends == end] for end in np.unique(ends)}
        able = [i for i, end in wanted.items() if end > 0 and end in by_end]
        if not able:
            return 0, 0.0
        pairs = sum(len(by_end[wanted[i]]) for i in able)
        able = able[:: 1 + pairs // _MOST_VOTES]
        who = np.concatenate([np.full(len(by_end[wanted[i]]), i) for i in able])
        gaps = np.concatenate([by_end[wanted[i]] - due_s[i] for i in able])
        best, place = 0, 0.0
        for offset in (0.0, 0.5):
            bins = np.floor(gaps / _BIN_S + offset).astype(np.int64)
            pair = np.unique(np.stack([bins, who]), axis=1)[0]  # a request counts once in a bin
            names, counts = np.unique(pair, return_counts=True)
            top = int(np.argmax(counts))
            if counts[top] > best:
                best = int(counts[top])
                place = float(np.median(gaps[bins == names[top]]))
        enough = max(min(3, len(able)), _AGREE * len(able))
        return (best, place) if best >= enough else (0, 0.0)

    def _depth_of(self, ends: IntArray, at_s: FloatArray, shift: float | None) -> tuple[int, float] | None:
        """How many blocks stand before a chain that is older than the file, and the shift; None: not to be told."""
        deepest = max(self.full, default=0)
        tried = [(self._shift(ends + depth, at_s), depth) for depth in range(1, deepest + 1)]
        tried = [
            ((votes, at), depth)
            for (votes, at), depth in tried
            if votes and (shift is None or abs(at - shift) <= 2 * _BIN_S)
        ]
        if not tried:
            return None
        (votes, at), depth = max(tried, key=lambda one: one[0][0])
        rivals = [other for (other, _), at_depth in tried if at_depth != depth]
        if votes < 3 or votes < 1.5 * max(rivals, default=0):
            return None
        return depth, at if shift is None else shift

    # -- the chains --------------------------------------------------------------------------------------------

    def _place(self, shift: float, roots: dict[EventHash, int]) -> None:
        """The events on the log's clock and at their depth, by the depth at which they end and by their parent."""
        offset: dict[int, int] = {}
        for root, below in self.events.older.items():
            offset |= dict.fromkeys(below, roots.get(root, -1))
        self.placed: list[tuple[float, int, Stored]] = []
        ending: dict[int, list[tuple[float, int]]] = defaultdict(list)
        starting: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.below: dict[EventHash | None, list[tuple[float, int]]] = defaultdict(list)
        for index, one in enumerate(self.events.stored):
            more = offset.get(index, 0)
            at_s = one.at_s - shift
            self.placed.append((at_s, one.depth + more, one))
            self.below[one.parent].append((at_s, index))
            if more < 0:
                continue  # nothing says how deep it is
            ending[one.end + more].append((at_s, index))
            starting[one.depth + more].append((at_s, index))
        for lists in (ending, starting, self.below):
            for value in lists.values():
                value.sort()
        self.ending, self.starting = ending, starting

    def _settle(self) -> None:
        """How blocks of output lie in time beside those of prompts, and how exactly these lie.

        vLLM publishes a step's events at its end, a replay at its start: there a long prefill shifts all prompts.
        """
        gaps, lags = [], []
        for request, full in enumerate(self.full):
            if not full or full not in self.ending:
                continue
            found = _between(self.ending[full], -np.inf, np.inf, self.first[request])
            at_s, index = min(found, key=lambda one: abs(one[0] - self.first[request]))
            gaps.append(abs(at_s - self.first[request]))
            if self.last[request] > full:
                due, spread = self._due_s(request, full + 1)
                below = self.below.get(self.events.stored[index].hashes[-1], ())
                near = [at - due for at, _ in below if abs(at - due) < 2 + 8 * spread]
                lags += [min(near, key=abs)] if near else []
        self.lag_s = float(np.median(lags)) if len(lags) > 2 else 0.0
        self.spread_s = max(self.spread_s, 1.5 * float(np.median(gaps)) if gaps else 0.0)

    def _due_s(self, request: int, depth: int) -> tuple[float, float]:
        """When a block of output should be full, and the spread of it. Both ends of the output are known."""
        token = depth * self.size - int(self.times.prompt_tokens[request]) + 1
        gap = self.tpot[request]
        near = min(token - 1, int(self.times.output_tokens[request]) - token)
        return self.first[request] + self.lag_s + (token - 1) * gap, self.step_s + 0.15 * gap * max(near, 0)

    def _candidates(self, request: int) -> Iterator[tuple[float, int, *_Chain]]:
        """(misfit, its event, last block of the prompt, blocks of the output) of the chains that a request may be."""
        full, first = self.full[request], self.first[request]
        slack = 4 * self.spread_s + 0.02
        if full:
            for at_s, index in _between(
                self.ending.get(full, ()), self.entered[request] - slack, first + slack, first
            ):
                prompt = self.events.stored[index].hashes[-1]
                misfit, output = self._output(request, prompt)
                yield abs(at_s - first) / self.spread_s + misfit, index, prompt, output
        if self.last[request] > full:
            due, spread = self._due_s(request, full + 1)
            for at_s, index in _between(self.starting.get(full, ()), due - 8 * spread, due + 8 * spread, due):
                one = self.events.stored[index]
                if len(one.hashes) == 1:
                    misfit, output = self._output(request, one.parent)
                    yield _FOUND_WHOLE + abs(at_s - due) / spread + misfit, index, one.parent, output

    def _output(self, request: int, prompt: EventHash | None) -> tuple[float, tuple[EventHash, ...]]:
        """The misfit of the output behind a prompt, and its blocks: at each depth the one that comes most in time."""
        worst, first, found, node = 0.0, 0.0, [], prompt
        full, last = self.full[request], self.last[request]
        for depth in range(full + 1, last + 1):
            due, spread = self._due_s(request, depth)
            near = min(
                ((abs(at_s - due), index) for at_s, index in self.below.get(node, ())), default=(np.inf, -1)
            )
            misfit = near[0] / spread
            if misfit > 2 * _CAP:
                # The last block of an engine that schedules ahead may never enter the cache.
                worst = worst if depth == last and depth > full + 1 else _CAP
                break
            if depth == full + 1:
                first = min(misfit, _CAP)
            worst = max(worst, min(misfit, _CAP))
            node = self.events.stored[near[1]].hashes[0]
            found.append(node)
        else:
            beyond = self.below.get(node, ()) if found else ()
            end = (
                self.first[request]
                + self.lag_s
                + self.tpot[request] * (int(self.times.output_tokens[request]) - 1)
            )
            late = [at_s for at_s, _ in beyond if at_s > end]
            soon = 2 * self.size * max(self.tpot[request], self.step_s)
            worst += 2.0 if late and min(late) - end < soon else 0.0  # another request goes on here
        return first + worst, tuple(found)

    def _assigned(self) -> tuple[dict[int, _Chain], int]:
        """A chain for each request, no event for two, and how many requests could have another prompt as well."""
        from scipy.optimize import linear_sum_assignment
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        options: list[dict[int, tuple[float, *_Chain]]] = []
        for request in range(len(self.times)):
            own: dict[int, tuple[float, *_Chain]] = {}
            for misfit, index, prompt, output in self._candidates(request):
                if misfit < _UNJOINED and (index not in own or misfit < own[index][0]):
                    own[index] = misfit, prompt, output
            options.append(own)
        pairs = [(request, index) for request, own in enumerate(options) for index in own]
        if not pairs:
            return {}, 0
        count, events = len(options), len(self.placed)
        rows, columns = np.array(pairs).T
        graph = coo_matrix((np.ones(len(pairs)), (rows, columns + count)), shape=(count + events,) * 2)
        labels = connected_components(graph, directed=False)[1]
        groups: dict[int, list[int]] = defaultdict(list)
        for request in sorted(set(rows.tolist())):
            groups[int(labels[request])].append(request)
        chosen: dict[int, _Chain] = {}
        doubtful = 0
        for members in groups.values():
            places = sorted({index for request in members for index in options[request]})
            column = {index: at for at, index in enumerate(places)}
            cost = np.full((len(members), len(places) + len(members)), _UNJOINED)
            cost[:, : len(places)] = 1e6
            for row, request in enumerate(members):
                for index, (misfit, _, _) in options[request].items():
                    cost[row, column[index]] = misfit
            for row, at in np.stack(linear_sum_assignment(cost)).T.tolist():
                if at >= len(places):
                    continue
                own = options[members[row]]
                misfit, prompt, output = own[places[at]]
                chosen[members[row]] = prompt, output
                others = [one[0] for one in own.values() if one[1] != prompt]
                doubtful += int(bool(others) and min(others) < misfit + _AMBIGUOUS)
        return chosen, doubtful

    # -- the answer --------------------------------------------------------------------------------------------

    def _joined(
        self, chosen: dict[int, _Chain], doubtful: int, shift: float, roots: dict[EventHash, int]
    ) -> Joined:
        prompts: list[tuple[EventHash, ...] | None] = []
        outputs: list[tuple[EventHash, ...]] = []
        short = whole = 0
        for request in range(len(self.times)):
            found = chosen.get(request)
            if found is not None:
                prompts.append(tuple(self.events.chain(found[0])))
                outputs.append(found[1])
                continue
            short += self.full[request] == 0
            whole += self.full[request] > 0 and self.last[request] == self.full[request]
            prompts.append(() if self.full[request] == 0 else None)
            outputs.append(())
        return Joined(
            tuple(prompts),
            tuple(outputs),
            self.size,
            roots,
            tuple(self._notes(prompts, doubtful, shift, roots, short, whole)),
        )

    def _nothing(self) -> Joined:
        reason = (
            f"{self.events.file}: KV events, not joined: at no shift of their clock do stored blocks end when prompts "
            "of these lengths had their first token. They are of another run, or most of their messages are missing."
        )
        empty: tuple[EventHash, ...] = ()
        count = len(self.times)
        return Joined((None,) * count, (empty,) * count, self.size, {}, (reason,))

    def _notes(
        self,
        prompts: Sequence[tuple[EventHash, ...] | None],
        doubtful: int,
        shift: float,
        roots: dict[EventHash, int],
        short: int,
        whole: int,
    ) -> Iterator[str]:
        events, count = self.events, len(prompts)
        missing = sum(one is None for one in prompts)
        yield (
            f"{events.file}: KV events, blocks of {self.size} tokens, joined with the log by time and length (their "
            f"clock is the log's {shift:+.3f} s): {count - missing:,} of {count:,} requests have their prompt's blocks"
            + (f", {short:,} of them because their prompt is shorter than a block." if short else ".")
        )
        if missing:
            some = f" {whole:,} of these end before a block of output is full." if whole else ""
            yield (
                f"{events.file}: {missing:,} requests fit no stored blocks; they are taken to share nothing.{some}"
            )
        if doubtful:
            yield (
                f"{events.file}: for {doubtful:,} joined requests another prompt of the same number of blocks fits "
                "nearly as well; which of both has which tail is a guess."
            )
        if roots:
            longest = max(roots.values()) * self.size
            yield (
                f"{events.file}: {len(roots):,} beginnings of up to {longest:,} tokens were cached before the file "
                "begins; the simulation starts with an empty cache, so the first request with each computes it."
            )
        unknown = sum(len(below) for root, below in events.older.items() if root not in roots)
        if unknown:
            yield (
                f"{events.file}: {unknown:,} events hang on blocks from before the file begins, and nothing says how "
                "long their beginnings are: not used."
            )
        if events.offloaded:
            yield f"{events.file}: {events.offloaded:,} events on other media or groups of layers are not read."
        if events.cleared:
            yield f"{events.file}: the cache was emptied {events.cleared} times, which is not simulated."


def _between(
    times: Sequence[tuple[float, int]], low: float, high: float, wanted: float
) -> list[tuple[float, int]]:
    """The entries from `low` to `high`, at most so many as are tried, those nearest to `wanted`."""
    found = list(times[bisect_left(times, (low, -1)) : bisect_left(times, (high, 1 << 62))])
    if len(found) > _CANDIDATES:
        found = sorted(found, key=lambda one: abs(one[0] - wanted))[:_CANDIDATES]
    return found

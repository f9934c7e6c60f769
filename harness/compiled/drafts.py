"""Requests with draft tokens that go on past their end. It does what `engine.core.scheduling.batch` does for them.

Which drafts are right is drawn when they are scheduled, since a draw depends on the request and the place alone. Each
row keeps slots for as many tokens as are drafted next, so its blocks go further than what it has computed.
"""

import numpy as np

from harness.compiled.numba_edge import called, inlined
from harness.compiled.state import ENTRY, ReplayState
from harness.replay.branches import FIRST_DRAFT, SCALE
from harness.replay.features import AT

_SEED_OF_REQUEST, _SEED_OF_PLACE = np.uint64(0xD1B54A32D192ED03), np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BY_30, _BY_27, _BY_31, _BY_32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_SCALE = float(SCALE)


@inlined
def seed_word(state: ReplayState, request: int, place: int) -> None:
    """`SplitMix64(0, …)`: the draws of one place of a request come next."""
    state.word[0] = np.uint64(state.inputs.request_id[request]) * _SEED_OF_REQUEST ^ (
        np.uint64(place) * _SEED_OF_PLACE
    )


@inlined
def below(state: ReplayState, limit: int) -> int:
    """`SplitMix64.below`: a whole number from 0 to `limit - 1`; `limit` is at most 2^32."""
    words = state.word
    words[0] += _SEED_OF_PLACE
    word = words[0]
    word = (word ^ (word >> _BY_30)) * _MIX_1
    word = (word ^ (word >> _BY_27)) * _MIX_2
    word = word ^ (word >> _BY_31)
    most = np.uint64(limit)
    return np.int64(((word >> _BY_32) * most + (((word & _LOW) * most) >> _BY_32)) >> _BY_32)  # type: ignore[return-value]


@called
def drafts_of(state: ReplayState, row: int) -> int:
    """Draft tokens that `row` verifies in its next step, if the budget allows."""
    return int(state.rules.drafts if state.batch.chose[row] else 0)


@called
def within(state: ReplayState, row: int, query: int) -> int:
    """`query`, or fewer tokens where the longest sequence that is served would be exceeded."""
    if not state.rules.longest:
        return query
    return int(min(query, state.rules.longest - state.batch.computed[row] - 1))


@called
def ahead(state: ReplayState, row: int, query: int) -> int:
    """Tokens behind those `query` ones for which slots are kept."""
    if not state.rules.longest:
        return int(state.rules.drafts)
    return int(min(state.rules.drafts, state.rules.longest - state.batch.computed[row] - query))


@called
def note_drafts(state: ReplayState, row: int, lacking: int, query: int) -> None:
    """`row`, which lacks `lacking` tokens, computes `query`: the rest are drafts, of which some are right."""
    batch, drafting = state.batch, state.drafting
    drafts = max(0, query - lacking)
    right = 0
    if drafts and batch.chose[row] and drafting.share >= 0:
        seed_word(state, batch.request[row], FIRST_DRAFT + batch.computed[row])
        state.word[0] ^= drafting.seed[0]
        while right < drafts and below(state, SCALE) < drafting.share * _SCALE:
            right += 1
    drafting.drafts[row], drafting.right[row] = drafts, right


@called
def kept_drafts(state: ReplayState, row: int) -> int:
    """The right drafts of `row`, as far as its request goes."""
    left = state.inputs.output[state.batch.request[row]] - state.batch.generated[row]
    return int(min(state.drafting.right[row], left - 1))


@called
def is_padded(state: ReplayState, request: int, lacking: int, cached: int) -> bool:
    """Whether `request`, which enters with `lacking` tokens, gets draft tokens nobody proposed (`Scheduler._pads`)."""
    at, batch, rules = state.at, state.batch, state.rules
    if not rules.drafts or lacking != 1:
        return False
    continued = False
    for row in range(at[ENTRY.running] - at[ENTRY.admitted]):
        if batch.query[row]:
            continued = True
            if not batch.chose[row]:
                return False
    fits = not rules.longest or cached + rules.drafts + 2 <= rules.longest
    return bool(fits and (continued or cached))


@called
def write_draft_features(state: ReplayState) -> None:
    """The features of the draft model's passes (`harness.replay.features`)."""
    batch, features, drafting = state.batch, state.features, state.drafting
    plain, tokens = features[AT.rows], features[AT.tokens]
    kv = features[AT.decode_kv] + features[AT.prefill_kv]
    longest = behind = 0
    for row in range(state.at[ENTRY.running]):
        drafts, query, context = drafting.drafts[row], batch.query[row], batch.computed[row]
        if not query or not drafts:
            continue
        passes = drafts + (drafting.right[row] == drafts)
        behind, longest = max(behind, passes - drafts), max(longest, drafts)
        plain, tokens = plain - 1, tokens - query + passes
        kv += passes * context + passes * (passes + 1) // 2 - context - query
    features[AT.draft_passes] = (plain > 0) + longest + behind
    features[AT.draft_tokens] = tokens
    features[AT.draft_kv] = kv

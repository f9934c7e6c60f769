"""Advice for a workload on a model and a device: the rate that it holds, which flags matter, and what goes wrong first.

Every answer comes from trials of a `LoadCase`, and from exact counts over its trace. Flags come from a search: each is
tried alone at the rate that breaks the SLO, in the busiest window if it breaks there, else on all requests. Those that
help are tried together on all requests, and kept if the highest rate is higher for it. A flag that helps nothing keeps
its value. The rule of headroom: flags must hold up to the highest rate, not at that of the trace, so the ratio of both
is what they have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from statistics import median
from typing import Any

from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction_rules import new_policy
from engine.core.memory.group_layout import unseen_share
from engine.core.options import CachePolicy, Eviction, GroupPages
from engine.core.request import Request
from engine.runtime.options import VLLM_NAMES
from harness.capacity import CapacityAnswer, Changes, Tell, highest_rate, too_few, with_bounds
from harness.capacity.case import LoadCase, Trial
from harness.capacity.flags import preset
from harness.capacity.slo import Slo
from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.config.values import replaced
from harness.metrics import KEEPS_MORE
from harness.point.cost import cost_model
from harness.workload.deployment import deployment_of, layer_sets, model_shape
from harness.workload.scheduler import eviction_policy, host_tier
from traces.analysis.reuse import PrefixPaths, ReuseProfile, optimal_hit_tokens, reuse_profile

PRECISION = 0.05  # share at which the search for a rate stops
CANDIDATES: Mapping[str, tuple[Any, ...]] = {
    "scheduler.max_running": (64, 128, 256, 512, 1024),
    "scheduler.max_batched_tokens": (2048, 4096, 8192, 16384),
    "cache.block_size": (16, 32, 64),
    "device.memory_utilization": (0.95,),
    "cache.prefix_caching": (True, False),
    "scheduler.admit_whole_prompt": (True, False),
}
"""Values of flags that are tried."""
_HELPS = 0.95  # a flag that helps brings the worst figure below so much of what it is
_MATTERS = 1.05
_MOST_REPLICAS = 3  # tried above what the rate of one asks for
_HIDDEN = 4  # a match unit hides reuse that is so many times what is found
_WORTH_SAYING = 0.01
_FEW = 100  # requests, whose mean length is not that of a trace
MOST_BLOCKS = 500_000  # of which Belady's optimum is computed, in seconds
_MOST_TRIED = 50_000  # with which every rule of eviction is tried, in seconds
_FULL = 0.9  # of a limit, from which on it binds
_SLACK = 1.1  # an SLO that would do, above the figures without a queue
_PARALLEL = (2, 4, 8)
_POOLS = (0.25, 0.5, 2, 4)  # multiples of the pool whose hits are said
_DEVICES = ("h200", "b200")
_MOST_COPIES = 64  # replicas that are tried for a load whose client sets the rate


@dataclass(frozen=True)
class FlagEffect:
    """What one value of a flag does where the SLO breaks: its worst figure over that of the present value."""

    key: str
    value: Any
    trial: Trial
    worse: float

    def __str__(self) -> str:
        """The flag in vLLM's words."""
        return f"{flag(self.key)}={self.value}"


@dataclass
class Advice:
    """Answers in words, the evidence for them, warnings, and the configuration that they come to (None: no advice)."""

    answers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    floor: str = ""
    effects: list[FlagEffect] = field(default_factory=list)
    answer: CapacityAnswer | None = None
    config: RunConfig | None = None

    @property
    def where(self) -> str:
        """Where flags are compared; a client that sets the rate has no other load."""
        return "where the SLO breaks" if self.answer else "under this load"


def flag(key: str) -> str:
    """vLLM's name of a setting, else ours."""
    return VLLM_NAMES.get(key.rpartition(".")[2], key)


def advise(case: LoadCase, tell: Tell, measured: Mapping[str, float] | None = None) -> Advice:
    """Advice for the case; `measured` are figures of a log of this deployment, by metric.

    Raises:
        ConfigError: no pool fits, or a setting is not allowed.
        UserError: no request can be served.
    """
    advice = Advice()
    profile = reuse(case, advice)
    windows(case, advice)
    if few := too_few(case):
        advice.answers.append(f"No advice: {few}.")
        return advice
    tell("the load as it is")
    own = case.run(rate=None if case.held_back else case.rate)
    if measured:
        advice.answers.append(beside(case.run(copies=1), measured, len(case.whole.requests)))
    (_held_back if case.held_back else _by_rate)(case, advice, own, tell)
    if case.rate and deployment_of(case.config).pool.groups is None:
        advice.answers += [line] if (line := tier_line(case, profile)) else []
    return advice


def beside(own: Trial, measured: Mapping[str, float], requests: int) -> str:
    """The measured figures of a log of so many requests beside those predicted for them, or for a part of them."""
    count = sum(own.outcome.values())
    part = f" (measured: {requests:,} requests, predicted: {count:,} of them)" if count < requests else ""
    pairs = (
        f"{name} {value:.3g} measured, {own.metrics[name]:.3g} predicted"
        for name, value in measured.items()
        if name in own.metrics
    )
    return f"As it ran{part}: {'; '.join(pairs)}."


def _by_rate(case: LoadCase, advice: Advice, own: Trial, tell: Tell) -> None:
    """The highest rate, the flags that raise it, what breaks first, and the GPUs for the asked rate."""
    tell("the highest rate")
    answer = highest_rate(case, 1, PRECISION, lambda _: None, bounds=False)
    if answer.value is None:
        advice.answers.append(f"The SLO ({goals(case.slo)}): {answer.reason}.")
        bad = answer.bad
        if answer.good is None and bad and all(one.upper and one.metric in bad.metrics for one in bad.broken):
            _impossible(case, advice, bad, own, tell)
        return
    changes: Changes = {}
    if answer.bad is not None:
        tell("flags")
        advice.effects = effects(case, answer.bad.rate)
        if better := _better(advice.effects):
            tell("the flags that help, together")
            more = answer.value.mean * (1 + PRECISION)
            with_them = None
            if case.run(better, rate=more).met:
                with_them = highest_rate(case, 1, PRECISION, lambda _: None, better, more, bounds=False)
            advice.answers.append(_gain(better, answer, with_them))
            if with_them is not None:
                answer, changes = with_them, better
    tell("what the device leaves open")
    advice.answer = answer = with_bounds(case, answer, changes)
    replicas = _replicas(case, answer, changes, tell)
    advice.answers.insert(0, rate_text(case, answer))
    advice.answers.append(replicas[1])
    if answer.bad is not None:
        advice.answers.append(breaks_first(case, answer.bad))
    advice.answers.append(matters(advice))
    advice.answers.append(_headroom(case, answer, replicas[0]))
    advice.config = replaced(case.config, {**changes, "device.data_parallel": replicas[0]})


def _held_back(case: LoadCase, advice: Advice, own: Trial, tell: Tell) -> None:
    """The same where the client sets the rate: whether the SLO holds, and which flags help."""
    rate = own.metrics.get("request_throughput", 0.0)
    met = "is met" if own.met else f"is not met: {own.why()}"
    text = f"The client sets the rate ({case.held_back}): {rate:.3g} requests/s, at which the SLO ({goals(case.slo)})"
    tell("flags")
    advice.effects = effects(case, None)
    better = _better(advice.effects)
    trial = case.run(better) if better else own
    if better and trial.worst(case.slo) < own.worst(case.slo) * _HELPS:
        names = ", ".join(f"{flag(key)}={value}" for key, value in better.items())
        found = "it is met" if trial.met else f"it is not met either: {trial.why()}"
        if own.met:
            found = f"the worst figure is {trial.worst(case.slo) / own.worst(case.slo):.2g} times as large"
        met += f"; with {names} {found}"
    else:
        better = {}
    advice.answers += [f"{text} {met}.", matters(advice)]
    if not (own.met or trial.met):
        advice.answers.append(_would_do(case, own, tell))
    advice.config = replaced(case.config, better) if own.met or better else None


# -- the rate ----------------------------------------------------------------------------------------------


def goals(slo: Slo) -> str:
    """The SLO in words."""
    return ", ".join(map(str, slo))


def rate_text(case: LoadCase, answer: CapacityAnswer) -> str:
    """The highest rate with its bounds, the same for every command that states one."""
    assert answer.value is not None
    rate, own = answer.value.mean, case.rate or 0.0
    least = f"from {answer.least:.3g} " if answer.least else ""
    text = f"The SLO ({goals(case.slo)}) holds {least}up to {rate:.3g} requests/s"
    if answer.band is not None:
        low, high = answer.band
        fitted = case.config.device.fitted_from is not None
        left = "the log of the device's fit leaves open" if fitted else "the cost model assumes of the device"
        text += f" ({low:.3g} to {high:.3g} by what {left})"
    if own:
        text += f", {rate / own:.2g} times the {own:.3g} requests/s simulated"
    if case.served and case.served.workload.traffic.turns and answer.good is not None:
        text += ", all by the times of the trace; turns wait for answers, so "
        text += f"{answer.good.metrics['request_throughput']:.3g} requests/s are served there (with the beginning and "
        text += f"the end of {answer.good.outcome.get('finished', 0):,} requests, in which fewer are active)"
    if answer.good is not None and (hidden := case.hidden(answer.good)):
        text += f". {hidden}"
    if len(case.trace.requests) < _FEW:
        text += f". It rests on the lengths of {len(case.trace.requests)} requests alone: others may need another rate"
    return f"{text}."


def breaks_first(case: LoadCase, bad: Trial) -> str:
    """What breaks first when the load grows, from the trial just above the highest rate."""
    metrics, limit = bad.metrics, replaced(case.config, bad.changes).scheduler.max_running
    again = metrics.get("recomputed_tokens", 0.0) / max(1.0, metrics.get("computed_tokens", 1.0))
    full = metrics.get("gauge", 0.0) >= _FULL
    if again > _WORTH_SAYING or full:
        cause = f"KV memory: {percent(metrics.get('gauge', 0.0))} of the pool is held in the mean, {percent(again)} of "
        cause += "the tokens are computed again"
    elif metrics.get("running_peak", 0.0) >= limit and metrics.get("waiting_mean", 0.0) >= 1:
        cause = f"admission: {limit} requests run (max_num_seqs) and {metrics['waiting_mean']:,.0f} wait in the mean"
    elif bad.growth or metrics.get("busy_share", 0.0) >= _FULL:
        cause = f"compute: the device is busy {percent(metrics.get('busy_share', 0.0))} of the time"
    else:
        cause = "the tail: bursts and long prompts, while the device has time left"
    return f"What breaks first, at {bad.rate:.3g} requests/s: {bad.why()}. It is {cause}."


def _replicas(case: LoadCase, answer: CapacityAnswer, changes: Changes, tell: Tell) -> tuple[int, str]:
    """How many replicas hold the asked rate, each tried, and the sentence that says so."""
    assert answer.value is not None
    asked, device = case.rate or 0.0, case.config.device
    each = device.tensor_parallel
    now = device.data_parallel
    if asked < answer.least:
        return now, f"The {asked:.3g} requests/s simulated are too few for it."
    if answer.value.mean >= asked:
        return now, f"For the {asked:.3g} requests/s simulated {now * each} x {device.name} is enough."
    first = ceil(asked * now / answer.value.mean)
    for count in range(first, first + _MOST_REPLICAS):
        tell(f"{count} replicas")
        try:
            trial = case.run({**changes, "device.data_parallel": count}, rate=asked)
        except ConfigError as error:
            about = f"For {asked:.3g} requests/s about {first * each} x {device.name}"
            return now, f"{about}, not tried: {error}."
        if trial.met:
            text = f"For the {asked:.3g} requests/s simulated: {count * each} x {device.name}"
            return count, f"{text} ({count} replicas), which was tried."
    text = f"For the {asked:.3g} requests/s simulated not even {count * each} x {device.name} do"
    return now, f"{text}: {trial.why()}."


def _headroom(case: LoadCase, answer: CapacityAnswer, replicas: int) -> str:
    assert answer.value is not None
    rate, device = answer.value.mean, case.config.device
    spare = rate * replicas / device.data_parallel / (case.rate or rate)
    hold = f"the flags are those that hold at {rate:.3g} requests/s, with the replicas named here {spare:.2g}"
    return f"Headroom: {hold} times the rate simulated; none is a peak that was seen."


def _impossible(case: LoadCase, advice: Advice, slow: Trial, own: Trial, tell: Tell) -> None:
    """Which SLO and which device would do where no rate does."""
    if slow.lost:
        return
    enough = {goal: float(f"{slow.metrics[goal.metric] * _SLACK:.2g}") for goal in slow.broken}
    relaxed = tuple(replace(goal, bound=enough.get(goal, goal.bound)) for goal in case.slo)
    if slow.broken:
        tell("an SLO that would do")
        other = LoadCase(case.config, relaxed, case.recorded, case.requests)
        found = highest_rate(other, 1, 4 * PRECISION, tell, bounds=False)
        would = ",".join(f"{one.metric}{'<' if one.upper else '>'}{one.bound:g}" for one in relaxed)
        text = f"An SLO that would do, with a tenth to spare where requests hardly meet: {would}"
        if found.value is not None:
            text += f"; it holds up to {found.value.mean:.3g} requests/s"
        if own.growth:
            text += f". At the {case.rate:.3g} requests/s simulated none would, because {own.why()}"
        advice.answers.append(f"{text}.")
    advice.answers.append(_would_do(case, slow, tell))


def _would_do(case: LoadCase, own: Trial, tell: Tell) -> str:
    """Which device would do for a load that breaks the SLO; where requests hardly meet, for the busiest window."""
    tell("other devices")
    tried = []
    for name, changes in _devices(case.config, 1 if own.rate else min(own.worst(case.slo), _MOST_COPIES)):
        try:
            trial = case.run(changes, rate=own.rate, busiest=own.rate is not None)
        except ConfigError:
            continue  # the heads cannot be split so, the weights do not fit, or requests wait for others
        if trial.met:
            return f"A device that would do{' for requests alone' if own.rate else ''}: {name}."
        tried.append(name)
    return f"No device that was tried would do: {', '.join(tried) or 'none can be'}."


def _devices(config: RunConfig, times: float) -> Iterator[tuple[str, Changes]]:
    """Larger devices, and more of this one, as changes; also as many replicas as figures are `times` their bounds."""
    device, many = config.device, config.device.tensor_parallel * config.device.data_parallel
    if times > 1:
        count = ceil(times) * device.data_parallel
        what = f"{count * device.tensor_parallel} x {device.name} ({count} replicas)"
        yield what, {"device.data_parallel": count}
    for count in _PARALLEL:
        if count > device.tensor_parallel:
            changes = {"device.tensor_parallel": count}
            yield f"{count * device.data_parallel} x {device.name} (device.tensor_parallel={count})", changes
    for name in _DEVICES:
        if name != device.name:
            found = preset("device", name).items()
            what = name if many == 1 else f"{many} x {name}"
            yield what, {f"device.{key}": value for key, value in found if key != "memory_utilization"}


# -- flags -------------------------------------------------------------------------------------------------


def effects(case: LoadCase, rate: float | None) -> list[FlagEffect]:
    """What each candidate does alone at `rate`, the largest effect first.

    In the busiest window, but for an SLO that all requests break and the window does not; sent as often as without it.
    """
    base, whole = (case.run(rate=rate, busiest=busiest) for busiest in (True, False))
    busiest = whole.met or not base.met
    base, found = base if busiest else whole, []
    for key, values in CANDIDATES.items():
        section, _, name = key.partition(".")
        present = getattr(getattr(case.config, section), name)
        for value in values if _applies(case, key) else ():
            if value == present:
                continue
            try:
                trial = base
                if not _changes_nothing(case, base, key, value):
                    trial = case.run({key: value}, rate=rate, busiest=busiest, copies=base.copies)
            except ConfigError:
                continue  # this value is not allowed here
            at, now = (one.worst(case.slo) for one in (trial, base))
            # both may be without a figure, and endless
            found.append(FlagEffect(key, value, trial, 1.0 if at == now else at / max(now, 1e-9)))
    return sorted(found, key=lambda one: -max(one.worse, 1 / max(one.worse, 1e-9)))


def _applies(case: LoadCase, key: str) -> bool:
    pool = deployment_of(case.config).pool
    if key == "device.memory_utilization":
        return pool.memory is not None
    return pool.policy is CachePolicy.paged or not key.startswith("cache.")


def _changes_nothing(case: LoadCase, base: Trial, key: str, value: Any) -> bool:
    """Whether no replay is needed, because what the flag decides never came up in the one without it.

    A limit that is never reached decides nothing, and neither does the pool where no prompts share anything and where
    it has room, at every step, for whatever the flag asks for.
    """
    scheduler, cache = case.config.scheduler, case.config.cache
    if key == "scheduler.max_running":
        return bool(base.metrics.get("running_peak", inf) < min(value, scheduler.max_running))
    if key == "scheduler.max_batched_tokens":
        whole_steps = scheduler.chunked_prefill and not case.config.decoding.draft_tokens
        return bool(whole_steps and base.step_tokens < min(value, scheduler.max_batched_tokens))
    assert case.served is not None
    pool, rows = case.served.pool, case.trace.columns
    unpriced = str(cost_model(case.served.deployment).source.provenance.get("not priced"))
    if key == "cache.block_size" and "block size" not in unpriced:
        return False
    if any(case.shared) or pool.groups is not None or cache.answers or cache.tier_tokens or cache.host_tokens:
        return False
    sequences = int((rows.prompt_tokens + rows.output_tokens).max())
    tails = base.metrics.get("running_peak", inf) * float(max(CANDIDATES["cache.block_size"]))
    return base.spare_slots >= sequences + tails + scheduler.watermark * pool.tokens


def _better(found: Sequence[FlagEffect]) -> dict[str, Any]:
    """The best value of each flag that helps."""
    helps = [one for one in found if one.worse < _HELPS]
    keys = dict.fromkeys(one.key for one in helps)
    return {key: min((one for one in helps if one.key == key), key=lambda it: it.worse).value for key in keys}


def matters(advice: Advice) -> str:
    """The two flags that matter most, and that the others do not."""
    by_key: dict[str, FlagEffect] = {}
    found = advice.effects
    for one in found:
        if max(one.worse, 1 / max(one.worse, 1e-9)) >= _MATTERS:
            by_key.setdefault(one.key, one)
    tried = list(dict.fromkeys(flag(one.key) for one in found))
    if not by_key:
        names = ", ".join(tried)
        return f"No flag matters here: {names} change the worst figure by less than 5 % {advice.where}."
    said = [f"{one} makes the worst figure {_times(one)}" for one in list(by_key.values())[:2]]
    others = [name for name in tried if name not in {flag(one.key) for one in by_key.values()}]
    rest = f"; {', '.join(others)} {'change' if len(others) > 1 else 'changes'} nothing" if others else ""
    return f"What matters most, {advice.where}: {' and '.join(said)}{rest}."


def _times(one: FlagEffect) -> str:
    return f"endless ({one.trial.why()})" if one.trial.lost else f"{one.worse:.2g} times as large"


def _gain(better: Changes, before: CapacityAnswer, after: CapacityAnswer | None) -> str:
    names = ", ".join(f"{flag(key)}={value}" for key, value in better.items())
    if after is None:
        return f"With {names} figures are better where the SLO breaks, and the rate is not clearly higher."
    assert before.value is not None
    assert after.value is not None
    return f"With {names} the rate is {after.value.mean:.3g} instead of {before.value.mean:.3g} requests/s."


# -- the prefix cache --------------------------------------------------------------------------------------


def best_rule(paths: PrefixPaths, size: int, blocks: int) -> tuple[Eviction, float]:
    """The rule of eviction with the highest hit ratio in a pool of `blocks`, requests one after the other, and that.

    Prompts that are longer than the pool are left out. All are released at time 0, so a time to live never ends.
    """
    rows = paths.trace.requests
    ratios = {}
    prompts = paths.named_blocks(size)
    for rule in Eviction:
        policy = new_policy(rule, pinned=RunConfig().cache.pinned_tokens // size)
        pool, hits = BlockPool(blocks, eviction=policy), 0
        for row, names in zip(rows, prompts, strict=True):
            if len(names) > blocks:
                continue
            found = pool.find(names[: (row.prompt_tokens - 1) // size])
            hits += len(found)
            pool.share(found)
            fresh = pool.take(len(names) - len(found))
            pool.cache_full_blocks(fresh, names[len(found) :])
            request = Request(
                row.request_id, row.prompt_tokens, 1, priority=row.priority, session=row.session
            )
            pool.release([*found, *fresh], 0, request)
        ratios[rule] = hits * size / max(1, sum(row.prompt_tokens for row in rows))
    best = max(ratios, key=lambda rule: ratios[rule])
    return best, ratios[best]


def tier_line(case: LoadCase, profile: ReuseProfile) -> str:
    """Where a tier of host memory below the pool breaks even (`--kv-offloading-size`, GiB); empty where the pool
    finds what there is to find.

    By the hits of a least recently used cache of its size, requests one after the other. A tier that is filled as
    requests end has what the pool has too. Spared are the products with the weights; attention comes on top.
    """
    deployment, rows = deployment_of(case.config), len(case.trace.requests)
    pool, minute = deployment.pool, 60 * (case.rate or 0.0) * profile.prompt_tokens / rows
    spec, token_s = host_tier(deployment, 0), eviction_policy(deployment).facts.token_s
    read_s, held = (spec.latency_s + spec.read_s) / pool.block_size, profile.hit_ratio(pool.num_blocks)
    per_gib = 2**30 / (pool.block_size * pool.kv_bytes_per_token)
    gains = {2**n: profile.hit_ratio(max(pool.num_blocks, int(2**n * per_gib))) - held for n in range(16)}
    enough = min(size for size, hits in gains.items() if hits >= max(gains.values()) - _WORTH_SAYING)
    worth = {size: hits for size, hits in gains.items() if hits >= _WORTH_SAYING and size <= enough}
    if not worth:
        return ""
    if read_s >= token_s:
        times = f"{read_s / token_s:.2g} times as long as computing"
        return f"A tier in host memory (--kv-offloading-size) does not pay: loading takes {times}."
    said = [
        f"{size} GiB {minute * hits * token_s:.2g} s for {minute * hits * read_s:.2g} s of loading"
        for size, hits in worth.items()
    ]
    what = f"A tier in host memory (--kv-offloading-size) saves, of prefill a minute: {', '.join(said[-4:])}"
    return f"{what}; more than {enough} GiB no longer pays."


def reuse(case: LoadCase, advice: Advice) -> ReuseProfile:
    """What the prefixes allow, what the match unit leaves of it, and what a pool of this size leaves of that."""
    pool, trace = deployment_of(case.config).pool, case.trace
    paths, unit = PrefixPaths(trace), pool.block_size
    shared = case.shared
    prompts = trace.columns.prompt_tokens.tolist()
    exact = sum(shared) / max(1, sum(prompts))
    profile = reuse_profile(paths, unit, spare_last_token=True)
    most = float(profile.blocks.sum()) * unit / max(1, sum(prompts))
    whole = f"in whole match units of {unit} tokens {percent(most)}"
    advice.floor = f"{percent(exact)} of the prompt tokens stood at the start of an earlier prompt; {whole}"
    best = 0.0
    if most and pool.groups is None and profile.blocks_in_all <= MOST_BLOCKS:
        best = optimal_hit_tokens(paths, unit, pool.num_blocks) / max(1, sum(prompts))
        bound = "Belady's optimum, a bound: blocks of running requests may put it out of reach"
        advice.floor += f", and at most {percent(best)} with any eviction ({bound})"
    if pool.groups is None:
        held = profile.hit_ratio(pool.num_blocks)
        curve = ", ".join(f"{percent(profile.hit_ratio(one * pool.num_blocks))} at {one:g}" for one in _POOLS)
        one_by_one = "least recently used, requests one after the other"
        one_by_one += ", all to one replica" if case.config.device.data_parallel > 1 else ""
        sizes = f"{percent(held)} in a pool of this size, and by multiples of it {curve}"
        advice.floor += f"; {one_by_one}: {sizes}"
        if best > held + _WORTH_SAYING and profile.blocks_in_all <= _MOST_TRIED:
            rule, found = best_rule(paths, unit, pool.num_blocks)
            advice.floor += f"; of the rules of cache.eviction {rule} finds most there, {percent(found)}"
        if most > _WORTH_SAYING and held * 2 < most:
            hits = f"{percent(held)} hits of {percent(most)} in an unlimited pool"
            advice.warnings.append(f"the pool is too small for its prefixes: {hits}")
    if case.config.cache.answers:
        advice.floor += "; what prompts find of earlier answers comes on top (cache.answers)"
    if not case.config.cache.prefix_caching:
        if exact > _WORTH_SAYING:
            text = f"the prefix cache is off, and {percent(exact)} of the prompt tokens could be hits"
            advice.warnings.append(text)
    elif exact > _WORTH_SAYING and most * _HIDDEN < exact:
        sharing = [tokens for tokens in shared if tokens]
        advice.warnings.append(
            f"{percent(most)} hits: prompts of {median(prompts):,.0f} tokens that share {median(sharing):,.0f} "
            f"(medians), match unit {unit}; a smaller block, or a model without states, could hit {percent(exact)}"
        )
    recorded = trace.header.source_block_tokens
    if recorded and recorded > unit:
        advice.warnings.append(
            f"the trace records sharing in blocks of {recorded} tokens: hits of smaller blocks cannot differ here, "
            "and a real workload's do"
        )
    return profile


def windows(case: LoadCase, advice: Advice) -> None:
    """What windowed layers keep in vain where groups are off."""
    sets, cache = layer_sets(model_shape(case.config.model)), case.config.cache
    rows = case.trace.columns
    mean = int((rows.prompt_tokens + rows.output_tokens).sum()) // max(1, len(rows))
    unseen = unseen_share(sets, mean)
    if cache.groups is GroupPages.off and unseen > _WORTH_SAYING:
        advice.warnings.append(
            f"windowed layers keep every block (--disable-hybrid-kv-cache-manager): {percent(unseen)} of the KV "
            f"of a request of {mean:,} tokens is never read again; cache.groups=uniform predicts vLLM without this flag"
        )
    if cache.groups is not GroupPages.off and cache.prefix_caching and cache.retention_interval is None:
        advice.warnings.append(KEEPS_MORE)


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.1f} %" if share else "0 %"

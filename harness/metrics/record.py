"""The record of a point: its results, and everything that is needed to trust or repeat it.

`harness.point.record` makes it, the store adds which point it is and keeps it as JSON, the report reads it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from statistics import median
from typing import Any, Literal, TypedDict

from harness.config.foreign import Foreign
from harness.metrics import METRICS, Metric


class MetricRow(TypedDict):
    """One metric at one point, in the metric's unit; None where a side has no value.

    `measured` is the median of the runs, `low` and `high` their range. `error` and `spread` are on one scale:
    `error` is simulated / measured − 1, for shares simulated − measured; `spread` is the largest such error
    of a single run against the median of the runs, None for one run.
    """

    metric: str
    unit: str
    analytic: float | None
    simulated: float | None
    measured: float | None
    low: float | None
    high: float | None
    spread: float | None
    error: float | None


def compare(
    analytic: Mapping[str, float],
    simulated: Mapping[str, float],
    measured_runs: Sequence[Mapping[str, float]],
) -> list[MetricRow]:
    """A row for every metric that some side has, in the order of `METRICS`; unknown names are ignored."""
    rows = []
    for name, metric in METRICS.items():
        if not any(name in side for side in (analytic, simulated, *measured_runs)):
            continue
        runs = [run[name] for run in measured_runs if name in run]
        middle = median(runs) if runs else None
        errors = [comparison_error(metric, run, middle) for run in runs] if len(runs) > 1 else []
        row = MetricRow(
            metric=name,
            unit=metric.unit,
            analytic=analytic.get(name),
            simulated=simulated.get(name),
            measured=middle,
            low=min(runs, default=None),
            high=max(runs, default=None),
            spread=max((abs(error) for error in errors if error is not None), default=None),
            error=comparison_error(metric, simulated.get(name), middle),
        )
        rows.append(row)
    return rows


def comparison_error(metric: Metric, predicted: float | None, measured: float | None) -> float | None:
    """The error of `predicted`: its ratio to `measured` minus 1, for shares the difference.

    None where a side is missing, or where something is predicted and nothing was measured (no finite ratio).
    """
    if predicted is None or measured is None:
        return None
    if metric.is_share:
        return predicted - measured
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return predicted / measured - 1


Section = Mapping[str, Any]
Side = Literal["analytic", "simulated", "measured", "low", "high", "spread", "error"]
"""The columns of a comparison."""
_TABLE, _FILE = re.compile(r"\w{1,64}"), re.compile(r"\w[\w.-]{0,80}")  # names, never paths
_ROW = ("metric", "error", "spread")  # of `comparison`
_ROW_KEYS = frozenset(_ROW)
_PLAIN = frozenset({str, int, float, bool, type(None)})
# by key of the cache: the revision of each rule of eviction whose victims were corrected since records are kept
_RULES = dict.fromkeys(("fifo", "s3fifo", "ttl", "gdsf"), 2)
RULES = {"eviction": _RULES, "tier_eviction": _RULES | dict.fromkeys(("pinned", "priority", "superseded"), 2)}
_NULLS = frozenset({"measured", "levels", "audit", "bounds", "oracle", "pace"})  # stand as null where empty
_LISTS = {"tables": "names", "overrides": "texts", "comparison": f"rows with {', '.join(_ROW)}"}


@dataclass(frozen=True)
class PointRecord:
    """The sections of a record, in their order in the file. A section that a point does not have is empty.

    The first nine say which point it is: the store adds the first five, the sweep the others. `measured`, `levels`,
    `audit` and `pace` are those of a measured point.
    """

    schema: int | None = None  # version of the file's form
    fingerprint: str = ""
    digest: str = ""  # of the file; empty in a record of an older version
    tables: Sequence[str] = ()  # beside the record
    digests: Mapping[str, str] = field(default_factory=dict)  # of all files beside the record, by name
    name: str = ""
    label: str = ""
    overrides: Sequence[str] = ()
    config: Section = field(default_factory=dict)
    trace: Section = field(default_factory=dict)
    pool: Section = field(default_factory=dict)
    environment: Section = field(default_factory=dict)
    cost: Section = field(default_factory=dict)
    outcome: Section = field(default_factory=dict)
    analytic: Mapping[str, float] = field(default_factory=dict)
    simulated: Mapping[str, float] = field(default_factory=dict)
    tenants: Section = field(default_factory=dict)  # of each side, where there are several (`by_tenant`)
    measured: Section = field(default_factory=dict)  # metrics of each of `runs`, their `median` and `spread`
    comparison: Sequence[MetricRow] = ()
    levels: Section = field(default_factory=dict)
    audit: Section = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    bounds: Section = field(default_factory=dict)
    oracle: Section = field(default_factory=dict)
    pace: Section = field(default_factory=dict)
    given: Sequence[str] = ()  # not stored: all overrides, where `overrides` are those that tell points apart

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in its file; the file's own digest is left out where there is none yet."""
        values = {name: getattr(self, name) for name in _NAMES}
        if not self.digest:
            del values["digest"]
        if not self.tenants:
            del values["tenants"]
        if not self.measured:
            del values["pace"]
        lists = {name: list(values[name]) for name in _LISTS}
        return {name: (one or None) if name in _NULLS else one for name, one in (values | lists).items()}

    @classmethod
    def from_json(cls, value: Section) -> "PointRecord":
        """The record of a finished point, also of an older version, which lacks some sections.

        Raises:
            ValueError: this is no record of a finished point; says the first reason.
        """
        if not isinstance(value.get("config"), Mapping):
            raise ValueError("its section 'config' is missing")
        given = {name: value[name] for name in _NAMES if value.get(name) is not None}
        for name, found in given.items():
            if name in _LISTS:
                if not (isinstance(found, list) and all(_fits(name, item) for item in found)):
                    raise ValueError(f"its section '{name}' is no list of {_LISTS[name]}")
            elif name not in _WORDS and not isinstance(found, Mapping):
                raise ValueError(f"its section '{name}' is no table of keys and values")
        if not all(_FILE.fullmatch(name) for name in given.get("digests", ())):
            raise ValueError("its section 'digests' is no table of file names")
        where = f"the record of {str(given.get('fingerprint'))[:64]}"
        given["overrides"] = [Foreign(text, where) for text in given.get("overrides", ())]
        return cls(**given)

    @property
    def point_label(self) -> str:
        """The overrides that make a point, or the start of its fingerprint where there are none."""
        return " ".join(self.overrides) or (self.fingerprint or "?")[:10]

    @property
    def unfinished(self) -> str:
        """The requests that did not finish at the point, in words; empty where all finished."""
        parts = []
        for side in ("simulated", "measured"):
            counts = self.outcome.get(side) or {}
            parts += [f"{side}: {counts[k]} {k}" for k in ("rejected", "unfinished") if counts.get(k)]
        dropped = self.outcome.get("dropped") or 0
        dropped = sum(dropped.values()) if isinstance(dropped, Mapping) else dropped
        why = ", ".join(f"{count:,} {reason}" for reason, count in (self.trace.get("dropped") or {}).items())
        said = f"{dropped} dropped before the replay" + (f" ({why})" if why else "")
        return ", ".join([*parts, said] if dropped else parts)

    @cached_property
    def rows(self) -> Mapping[str, MetricRow]:
        """The rows of the comparison by metric."""
        return {row["metric"]: row for row in self.comparison}

    def value(self, metric: str, side: Side) -> float | None:
        """A cell of the comparison; None where there is none."""
        row = self.rows.get(metric)
        return row.get(side) if row else None

    def setting(self, key: str) -> Any:
        """One setting of the point by dotted key; None if it does not have it."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return tuple(value) if isinstance(value, list) else value

    @property
    def earlier_rules(self) -> list[str]:
        """The rules of eviction that were corrected after this record was made."""
        of, made = self.setting, self.pool.get("rules") or {}
        below = of("cache.tier_tokens") and of("cache.tier_eviction")
        rules = ("eviction", of("cache.eviction") or of("cache.keep")), ("tier_eviction", below)
        return [rule for key, rule in rules if RULES[key].get(rule) not in (None, made.get(key))]

    @property
    def policy(self) -> str:
        """The cache policy."""
        return str(self.setting("cache.policy"))

    @property
    def provenance(self) -> Section:
        """Where the numbers of the cost model come from."""
        return self.cost.get("provenance") or {}


_NAMES = tuple(one.name for one in fields(PointRecord) if one.name != "given")
_WORDS = frozenset({"schema", "fingerprint", "digest", "name", "label"})


def _fits(name: str, item: object) -> bool:
    if name == "comparison":
        return type(item) is dict and item.keys() >= _ROW_KEYS and _PLAIN.issuperset(map(type, item.values()))
    return isinstance(item, str) and (name != "tables" or bool(_TABLE.fullmatch(item)))

"""Numbers as text: three digits, a unit, and a sign for errors."""

from harness.metrics import Metric

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
NONE = "–"


def figure(metric: Metric, value: float | None) -> str:
    """A value of this metric with its unit: '12.3 ms', '45.6 %', '1,234 tokens/s'."""
    if value is None:
        return NONE
    if metric.is_share:
        return f"{100 * value:.1f} %"
    if metric.unit == "bytes":
        return size(value)
    return seconds(value, metric.unit) if metric.is_time else f"{plain(value)} {metric.unit}"


def error(metric: Metric, value: float | None) -> str:
    """An error with its sign: '+3.2 %', for shares '−1.4 pts' (points of 100)."""
    if value is None:
        return NONE
    sign = ("+" if value > 0 else "−") if shows(value) else ""
    return f"{sign}{100 * abs(value):.1f} {error_unit(metric)}"


def shows(value: float) -> bool:
    """Whether an error is printed as more than 0.0."""
    return abs(value) >= 0.0005


def error_size(metric: Metric, value: float | None) -> str:
    """The size of an error or a spread: '3.2 %', for shares '1.4 pts'."""
    return NONE if value is None else f"{100 * abs(value):.1f} {error_unit(metric)}"


def error_unit(metric: Metric) -> str:
    """Percent of the measured value, or, for shares, points of 100."""
    return "pts" if metric.is_share else "%"


def seconds(value: float, unit: str = "s") -> str:
    """Seconds with a prefix: '3.40 ms'. `unit` may be longer, for example 's/token'."""
    scale, prefix = next((p for p in _PREFIXES[3:] if abs(value) >= p[0]), (1.0, ""))
    number = value / scale
    text = f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"
    return f"{text} {prefix}{unit}"


def size(value: float) -> str:
    """Bytes in binary multiples: '12.5 MiB'."""
    scale, unit = next((p for p in _BYTES if abs(value) >= p[0]), (1, "B"))
    return f"{value / scale:.4g} {unit}"


def plain(value: float) -> str:
    """A bare number: counts in full with separators, others to three digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def digits(value: float) -> str:
    """Three digits at least, for columns of one unit: '0.123', '12.3', '1,234'."""
    places = next((places for limit, places in ((100, 0), (10, 1), (1, 2)) if abs(value) >= limit), 3)
    return f"{value:,.{places}f}" if value else "0"

"""Pictures of a trace from the data of `traces.analysis.statistics`: lengths, arrivals, burstiness and reuse."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report.style import COLUMN_IN, GREY, PALETTE, new_figure, style, svg_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Profile = Mapping[str, Any]
_HEIGHT_IN = 2.4
_DPI = 200


def write_pictures(profile: Profile, folder: Path) -> list[Path]:
    """Draw every picture that the trace has data for, as SVG and PNG; returns the files. Raises OSError."""
    written = []
    with style():
        for name, draw in _PICTURES.items():
            figure = new_figure(COLUMN_IN, _HEIGHT_IN)
            axes = figure.subplots()
            if not draw(axes, profile):
                continue
            written += _write(figure, folder / f"{name}.svg", folder / f"{name}.png", name)
    return written


def _write(figure: "Figure", svg: Path, png: Path, name: str) -> list[Path]:
    figure.savefig(png, dpi=_DPI)
    figure.set_layout_engine("none")  # the second file keeps the layout of the first
    svg.write_bytes(svg_bytes(figure, name))
    return [svg, png]


def _lengths(axes: "Axes", profile: Profile) -> bool:
    for (name, cdf), colour in zip(profile["lengths"].items(), PALETTE, strict=False):
        axes.plot(cdf["values"], cdf["shares"], color=colour, label=name.replace("_", " "))
    _logarithmic(axes)
    axes.set(xlabel="tokens", ylabel="share of requests", ylim=(0, 1.02))
    _title(axes, profile, "lengths")
    axes.legend()
    return True


def _arrivals(axes: "Axes", profile: Profile) -> bool:
    arrivals = profile["arrivals"]
    unit, scale = _time_unit(arrivals["start_s"][-1] if arrivals["start_s"] else 0)
    window = arrivals["window_s"]
    axes.step([at / scale for at in arrivals["start_s"]], arrivals["rps"], where="post", color=PALETTE[0])
    axes.set(xlabel=f"time ({unit}), windows of {window:,} s", ylabel="requests/s")
    axes.set_ylim(bottom=0)
    _title(axes, profile, "arrivals")
    return True


def _burstiness(axes: "Axes", profile: Profile) -> bool:
    """The share of gaps longer than x, beside that of a Poisson process with the same rate."""
    burstiness = profile["burstiness"]
    mean, gaps = burstiness["mean_gap_s"], burstiness["gaps_s"]
    if not mean:
        return False
    longer = [1 - share for share in gaps["shares"]]
    axes.plot([value / mean for value in gaps["values"]], longer, color=PALETTE[0], label="this trace")
    grid = [step * 0.1 for step in range(1, 61)]
    axes.plot(grid, [2.718281828459045**-x for x in grid], color=GREY, ls="--", label="Poisson")
    axes.set(xlabel=f"gap / mean gap ({mean:.3g} s)", ylabel="share of gaps that are longer", yscale="log")
    axes.set_yticks([1, 0.1, 0.01], ["1", "0.1", "0.01"])
    axes.set(ylim=(4e-3, 1.3), xlim=(0, max(6.0, min(20.0, gaps["values"][-2] / mean))))
    cv = burstiness["gap_cv"]
    _title(axes, profile, f"burstiness, CV {cv:.3g}" if cv is not None else "burstiness")
    axes.legend()
    return True


def _ideal(axes: "Axes", profile: Profile) -> bool:
    ideal = profile["reuse"]["ideal_hit_ratio"]
    if not any(ideal.values()):
        return False
    sizes = [int(size) for size in ideal]
    axes.plot(sizes, list(ideal.values()), "o-", color=PALETTE[0])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="block size (tokens)", ylabel="ideal hit ratio", ylim=(0, max(ideal.values()) * 1.15))
    _title(axes, profile, "unlimited prefix cache")
    source = profile["source_block_tokens"]
    if source is not None:
        axes.annotate(
            f"sharing is recorded in blocks of {source}:\nsmaller blocks cannot be had",
            (0.03, 0.05),
            xycoords="axes fraction",
            fontsize=7,
            color=GREY,
        )
    return True


def _lru(axes: "Axes", profile: Profile) -> bool:
    reuse = profile["reuse"]
    if not any(reuse["ideal_hit_ratio"].values()):
        return False
    for (size, ratios), colour in zip(reuse["lru_hit_ratio"].items(), PALETTE, strict=False):
        axes.plot(reuse["capacity_tokens"], ratios, color=colour, label=f"blocks of {size}")
        axes.axhline(reuse["ideal_hit_ratio"][size], color=colour, lw=0.5, ls=":")
    _logarithmic(axes)
    axes.set(xlabel="cache size (tokens)", ylabel="LRU hit ratio")
    axes.set_ylim(0, max(reuse["ideal_hit_ratio"].values()) * 1.1)
    _title(axes, profile, "LRU prefix cache; dotted: unlimited")
    axes.legend()
    return True


def _distance(axes: "Axes", profile: Profile) -> bool:
    cdf = profile["reuse"]["distance_cdf"]
    if not cdf["distance_tokens"]:
        return False
    axes.plot(cdf["distance_tokens"], cdf["shares"], color=PALETTE[0], label="tokens (lower axis)")
    _logarithmic(axes)
    axes.set(xlabel="LRU stack distance (tokens)", ylabel="share of reused blocks", ylim=(0, 1.02))
    above = axes.twiny()
    above.grid(False)
    above.spines["top"].set_visible(True)
    above.plot(
        [max(gap, 1e-3) for gap in cdf["gap_s"]], cdf["shares"], color=PALETTE[1], label="time (upper axis)"
    )
    _logarithmic(above)
    above.set(xlabel="seconds since the last use")
    _title(axes, profile, "distance between uses")
    handles = [*axes.get_lines(), *above.get_lines()]
    axes.legend(
        handles,
        [str(line.get_label()) for line in handles],
        loc="upper center",
        bbox_to_anchor=(0.45, -0.24),
        ncols=2,
    )
    return True


_PICTURES: Mapping[str, Callable[["Axes", Profile], bool]] = {
    "lengths": _lengths,
    "arrivals": _arrivals,
    "burstiness": _burstiness,
    "ideal_hit_ratio": _ideal,
    "lru_hit_ratio": _lru,
    "reuse_distance": _distance,
}


def _time_unit(longest_s: float) -> tuple[str, float]:
    units = (("days", 86_400.0, 3), ("hours", 3_600.0, 3), ("minutes", 60.0, 3))
    return next(((name, size) for name, size, least in units if longest_s >= least * size), ("s", 1.0))


def _title(axes: "Axes", profile: Profile, what: str) -> None:
    title = f"{what[0].upper()}{what[1:]}\n{profile['name'][:40]}, {profile['requests']:,} requests"
    axes.set_title(title, loc="left")


def _logarithmic(axes: "Axes") -> None:
    """A logarithmic x axis with plain labels: 1k, 10k, 1M."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())

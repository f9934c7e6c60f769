"""The report of a twin: one HTML file without network, a Markdown summary, figures, tables as CSV, the workload."""

from pathlib import Path

from harness.report.numbers import digits, seconds
from harness.report.style import Drawing, drawing_files, filled, inline, style
from harness.store.atomic import write_files
from harness.twin.figures import changes, latency, state
from harness.twin.fit import trace_bytes
from harness.twin.twin import Twin, constants_of, finding, grade, verdict
from harness.twin.what_ifs import FIGURES, WhatIf, signed
from harness.workload.deployment import deployment_of
from harness.workload.trace import traffic_of

PAGE = "index.html"
_REPLACED = "; the user set another value, which was simulated"
_LABELS = {
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "tpot_p50": "TPOT p50",
    "tpot_p99": "TPOT p99",
    "output_throughput": "output tokens/s",
}
_ALL = {"ttft_mean": "TTFT mean", "tpot_mean": "TPOT mean"}  # beside them, of the deployment as it is


def write_twin(twin: Twin, folder: Path) -> Path:
    """Write the report; returns the path of the page. Raises StoreError where it cannot be written."""
    with style():
        drawings = [state(twin), latency(twin), *([changes(twin)] if len(twin.changes) > 1 else [])]
        files = {name: data for drawing in drawings for name, data in drawing_files(drawing).items()}
    files["workload.jsonl"] = trace_bytes(twin.log.workload)
    files["summary.md"] = summary(twin).encode()
    files[PAGE] = _page(twin, drawings, files).encode()
    write_files(folder, files)
    return folder / PAGE


def facts(twin: Twin) -> list[tuple[str, str]]:
    """What was simulated, and where each setting comes from."""
    config, settings = twin.config, twin.configured.settings
    pool = deployment_of(config).pool
    replaced = twin.configured.replaced
    if pool.memory is not None:
        source = "computed"
    else:
        own = settings.knows_pool and not {"cache.pool_tokens", "cache.pool_blocks"} & replaced.keys()
        source = "as the log has it" if own else "as the user set it"
    origin = settings.origin
    gone = {key.rpartition(".")[2] for key in replaced}
    gone |= {"pool_blocks"} if "pool_tokens" in gone else set()
    gone |= {"quantization"} if "weight_dtype" in gone else set()
    rows = [
        ("engine", " ".join(filter(None, (settings.engine, settings.version)))),
        ("model", f"{config.model.name} ({settings.model or 'named by the user'})"),
        ("device", f"{config.device.tensor_parallel * config.device.data_parallel} x {config.device.name}"),
        ("pool", f"{pool.num_blocks:,} blocks of {pool.block_size}, {source}"),
    ]
    return rows + [
        (name, f"{value} ({origin.get(name, 'not said')}{_REPLACED if name in gone else ''})")
        for name, value in settings.given().items()
        if name not in ("engine", "version", "model", "device")
    ]


def notes(twin: Twin) -> list[str]:
    """What was assumed, left out or is not priced."""
    found = [*twin.log.notes, *twin.configured.notes]
    if twin.fit is not None and twin.fit.said:
        found.append(twin.fit.said)
    if traffic_of(twin.config, twin.log.workload.header.client).waits is None:
        found.append(
            "Requests arrive when they did. A client that waits for answers, or retries, would send at other times "
            "under other settings."
        )
    found += dict.fromkeys(f"What-if: {one.note}." for one in twin.changes if one.note and one.figures)
    found.append(
        "Not priced: block size in the kernels, work of the server after the last token and, where no front end is "
        "known, before the scheduler's queue, other load on the device."
    )
    return found


def summary(twin: Twin) -> str:
    """The report in Markdown."""
    return filled(
        Path(__file__).with_name("summary.md.j2"),
        twin=twin,
        verdict=verdict(twin),
        figures=_figures(twin),
        labels=list(_LABELS.values()),
        finding=finding(twin),
        changes=[(one, _cells(one)) for one in twin.changes[1:]],
        notes=notes(twin),
    )


def _cells(one: WhatIf) -> list[str]:
    """The figures of a what-if with their change, and its band, or that it is none."""
    cells = []
    for name in _LABELS:
        value, factor, band = (one.figures or {}).get(name), one.factor(name), one.change.get(name)
        if value is None or factor is None:
            cells.append("–")
            continue
        said = "within its band" if one.changes else "same"
        if one.shows(name):
            said = f"{signed(factor)}; {band.words(signed) if band else 'no band'}"
        cells.append(f"{_shown(name, value)} ({said})")
    return cells


def _shown(name: str, value: float | None) -> str:
    if value is None or value != value:
        return "–"
    return seconds(value) if name.startswith(("ttft", "tpot")) else digits(value)


def _figures(twin: Twin) -> list[tuple[str, str, str, str]]:
    """Name, measured, predicted and band of each figure; the last is the share of hits."""
    measured, predicted = twin.hits
    found = "–" if measured is None else f"{100 * measured:.1f} %"
    ours, labels = twin.base.figures or {}, _LABELS | _ALL
    return [
        *(
            (labels[name], _shown(name, twin.measured[name]), _shown(name, ours.get(name)), _band(twin, name))
            for name in FIGURES
        ),
        ("prompt tokens found in the prefix cache", found, f"{100 * predicted:.1f} %", "–"),
    ]


def _band(twin: Twin, name: str) -> str:
    """The band of a figure, and whether the measured value lies outside of it."""
    band = twin.bands.get(name)
    if band is None:
        return "not known"
    outside = "" if band.holds(twin.measured[name]) else "; the measured value lies outside"
    return band.words(lambda value: _shown(name, value)) + outside


def _page(twin: Twin, drawings: list[Drawing], files: dict[str, bytes]) -> str:
    from markupsafe import Markup

    figures = _figures(twin)
    return filled(
        Path(__file__).with_name("twin.html.j2"),
        name=twin.log.name,
        scope=twin.log.scope,
        verdict=verdict(twin),
        grade=grade(twin),
        fit=twin.fit,
        errors=twin.errors,
        constants=constants_of(twin),
        before=str(twin.fit.before) if twin.fit else "",
        held_out=str(twin.errors),
        facts=facts(twin),
        figures=figures,
        series=twin.series_errors(),
        drawings=[
            (drawing, Markup(inline(files[f"{drawing.name}.svg"], drawing.name, drawing.caption)))
            for drawing in drawings
        ],
        labels=list(_LABELS.values()),
        finding=finding(twin),
        changes=[
            (one, _cells(one), f"{100 * one.kv_peak:.0f} %" if one.figures else "–")
            for one in twin.changes[1:]
        ],
        base_cells=[_shown(name, (twin.base.figures or {}).get(name)) for name in _LABELS],
        base=twin.base,
        notes=notes(twin),
        command=twin.command,
    )

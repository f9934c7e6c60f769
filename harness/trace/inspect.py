"""`trace ls`, `get`, `inspect` and `validate`: what traces there are, statistics of a trace, and a check of every row.

`ls` prints licence, size and sharing of each. `get` downloads a public trace into the user's cache and checks its
sha256. Without a network it prints which files to place in which folder. `inspect` prints figures, and draws pictures
if a folder for them is given.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.errors import UserError
from harness.console import one_line, remark, say
from harness.trace.flags import (
    add_source,
    cache_folder,
    chosen_trace,
    describe,
    folder_of,
    is_fetched,
    trace_path,
)

if TYPE_CHECKING:
    from harness.trace.flags import Actions
    from traces.catalogue import CatalogueEntry, RemoteFile
    from traces.trace import Trace


_FAILED = 1


def add_ls(actions: "Actions") -> None:
    """Describe `ls`."""
    parser = describe(actions, run_ls, "list the embedded generators and the public traces", "ls [--names]")
    parser.add_argument("--names", action="store_true", help="names alone")


def run_ls(flags: argparse.Namespace) -> int:
    """Print the catalogue."""
    from traces.catalogue import catalogue
    from traces.synth.generator import CHAT, chat_source

    entries = catalogue()
    if flags.names:
        for entry in entries:
            say(entry.name)
        say(CHAT)
        return 0
    name_width = max(len(entry.name) for entry in entries)
    format_width = max(len(entry.format) for entry in entries)
    for entry in entries:
        rows = "" if entry.rows is None else f"{entry.rows:,} rows"
        state = "fetched" if is_fetched(entry) else _size(entry.bytes)
        say(
            f"{entry.name:{name_width}}  {entry.format:{format_width}}  {rows:>12} {state:>9}  {entry.licence}"
        )
        say(f"{'':{name_width}}  {entry.where}; sharing: {entry.sharing}")
    say(f"{CHAT:{name_width}}  {'generated':{format_width}}  {'':>12} {'':>9}  conversations, turn by turn")
    say(f"{'':{name_width}}  calibrated on {chat_source()}; sharing: the history of each conversation")
    say(f"Fetch a public trace with 'python -m harness trace get NAME'; it goes to {cache_folder()}")
    return 0


def _size(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.0f} kB"


def add_get(actions: "Actions") -> None:
    """Describe `get`."""
    more = "The cache is $PAGETWIN_TRACES, or pagetwin/traces in the user's cache folder."
    parser = describe(actions, run_get, "download a public trace into the cache", "get NAME", more)
    parser.add_argument("name", metavar="NAME", help="a public trace of 'trace ls'")


def run_get(flags: argparse.Namespace) -> int:
    """Download the missing files; returns 1 if a file could not be downloaded."""
    from traces.catalogue import catalogue, public_trace

    entry = public_trace(flags.name)
    if entry is None:
        names = ", ".join(known.name for known in catalogue() if known.format != "generated")
        raise UserError(f"no public trace '{flags.name}'; there are {names}")
    remark(f"licence: {entry.licence}; source: {entry.where}")
    if not entry.files:
        raise UserError(f"{entry.name} must be fetched by hand from {entry.where}; then name its file")
    folder = folder_of(entry)
    for file in entry.files:
        try:
            _fetch(file, folder)
        except (OSError, ValueError) as error:
            remark(f"error: {file.path}: {one_line(error, 300)}\n{_by_hand(entry, folder)}")
            return _FAILED
    say(str(trace_path(entry)))
    return 0


def _fetch(file: "RemoteFile", folder: Path) -> None:
    """Download one file unless it exists. Raises OSError if that fails, ValueError on a wrong checksum."""
    import pooch

    pooch.get_logger().setLevel("ERROR")
    if file.sha256 is None:
        remark(f"{file.path}: its publisher states no checksum; what arrives is not checked")
    known = f"sha256:{file.sha256}" if file.sha256 else None
    downloader = pooch.HTTPDownloader(progressbar=False, timeout=30)
    pooch.retrieve(file.url, known_hash=known, fname=file.path, path=folder, downloader=downloader)


def _by_hand(entry: "CatalogueEntry", folder: Path) -> str:
    files = [
        f"  {file.path}  sha256 {file.sha256 or 'not known'}\n    from {file.url}" for file in entry.files
    ]
    first = f"Without a connection place these files in {folder}:"
    return "\n".join([first, *files, f"The publisher's page is {entry.where}"])


def add_inspect(actions: "Actions") -> None:
    """Describe `inspect`."""
    usage = "inspect TRACE [--format F] [--requests N] [--out DIR]"
    parser = describe(actions, run_inspect, "print a trace's statistics, and draw them", usage)
    add_source(parser)
    parser.add_argument("--out", metavar="DIR", help="draw pictures (SVG and PNG) into this folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--block-sizes", metavar="B,B", help="in tokens; default: what the trace can show")
    parser.add_argument("--model", metavar="M", help="also say what KV memory this model needs (conf/model)")


def run_inspect(flags: argparse.Namespace) -> int:
    """Read the trace, print its statistics, draw pictures."""
    from traces.analysis.statistics import trace_distributions, trace_statistics

    sizes = _sizes(flags.block_sizes)
    folder = _folder(flags.out)
    trace = chosen_trace(flags)
    profile = trace_distributions(trace, sizes)
    statistics = trace_statistics(trace)
    statistics |= memory_answers(trace, sizes or [8, 16, 32, 64, 128], flags.model)
    if flags.json:
        say(json.dumps({**statistics, "profile": profile}, indent=1))
    else:
        say_tree({**statistics, **_summary(profile)})
    if folder is not None:
        from harness.report.trace_pictures import write_pictures

        for path in write_pictures(profile, folder):
            remark(f"wrote {path}")
    return 0


def memory_answers(trace: "Trace", sizes: list[int], model: str | None) -> dict[str, Any]:
    """Closed forms over the trace's lengths: waste by block size and by reservation, and what one sequence needs.

    Shares are of the allocated slots over all decode steps of each request alone, without shared prefixes. With a
    model of `conf/model/`, also the KV memory of a sequence, and of all requests at their ends together.

    Raises:
        UserError: there is no such model.
    """
    from harness.metrics.analytic import Lengths, final_internal_slots, paged_split, reserved_split

    lengths = Lengths(trace.columns.prompt_tokens, trace.columns.output_tokens)
    longest = int(lengths.final_tokens.max(initial=0))
    if not lengths.decode_steps.any():
        return {}
    paged = {f"blocks of {size}": paged_split(lengths, size) for size in sizes}
    found: dict[str, Any] = {
        "share of allocated slots that holds no token at an instant, paged": {
            name: f"{100 * (1 - split['utilisation']):.2f} %" for name, split in paged.items()
        },
        "time-weighted share of allocated slots that is never filled, paged": {
            name: f"{100 * split['internal_of_allocated']:.2f} %" for name, split in paged.items()
        },
        "share of allocated slots that is never filled, at the end of each request, paged": {
            f"blocks of {size}": f"{100 * tail.sum() / (tail + lengths.final_tokens).sum():.2f} %"
            for size in sizes
            for tail in (final_internal_slots(lengths, size),)
        },
        "time-weighted share of allocated slots that is never filled, contiguous": {
            f"reserving {tokens:,} tokens": f"{100 * reserved_split(lengths, tokens)['internal_of_allocated']:.2f} %"
            for tokens in sorted({longest, 1 << (longest - 1).bit_length()})
        },
    }
    if model is not None:
        each, left_out = _kv_bytes(model)
        found[f"KV memory, {model}{left_out}"] = {
            "a token": f"{each:,} bytes",
            "a sequence at its end, mean": f"{each * float(lengths.final_tokens.mean()) / 1e9:.3f} GB",
            "the longest sequence": f"{each * longest / 1e9:.3f} GB",
            "all requests at their ends": f"{each * int(lengths.final_tokens.sum()) / 1e9:.1f} GB",
        }
    return found


def _kv_bytes(model: str) -> tuple[int, str]:
    """Bytes of a token, and what of the model they do not tell."""
    from harness.config.compose import compose_config
    from harness.config.overrides import parse_overrides
    from harness.workload.deployment import model_shape

    axes = parse_overrides([f"model={model}"])
    shape = model_shape(compose_config(axis.settings[0] for axis in axes).model)
    kept = ", windowed layers keeping every token" if shape.window else ""
    return shape.kv_bytes_per_token, kept + (", without its states" if shape.state_layers else "")


def _sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 10**6 for part in parts):
        raise UserError(f"--block-sizes: whole numbers from 1 to 1,000,000 expected, found '{text[:60]}'")
    return sorted({int(part) for part in parts})


def _folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot use '{name}': {error.strerror or error}") from error
    return folder


def _summary(profile: dict[str, Any]) -> dict[str, Any]:
    """The part of a profile that is printed as numbers."""
    burstiness, reuse = profile["burstiness"], profile["reuse"]
    shown = ("ideal_hit_ratio", "stack_distance_tokens", "reuse_gap_s")
    found = {
        "burstiness": {name: burstiness[name] for name in ("gap_cv_median_5min", "dispersion")},
        "reuse by block size": {name: reuse[name] for name in shown if reuse[name]},
    }
    curve = reuse["capacity_tokens"]
    picks = range(0, len(curve), max(1, len(curve) // 6))
    found["LRU hit ratio by cache size in tokens"] = {
        f"blocks of {size}": {f"{curve[i]:,}": reuse["lru_hit_ratio"][size][i] for i in picks}
        for size in list(reuse["lru_hit_ratio"])[:1]
    }
    return {**({"sessions": profile["sessions"]} if profile["sessions"] else {}), **found}


def say_tree(value: dict[str, Any], indent: str = "") -> None:
    """Print nested values, one on each line."""
    width = max((len(key) for key in value), default=0)
    for key, item in value.items():
        if isinstance(item, dict):
            say(f"{indent}{key}")
            say_tree(item, indent + "  ")
        else:
            say(f"{indent}{key:{width}}  {_shown(item)}")


def _shown(item: Any) -> str:
    if isinstance(item, float):
        return f"{item:,.6g}"
    if isinstance(item, int) and not isinstance(item, bool):
        return f"{item:,}"
    if isinstance(item, list):
        return "; ".join(map(str, item)) or "-"
    return "-" if item is None or item == "" else str(item)


def add_validate(actions: "Actions") -> None:
    """Describe `validate`."""
    more = "Exit code 0: every row can be replayed or is dropped for a reason; 2: a row is malformed."
    parser = describe(
        actions, run_validate, "check every row of a trace", "validate TRACE [--format F]", more
    )
    add_source(parser)


def run_validate(flags: argparse.Namespace) -> int:
    """Read the trace and print how many rows were kept, dropped and noted."""
    trace = chosen_trace(flags)
    header = trace.header
    say(f"{flags.trace}: valid ({header.format}, keys {header.key_kind})")
    dropped = header.rows_read - header.rows_kept
    say(f"rows read {header.rows_read:,} = kept {header.rows_kept:,} + dropped {dropped:,}")
    for title, counts in (("dropped", header.dropped), ("noted", header.noted)):
        for name, count in counts.items():
            say(f"  {title}: {name}: {count:,}")
    for change in header.changes:
        say(f"  {change}")
    say(f"digest {trace.digest}")
    return 0

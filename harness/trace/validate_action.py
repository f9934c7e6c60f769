"""`trace validate`: read every row and say what is wrong, or that nothing is."""

import argparse
from typing import TYPE_CHECKING

from harness.cli.say import say
from harness.trace.flags import add_source, answers, describe

if TYPE_CHECKING:
    from harness.trace.flags import Actions


def add(actions: "Actions") -> None:
    """Describe `validate`."""
    more = "Exit code 0: every row can be replayed or is dropped for a reason; 2: a row is malformed."
    parser = describe(actions, "validate", "check every row of a trace", "validate TRACE [--format F]", more)
    add_source(parser)
    parser.add_argument(
        "--vocab", type=int, metavar="V", help="also check that keys make different tokens below V"
    )
    parser.add_argument(
        "--first-id", type=int, default=0, metavar="R", help="ids below it are special; default: 0"
    )


@answers
def run(flags: argparse.Namespace) -> int:
    """Read the trace and print the books."""
    from harness.trace.flags import chosen_trace
    from traces.tokens import separating_tokens

    trace = chosen_trace(flags)
    header = trace.header
    say(f"{flags.trace}: valid ({header.format}, keys {header.key_kind})")
    say(
        f"rows read {header.rows_read:,} = kept {header.rows_kept:,} + dropped {header.rows_read - header.rows_kept:,}"
    )
    for title, counts in (("dropped", header.dropped), ("noted", header.noted)):
        for name, count in counts.items():
            say(f"  {title}: {name}: {count:,}")
    for change in header.changes:
        say(f"  {change}")
    if flags.vocab is not None:
        depth = separating_tokens(trace, seed=flags.seed, vocab_size=flags.vocab, first_id=flags.first_id)
        say(
            f"different keys make different tokens within {depth} tokens: exact sharing from that block size on"
        )
    say(f"digest {trace.digest}")
    return 0

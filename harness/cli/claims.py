"""`claims`: published claims about PagedAttention, computed by our code, with their verdicts."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.config.paths import check_out
from harness.console import say

if TYPE_CHECKING:
    from harness.console import Arguments

_OUT = "results/claims"
_MORE = """\
Every claim is computed now, by the code that simulates. A claim that needs a GPU or that no source supports says so.
Exit codes: 0 every row holds, 1 our code computes something else than a row says, 2 the input was wrong.
example:
  python -m harness claims --verdict wrong"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `claims`."""
    parser = commands.add_parser(
        "claims",
        help="published claims about PagedAttention, computed",
        description="Compute published claims about PagedAttention and say which are right.",
        usage="python -m harness claims [CLAIM ...] [--verdict VERDICT] [--out DIR]",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "claim", nargs="*", metavar="CLAIM", help="like S0.21, or S0 for a lesson; default: all"
    )
    parser.add_argument(
        "--verdict",
        choices=("right", "condition", "wrong", "open", "none"),
        help="print only these; the page has all",
    )
    parser.add_argument(
        "--out", metavar="DIR", default=_OUT, help=f"folder of the page and the CSV; default: {_OUT}"
    )


def run(arguments: "Arguments") -> int:
    """Compute, print, and write the page; returns the exit code."""
    from harness.papers.claims_page import write_claims
    from harness.papers.ledger import VERDICTS, chosen, judge, tally

    flags = arguments.flags
    for wrong in check_out(flags.out):
        raise UserError(f"--out {flags.out}: {wrong}")
    judged = [judge(claim) for claim in chosen(flags.claim)]
    for one in judged:
        claim = one.claim
        if flags.verdict in (None, claim.verdict):
            say(f"{claim.id:6} {VERDICTS[claim.verdict]:9} {claim.says}")
            say(f"{'':16} computed: {one.shown or 'nothing'}")
            say(f"{'':16} {claim.right} {claim.why}".rstrip())
    say()
    say(tally(judged))
    command = shlex.join(["python", "-m", "harness", "claims", *flags.claim])
    say(str(write_claims(judged, Path(flags.out), command)))
    broken = [one for one in judged if not one.holds]
    for one in broken:
        say(f"{one.claim.id} does not hold: {'; '.join(one.faults)}")
    return int(bool(broken))

"""The same point gives the same bytes: with and without fast-forward, in any process, under any hash seed.

Over every policy of the core, every way of decoding and both real trace formats.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from point_matrix import ALL, SOME, Case, matrix
from sim_cases import fingerprint
from tiers import cases, tier

from harness.config.schema import TraceFormat


@cases(("format_", "policy", "mode"), ALL, day=SOME)
def test_fast_forward_changes_no_record(format_: TraceFormat, policy: str, mode: str, tmp_path: Path) -> None:
    case = Case(tmp_path, format_, policy, mode)
    together, single = case.log(), case.log(fast_forward=False)
    assert len(together.requests["request_id"]) > 10
    assert fingerprint(together) == fingerprint(single)


def test_the_pools_of_these_points_are_too_small(tmp_path: Path) -> None:
    """Without preemption the cases above and below would say little."""
    preempted = {case.policy for case in matrix(tmp_path) if case.log().steps["preempted"].sum()}
    assert preempted >= {"paged", "unnamed", "swap", "priority", "own", *tier((), ("swap_groups",))}


def digest(folder: Path) -> str:
    """One name for what all the cases come to."""
    names = {f"{case.format}, {case.policy}, {case.mode}": fingerprint(case.log()) for case in matrix(folder)}
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_determinism import digest
print(digest(Path(sys.argv[1])))
"""


@cases("seed", ["12345", "0"], day=1)
def test_every_process_and_hash_seed_gives_the_same_bytes(seed: str, tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    script = SCRIPT.format(paths=[str(here.parent), str(here.parents[2] / "support")])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest(tmp_path)

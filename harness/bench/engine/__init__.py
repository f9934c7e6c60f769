"""`bench engine`: the same requests through our engine and through others in one run, with outputs compared.

This module has the command line and imports nothing heavy.
"""

import argparse
from pathlib import Path

from engine.runtime.options import Dtype
from harness.bench.engine.workload import PEERS, chosen_peers
from harness.config.errors import UserError
from harness.environment import gpu_names

DEVICES = ("cpu", "cuda")
ROUNDS, MATRIX_ROUNDS = 3, 5

_MORE = """\
The workload is fixed by --requests and --seed: prompts of 32 to 512 tokens, 16 to 128 output tokens each, all at once,
greedy, no end token, on a random Llama of 8 layers (or --model-path). Without options it is the reference workload of
the documentation (20,202 prompt and 4,583 output tokens). Rates are requested output tokens per second of CPU time, or
of wall time on a GPU, from the median round. CPU time of vLLM is that of its whole process tree. In float32 the
outputs must be equal token for token; in lower precision only the number of equal outputs is printed.

--matrix serves a prefill-heavy and a decode-heavy workload on two shapes (the reference model and Qwen2.5-0.5B's,
random weights) in float32 and bfloat16 with one and two threads, beside vLLM eager and compiled: 32 ratios from
--repeats rounds (default: 5). vLLM may be in an environment of its own: --against names its interpreter. FILE has
every round; the table is written beside it as .txt. The same command again runs what is missing or failed. It needs
about 16 GB of memory.

Exit codes: 0 done, 1 a peer failed or its float32 outputs differ, 2 the input was wrong.
example:
  python -m harness bench engine --peers transformers,transformers_cb --requests 16
  python -m harness bench engine --matrix --against /opt/vllm/bin/python --out matrix.json"""


def add(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench engine`."""
    parser = benches.add_parser(
        "engine",
        help="output tokens a second beside transformers and vLLM",
        description="Run the same requests through our engine and its peers.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--peers", default="", metavar="A,B", help=f"of {', '.join(PEERS)}; default: none")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--dtype", default="float32", metavar="T", help=f"{', '.join(Dtype)}; default: float32"
    )
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda; default: cpu")
    parser.add_argument("--model-path", metavar="DIR", help="a checkpoint instead of the random model")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="of the random model; default: 8")
    parser.add_argument("--repeats", type=int, metavar="N", help="interleaved rounds; default: 3")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload; default: 0")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument(
        "--pool-tokens", type=int, default=40_960, metavar="N", help="KV slots; default: 40960"
    )
    parser.add_argument("--out", metavar="FILE", help="write the figures as JSON here too")
    parser.add_argument(
        "--matrix", action="store_true", help="ours beside vLLM in 32 cells, written to --out"
    )
    parser.add_argument("--against", metavar="PYTHON", help="with --matrix: an interpreter that has vLLM")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="with --matrix: groups whose name has TEXT"
    )


def run(flags: argparse.Namespace) -> int:
    """Run the peers that the flags name; returns the exit code."""
    chosen_peers(flags.peers)
    if flags.repeats is None:
        flags.repeats = MATRIX_ROUNDS if flags.matrix else ROUNDS
    for name in ("requests", "layers", "repeats", "block_size", "pool_tokens"):
        if getattr(flags, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(flags, name)}, must be at least 1")
    if flags.device not in DEVICES:
        raise UserError(f"--device {flags.device} does not exist; choose {', '.join(DEVICES)}")
    if flags.dtype not in set(Dtype):
        raise UserError(f"--dtype {flags.dtype} does not exist; choose {', '.join(Dtype)}")
    if flags.device == "cuda" and not gpu_names():
        raise UserError(
            "--device cuda, but the NVIDIA driver shows no device on this machine; use --device cpu"
        )
    if flags.pool_tokens < flags.block_size:
        raise UserError(
            f"--pool-tokens is {flags.pool_tokens}, less than one block of --block-size {flags.block_size}; enlarge it"
        )
    if flags.out and (Path(flags.out).is_dir() or not Path(flags.out).absolute().parent.is_dir()):
        raise UserError(f"--out: '{flags.out}' is no file in a folder that exists; name one, like bench.json")
    if flags.matrix:
        if not flags.out:
            raise UserError("--matrix writes every group to --out FILE; name one, like matrix.json")
        from harness.bench.engine.matrix import run_matrix

        return run_matrix(flags)
    if flags.against or flags.only:
        raise UserError("--against and --only are options of --matrix; add it")
    from harness.bench.engine.runner import run_bench

    return run_bench(flags)

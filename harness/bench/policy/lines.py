"""What is timed, in which unit, how much of it we aim at, and what vLLM 0.33's Python core reaches.

Published figures: vLLM 0.33.0's own core, unmodified, block size 16, on a shared x86 machine, per CPU-second, median
of five; the last one is the newest vLLM that forked beams inside its block manager (v0).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One line of the table: `least` is what we aim at, `vllm` the published figure, both in `unit` a CPU-second."""

    key: str
    work: str
    unit: str
    least: float | None
    vllm: float | None
    definition: str


LINES = (
    Line(
        "allocate",
        "allocate + free 256 x 2048 tokens",
        "blocks/s",
        3.5e6,
        0.72e6,
        "Block 16, caching on, names (SHA-256) computed beforehand and new in every round, so that nothing hits. "
        "Per prompt: does it fit, admit, take and name its 128 blocks; then all are released. Nothing is evicted: "
        "the pool is twice as large, and its index has grown to its size before.",
    ),
    Line(
        "allocate_evicting",
        "  where every block evicts one",
        "blocks/s",
        None,
        None,
        "The same in a pool of exactly 256 x 128 blocks, all cached by the round before: each block taken evicts one.",
    ),
    Line(
        "prompt",
        "2048-token prompt, half shared",
        "prompts/s",
        1e4,
        2.0e3,
        "From a prompt as int64 array to its release: range check, SHA-256 of all 128 blocks, lookup (64 hit), "
        "fit, admit, take and name the rest, release. Nothing is evicted.",
    ),
    Line(
        "prompt_evicting",
        "  where every new block evicts one",
        "prompts/s",
        None,
        None,
        "The same in a full pool of 200 x 128 blocks.",
    ),
    Line(
        "prompt_list",
        "  from a Python list of tokens",
        "prompts/s",
        None,
        None,
        "The same as the first, and the list is converted to an array.",
    ),
    Line(
        "decode",
        "decode, 256 running, manager only",
        "steps/s",
        8e3,
        587.0,
        "Calendar and block manager: who needs a block, does it fit, take and name, count the tokens; caching on, "
        "outputs private as in replay. Prompts of 100 ... 115 tokens: 16 sequences need a block in every step.",
    ),
    Line(
        "decode_hashed",
        "  outputs hashed",
        "steps/s",
        None,
        587.0,
        "The same with outputs that later requests can hit: the 16 tokens of every block that fills are told and "
        "hashed (SHA-256).",
    ),
    Line(
        "schedule",
        "schedule + commit, 256 running",
        "steps/s",
        4e3,
        272.0,
        "Scheduler over the manager, caching on, every request decoding; the plan's rows are left as arrays.",
    ),
    Line(
        "schedule_rows",
        "  every row laid out",
        "steps/s",
        None,
        272.0,
        "The same, and all 256 rows of the plan are made into objects.",
    ),
    Line(
        "beams",
        "beam churn, k = 4, prompt 512",
        "beam-tokens/s",
        1e5,
        12.7e3,
        "Per step: do four rows fit, extend each (a block, or a copy of a shared tail), collect copies and frees, "
        "re-parent by four random parents. 256 steps after the prompt was forked.",
    ),
)

YARDSTICK = "yardstick"

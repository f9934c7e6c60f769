"""Small files of every trace format, for tests of readers: the smallest that shows each format's quirks."""

import json
from pathlib import Path
from typing import Any

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n"
LENGTHS = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
    "74,918,992,0.0806100217864923\n1100,100,1200,11.0\n290,905,1195,0.3204419889502762\n"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 9, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]},
]
BAILIAN: list[dict[str, Any]] = [
    {
        "chat_id": 0,
        "parent_chat_id": -1,
        "timestamp": 0.0,
        "input_length": 40,
        "output_length": 12,
        "type": "text",
        "turn": 1,
        "hash_ids": [0, 1, 2],
    },
    {
        "chat_id": 1,
        "parent_chat_id": 0,
        "timestamp": 9.482,
        "input_length": 67,
        "output_length": 30,
        "type": "text",
        "turn": 2,
        "hash_ids": [0, 1, 3, 4, 5],
    },
]
_BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_1 = _BURST + "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n"
BURST_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,31,2.4,ChatGPT,472,18,490,Conversation log\n"
    "45,,7.9,ChatGPT,1087,230,1317,API log\n"
    "60,31,1.0,GPT-4,500,20,520,Conversation log\n"
)


def _turn(t: float, tokens: int, ids: list[int], out: int = 5, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": ids, **more}


CONVERSATION: dict[str, Any] = {
    "id": "trace_1",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        _turn(0.0, 130, [1, 2], api_time=2.0, think_time=0.0),
        {
            "t": 9.5,
            "type": "subagent",
            "agent_id": "agent_1",
            "duration_ms": 7000,
            "status": "completed",
            "requests": [_turn(0.0, 70, [7]), _turn(3.0, 140, [7, 8], think_time=1.0)],
        },
        _turn(12.0, 200, [1, 2, 3], out=7, think_time=1.5),
    ],
    "totals": {
        "parent_tokens": {"input": 330, "output": 12},
        "subagent_tokens": {"input": 210, "output": 10},
    },
}
_GROUPS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


def _rag(timestamp: str, length: int, ids: list[list[int]], session: str) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": 9,
        "hash_ids": dict(zip(_GROUPS, ids, strict=True)),
        "session_id": session,
    }


RAG = [
    _rag("82", 30, [[0, 1], [3], [5], [], [9]], "s"),
    _rag("93", 31, [[0, 2], [3], [5], [], [9]], "s"),
    _rag("4", 30, [[0, 1], [3], [5], [], [9]], "t"),
]
RAG_TABLES: dict[str, list[dict[str, int]]] = {
    "1_sys_prompt.jsonl": [{"sys_prompt_id": n, "token_length": 5 + n} for n in range(3)],
    "2_passages.jsonl": [{"passage_id": 3, "token_length": 6}],
    "3_history.jsonl": [{"history_id": 5, "token_length": 4}],
    "4_user_input.jsonl": [{"user_input_id": 9, "token_length": 3}],
    "5_web_search.jsonl": [{"web_search_id": 8, "token_length": 7}],
}
SERVINGSIM: list[dict[str, Any]] = [
    {
        "input_toks": 4,
        "output_toks": 2,
        "arrival_time_ns": 101_537_000,
        "input_tok_ids": [5, 6, 7, 8],
        "output_tok_ids": [1, 2],
    },
    {
        "session_id": "a",
        "arrival_time_ns": 44_370_000,
        "sub_requests": [
            {
                "input_toks": 5,
                "output_toks": 2,
                "tool_duration_ns": 3_000_000,
                "input_tok_ids": [5, 6, 9, 9, 9],
                "output_tok_ids": [3, 4],
            },
            {
                "input_toks": 9,
                "output_toks": 1,
                "tool_duration_ns": 0,
                "input_tok_ids": [5, 6, 9, 9, 9, 3, 4, 8, 8],
                "output_tok_ids": [1],
            },
        ],
    },
]
SERVEGEN_TRACE = "0,2.0,1.0,Gamma,1.0,0.5\r\n600,1.0,1.0,Weibull,1.0,0.9\r\n1200,0,0,,0,0\r\n"
SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "human", "value": "hello"},
            {"from": "gpt", "value": "yes"},
            {"from": "human", "value": "and"},
            {"from": "gpt", "value": "no"},
        ],
    },
    {"id": "y", "conversations": [{"from": "human", "value": "help"}, {"from": "gpt", "value": "now"}]},
]
SIMPLE = (
    "arrival_s,prompt_tokens,output_tokens,session,prefix,prefix_tokens\n"
    "0,30,5,a,sys,20\n1.5,40,5,,sys,20\n2,50,5,a,,\n"
)
CANONICAL: list[dict[str, Any]] = [
    {
        "header": {
            "pagetwin_trace": 1,
            "name": "made",
            "format": "made",
            "source": "test",
            "key_kind": "content",
            "source_block_tokens": None,
            "clock_quantum_us": 1,
            "sha256": "00",
            "rows_read": 3,
            "rows_kept": 2,
            "dropped": {"output_zero": 1},
        }
    },
    {
        "request_id": 0,
        "arrival_us": 0,
        "prompt_tokens": 10,
        "output_tokens": 2,
        "segments": [[2**64 - 1, 6], [None, 4]],
    },
    {
        "request_id": 1,
        "arrival_us": 5,
        "prompt_tokens": 4,
        "output_tokens": 1,
        "segments": [[3, 4]],
        "parent": 0,
        "after": [0],
        "release": "after",
        "think_us": 7,
        "session": "s",
        "turn": 2,
    },
]


def jsonl(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_ragpulse(
    folder: Path, rows: list[dict[str, Any]], tables: dict[str, list[dict[str, int]]] = RAG_TABLES
) -> Path:
    """The trace file in a folder, with its tables beside it."""
    for name, records in tables.items():
        (folder / name).write_text(jsonl(records) + "\n")
    path = folder / "0_trace.jsonl"
    path.write_text(jsonl(rows) + "\n")
    return path


def write_servegen(folder: Path, trace: str = SERVEGEN_TRACE, pmf: str = "{10: 0.25, 20: 0.75}") -> Path:
    """A folder with one client."""
    (folder / "chunk-1-trace.csv").write_text(trace, newline="")
    record = {"0": {"input_tokens": pmf, "output_tokens": "{5: 1.0}"}}
    (folder / "chunk-1-dataset.json").write_text(json.dumps(record))
    return folder


CONTENTS: dict[str, str] = {
    "azure": AZURE,
    "vidur": VIDUR,
    "mooncake": jsonl(MOONCAKE),
    "burstgpt": BURST_2,
    "bailian": jsonl(BAILIAN),
    "lengths": LENGTHS,
    "lengths_chat": LENGTHS,
    "simple": SIMPLE,
    "agentic": json.dumps(CONVERSATION),
    "sharegpt": json.dumps(SHAREGPT),
    "servingsim": jsonl(SERVINGSIM),
    "pagetwin": jsonl(CANONICAL),
}
"""One file's content for each format that is one file."""

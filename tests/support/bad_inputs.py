"""Some hundred wrong command lines, made from the schema, and from small files that are wrong in one place each.

`bad_inputs(folder)` writes the files and gives the command lines. None may end in anything but a message: exit code 2,
or 1 where the answer is "no".
"""

import random
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from harness.config.checks import RANGES
from harness.config.groups import groups
from harness.config.schema import config_keys

_ROW = '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n'
_FILES = {
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "broken.jsonl": '{"arrival_s": 0, "prompt_tokens": 5',
    "array.jsonl": "[1, 2, 3]\n",
    "deep.jsonl": "[" * 100_000,
    "binary.jsonl": "\x00\x01\x02\n",
    "nan.jsonl": _ROW.replace("0,", "NaN,", 1),
    "huge.jsonl": _ROW.replace(": 5,", ": 99999999999999999999,", 1),
    "digits.jsonl": _ROW.replace(": 5,", f": {'9' * 5000},", 1),
    "negative.jsonl": _ROW.replace(": 5,", ": -5,", 1),
    "text.jsonl": _ROW.replace(": 5,", ': "five",', 1),
    "missing.jsonl": '{"arrival_s": 0, "output_tokens": 5}\n',
    "backwards.jsonl": _ROW.replace("0,", "9,", 1) + _ROW,
    "header.jsonl": '{"header": {"pagetwin_trace": 2}}\n',
    "cut.jsonl": '{"header": {"pagetwin_trace": 2, "requests": 5}}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
    "vidur.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n0,x,1\n",
    "cut.parquet": "PAR1PAR1",
    "words.csv": "a,b,c\n1,2,3\n",
}
_COMMANDS = (
    "",
    "nothing",
    "sweep cache=glob(zzz*)",
    "sweep experiment=none",
    "sweep experiment=default,block_size",
    "sweep cache=a b",
    "sweep workload.seed=range(5,1)",
    "sweep workload.seed=range(1,9,0)",
    "sweep workload.seed=range(1000000)",
    "sweep workload.seed=1,,2",
    "sweep workload.seed=interval(1,2)",
    "sweep out=a,b",
    "sweep =1",
    "sweep cache.block_size",
    "sweep workload.prefix_share=2,3,4,5",
    "run workload.seed=1,2",
    "run --nothing",
    "show nothing=1",
    "status nowhere",
    "report nowhere",
    "report nowhere --out file",
    "doctor nowhere",
    "trace",
    "trace nothing",
    "trace validate nowhere",
    "trace validate azure_conv --requests 0",
    "trace validate azure_conv --requests -1",
    "trace validate azure_conv --requests 99999999999",
    "trace validate azure_conv --seed -1",
    "trace validate azure_conv --requests 5 --vocab 0",
    "trace validate azure_conv --requests 5 --vocab 5 --first-id 10",
    "trace validate azure_conv --requests 5 --arrivals poisson --rate 0",
    "trace validate azure_conv --requests 5 --arrivals poisson --rate nan",
    "trace validate azure_conv --requests 5 --arrivals gamma --shape -1",
    "trace inspect azure_conv --requests 5 --block-sizes 0",
    "trace inspect azure_conv --requests 5 --out file",
    "trace synth azure_conv --requests 5 --out nowhere/x.jsonl",
    "trace synth azure_conv --requests 5 --out x.txt",
    "trace synth azure_conv --requests 5 --sharing system --share 2 --out x.jsonl",
    "trace synth azure_conv --requests 5 --sharing system --zipf nan --out x.jsonl",
    "trace synth azure_conv --requests 5 --sharing system --count 0 --out x.jsonl",
    "trace synth nothing --out x.jsonl",
    "trace slice azure_conv --rows 5:1 --out x.jsonl",
    "trace slice azure_conv --rows nan:5 --out x.jsonl",
    "trace slice azure_conv --time a:b --out x.jsonl",
    "trace scale azure_conv --out x.jsonl",
    "trace scale azure_conv --lengths 1e30 --out x.jsonl",
    "trace scale azure_conv --lengths 0 --out x.jsonl",
    "trace scale azure_conv --lengths nan --out x.jsonl",
    "trace scale azure_conv --to-rate 1e-300 --out x.jsonl",
    "trace scale azure_conv --to-rate 1e300 --out x.jsonl",
    "trace convert azure_conv --to mooncake --out x.parquet",
    "bench",
    "bench kernels --rounds 0",
    "gate --record nowhere.json",
    "serve --max-requests 0",
    "serve --port 99999999 model.layers=0",
)


def bad_inputs(folder: Path) -> list[tuple[str, ...]]:
    """All command lines, in a fixed order; the files that they name are written into `folder`, where they run."""
    (folder / "file").touch()
    for name, text in _FILES.items():
        (folder / name).write_text(text, encoding="latin-1")
    traces = [("trace", "validate", name) for name in _FILES]
    replays = [("run", "trace=file", f"trace.path={name}", "--dry-run") for name in _FILES]
    return [*(tuple(line.split()) for line in _COMMANDS), *traces, *replays, *_overrides()]


def sample(folder: Path, count: int, seed: int) -> list[tuple[str, ...]]:
    """`count` of them, chosen by `seed`."""
    return random.Random(seed).sample(bad_inputs(folder), count)


def _overrides() -> Iterator[tuple[str, ...]]:
    for key, values in _wrong_values():
        for value in values:
            yield ("run", "measure=false", "cost=roofline", f"{key}={value}", "--dry-run")
    for key in config_keys():
        yield ("run", f"{key}x=1", "--dry-run")
        yield ("run", f"~{key}", "--dry-run")


def _wrong_values() -> Iterator[tuple[str, list[str]]]:
    for key, known in config_keys().items():
        if known.kind in (int, float):
            allowed = RANGES[key]
            yield key, ["nan", "-inf", "word", "1e999", "[1,2]", str(10**30), str(allowed.low - 1)]
        elif known.kind is bool:
            yield key, ["maybe", "7.5"]
        elif issubclass(known.kind, StrEnum):
            yield key, ["nonsense", "[]"]
    for group in groups():
        yield group, ["nonsense"]

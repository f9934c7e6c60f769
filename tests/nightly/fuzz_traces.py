"""Coverage-guided fuzzing of every trace reader with atheris: any bytes give a trace or a TraceError.

Not collected by pytest; `make nightly` runs it. The first byte of an input chooses the format, the rest is the file.
Arguments are libFuzzer's, for example `-runs=100000 -max_total_time=600`. A crash leaves its input in `crash-*`.
"""

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

with atheris.instrument_imports(include=["traces"]):
    from traces.arrivals import ArrivalProcess
    from traces.errors import TraceError
    from traces.reading import read_trace

from trace_samples import CONTENTS

FORMATS = sorted(CONTENTS)
NO_CLOCK = ("lengths", "lengths_chat", "sharegpt")


def letters(text: str) -> list[int]:
    """A tokenizer of one token a character."""
    return [ord(letter) for letter in text]


def read_one(data: bytes) -> None:
    """Read `data` as the format that its first byte chooses; whatever is no TraceError is a finding."""
    if not data:
        return
    name = FORMATS[data[0] % len(FORMATS)]
    FILE.write_bytes(data[1:])
    arrivals = ArrivalProcess("poisson", 1.0) if name in NO_CLOCK else None
    try:
        read_trace(
            FILE,
            name,
            on_error="skip" if data[0] & 128 else "stop",
            arrivals=arrivals,
            encode=letters,
            limit=50,
        )
    except TraceError:
        return


def seed_corpus(folder: Path) -> None:
    """One good file of each format."""
    for index, name in enumerate(FORMATS):
        (folder / name).write_bytes(bytes([index]) + CONTENTS[name].encode())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        FILE, corpus = Path(scratch) / "trace.data", Path(scratch) / "corpus"
        corpus.mkdir()
        seed_corpus(corpus)
        atheris.Setup([*sys.argv, str(corpus)], read_one)
        atheris.Fuzz()

"""`serve`: answer OpenAI clients over HTTP."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.console import Arguments


_MORE = """\
The model, the pool and the limits come from the same keys as everywhere, e.g.
  python -m harness serve model.path=/models/llama cache.block_size=32 scheduler.max_running=128
A model without a tokenizer (random weights) takes and gives bytes: one token per byte."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `serve`."""
    parser = commands.add_parser(
        "serve",
        help="answer OpenAI clients: completions, chat, metrics",
        description="Serve completions and chat completions as OpenAI's API does, until Ctrl-C.",
        usage="python -m harness serve [--host H] [--port P] [--api-key KEY] [--kv-events ENDPOINT] [key=value ...]",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: this machine alone"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; default: 8000")
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="name for clients; default: the directory of model.path, or model.name",
    )
    parser.add_argument("--max-requests", type=int, default=1024, metavar="N",
                        help="requests under way at once, more get 503; default: 1024")  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", action="append", default=[],
                        help="ask clients for this key; may be given several times; default: the "
                        "environment variable PAGETWIN_API_KEY, or none")  # fmt: skip
    parser.add_argument("--kv-events", metavar="ENDPOINT",
                        help="publish changes of the prefix cache as vLLM does, e.g. tcp://*:5557; needs "
                        "pagetwin[events]; read them with `trace capture`")  # fmt: skip
    parser.add_argument("--kv-events-replay", metavar="ENDPOINT",
                        help="address that answers who missed messages, e.g. tcp://*:5558")  # fmt: skip
    parser.add_argument(
        "--kv-events-topic", metavar="TOPIC", default="", help="topic of the messages; default: ''"
    )
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Serve until stopped."""
    from harness.serve.start import serve

    return serve(arguments)

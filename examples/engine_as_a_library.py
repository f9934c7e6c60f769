"""The engine as a library: five lines from a model to its tokens.

Run it with `python examples/engine_as_a_library.py`, or with the directory of a checkpoint as its argument. Without one
the model has random weights, so that nothing is downloaded.
"""

import sys

from engine.runtime.llm import LLM, SamplingParams
from engine.runtime.models.spec import ModelSpec


def main() -> None:
    """Continue two prompts that share their first tokens: the second finds them in the prefix cache."""
    shared = list(range(10, 42))
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else ModelSpec(layers=2), max_num_seqs=8, max_model_len=256)
    llm.generate([shared], SamplingParams(max_tokens=1))
    for output in llm.generate([[*shared, 7], [*shared, 8]], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].token_ids, f"prompt tokens from the cache: {output.metrics.cached_tokens}")


if __name__ == "__main__":
    main()

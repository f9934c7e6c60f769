"""One engine in a process of its own: it starts once, then serves the requests of every line of its standard input.

`engine_matrix.py` runs this file as a script, ours in our interpreter and vLLM in the one that has it. So nothing of
PageTwin is imported at the top, and vLLM's environment needs none of our packages. The first line of the input has the
settings. Every answer has the CPU-seconds of the whole process tree: vLLM works in child processes, and a clock of its
parent alone would call it a hundred times too fast.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

WITHOUT_AMX = "PAGETWIN_VLLM_WITHOUT_AMX"  # environment variable
if os.environ.get(WITHOUT_AMX):  # what vLLM asks; the processes that it starts read this file too
    import_module("torch").cpu._is_amx_tile_supported = lambda: False

Tokens = list[list[int]]
ServeLive = Callable[[Sequence[Sequence[int]], Sequence[int]], Tokens]  # prompts, output tokens of each
Started = tuple[ServeLive, str]  # the engine, and its kernels in words


def pagetwin(settings: Mapping[str, Any]) -> Started:
    """Our engine on the checkpoint at `model`."""
    import_module("engine")  # before torch: it sets how torch's threads wait
    import torch

    from benchmarks.engines import BenchRequest, ours
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(settings["threads"])
    loaded = load_model(ModelSpec(name="bench", path=settings["model"], dtype=settings["dtype"]))
    serve = ours(
        loaded,
        block_size=settings["block_size"],
        pool_tokens=settings["pool_tokens"],
        step_tokens=settings["step_tokens"],
        model_len=settings["model_len"],
        prefix_caching=True,
    )

    def run(prompts: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tokens:
        return serve([BenchRequest(tuple(ids), count) for ids, count in zip(prompts, wanted, strict=True)])

    return run, _our_kernels(settings["dtype"])


def _our_kernels(dtype: str) -> str:
    """What computes attention and products."""
    import torch

    from engine.runtime.models.cpu_layers import c_wins, onednn_wins
    from paged_kernels.native import bf16_unit, why_unavailable
    from paged_kernels.private import has_packed_products

    if why_unavailable():
        return "attention by torch"
    if dtype == "float32":
        few = " and few rows in C" if c_wins() else ""
        return f"attention in C, products by {'oneDNN' if onednn_wins() else 'MKL and oneDNN'}{few}"
    products = "oneDNN" if has_packed_products(torch.bfloat16) else "C"
    return f"decode in C, prefill by {bf16_unit() or 'float32 in C'}, products by {products}"


def vllm(settings: Mapping[str, Any]) -> Started:
    """vLLM on the same checkpoint, with its own `options`."""
    torch: Any = import_module("torch")
    if not settings["amx"]:
        torch.cpu._is_amx_tile_supported = lambda: (
            False
        )  # what vLLM asks, in this process and those that it forks
    library: Any = import_module("vllm")
    engine = library.LLM(
        settings["model"],
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        **settings["options"],
    )

    def run(prompts: Sequence[Sequence[int]], wanted: Sequence[int]) -> Tokens:
        params = [
            library.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in wanted
        ]
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = engine.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    supported = import_module("torch").cpu._is_amx_tile_supported()
    has_amx = settings["dtype"] == "bfloat16" and supported
    return run, f"attention with{'' if has_amx else 'out'} amx"


ENGINES: Mapping[str, Callable[[Mapping[str, Any]], Started]] = {"pagetwin": pagetwin, "vllm": vllm}


def tree_seconds() -> float:
    """CPU seconds, user and system, of this process and of all processes below it, ended ones included.

    Without psutil, running child processes are not seen; callers that need them ask for psutil first.
    """
    try:
        psutil: Any = import_module("psutil")
    except ImportError:
        return sum(os.times()[:4])
    root = psutil.Process()
    return sum(_seconds(psutil, process) for process in (root, *root.children(recursive=True)))


def _seconds(psutil: Any, process: Any) -> float:
    """Seconds of a process and of its children that have ended; 0 if it has ended itself, since its parent has them."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def main() -> int:
    """Start the engine that the first line of standard input names, then answer every further line."""
    sys.path.append(str(Path(__file__).parents[1] / "harness" / "oracle"))
    driver: Any = import_module("vllm_driver")  # needs no package of ours
    engine: ServeLive | None = None

    def answer(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal engine
        if engine is None:
            engine, kernels = ENGINES[asked["engine"]](asked)
            return {"kernels": kernels}
        began, start = tree_seconds(), time.perf_counter()
        tokens = engine(asked["prompts"], asked["outputs"])
        wall = time.perf_counter() - start
        return {"cpu_s": tree_seconds() - began, "wall_s": wall, "tokens": tokens}

    return int(driver.serve(answer))


if __name__ == "__main__":
    sys.exit(main())

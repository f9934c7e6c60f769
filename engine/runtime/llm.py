"""The public interface: give `LLM` a model and prompts, and get text and tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.runtime.engine import Engine, Prompt
from engine.runtime.errors import RequestError
from engine.runtime.models.load import LoadedModel, load_model
from engine.runtime.models.spec import ModelSpec
from engine.runtime.options import EngineOptions
from engine.runtime.params import OutputKind, SamplingParams
from engine.runtime.requests import RequestOutput
from engine.runtime.text import Tokenizer, load_tokenizer


class LLM:
    """A model with a paged KV cache behind a continuous-batching scheduler.

    `model` is a checkpoint directory, a shape for random weights, or a loaded model. A `draft` model proposes tokens
    that the model verifies. Further keywords are those of `EngineOptions`. The prefix cache lives on between calls.
    """

    def __init__(
        self,
        model: str | Path | ModelSpec | LoadedModel,
        *,
        tokenizer: Tokenizer | None = None,
        draft: ModelSpec | LoadedModel | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        if isinstance(model, str | Path):
            model = ModelSpec(name=Path(model).name, path=str(model), dtype=dtype)
        if isinstance(model, ModelSpec):
            if tokenizer is None and model.path is not None and has_tokenizer(model.path):
                tokenizer = load_tokenizer(model.path)
            model = load_model(model, device=device)
        self.loaded = model
        if isinstance(draft, ModelSpec):
            draft = load_model(draft, device=device)
        self.engine = Engine(model, EngineOptions(**options), tokenizer=tokenizer, draft=draft)
        self.scheduler = self.engine.scheduler
        self.runner = self.engine.runner
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts (text, or lists of token ids), all by the same or each by its own parameters, in order.

        Raises RequestError and NeverFitsError before anything runs, and the error of a request that failed.
        """
        batch = _prompt_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"{len(each)} parameters for {len(batch)} prompts")
        names = self._submit(batch, each)
        done = {output.request_id: output for output in self.engine.run() if output.finished}
        outputs = [done[name] for name in names]
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        """Queue all or none."""
        names: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                name = f"llm-{self._next_id}"
                self.engine.add_request(name, prompt, _with_final_output(one))
                self._next_id += 1
                names.append(name)
        except Exception:
            for name in names:
                self.engine.abort(name)
            self.engine.step()
            raise
        return names


def _with_final_output(params: SamplingParams) -> SamplingParams:
    """The same parameters, told once at the end."""
    return replace(params, output_kind=OutputKind.FINAL)


def has_tokenizer(path: str) -> bool:
    """Whether a checkpoint directory brings a tokenizer."""
    folder = Path(path).expanduser()
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [one for one in prompts if isinstance(one, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    return [one for one in prompts if not isinstance(one, int)]

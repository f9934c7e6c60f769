"""The Python interface for batches: give `LLM` a model and prompts, and get text and tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.runtime.engine import Engine, Prompt
from engine.runtime.errors import PromptError, RequestError
from engine.runtime.models.load import LoadedModel, load_model
from engine.runtime.models.spec import ModelSpec, checkpoint_dtype
from engine.runtime.options import options_of
from engine.runtime.params import OutputKind, SamplingParams, is_whole
from engine.runtime.requests import RequestOutput
from engine.runtime.text import Tokenizer, chat_prompt, load_tokenizer


class LLM:
    """A model with a paged KV cache and a continuous-batching scheduler.

        llm = LLM("/models/llama")
        outputs = llm.generate(["The cat sat on"], SamplingParams(temperature=0.8, max_tokens=64))
        print(outputs[0].outputs[0].text)

    `model` is a checkpoint directory, a `ModelSpec` (random weights of a given shape), or a loaded model. `dtype` holds
    for checkpoint directories; `auto` is the checkpoint's own. Without `tokenizer`, the checkpoint's own is loaded;
    without any, prompts are lists of token ids. A `draft` model proposes tokens that the model verifies (speculative
    decoding). All other keywords are fields of `EngineOptions`, or vLLM's names for them (`options.py`). The prefix
    cache is kept between calls. Raises ModelError for a model that cannot run, EngineOptionError for an option.
    """

    def __init__(
        self,
        model: str | Path | ModelSpec | LoadedModel,
        *,
        tokenizer: Tokenizer | None = None,
        draft: ModelSpec | LoadedModel | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        engine_options = options_of(options)
        if isinstance(model, str | Path):
            if dtype == "auto":
                dtype = checkpoint_dtype(str(model))
            model = ModelSpec(name=Path(model).name, path=str(model), dtype=dtype)
        if isinstance(model, ModelSpec):
            if tokenizer is None and model.path is not None and has_tokenizer(model.path):
                tokenizer = load_tokenizer(model.path)
            model = load_model(model, device=device)
        self.loaded = model
        if isinstance(draft, ModelSpec):
            draft = load_model(draft, device=device)
        self.engine = Engine(model, engine_options, tokenizer=tokenizer, draft=draft)
        self.scheduler = self.engine.scheduler
        self.runner = self.engine.runner
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, each a text or a list of token ids. Returns one output per prompt, in the same order.

        `params` is one `SamplingParams` for all prompts, or one per prompt. Raises RequestError and NeverFitsError
        before any request runs, and the error of the first request that failed.
        """
        batch = _prompt_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"{len(each)} parameters for {len(batch)} prompts")
        ids = self._submit(batch, each)
        finished = {output.request_id: output for output in self.engine.run() if output.finished}
        outputs = [finished[request_id] for request_id in ids]
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: messages with `role` and `content`, written by the model's chat template.

        Raises TokenizerError if the template cannot write them, and what `generate` raises.
        """
        prompts = [
            chat_prompt(
                self.engine.tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                template_values=chat_template_kwargs,
            )
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, params)

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        """Queue all requests, or none if one is refused. Returns their ids."""
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                request_id = f"llm-{self._next_id}"
                final = replace(one, output_kind=OutputKind.FINAL)  # one output, at the end
                self.engine.add_request(request_id, prompt, final)
                self._next_id += 1
                ids.append(request_id)
        except Exception:
            for request_id in ids:
                self.engine.abort(request_id)
            self.engine.step()
            raise
        return ids


def has_tokenizer(path: str) -> bool:
    """Whether a checkpoint directory contains a tokenizer."""
    folder = Path(path).expanduser()
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _conversations(
    messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
) -> list[Sequence[Mapping[str, str]]]:
    """A single conversation becomes a list of one. Raises PromptError for what is none."""
    each: list[Any] = list(messages) if isinstance(messages, list | tuple) else []
    found: list[Any] = [each] if each and all(isinstance(one, Mapping) for one in each) else each
    for conversation in found or [None]:
        written = (
            isinstance(conversation, list | tuple) and conversation and all(map(_is_message, conversation))
        )
        if not written:
            raise PromptError(
                f"a conversation is a list of messages with the texts `role` and `content`, not {conversation!r}"
            )
    return found


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one prompt. Raises PromptError for anything else than prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise PromptError(f"prompts are texts or lists of token ids, not {prompts!r}")
    each: list[Any] = list(prompts)
    ids = [one for one in each if is_whole(one)]
    if ids and len(ids) == len(each):
        return [ids]
    for number, one in enumerate(each):
        if isinstance(one, bytes | Mapping) or not isinstance(one, str | Iterable):
            raise PromptError(
                f"prompt {number} is {one!r}: a prompt is a text or a list of token ids, and a list of prompts holds "
                "nothing else"
            )
    return each

"""The Python interface for batches: give `LLM` a model and prompts, and get text and tokens.

A script that was written for vLLM runs with its imports changed to this module: `BeamSearchParams`,
`StructuredOutputsParams`, `RequestOutputKind`, `TextPrompt` and `TokensPrompt` are here too. What vLLM takes and
PageTwin does not offer is refused by name.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from engine.runtime.engine import Engine, Prompt
from engine.runtime.errors import (
    EngineOptionError,
    ModelError,
    ParamsError,
    PromptError,
    RequestError,
    not_offered,
)
from engine.runtime.models.load import LoadedModel, check_backend, load_model
from engine.runtime.models.spec import ModelSpec, checkpoint_dtype
from engine.runtime.options import options_of
from engine.runtime.params import OutputKind as RequestOutputKind
from engine.runtime.params import SamplingParams, is_whole
from engine.runtime.requests import RequestOutput, bounded, encode_prompt, truncated
from engine.runtime.structured import StructuredOutputsParams
from engine.runtime.text import Tokenizer, chat_prompt, decode_ids, is_text, load_tokenizer

__all__ = [
    "LLM", "BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams",
    "TextPrompt", "TokensPrompt",
]  # fmt: skip
log = logging.getLogger(__name__)

_GENERATION = "generation_config.json"
_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
# of a repository: nothing that can hold code
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "max_new_tokens", "skip_special_tokens"),
)
_WEIGHTS = (
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    *("start_weight_update", "finish_weight_update", "start_draft_weight_update"),
    *("update_weights", "get_weight_version", "update_weight_version"),
)
_REFUSED = {
    **dict.fromkeys(("embed", "encode", "score", "classify", "reward"), "this engine generates text"),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"), "there are no workers; the model is `llm.loaded.model`"
    ),
    **dict.fromkeys(("sleep", "wake_up"), "delete the LLM to free its memory"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use torch.profiler around the calls"),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "use `AsyncEngine`"),
    **dict.fromkeys(_WEIGHTS, "weights stay as they were loaded; make another LLM"),
    **dict.fromkeys(
        ("llm_engine", "get_metrics"), "the engine is `llm.engine`, its figures `llm.engine.counters`"
    ),
    **dict.fromkeys(("release_kv_cache_memory", "reset_mm_cache"), "there is one KV pool, and no media"),
    "from_engine_args": "its fields are arguments of LLM",
    "get_world_size": "there is one process",
}


class TextPrompt(TypedDict):
    """A prompt of text. Only prompts of the same `cache_salt` find each other's blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids; `prompt` is its text, for the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompts = Prompt | TextPrompt | TokensPrompt
Params = SamplingParams | Sequence[SamplingParams]


@dataclass(slots=True)
class BeamSearchParams:
    """How `LLM.beam_search` continues a prompt, in vLLM's names."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: Sequence[int] | None = None

    def sampling(self) -> SamplingParams:
        """The parameters of the engine. Raises ParamsError."""
        if self.temperature:
            raise ParamsError("temperature", f"{self.temperature!r}: beam search takes no samples")
        if self.watermarking:
            raise ParamsError("watermarking", "True is not offered here")
        return SamplingParams(
            beam_width=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping="never",
            every_end=True,
            structured_outputs=self.structured_outputs,
            allowed_token_ids=self.allowed_token_ids,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam: the ids and the text of prompt and output, and the sum of the log-probabilities of its output."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


class LLM:
    """A model with a paged KV cache and a continuous-batching scheduler.

        llm = LLM("/models/llama")
        outputs = llm.generate(["The cat sat on"], SamplingParams(temperature=0.8, max_tokens=64))
        print(outputs[0].outputs[0].text)

    `model` is a checkpoint directory, the id of a model on the Hugging Face hub (its safetensors are fetched, or taken
    from the local cache), a `ModelSpec` (random weights of a given shape), or a loaded model. `device` `auto` is a GPU
    if there is one. `dtype` holds for checkpoints; `auto` is the checkpoint's own. Without `tokenizer` (an object, or
    the path of one), the checkpoint's own is loaded; without any, prompts are lists of token ids. A `draft` model
    proposes tokens that the model verifies (speculative decoding). Without sampling parameters a request takes those
    of the checkpoint's generation_config.json (`generation_config="vllm"`: neutral ones). All other keywords are fields
    of `EngineOptions`, or vLLM's names for them (`options.py`). The prefix cache is kept between calls.

    Raises ModelError for a model that cannot run, EngineOptionError for an option.
    """

    def __init__(
        self,
        model: str | Path | ModelSpec | LoadedModel,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        draft: ModelSpec | LoadedModel | None = None,
        device: str = "auto",
        dtype: str = "auto",
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        download_dir: str | None = None,
        hf_token: bool | str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
        spec_method: str | None = None,
        **options: Any,
    ) -> None:
        if spec_model or spec_tokens or spec_method:
            spec = {"model": spec_model, "num_speculative_tokens": spec_tokens, "method": spec_method}
            speculative_config = spec | dict(speculative_config or {})
        if speculative_config:
            draft, options["draft_tokens"] = _draft_of(speculative_config, draft)
        engine_options = options_of(options)
        hub = {"cache_dir": download_dir, "token": hf_token}
        path = None
        if isinstance(model, str | Path):
            path = checkpoint_folder(model, revision=revision, **hub)
            kind = checkpoint_dtype(path) if dtype == "auto" else _DTYPES.get(dtype, dtype)
            model = ModelSpec(name=Path(path).name, path=path, dtype=kind)
        if isinstance(model, ModelSpec):
            path = model.path
            check_backend(model, engine_options.backend, _device(device), engine_options.kv_dtype)
            model = load_model(model, device=_device(device))
        else:  # what is loaded stays where it is
            for name, asked in (("device", str(device)), ("dtype", _DTYPES.get(dtype, dtype))):
                found = str(getattr(model, name)).removeprefix("torch.")
                if asked not in ("auto", found, found.partition(":")[0]):
                    raise EngineOptionError(f"{name}: {asked}, but the model is loaded: {found}")
        if tokenizer is None and path is not None and has_tokenizer(path) and not skip_tokenizer_init:
            tokenizer = path
        elif isinstance(tokenizer, str | Path):
            tokenizer = checkpoint_folder(tokenizer, revision=tokenizer_revision, **hub)
        tokens = load_tokenizer(str(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
        self.loaded = model
        if isinstance(draft, ModelSpec):
            draft = load_model(draft, device=str(model.device))
        self.engine = Engine(model, engine_options, tokenizer=tokens, draft=draft)
        self.scheduler = self.engine.scheduler
        self.runner = self.engine.runner
        self._template = template_text(chat_template)
        self._defaults = sampling_defaults(path, generation_config) | _translated(
            override_generation_config or {}
        )
        self._next_id = 0

    def generate(
        self,
        prompts: Prompts | Sequence[Prompts],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Continue prompts. Returns one output per prompt, in the same order.

        A prompt is a text, a list of token ids, a `TextPrompt` or a `TokensPrompt`. `sampling_params` is one
        `SamplingParams` for all prompts, or one per prompt; `max_tokens` ends where the model's longest sequence ends.
        `priority` is for `scheduling_policy="priority"`. On a terminal a bar shows the progress.

        Raises RequestError and NeverFitsError before any request runs, and the error of the first that failed.
        """
        for name, value in {"lora_request": lora_request, "mm_processor_kwargs": mm_processor_kwargs}.items():
            if reason := not_offered(value, (None, {})):
                raise ParamsError(name, reason)
        batch = [_described(one, number) for number, one in enumerate(_prompt_list(prompts))]
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = _spread("sampling_params", params, len(batch))
        ids = self._submit(
            batch, each, _spread("priority", priority or 0, len(batch)), tokenization_kwargs or {}
        )
        finished: dict[str, RequestOutput] = {}
        with _progress(use_tqdm, len(batch)) as advance:
            for output in self.engine.run():
                if output.finished:
                    finished[output.request_id] = output
                    advance(1)
        outputs = [replace(finished[key], prompt=one.text) for key, one in zip(ids, batch, strict=True)]
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: messages with `role` and `content`, written by the model's chat template.

        `tools` are given to the template. Raises TokenizerError if the template cannot write the messages, and what
        `generate` raises.
        """
        if chat_template_content_format not in ("auto", "string", "openai"):
            reason = f"{chat_template_content_format!r} is not auto, string or openai"
            raise ParamsError("chat_template_content_format", reason)
        prompts = [
            chat_prompt(
                self.engine.tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                template_values=chat_template_kwargs,
                chat_template=chat_template or self._template,
                tools=tools,
                content_format=chat_template_content_format,
            )
            for conversation in _conversations(messages)
        ]
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def beam_search(
        self,
        prompts: Sequence[Prompts],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """The best `beam_width` sequences of each prompt, as vLLM 0.33 finds them.

        An end token of the model or the tokenizer ends a beam wherever it is among the beam's `2 * beam_width` best;
        the beams of `SamplingParams(beam_width=…)` are those of transformers. `concurrency_limit` is the most prompts
        at a time. Raises what `generate` raises.
        """
        if concurrency_limit is not None and (not is_whole(concurrency_limit) or concurrency_limit < 1):
            raise ParamsError("concurrency_limit", f"{concurrency_limit!r} is no whole number of at least 1")
        batch, sampling = _prompt_list(prompts), params.sampling()
        width = concurrency_limit or max(1, len(batch))
        order = _spread("priority", priority or 0, len(batch))
        outputs: list[RequestOutput] = []
        for start in range(0, len(batch), width):
            part, levels = batch[start : start + width], order[start : start + width]
            outputs += self.generate(
                part, sampling, use_tqdm=use_tqdm, priority=levels, lora_request=lora_request
            )
        return [self._beams(output, params) for output in outputs]

    def _beams(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        sequences = []
        for one in output.outputs:
            ids, text = [*output.prompt_token_ids, *one.token_ids], None
            score = one.score * float(len(one.token_ids)) ** params.length_penalty
            if self.engine.tokenizer is not None:
                text = decode_ids(self.engine.tokenizer, ids, skip=params.skip_special_tokens)
            sequences.append(BeamSearchSequence(ids, score, text, one.finish_reason, one.stop_reason))
        return BeamSearchOutput(sequences)

    def get_tokenizer(self) -> Any:
        """The tokenizer. Raises ModelError if there is none."""
        if self.engine.tokenizer is None:
            raise ModelError("there is no tokenizer: prompts are lists of token ids")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that gives none."""
        return SamplingParams(**self._defaults)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Let no later request find a block that was filled before now."""
        self.engine.reset_prefix_cache()
        return True

    def __getattr__(self, name: str) -> Any:
        reason = _REFUSED.get(name)
        raise AttributeError(f"LLM.{name}: vLLM has it, but {reason}" if reason else f"LLM has no {name!r}")

    def _submit(
        self,
        prompts: Sequence["_Described"],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        encoding: Mapping[str, Any],
    ) -> list[str]:
        """Queue all requests, or none if one is refused. Returns their ids."""
        queued: list[str] = []
        try:
            for prompt, one, priority in zip(prompts, params, priorities, strict=True):
                if not isinstance(one, SamplingParams):
                    raise RequestError(f"sampling_params are SamplingParams, not {one!r}")
                ids = prompt.ids
                if ids is None:
                    ids = encode_prompt(prompt.text or "", self.engine.tokenizer, **encoding)
                request_id = str(self._next_id)
                self.engine.add_request(
                    *(request_id, ids, self._bounded(one, ids)), priority=priority, cache_salt=prompt.salt
                )
                self._next_id += 1
                queued.append(request_id)
        except Exception:
            for request_id in queued:
                self.engine.abort(request_id)
            self.engine.step()
            raise
        return queued

    def _bounded(self, params: SamplingParams, ids: list[int]) -> SamplingParams:
        """The parameters with one output at the end, which ends where the longest sequence does."""
        params, limits = replace(params, output_kind=RequestOutputKind.FINAL), self.engine.limits
        return bounded(params, truncated(ids, params, limits), limits)


@dataclass(frozen=True, slots=True)
class _Described:
    """A prompt as it was given: its text, its ids or both, and the salt of its blocks."""

    text: str | None
    ids: list[int] | None = None
    salt: str = ""


def _described(prompt: Any, number: int) -> _Described:
    """Raises PromptError for what is no prompt."""
    if isinstance(prompt, str):
        return _Described(prompt)
    if isinstance(prompt, Mapping):
        unknown = sorted(prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"})
        unknown = [name for name in unknown if prompt[name] is not None]
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if unknown or not isinstance(text, str | None) or (text is None and ids is None):
            raise PromptError(
                f"prompt {number} is a mapping with {', '.join(map(str, prompt)) or 'nothing'}: it holds `prompt` "
                "(a text) or `prompt_token_ids`, and `cache_salt` where it has one; nothing else is offered here"
            )
        return _Described(text, None if ids is None else _ids(ids, number), prompt.get("cache_salt") or "")
    return _Described(None, _ids(prompt, number))


def _ids(values: Any, number: int) -> list[int]:
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise PromptError(
            f"prompt {number} is {values!r}: a prompt is a text, a list of token ids, or a mapping with one of them, "
            "and a list of prompts holds nothing else"
        )
    return encode_prompt(list(values), None)


def _prompt_list(prompts: Any) -> list[Any]:
    """A single prompt becomes a list of one prompt. Raises PromptError for what holds no prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise PromptError(
            f"prompts are texts, lists of token ids, or mappings with one of them, not {prompts!r}"
        )
    each: list[Any] = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return [each] if each and all(map(is_whole, each)) else each


def _spread(name: str, given: Any, count: int) -> list[Any]:
    """One value for all prompts, or one for each. Raises RequestError where their numbers differ."""
    each = list(given) if isinstance(given, Sequence) else [given]
    each = each * count if len(each) == 1 else each
    if len(each) != count:
        raise RequestError(f"{name}: {len(each)} of them for {count} prompts")
    return each


@contextmanager
def _progress(asked: bool | Callable[..., Any], prompts: int) -> Iterator[Callable[[int], Any]]:
    """A bar over the prompts: `asked` makes it, or is whether there is one. Away from a terminal there is none."""
    from tqdm.auto import tqdm

    make = asked if callable(asked) else partial(tqdm, disable=None if asked else True)
    with make(total=prompts, desc="Processed prompts") as bar:
        yield bar.update


def _device(name: str) -> str:
    import torch

    try:
        return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else str(torch.device(name))
    except RuntimeError as error:
        raise EngineOptionError(f"device: {error}") from error


def _draft_of(config: Mapping[str, Any], draft: Any) -> tuple[ModelSpec, int]:
    """The draft model and its tokens a step, from vLLM's `speculative_config`. Raises EngineOptionError."""
    known = {"model", "num_speculative_tokens", "method"}
    model, tokens = config.get("model"), config.get("num_speculative_tokens")
    if (
        config.get("method") not in (None, "draft_model")
        or config.keys() - known
        or not isinstance(model, str)
    ):
        reason = "a draft model's checkpoint (model) and num_speculative_tokens are offered, no other method"
        raise EngineOptionError(f"speculative_config: {dict(config)!r}: {reason}")
    if draft is not None or not is_whole(tokens):
        reason = "given beside draft" if draft is not None else f"num_speculative_tokens is {tokens!r}"
        raise EngineOptionError(f"speculative_config: {reason}")
    path = checkpoint_folder(model)
    return ModelSpec(name=Path(path).name, path=path, dtype=checkpoint_dtype(path)), int(str(tokens))


def checkpoint_folder(model: str | Path, **hub: Any) -> str:
    """The directory of a checkpoint: `model` itself, or the files of that id on the Hugging Face hub.

    Of a repository its safetensors, tokenizer and configurations are fetched, and nothing that can hold code. `hub` are
    arguments of `huggingface_hub.snapshot_download`. Raises ModelError.
    """
    text = str(model)
    if Path(text).expanduser().exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return text
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(text, allow_patterns=list(_FILES), **hub))
    except Exception as error:  # of the network, the cache or the hub
        raise ModelError(f"{text} is no directory, and the hub does not give it: {error}") from error


def template_text(template: str | Path | None) -> str | None:
    """A chat template, given as a text or as the path of a file. Raises ModelError."""
    if template is None or (isinstance(template, str) and ("{" in template or "\n" in template)):
        return None if template is None else str(template)
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat_template: {template}: {error}") from error


def sampling_defaults(path: str | None, source: str = "auto") -> dict[str, Any]:
    """Sampling parameters of requests that name none: those of a checkpoint's generation_config.json, as in vLLM.

    `source` `vllm` gives none, and a directory gives its own file. Raises ModelError for a file that cannot be read.
    """
    folder = Path(path or "" if source == "auto" else source).expanduser()
    if source == "vllm" or (source == "auto" and (path is None or not (folder / _GENERATION).exists())):
        return {}
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(str(folder), local_files_only=True).to_diff_dict()
        defaults = _translated({name: found[name] for name in _SAMPLING if found.get(name) is not None})
    except Exception as error:  # of the file's JSON and of its values
        raise ModelError(
            f"{folder / _GENERATION}: {error}; generation_config='vllm' leaves it out"
        ) from error
    if defaults:
        said = ", ".join(f"{name}={value}" for name, value in defaults.items())
        log.info("default sampling parameters of %s: %s", folder / _GENERATION, said)
    return defaults


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a generation configuration as fields of `SamplingParams`. Raises ParamsError for a wrong one."""
    found = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
    if wrong := sorted(found.keys() - {field.name for field in fields(SamplingParams)}):
        raise ParamsError(wrong[0], "is no sampling parameter")
    SamplingParams(**found)
    return found


def has_tokenizer(path: str) -> bool:
    """Whether a checkpoint directory contains a tokenizer."""
    folder = Path(path).expanduser()
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """A single conversation becomes a list of one. Raises PromptError for what is none."""
    each: list[Any] = list(messages) if isinstance(messages, list | tuple) else []
    found: list[Any] = [each] if each and all(isinstance(one, Mapping) for one in each) else each
    for conversation in found or [None]:
        if not isinstance(conversation, list | tuple) or not conversation:
            raise PromptError(
                f"a conversation is a list of messages with `role` and `content`, not {conversation!r}"
            )
    return [[_message(one) for one in conversation] for conversation in found]


def _message(message: Any) -> dict[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    calls = isinstance(message, Mapping) and message.get("tool_calls")
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"a message has the texts `role` and `content`, not {message!r}")
    if not is_text(content) or (content is None and not calls):
        raise PromptError(f"the content of a message is a text, or parts of type text, not {content!r}")
    return dict(message)

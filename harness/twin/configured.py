"""The configuration that simulates a deployment: its settings under our keys, a preset of its model, and its device."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.core.memory.group_layout import uniform_layout
from engine.core.options import GroupPages
from harness.config.checks import check_config
from harness.config.compose import normalise
from harness.config.errors import UserError
from harness.config.groups import groups
from harness.config.overrides import of_a_file
from harness.config.schema import ReplayMode, RunConfig
from harness.cost.roofline import FRONT_END
from harness.point.cost import check_cost
from harness.sweep.plan import idle_words, one_configuration, run_request
from harness.twin.inferred import INFERRED
from harness.twin.log import EngineLog
from harness.twin.settings import EngineSettings, with_vllm_defaults
from harness.workload.deployment import deployment_of, layer_sets, model_shape
from harness.workload.trace import traffic_of
from traces.trace import OPEN

# The name of a model on the hub, in lower case without its owner and `meta-`, and the preset that describes its shape.
PRESETS = {
    "llama-2-7b": "llama2_7b",
    "llama-3-8b": "llama3_8b",
    "llama-3-70b": "llama3_70b",
    "llama-3.1-8b": "llama31_8b",
    "llama-3.1-70b": "llama31_70b",
    "llama-3.3-70b": "llama31_70b",
    "mistral-7b-v0.3": "mistral_7b",
    "mistral-nemo": "mistral_nemo",
    "mixtral-8x7b-v0.1": "mixtral_8x7b",
    "mixtral-8x7b-instruct-v0.1": "mixtral_8x7b",
    "phi-4-mini": "phi4_mini",
    "qwen2.5-0.5b": "qwen25_05b",
    "qwen2.5-1.5b": "qwen25_15b",
    "qwen2.5-7b": "qwen25_7b",
    "qwen3-8b": "qwen3_8b",
    "qwen3-32b": "qwen3_32b",
    "qwen3-30b-a3b": "qwen3_30b_a3b",
    "gemma-2-9b": "gemma2_9b",
    "gemma-3-12b": "gemma3_12b",
    "gemma-3-27b": "gemma3_27b",
    "deepseek-v2-lite": "deepseek_v2_lite",
    "gpt-oss-20b": "gpt_oss_20b",
    "opt-13b": "opt_13b",
    "opt-66b": "opt_66b",
    "opt-175b": "opt_175b",
}
_TUNED = ("-instruct", "-chat", "-it", "-hf", "-base", "-2407", "-2507", "-thinking")  # of the same shape
# A word of a device's name as a driver gives it, and the preset that describes the device.
DEVICES = {
    "rtx pro 6000": "rtx_pro_6000",
    "rtx 4090": "rtx4090",
    "l40s": "l40s",
    "a10g": "a10g",
    "a100-sxm4-40gb": "a100_40gb",
    "a100-sxm4-80gb": "a100_80gb",
    "h100 80gb hbm3": "h100",
    "h200": "h200",
    "b200": "b200",
    "l4": "l4",
    "tesla t4": "t4",
    "rtx a6000": "rtx_a6000",
    "rtx 5090": "rtx5090",
    "rtx 5070 ti": "rtx5070ti",
}
_OTHER = r".*\b(?:laptop|max-q|nvl|d)\b"  # of slower GPUs, whose names go on
_WEIGHTS = {"fp8": "fp8", "mxfp4": "mxfp4"}
_WEIGHTS |= dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4")
UNSAID = "The log does not say whether the engine scheduled ahead of its results"
_POOL = {"cache.pool_blocks", "cache.pool_tokens"}
_ONE = "a twin has"
_SAMPLE = "model=llama3_8b, model=./mine.yaml or model.path=FOLDER"


@dataclass(frozen=True)
class Configured:
    """The configuration of a deployment, the settings with the defaults that it fills in, and what to know of it."""

    config: RunConfig
    settings: EngineSettings
    notes: tuple[str, ...]
    overrides: tuple[str, ...]  # all of it as overrides, in the order in which they apply
    replaced: Mapping[str, str] = field(default_factory=dict)  # keys that the user set otherwise than the log
    warnings: tuple[str, ...] = ()  # what is said before any figure

    def scheduled(self, ahead: bool) -> "Configured":
        """The same with asynchronous scheduling on or off."""
        scheduler = replace(self.config.scheduler, async_scheduling=ahead)
        words = (*self.overrides, f"scheduler.async_scheduling={str(ahead).lower()}")
        return replace(self, config=replace(self.config, scheduler=scheduler), overrides=words)


def configured(log: EngineLog, overrides: Sequence[str]) -> Configured:
    """Compose the configuration of a deployment; `overrides` of the user win over what its files say.

    Raises:
        UserError: model or device are not known, a setting is not simulated, or a value is not allowed.
    """
    settings = log.settings
    if settings.unmodelled:
        said = ", ".join(f"{name} = {value}" for name, value in settings.unmodelled.items())
        raise UserError(
            f"the engine ran with {said}, which changes its schedule or its memory and is not simulated: a fit would "
            "put its effect into other constants"
        )
    deployed = run_request(overrides).deployed  # a file of the user's wins as his words do
    chosen = {word.lstrip("+").partition("=")[0] for word in overrides} | deployed
    chosen |= {"device", "model"} & {key.partition(".")[0] for key in deployed}
    device = () if "device" in chosen else (f"device={_device(settings)}",)
    model = () if chosen & {"model", "model.path"} else _model(settings)
    first = one_configuration(("measure=false", *device, *model, *overrides), _ONE)
    settings = with_vllm_defaults(settings, memory_gb=first.device.memory_gb, device=first.device.name)
    settings, mixed = _of_all_layers(settings, first)
    pool = _POOL if chosen & _POOL else set()  # one key of the pool replaces the other
    logged = _own(settings, chosen | {word.partition("=")[0] for word in model})
    own = [word for word in logged if word.partition("=")[0] not in chosen | pool]
    if settings.engine == "sglang" and settings.async_scheduling is None and _AHEAD not in chosen:
        own.append(f"{_AHEAD}=true")  # its default
    own = [*of_a_file([*device, *model, *own], f"the log of {log.name}")]
    words = ("measure=false", "cost.kind=roofline" if deployed else "cost=roofline", *own, *overrides)
    config = normalise(one_configuration(words, _ONE))
    scheduler, spreads = _other_scheduler(settings)
    more = (*_given_bytes(settings, config, chosen), *_front_end(log, config, chosen))
    more += () if config.device.fitted_from else spreads
    if more:
        words += more
    asked = one_configuration(words, _ONE)
    config = _with_answers(normalise(asked), log, overrides)
    errors = check_config(config)
    if errors:
        raise UserError("\n".join(map(str, errors)))
    check_cost(deployment_of(config))
    crowded = _crowded(log, config)
    if crowded and "scheduler.max_running" not in chosen:
        raise UserError(f"{crowded}; set scheduler.max_running to that of this run")
    kept = {word.lstrip("+") for word in overrides} | set(own)
    gone = (word.partition("=") for word in logged if word not in kept)
    replaced = {key: value for key, _, value in gone}  # the log's values
    notes = [f"{crowded}, as you set them."] if crowded else []
    notes += [*_contradictions(settings, replaced, config, chosen), *_notes(settings, chosen, config)]
    idle = idle_words(overrides, asked, config)
    unheard = f"Warning: {idle}." if idle else ""
    others = (unheard, scheduler, _other_client(log, config), log.lost, _inferred(settings, replaced))
    offloaded, assumed = (words_of(settings, chosen, config) for words_of in (_offloaded, _assumed))
    slots = deployment_of(config).pool
    beside = f"Warning: {slots.note}." if _has_groups(settings) and slots.window and slots.note else ""
    warnings = *log.warnings, offloaded, *others, assumed, "" if pool else mixed, beside
    return Configured(config, settings, tuple(notes), words, replaced, tuple(filter(None, warnings)))


def _with_answers(config: RunConfig, log: EngineLog, overrides: Sequence[str]) -> RunConfig:
    """The configuration in which prompts find the answers that the log says they go on behind.

    As it is where groups of layers keep none, or where the user says so (cache.answers).
    """
    unsaid = not any(word.lstrip("+").startswith("cache.answers=") for word in overrides)
    named = unsaid and any(row.output_key is not None for row in log.workload.requests)
    answers = config.cache.answers or (named and config.cache.groups is GroupPages.off)
    return replace(config, cache=replace(config.cache, answers=answers))


# Microseconds: what logs of vLLM and SGLang behind HTTP have before the first step (3 to 8 ms), and between requests
# that are sent at once.
_FRONT_END = {"device.frontend_request_us": 5000.0, "device.frontend_turn_us": 300.0}


def _front_end(log: EngineLog, config: RunConfig, chosen: set[str]) -> tuple[str, ...]:
    """The server's front end that is assumed for a client's log, as overrides; none where something is known of it."""
    device = config.device
    known = any(getattr(device, key) for key in FRONT_END) or any(key in chosen for key in _FRONT_END)
    if log.requests.queued_s is not None or device.fitted_from is not None or known:
        return ()
    return tuple(f"{key}={value:g}" for key, value in _FRONT_END.items())


def _given_bytes(settings: EngineSettings, config: RunConfig, chosen: set[str]) -> tuple[str, ...]:
    """The pool of an engine that was told the bytes of its KV on each device, without vLLM's null block."""
    if settings.pool_bytes is None or settings.tokens_of_pool or settings.pool_blocks or chosen & _POOL:
        return ()
    shape, size = model_shape(config.model), config.cache.block_size
    page = size * shape.kv_bytes_per_token * shape.kv_share(config.device.tensor_parallel)
    return (f"cache.pool_tokens={(int(settings.pool_bytes // page) - 1) * size}",)


_AHEAD = "scheduler.async_scheduling"
# Of a logarithm: an engine whose prompts and answers take other steps than those simulated. A first token that comes a
# step sooner or later is some 40 % of a short time to first token.
_OTHER_STEPS = ("device.ttft_spread=0.4",)
_SLOW_STEPS = ("device.ttft_spread=1.0", "device.step_spread=0.7")


def _other_scheduler(settings: EngineSettings) -> tuple[str, tuple[str, ...]]:
    """What to say of an engine whose scheduler is not the simulated one, and the spread that it adds, as overrides."""
    if settings.engine == "sglang":
        said = "Warning: SGLang overlaps its steps in its own way, not simulated: first tokens may come a step off."
        return said, _OTHER_STEPS
    version = re.match(r"v?0\.([0-7])(?:\.|$)", settings.version or "")
    if settings.engine != "vllm" or not version:
        return "", ()
    said = (
        f"Warning: vLLM {settings.version} runs its first scheduler (V0), which is not simulated: prompts go before "
        "all answers, and its steps slow down with every running request by what the host does. Half of the public "
        "runs of it took 1.4 to 3.2 times the predicted time per token; the bands are wide for that."
    )
    return said, _SLOW_STEPS


def _other_client(log: EngineLog, config: RunConfig) -> str:
    """What to say where the user lets another client send the requests than that of the log; empty where not."""
    client = log.workload.header.client
    sends = traffic_of(config, client)
    if client == OPEN or (sends.client == client and sends.mode is ReplayMode.trace):
        return ""
    return "Warning: the requests are sent otherwise, as you set it (replay): another load than the measured one."


def _crowded(log: EngineLog, config: RunConfig) -> str:
    """What to say where more requests are between first and last token than may run at once; empty where not.

    Requests that touch within a hundredth of the median answer's time do not count: clocks are not that exact.
    """
    requests = log.requests
    spans = requests.last_token_s - requests.first_token_s
    margin = 0.01 * float(np.median(spans))
    begins = np.sort(requests.first_token_s[spans > 2 * margin] + margin)
    ends = np.sort(requests.last_token_s[spans > 2 * margin] - margin)
    at_once = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="right")
    most = int(at_once.max(initial=0))
    allowed = config.scheduler.max_running * config.device.data_parallel
    if most <= allowed:
        return ""
    return (
        f"the log has {most} requests between their first and their last token at once, but the settings let {allowed} "
        "run (scheduler.max_running x device.data_parallel): they are of another run, or not all times are seconds"
    )


def _own(settings: EngineSettings, chosen: set[str]) -> list[str]:
    tensor, data = settings.tensor_parallel or 1, settings.data_parallel or 1
    words = [*settings.overrides(), f"device.tensor_parallel={tensor}", f"device.data_parallel={data}"]
    if settings.expert_parallel and tensor * data > 1:
        words.append("device.expert_parallel=true")
    if settings.quantization in _WEIGHTS:
        words.append(f"model.weight_dtype={_WEIGHTS[settings.quantization]}")
    elif settings.quantization is not None and not chosen & {"model.weight_dtype", "model.path"}:
        what = f"the engine's quantization is {settings.quantization}, which does not say how wide the weights are"
        raise UserError(f"{what}; name it, as model.weight_dtype=fp8 (or int4, int8, mxfp4)")
    return words


def _has_groups(settings: EngineSettings) -> bool:
    """Whether layers that keep different things lie in groups."""
    return settings.engine == "vllm" and settings.unmapped.get("disable_hybrid_kv_cache_manager") != "True"


def _of_all_layers(settings: EngineSettings, config: RunConfig) -> tuple[EngineSettings, str]:
    """The settings with the pool in tokens of all layers, and a warning where the log does not give it.

    Beside windows and states a page of vLLM's holds one group of the layers. The tokens that it prints since 0.20 are
    no pages: they are the longest requests that there is room for, of which such layers keep a part.
    """
    shape, size = model_shape(config.model), settings.block_size or config.cache.block_size
    plain = not (shape.windowed_layers or shape.state_layers)
    if plain or not _has_groups(settings):
        return settings, ""
    if settings.pool_blocks is not None:
        page = uniform_layout(layer_sets(shape), size).groups[0].page_bytes
        tokens = settings.pool_blocks * page // shape.kv_bytes_per_token
        return replace(settings, pool_tokens=tokens, pool_blocks=None), ""
    said = settings.pool_tokens is not None and not settings.origin.get("pool_tokens", "").startswith(
        INFERRED
    )
    if not said or re.match(r"v?0\.1?\d(?:\.|$)", settings.version or ""):
        return settings, ""
    return replace(settings, pool_tokens=None), (
        f"Warning: the {settings.pool_tokens:,} tokens of the log say how many of the longest requests there is room "
        f"for, not how many pages {config.model.name} has; set cache.pool_tokens, or add the server's /metrics."
    )


def _offloaded(settings: EngineSettings, chosen: set[str], config: RunConfig) -> str:
    """What to say of KV blocks in host memory, which are not simulated unless the user says so; empty without any."""
    if not settings.host_memory_gb or "cache.tier_tokens" in chosen:
        return ""
    tokens = settings.host_memory_gb * 1e9 // deployment_of(config).pool.kv_bytes_per_token
    return (
        f"Warning: what the engine found in {settings.host_memory_gb:.3g} GB of host memory (kv_offloading_size) is "
        f"computed again here: first tokens come too late. Set cache.tier_tokens={tokens:.0f} to simulate that memory."
    )


def _contradictions(
    settings: EngineSettings, replaced: Mapping[str, str], config: RunConfig, chosen: set[str]
) -> list[str]:
    found = [
        f"{key}: the log says {value}; what you set instead is simulated." for key, value in replaced.items()
    ]
    own_model = bool(chosen & {"model", "model.path"})
    presets = {"model": preset_of(settings.model or "") if own_model else None}
    presets["device"] = preset_of_device(settings.device or "")
    for group, preset in presets.items():
        if preset is not None:
            usual = getattr(one_configuration(("measure=false", f"{group}={preset}"), _ONE), group).name
            said, ours = getattr(settings, group), getattr(config, group).name
            if usual != ours:
                found.append(f"The log says that {said} ran; {ours} is simulated, as you set it.")
    return found


def _model(settings: EngineSettings) -> tuple[str, ...]:
    """The override that chooses the model. Raises UserError where nothing is known of it."""
    name = settings.model
    if name is None:
        raise UserError(f"the log does not say which model ran; add it, as {_SAMPLE}")
    if (Path(name).expanduser() / "config.json").is_file():
        return (f"model.path={name}",)
    preset = preset_of(name)
    if preset is None:
        known = ", ".join(groups()["model"])
        raise UserError(
            f"no preset describes the model {name}; add its shape, as {_SAMPLE}. Presets: {known}"
        )
    return (f"model={preset}",)


def preset_of(name: str) -> str | None:
    """The preset of a model by its name on the hub, or None. Tuned variants have the shape of their base."""
    short = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while short not in PRESETS:
        suffix = next((one for one in _TUNED if short.endswith(one)), None)
        if suffix is None:
            return None
        short = short.removesuffix(suffix)
    found = PRESETS[short]
    return found if found in groups()["model"] else None


def preset_of_device(name: str) -> str | None:
    """The preset of a device by the name that its driver gives, or None. A GB200 is no B200, a laptop's GPU no card."""
    words = ((rf"(?<!\w){re.escape(one)}(?!\w|{_OTHER})", preset) for one, preset in DEVICES.items())
    found = next((preset for word, preset in words if re.search(word, name.lower())), None)
    return found if found in groups()["device"] else None


def _device(settings: EngineSettings) -> str:
    known = ", ".join(name for name in groups()["device"] if name != "cpu")
    if settings.device is None:
        said = "the log does not say on which device it ran"
        raise UserError(f"{said}; add device=./mine.yaml, or device= and a preset: {known}")
    found = preset_of_device(settings.device)
    if found is None:
        said = f"no preset describes the device {settings.device}"
        raise UserError(f"{said}; add device=./mine.yaml, or take the nearest of {known}")
    return found


def _inferred(settings: EngineSettings, replaced: Mapping[str, str]) -> str:
    """What to say of settings that no file names and that the log's ceilings show; empty where there are none."""
    gone = {key.rpartition(".")[2] for key in replaced}
    found = [
        f"{name} = {value} ({settings.origin[name]})"
        for name, value in settings.given().items()
        if settings.origin.get(name, "").startswith(INFERRED) and name not in gone
    ]
    return f"Not said by the log: {'; '.join(found)}." if found else ""


def _assumed(settings: EngineSettings, chosen: set[str], config: RunConfig) -> str:
    """What to say where neither log nor user give a setting of the engine; empty where they do."""
    missing = []
    for key in ("scheduler.max_running", "scheduler.max_batched_tokens", "cache.block_size"):
        group, name = key.split(".")
        if getattr(settings, name) is None and key not in chosen:
            missing.append(f"{key}={getattr(getattr(config, group), name)}")
    if not missing:
        return ""
    taken = f"PageTwin's own defaults are simulated ({', '.join(missing)})"
    return f"Warning: the log does not give the engine's settings; {taken}, and set the time to first token."


def _notes(settings: EngineSettings, chosen: set[str], config: RunConfig) -> list[str]:
    found = [f"{name} = {value}: not simulated." for name, value in settings.unmapped.items()]
    if settings.async_scheduling is None and _AHEAD not in chosen:
        how = "on" if config.scheduler.async_scheduling else "off"
        found.append(
            f"{UNSAID}; {how} is simulated. vLLM does since 0.19 unless it is told otherwise, and SGLang by default. "
            "The choice moves the time to first token: set scheduler.async_scheduling=true or false."
        )
    if config.device.frontend_request_us == _FRONT_END["device.frontend_request_us"]:
        found.append(
            "What the server does before the scheduler's queue is assumed, as its client's log begins before it: "
            f"{', '.join(f'{key}={value:g}' for key, value in _FRONT_END.items())}. A fit begins there."
        )
    if not settings.knows_pool and not chosen & _POOL:
        found.append("The log does not give the pool: it is what the device's memory has beside the weights.")
    return found

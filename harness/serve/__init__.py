"""The server: an OpenAI-compatible HTTP server in front of the engine, started from a command line.

`build_engine` makes the engine of a configuration, with its tokenizer.
"""

import argparse
import os
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.scheduling.scheduler import Scheduler
from harness.config.checks import checked
from harness.config.errors import ConfigError, UserError
from harness.config.groups import DEPLOYMENT
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.console import say
from harness.environment import SERVER, check_engine, check_installed, check_weights
from harness.sweep.plan import one_configuration
from harness.workload.deployment import PoolShape, deployment_of, model_shape
from harness.workload.scheduler import new_scheduler

if TYPE_CHECKING:
    from engine.runtime.engine import Engine
    from harness.serve.kv_events import KvEventPublisher


_GROUPS = ("model", "cache", "scheduler", "engine")
_KEYS = ("decoding.draft_tokens", "decoding.draft_place", "decoding.draft_path")


def serve(flags: argparse.Namespace, overrides: tuple[str, ...]) -> None:
    """Load the model, print the capacity of the pool, and listen until stopped. Raises UserError before loading."""
    check_installed("serve", SERVER)
    if flags.kv_events is None and flags.kv_events_topic:
        raise UserError("--kv-events-topic needs --kv-events ENDPOINT")
    if flags.max_requests < 1:
        reason = f"--max-requests is {flags.max_requests}, must be at least 1, or every request gets 503"
        raise UserError(reason)
    config = _config(overrides)
    listener = _listen(flags.host, flags.port)
    from engine.runtime.async_engine import EngineFacts, EngineThread
    from engine.runtime.errors import ModelError
    from engine.runtime.llm import sampling_defaults
    from harness.serve.apart import Apart

    try:
        defaults = sampling_defaults(config.model.path, flags.generation_config)
    except ModelError as error:
        raise ConfigError("model.path", str(error)) from error
    with Apart(
        listener,
        model=flags.model_name or served_name(config),
        root=config.model.path,
        defaults=defaults,
        # as vLLM: what a checkpoint says is for chats that ask for no number, what a folder says holds for all
        most_tokens=None if flags.generation_config in ("auto", "vllm") else defaults.get("max_tokens"),
        most_requests=flags.max_requests,
        api_keys=flags.api_key or [key for key in (os.environ.get("PAGETWIN_API_KEY"),) if key],
    ) as apart:
        engine = build_engine(config, keep_events=flags.kv_events is not None)
        publisher = _kv_events(engine, flags)
        say(str(engine.capacity))
        if defaults:
            said = ", ".join(f"{name}={value}" for name, value in defaults.items())
            say(
                f"requests that leave them out get {said} (of generation_config.json; with --generation-config vllm "
                "neutral values)"
            )
        host, port = listener.getsockname()[:2]
        listener.close()  # the other process has it
        say(f"listening on http://{host}:{port}/v1")
        with publisher or nullcontext():
            observe = publisher.observe if publisher else lambda: None
            apart.run(EngineFacts.of(engine), EngineThread(engine, observe))


def _kv_events(engine: "Engine", flags: argparse.Namespace) -> "KvEventPublisher | None":
    """The publisher that the flags ask for. Raises UserError where there is no prefix cache to report."""
    if flags.kv_events is None:
        return None
    from harness.serve.kv_events import KvEventPublisher

    manager = engine.scheduler.manager
    if not isinstance(manager, PagedManager) or manager.groups or not manager.prefix_caching:
        reason = "--kv-events: there is no prefix cache; use cache.policy=paged cache.prefix_caching=true"
        raise UserError(reason)
    return KvEventPublisher(manager, flags.kv_events, topic=flags.kv_events_topic)


def served_name(config: RunConfig) -> str:
    """The name that clients use: that of the checkpoint's directory, or of the model with random weights."""
    path = config.model.path
    return config.model.name if path is None else Path(path).expanduser().resolve().name


def _config(overrides: tuple[str, ...]) -> RunConfig:
    _check_keys(overrides)
    config = checked(one_configuration(overrides, "a server has"))
    if config.scheduler.async_scheduling:  # it would hold blocks of ended requests, and gain nothing
        reason = "true, but a server schedules a step when the one before it has ended; set it to false"
        raise ConfigError("scheduler.async_scheduling", reason)
    check_engine(config.engine)
    check_weights(model_shape(config.model).weight_bytes, config.engine)
    return config


def _check_keys(overrides: tuple[str, ...]) -> None:
    """Raise UserError for keys that have no effect on a server."""
    keys = [axis.key for axis in parse_overrides(overrides) if axis.key not in (*_KEYS, DEPLOYMENT)]
    wrong = [key for key in keys if key.split(".")[0].split("/")[0] not in _GROUPS]
    if wrong:
        raise UserError(
            f"a server has no use for {', '.join(wrong)}: requests say how they are decoded, and when they come; it "
            f"takes {', '.join(f'{group}.*' for group in _GROUPS)} and {', '.join(_KEYS)}"
        )


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a used port is reported at once."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), backlog=2048, family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}") from error


def build_engine(config: RunConfig, *, keep_events: bool = False) -> "Engine":
    """The engine of a configuration, with its tokenizer; it keeps changes of its prefix cache if asked.

    Raises ConfigError.
    """
    from engine.runtime.engine import Engine
    from engine.runtime.errors import ModelError
    from engine.runtime.llm import has_tokenizer
    from engine.runtime.options import EngineOptions
    from engine.runtime.text import ByteTokenizer, Tokenizer, load_tokenizer
    from harness.measure.engine import loaded_models

    def policy(blocks: int, limits: SchedulerLimits) -> Scheduler:
        longest = limits.max_model_len or pool.max_model_len
        shape = replace(pool, num_blocks=blocks, max_model_len=longest)
        if pool.groups is not None:  # pages in the memory of these blocks
            memory = blocks * config.cache.block_size * pool.kv_bytes_per_token
            counts = pool.groups.page_counts(memory, longest, limits.max_batched_tokens)
            counts = pool.page_counts if config.cache.pool_blocks else counts
            shape = replace(shape, num_blocks=sum(counts), page_counts=counts)
        return new_scheduler(replace(deployment, pool=shape, limits=limits), keep_events=keep_events)

    deployment = deployment_of(config)
    pool = deployment.pool
    try:
        loaded, draft = loaded_models(deployment, drafts=config.decoding.draft_tokens > 0)
        tokenizer: Tokenizer
        if config.model.path is not None and has_tokenizer(config.model.path):
            tokenizer = load_tokenizer(config.model.path)
        else:
            tokenizer = ByteTokenizer(loaded.first_token_id)
    except ModelError as error:
        raise ConfigError("model", str(error)) from error
    options = EngineOptions(
        pool_tokens=_pool_tokens(config, pool),
        block_size=config.cache.block_size if pool.groups else pool.block_size,
        groups=config.cache.groups,
        cache=config.cache.policy,
        backend=config.engine.backend,
        kv_dtype=config.model.kv_dtype,
        audit=config.engine.audit,
        audit_every=config.engine.audit_every,
        cuda_graphs=config.engine.cuda_graphs is not False,
        limits=deployment.limits,
        scheduler=policy,
        hash=config.cache.hash,
        host_blocks=config.cache.host_tokens // pool.block_size,
        draft_tokens=config.decoding.draft_tokens,
        draft_mode=config.decoding.draft_place,
    )
    try:
        return Engine(loaded, options, tokenizer=tokenizer, draft=draft)
    except ModelError as error:
        raise ConfigError("cache.groups" if pool.groups else "model", str(error)) from error


def _pool_tokens(config: RunConfig, pool: PoolShape) -> int | None:
    """The tokens whose K and V in all layers take the memory of the pool; None: what the engine finds."""
    return pool.whole_tokens if config.cache.pool_blocks else config.cache.pool_tokens

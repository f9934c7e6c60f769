"""From a command line to a listening server."""

import socket
from typing import TYPE_CHECKING

from harness.cli.parser import Arguments
from harness.cli.say import say
from harness.config.checks import check_config
from harness.config.compose import compose_config
from harness.config.errors import ConfigError, UserError
from harness.config.schema import RunConfig
from harness.plan.request import run_request
from harness.point.devices import check_engine
from harness.point.policies import limits_of
from harness.point.shapes import pool_shape

if TYPE_CHECKING:
    from engine.runtime.engine import Engine


def serve(arguments: Arguments) -> int:
    """Load the model, say how large the pool is, listen until stopped. Raises UserError before anything is loaded."""
    import uvicorn

    config = _config(arguments.overrides)
    flags = arguments.flags
    listener = _listen(flags.host, flags.port)
    engine = build_engine(config)
    from harness.serve.app import build_app

    app = build_app(engine, model=flags.model_name or config.model.name, most_requests=flags.max_requests)
    host, port = listener.getsockname()[:2]
    say(str(engine.capacity))
    say(f"listening on http://{host}:{port}/v1")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    server.run(sockets=[listener])
    return 0


def _config(overrides: tuple[str, ...]) -> RunConfig:
    request = run_request(overrides)
    several = [axis.text for axis in request.axes if len(axis.settings) > 1]
    if several:
        raise UserError(f"a server has one configuration: write one value for {', '.join(several)}")
    config = compose_config(axis.settings[0] for axis in request.axes)
    errors = check_config(config)
    if errors:
        raise UserError("\n".join(map(str, errors)))
    check_engine(config.engine)
    return config


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a taken port is known at once."""
    try:
        return socket.create_server((host, port), backlog=2048, family=_family(host))
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def build_engine(config: RunConfig) -> "Engine":
    """The engine of a configuration, with its tokenizer. Raises ConfigError."""
    from engine.runtime.engine import Engine
    from engine.runtime.errors import ModelError
    from engine.runtime.llm import has_tokenizer
    from engine.runtime.options import EngineOptions
    from engine.runtime.text import ByteTokenizer, Tokenizer, load_tokenizer
    from harness.measured.engine import loaded_model

    pool = pool_shape(config)
    try:
        loaded = loaded_model(config)
        tokenizer: Tokenizer
        if config.model.path is not None and has_tokenizer(config.model.path):
            tokenizer = load_tokenizer(config.model.path)
        else:
            tokenizer = ByteTokenizer(loaded.first_token_id)
    except ModelError as error:
        raise ConfigError("model", str(error)) from error
    options = EngineOptions(
        pool_tokens=config.cache.pool_tokens,
        block_size=pool.block_size,
        cache=str(config.cache.policy),
        prefix_caching=pool.prefix_caching,
        backend=str(config.engine.backend),
        audit=str(config.engine.audit),
        audit_every=config.engine.audit_every,
        limits=limits_of(config.scheduler, pool.max_model_len),
        host_blocks=config.cache.host_tokens // pool.block_size,
        copy_at_fork=config.cache.copy_at_fork,
    )
    return Engine(loaded, options, tokenizer=tokenizer)

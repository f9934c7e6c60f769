"""`show`: the composed configuration, and the origin of each part."""

from omegaconf import OmegaConf

from harness.cli import Arguments
from harness.config.checks import checked
from harness.config.compose import compose_config, normalise
from harness.config.errors import UserError
from harness.config.foreign import is_option_file
from harness.config.groups import EXPERIMENTS, conf_dir, default_choices, groups, list_options, purpose
from harness.config.schema import RunConfig
from harness.console import say
from harness.sweep.plan import SweepRequest, run_request


def show_command(arguments: Arguments) -> int:
    """Print the configuration as YAML. For a sweep, print its axes and the first point."""
    if arguments.flags.groups:
        for group in (*groups(), EXPERIMENTS):
            say(f"{group}")
            say(list_options(group))
        return 0
    request = run_request(arguments.overrides)
    config = checked(compose_config(axis.settings[0] for axis in request.axes))
    _say_origin(request)
    say(_pool(normalise(config)))
    say(OmegaConf.to_yaml(OmegaConf.structured(normalise(config))).rstrip())
    return 0


def _pool(config: RunConfig) -> str:
    """The size of the pool and where it comes from; or why it is not known."""
    from harness.workload.deployment import deployment_of

    try:
        pool = deployment_of(config).pool
    except UserError as error:
        return f"# pool: {error}"
    return f"# pool: {pool.num_blocks:,} blocks of {pool.block_size}, {pool.origin}"


def _say_origin(request: SweepRequest) -> None:
    say(f"# files: {conf_dir()}")
    chosen = default_choices() | {
        axis.key: axis.settings[0].value for axis in request.axes if axis.settings[0].is_group
    }
    for group, option in chosen.items():
        said = "a file of your own" if is_option_file(option) else purpose(group, option)
        say(f"# {group}={option}: {said}")
    for axis in request.axes:
        if len(axis.settings) > 1:
            say(f"# sweep over {axis.text}; shown is {axis.settings[0].text}")
    if request.deployment:
        say(f"# deployment: {request.deployment}")
    own = [axis.settings[0] for axis in request.axes if axis.key not in request.deployed]
    values = [setting.text for setting in own if not setting.is_group]
    if values:
        say(f"# set: {' '.join(values)}")

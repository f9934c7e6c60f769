"""Hydra's composition of `conf/` into a validated `RunConfig`.

Composing costs some fifty milliseconds, and only the choice of group files changes what is composed. So each tuple of
choices is composed once, and values are applied to a copy with `OmegaConf.update`, which checks their types all the
same. `tests/harness/test_config_compose.py` shows that this equals plain composition.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.errors import ConfigError
from harness.config.groups import conf_dir
from harness.config.keys import leaves
from harness.config.overrides import Setting
from harness.config.schema import RunConfig

ConfigStore.instance().store(name="schema", node=RunConfig)


def compose_config(settings: Iterable[Setting]) -> RunConfig:
    """Compose a run from group choices and values; types are checked, ranges are not (`harness.config.checks`).

    Raises:
        ConfigError: a value has the wrong type or an interpolation leads nowhere; names the key.
    """
    chosen = list(settings)
    tree = copy.deepcopy(_composed(tuple(item.text for item in chosen if item.is_group)))
    for item in chosen:
        if not item.is_group:
            _apply(tree, item)
    try:
        return cast(RunConfig, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "", str(error.msg or error).splitlines()[0]) from None


def compose_plainly(overrides: Sequence[str]) -> DictConfig:
    """Hydra's own composition of override strings, without the cache: slow, and the yardstick of the fast one."""
    with initialize_config_dir(str(conf_dir()), job_name="pagetwin", version_base="1.3"):
        return cast(DictConfig, compose("config", overrides=list(overrides)))


@lru_cache(maxsize=256)
def _composed(choices: tuple[str, ...]) -> DictConfig:
    try:
        return compose_plainly(choices)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("conf", f"cannot compose {' '.join(choices) or 'config.yaml'}: {error}") from None


def _apply(tree: DictConfig, item: Setting) -> None:
    try:
        OmegaConf.update(tree, item.key, item.value, merge=False)
    except OmegaConfBaseException:
        raise ConfigError(item.key, f"found {_found(item.value)}, must be {_expected(item)}") from None


def _expected(item: Setting) -> str:
    words = leaves()[item.key].expected
    several = isinstance(item.value, list)
    return words + " (to sweep, write the values without brackets: a,b,c)" if several else words


def _found(value: Any) -> str:
    return "null" if value is None else f"'{value}'"

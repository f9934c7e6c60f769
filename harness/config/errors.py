"""Errors in a configuration. Each message is one sentence that is printed to the user without a traceback."""


class UserError(ValueError):
    """The user's input is wrong. `str()` is the whole message, and the command line exits with 2."""


class ConfigError(UserError):
    """A setting that cannot be used.

    Args:
        key: dotted key of the setting, e.g. `cache.block_size`.
        message: what was found, what is allowed, and what to do about it.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str]]:
        """Pickle with both arguments, so that a worker process can raise it."""
        return type(self), (self.key, self.message)


class UnknownKeyError(ConfigError):
    """A key, group or group option that does not exist; the message suggests the nearest existing one."""

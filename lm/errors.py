"""What a user can mend: entry points print it as one line and exit with 1."""


class UserError(Exception):
    """A mistake or a shortage that the user can mend; the message says what, where, what to do."""


class ConfigError(UserError):
    """A configuration value that cannot be used; the message begins with its key."""


class WriteError(UserError):
    """A file that could not be written; what stood there before is as it was."""

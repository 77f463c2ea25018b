"""How a command starts, and how its errors end: one line, a non-zero exit, no stack trace.

Only mistakes that a user can mend are shortened. Everything else keeps its trace.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.corpus import DataError
from kernels import BackendError
from lm.config import ConfigError, UserError, to_config

CONF = Path(__file__).parent.parent / "conf"
USER_ERRORS = (UserError, DataError, BackendError)


def command(name: str, schema: type) -> Callable[[Callable[[Any], object]], Callable[[], None]]:
    """Make a function of a typed configuration the command of conf/`name`.yaml.

    Args:
        name: of the configuration; its schema is known to Hydra as `name`_schema.
        schema: the dataclass that the function takes.
    """

    def wrap(function: Callable[[Any], object]) -> Callable[[], None]:
        def task(node: DictConfig) -> object:
            try:
                return function(to_config(node, schema))
            except USER_ERRORS as error:
                sys.exit(f"error: {one_line(str(error))}")

        def run() -> None:
            ConfigStore.instance().store(name=f"{name}_schema", node=schema)
            # Hydra then raises its errors instead of printing them over many lines.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            try:
                refuse_options(sys.argv[1:], schema)
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task)()
            except ConfigError as error:
                sys.exit(f"error: {error}")
            except (HydraException, OmegaConfBaseException) as error:
                sys.exit(f"error: {explain(error, schema)}")
            except KeyboardInterrupt:
                sys.exit(128 + signal.SIGINT)

        return run

    return wrap


def refuse_options(arguments: Sequence[str], schema: type) -> None:
    """Raise ConfigError for an option that Hydra does not have, as other programs might."""
    _, unknown = get_args_parser().parse_known_args(arguments)
    for option in unknown:
        name = option.lstrip("-").partition("=")[0].replace("-", "_")
        hint = nearest_key(name, schema)
        raise ConfigError(
            f"{option}: unknown option; values are given as key=value, without dashes; {hint}"
        )


def explain(error: Exception, schema: type) -> str:
    """Hydra's message as one line that names the key and says what to do."""
    whole = "\n".join(_messages(error))
    if isinstance(error, OverrideParseException):
        return _explain_quoting(str(error.override))
    if found := re.search(r"Ambiguous value for argument '(.*?)'", whole):
        return _explain_quoting(found.group(1))
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={choice}: no such choice; expected one of {', '.join(error.options)}"
    if found := re.search(r"full_key: (\S+)", whole):
        key = found.group(1)
        if re.search(r"Key '.*' (is )?not in", whole):
            return f"{key}: unknown key; {nearest_key(key, schema)}"
        reason = re.search(r"(Value .*|field .*|.*cannot be .*|.*ncompatible.*)", whole)
        return f"{key}: {one_line(reason.group(1) if reason else whole)}"
    return one_line(whole)


def _messages(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__


def _explain_quoting(override: str) -> str:
    key, _, value = override.partition("=")
    return (
        f"{override}: a value with =, commas or other signs has to be quoted twice, "
        f"once for the shell: '{key}=\"{value}\"'"
    )


def nearest_key(key: str, schema: type) -> str:
    """A hint at the valid key that is most like `key`, or at those of its section."""
    known = list(keys(schema))
    section, _, name = key.rpartition(".")
    close = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in known], 1, 0.75)
    if near := [k for k in known if close and k.rpartition(".")[2] == close[0]]:
        best = difflib.get_close_matches(key, near, 1, 0.0)[0]
        return f"did you mean {best}?"
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    return f"{section or 'this command'} has {', '.join(siblings) or 'no keys'}"


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a schema."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        kind = hints[field.name]
        yield prefix + field.name
        if is_dataclass(kind) and isinstance(kind, type):
            yield from keys(kind, f"{prefix}{field.name}.")


def one_line(text: str) -> str:
    """`text` with its lines joined and its blanks folded."""
    return " ".join(text.split())

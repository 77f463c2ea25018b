"""How a command starts, and how its errors end: one line, a non-zero exit, no stack trace.

Only mistakes that a user can mend are shortened. Everything else keeps its trace. Hydra has no hook
for its messages, which spread over several lines and name its own classes, not what to do next.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import OutOfMemoryError

from data.corpus import DataError
from kernels import BackendError
from lm.config.quoting import quote
from lm.config.schema import ConfigError, UserError, to_config

CONF = Path(__file__).parents[2] / "conf"
USER_ERRORS = (UserError, DataError, BackendError)
# What Hydra takes for an override: key=value, +key=value, ++key=value, or ~key to delete.
ARGUMENT = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w./@:-]*=|~[A-Za-z_][\w./@:-]*$")
ENTRIES = r"schedule\.stages"
# OmegaConf's words for what is wrong with a value, and plainer ones.
WORDS = {
    r"[Ff]ield '.*' is not Optional": "found null, expected a value",
    r"Invalid (value|type) assigned: ": "",
    r"is not a ListConfig, list or tuple\.?": "found, expected a list as in [1,2]",
    r"Cannot convert '(\w+)' to string: .*": r"\1 found, expected a text; quote it if it is one",
    r"(\w+) is not a subclass of (\w+)\..*": r"\1 found, expected \2; give its keys one by one",
}


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
            except (MemoryError, RuntimeError) as error:
                if not isinstance(error, MemoryError | OutOfMemoryError) and (
                    "DefaultCPUAllocator" not in str(error)
                ):
                    raise
                sys.exit(
                    f"error: not enough memory: {one_line(str(error))[:200]}; use a smaller "
                    "trainer.micro_batch, model or sequence"
                )
            except OmegaConfBaseException as error:  # here, or Hydra says a line of its own
                sys.exit(f"error: {explain(error, schema)}")

        def run() -> None:
            ConfigStore.instance().store(name=f"{name}_schema", node=schema)
            # Hydra then raises its errors instead of printing them over many lines.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            # Jobs that a launcher starts by themselves import from the checkout too.
            paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if str(CONF.parent) not in paths:
                paths = [str(CONF.parent), *filter(None, paths)]
                os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            if isinstance(sys.stdout, io.TextIOWrapper):  # a path may be more than it can show
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                sys.argv[1:] = in_order(sys.argv[1:], schema)
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task)()
            except ConfigError as error:
                sys.exit(f"error: {error}")
            except (HydraException, OmegaConfBaseException) as error:
                sys.exit(f"error: {explain(error, schema)}")
            except KeyboardInterrupt:
                sys.exit(128 + signal.SIGINT)

        return run

    return wrap


def in_order(arguments: Sequence[str], schema: type) -> list[str]:
    """The arguments with options last: Hydra wants all key=value in one piece.

    Of --hydra-help nothing else is left.

    Raises:
        ConfigError: for an option that Hydra does not have or that has no place here, what is no
            key=value, or a sweep whose folder cannot be made.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --hydra-help explains the options")

    parser.error = refuse
    known, unknown = parser.parse_known_intermixed_args(arguments)
    for option in unknown:
        name = option.lstrip("-").partition("=")[0].replace("-", "_")
        hint = nearest_key(name, schema)
        raise ConfigError(
            f"{option}: unknown option; values are given as key=value, without dashes; {hint}"
        )
    for argument in known.overrides:
        if not ARGUMENT.match(argument):
            raise ConfigError(
                f"{argument}: expected key=value, without blanks around the =; a value with blanks "
                "has to be quoted for the shell, as in 'key=two words'"
            )
        key, _, value = argument.partition("=")
        several = value.startswith("[") or ("," in value and not known.multirun)
        if several and (CONF / key).is_dir():
            raise ConfigError(
                f"{argument}: expected one choice; -m with {key}=A,B runs with one after the other"
            )
    _check_options(known)
    if known.hydra_help:  # which takes no keys
        return ["--hydra-help"]
    if known.multirun:
        _check_sweep(known)
    return [*known.overrides, *(a for a in arguments if a not in known.overrides)]


def _check_options(known: Namespace) -> None:
    """Refuse options that have no place here, would run a file, or make Hydra stumble."""
    if known.config_name is not None or known.config_path is not None:
        raise ConfigError(
            "--config-name, --config-path: a command has one configuration; choose its parts, as "
            "in experiment=demo, or add a folder with more of them by --config-dir"
        )
    if known.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun: it would run whatever the file holds; give the run's keys again"
        )
    if known.resolve and not (known.cfg or known.help):
        raise ConfigError("--resolve: it goes with --cfg job; give both")
    tasks = ("run", "multirun", "cfg", "info", "shell_completion")
    given = [f"--{task.replace('_', '-')}" for task in tasks if getattr(known, task)]
    if len(given) > 1:
        raise ConfigError(f"{', '.join(given)}: each is a task of its own; give one of them")
    if known.shell_completion and not any(
        override.startswith(("install=", "uninstall=", "query=")) for override in known.overrides
    ):
        raise ConfigError("--shell-completion: expected install=bash, or another shell, with it")


def _check_sweep(known: Namespace) -> None:
    """Refuse a folder for the sweep that cannot be made."""
    for argument in known.overrides:
        key, _, value = argument.partition("=")
        if key == "runs_dir" and "," not in value:
            try:
                Path(value.strip("'\"")).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{argument}: {error.strerror}; a sweep needs a folder that it can write to"
                ) from None


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
        if merged := re.search(r"Error merging override (\S+?)(=|$)", whole, re.MULTILINE):
            key = merged.group(1)
        return f"{key}: {_reason(whole)}"
    return one_line(whole)


def _messages(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__


def _reason(whole: str) -> str:
    """What is wrong, without the places inside of OmegaConf where it was noticed."""
    lines = dict.fromkeys(line.strip() for line in whole.splitlines())
    inside = ("Error merging override", "full_key:", "reference_type=", "object_type=")
    reason = one_line(" ".join(line for line in lines if not line.startswith(inside)))
    for theirs, ours in WORDS.items():
        reason = re.sub(theirs, ours, reason)
    return reason


def _explain_quoting(override: str) -> str:
    key, _, value = override.partition("=")
    return (
        f"{override}: a value with =, commas or other signs has to be quoted twice, "
        f"once for the shell: {shlex.quote(f'{key}={quote(value)}')}"
    )


def nearest_key(key: str, schema: type) -> str:
    """A hint at the valid key that is most like `key`, or at those of its section."""
    known = list(keys(schema))
    section, _, name = key.rpartition(".")
    entry = re.match(rf"({ENTRIES})\.([^.]+)$", section)
    section = f"{entry.group(1)}.*" if entry else section
    close = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in known], 1, 0.75)
    if near := [k for k in known if close and k.rpartition(".")[2] == close[0]]:
        best = difflib.get_close_matches(key, near, 1, 0.0)[0]
        return f"did you mean {best.replace('*', entry.group(2) if entry else '<number>')}?"
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    if siblings == ["*"]:
        return f"{section} has one entry for each stage of the schedule; --cfg job shows them"
    return f"{section or 'this command'} has {', '.join(siblings) or 'no keys'}"


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a schema; * stands for the names of a table's entries."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        kind, key = hints[field.name], prefix + field.name
        yield key
        if get_origin(kind) is dict:
            kind, key = get_args(kind)[1], f"{key}.*"
            yield key
        if is_dataclass(kind) and isinstance(kind, type):
            yield from keys(kind, f"{key}.")


def one_line(text: str) -> str:
    """`text` with its lines joined and its blanks folded."""
    return " ".join(text.split())

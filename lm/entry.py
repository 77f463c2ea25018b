"""How a command starts, and how its errors end: one line, a non-zero exit, no stack trace.

Only mistakes that a user can mend are shortened. Everything else keeps its trace.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.corpus import DataError
from kernels import BackendError
from lm.config import UserError, to_config

USER_ERRORS = (UserError, DataError, BackendError)


def command(name: str, schema: type) -> Callable[[Callable[[Any], object]], Callable[[], None]]:
    """Make a function of a typed configuration the command of conf/`name`.yaml.

    Args:
        name: of the configuration; its schema is known to Hydra as `name`_schema.
        schema: the dataclass that the function takes.
    """

    def wrap(function: Callable[[Any], object]) -> Callable[[], None]:
        def task(node: DictConfig) -> object:
            return function(to_config(node, schema))

        def run() -> None:
            ConfigStore.instance().store(name=f"{name}_schema", node=schema)
            # Hydra then raises its errors instead of printing them over many lines.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            main = hydra.main(version_base="1.3", config_path="../conf", config_name=name)(task)
            try:
                main()
            except USER_ERRORS as error:
                sys.exit(f"error: {one_line(str(error))}")
            except (HydraException, OmegaConfBaseException) as error:
                sys.exit(f"error: {explain(error, schema)}")

        return run

    return wrap


def explain(error: Exception, schema: type) -> str:
    """Hydra's message as one line; an unknown key comes with the nearest valid one."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    whole = "\n".join(texts)
    if found := re.search(r"full_key: (\S+)", whole):
        key = found.group(1)
        if "not in" in whole or "Could not override" in whole:
            near = difflib.get_close_matches(key, list(keys(schema)), n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else "; --cfg job lists all keys"
            if re.search(r"Key '.*' (is )?not in", whole):
                return f"{key}: unknown key{hint}"
        reason = re.search(r"(Value .*|.*cannot be converted.*|.*Incompatible.*)", whole)
        return f"{key}: {one_line(reason.group(1) if reason else texts[-1])}"
    return one_line(texts[0])


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

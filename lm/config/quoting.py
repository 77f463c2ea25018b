"""Command-line values that are text or paths, kept as they were typed.

In Hydra's grammar blanks at the ends of a value are lost, and brackets, commas, quotes and dollar
signs have a meaning. A prompt or a file's name may hold any of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection


def literal(arguments: list[str], keys: Collection[str]) -> list[str]:
    """The arguments, those of the form key=value with one of `keys` quoted for Hydra."""
    quoted = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        quoted.append(f"{key}={quote(value)}" if equals and key in keys else argument)
    return quoted


def quote(value: str) -> str:
    r"""`value` as a quoted string of Hydra's grammar, safe from interpolation.

    Backslashes count only before a quote or an interpolation, where each of them and the sign
    itself gets one more.
    """
    value = re.sub(r"(\\*)\$\{", lambda found: found.group(1) * 2 + r"\${", value)
    value = re.sub(r'(\\*)(")', lambda found: found.group(1) * 2 + r"\"", value)
    tail = len(value) - len(value.rstrip("\\"))
    return '"' + value + "\\" * tail + '"'

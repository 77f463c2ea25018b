"""Turn a file into a smaller one with a model, and back.

python compress.py compress run=NAME input=FILE output=FILE
python compress.py decompress run=NAME input=FILE output=FILE
"""

import sys

from lm.config.command_line import command
from lm.config.command_schemas import CompressConfig
from lm.config.quoting import literal
from lm.inference.compression import compress_command


@command("compress", CompressConfig)
def main(config: CompressConfig) -> None:
    """Compress or decompress as the configuration says."""
    compress_command(config)


def named(arguments: list[str]) -> list[str]:
    """The arguments, with the word that says what to do as a value of the key action."""
    words = [
        i
        for i, word in enumerate(arguments)
        if word in ("compress", "decompress") and not arguments[max(0, i - 1)].startswith("-")
    ]
    if len(words) > 1:
        sys.exit("error: compress, decompress: found both or one twice, expected one of them")
    return [f"action={word}" if i in words else word for i, word in enumerate(arguments)]


if __name__ == "__main__":
    sys.argv[1:] = literal(named(sys.argv[1:]), {"input", "output"})
    main()

"""Turn a file into a smaller one with a model, and back.

python compress.py compress run=NAME input=FILE output=FILE
python compress.py decompress run=NAME input=FILE output=FILE
"""

import sys

from lm.arguments import literal
from lm.compress import compress_command
from lm.config_eval import CompressConfig
from lm.entry import command


@command("compress", CompressConfig)
def main(config: CompressConfig) -> None:
    """Compress or decompress as the configuration says."""
    compress_command(config)


if __name__ == "__main__":
    words = [f"action={a}" if a in ("compress", "decompress") else a for a in sys.argv[1:]]
    sys.argv[1:] = literal(words, {"input", "output"})
    main()

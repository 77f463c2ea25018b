"""Print text from a model: python sample.py run=NAME prompt="def "."""

import sys

from lm.config.command_line import command
from lm.config.command_schemas import SampleConfig
from lm.config.quoting import literal
from lm.inference.sampling import sample_command


@command("sample", SampleConfig)
def main(config: SampleConfig) -> None:
    """Sample as the configuration says."""
    sample_command(config)


if __name__ == "__main__":
    sys.argv[1:] = literal(sys.argv[1:], {"prompt", "prompt_file", "output"})
    main()

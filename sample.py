"""Print text from a model: python sample.py run=NAME prompt="def "."""

import sys

from lm.arguments import literal
from lm.config_eval import SampleConfig
from lm.entry import command
from lm.generate import sample_command


@command("sample", SampleConfig)
def main(config: SampleConfig) -> None:
    """Sample as the configuration says."""
    sample_command(config)


if __name__ == "__main__":
    sys.argv[1:] = literal(sys.argv[1:], {"prompt", "prompt_file", "output"})
    main()

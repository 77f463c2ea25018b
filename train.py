"""Train one stage, or the whole schedule: python train.py experiment=enwik8_small stage=1."""

from lm.config.command_line import command
from lm.config.schema import Config
from lm.training.run import train


@command("train", Config)
def main(config: Config) -> None:
    """Train what the configuration describes."""
    train(config)


if __name__ == "__main__":
    main()

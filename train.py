"""Train one stage, or the whole schedule: python train.py experiment=enwik8_small stage=1."""

from lm.config import Config
from lm.entry import command
from lm.run import train


@command("train", Config)
def main(config: Config) -> None:
    """Train what the configuration describes."""
    train(config)


if __name__ == "__main__":
    main()

"""Score a model: python eval.py run=NAME (or ckpt=PATH); docs/evaluation.md explains it."""

from lm.config.command_line import command
from lm.config.command_schemas import EvalConfig
from lm.measuring.evaluation import evaluate_command


@command("eval", EvalConfig)
def main(config: EvalConfig) -> None:
    """Evaluate as the configuration says."""
    evaluate_command(config)


if __name__ == "__main__":
    main()

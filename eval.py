"""Score a model: python eval.py run=NAME (or ckpt=PATH); docs/evaluation.md explains it."""

from lm.config_eval import EvalConfig
from lm.entry import command
from lm.measure import evaluate_command


@command("eval", EvalConfig)
def main(config: EvalConfig) -> None:
    """Evaluate as the configuration says."""
    evaluate_command(config)


if __name__ == "__main__":
    main()

"""The command `python -m lm.plan`."""

from lm.plan.planner import main

if __name__ == "__main__":
    main()

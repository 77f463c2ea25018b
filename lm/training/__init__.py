"""Training: the staged run, a step, what happens between two steps, and how a run ends.

Start with `run`, then `stage` (Lightning's Trainer) and `module` (a step).
"""

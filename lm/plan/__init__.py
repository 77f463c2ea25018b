"""What a run will cost before it starts (`python -m lm.plan`), and how good the estimates are."""

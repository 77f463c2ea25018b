"""The model, how it is trained, and how it is measured."""

"""Configuration: the schemas of the commands, their checks, and the command line.

Start with `schema` (train.py) and `command_schemas` (eval.py, sample.py, compress.py).
`command_line` makes a function a command and turns a user's mistakes into one line.
"""

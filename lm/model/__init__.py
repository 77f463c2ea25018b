"""The language model, and what runs it piece by piece or one character at a time.

Start with `language_model`. `stream` holds the bounded cache, `checkpoint` the file of weights.
"""

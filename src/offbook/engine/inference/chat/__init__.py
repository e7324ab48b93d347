"""Converts chat requests to prompt tokens and grammars, and sampled tokens to answers."""

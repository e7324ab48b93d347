"""From chat messages to prompt tokens, and from sampled tokens to an answer."""

"""Copies of checkpoints at another place: `offbook serve --mirror`, `offbook push` and `offbook pull`."""

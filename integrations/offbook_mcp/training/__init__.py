"""Training on a server's tools: the curriculum, the trainer, the comparison, and the commands."""

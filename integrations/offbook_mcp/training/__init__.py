"""Training on a server's tools: the agent loop, the rewards and the trainer."""

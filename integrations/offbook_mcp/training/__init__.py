"""Training on a server's tools: the agent loop, the rewards, the curriculum and the trainer."""

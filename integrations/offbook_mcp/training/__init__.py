"""Training on a server's tools: rollouts, rewards from execution, the curriculum, the trainer and its commands."""

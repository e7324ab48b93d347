"""Training on the tools of a server: rollouts, rewards from execution, a curriculum, the trainer and its commands."""

"""The memory plan: the GPU memory that sampling and training with a base need, computed from its config.json. No
torch."""

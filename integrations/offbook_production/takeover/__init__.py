"""A small model takes over from the paid one behind the gateway, stage by stage and by evidence, and goes back."""

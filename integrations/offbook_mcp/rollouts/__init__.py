"""One rollout of a scenario: the agent loop, the episode that it leaves, and its reward from execution."""

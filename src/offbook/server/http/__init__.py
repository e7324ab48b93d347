"""The server's HTTP API: OpenAI's endpoints, trajectories, training, and access control."""

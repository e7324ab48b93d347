"""The server's routes: OpenAI's API, trajectories, training, and who may call them."""

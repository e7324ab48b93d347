"""A trained model with the server's tools outside of training: the endpoint of `mcp serve`, and conversations."""

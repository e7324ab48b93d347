"""The client of the inference engine, and the engine's process."""

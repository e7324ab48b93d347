"""The client of the inference engine, and the supervision of the engine's process."""

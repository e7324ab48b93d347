"""vLLM as the sampler: its command line, and a plugin inside its processes."""

"""vLLM as the sampler: its command line, a plugin for its processes, and a reasoning parser."""

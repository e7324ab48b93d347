"""The GRPO engine: the sampler and learner processes. Only `engine.protocol` may be imported from outside."""

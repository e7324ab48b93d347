"""Trace sinks for W&B, MLflow, OpenTelemetry, TensorBoard and Langfuse: they show finished rollouts and steps in these tools."""

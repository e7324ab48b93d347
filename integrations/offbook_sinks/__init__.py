"""Trace sinks for W&B, MLflow, OpenTelemetry and TensorBoard: they show finished rollouts and steps in these tools."""

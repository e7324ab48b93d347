"""Trace sinks: where finished rollouts and steps are shown."""

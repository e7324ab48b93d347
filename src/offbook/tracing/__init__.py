"""Trace sinks, which show finished rollouts and steps in other tools."""

"""The gateway before a paid model: calls of an app pass through to it, and are counted and recorded as configured."""

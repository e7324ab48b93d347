"""Scenarios: any mapping, dataclass, pydantic object or string; loaded and named."""

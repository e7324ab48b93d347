"""Scenarios: any mapping, dataclass, pydantic object or string; loaded, named and put in order."""

"""Scenarios for the tools of a server: generated, validated by execution, split, saved."""

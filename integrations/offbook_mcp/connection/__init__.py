"""Targets, transports, and sessions with MCP servers."""

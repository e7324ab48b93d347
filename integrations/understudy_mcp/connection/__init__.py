"""Targets, and the sessions with their servers: started, pooled, bounded, ended."""

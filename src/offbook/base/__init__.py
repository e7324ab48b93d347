"""Nouns, options, errors, and what client and server say to each other. Imports no other room."""

"""The server: it samples, records calls and trains. Nothing here imports torch."""

"""`offbook quickstart`: train a LangGraph agent that answers from a SQLite database."""

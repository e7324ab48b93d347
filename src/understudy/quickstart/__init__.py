"""`understudy quickstart`: a LangGraph agent over a real database, trained on this machine in minutes."""

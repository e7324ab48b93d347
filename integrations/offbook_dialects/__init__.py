"""The APIs that the server speaks beside chat completions: Responses, Messages, Gemini, and completions of a prompt."""

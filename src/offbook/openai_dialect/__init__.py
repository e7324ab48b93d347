"""OpenAI's chat completions as every server here speaks them: fields of a request, answers, chunks, errors, lists of models.

Plain shapes: no server, no engine. Another dialect gets a room of its own; the framing of events is in `base`.
"""

"""OpenAI's chat completions as every server here speaks them: fields of a request, answers, chunks, errors, lists of models."""

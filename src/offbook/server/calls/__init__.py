"""Chat completions: parse the request, sample, record the call, respond."""

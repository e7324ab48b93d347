"""Other APIs than chat completions, each a module of its name, with its fields, items and answers beside
it: a request becomes the body of a chat completion, its answer the API's own.

The call is sampled and recorded as a chat completion is. The record keeps the sampled text, which restores what clients send
back in another form.
"""

"""From logprobs to the updated adapter: losses, gradients, optimizer. Imports `rows` and `targets`."""

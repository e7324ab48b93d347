"""The policy: the base, its adapter and its kernels, and the logprobs of rows under it. Imports `rows` and `targets`."""

"""Any program as a rollout: its environment, its supervisor, its reward."""
